"""A segment of tokens as a map of states: what ranks, or machines, need of each other's tokens.

The tokens of a segment turn the state S before them into M S + X, whatever the op: S changes by
sums and products with numbers that do not depend on it. So segments can be worked on side by side,
and their maps put together afterwards (docs/math.md, section 4).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, NamedTuple

import numpy as np

from linattn import _linattn, ops, scans
from linattn._rooms import ROOMS
from linattn.features import held, is_recorded, is_tensor, is_traced, library_of, shape_of
from linattn.ops import _padding
from linattn.ops._core import ASKS, CoreCall, Gradients
from linattn.scans._pairs import as_complex
from linattn.variants import GATES, OPS, VARIANTS, op_named

__all__ = ["SegmentMap", "segment_map", "segment_map_backward"]

_LOGARITHMS = ("g", "slopes")  # what a decay is the exponential of, and what minus that

#: The scans, which are beside the table
SCANS = tuple(name for name in scans.__all__ if f"{name}_step" in scans.__all__)

#: inspect.signature takes as long as a short call.
signature_of = lru_cache(inspect.signature)


class SegmentMap(NamedTuple):
    """The map S -> M S + X of a segment of tokens.

    Attributes
    ----------
    X : array [N,HV,K,V], or the states of a pair
        The final state of a call whose initial state is zero. float32 (float64 for float64 inputs).
        [N,HV,V,K] with ``state_v_first``, and [K,V] of one head.
    M : array or None
        [N,HV,K,K] for the delta rules and DPLR, [N,HV,K] for a decay per key, and [N,HV] for any
        other decay; of one head without [N,HV]. None is the identity, of an op without a decay. An
        op with a memory and a momentum has [N,HV,2K,2K], for the rows of the memory and those of
        the momentum below them.

    A scan, such as ``"selective_scan"``, has a number for each number of its state: both are
    [S,D,N], or [S,D] of ``hgrn`` and ``rg_lru``, complex as its states are.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 10, 2, 4))  # [B,T,H,K]
    >>> X, M = linattn.segment_map("gla", q, k, v, alpha=np.full((1, 10, 2, 4), 0.9))
    >>> X.shape, M.shape, bool(np.allclose(M, 0.9**10))
    ((1, 2, 4, 4), (1, 2, 4), True)
    """

    X: Any
    M: Any


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which torch.compile leaves out of its graphs."""

    @wraps(function)
    def call(op: Any, *arrays: Any, **arguments: Any) -> Any:
        if any(map(is_traced, (*arrays, *arguments.values()))):
            return sys.modules["torch"]._disable_dynamo(function)(op, *arrays, **arguments)
        return function(op, *arrays, **arguments)

    return call


@_untraced
def segment_map(op: str | Callable[..., Any], *arrays: Any, **arguments: Any) -> SegmentMap:
    """The map S -> M S + X of the states of a call, without its o.

    Parameters
    ----------
    op : str or function
        An op or a scan, such as ``"kda"`` or ``linattn.kda``.
    *arrays, **arguments
        Those of the op. An initial state and ``out`` are refused. Packed sequences (``cu_seqlens``)
        have a map each, and so have the rows of a ``mask``. Arrays that only outputs depend on,
        such as q, count for their shapes alone.

    Returns
    -------
    SegmentMap

    Raises
    ------
    TypeError
        The op refuses an argument, or a tensor requires a gradient.
    ValueError
        There is no such op, a state or ``out`` is given, the call is not causal, or the op refuses
        an argument.
    MemoryError
        The memory does not hold the map.

    See Also
    --------
    segment_map_backward : Its adjoint.
    linattn.distributed : A sequence over many GPUs, by these maps.

    Notes
    -----
    Column j of M of a delta rule is the final state of the call if v is zero and the initial state
    is column j of the identity. It costs as much as K more values for each token. A decay that
    underflows is zero, and then M is too: docs/math.md, section 3, says where a GPU takes M for
    zero. With ``normalize`` X is the pair (S, z). With ``batch=b`` maps go together if all segments
    but the last one are whole batches.

    Examples
    --------
    Two segments one after the other are what the whole is:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 20, 2, 4))  # [B,T,H,K]
    >>> beta = rng.uniform(0, 1, (1, 20, 2))
    >>> whole = linattn.segment_map("delta_rule", q, k, v, beta, qk_l2norm=True)
    >>> one, two = (
    ...     linattn.segment_map(
    ...         "delta_rule", q[:, part], k[:, part], v[:, part], beta[:, part], qk_l2norm=True
    ...     )
    ...     for part in (slice(0, 8), slice(8, 20))
    ... )
    >>> np.allclose(two.M @ one.X + two.X, whole.X), np.allclose(two.M @ one.M, whole.M)
    (True, True)
    """
    name = op_named(op, (*OPS, *SCANS))
    function = _function(name)
    given = _of_segment(function, arrays, arguments)
    if name in SCANS:
        with _unrecorded(given):
            return SegmentMap(*states_of(core_call(function, **given), segment_map=True))
    row = VARIANTS[name]
    given, like = with_default_gate(name, given), given["v"]

    def run(arrays: Mapping[str, Any], states: Any = None) -> tuple[Any, Any]:
        with _unrecorded(arrays):
            call = core_call(function, **arrays, initial_state=states)
            _, X, M = call.states_alone(segment_map=True)
        return X, M

    if row.decay == "pair":
        return _of_pairs(run, given)
    X, M = run(given)
    if M is not None:
        return SegmentMap(X, M)
    if row.decay == "none":
        return SegmentMap(X, None)
    if given["cu_seqlens"] is None:
        return SegmentMap(X, product_of_decays(given, X, row.decay == "key"))
    # v of zeros from a state of ones; as few columns as kernels in chunks take
    zeros = _zeros((*like.shape[:-1], 8), like)
    ones = _zeros((*X.shape[:-2], *_turned(given, given["k"].shape[-1], 8)), X) + 1
    M = _k_first(given, run(given | {"v": zeros}, ones)[0])[..., 0]
    return SegmentMap(X, M if row.decay == "key" else M[..., 0])


@_untraced
def segment_map_backward(
    op: str | Callable[..., Any], do: Any, *arrays: Any, **arguments: Any
) -> Any:
    """The gradient of the initial state of a call, and no other.

    It does not depend on the state, so the call needs none: the adjoint of a map M S + X is M'.

    Parameters
    ----------
    op : str or function
        An op or a scan, such as ``"kda"`` or ``linattn.kda``.
    do : array [B,T,HV,V], dtype of v
        The gradient of o; of a scan dy, array [B,T,D].
    *arrays, **arguments
        Those of the op's backward function: q, k, v, the gates, ``d_final_state``, ... An initial
        state is refused. Arrays that are written, such as v, count for their shapes alone.

    Returns
    -------
    array [N,HV,K,V], or the pair of an op with two states
        float32 (float64 for float64 inputs). [S,D,N] or [S,D] of a scan.

    Raises
    ------
    TypeError
        The op refuses an argument, or a tensor requires a gradient.
    ValueError
        There is no such op, a state is given, the call is not causal, the call is normalised (the
        gradient then depends on the state), or the op refuses an argument.
    MemoryError
        The memory does not hold what the call needs.

    See Also
    --------
    segment_map : The map itself.

    Notes
    -----
    It takes 0.12 to 0.41 of the time of the op's backward function. On the CPU it goes in chunks in
    every mode.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> do, q, k, v = rng.standard_normal((4, 1, 20, 2, 4))  # [B,T,H,K]
    >>> S = rng.standard_normal((1, 2, 4, 4))  # [N,HV,K,V]
    >>> dS = linattn.segment_map_backward("delta_rule", do, q, k, v, 0.5, qk_l2norm=True)
    >>> grads = linattn.delta_rule_backward(
    ...     do, q, k, v, 0.5, initial_state=S, qk_l2norm=True
    ... )
    >>> np.allclose(dS, grads.d_initial_state)
    True
    """
    function = _function(f"{op_named(op, (*OPS, *SCANS))}_backward")
    given = _of_segment(function, (do, *arrays), arguments)
    if given.get("normalize"):
        raise ValueError(
            f"normalize: expected False, got {given['normalize']!r}: the gradient of a normalised "
            "call depends on the state"
        )
    with _unrecorded(given):
        return initial_gradient(core_call(function, **given))


def final_state(op: str, state: Any, *arrays: Any, **arguments: Any) -> Any:
    """The final state of a call, from its initial one or from None. As segment_map, without M."""
    function = _function(op)
    given = _of_segment(function, arrays, arguments)
    with _unrecorded(given):
        return states_of(core_call(function, **given, initial_state=state))[0]


def states_of(call: CoreCall, **options: Any) -> tuple[Any, ...]:
    """The final state of a forward pass, and M if it is asked for."""
    return tuple(_as_given(call, x) for x in call.states_alone(**options)[1:])


def initial_gradient(call: CoreCall) -> Any:
    """The gradient of the initial state of a backward pass."""
    if call.core is _linattn.backward:
        return Gradients(*call.states_alone()).d_initial_state
    form, *which = call.words
    assert which == ["backward"], "a system calls its backward pass first"
    place = ROOMS["scan"].gradients(form).index("d_initial_state")
    return _as_given(call, call.states_alone()[place])


def _as_given(call: CoreCall, state: Any) -> Any:
    """A scan's complex states are pairs of reals in the core."""
    return as_complex(state) if call.arguments.get("complex") else state


def core_call(function: Callable[..., Any], *arrays: Any, **arguments: Any) -> CoreCall:
    """The pass of the core that a call of an op, or of a system, comes to. It is not run."""
    token = ASKS.set(True)
    try:
        function(*arrays, **arguments)
    except CoreCall as call:
        return call.with_traceback(None)  # which would keep the arrays of the function
    finally:
        ASKS.reset(token)
    raise AssertionError(f"{function.__name__} came to no pass of the core")


# ---- calls ----


def _function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(scans if hasattr(scans, name) else ops, name)
    return found


class _Names(NamedTuple):
    """Of the parameters of a function."""

    positional: tuple[str, ...]
    defaults: dict[str, Any]  # of all but _unknown; those without one have _MISSING


_MISSING = object()


@lru_cache
def _names_of(function: Callable[..., Any]) -> _Names:
    parameters = signature_of(function).parameters.values()
    named = [x for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    defaults = {x.name: _MISSING if x.default is x.empty else x.default for x in named}
    positional = tuple(x.name for x in named if x.kind is x.POSITIONAL_OR_KEYWORD)
    return _Names(positional, defaults)


def by_name(
    function: Callable[..., Any], arrays: tuple[Any, ...], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a function by their names, defaults too.

    A legal call needs no Signature.bind, which takes as long as a short call.
    """
    positional, defaults = _names_of(function)
    first = dict(zip(positional, arrays, strict=False))
    found: dict[str, Any] = {**defaults, **first, **arguments}
    is_legal = len(first) == len(arrays) and len(found) == len(defaults)
    is_legal = is_legal and first.keys().isdisjoint(arguments)
    if is_legal and not any(x is _MISSING for x in found.values()):
        return found
    try:
        bound = signature_of(function).bind(*arrays, **arguments)
    except TypeError as error:
        raise TypeError(f"{function.__name__}() {error}") from None
    bound.apply_defaults()
    given: dict[str, Any] = dict(bound.arguments)
    if given.pop("_unknown", None):
        function(*arrays, **arguments)  # which says what it is
    return given


def _of_segment(
    function: Callable[..., Any], arrays: tuple[Any, ...], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of the op by name, without those that a segment does not have."""
    given = by_name(function, arrays, arguments)
    for name in ("initial_state", "out"):
        if given.pop(name, None) is not None:
            raise ValueError(f"{name}: expected None: a map is of all states, without outputs")
    if given.pop("output_final_state", False):
        raise ValueError("output_final_state: expected False: the state after the tokens is X")
    if not given.get("causal", True):
        raise ValueError(f"causal: expected True, got {given['causal']!r}")
    for name, x in given.items():
        if is_recorded(x):
            raise TypeError(
                f"{name}: expected a tensor without requires_grad, or torch.no_grad(): PyTorch "
                "does not record maps of segments"
            )
    mask = given.pop("mask", None)
    return given if mask is None else _without_padding(given, mask)


def _without_padding(given: dict[str, Any], mask: Any) -> dict[str, Any]:
    """The call of the tokens of a mask, whose rows are packed sequences."""
    tokens = _padding.tokens_of(mask, given["q"], given["cu_seqlens"])
    found = {name: _padding.packed(tokens, name, x) for name, x in given.items()}
    return found | {"cu_seqlens": tokens.cu_seqlens}


@contextmanager
def _unrecorded(arrays: Mapping[str, Any]) -> Iterator[None]:
    first = next(iter(arrays.values()))
    if not is_tensor(first):
        yield
        return
    with library_of(first).no_grad():
        yield


def with_default_gate(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an op by name, with its default gate if it has one."""
    gate = next((x for x in GATES if x in given), None)
    module = sys.modules[f"linattn.ops.{name}"]
    if gate is None or given[gate] is not None or not hasattr(module, "bound_arguments"):
        return given
    shapes = [shape_of(given[x]) for x in "qkv"]
    if any(shape is None or len(shape) not in (2, 4) for shape in shapes):
        return given  # the op says what is wrong
    token = {x: given[x][:, :1].reshape(-1, *given[x].shape[2:]) for x in "qkv"}
    if given["q"].ndim == 2:
        token = {x: given[x][:1].reshape(-1) for x in "qkv"}
    return given | {gate: module.bound_arguments(**token, **{gate: None})[gate]}


# ---- M ----


def _zeros(shape: tuple[int, ...], like: Any) -> Any:
    """Zeros of the dtype of `like`, beside it."""
    if is_tensor(like):
        return like.new_zeros(shape)
    return library_of(like).zeros(shape, dtype=like.dtype)


def _turned(given: Mapping[str, Any], K: int, V: int) -> tuple[int, int]:
    """The last axes of a state."""
    return (V, K) if given.get("state_v_first") else (K, V)


def _k_first(given: Mapping[str, Any], S: Any) -> Any:
    """A state [...,K,V]."""
    return S.swapaxes(-1, -2) if given.get("state_v_first") else S


def _of_pairs(run: Callable[..., Any], given: dict[str, Any]) -> SegmentMap:
    """A pair of states, whose rows M mixes: M is where the columns of the identity end if v is
    zero."""
    X, _ = run(given)
    like, K = given["v"], given["k"].shape[-1]
    library = library_of(X[0])
    identity = library.eye(2 * K, dtype=X[0].dtype, **_beside(X[0]))
    shape = (*X[0].shape[:-2], K, 2 * K)
    starts = (library.broadcast_to(x, shape) for x in (identity[:K], identity[K:]))
    zeros = _zeros((*like.shape[:-1], 2 * K), like)
    found, _ = run(given | {"v": zeros}, tuple(_k_first(given, x) for x in starts))
    return SegmentMap(X, library.concatenate([_k_first(given, S) for S in found], -2))


def _beside(x: Any) -> dict[str, Any]:
    return {"device": x.device} if is_tensor(x) else {}


def product_of_decays(given: Mapping[str, Any], X: Any, has_keys: bool) -> Any:
    """M of a call that is not packed, whose X is known: the product of its decays, which mix no
    keys.

    It is made in float64 and becomes X's dtype, and comes from the sum of the logarithms of decays
    where these are given. A GPU takes long for sums in float64. Its own float32 sums go by a tree,
    and are a few units in the last place off.
    """
    name = next(x for x in GATES if given.get(x) is not None)
    is_log, axis = name in _LOGARITHMS, 0 if given["v"].ndim == 2 else 1
    gate: Any = given[name] if hasattr(given[name], "ndim") else np.asarray(given[name])
    gate = gate.detach() if is_tensor(gate) else gate
    library = library_of(gate)
    if gate.ndim > axis:
        real = X.dtype if is_tensor(gate) and gate.is_cuda else held(library.float64, gate)
        total = (gate.sum if is_log else gate.prod)(axis, dtype=real)
        total = library.exp(total) if is_log else total
    else:
        T = given["k"].shape[axis]
        wide = library.asarray(gate, dtype=held(library.float64, gate))
        total = library.exp((-T if name == "slopes" else T) * wide) if is_log else wide**T
    library = library_of(X)
    total = library.asarray(total, dtype=X.dtype, **_beside(X))
    keys = X.shape[-1 if given.get("state_v_first") else -2]
    if has_keys and gate.ndim <= axis:
        total = total[..., None]  # a number for all keys
    lead = X.shape[:-2]
    return _zeros((*lead, keys) if has_keys else lead, X) + total
