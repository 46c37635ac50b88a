"""Comba: a delta rule whose prediction does not decay with the state. Forward, step, backward."""

from __future__ import annotations

from linattn.ops._core import (
    AnyArray,
    Array,
    Gradients,
    Mode,
    backward_for,
    core_for,
    step_for,
)

__all__ = ["comba", "comba_backward", "comba_step"]


def comba(
    q: Array,
    k: Array,
    v: Array,
    x: Array,
    g: AnyArray | float | None = None,
    beta: AnyArray | float | None = None,
    *,
    alpha: AnyArray | float | None = None,
    scale: float | None = None,
    initial_state: AnyArray | None = None,
    output_final_state: bool = False,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    allow_tf32: bool | None = None,
) -> tuple[Array, AnyArray | None]:
    """Comba: a closed loop, in which the state is corrected by a key of its own.

    ::

        S <- exp(g_t) S + beta_t k (v - S' x)',   o = scale * S' q

    The prediction S' x is made from the state before its decay: a scalar plus a low rank, exp(g) -
    beta k x'. That is the difference to :func:`gated_delta_rule`, which takes x too. x is the
    paper's p: its k, times a learned number for each head. The paper's output correction, q minus a
    part of p, is the caller's. It is also :func:`dplr_delta_rule` with y = beta k and the value
    beta v.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    x : array [B,T,H,K], dtype of q
        The key that predicts. ``qk_l2norm`` leaves it.
    g : array [B,T,HV] or float, optional
        Natural LOG of the decay, <= 0.
    beta : array [B,T,HV] or float
        How much of the prediction error is written.
    alpha : array like g, or float, optional
        The decay itself, in [0, 1], instead of g.
    scale : float, optional
        Of the reads; K**-0.5 by default.
    initial_state : array [N,HV,K,V], optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mode, chunk_size, qk_l2norm, state_v_first, allow_tf32 : see :func:`gated_delta_rule`

    Returns
    -------
    o : array [B,T,HV,V], dtype of v
    final_state : array [N,HV,K,V] or None

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, or one is missing.
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
    comba_step, comba_backward : One token; the gradients.
    linattn.gated_delta_rule : The prediction is made from the decayed state.

    References
    ----------
    Hu et al., 2025, *Comba: Improving Bilinear RNNs with Closed-loop Control*, arXiv:2506.02475.

    Examples
    --------
    The state after token 0 is 4, which is the prediction for token 1. It decays to 2, and nothing
    is written, since the error is 0:

    >>> import numpy as np, linattn
    >>> k, v = np.ones((1, 2, 1, 1)), np.full((1, 2, 1, 1), 4.0)  # [B,T,H,K] and [B,T,HV,V]
    >>> alpha = np.array([1.0, 0.5]).reshape(1, 2, 1)  # [B,T,HV]
    >>> _, S = linattn.comba(k, k, v, k, beta=1.0, alpha=alpha, output_final_state=True)
    >>> S.item()
    2.0
    """
    return core_for(q)(
        "gated_delta_rule",
        q,
        k,
        v,
        x=x,
        predicts_before=True,
        g=g,
        alpha=alpha,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode=mode,
        chunk_size=chunk_size,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
        allow_tf32=allow_tf32,
    )


def comba_step(
    q: Array,
    k: Array,
    v: Array,
    x: Array,
    g: AnyArray | float | None = None,
    beta: AnyArray | float | None = None,
    *,
    state: AnyArray,
    alpha: AnyArray | float | None = None,
    state_indices: AnyArray | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> Array:
    """One token of :func:`comba`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    x : array [B,H,K], dtype of q
        The key that predicts. ``qk_l2norm`` leaves it.
    g : array [B,HV] or float, optional
        Natural LOG of the decay, <= 0.
    beta : array [B,HV] or float
        How much of the prediction error is written.
    alpha : array like g, or float, optional
        The decay itself, in [0, 1], instead of g.
    state : array [B,HV,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,HV,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, qk_l2norm, state_v_first : see :func:`comba`

    Returns
    -------
    o : array [B,HV,V], dtype of v

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, or one is missing.
    ValueError
        Shapes, values or options do not fit, or the innermost axis of an array is not contiguous.
    MemoryError
        The memory does not hold o.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: g is above 0, or alpha outside [0, 1], so the state may grow without bound.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> k, v = np.array([[[1.0, 0.0]]]), np.array([[[4.0]]])  # [B,H,K] and [B,HV,V]
    >>> state = np.ones((1, 1, 2, 1))  # [B,HV,K,V]
    >>> o = linattn.comba_step(k, k, v, k / 2, alpha=0.5, beta=1.0, state=state)
    >>> state.ravel().tolist()  # 1/2 is kept, and 4 - 1/2 is written along k
    [4.0, 0.5]
    """
    return step_for(q)(
        "gated_delta_rule",
        q,
        k,
        v,
        x=x,
        predicts_before=True,
        g=g,
        alpha=alpha,
        beta=beta,
        state=state,
        state_indices=state_indices,
        scale=scale,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
    )


def comba_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    x: Array,
    g: AnyArray | float | None = None,
    beta: AnyArray | float | None = None,
    *,
    alpha: AnyArray | float | None = None,
    d_final_state: AnyArray | None = None,
    scale: float | None = None,
    initial_state: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> Gradients:
    """The gradients of :func:`comba`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    x : array [B,T,H,K], dtype of q
        The key that predicts. ``qk_l2norm`` leaves it.
    g : array [B,T,HV] or float, optional
        Natural LOG of the decay, <= 0.
    beta : array [B,T,HV] or float
        How much of the prediction error is written.
    alpha : array like g, or float, optional
        The decay itself, in [0, 1], instead of g.
    d_final_state : array [N,HV,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mode, chunk_size, qk_l2norm, state_v_first :
        As in the forward call.

    Returns
    -------
    Gradients

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, or one is missing.
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

    Examples
    --------
    x has a gradient of its own:

    >>> import numpy as np, linattn
    >>> do, q, k, v, x = np.random.default_rng(0).standard_normal((5, 1, 6, 2, 4))  # [B,T,H,K]
    >>> grads = linattn.comba_backward(do, q, k, v, x, alpha=0.9, beta=0.1)
    >>> grads.dx.shape, type(grads.dbeta).__name__
    ((1, 6, 2, 4), 'float')
    """
    grads = backward_for(do)(
        "gated_delta_rule",
        q,
        k,
        v,
        x=x,
        predicts_before=True,
        g=g,
        alpha=alpha,
        beta=beta,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        do=do,
        d_final_state=d_final_state,
        scale=scale,
        mode=mode,
        chunk_size=chunk_size,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
    )
    return Gradients(*grads)
