"""The ops: eight members of one family, three faces each.

One recurrence, per sequence and value head, with S the state [K,V]::

    decay    S <- diag(a) S         a = 1 | one per head | one per token | one per token and key
    predict  p  = S' k              delta rule only
    write    S <- S + k u'          u = v  |  beta (v - p)
    read     o  = scale * S' q      after the write: a token sees itself

Letters: B batch, T tokens, H query/key heads, HV value heads (a multiple of H; value head h reads
query/key head h // (HV // H)), K key dimension, V value dimension, N sequences (B, or
len(cu_seqlens) - 1). Gates called ``g`` are natural LOGARITHMS of the decay, g <= 0; the decay
itself goes under ``alpha`` (``gamma`` in retention). One head may drop its axes: q, k [T,K] and
v [T,V] work and come back 2-D.

Arrays are NumPy's, PyTorch's, CuPy's, JAX's or any other library's that has ``__dlpack__`` or
``__cuda_array_interface__``: float64, float32, float16 or bfloat16 (ml_dtypes' in NumPy), one dtype
for q, k and v; gates any of them. A call runs where q lies, on the CPU or on a CUDA device, and all
its arrays lie there (a gate with one number per head may stay on the host); what it returns is of
q's kind. On a device a call is enqueued on the caller's current stream and nothing waits for it.
Sums and states are float32, or float64 for float64 inputs. Inputs are never written. If q is
PyTorch's, gradients of the forward functions are recorded (linattn/autograd.py). A wrong argument
raises TypeError or ValueError that names it, what was expected and what came, before anything is
written; MemoryError likewise.

The functions are thin: they turn keywords into positions. What is right is decided in
csrc/check.c, from the table in csrc/variants.def.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from linattn import _linattn
from linattn.features import (
    FeatureMap,
    FeatureMapLike,
    cast,
    feature_maps,
    has_memory,
    is_array,
    l2norm,
    l2norm_backward,
    shape_of,
)

OPS: tuple[str, ...] = _linattn.OPS
BoundStep = _linattn.BoundStep
__all__ = [
    "OPS",
    "BoundStep",
    "Gradients",
    "bind",
    "implicit_weights",
    "lightning_slopes",
    *OPS,
    *(f"{name}_step" for name in OPS),
    *(f"{name}_backward" for name in OPS),
]

# An array of any kind (no protocol says it all: PyTorch's and NumPy's share no method).
Array = Any
State = Array | tuple[Array, Array]


class Gradients(NamedTuple):
    """What a backward returns, each with the shape and dtype of what it is the gradient of.

    ``dg`` is the gradient of the gate as it was given: g, alpha, gamma or slopes.
    ``d_initial_state`` is float32 (float64 for float64 inputs), the pair (dS, dz) for a normalised
    op. What a call was not given is None.
    """

    dq: Array
    dk: Array
    dv: Array
    dg: Array | None
    dbeta: Array | None
    d_initial_state: State | None


# ---- what the functions below share ----


def _is_tensor(x: Array) -> bool:
    """Is this PyTorch's? It is not imported for the question."""
    if type(x) is np.ndarray or "torch" not in sys.modules:
        return False
    return isinstance(x, sys.modules["torch"].Tensor)


def _is_recorded(x: Array) -> bool:
    return _is_tensor(x) and x.requires_grad and sys.modules["torch"].is_grad_enabled()


def _is_traced(x: Array) -> bool:
    """Is torch.compile reading this line? It looks through a cache, and warns of that."""
    return _is_tensor(x) and sys.modules["torch"].compiler.is_compiling()


def _forward(q: Array) -> Callable[..., tuple[Array, Any]]:
    """Who runs a forward pass: the core, or PyTorch, which records what it hands on to the core."""
    if not _is_tensor(q):
        return _linattn.forward
    from linattn import autograd

    return autograd.forward


_Core = tuple[int, float, int, float, int, float, bool]


def _features(
    feature_map: FeatureMapLike | tuple[FeatureMapLike, FeatureMapLike],
    normalize: bool | str,
    eps: float,
    causal: bool,
) -> tuple[FeatureMap, FeatureMap, _Core]:
    """The maps of q and k, and linear attention's options as the core takes them."""
    if isinstance(feature_map, str) and isinstance(normalize, bool | str) and type(eps) is float:
        return _named_features(feature_map, normalize, eps, causal is True or _flag(causal))
    return _any_features(feature_map, normalize, eps, causal)


def _flag(causal: object) -> bool:
    if not isinstance(causal, bool | np.bool_):
        raise TypeError(f"causal: expected True or False, got {type(causal).__name__}")
    return bool(causal)


def _any_features(
    feature_map: object, normalize: object, eps: object, causal: object
) -> tuple[FeatureMap, FeatureMap, _Core]:
    phi_q, phi_k = feature_maps(feature_map)
    if isinstance(normalize, str):
        if normalize not in ("clamp", "add"):
            raise ValueError(f"normalize: expected a bool, 'clamp' or 'add', got {normalize!r}")
        normalizer = 1 if normalize == "clamp" else 2
    elif isinstance(normalize, bool | np.bool_):
        normalizer = int(normalize)
        if normalize and (phi_q.may_be_negative or phi_k.may_be_negative):
            raise ValueError(
                "normalize: with feature_map='identity' the denominator may be negative or zero, "
                "and clamping it is wrong; expected False (or 'clamp' to insist), got True"
            )
    else:
        raise TypeError(
            f"normalize: expected a bool, 'clamp' or 'add', got {type(normalize).__name__}"
        )
    if isinstance(eps, bool) or not isinstance(eps, int | float | np.floating | np.integer):
        raise TypeError(f"eps: expected a number, got {type(eps).__name__}")
    try:
        small = float(eps)
    except OverflowError:
        raise ValueError(f"eps: expected a finite number >= 0, got {eps}") from None
    core = (phi_q.core, phi_q.eps, phi_k.core, phi_k.eps, normalizer, small, _flag(causal))
    return phi_q, phi_k, core


# A step is called for every token; the usual options are worked out once.
_named_features = lru_cache(maxsize=64, typed=True)(_any_features)


def _apply(phi: FeatureMap, name: str, x: Array) -> Array:
    """phi(x) for a map that is not the core's own."""
    if phi.forward is None:
        return x
    y = phi.forward(x)
    if not is_array(y) or y.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"feature_map: expected {phi.name} to give an array [..., K'] for {name} of shape "
            f"{tuple(x.shape)}, got {tuple(y.shape) if is_array(y) else type(y)}"
        )
    if _is_recorded(x) and not _is_recorded(y):
        raise ValueError(
            f"feature_map: expected PyTorch to record what {phi.name} makes of {name}, which "
            "requires gradients; got a result that requires none"
        )
    return cast(y, x.dtype)


def _apply_backward(phi: FeatureMap, name: str, x: Array, dy: Array) -> Array:
    """The gradient of x when dy is that of phi(x): was y = phi(x)."""
    if phi.backward is None:
        return dy
    dx = phi.backward(x, dy)
    if not is_array(dx) or dx.shape != x.shape:
        raise ValueError(
            f"feature_map: expected {phi.name}'s backward to give the gradient of {name}, "
            f"shape {tuple(x.shape)}, got {tuple(dx.shape) if is_array(dx) else type(dx)}"
        )
    return cast(dx, x.dtype)


def _mapped(
    phi_q: FeatureMap,
    phi_k: FeatureMap,
    q: Array,
    k: Array,
    qk_l2norm: bool,
    written: dict[str, Any],
    call: Callable[..., Any] | None = None,
) -> tuple[Array, Array, Array, Array, bool]:
    """q and k before and after the caller's own maps, and whether the core still has to l2-norm.

    The norm comes before the map, so a map outside the core takes the norm out with it.
    """
    if phi_q.forward is None and phi_k.forward is None:
        return q, k, q, k, qk_l2norm
    if call is _linattn.bind:
        raise ValueError(
            "feature_map: expected one that runs inside the kernels (a name), got a function: a "
            "bound step would keep what it made of q and k, however these change"
        )
    for name, x in (("q", q), ("k", k)):
        if not is_array(x):
            raise TypeError(f"{name}: expected an array, got {type(x)}")
    _refuse_shared(written, q, k)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    return q, k, _apply(phi_q, "q", q), _apply(phi_k, "k", k), False


@lru_cache(maxsize=64)
def _default_gamma(HV: int) -> np.ndarray:
    gamma = 1 - 2.0 ** (-5 - np.arange(HV))
    gamma.flags.writeable = False
    return gamma


def _retention_gamma(q: Array, k: Array, v: Array, ndim: int) -> Array | None:
    """RetNet's decays for v's heads; None where the core will say what is wrong with v."""
    shape = shape_of(v)
    if shape is None:
        if has_memory(q) and has_memory(k) and has_memory(v):  # the core would take all three
            raise TypeError(
                f"gamma: expected [HV], since v has no shape to make it of; got None ({type(v)})"
            )
        return None
    if len(shape) not in (ndim, ndim - 2):
        return None
    HV = shape[-2] if len(shape) == ndim else 1
    if _is_traced(v):
        torch = sys.modules["torch"]
        return torch.tensor([1 - 2.0 ** (-5 - h) for h in range(HV)], dtype=torch.float64)
    try:
        return _default_gamma(HV)
    except TypeError:  # that is no number, so v is no array
        return None
    except MemoryError:
        raise MemoryError(
            f"v: expected as many heads as fit in memory, got [HV] = ({HV},)"
        ) from None


def _refuse_shared(written: dict[str, Any], q: Array, k: Array) -> None:
    """What is written may not lie in q or k, also where a map made copies of them."""
    for name, given in written.items():
        for x in given if isinstance(given, tuple | list) else (given,):
            for of, other in (("q", q), ("k", k)):
                if is_array(x) and _share(x, other):
                    raise ValueError(
                        f"{name}: expected memory of its own, got memory shared with {of}"
                    )


def _share(x: Array, y: Array) -> bool:
    try:
        return _linattn.shares_memory(x, y)
    except (TypeError, ValueError):
        return False  # one of them is no array for an op: the core refuses it by its name


def _count(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None


def lightning_slopes(
    H: int, *, layer: int = 0, layers: int = 1, rule: str = "minimax"
) -> np.ndarray:
    """The slopes of :func:`lightning_attention` by either published rule, float64 [H].

    Parameters
    ----------
    H : int
        Heads.
    layer, layers : int
        Which layer of how many; deeper layers forget more slowly.
    rule : {"minimax", "transnormer"}
        ``"minimax"`` (Lightning Attention-2, MiniMax-01): ALiBi's slopes 2**(-8 (h+1) / H) (for an
        H that is no power of two, those of the power below and every second of the power above),
        times 1 - layer / (layers - 1) + 1e-5.
        ``"transnormer"`` (TransNormerLLM): 8 h / H * (1 - layer / layers).
    """
    H, layer, layers = _count("H", H), _count("layer", layer), _count("layers", layers)
    if H < 1:
        raise ValueError(f"H: expected at least 1 head, got {H}")
    if not 0 <= layer < layers:
        raise ValueError(f"layer: expected 0 <= layer < layers = {layers}, got {layer}")
    if rule not in ("minimax", "transnormer"):
        raise ValueError(f"rule: expected 'minimax' or 'transnormer', got {rule!r}")
    try:
        if rule == "transnormer":
            return 8 * np.arange(H) / H * (1 - layer / layers)
        return _alibi(H) * (1 - layer / (layers - 1) + 1e-5 if layers > 1 else 1)
    except (MemoryError, ValueError):  # NumPy's, of an array beyond the memory or its addresses
        raise MemoryError(f"H: expected as many heads as fit in memory, got {H}") from None


def _alibi(H: int) -> np.ndarray:
    below = 1 << (H.bit_length() - 1)

    def of_power(n: int) -> np.ndarray:
        return 2.0 ** (-8 * np.arange(1, n + 1) / n)

    return np.concatenate([of_power(below), of_power(2 * below)[::2][: H - below]])


# ---- linear attention ----

_LINEAR = OPS.index("linear_attention")


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    feature_map: FeatureMapLike | tuple[FeatureMapLike, FeatureMapLike] = "elu+1",
    normalize: bool | str = True,
    causal: bool = True,
    eps: float = 1e-6,
    scale: float | None = None,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    allow_tf32: bool | None = None,
    out: Array | None = None,
) -> tuple[Array, State | None]:
    """Linear attention: the softmax replaced by a feature map, so that a sum serves as memory.

    ::

        S <- S + phi(k) v',   z <- z + phi(k)
        o = scale * S' phi(q) / max(scale * z' phi(q), eps)

    Katharopoulos et al., 2020, *Transformers are RNNs*.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    feature_map : str, FeatureMap, callable, or a pair (phi_q, phi_k)
        ``"elu+1"``, ``"relu+eps"``, ``"relu2"``, ``"exp"``, ``"identity"``, or a function from
        [..., K] to [..., K'] (K is then K' everywhere below). See :class:`linattn.FeatureMap`.
    normalize : bool, "clamp" or "add"
        Divide by max(den, eps) (True, ``"clamp"``), by den + eps (``"add"``), or not at all. The
        clamp is only right for maps that are never negative: True is refused with ``"identity"``,
        ``"clamp"`` insists.
    causal : bool
        False: every token reads the whole sequence.
    eps : float
        Of the normaliser.
    scale : float, optional
        Of numerator and denominator; K**-0.5 by default.
    initial_state : array [N,HV,K,V], or the pair (S, z [N,HV,K]) if normalised, optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mode : {"chunk", "recurrent", "parallel"}
        A chunk of tokens at a time, token by token, or all at once (quadratic in T). They agree;
        the non-causal form has one way only, which is linear in T.
    chunk_size : int, optional
        Tokens per chunk.
    qk_l2norm : bool
        q, k <- x / sqrt(sum x^2 + 1e-6) along K, before the feature map.
    state_v_first : bool
        S is [N,HV,V,K].
    allow_tf32 : bool, optional
        May products of float32 numbers be rounded as tf32's are? A forward pass in chunks with
        K <= 128 on a Hopper GPU is then 1.4 to 8 times as fast. By default as
        :func:`linattn.set_float32_precision` says.
    out : array [B,T,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,T,HV,V], dtype of v
    final_state : array [N,HV,K,V], or the pair (S, z), or None
    """
    options = _any_features if _is_traced(q) else _features
    phi_q, phi_k, core = options(feature_map, normalize, eps, causal)
    _, _, q, k, qk_l2norm = _mapped(phi_q, phi_k, q, k, qk_l2norm, {"out": out})
    return _forward(q)(
        _LINEAR,
        q,
        k,
        v,
        None,
        None,
        None,
        initial_state,
        cu_seqlens,
        out,
        output_final_state,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        allow_tf32,
        core,
    )


def linear_attention_step(
    q: Array,
    k: Array,
    v: Array,
    *,
    state: State,
    state_indices: Array | None = None,
    feature_map: FeatureMapLike | tuple[FeatureMapLike, FeatureMapLike] = "elu+1",
    normalize: bool | str = True,
    eps: float = 1e-6,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: Array | None = None,
    _call: Callable[..., Any] = _linattn.step,
) -> Array:
    """One token of causal :func:`linear_attention`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    state : the pair (S [B,HV,K,V], z [B,HV,K]), or S alone if not normalised
        float32 (float64 for float64 inputs) or bfloat16; rows contiguous. See
        :func:`linattn.zeros_state`.
    state_indices : int array [B], optional
        S and z are then pools [P,HV,K,V] and [P,HV,K]: row n has state ``state_indices[n]``, and -1
        none (its o is zeros). No state twice.
    feature_map, normalize, eps, scale, qk_l2norm, state_v_first : see :func:`linear_attention`
    out : array [B,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,HV,V], dtype of v

    Nothing is copied: an array whose innermost axis is not contiguous is refused (ValueError).
    """
    phi_q, phi_k, core = _features(feature_map, normalize, eps, True)
    written = {"out": out, "state": state}
    _, _, q, k, qk_l2norm = _mapped(phi_q, phi_k, q, k, qk_l2norm, written, _call)
    return _call(
        _LINEAR,
        q,
        k,
        v,
        None,
        None,
        None,
        state,
        state_indices,
        out,
        scale,
        qk_l2norm,
        state_v_first,
        core,
    )


def linear_attention_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    feature_map: FeatureMapLike | tuple[FeatureMapLike, FeatureMapLike] = "elu+1",
    normalize: bool | str = True,
    causal: bool = True,
    eps: float = 1e-6,
    d_final_state: State | None = None,
    scale: float | None = None,
    initial_state: State | None = None,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> Gradients:
    """The gradients of :func:`linear_attention`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    feature_map : as in the forward call
        A function of your own needs ``FeatureMap(name, forward=..., backward=...)``.
    d_final_state : array [N,HV,K,V], or the pair (dS, dz) if normalised, optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    normalize, causal, eps, scale, initial_state, cu_seqlens, mode, chunk_size, qk_l2norm, \
state_v_first :
        As in the forward call.

    Returns
    -------
    Gradients
    """
    phi_q, phi_k, core = _features(feature_map, normalize, eps, causal)
    for phi in (phi_q, phi_k):
        if phi.forward is not None and phi.backward is None:
            raise ValueError(
                "feature_map: the gradient of a function of your own needs "
                f"FeatureMap(name, forward=..., backward=...), got {phi.name} without backward"
            )
    q0, k0 = q, k
    q1, k1, q, k, core_l2norm = _mapped(phi_q, phi_k, q, k, qk_l2norm, {})
    grads = _linattn.backward(
        _LINEAR,
        do,
        q,
        k,
        v,
        None,
        None,
        None,
        initial_state,
        d_final_state,
        cu_seqlens,
        scale,
        mode,
        chunk_size,
        core_l2norm,
        state_v_first,
        core,
    )
    dq, dk, *rest = grads
    dq, dk = _apply_backward(phi_q, "q", q1, dq), _apply_backward(phi_k, "k", k1, dk)
    if qk_l2norm and not core_l2norm:  # was q1 = l2norm(q0)
        dq, dk = cast(l2norm_backward(q0, dq), q0.dtype), cast(l2norm_backward(k0, dk), k0.dtype)
    return Gradients(dq, dk, *rest)


# ---- the rest of the table ----


_RETENTION = OPS.index("retention")


def retention(
    q: Array,
    k: Array,
    v: Array,
    *,
    gamma: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    allow_tf32: bool | None = None,
    out: Array | None = None,
) -> tuple[Array, Array | None]:
    """RetNet's retention: one constant decay per head.

    ::

        S <- gamma_h S + k v',   o = scale * S' q

    Sun et al., 2023, *Retentive Network: A Successor to Transformer*.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    gamma : array [HV], optional
        The decay itself, in [0, 1]; 1 - 2**(-5 - h) by default.
    scale : float, optional
        Of the reads; K**-0.5 by default.
    initial_state : array [N,HV,K,V], optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mode : {"chunk", "recurrent", "parallel"}
        A chunk of tokens at a time, token by token, or all at once (quadratic in T). They agree.
    chunk_size : int, optional
        Tokens per chunk.
    qk_l2norm : bool
        q, k <- x / sqrt(sum x^2 + 1e-6) along K.
    state_v_first : bool
        States are [N,HV,V,K].
    allow_tf32 : bool, optional
        May products of float32 numbers be rounded as tf32's are? A forward pass in chunks with
        K <= 128 on a Hopper GPU is then 1.4 to 8 times as fast. By default as
        :func:`linattn.set_float32_precision` says.
    out : array [B,T,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,T,HV,V], dtype of v
    final_state : array [N,HV,K,V] or None
    """
    gate = _retention_gamma(q, k, v, 4) if gamma is None else gamma
    return _forward(q)(
        _RETENTION,
        q,
        k,
        v,
        None,
        gate,
        None,
        initial_state,
        cu_seqlens,
        out,
        output_final_state,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        allow_tf32,
        None,
    )


def retention_step(
    q: Array,
    k: Array,
    v: Array,
    *,
    gamma: Array | None = None,
    state: Array,
    state_indices: Array | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: Array | None = None,
    _call: Callable[..., Any] = _linattn.step,
) -> Array:
    """One token of :func:`retention`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    gamma : array [HV], optional
        The decay itself, in [0, 1]; 1 - 2**(-5 - h) by default.
    state : array [B,HV,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous. See
        :func:`linattn.zeros_state`.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,HV,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, qk_l2norm, state_v_first : see :func:`retention`
    out : array [B,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,HV,V], dtype of v

    Nothing is copied: an array whose innermost axis is not contiguous is refused (ValueError).
    """
    gate = _retention_gamma(q, k, v, 3) if gamma is None else gamma
    return _call(
        _RETENTION,
        q,
        k,
        v,
        None,
        gate,
        None,
        state,
        state_indices,
        out,
        scale,
        qk_l2norm,
        state_v_first,
        None,
    )


def retention_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    gamma: Array | None = None,
    d_final_state: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> Gradients:
    """The gradients of :func:`retention`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    gamma : array [HV], optional
        The decay itself, in [0, 1]; 1 - 2**(-5 - h) by default.
    d_final_state : array [N,HV,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mode, chunk_size, qk_l2norm, state_v_first :
        As in the forward call.

    Returns
    -------
    Gradients
    """
    gate = _retention_gamma(q, k, v, 4) if gamma is None else gamma
    grads = _linattn.backward(
        _RETENTION,
        do,
        q,
        k,
        v,
        None,
        gate,
        None,
        initial_state,
        d_final_state,
        cu_seqlens,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        None,
    )
    return Gradients(*grads)


_LIGHTNING = OPS.index("lightning_attention")


def lightning_attention(
    q: Array,
    k: Array,
    v: Array,
    slopes: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    allow_tf32: bool | None = None,
    out: Array | None = None,
) -> tuple[Array, Array | None]:
    """Lightning Attention: one constant decay per head, given by its slope.

    ::

        S <- exp(-slope_h) S + k v',   o = scale * S' q

    Qin et al., 2024, *Lightning Attention-2*; MiniMax-01, 2025. Slopes: :func:`lightning_slopes`.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    slopes : array [HV]
        Minus the log of the decay, >= 0.
    scale : float, optional
        Of the reads; K**-0.5 by default.
    initial_state : array [N,HV,K,V], optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mode : {"chunk", "recurrent", "parallel"}
        A chunk of tokens at a time, token by token, or all at once (quadratic in T). They agree.
    chunk_size : int, optional
        Tokens per chunk.
    qk_l2norm : bool
        q, k <- x / sqrt(sum x^2 + 1e-6) along K.
    state_v_first : bool
        States are [N,HV,V,K].
    allow_tf32 : bool, optional
        May products of float32 numbers be rounded as tf32's are? A forward pass in chunks with
        K <= 128 on a Hopper GPU is then 1.4 to 8 times as fast. By default as
        :func:`linattn.set_float32_precision` says.
    out : array [B,T,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,T,HV,V], dtype of v
    final_state : array [N,HV,K,V] or None
    """
    return _forward(q)(
        _LIGHTNING,
        q,
        k,
        v,
        slopes,
        None,
        None,
        initial_state,
        cu_seqlens,
        out,
        output_final_state,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        allow_tf32,
        None,
    )


def lightning_attention_step(
    q: Array,
    k: Array,
    v: Array,
    slopes: Array,
    *,
    state: Array,
    state_indices: Array | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: Array | None = None,
    _call: Callable[..., Any] = _linattn.step,
) -> Array:
    """One token of :func:`lightning_attention`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    slopes : array [HV]
        Minus the log of the decay, >= 0.
    state : array [B,HV,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous. See
        :func:`linattn.zeros_state`.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,HV,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, qk_l2norm, state_v_first : see :func:`lightning_attention`
    out : array [B,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,HV,V], dtype of v

    Nothing is copied: an array whose innermost axis is not contiguous is refused (ValueError).
    """
    return _call(
        _LIGHTNING,
        q,
        k,
        v,
        slopes,
        None,
        None,
        state,
        state_indices,
        out,
        scale,
        qk_l2norm,
        state_v_first,
        None,
    )


def lightning_attention_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    slopes: Array,
    *,
    d_final_state: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> Gradients:
    """The gradients of :func:`lightning_attention`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    slopes : array [HV]
        Minus the log of the decay, >= 0.
    d_final_state : array [N,HV,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mode, chunk_size, qk_l2norm, state_v_first :
        As in the forward call.

    Returns
    -------
    Gradients
    """
    grads = _linattn.backward(
        _LIGHTNING,
        do,
        q,
        k,
        v,
        slopes,
        None,
        None,
        initial_state,
        d_final_state,
        cu_seqlens,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        None,
    )
    return Gradients(*grads)


_SIMPLE_GLA = OPS.index("simple_gla")


def simple_gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    *,
    alpha: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    allow_tf32: bool | None = None,
    out: Array | None = None,
) -> tuple[Array, Array | None]:
    """Scalar-gated linear attention: one decay per token and head (Mamba-2's recurrence).

    ::

        S <- exp(g_t) S + k v',   o = scale * S' q

    Yang et al., 2024, *Gated Linear Attention Transformers*; Dao and
    Gu, 2024, *Transformers are SSMs*.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV], optional
        Natural LOG of the decay, <= 0.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    scale : float, optional
        Of the reads; K**-0.5 by default.
    initial_state : array [N,HV,K,V], optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mode : {"chunk", "recurrent", "parallel"}
        A chunk of tokens at a time, token by token, or all at once (quadratic in T). They agree.
    chunk_size : int, optional
        Tokens per chunk.
    qk_l2norm : bool
        q, k <- x / sqrt(sum x^2 + 1e-6) along K.
    state_v_first : bool
        States are [N,HV,V,K].
    allow_tf32 : bool, optional
        May products of float32 numbers be rounded as tf32's are? A forward pass in chunks with
        K <= 128 on a Hopper GPU is then 1.4 to 8 times as fast. By default as
        :func:`linattn.set_float32_precision` says.
    out : array [B,T,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,T,HV,V], dtype of v
    final_state : array [N,HV,K,V] or None
    """
    return _forward(q)(
        _SIMPLE_GLA,
        q,
        k,
        v,
        g,
        alpha,
        None,
        initial_state,
        cu_seqlens,
        out,
        output_final_state,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        allow_tf32,
        None,
    )


def simple_gla_step(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    *,
    alpha: Array | None = None,
    state: Array,
    state_indices: Array | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: Array | None = None,
    _call: Callable[..., Any] = _linattn.step,
) -> Array:
    """One token of :func:`simple_gla`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    g : array [B,HV], optional
        Natural LOG of the decay, <= 0.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    state : array [B,HV,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous. See
        :func:`linattn.zeros_state`.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,HV,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, qk_l2norm, state_v_first : see :func:`simple_gla`
    out : array [B,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,HV,V], dtype of v

    Nothing is copied: an array whose innermost axis is not contiguous is refused (ValueError).
    """
    return _call(
        _SIMPLE_GLA,
        q,
        k,
        v,
        g,
        alpha,
        None,
        state,
        state_indices,
        out,
        scale,
        qk_l2norm,
        state_v_first,
        None,
    )


def simple_gla_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    *,
    alpha: Array | None = None,
    d_final_state: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> Gradients:
    """The gradients of :func:`simple_gla`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV], optional
        Natural LOG of the decay, <= 0.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    d_final_state : array [N,HV,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mode, chunk_size, qk_l2norm, state_v_first :
        As in the forward call.

    Returns
    -------
    Gradients
    """
    grads = _linattn.backward(
        _SIMPLE_GLA,
        do,
        q,
        k,
        v,
        g,
        alpha,
        None,
        initial_state,
        d_final_state,
        cu_seqlens,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        None,
    )
    return Gradients(*grads)


_GLA = OPS.index("gla")


def gla(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    *,
    alpha: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    allow_tf32: bool | None = None,
    out: Array | None = None,
) -> tuple[Array, Array | None]:
    """Gated linear attention: one decay per token, head and key.

    ::

        S <- diag(exp(g_t)) S + k v',   o = scale * S' q

    Yang et al., 2024, *Gated Linear Attention Transformers with Hardware-Efficient Training*.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV,K], optional
        Natural LOG of the decay, <= 0, for every key.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    scale : float, optional
        Of the reads; K**-0.5 by default.
    initial_state : array [N,HV,K,V], optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mode : {"chunk", "recurrent", "parallel"}
        A chunk of tokens at a time, token by token, or all at once (quadratic in T). They agree.
    chunk_size : int, optional
        Tokens per chunk.
    qk_l2norm : bool
        q, k <- x / sqrt(sum x^2 + 1e-6) along K.
    state_v_first : bool
        States are [N,HV,V,K].
    allow_tf32 : bool, optional
        May products of float32 numbers be rounded as tf32's are? A forward pass in chunks with
        K <= 128 on a Hopper GPU is then 1.4 to 8 times as fast. By default as
        :func:`linattn.set_float32_precision` says.
    out : array [B,T,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,T,HV,V], dtype of v
    final_state : array [N,HV,K,V] or None
    """
    return _forward(q)(
        _GLA,
        q,
        k,
        v,
        g,
        alpha,
        None,
        initial_state,
        cu_seqlens,
        out,
        output_final_state,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        allow_tf32,
        None,
    )


def gla_step(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    *,
    alpha: Array | None = None,
    state: Array,
    state_indices: Array | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: Array | None = None,
    _call: Callable[..., Any] = _linattn.step,
) -> Array:
    """One token of :func:`gla`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    g : array [B,HV,K], optional
        Natural LOG of the decay, <= 0, for every key.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    state : array [B,HV,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous. See
        :func:`linattn.zeros_state`.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,HV,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, qk_l2norm, state_v_first : see :func:`gla`
    out : array [B,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,HV,V], dtype of v

    Nothing is copied: an array whose innermost axis is not contiguous is refused (ValueError).
    """
    return _call(
        _GLA,
        q,
        k,
        v,
        g,
        alpha,
        None,
        state,
        state_indices,
        out,
        scale,
        qk_l2norm,
        state_v_first,
        None,
    )


def gla_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    *,
    alpha: Array | None = None,
    d_final_state: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> Gradients:
    """The gradients of :func:`gla`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV,K], optional
        Natural LOG of the decay, <= 0, for every key.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    d_final_state : array [N,HV,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mode, chunk_size, qk_l2norm, state_v_first :
        As in the forward call.

    Returns
    -------
    Gradients
    """
    grads = _linattn.backward(
        _GLA,
        do,
        q,
        k,
        v,
        g,
        alpha,
        None,
        initial_state,
        d_final_state,
        cu_seqlens,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        None,
    )
    return Gradients(*grads)


_DELTA = OPS.index("delta_rule")


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    allow_tf32: bool | None = None,
    out: Array | None = None,
) -> tuple[Array, Array | None]:
    """The delta rule (DeltaNet): write what the state does not yet predict.

    ::

        S <- S + beta_t k (v - S' k)',   o = scale * S' q

    With keys of norm well above 1 the state can grow without bound; ``qk_l2norm=True`` is the cure.

    Schlag et al., 2021, *Linear Transformers Are Secretly Fast Weight Programmers*; Yang et al.,
    2024, *Parallelizing Linear Transformers with the Delta Rule over Sequence Length*.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    beta : array [B,T,HV]
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
    scale : float, optional
        Of the reads; K**-0.5 by default.
    initial_state : array [N,HV,K,V], optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mode : {"chunk", "recurrent", "parallel"}
        A chunk of tokens at a time, token by token, or all at once (quadratic in T). They agree.
    chunk_size : int, optional
        Tokens per chunk.
    qk_l2norm : bool
        q, k <- x / sqrt(sum x^2 + 1e-6) along K.
    state_v_first : bool
        States are [N,HV,V,K].
    allow_tf32 : bool, optional
        May products of float32 numbers be rounded as tf32's are? A forward pass in chunks with
        K <= 128 on a Hopper GPU is then 1.4 to 8 times as fast. By default as
        :func:`linattn.set_float32_precision` says.
    out : array [B,T,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,T,HV,V], dtype of v
    final_state : array [N,HV,K,V] or None
    """
    return _forward(q)(
        _DELTA,
        q,
        k,
        v,
        None,
        None,
        beta,
        initial_state,
        cu_seqlens,
        out,
        output_final_state,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        allow_tf32,
        None,
    )


def delta_rule_step(
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    state: Array,
    state_indices: Array | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: Array | None = None,
    _call: Callable[..., Any] = _linattn.step,
) -> Array:
    """One token of :func:`delta_rule`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    beta : array [B,HV]
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
    state : array [B,HV,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous. See
        :func:`linattn.zeros_state`.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,HV,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, qk_l2norm, state_v_first : see :func:`delta_rule`
    out : array [B,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,HV,V], dtype of v

    Nothing is copied: an array whose innermost axis is not contiguous is refused (ValueError).
    """
    return _call(
        _DELTA,
        q,
        k,
        v,
        None,
        None,
        beta,
        state,
        state_indices,
        out,
        scale,
        qk_l2norm,
        state_v_first,
        None,
    )


def delta_rule_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    beta: Array,
    *,
    d_final_state: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> Gradients:
    """The gradients of :func:`delta_rule`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    beta : array [B,T,HV]
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
    d_final_state : array [N,HV,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mode, chunk_size, qk_l2norm, state_v_first :
        As in the forward call.

    Returns
    -------
    Gradients
    """
    grads = _linattn.backward(
        _DELTA,
        do,
        q,
        k,
        v,
        None,
        None,
        beta,
        initial_state,
        d_final_state,
        cu_seqlens,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        None,
    )
    return Gradients(*grads)


_GATED_DELTA = OPS.index("gated_delta_rule")


def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    beta: Array | None = None,
    *,
    alpha: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    allow_tf32: bool | None = None,
    out: Array | None = None,
) -> tuple[Array, Array | None]:
    """The gated delta rule (Gated DeltaNet): decay, then the delta rule.

    ::

        S <- exp(g_t) S;   S <- S + beta_t k (v - S' k)',   o = scale * S' q

    The prediction is made from the decayed state.

    Yang et al., 2024, *Gated Delta Networks: Improving Mamba2 with Delta Rule*.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV], optional
        Natural LOG of the decay, <= 0.
    beta : array [B,T,HV]
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    scale : float, optional
        Of the reads; K**-0.5 by default.
    initial_state : array [N,HV,K,V], optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mode : {"chunk", "recurrent", "parallel"}
        A chunk of tokens at a time, token by token, or all at once (quadratic in T). They agree.
    chunk_size : int, optional
        Tokens per chunk.
    qk_l2norm : bool
        q, k <- x / sqrt(sum x^2 + 1e-6) along K.
    state_v_first : bool
        States are [N,HV,V,K].
    allow_tf32 : bool, optional
        May products of float32 numbers be rounded as tf32's are? A forward pass in chunks with
        K <= 128 on a Hopper GPU is then 1.4 to 8 times as fast. By default as
        :func:`linattn.set_float32_precision` says.
    out : array [B,T,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,T,HV,V], dtype of v
    final_state : array [N,HV,K,V] or None
    """
    return _forward(q)(
        _GATED_DELTA,
        q,
        k,
        v,
        g,
        alpha,
        beta,
        initial_state,
        cu_seqlens,
        out,
        output_final_state,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        allow_tf32,
        None,
    )


def gated_delta_rule_step(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    beta: Array | None = None,
    *,
    alpha: Array | None = None,
    state: Array,
    state_indices: Array | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: Array | None = None,
    _call: Callable[..., Any] = _linattn.step,
) -> Array:
    """One token of :func:`gated_delta_rule`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    g : array [B,HV], optional
        Natural LOG of the decay, <= 0.
    beta : array [B,HV]
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    state : array [B,HV,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous. See
        :func:`linattn.zeros_state`.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,HV,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, qk_l2norm, state_v_first : see :func:`gated_delta_rule`
    out : array [B,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,HV,V], dtype of v

    Nothing is copied: an array whose innermost axis is not contiguous is refused (ValueError).
    """
    return _call(
        _GATED_DELTA,
        q,
        k,
        v,
        g,
        alpha,
        beta,
        state,
        state_indices,
        out,
        scale,
        qk_l2norm,
        state_v_first,
        None,
    )


def gated_delta_rule_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    beta: Array | None = None,
    *,
    alpha: Array | None = None,
    d_final_state: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> Gradients:
    """The gradients of :func:`gated_delta_rule`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV], optional
        Natural LOG of the decay, <= 0.
    beta : array [B,T,HV]
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    d_final_state : array [N,HV,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mode, chunk_size, qk_l2norm, state_v_first :
        As in the forward call.

    Returns
    -------
    Gradients
    """
    grads = _linattn.backward(
        _GATED_DELTA,
        do,
        q,
        k,
        v,
        g,
        alpha,
        beta,
        initial_state,
        d_final_state,
        cu_seqlens,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        None,
    )
    return Gradients(*grads)


_KDA = OPS.index("kda")


def kda(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    beta: Array | None = None,
    *,
    alpha: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    allow_tf32: bool | None = None,
    out: Array | None = None,
) -> tuple[Array, Array | None]:
    """Kimi Delta Attention: a decay per key, then the delta rule on the decayed state.

    ::

        S <- diag(exp(g_t)) S;   S <- S + beta_t k (v - S' k)',   o = scale * S' q

    Kimi Team, 2025, *Kimi Linear: An Expressive, Efficient Attention Architecture*.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV,K], optional
        Natural LOG of the decay, <= 0, for every key.
    beta : array [B,T,HV]
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    scale : float, optional
        Of the reads; K**-0.5 by default.
    initial_state : array [N,HV,K,V], optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mode : {"chunk", "recurrent", "parallel"}
        A chunk of tokens at a time, token by token, or all at once (quadratic in T). They agree.
    chunk_size : int, optional
        Tokens per chunk.
    qk_l2norm : bool
        q, k <- x / sqrt(sum x^2 + 1e-6) along K.
    state_v_first : bool
        States are [N,HV,V,K].
    allow_tf32 : bool, optional
        May products of float32 numbers be rounded as tf32's are? A forward pass in chunks with
        K <= 128 on a Hopper GPU is then 1.4 to 8 times as fast. By default as
        :func:`linattn.set_float32_precision` says.
    out : array [B,T,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,T,HV,V], dtype of v
    final_state : array [N,HV,K,V] or None
    """
    return _forward(q)(
        _KDA,
        q,
        k,
        v,
        g,
        alpha,
        beta,
        initial_state,
        cu_seqlens,
        out,
        output_final_state,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        allow_tf32,
        None,
    )


def kda_step(
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    beta: Array | None = None,
    *,
    alpha: Array | None = None,
    state: Array,
    state_indices: Array | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: Array | None = None,
    _call: Callable[..., Any] = _linattn.step,
) -> Array:
    """One token of :func:`kda`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    g : array [B,HV,K], optional
        Natural LOG of the decay, <= 0, for every key.
    beta : array [B,HV]
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    state : array [B,HV,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous. See
        :func:`linattn.zeros_state`.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,HV,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, qk_l2norm, state_v_first : see :func:`kda`
    out : array [B,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,HV,V], dtype of v

    Nothing is copied: an array whose innermost axis is not contiguous is refused (ValueError).
    """
    return _call(
        _KDA,
        q,
        k,
        v,
        g,
        alpha,
        beta,
        state,
        state_indices,
        out,
        scale,
        qk_l2norm,
        state_v_first,
        None,
    )


def kda_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    g: Array | None = None,
    beta: Array | None = None,
    *,
    alpha: Array | None = None,
    d_final_state: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    mode: str = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> Gradients:
    """The gradients of :func:`kda`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV,K], optional
        Natural LOG of the decay, <= 0, for every key.
    beta : array [B,T,HV]
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    d_final_state : array [N,HV,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mode, chunk_size, qk_l2norm, state_v_first :
        As in the forward call.

    Returns
    -------
    Gradients
    """
    grads = _linattn.backward(
        _KDA,
        do,
        q,
        k,
        v,
        g,
        alpha,
        beta,
        initial_state,
        d_final_state,
        cu_seqlens,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        None,
    )
    return Gradients(*grads)


# ---- bound steps ----

_STEPS: tuple[Callable[..., Array], ...] = tuple(globals()[f"{name}_step"] for name in OPS)


def bind(step: Callable[..., Array], *args: Any, **kwargs: Any) -> BoundStep:
    """A step whose arguments are looked at once, to be run many times over the same arrays.

    ::

        step = linattn.bind(linattn.kda_step, q, k, v, g, beta, state=state, out=o)
        for token in tokens:
            ...              # new numbers into q, k, v, g and beta, where they lie
            step()           # one token: state moves on, o is written and returned

    Parameters
    ----------
    step : function
        One of the eight ``<op>_step``.
    *args, **kwargs
        Its arguments. All checks are made now, but nothing is run. Without ``out`` an array for o
        is made, once.

    Returns
    -------
    BoundStep
        Called without arguments it does what the step would do with what the arrays hold by then,
        and returns ``out``, always the same array. On a GPU it is enqueued on the stream that is
        current when it is called, and can be captured in a graph.

    What lies in the arrays is the caller's to change: q, k, v, gates, beta, the state, and
    ``state_indices``, which on the CPU are looked at in every call. What is no array stays as it
    was: options, a number given for a gate. The arrays are kept alive; they must keep the memory
    that they have (no ``resize``, no ``set_``). Two threads may call a bound step at once where
    they could call the step: not for one state.

    Refused (ValueError) is what would silently go on with old numbers: a feature map that is a
    function, since it makes copies of q and k; an array that its library exports as a copy; on a
    GPU arrays of other libraries than PyTorch or CuPy, or of two, whose current streams are not
    known.
    """
    if not any(step is one for one in _STEPS):
        what = getattr(step, "__name__", None) or repr(step)
        error = ValueError if callable(step) else TypeError
        raise error(f"step: expected one of the functions <op>_step, got {what}")
    return step(*args, **kwargs, _call=_linattn.bind)


# ---- analysis ----


def _weights(
    op: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, arguments: dict[str, Any]
) -> np.ndarray:
    """The op's output; its warnings come from implicit_weights' own caller."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        o, _ = globals()[op](q, k, v, **arguments)
    for warning in caught:
        warnings.warn(warning.message, warning.category, stacklevel=3)
    return o


def implicit_weights(
    q: np.ndarray,
    k: np.ndarray,
    *,
    op: str | Callable[..., Any] = "linear_attention",
    **arguments: Any,
) -> np.ndarray:
    """The matrix A [B,HV,T,T] with o = A v: how much each token reads of each other.

    Every op is linear in v, so its weights are what it makes of v = I. Takes memory and time
    quadratic in T: for looking, not for training.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head (A is then [T,T])
    op : str or function
        Which op's weights; linear attention's by default.
    **arguments
        Of the op: gates, beta, feature_map, scale, ... HV is read off them, else it is H.
    """
    if callable(op):
        op = getattr(op, "__name__", repr(op))
    if op not in OPS:
        raise ValueError(f"op: expected one of {', '.join(OPS)}, got {op!r}")
    if not isinstance(q, np.ndarray):
        raise TypeError(f"q: expected a NumPy array, got {type(q)}")
    if q.ndim not in (2, 4):
        raise ValueError(f"q: expected [B,T,H,K], or [T,K] for one head, got {q.shape}")
    for name in ("initial_state", "output_final_state", "out"):
        if name in arguments:
            raise ValueError(f"{name}: the weights are of the tokens alone; got {name}=")
    T = q.shape[-2 if q.ndim == 2 else 1]
    identity = np.eye(T, max(T, 1)).astype(q.dtype)  # an op wants V >= 1
    if q.ndim == 2:
        return _weights(op, q, k, identity, arguments)[:, :T]
    HV = q.shape[2]
    for name, axis in (("g", 2), ("alpha", 2), ("beta", 2), ("gamma", 0), ("slopes", 0)):
        gate = arguments.get(name)
        if isinstance(gate, np.ndarray) and gate.ndim > axis:
            HV = gate.shape[axis]
    v = np.broadcast_to(identity[None, :, None, :], (q.shape[0], T, HV, max(T, 1)))
    weights = _weights(op, q, k, v, arguments)
    return np.ascontiguousarray(weights.transpose(0, 2, 1, 3)[..., :T])
