"""The part of the gradients of keys and values that comes from a final state without a decay.

A backward pass is linear in the gradients of o and of the final state. So a rank whose first pass
had none of the second kind need not run again when it arrives. Was S = sum phi(k) v' and
z = sum phi(k): the gradient of v is dS' phi(k), and that of phi(k) is dS v + dz.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from linattn import _linattn
from linattn._by_pytorch import MAPS, SLOPES
from linattn.distributed._calls import Call, Derivatives, States
from linattn.features import core_features

__all__ = ["add_later", "can_add"]

ONES = 8  # columns of 1 beside v, which dz is multiplied by: rows stay aligned
SHORT = ("cuda",)  # where products of bfloat16 arrays are those of bfloat16 numbers
TOKENS = 1 << 15  # at once, which bounds the memory of phi(k) and its gradient


def can_add(call: Call) -> bool:
    """May add_later take a causal call that has no gradient of its initial state alone?

    It takes a normalised one, whose states are sums of products of keys and values. In float16 such
    numbers may be too large. The adjoint of an l2 norm would take as many passes over memory as the
    call takes once more.
    """
    if "mask" in call.names or call.options["qk_l2norm"]:
        return False
    return call.like.dtype != torch.float16


def add_later(call: Call, found: Derivatives, arrays: dict[str, Tensor], d_states: States) -> None:
    """Add to the gradients of a normalised call what d_states [B,HV,K,V] and [B,HV,K] bring."""
    options = [call.options[x] for x in ("feature_map", "normalize", "eps", "causal")]
    *_, features = core_features(*options)
    phi, slope, eps = MAPS[features[2]], SLOPES[features[2]], features[3]
    like = call.like
    if _by_kernel(int(features[2]), eps, found.arrays, arrays, d_states):
        return
    short = like.dtype if like.dtype == torch.bfloat16 and like.device.type in SHORT else call.real
    dS, dz = d_states
    both = torch.cat([dS, torch.nn.functional.pad(dz[..., None], (0, ONES - 1))], -1)
    high = both.to(short)
    low = (both - high).to(short)
    H, V = arrays["k"].shape[2], call.o_shape[-1]
    for first in range(0, call.T, TOKENS):
        for n in range(call.B):
            at = n, slice(first, first + TOKENS)
            # [heads,T,.], views of the rows
            k, v = (arrays[x][at].transpose(0, 1) for x in ("k", "v"))
            dk, dv = (found.arrays[x][at].transpose(0, 1) for x in ("k", "v"))
            group, mapped = len(v) // H, phi(k.to(short), eps)
            spread = mapped if group == 1 else mapped.repeat_interleave(group, 0)
            factor = high[n, ..., :V]
            if dv.dtype == short:
                dv.baddbmm_(spread, factor)
            else:
                dv += spread @ factor
            # dS v and dz are of either sign. Their sum may be much smaller than each of them.
            values = torch.nn.functional.pad(v.to(short), (0, ONES), value=1)
            d_mapped = torch.baddbmm(values @ low[n].mT, values, high[n].mT)
            d_mapped = d_mapped if group == 1 else d_mapped.unflatten(0, (H, group)).sum(1)
            if dk.dtype == short:
                dk.addcmul_(slope(k, mapped), d_mapped)
            else:
                dk += slope(k.to(short), mapped) * d_mapped


def _by_kernel(
    map_: int,
    eps: float,
    d: Mapping[str, Tensor | None],
    arrays: Mapping[str, Tensor],
    d_states: States,
) -> bool:
    """csrc/late.h: a GPU's kernel reads all arrays once, in bfloat16 with heads of 128 at most."""
    return _linattn.late(map_, eps, arrays["k"], arrays["v"], d["k"], d["v"], *d_states)
