"""How a row of tokens is cut over the ranks of a group: which rank has which tokens.

Everything here is arithmetic on a few ints that all ranks know, so that all ranks know all of it.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from linattn.arrays import as_size

__all__ = [
    "Context",
    "Place",
    "Share",
    "at",
    "context",
    "group_named",
    "group_of",
    "packed",
    "place_of",
    "rows",
]

# A Context as constants of a graph: the group's name, lengths, edges and check. Of a group alone,
# lengths is None.
Place = tuple[str, tuple[int, ...] | None, tuple[int, ...] | None, bool]


class Share(NamedTuple):
    """What one rank has of the sequences: parts of [first, last)."""

    first: int
    last: int
    joins: bool  # its first part goes on with a sequence of the ranks before
    goes_on: bool  # its last part goes on in the ranks after

    @property
    def parts(self) -> int:
        return self.last - self.first

    @property
    def passes(self) -> bool:
        """Does the state before the rank reach its end?"""
        return self.joins and self.goes_on and self.parts == 1


@dataclass(frozen=True, eq=False)
class Context:
    """How rows of tokens are cut over the ranks of a group. :func:`context` makes one.

    Attributes
    ----------
    group : torch.distributed.ProcessGroup
    rank, size : int
        Of this process in the group, and of the group.
    lengths : tuple of int
        The tokens of each rank.
    edges : tuple of int, or None
        Where the packed sequences of the whole row begin, and where the last one ends.
    check : bool
        Are the calls of the ranks compared?

    Examples
    --------
    >>> import torch.distributed as dist
    >>> import linattn.distributed as lad
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> cp = lad.context(lengths=[12], cu_seqlens=[0, 5, 12])
    >>> cp.start, cp.cu_seqlens.tolist(), cp.sequences, cp.begins, cp.ends
    (0, [0, 5, 12], slice(0, 2, None), (True, True), (True, True))
    >>> dist.destroy_process_group()
    """

    group: Any
    rank: int
    size: int
    lengths: tuple[int, ...]
    edges: tuple[int, ...] | None
    check: bool
    shares: tuple[Share, ...] = field(repr=False)
    _local: dict[Any, Tensor] = field(default_factory=dict, repr=False)

    @property
    def share(self) -> Share:
        """What this rank has."""
        return self.shares[self.rank]

    @property
    def start(self) -> int:
        """The tokens of a row before this rank's."""
        return sum(self.lengths[: self.rank])

    @property
    def local_edges(self) -> list[int] | None:
        """Where the parts of sequences that are here begin, and where the last one ends."""
        if self.edges is None:
            return None
        begin, length = self.start, self.lengths[self.rank]
        first, last = self.share[:2]
        inside = [min(max(e - begin, 0), length) for e in self.edges[first : last + 1]]
        return inside if last > first else [0]

    @property
    def cu_seqlens(self) -> Tensor | None:
        """``local_edges`` as a tensor, or None if the rows are not packed."""
        return self.on(torch.device("cpu"))

    @property
    def sequences(self) -> slice:
        """Which of the packed sequences have a part here; all rows, if they are not packed."""
        return slice(None) if self.edges is None else slice(*self.share[:2])

    @property
    def begins(self) -> tuple[bool, ...]:
        """Of each part here: does its sequence begin here?"""
        return tuple(i > 0 or not self.share.joins for i in range(self.share.parts))

    @property
    def ends(self) -> tuple[bool, ...]:
        """Of each part here: does its sequence end here?"""
        last = self.share.parts - 1
        return tuple(i < last or not self.share.goes_on for i in range(self.share.parts))

    @property
    def before(self) -> list[int]:
        """The tokens of each part's sequence before this rank; one number, if not packed."""
        if self.edges is None:
            return [self.start]
        return [max(0, self.start - e) for e in self.edges[self.sequences]]

    def on(self, device: torch.device) -> Tensor | None:
        """``cu_seqlens`` on a device, kept."""
        edges = self.local_edges
        if edges is not None and device not in self._local:
            self._local[device] = torch.tensor(edges, dtype=torch.int64).to(device)
        return None if edges is None else self._local[device]

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a whole array: a view.

        Parameters
        ----------
        x : Tensor
            With all tokens along ``dim``.
        dim : int

        Returns
        -------
        Tensor
        """
        if x.shape[dim] != sum(self.lengths):
            raise ValueError(
                f"x: expected {sum(self.lengths)} tokens along dim = {dim}, those of all ranks, "
                f"got {tuple(x.shape)}"
            )
        return x.narrow(dim, self.start, self.lengths[self.rank])


def group_of(group: Any) -> Any:
    """The ProcessGroup of a group, of a mesh of one dimension, or the default one."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "linattn.distributed: torch.distributed is not initialised; call "
            "torch.distributed.init_process_group first"
        )
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup) and hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(
                f"group: expected a DeviceMesh of one dimension, got {group.ndim} dimensions; "
                "mesh['name'] picks one"
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER or not isinstance(group, dist.ProcessGroup):
        if type(group) in (object, int):  # PyTorch's mark of a process outside of a new group
            raise ValueError("group: expected a group that this process is a rank of")
        raise TypeError(
            "group: expected a ProcessGroup, a DeviceMesh, a Context of linattn.distributed, or "
            f"None, got {type(group).__name__}"
        )
    if dist.get_rank(group) < 0:
        raise ValueError("group: expected a group that this process is a rank of")
    return group


def group_named(name: str) -> Any:
    """A graph knows a group by its name, as it does for PyTorch's own collectives."""
    return dist.distributed_c10d._resolve_process_group(name)


def place_of(group: Any) -> Place:
    """A compiler traces this: so it is of simple words."""
    if isinstance(group, Context):
        return group.group.group_name, group.lengths, group.edges, group.check
    return group_of(group).group_name, None, None, True


def at(place: Place) -> Any:
    """The Context or the group."""
    name, lengths, edges, check = place
    group = group_named(name)
    if lengths is None:
        return group
    lengths = tuple(lengths)
    if edges is None:
        return rows(group, lengths, check)
    return packed(group, lengths, edges, check)


def context(
    group: Any = None,
    *,
    lengths: int | Sequence[int] | None = None,
    tokens: int | None = None,
    cu_seqlens: Any = None,
    check: bool = True,
) -> Context:
    """How rows of tokens are cut over the ranks of a group, made once for many calls.

    With ``lengths`` nothing is sent and no device is waited for.

    Parameters
    ----------
    group : ProcessGroup, DeviceMesh of one dimension, or None
        The ranks that share a row, in the order of its tokens. None is the default group.
    lengths : int, or sequence of int
        The tokens of every rank, or of each rank.
    tokens : int
        The tokens of this rank, in the place of ``lengths``: the ranks then tell each other theirs.
    cu_seqlens : sequence of int, optional
        Packed sequences: where the N sequences of the WHOLE row begin, and where the last one ends.
        A list, or an array on the host. The same on all ranks.
    check : bool
        Compare the calls of the ranks, so that calls that do not match are an error on all ranks.

    Returns
    -------
    Context

    Raises
    ------
    TypeError
        The group is none, or lengths are no ints.
    ValueError
        This process is no rank of the group, the number of lengths is not that of the ranks, or
        cu_seqlens does not rise from 0 to the sum of the lengths.
    RuntimeError
        torch.distributed is not initialised, or a rank is gone.

    Examples
    --------
    >>> import torch.distributed as dist
    >>> import linattn.distributed as lad
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> lad.context(lengths=100).lengths, lad.context(tokens=7).lengths
    ((100,), (7,))
    >>> dist.destroy_process_group()
    """
    group = group_of(group)
    size = dist.get_world_size(group)
    if (lengths is None) == (tokens is None):
        raise TypeError("lengths: expected either lengths or tokens")
    if tokens is not None:
        from linattn.distributed._exchange import gathered

        found = [n for (n,) in gathered(group, [as_size("tokens", tokens)], None)]
    elif isinstance(lengths, int | torch.SymInt) and not isinstance(lengths, bool):
        # a graph has lengths as constants
        found = [as_size("lengths", int(lengths))] * size
    elif isinstance(lengths, Sequence) or hasattr(lengths, "__len__"):
        found = [as_size("lengths", n) for n in lengths]  # type: ignore[union-attr]
    else:
        found = [as_size("lengths", lengths)] * size
    if len(found) != size:
        raise ValueError(f"lengths: expected one for each of {size} ranks, got {len(found)}")
    if cu_seqlens is None:
        return rows(group, tuple(found), check)
    return packed(group, tuple(found), cu_seqlens, check)


def rows(group: Any, lengths: tuple[int, ...], check: bool = True) -> Context:
    """Of rows that are not packed: a part of each row is on every rank, without tokens perhaps."""
    size = dist.get_world_size(group)
    shares = tuple(Share(0, 1, j > 0, j + 1 < size) for j in range(size))
    return Context(group, dist.get_rank(group), size, lengths, None, check, shares)


def packed(group: Any, lengths: tuple[int, ...], cu_seqlens: Any, check: bool = True) -> Context:
    """Of packed sequences. One without tokens is with the token after it, or on the last rank."""
    total, size = sum(lengths), len(lengths)
    edges = tuple(map(operator.index, getattr(cu_seqlens, "tolist", lambda: cu_seqlens)()))
    falls = any(b < a for a, b in pairwise(edges))
    if not edges or edges[0] != 0 or edges[-1] != total or falls:
        raise ValueError(
            f"cu_seqlens: expected to rise from 0 to {total}, the tokens of all ranks, got "
            f"{list(edges)}"
        )
    ends = list(accumulate(lengths))
    first, last = [], []  # the ranks of each sequence's first and last token
    for begin, end in pairwise(edges):
        first.append(min(bisect_right(ends, begin), size - 1))
        last.append(first[-1] if end == begin else bisect_right(ends, end - 1))
    shares = []
    low = high = 0
    for j in range(size):
        while low < len(last) and last[low] < j:
            low += 1
        while high < len(first) and first[high] <= j:
            high += 1
        here = high > low
        shares.append(Share(low, high, here and first[low] < j, here and last[high - 1] > j))
    return Context(group, dist.get_rank(group), size, lengths, edges, check, tuple(shares))
