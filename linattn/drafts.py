"""The state after the first tokens of a draft: what a server goes back to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from linattn.arrays import as_int
from linattn.features import indices_beside, shape_of
from linattn.variants import BY_TOKEN, op_named

__all__ = ["replay"]


def replay(
    op: str | Callable[..., Any], n: Any, q: Any, k: Any, v: Any, *gates: Any, **arguments: Any
) -> Any:
    """The state after the first n tokens of each row, from one pass.

    Speculative decoding tries a few tokens at once, of which a model accepts the first ones. The
    state after all of them is of no use then. The call that tried them, with n in front, gives the
    state after those that were accepted.

    Parameters
    ----------
    op : str or function
        Which op, such as ``"gated_delta_rule"`` or ``linattn.gated_delta_rule``.
    n : int or array [N] of ints
        The tokens that count: for all rows, or for each one. 0 gives the initial state.
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    *gates, **arguments
        The op's own, as it takes them: ``g``, ``beta``, ``initial_state``, ``cu_seqlens`` and so
        on. g is a natural LOG of a decay, as there.

    Returns
    -------
    State [N,HV,K,V], or a pair
        As the op's final state. N is B, or len(cu_seqlens) - 1. PyTorch records it.

    Raises
    ------
    TypeError
        n is not an int or an array of ints, or the op does not take the arguments.
    ValueError
        There is no such op, n does not fit, or the call is not causal.

    See Also
    --------
    states : The states after every n-th token.

    Examples
    --------
    Two rows of four tokens: of the first three were accepted, of the second one.

    >>> import numpy as np, linattn
    >>> q = k = v = np.ones((2, 4, 1, 1))
    >>> linattn.replay("linear_attention", [3, 1], q, k, v, normalize=False).ravel().tolist()
    [6.0, 2.0]
    """
    from linattn import ops

    function = getattr(ops, op_named(op))
    signature = inspect.signature(function)
    signature.bind(q, k, v, *gates, **arguments)  # a TypeError where the op would raise one
    names = list(signature.parameters)[3:]
    given = dict(zip(names, gates, strict=False)) | arguments
    for name in ("out", "output_final_state"):
        if name in given:
            raise ValueError(f"{name}: expected no {name}= where the state alone is wanted")
    if given.get("causal", True) is not True:
        raise ValueError(f"causal: expected True, got {given['causal']!r}")
    shape = shape_of(q)
    if shape is None or len(shape) not in (2, 4):
        raise ValueError(f"q: expected an array [B,T,H,K] or [T,K], got {shape or type(q)}")
    axis = len(shape) // 2 - 1
    starts, lengths = _rows(shape, given.get("cu_seqlens"))
    counts = _counts(n, lengths)
    if given.get("cu_seqlens") is None and counts == counts[:1] * len(counts):
        few = (slice(None),) * axis + (slice(counts[0] if counts else 0),)

        def first(x: Any) -> Any:
            return x[few]
    else:
        tokens = [t for at, many in zip(starts, counts, strict=True) for t in range(at, at + many)]
        index, given["cu_seqlens"] = (
            indices_beside(q, x) for x in (tokens, np.cumsum([0, *counts], dtype=np.int64))
        )

        def first(x: Any) -> Any:
            rows = x.reshape(-1, *x.shape[axis + 1 :])[index]
            return rows[None] if axis else rows

    for name, x in given.items():
        if name in BY_TOKEN and shape_of(x):
            given[name] = first(x)
    _, state = function(first(q), first(k), first(v), **given, output_final_state=True)
    return state


def _rows(shape: tuple[int, ...], cu_seqlens: Any) -> tuple[list[int], list[int]]:
    """Where the tokens of each sequence begin among all, and how many there are."""
    if cu_seqlens is not None:
        ends = [int(end) for end in cu_seqlens]
        return ends[:-1], [b - a for a, b in pairwise(ends)]
    B, T = (1, shape[0]) if len(shape) == 2 else shape[:2]
    return [b * T for b in range(B)], [T] * B


def _counts(n: Any, lengths: list[int]) -> list[int]:
    shape = shape_of(n)
    many = list(n) if isinstance(n, list | tuple) or (shape and len(shape) == 1) else None
    counts = [as_int("n", x) for x in ([n] * len(lengths) if many is None else many)]
    if len(counts) != len(lengths):
        raise ValueError(f"n: expected an int or [N] = [{len(lengths)}] ints, got {len(counts)}")
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        if not 0 <= count <= length:
            raise ValueError(f"n: expected 0 to {length} tokens of row {row}, got {count}")
    return counts
