"""Linear attention with feature maps and a normaliser, causal or not: forward, step, backward."""

from __future__ import annotations

from typing import Any, Literal, Never, Unpack, overload

from linattn.features import (
    FeatureMapLike,
    any_features,
    apply_map_backward,
    cast,
    core_features,
    is_traced,
    l2norm_backward,
    mapped,
)
from linattn.ops._core import (
    AnyArray,
    Array,
    ForwardOptions,
    Gradients,
    Mode,
    State,
    backward_for,
    core_for,
    refuse_unknown,
    step_for,
)

__all__ = ["linear_attention", "linear_attention_backward", "linear_attention_step"]


@overload
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    output_final_state: Literal[False] = ...,
    feature_map: FeatureMapLike | tuple[FeatureMapLike, FeatureMapLike] = ...,
    normalize: bool | str = ...,
    causal: bool = ...,
    eps: float = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, None]: ...
@overload
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    output_final_state: Literal[True],
    feature_map: FeatureMapLike | tuple[FeatureMapLike, FeatureMapLike] = ...,
    normalize: bool | str = ...,
    causal: bool = ...,
    eps: float = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, State]: ...
@overload
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    output_final_state: bool,
    feature_map: FeatureMapLike | tuple[FeatureMapLike, FeatureMapLike] = ...,
    normalize: bool | str = ...,
    causal: bool = ...,
    eps: float = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, State | None]: ...
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
    cu_seqlens: AnyArray | None = None,
    mask: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    allow_tf32: bool | None = None,
    out: AnyArray | None = None,
    **_unknown: Never,
) -> tuple[Array, State | None]:
    """Linear attention: the softmax replaced by a feature map, so that a sum serves as memory.

    ::

        S <- S + phi(k) v',   z <- z + phi(k)
        o = scale * S' phi(q) / max(scale * z' phi(q), eps)

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
        False: every token reads the whole sequence. k and v may then have L tokens where q has T:
        k [B,L,H,K] and v [B,L,HV,V]. With ``cu_seqlens`` L must be T.
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
    mask : array [B,T], optional
        0 at padding, which may lie anywhere. The other tokens of a row are one sequence, which has
        the row's state. o is 0 at padding.
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
        May products of float32 numbers be rounded as tf32's are? A GPU then runs a forward
        pass in chunks with K <= 128 on its tensor cores: 1.4 to 8 times as fast on Hopper. By
        default as :func:`linattn.set_float32_precision` says.
    out : array [B,T,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,T,HV,V], dtype of v
    final_state : array [N,HV,K,V], or the pair (S, z), or None

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the results, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: a denominator below zero was clamped to eps. The map is signed: use another,
        or ``normalize=False``.

    See Also
    --------
    linear_attention_step, linear_attention_backward : One token; the gradients.
    linattn.reference.linear_attention : The same in NumPy, float64.

    References
    ----------
    Katharopoulos et al., 2020, *Transformers are RNNs: Fast Autoregressive Transformers with Linear
    Attention*, arXiv:2006.16236.

    Examples
    --------
    The weights of a token sum to one. With rows of the identity as values, the output is the
    weights:

    >>> import numpy as np, linattn
    >>> q, k = np.random.default_rng(0).standard_normal((2, 3, 4))  # one head: [T,K]
    >>> weights, _ = linattn.linear_attention(q, k, np.eye(3))
    >>> np.allclose(weights.sum(1), 1)
    True
    >>> print((weights > 0).astype(int))
    [[1 0 0]
     [1 1 0]
     [1 1 1]]
    >>> weights, _ = linattn.linear_attention(q, k, np.eye(3), causal=False)
    >>> bool((weights > 0).all()), np.allclose(weights.sum(1), 1)
    (True, True)
    """
    if _unknown:
        refuse_unknown("linear_attention", _unknown)
    options = any_features if is_traced(q) else core_features
    phi_q, phi_k, core = options(feature_map, normalize, eps, causal)
    _, _, q, k, qk_l2norm = mapped(phi_q, phi_k, q, k, qk_l2norm, {"out": out})
    return core_for(q, mask)(
        "linear_attention",
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        out=out,
        output_final_state=output_final_state,
        scale=scale,
        mode=mode,
        chunk_size=chunk_size,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
        allow_tf32=allow_tf32,
        features=core,
    )


def linear_attention_step(
    q: Array,
    k: Array,
    v: Array,
    *,
    state: State,
    state_indices: AnyArray | None = None,
    feature_map: FeatureMapLike | tuple[FeatureMapLike, FeatureMapLike] = "elu+1",
    normalize: bool | str = True,
    eps: float = 1e-6,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: AnyArray | None = None,
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

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype.
    ValueError
        Shapes, values or options do not fit, or the innermost axis of an array is not contiguous: a
        step copies nothing.
    MemoryError
        The memory does not hold o.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: a denominator below zero was clamped to eps. The map is signed: use another,
        or ``normalize=False``.

    See Also
    --------
    linattn.bind : A step whose arguments are checked once.

    Examples
    --------
    The first token reads itself alone, so its output is its value:

    >>> import numpy as np, linattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 1, 4)).astype("f4")  # [B,H,K]
    >>> S, z = linattn.zeros_state(2, 1, 4, 4, normalized=True)
    >>> o = linattn.linear_attention_step(q, k, v, state=(S, z))
    >>> np.allclose(o, v)
    True
    >>> np.allclose(z, linattn.apply_feature_map(k))
    True
    """
    options = any_features if is_traced(q) else core_features
    phi_q, phi_k, core = options(feature_map, normalize, eps, True)
    written = {"out": out, "state": state}
    _, _, q, k, qk_l2norm = mapped(phi_q, phi_k, q, k, qk_l2norm, written)
    return step_for(q)(
        "linear_attention",
        q,
        k,
        v,
        state_indices=state_indices,
        state=state,
        out=out,
        scale=scale,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
        features=core,
    )


def bound_arguments(
    *,
    q: Any,
    k: Any,
    feature_map: FeatureMapLike | tuple[FeatureMapLike, FeatureMapLike],
    normalize: bool | str,
    eps: float,
    **rest: Any,
) -> dict[str, Any]:
    """A step's arguments as the core takes them, for a step that is bound."""
    phi_q, phi_k, core = core_features(feature_map, normalize, eps, True)
    if phi_q.forward is not None or phi_k.forward is not None:
        raise ValueError(
            "feature_map: expected one that runs inside the kernels (a name), got a function: a "
            "bound step would keep what it made of q and k, however these change"
        )
    return {"q": q, "k": k, "features": core, **rest}


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
    cu_seqlens: AnyArray | None = None,
    mask: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    **_unknown: Never,
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
    normalize, causal, eps, scale, initial_state, cu_seqlens, mask, mode, chunk_size, qk_l2norm, \
state_v_first :
        As in the forward call.

    Returns
    -------
    Gradients

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype.
    ValueError
        Shapes, values or options do not fit, or a feature map has no ``backward``.
    MemoryError
        The memory does not hold the gradients, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    See Also
    --------
    linattn.reference.backward : The same in NumPy, float64.

    Examples
    --------
    A feature map of your own brings its derivative:

    >>> import numpy as np, linattn
    >>> square = linattn.FeatureMap(
    ...     "square", forward=lambda x: x * x, backward=lambda x, dy: 2 * x * dy
    ... )
    >>> do, q, k, v = np.random.default_rng(0).uniform(0.5, 1, (4, 6, 3))  # one head: [T,K]
    >>> own = linattn.linear_attention_backward(do, q, k, v, feature_map=square)
    >>> built_in = linattn.linear_attention_backward(do, q, k, v, feature_map="relu2")
    >>> np.allclose(own.dq, built_in.dq), np.allclose(own.dk, built_in.dk)
    (True, True)
    """
    if _unknown:
        refuse_unknown("linear_attention_backward", _unknown)
    phi_q, phi_k, core = core_features(feature_map, normalize, eps, causal)
    for phi in (phi_q, phi_k):
        if phi.forward is not None and phi.backward is None:
            raise ValueError(
                "feature_map: the gradient of a function of your own needs "
                f"FeatureMap(name, forward=..., backward=...), got {phi.name} without backward"
            )
    q0: Any = q
    k0: Any = k
    q1, k1, q, k, core_l2norm = mapped(phi_q, phi_k, q, k, qk_l2norm, {})
    grads = backward_for(do, mask)(
        "linear_attention",
        q,
        k,
        v,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        do=do,
        d_final_state=d_final_state,
        scale=scale,
        mode=mode,
        chunk_size=chunk_size,
        qk_l2norm=core_l2norm,
        state_v_first=state_v_first,
        features=core,
    )
    dq, dk, *rest = grads
    dq, dk = apply_map_backward(phi_q, "q", q1, dq), apply_map_backward(phi_k, "k", k1, dk)
    if qk_l2norm and not core_l2norm:  # was q1 = l2norm(q0)
        dq, dk = cast(l2norm_backward(q0, dq), q0.dtype), cast(l2norm_backward(k0, dk), k0.dtype)
    return Gradients(dq, dk, *rest)
