"""Prompts of sequences whose states lie in a pool: what a server does before it steps."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from linattn import composed
from linattn.arrays import as_int
from linattn.composed._names import called
from linattn.features import (
    cast,
    indices_beside,
    is_array,
    is_recorded,
    is_tensor,
    library_of,
    shape_of,
)
from linattn.variants import OPS

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
        Returns). That of the short convolution has W-1 inputs, and no older ones.
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
    and back. If something is wrong, no state has changed. PyTorch does not record the call. Under
    torch.compile a list of indices is a constant of the graph, and a tensor breaks it.

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
    import linattn

    name = _name_of(op)
    function = getattr(linattn, name)
    initial, final = _states_of(name)
    for argument in (initial, final, "out"):
        if argument in arguments:
            raise ValueError(f"{argument}: expected no {argument}= beside a pool, its place")
    signature = inspect.signature(function)
    given = signature.bind(*arrays, **arguments).arguments  # a TypeError where the op raises one
    first = next(iter(given.values()))
    axes = 4 if name in (*OPS, *composed.__all__) else 3
    shape = shape_of(first)
    if shape is None or len(shape) != axes:
        raise ValueError(
            f"{next(iter(given))}: expected an array with all of its {axes} axes, got "
            f"{shape or type(first)}"
        )
    if given.get("causal", True) is not True:
        raise ValueError(f"causal: expected True, got {given['causal']!r}")
    if given.get("seq_idx") is not None:
        raise ValueError("seq_idx: expected None beside a pool; cu_seqlens packs sequences")
    if _is_jaxs(first):
        from linattn import jax

        function = getattr(jax, name)
    has_parts = isinstance(state, tuple | list)
    pools = tuple(state) if has_parts else (state,)
    names = [f"state[{i}]" for i in range(len(pools))] if has_parts else ["state"]
    _check_pools(dict(zip(names, pools, strict=True)), given)
    N = shape[0] if given.get("cu_seqlens") is None else _count(given["cu_seqlens"])
    slots = _slots(state_indices, N, len(pools[0]))
    fresh = _flags(begins, N)
    starts = tuple(_taken(pool, slots, fresh) for pool in pools)
    known = {initial: "state"} | {f"{initial}[{i}]": f"state[{i}]" for i in range(len(pools))}
    with called(known, first), _unrecorded(first):
        o, S = function(
            *arrays, **arguments, **{initial: starts if has_parts else starts[0], final: True}
        )
        kept = [n for n, slot in enumerate(slots) if slot >= 0]
        new = [
            cast(one if len(kept) == N else one[indices_beside(one, kept)], pool.dtype)
            for pool, one in zip(pools, S if has_parts else (S,), strict=True)
        ]
        found = [
            _put(pool, [slots[n] for n in kept], one) for pool, one in zip(pools, new, strict=True)
        ]
    if not _is_jaxs(first):
        return o
    return o, getattr(state, "_make", type(state))(found) if has_parts else found[0]


def _name_of(op: Any) -> str:
    """The name of a function of linattn's that has a step and an initial state."""
    import linattn

    name = getattr(op, "__name__", None) if callable(op) else op
    function = getattr(linattn, name, None) if isinstance(name, str) else None
    its_jaxs = "linattn.jax" in sys.modules and getattr(sys.modules["linattn.jax"], str(name), None)
    own = not callable(op) or op is function or op is its_jaxs
    if not isinstance(name, str) or not own or not hasattr(linattn, f"{name}_step"):
        raise ValueError(f"op: expected a function of linattn's that has a step, got {op!r}")
    return name


def _states_of(name: str) -> tuple[str, str]:
    """The arguments for the state before the tokens and the one after them."""
    import linattn

    if "initial_states" in inspect.signature(getattr(linattn, name)).parameters:
        return "initial_states", "return_final_states"
    return "initial_state", "output_final_state"


def _unrecorded(like: Any) -> Any:
    return library_of(like).no_grad() if is_tensor(like) else nullcontext()


def _check_pools(pools: dict[str, Any], given: dict[str, Any]) -> None:
    """What the step refuses too: each pool has elements in places of its own, beside the arrays."""
    like = next(iter(given.values()))
    arrays = {name: x for name, x in given.items() if shape_of(x)}
    for name, x in (*arrays.items(), *pools.items()):
        if is_recorded(x):
            raise ValueError(
                f"{name}: requires gradients, which are not recorded where a pool changes; pass "
                f"{name}.detach(), or call it under torch.no_grad()"
            )
    for name, pool in pools.items():
        if not is_array(pool) and not _is_jaxs(pool):
            raise TypeError(f"{name}: expected an array, got {type(pool).__name__}")
        device, wanted = getattr(pool, "device", None), getattr(like, "device", None)
        if library_of(pool) is not library_of(like) or (is_tensor(pool) and device != wanted):
            raise TypeError(
                f"{name}: expected an array of {library_of(like).__name__} on {wanted} like "
                f"{next(iter(given))}, got {type(pool).__name__} on {device}"
            )
        if not shape_of(pool):
            raise ValueError(f"{name}: expected an array [P,...], got a number")
        if isinstance(pool, np.ndarray) and not pool.flags.writeable:
            raise ValueError(f"{name}: expected a writable array, got a read-only one")
        torch = library_of(pool)
        if is_tensor(pool) and pool.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(f"{name}: expected no tensor of inference mode outside of it")
        if _overlaps_itself(pool):
            raise ValueError(
                f"{name}: expected every element in a place of its own, got strides "
                f"{_strides(pool)}"
            )
    sizes = {len(pool) for pool in pools.values()}
    if len(sizes) != 1:
        raise ValueError(f"state: expected pools of one size, got {sorted(sizes)}")
    spans = {name: span for name, x in (arrays | pools).items() if (span := _span(x))}
    for name in filter(spans.__contains__, pools):
        low, high = spans[name]
        for other, (begin, end) in spans.items():
            if other != name and begin < high and low < end:
                raise ValueError(
                    f"{name}: expected memory of its own, got memory shared with {other}"
                )


def _strides(x: Any) -> tuple[int, ...]:
    """In elements, of NumPy's and PyTorch's arrays."""
    if is_tensor(x):
        return tuple(x.stride())
    return tuple(stride // x.itemsize for stride in x.strides)


def _overlaps_itself(x: Any) -> bool:
    if not isinstance(x, np.ndarray) and not is_tensor(x):
        return False
    reach = 1
    axes = zip(x.shape, map(abs, _strides(x)), strict=True)
    for n, stride in sorted(((n, s) for n, s in axes if n > 1), key=lambda axis: axis[1]):
        if stride < reach:
            return 0 not in x.shape
        reach = (n - 1) * stride + reach
    return False


def _span(x: Any) -> tuple[int, int] | None:
    """Where the memory of NumPy's and PyTorch's arrays begins and ends; None of others."""
    if not isinstance(x, np.ndarray) and not is_tensor(x):
        return None
    if 0 in x.shape or (is_tensor(x) and x.device.type == "meta"):
        return None
    size = x.element_size() if is_tensor(x) else x.itemsize
    begin = x.data_ptr() if is_tensor(x) else x.ctypes.data
    steps = [(n - 1) * stride * size for n, stride in zip(x.shape, _strides(x), strict=True)]
    return begin + sum(s for s in steps if s < 0), begin + sum(s for s in steps if s > 0) + size


def _count(cu_seqlens: Any) -> int:
    """The number of packed sequences."""
    shape = (len(cu_seqlens),) if isinstance(cu_seqlens, list | tuple) else shape_of(cu_seqlens)
    if shape is None or len(shape) != 1 or shape[0] < 1:
        got = type(cu_seqlens).__name__ if shape is None else shape
        raise ValueError(f"cu_seqlens: expected [N+1], got {got}")
    return int(shape[0]) - 1


def _is_jaxs(x: Any) -> bool:
    """Is it an array that cannot change, and has new ones made of it by `at`?"""
    return hasattr(x, "at") and not is_tensor(x)


def _listed(name: str, x: Any, N: int) -> list[Any]:
    found = None
    if isinstance(x, Sequence) and not isinstance(x, str | bytes):
        found = list(x)
    elif hasattr(x, "tolist") and getattr(getattr(x, "device", None), "type", "cpu") != "meta":
        found = x.tolist()
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


def _taken(pool: Any, slots: list[int], fresh: list[bool]) -> Any:
    """The states of the sequences: copies, zeros where one begins or has no state."""
    if not len(pool):
        shape = (len(slots), *pool.shape[1:])
        make = pool.new_zeros if is_tensor(pool) else library_of(pool).zeros
        return make(shape, dtype=pool.dtype)
    states = pool[indices_beside(pool, [max(slot, 0) for slot in slots])]
    zeros = [n for n, slot in enumerate(slots) if slot < 0 or fresh[n]]
    if not zeros:
        return states
    at = indices_beside(states, zeros)
    if _is_jaxs(states):
        return states.at[at].set(0)
    states[at] = 0
    return states


def _put(pool: Any, slots: list[int], states: Any) -> Any:
    """The pool with these states: changed, or JAX's new one."""
    at = indices_beside(pool, slots)
    if _is_jaxs(pool):
        return pool.at[at].set(states)
    pool[at] = states
    return pool
