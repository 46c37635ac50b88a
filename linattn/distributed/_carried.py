"""mlstm and mamba3 on tokens that ranks share.

Both are simple_gla of other arrays, whose state travels as that of any op. A token of theirs needs
more of the tokens before it than this state: mlstm a running maximum, mamba3 an angle and the last
row. Each rank tells the others these numbers at the end of its last sequence, and puts together
those that come from its left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from linattn.composed.mamba3 import _Problem as Mamba3Problem
from linattn.composed.mlstm import _Problem as MLSTMProblem
from linattn.distributed._context import Context
from linattn.distributed._exchange import told

__all__ = ["CARRIED"]

# An op of arrays that this rank has, in the context that the ranks agreed on
Run = Callable[[str, dict[str, Any], Context], tuple[Tensor, Any]]


class _FromTheLeft:
    """The numbers that come to this rank's first part of a sequence from the ranks before.

    Numbers of parts are [parts,...]: of parts of packed sequences, or of the rows of a batch. Those
    that travel are of one part, or of all rows.
    """

    def __init__(self, context: Context, arrays: list[Tensor]) -> None:
        self.context, self.share, self.arrays = context, context.share, arrays
        self.is_packed = context.edges is not None
        #: Does a sequence lie on two ranks? All ranks know.
        self.is_needed = any(share.joins for share in context.shares)

    def at_end(self, x: Tensor) -> Tensor:
        """Of the last part. The numbers of a rank without parts are not sent: any will do."""
        if not self.is_packed:
            return x
        return x[-1:] if len(x) else x.new_zeros(1, *x.shape[1:])

    def put_together(
        self, at_end: Tensor, passing: Callable[[Tensor, Tensor, int], Tensor]
    ) -> Tensor:
        """Each rank's numbers `at_end` -> those at the end of the rank before this one.

        passing(x, numbers, rank): the same numbers after a rank that the sequence passes, where x
        are those before it. All ranks call this, and all of them take part in the backward pass:
        so a rank's numbers depend on its arrays, by a sum of none of their numbers at least, and
        its results on what it was told, though it may have no use for it.
        """
        for x in self.arrays:
            at_end = at_end + x.flatten()[:0].sum().to(at_end.dtype)
        every = told(self.context, at_end)
        found = None
        for rank in range(self.context.rank):
            numbers = every[rank]
            if numbers is not None:
                passes = self.context.shares[rank].passes
                found = numbers if found is None or not passes else passing(found, numbers, rank)
        return next(x for x in every if x is not None) if found is None else found

    def placed(self, x: Tensor, own: Tensor) -> Tensor:
        """x for the part that goes on from the left, and its own numbers for each other part."""
        joins = torch.zeros(len(own), dtype=torch.bool, device=own.device)
        if self.share.joins:
            joins[slice(0, 1) if self.is_packed else slice(None)] = True
        return torch.where(joins.reshape(-1, *[1] * (own.dim() - 1)), x, own)


def _recorded(given: dict[str, Any], states: Any) -> list[Tensor]:
    every = (*given.values(), *(states or ()))
    return [x for x in every if isinstance(x, Tensor) and x.requires_grad]


def _maximum_before(p: MLSTMProblem, left: _FromTheLeft) -> Tensor:
    """m before the first token of each part.

    The tokens of a rank turn m into max(a + m, b). Where the sequence begins on the rank, a is
    -inf.
    """
    p.read_gates()
    own: Tensor = p.first_m()
    if not left.is_needed:
        return own
    none = torch.full_like(own, -math.inf)
    if left.share.passes:
        a, m = p.log_f.sum(1), p.rows.last(p.maxima(none), none)
        a = a if p.eps else a.detach()
    else:
        a, m = none, p.rows.last(p.maxima(own), own)
    at_end = torch.stack([left.at_end(a), left.at_end(m)], -1)

    def passing(x: Tensor, numbers: Tensor, rank: int) -> Tensor:
        a, b = numbers.unbind(-1)
        return torch.stack([a, torch.maximum(a + x[..., 1], b)], -1)

    return left.placed(left.put_together(at_end, passing)[..., 1], own)


def _shared_mlstm(given: dict[str, Any], states: Any, context: Context, run: Run) -> Any:
    q, k, v, i, f = (given[x] for x in ("q", "k", "v", "i", "f"))
    p = MLSTMProblem(q, k, v, i, f, eps=given["eps"])
    p.sequences(context.on(p.q.device))
    p.state("initial_state", states, "N")
    recorded = _recorded(given, states) if given["eps"] else []  # else m has no gradient
    p.compute(_maximum_before(p, _FromTheLeft(context, recorded)))
    options = {x: given[x] for x in ("scale", "mode", "chunk_size", "allow_tf32")}
    return p.results(*run("simple_gla", p.arguments() | options, context))


def _turned_before(p: Mamba3Problem, left: _FromTheLeft) -> None:
    """The angles before the first token of each part. The tokens of a rank add theirs."""
    rows = p.rows
    angle: Tensor = p.before.angle
    sums = rows.last(rows.sums(p.rate()), torch.zeros_like(angle))
    if not left.share.passes:
        sums = sums + angle

    def passing(x: Tensor, numbers: Tensor, rank: int) -> Tensor:
        return x + numbers

    x = p.within_a_turn(left.put_together(left.at_end(sums), passing))
    p.before = p.before._replace(angle=left.placed(x, angle))


def _row_before(p: Mamba3Problem, left: _FromTheLeft) -> None:
    """The last row before each part, and how much of it was written as its own. A rank with tokens
    puts its last row in the place of the one before."""
    own, k, v = p.last_write()
    at_end = torch.cat([left.at_end(x) for x in (own[..., None], k, v)], -1)

    def passing(x: Tensor, numbers: Tensor, rank: int) -> Tensor:
        return numbers if left.context.lengths[rank] else x

    x = left.put_together(at_end, passing)
    own, k, v = x.split([1, k.shape[-1], v.shape[-1]], -1)
    p.own_before = left.placed(own[..., 0], p.own_before)
    p.before = p.before._replace(k=left.placed(k, p.before.k), v=left.placed(v, p.before.v))


def _shared_mamba3(given: dict[str, Any], states: Any, context: Context, run: Run) -> Any:
    names = ("x", "dt", "A", "B", "C", "trap", "angles", "D", "z")
    p = Mamba3Problem(*(given[x] for x in names))
    p.sequences(context.on(given["x"].device))
    p.take_state("initial_states", states, "S")
    p.begin()
    left = _FromTheLeft(context, _recorded(given, states))
    if left.is_needed and p.R:
        _turned_before(p, left)
    p.turn_tokens()
    if left.is_needed:
        _row_before(p, left)
    p.shift()
    options = {x: given[x] for x in ("mode", "chunk_size", "allow_tf32")}
    o, S = run("simple_gla", p.arguments() | options, context)
    return p.finish(p.read_out(o)), p.final(S)


CARRIED: dict[str, Any] = {"mamba3": _shared_mamba3, "mlstm": _shared_mlstm}
