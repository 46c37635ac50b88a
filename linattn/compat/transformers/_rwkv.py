"""RWKV-4's attention, as the layers of transformers call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn.features import is_recorded
from linattn.ops.simple_gla import simple_gla
from linattn.scans import selective_scan

__all__ = ["rwkv_linear_attention"]


def _read(sums: Tensor, before: Tensor, k: Tensor, v: Tensor, time_first: Tensor) -> Tensor:
    """The sums before a token [..,D,2] in units of exp(before), and the token itself."""
    ahead = k + time_first - before
    # the smaller of the two in units of the larger one; abs has no gradient at 0
    less = torch.exp(torch.where(ahead > 0, -ahead, ahead))
    past, now = torch.where(ahead > 0, less, 1), torch.where(ahead > 0, 1, less)
    return (past * sums[..., 0] + now * v) / (past * sums[..., 1] + now)


def _one_token(
    decay: Tensor, first: Tensor, k: Tensor, v: Tensor, state: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    a, b, unit = state
    own, fallen = k + first, unit + decay
    most = torch.maximum(unit, own).detach()  # y does not depend on it
    past, now = torch.exp(unit - most), torch.exp(own - most)
    y = torch.addcmul(now * v, past, a) / torch.addcmul(now, past, b)
    after = torch.maximum(fallen, k)
    past, now = torch.exp(fallen - after), torch.exp(k - after)
    return y, [torch.addcmul(now * v, past, a), torch.addcmul(now, past, b), after]


def rwkv_linear_attention(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: Any = None,
    return_state: bool = False,
) -> tuple[Tensor, Any]:
    """The WKV operator of RWKV-4, an average of all values so far, by a scan.

    ::

        a <- exp(-exp(time_decay)) a + exp(k) v,   b the same without v
        y = (a + exp(time_first + k) v) / (b + exp(time_first + k)), a and b of the token before

    key, value [B,T,D], time_decay, time_first [D]. Returns y [B,T,D], and [a, b, m], each [B,D] and
    float32 (float64 for float64 keys): a and b in units of exp(m), the running maximum of the
    exponents. By :func:`linattn.selective_scan`, and where PyTorch records the call by
    :func:`linattn.simple_gla`.

    Examples
    --------
    >>> import torch
    >>> from linattn.compat.transformers import rwkv_linear_attention
    >>> k, v, w = torch.rand(1, 10, 6), torch.rand(1, 10, 6), torch.zeros(6)
    >>> y, (a, b, m) = rwkv_linear_attention(w, w, k, v, return_state=True)
    >>> tuple(y.shape), tuple(m.shape), torch.allclose(y[:, 0], v[:, 0])
    ((1, 10, 6), (1, 6), True)
    """
    real = torch.float64 if key.dtype == torch.float64 else torch.float32
    k, v = key.to(real), value.to(real)
    decay, first = -torch.exp(time_decay.to(real)), time_first.to(real)
    B, T, D = k.shape
    if state is None:
        before = [k.new_zeros(B, D), k.new_zeros(B, D), k.new_full((B, D), -1e38)]
    else:
        before = [x.to(real) for x in state]
    y, after = v, before
    if T == 1:
        y, after = _one_token(decay, first, k[:, 0], v[:, 0], before)
        y = y[:, None]
    elif T > 1:
        y, sums, unit = _tokens(decay, first, k, v, torch.stack(before[:2], -1), before[2])
        after = [sums[..., 0], sums[..., 1], unit]
    return y.to(value.dtype), after if return_state or state is not None else state


def _tokens(
    decay: Tensor, first: Tensor, k: Tensor, v: Tensor, sums: Tensor, unit: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # The maxima are held, since y does not depend on them. They are in float64, as those of mlstm
    # are: their rounding would be an error of each decay.
    keys, falls, unit = k.detach().double(), decay.detach().double(), unit.double()
    fallen = falls * torch.arange(k.shape[1], dtype=torch.float64, device=k.device)[:, None]
    begin = torch.maximum(unit + falls, keys[:, 0])[:, None]
    after = torch.cummax(torch.cat([begin, keys[:, 1:]], 1) - fallen, 1).values + fallen
    before = torch.cat([unit[:, None], after[:, :-1]], 1)
    # differences in float64, with the gradients of k and of the decay; exp(-1e4) is 0
    weight = torch.exp((keys - after).to(k.dtype) + (k - k.detach()))
    g = (falls + before - after).clamp(-1e4, 0).to(k.dtype) + (decay - decay.detach())
    recorded = any(map(is_recorded, (k, v, decay, sums))) or torch.compiler.is_compiling()
    scan = _by_heads if recorded else _by_channels
    all_sums, last = scan(weight * v, weight, g, sums)
    past = torch.cat([sums[:, None], all_sums[:, :-1]], 1)
    return _read(past, before.to(k.dtype), k, v, first), last, after[:, -1].to(k.dtype)


def _by_channels(a: Tensor, b: Tensor, g: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """h <- exp(g) h + x for a and b side by side. A selective scan multiplies what it writes by
    delta, which is -g here, and at least a number that makes no decay."""
    delta = (-g).clamp(min=1e-30)
    B, T, D = a.shape
    one = a.new_ones(B, T, 1)
    h, last = selective_scan(
        torch.cat([a / delta, b / delta], 2),
        torch.cat([delta, delta], 2),
        a.new_full((2 * D, 1), -1),
        one,
        one,
        initial_state=sums.transpose(1, 2).reshape(B, 2 * D, 1),
        output_final_state=True,
    )
    return (
        h.reshape(B, T, 2, D).transpose(2, 3),
        last.reshape(B, 2, D).transpose(1, 2),
    )


def _by_heads(a: Tensor, b: Tensor, g: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The same where PyTorch records it: the gradient of delta would be a difference of two large
    numbers. A channel is a head with one key, whose values are a and b."""
    one = torch.ones_like(a)[..., None]
    h, last = simple_gla(
        one,
        one,
        torch.stack([a, b], -1),
        g,
        scale=1,
        initial_state=sums[:, :, None],
        output_final_state=True,
    )
    return h, last[:, :, 0]
