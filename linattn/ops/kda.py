"""Kimi Delta Attention (KDA): the delta rule with a decay per key. Forward, step, backward."""

from __future__ import annotations

from typing import Literal, Never, Unpack, overload

from linattn.ops._core import (
    AnyArray,
    Array,
    ForwardOptions,
    Gradients,
    Mode,
    backward_for,
    core_for,
    refuse_unknown,
    step_for,
)

__all__ = ["kda", "kda_backward", "kda_step"]


@overload
def kda(
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | None = ...,
    beta: AnyArray | None = ...,
    *,
    output_final_state: Literal[False] = ...,
    alpha: AnyArray | None = ...,
    x: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, None]: ...
@overload
def kda(
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | None = ...,
    beta: AnyArray | None = ...,
    *,
    output_final_state: Literal[True],
    alpha: AnyArray | None = ...,
    x: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray]: ...
@overload
def kda(
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | None = ...,
    beta: AnyArray | None = ...,
    *,
    output_final_state: bool,
    alpha: AnyArray | None = ...,
    x: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray | None]: ...
def kda(
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | None = None,
    beta: AnyArray | None = None,
    *,
    alpha: AnyArray | None = None,
    x: AnyArray | None = None,
    scale: float | None = None,
    initial_state: AnyArray | None = None,
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
) -> tuple[Array, AnyArray | None]:
    """Kimi Delta Attention: a decay per key, then the delta rule on the decayed state.

    ::

        S <- diag(exp(g_t)) S;   S <- S + beta_t k (v - S' k)',   o = scale * S' q

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV,K] or float, optional
        Natural LOG of the decay, <= 0, for every key.
    beta : array [B,T,HV] or float
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    x : array [B,T,H,K], optional
        The key that predicts, where it is not the key that is written; dtype of q. k by default.
        ``qk_l2norm`` leaves it.
    scale : float, optional
        Of the reads; K**-0.5 by default.
    initial_state : array [N,HV,K,V], optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mask : array [B,T], optional
        0 at padding, which may lie anywhere. The other tokens of a row are one sequence, which has
        the row's state. o is 0 at padding.
    mode : {"chunk", "recurrent", "parallel"}
        A chunk of tokens at a time, token by token, or all at once (quadratic in T). They agree.
    chunk_size : int, optional
        Tokens per chunk.
    qk_l2norm : bool
        q, k <- x / sqrt(sum x^2 + 1e-6) along K.
    state_v_first : bool
        States are [N,HV,V,K].
    allow_tf32 : bool, optional
        May products of float32 numbers be rounded as tf32's are? A GPU then runs a forward
        pass in chunks with K <= 128 on its tensor cores: 1.4 to 8 times as fast on Hopper. By
        default as :func:`linattn.set_float32_precision` says.
    out : array [B,T,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,T,HV,V], dtype of v
    final_state : array [N,HV,K,V] or None

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, or the gate or ``beta`` is missing.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the results, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: g is above 0, or alpha outside [0, 1], so the state may grow without bound.

    See Also
    --------
    kda_step, kda_backward : One token; the gradients.
    linattn.reference.kda : The same in NumPy, float64.

    References
    ----------
    Kimi Team, 2025, *Kimi Linear: An Expressive, Efficient Attention Architecture*,
    arXiv:2510.26692.

    Examples
    --------
    With one decay for all keys it is the gated delta rule:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g, beta = -rng.uniform(0, 1, (1, 8, 2)), rng.uniform(0, 1, (1, 8, 2))  # [B,T,HV]
    >>> by_key = g[..., None].repeat(4, -1)  # [B,T,HV,K]
    >>> o, _ = linattn.kda(q, k, v, by_key, beta, qk_l2norm=True)
    >>> np.allclose(o, linattn.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True)[0])
    True
    """
    if _unknown:
        refuse_unknown("kda", _unknown)
    return core_for(q, mask)(
        "kda",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
        beta=beta,
        x=x,
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
    )


def kda_step(
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | None = None,
    beta: AnyArray | None = None,
    *,
    alpha: AnyArray | None = None,
    x: AnyArray | None = None,
    state: AnyArray,
    state_indices: AnyArray | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: AnyArray | None = None,
) -> Array:
    """One token of :func:`kda`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    g : array [B,HV,K] or float, optional
        Natural LOG of the decay, <= 0, for every key.
    beta : array [B,HV] or float
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    x : array [B,H,K], optional
        The key that predicts, where it is not the key that is written; dtype of q. k by default.
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

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, or the gate or ``beta`` is missing.
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
        On the CPU: g is above 0, or alpha outside [0, 1], so the state may grow without bound.

    See Also
    --------
    linattn.bind : A step whose arguments are checked once.

    Examples
    --------
    A token with g = 0 and beta = 0 leaves the state as it is, and reads it:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 2, 4))  # [B,H,K]
    >>> before = rng.standard_normal((1, 2, 4, 4))  # [B,HV,K,V]
    >>> after = before.copy()
    >>> o = linattn.kda_step(q, k, v, g=0, beta=0, state=after, scale=1)
    >>> np.array_equal(before, after), np.allclose(o, (q[..., None] * before).sum(2))
    (True, True)
    """
    return step_for(q)(
        "kda",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
        beta=beta,
        x=x,
        state_indices=state_indices,
        state=state,
        out=out,
        scale=scale,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
    )


def kda_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | None = None,
    beta: AnyArray | None = None,
    *,
    alpha: AnyArray | None = None,
    x: AnyArray | None = None,
    d_final_state: AnyArray | None = None,
    scale: float | None = None,
    initial_state: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    mask: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    **_unknown: Never,
) -> Gradients:
    """The gradients of :func:`kda`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV,K] or float, optional
        Natural LOG of the decay, <= 0, for every key.
    beta : array [B,T,HV] or float
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    x : array [B,T,H,K], optional
        The key that predicts, where it is not the key that is written; dtype of q. k by default.
    d_final_state : array [N,HV,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mask, mode, chunk_size, qk_l2norm, state_v_first :
        As in the forward call.

    Returns
    -------
    Gradients

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, or the gate or ``beta`` is missing.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the gradients, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: g is above 0, or alpha outside [0, 1], so the state may grow without bound.

    See Also
    --------
    linattn.reference.backward : The same in NumPy, float64.

    Examples
    --------
    A gradient has the shape and dtype of its input. It is None for an argument that was not given:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> do, q, k, v = rng.standard_normal((4, 1, 6, 2, 4)).astype("float32")  # [B,T,H,K]
    >>> g, beta = -rng.uniform(0, 1, (1, 6, 2, 4)), rng.uniform(0, 1, (1, 6, 2))  # float64
    >>> grads = linattn.kda_backward(do, q, k, v, g, beta, qk_l2norm=True)
    >>> grads.dq.dtype.name, grads.dg.dtype.name, grads.dg.shape
    ('float32', 'float64', (1, 6, 2, 4))
    >>> grads.d_initial_state is None
    True
    """
    if _unknown:
        refuse_unknown("kda_backward", _unknown)
    grads = backward_for(do, mask)(
        "kda",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
        beta=beta,
        x=x,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        do=do,
        d_final_state=d_final_state,
        scale=scale,
        mode=mode,
        chunk_size=chunk_size,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
    )
    return Gradients(*grads)
