"""Is it the same call on all ranks? One small gather before anything else, so that all ranks raise,
or none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from linattn.autograd import tensor_of
from linattn.distributed._context import Context, group_of, packed, rows
from linattn.distributed._exchange import gathered
from linattn.distributed._order import is_traced

__all__ = ["asks_for_states", "prepared", "refuse_edges"]


class Told(NamedTuple):
    """What the ranks told each other."""

    tokens: list[int]
    states: list[int]  # the rows of the initial state that each rank was given, or -1


def _digest_of(words: dict[str, str]) -> int:
    text = "\n".join(f"{x}={value}" for x, value in sorted(words.items()))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def _agree(
    group: Any,
    words: dict[str, str],
    tokens: int,
    states: int,
    problem: Exception | None,
    device: Any,
) -> Told:
    """Raise on all ranks if a rank has a problem, or if the words of two ranks differ."""
    rows = gathered(group, [tokens, states, _digest_of(words), int(problem is not None)], device)
    if not any(row[3] for row in rows) and len({row[2] for row in rows}) == 1:
        return Told([row[0] for row in rows], [row[1] for row in rows])
    said = f"{type(problem).__name__}: {problem}" if problem is not None else None
    everyone: list[Any] = [None] * len(rows)
    dist.all_gather_object(everyone, (words, said), group=group)
    if problem is not None:
        raise problem
    op = words["op"]
    for rank, (_, its_problem) in enumerate(everyone):
        if its_problem is not None:
            raise ValueError(
                f"{op}: expected arguments that fit on all ranks of the group, but rank {rank} "
                f"raised {its_problem}"
            )
    raise ValueError(_difference(op, [words for words, _ in everyone]))


def _difference(op: str, everyone: list[dict[str, str]]) -> str:
    names = dict.fromkeys(name for words in everyone for name in words)
    for name in names:
        values = [words.get(name, "None") for words in everyone]
        if len(set(values)) > 1:
            what = "linattn.distributed" if name == "op" else op
            got = ", ".join(f"{x} on rank {rank}" for rank, x in enumerate(values))
            return f"{what}: expected the same {name} on all ranks of the group, got {got}"
    return f"{op}: expected the same call on all ranks of the group"


# ---- a call, before anything of it is sent ----


def asks_for_states(name: str, value: Any) -> str | None:
    """Of which sequences a call returns final states: "all", those that are "here", or None."""
    if isinstance(value, str) and value != "all":
        raise ValueError(f"{name}: expected True, False or 'all', got {value!r}")
    return value if isinstance(value, str) else "here" if value else None


def refuse_edges(cu_seqlens: Any) -> None:
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens: expected None beside a Context, which has its own")


def _states_of(name: str, given: Any) -> tuple[Tensor, ...] | None:
    if given is None:
        return None
    parts = given if isinstance(given, tuple | list) else (given,)
    made = tuple(tensor_of(name, S) for S in parts)
    if not all(isinstance(S, Tensor) for S in made):
        raise TypeError(f"{name}: expected tensors of PyTorch's")
    return made  # type: ignore[return-value]


def prepared(
    name: str,
    given: dict[str, Any],
    group: Any,
    made: Callable[[Any, bool], Any],
    names: tuple[str, str] = ("initial_state", "output_final_state"),
    *,
    needs_lengths: bool,
) -> tuple[Any, tuple[Tensor, ...] | None, Context]:
    """A call and its initial states, after the ranks have agreed on it.

    made(states, is_packed) makes the call and checks it. It has B, T, `like` (a tensor of its
    device), `arrays`, `recorded` (does PyTorch record it outside of this?), and `described()`, the
    words that have to be the same on all ranks.
    """
    edges, call, states, problem = given.get("cu_seqlens"), None, None, None
    initial, final = names
    base = group if isinstance(group, Context) else None
    own = group_of(group) if base is None else base.group
    try:
        if given.get("out") is not None:
            raise ValueError("out: expected None where ranks share the tokens")
        if base is not None:
            refuse_edges(edges)
        wanted = asks_for_states(final, given.get(final))
        if edges is not None and not isinstance(edges, list | tuple):
            edges = edges.tolist()
        is_packed = edges is not None or (base is not None and base.edges is not None)
        states = _states_of(initial, given.get(initial))
        call = made(states, is_packed)
        if is_packed and call.B != 1:
            raise ValueError(f"cu_seqlens: expected B = 1 beside it, got B = {call.B}")
    except Exception as error:  # the other ranks have to hear of any
        problem = error
    words = {"op": name} if call is None else call.described()
    if call is not None:
        arrays = (*call.arrays.values(), *(states or ()))
        recorded = torch.is_grad_enabled() and any(x.requires_grad for x in arrays)
        words["recording of gradients"] = repr(recorded or call.recorded)
        words[final] = repr(None if problem else wanted)
        words["cu_seqlens"] = repr(edges)
        if base is not None:
            words["lengths"], words["edges"] = repr(base.lengths), repr(base.edges)
    T = -1 if call is None else call.T
    count = -1 if states is None else len(states[0])
    device = None if call is None else call.like.device
    told = None
    if is_traced():
        if problem is not None:
            raise problem
        if edges is not None or (needs_lengths and not (base and base.lengths)):
            raise ValueError(
                "group: expected a Context with lengths in a compiled graph, where the ranks do "
                "not tell each other theirs"
            )
    elif _is_to_be_compared(
        base, own, device, _digest_of(words), needs_lengths or edges is not None
    ):
        told = _agree(own, words, T, count, problem, device)
    elif problem is not None:
        raise problem
    assert call is not None
    context = base
    if context is None:
        lengths = () if told is None else tuple(told.tokens)
        context = rows(own, lengths) if edges is None else packed(own, lengths, edges)
    _check_shares(name, context, told, T)
    return call, states, context


_AGREED: dict[str, set[int]] = {}  # by the name of a group, the calls that its ranks agreed on
_MOST = 10_000  # of a group


def _is_to_be_compared(
    base: Context | None, group: Any, device: torch.device | None, digest: int, asks: bool
) -> bool:
    """On the host a comparison costs little. On a device the host would wait, so that a call is
    compared once, unless it asks for the others' lengths."""
    known = _AGREED.setdefault(group.group_name, set())
    if len(known) > _MOST:  # on all ranks at once: they have made the same calls
        known.clear()
    is_known = digest in known and device is not None and device.type != "cpu"
    known.add(digest)
    if base is None:
        return asks or not is_known
    return base.check and not is_known


def _check_shares(name: str, context: Context, told: Told | None, T: int) -> None:
    """What all ranks know of each other's tokens and initial states, so that all raise."""
    found = {context.rank: T} if told is None else dict(enumerate(told.tokens))
    for rank, tokens in found.items():
        if context.lengths and tokens != context.lengths[rank]:
            raise ValueError(
                f"{name}: expected T = {context.lengths[rank]} on rank {rank}, as lengths = "
                f"{list(context.lengths)} say, got {tokens}"
            )
    if told is None or context.edges is None:
        return
    for rank, (count, share) in enumerate(zip(told.states, context.shares, strict=True)):
        if count not in (-1, share.parts):
            raise ValueError(
                f"initial_state: expected a row for each part of a sequence on rank {rank}, "
                f"N = {share.parts}, got {count}"
            )
