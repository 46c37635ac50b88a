"""What travels between the ranks: maps of segments to the owners of heads, and states back.

A rank's tokens turn the state S before them into M S + X. The rows of a state (heads, of each
sequence of a batch) are shared out: rank i owns some rows. It receives every rank's map of these,
goes through the ranks in their order, and sends every rank the state before its tokens.
torch.distributed moves bytes alone. The sums are taken here, in one order, in float64, so their
bits do not depend on the backend's algorithm. M stays with its owner, for the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from linattn.distributed._context import Context, group_named
from linattn.distributed._order import after, is_traced, kept_in_order, token_before

__all__ = [
    "Form",
    "applied",
    "everywhere",
    "exchange",
    "exchange_back",
    "gathered",
    "moved",
    "owned",
    "told",
    "wide",
]

# PyTorch 2.13 has a new name for it, and warns of the old one.
_all_gather: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))


class Form(NamedTuple):
    """The shape of a map: X [rows,K,V], and M [rows,*transition], whose dtype is that of X."""

    rows: int
    K: int
    V: int
    transition: tuple[int, ...]  # (): the identity; (K,) or (1,): a diagonal; (K,K): a matrix
    dtype: torch.dtype
    device: torch.device

    @property
    def state_size(self) -> int:
        return self.K * self.V

    @property
    def map_size(self) -> int:
        """The numbers of M."""
        size = 1 if self.transition else 0
        for n in self.transition:
            size *= n
        return size


# ---- bytes ----


def _tried(group: Any, what: str, call: Any, *arguments: Any, **options: Any) -> None:
    try:
        call(*arguments, **options, group=group)
    except RuntimeError as error:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        raise RuntimeError(
            f"linattn.distributed: the {what} failed on rank {rank} of {size}: {error}"
        ) from error


def gathered(group: Any, numbers: list[int], device: torch.device | None) -> list[list[int]]:
    """Every rank's numbers, on the host. The host waits for the device where the group has no
    backend for its own memory."""
    backends = dist.get_backend_config(group)
    if "cpu" in backends or (device is None and "cuda" not in backends):
        device = torch.device("cpu")
    elif device is None or device.type == "cpu":
        device = torch.device("cuda", torch.cuda.current_device())
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    everyone = mine.new_empty(dist.get_world_size(group) * len(numbers))
    _tried(group, "comparison of calls", _all_gather, everyone, mine)
    found: list[list[int]] = everyone.view(-1, len(numbers)).tolist()
    return found


def moved(context: Context, x: Tensor, gets: list[int], sends: list[int]) -> Tensor:
    """The flat x cut into pieces, one for each rank: what the ranks send here, behind each other.

    Complex numbers travel as pairs. A tracer sees an operator.
    """
    if is_traced():
        group = context.group.group_name
        found: Tensor
        call = torch.ops.linattn.moved_between_ranks
        found, token = call(x, token_before(), group, gets, sends)
        after(token)
        return found
    return _moved(context.group, x, gets, sends)


def _moved(group: Any, x: Tensor, gets: Sequence[int], sends: Sequence[int]) -> Tensor:
    pairs = 2 if x.is_complex() else 1
    real = torch.view_as_real(x.resolve_conj()).flatten() if x.is_complex() else x
    out = real.new_empty(pairs * sum(gets))
    sizes = [pairs * n for n in gets], [pairs * n for n in sends]
    _tried(group, "exchange of states", dist.all_to_all_single, out, real.contiguous(), *sizes)
    return torch.view_as_complex(out.view(-1, 2)) if x.is_complex() else out


@torch.library.custom_op(
    "linattn::moved_between_ranks",
    mutates_args=(),
    schema="(Tensor x, Tensor? token, str group, int[] gets, int[] sends) -> (Tensor, Tensor)",
)
def _moved_between_ranks(
    x: Tensor, token: Tensor | None, group: str, gets: Sequence[int], sends: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return _moved(group_named(group), x, gets, sends), x.new_zeros(1)


@_moved_between_ranks.register_fake
def _(
    x: Tensor, token: Tensor | None, group: str, gets: Sequence[int], sends: Sequence[int]
) -> tuple[Tensor, Tensor]:
    return x.new_empty(sum(gets)), x.new_empty(1)


kept_in_order(_moved_between_ranks)


# ---- one fold ----


def wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def applied(X: Tensor, M: Tensor | None, S: Tensor, *, adjoint: bool = False) -> Tensor:
    """M S + X, or M' S + X (of the conjugate, where M is complex), by few operations."""
    if M is None:
        return S + X
    if M.dim() == 3:
        return torch.baddbmm(X, M.mH if adjoint else M, S)
    if M.is_complex():  # a GPU may have to compile addcmul of these
        return X + (M.conj() if adjoint else M)[..., None] * S
    return torch.addcmul(X, M[..., None], S)


def _cuts(rows: int, size: int) -> list[int]:
    """How many rows each rank owns."""
    return [rows * (j + 1) // size - rows * j // size for j in range(size)]


def owned(context: Context, form: Form) -> int:
    """How many rows this rank owns."""
    return _cuts(form.rows, context.size)[context.rank]


def _to_owners(
    context: Context, form: Form, mine: Tensor | None, widths: list[int]
) -> list[Tensor]:
    """mine [rows,width] -> the numbers of each rank, for the rows that are owned here.

    One operation makes them wide (float64). An operation for each rank would take the host longer
    than the GPU.
    """
    cuts = _cuts(form.rows, context.size)
    own = cuts[context.rank]
    flat = torch.empty(0, dtype=form.dtype, device=form.device)
    if mine is not None:
        flat = mine.reshape(-1)
    sends = [n * widths[context.rank] for n in cuts]
    gets = [own * width for width in widths]
    pieces = wide(moved(context, flat, gets, sends)).split(gets)
    return [x.view(own, width) for x, width in zip(pieces, widths, strict=True)]


def _from_owners(
    context: Context, form: Form, states: list[Tensor], takes: list[bool]
) -> Tensor | None:
    """The states that ranks take, in their order -> the state of all rows, if this one takes it."""
    cuts = _cuts(form.rows, context.size)
    own = cuts[context.rank]
    flat = torch.empty(0, dtype=form.dtype, device=form.device)
    if states:
        flat = torch.stack(states).to(form.dtype).reshape(-1)
    sends = [own * form.state_size * take for take in takes]
    gets = [n * form.state_size * takes[context.rank] for n in cuts]
    found = moved(context, flat, gets, sends)
    return found.view(form.rows, form.K, form.V) if takes[context.rank] else None


def exchange(
    context: Context, form: Form, X: Tensor | None, M: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """From left to right: S <- M S + X, or X where a sequence begins.

    X [rows,K,V] of a rank whose last sequence goes on, and M of a rank that a sequence passes.

    Returns
    -------
    S : Tensor [rows,K,V] or None
        The state before the tokens of this rank, if it joins a sequence.
    kept : Tensor [P,own rows,...] or None
        M of the ranks that a sequence passes, of the rows that are owned here.
    """
    shares = context.shares
    widths = [form.state_size * s.goes_on + form.map_size * s.passes for s in shares]
    if not any(widths):
        return None, None
    mine = None
    if X is not None:
        parts = [X.reshape(form.rows, form.state_size)]
        if form.transition and M is not None:
            parts.append(M.to(form.dtype).reshape(form.rows, form.map_size))
        mine = torch.cat(parts, 1)
    every = _to_owners(context, form, mine, widths)
    arrives, kept = [], []
    S = every[0].new_zeros(len(every[0]), form.K, form.V)
    for share, row in zip(shares, every, strict=True):
        if share.joins:
            arrives.append(S)
        if share.goes_on:
            end = row[:, : form.state_size].view_as(S)
            M = None
            if share.passes and form.transition:
                M = row[:, form.state_size :].reshape(len(row), *form.transition)
                kept.append(M)
            S = applied(end, M, S) if share.passes else end
    S_in = _from_owners(context, form, arrives, [s.joins for s in shares])
    return S_in, torch.stack(kept).to(form.dtype) if kept else None


def exchange_back(
    context: Context, form: Form, E: Tensor | None, kept: Tensor | None
) -> Tensor | None:
    """The adjoint, from right to left: G <- M' G + E, or E where a sequence ends on a rank.

    E [rows,K,V] of a rank that joins a sequence is the gradient of the state before its tokens as
    if nothing came after them.

    Returns
    -------
    Tensor [rows,K,V] or None
        The gradient of the state after this rank's tokens, made by the ranks after it; None if its
        last sequence ends here.
    """
    shares = context.shares
    widths = [form.state_size * s.joins for s in shares]
    if not any(widths):
        return None
    every = _to_owners(context, form, E, widths)
    Ms = [] if kept is None else list(wide(kept).unbind())
    arrives = []
    G = every[0].new_zeros(len(every[0]), form.K, form.V)
    for share, row in zip(reversed(shares), reversed(every), strict=True):
        if share.goes_on:
            arrives.append(G)
        if share.joins:
            begin = row.view_as(G)
            M = Ms.pop() if share.passes and form.transition else None
            G = applied(begin, M, G, adjoint=True) if share.passes else begin
    return _from_owners(context, form, arrives[::-1], [s.goes_on for s in shares])


# ---- final states of all sequences, on all ranks ----


class _Everywhere(torch.autograd.Function):
    """The final states that are known here [n,...] -> those of all ranks, in the order of ranks.

    Its adjoint sends the gradients to where the states are from, and adds them in the order of
    ranks.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, context: Context, counts: list[int]) -> Tensor:
        size = mine[:0].new_empty(1, *mine.shape[1:]).numel()
        ctx.what = context, counts, size, mine.shape
        gets = [n * size for n in counts]
        flat = mine.reshape(-1).repeat(context.size)
        found = moved(context, flat, gets, [mine.numel()] * context.size)
        return found.view(sum(counts), *mine.shape[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Any, ...]:
        context, counts, size, shape = ctx.what
        sends, mine = [n * size for n in counts], counts[context.rank] * size
        found = moved(context, d.reshape(-1), [mine] * context.size, sends)
        total = found.new_zeros(shape)
        for piece in found.split(mine) if mine else ():
            total = total + piece.view(shape)
        return total, None, None


def everywhere(context: Context, mine: Tensor) -> Tensor:
    """mine: the final states after the last token here, of each part -> those of all sequences."""
    if context.edges is None:
        last = context.rank == context.size - 1
        counts = [0] * (context.size - 1) + [len(mine)]
        ended = mine if last else mine[:0]
    else:
        counts = [s.parts - s.goes_on for s in context.shares]
        ended = mine[: counts[context.rank]]
    found: Tensor = _Everywhere.apply(ended, context, counts)  # type: ignore[no-untyped-call]
    return found


def told(context: Context, at_end: Tensor) -> list[Tensor | None]:
    """Each rank's numbers at the end of its last sequence; None of one that ends there.

    Every rank gives numbers of one shape, and gets those of all ranks.
    """
    counts = [int(share.goes_on) for share in context.shares]
    mine = at_end[None][: counts[context.rank]]
    every = iter(_Everywhere.apply(mine, context, counts).unbind())  # type: ignore[no-untyped-call]
    return [next(every) if n else None for n in counts]
