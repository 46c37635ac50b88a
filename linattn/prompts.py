"""Prompts of sequences whose states lie in a pool: what a server does before it steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from linattn.arrays import as_int
from linattn.composed._names import called
from linattn.features import cast, is_array, is_recorded, is_tensor, library_of, shape_of

__all__ = ["prefill"]


def prefill(
    op: str | Callable[..., Any],
    *arrays: Any,
    state: Any,
    state_indices: Any,
    begins: Any = None,
    **arguments: Any,
) -> Any:
    """A prompt, or the next part of one, of sequences whose states lie in a pool.

    The call of an op on the rows of a batch, or on packed sequences. Sequence n goes on from state
    ``state_indices[n]`` of the pool, and leaves its final state there, where the op's step goes on.

    Parameters
    ----------
    op : str or function
        An op, a system, a scan or the short convolution that has a step, such as ``"kda"`` or
        ``linattn.ssd``.
    *arrays, **arguments
        Its own, as it takes them, but for the initial state and the request for the final one.
    state : array [P,...], or a tuple of arrays
        The pool, as the step takes it. It changes in place (JAX's arrays do not change: see
        Returns).
    state_indices : sequence or array [N] of ints
        N is B, or the number of packed sequences. -1 is no state: that sequence begins from zeros,
        and its final state is not kept. No state twice.
    begins : sequence or array [N] of bools, optional
        Does a sequence begin here? It then begins from zeros, whatever its state holds. By default
        none does.

    Returns
    -------
    o : array, as the op returns it
        For JAX the pair (o, pool).

    Raises
    ------
    TypeError
        The indices are not ints, or the op does not take the arguments.
    ValueError
        There is no such op, an index is outside of the pool or there twice, or shapes do not fit.

    See Also
    --------
    zeros_state : Makes a pool.
    replay : The states after the first tokens of a draft.

    Notes
    -----
    The host reads the indices and ``begins``, and waits for them if they are on a device: a list,
    or an array on the host, is read without a wait. The states in use are copied out of the pool
    and back. If something is wrong, no state has changed. PyTorch does not record the call.

    Examples
    --------
    Two prompts take the states 4 and 1 of a pool. Their first tokens are steps:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 10, 2, 8))
    >>> pool = linattn.zeros_state(6, 2, 8, 8, dtype="float64")
    >>> slots = [4, 1]
    >>> o = linattn.prefill("delta_rule", q, k, v, 0.5, state=pool, state_indices=slots)
    >>> token = linattn.delta_rule_step(
    ...     q[:, 9], k[:, 9], v[:, 9], 0.5, state=pool, state_indices=np.array(slots)
    ... )
    >>> o.shape, token.shape, [bool(S.any()) for S in pool]
    ((2, 10, 2, 8), (2, 2, 8), [False, True, False, False, True, False])
    """
    function, initial, final = _passes_of(op)
    signature = inspect.signature(function)
    for name in (initial, final, "out"):
        if name in arguments:
            raise ValueError(f"{name}: expected no {name}= beside a pool, which is in its place")
    given = signature.bind(*arrays, **arguments).arguments  # a TypeError where the op raises one
    first = next(iter(given.values()))
    for name, x in (*given.items(), ("state", state)):
        if is_recorded(x):
            raise ValueError(
                f"{name}: requires gradients, which are not recorded where a pool changes; pass "
                f"{name}.detach(), or call it under torch.no_grad()"
            )
    shape = shape_of(first)
    if shape is None or len(shape) < 3:
        name = next(iter(given))
        raise ValueError(f"{name}: expected an array with all axes, got {shape or type(first)}")
    if _is_jaxs(first):
        from linattn import jax

        function = getattr(jax, function.__name__)
    cu_seqlens = given.get("cu_seqlens")
    N = shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    has_parts = isinstance(state, tuple | list)
    pools = tuple(state) if has_parts else (state,)
    slots = _slots(state_indices, N, _size_of(pools))
    fresh = _flags(begins, N)
    starts = tuple(_taken(pool, slots, fresh) for pool in pools)
    with called({initial: "state"}, first):
        o, S = function(
            *arrays, **arguments, **{initial: starts if has_parts else starts[0], final: True}
        )
    kept = [n for n, slot in enumerate(slots) if slot >= 0]
    found = [
        _put(pool, [slots[n] for n in kept], one if len(kept) == N else one[_index(one, kept)])
        for pool, one in zip(pools, S if has_parts else (S,), strict=True)
    ]
    if not _is_jaxs(pools[0]):
        return o
    return o, getattr(state, "_make", tuple)(found) if has_parts else found[0]


def _passes_of(op: Any) -> tuple[Callable[..., Any], str, str]:
    """The function, and its arguments for the state before the tokens and the one after them."""
    import linattn

    name = getattr(op, "__name__", repr(op)) if callable(op) else op
    function = getattr(linattn, name, None) if isinstance(name, str) else None
    if function is None or not hasattr(linattn, f"{name}_step"):
        raise ValueError(f"op: expected a function of linattn's that has a step, got {name!r}")
    for initial, final in (
        ("initial_state", "output_final_state"),
        ("initial_states", "return_final_states"),
    ):
        if initial in inspect.signature(function).parameters:
            return function, initial, final
    raise ValueError(f"op: expected a function that takes an initial state, got {name!r}")


def _size_of(pools: tuple[Any, ...]) -> int:
    """P."""
    for pool in pools:
        if not is_array(pool) and not _is_jaxs(pool):
            raise TypeError(f"state: expected an array or a tuple of arrays, got {type(pool)}")
        if isinstance(pool, np.ndarray) and not pool.flags.writeable:
            raise ValueError("state: expected a writable array, got a read-only one")
    sizes = {(shape_of(pool) or (0,))[0] for pool in pools}
    if len(sizes) != 1:
        raise ValueError(f"state: expected pools of one size, got {sorted(sizes)}")
    return int(sizes.pop())


def _is_jaxs(x: Any) -> bool:
    """Is it an array that cannot change, and has new ones made of it by `at`?"""
    return hasattr(x, "at") and not is_tensor(x)


def _listed(name: str, x: Any, N: int) -> list[Any]:
    found = list(x) if isinstance(x, Sequence) else getattr(x, "tolist", lambda: None)()
    if not isinstance(found, list):
        raise TypeError(f"{name}: expected a sequence or an array [N], got {type(x).__name__}")
    if len(found) != N:
        raise ValueError(f"{name}: expected [N] = [{N}], got {len(found)}")
    return found


def _slots(state_indices: Any, N: int, P: int) -> list[int]:
    slots = [as_int("state_indices", i) for i in _listed("state_indices", state_indices, N)]
    for n, slot in enumerate(slots):
        if not -1 <= slot < P:
            raise ValueError(f"state_indices: expected -1 to {P - 1}, got {slot} for sequence {n}")
    seen: set[int] = set()
    for n, slot in enumerate(slots):
        if slot in seen:
            raise ValueError(f"state_indices: expected no state twice, got {slot} for sequence {n}")
        if slot >= 0:
            seen.add(slot)
    return slots


def _flags(begins: Any, N: int) -> list[bool]:
    flags = [False] * N if begins is None else _listed("begins", begins, N)
    for flag in flags:
        if not isinstance(flag, bool | np.bool_):
            raise TypeError(f"begins: expected bools, got {type(flag).__name__}")
    return flags


def _index(like: Any, places: list[int]) -> Any:
    """Places as an array that can index one of the library of `like`."""
    if is_tensor(like):
        return library_of(like).tensor(places, dtype=library_of(like).int64, device=like.device)
    return library_of(like).asarray(np.array(places, np.int64))


def _taken(pool: Any, slots: list[int], fresh: list[bool]) -> Any:
    """The states of the sequences: copies, zeros where one begins or has no state."""
    if not len(pool):
        shape = (len(slots), *pool.shape[1:])
        make = pool.new_zeros if is_tensor(pool) else library_of(pool).zeros
        return make(shape, dtype=pool.dtype)
    states = pool[_index(pool, [max(slot, 0) for slot in slots])]
    zeros = [n for n, slot in enumerate(slots) if slot < 0 or fresh[n]]
    if not zeros:
        return states
    at = _index(states, zeros)
    if _is_jaxs(states):
        return states.at[at].set(0)
    states[at] = 0
    return states


def _put(pool: Any, slots: list[int], states: Any) -> Any:
    """The pool with these states: changed, or JAX's new one."""
    at = _index(pool, slots)
    if _is_jaxs(pool):
        return pool.at[at].set(cast(states, pool.dtype))
    pool[at] = cast(states, pool.dtype)
    return pool
