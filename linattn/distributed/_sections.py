"""A rank cuts its own tokens into sections, as a row is cut over ranks.

A walk from chunk to chunk takes a block of a GPU for a head and 64 or 128 value columns, so that
few heads leave processors without work. A rank that makes a map walks over its tokens anyway. It
makes the maps of all sections at once, and from these the rank's map. When the state before its
tokens arrives, the states before its sections follow from it. Then the call goes over the sections
as over packed sequences. Backward the gradients of the states behind the sections come in the same
way, from right to left. The last rank makes maps while it waits for those of the others, and so
does the first one backward. docs/decisions/0066 has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from linattn.distributed._calls import Call, States
from linattn.distributed._exchange import applied, wide

__all__ = ["Sections", "gradients_along", "lengths_of", "states_along", "whole_map"]

DEVICES = ("cuda",)
HEADS = 128  # of all sections: so many blocks keep an H200 busy
LONG = 1 << 15  # tokens: scratch is bounded, so of longer sections a GPU takes few heads at a time
MOST = 32
WORK = 1 << 21  # tokens times heads: of fewer the host takes longer for the folds than a GPU gains
TOKENS = {"dplr": 4, "pair": 2}  # a token counts as so many, by its work and its scratch
CHUNK = 64  # a section has whole chunks, so that its tokens are grouped as in one call


class Sections(NamedTuple):
    lengths: tuple[int, ...]
    edges: Tensor  # as packed sequences

    @classmethod
    def of(cls, call: Call) -> Sections:
        """Of a call that has them."""
        lengths = lengths_of(call)
        edges = torch.arange(len(lengths) + 1, device=call.like.device) * lengths[0]
        return cls(lengths, edges.clamp_(max=call.T))

    def maps(self, call: Call, arrays: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """X [P,rows,K,V] and M [P,rows,...] of all sections, in float64."""
        X, M = call.maps_of_sections(arrays, self.lengths, self.edges)
        count = len(self.lengths)
        X = wide(X).unflatten(0, (count, -1))
        return X, None if M is None else wide(M).unflatten(0, (count, -1))

    def gradients(
        self, call: Call, do: Tensor, arrays: Mapping[str, Tensor], d_last: States
    ) -> Tensor:
        """The gradient of the state before each section as if nothing came after it but d_last, the
        gradient of the last state: [P,rows,K,V] in float64."""
        count = len(self.lengths)
        ends = tuple(torch.cat([x.new_zeros(count - 1, *x.shape[1:]), x]) for x in d_last)
        found = call.d_initial_states(do, arrays, ends, self.edges)
        return wide(call.as_rows(found)).unflatten(0, (count, -1))


def lengths_of(call: Call) -> tuple[int, ...]:
    """The lengths of a rank's sections. All but the last one are equal. With one nothing is cut."""
    heads, kind = call.busy, call.kind
    if not call.has_sections or call.like.device.type not in DEVICES or not heads:
        return (call.T,)
    whole = math.lcm(CHUNK, call.options.get("batch", 1))
    words = () if kind is None else (kind.rule, kind.decay)
    tokens = call.T * call.writes * max(TOKENS.get(x, 1) for x in ("", *words))
    count = min(max(HEADS // heads, -(-tokens // LONG)), MOST)
    if count < 2 or call.T <= whole or tokens * heads < WORK:
        return (call.T,)
    length = -(-call.T // (count * whole)) * whole
    count = -(-call.T // length)
    return (*[length] * (count - 1), call.T - (count - 1) * length)


def _of(M: Tensor | None, i: int) -> Tensor | None:
    return None if M is None else M[i]


def states_along(X: Tensor, M: Tensor | None, S: Tensor) -> list[Tensor]:
    """S [rows,K,V] before the sections -> the states before each of them, and after the last."""
    states = [wide(S)]
    for i in range(len(X)):
        states.append(applied(X[i], _of(M, i), states[-1]))
    return states


def whole_map(X: Tensor, M: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Of all sections together."""
    one, product = X[0], _of(M, 0)
    for i in range(1, len(X)):
        one = applied(X[i], _of(M, i), one)
        if M is not None and product is not None:
            product = M[i] @ product if M.dim() == 4 else M[i] * product
    return one, product


def gradients_along(E: Tensor, M: Tensor | None, G: Tensor) -> list[Tensor]:
    """G [rows,K,V], what other ranks add to the gradient of the last state -> the gradients of the
    states before each section, from the first one on."""
    found = [G]
    for i in reversed(range(len(E))):
        found.append(applied(E[i], _of(M, i), found[-1], adjoint=True))
    return found[:0:-1]
