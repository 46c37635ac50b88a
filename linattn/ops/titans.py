"""Titans' linear memory: the delta rule with momentum. Forward, step, backward."""

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

__all__ = ["titans", "titans_backward", "titans_step"]


@overload
def titans(
    q: Array,
    k: Array,
    v: Array,
    beta: AnyArray,
    eta: AnyArray | None = ...,
    g: AnyArray | None = ...,
    *,
    output_final_state: Literal[False] = ...,
    alpha: AnyArray | None = ...,
    batch: int = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, None]: ...
@overload
def titans(
    q: Array,
    k: Array,
    v: Array,
    beta: AnyArray,
    eta: AnyArray | None = ...,
    g: AnyArray | None = ...,
    *,
    output_final_state: Literal[True],
    alpha: AnyArray | None = ...,
    batch: int = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray]: ...
@overload
def titans(
    q: Array,
    k: Array,
    v: Array,
    beta: AnyArray,
    eta: AnyArray | None = ...,
    g: AnyArray | None = ...,
    *,
    output_final_state: bool,
    alpha: AnyArray | None = ...,
    batch: int = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray | None]: ...
def titans(
    q: Array,
    k: Array,
    v: Array,
    beta: AnyArray,
    eta: AnyArray | None = None,
    g: AnyArray | None = None,
    *,
    alpha: AnyArray | None = None,
    batch: int = 1,
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
    """Titans' linear memory: the delta rule with a momentum, and with a decay of the memory.

    ::

        p = M' k;   Y <- eta_t Y + beta_t k (v - p)';   M <- exp(g_t) M + Y,   o = scale * M' q

    That is a step down the gradient of ``|M' k - v|^2 / 2``, with momentum and weight decay.
    The prediction is made from the memory before its decay; with ``batch``, from the memory before
    the token's batch. The paper's alpha is 1 minus the decay, its theta is beta, and its S is -Y.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    beta : array [B,T,HV] or float
        How much of the prediction error is written; 0 to 1 with keys of norm 1. The paper's theta.
    eta : array [B,T,HV] or float, optional
        How much of the momentum a token keeps, in [0, 1]; no momentum by default.
    g : array [B,T,HV] or float, optional
        Natural LOG of the decay of the memory, <= 0.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g: 1 minus the paper's alpha.
    batch : int
        The tokens that predict from one memory, the one before the first of them. With 1 each token
        predicts from what the token before it left; the paper trains with more. Batches begin with
        the sequence, so that a call that goes on from final states begins a batch.
    scale : float, optional
        Of the reads; K**-0.5 by default.
    initial_state : pair of arrays [N,HV,K,V], optional
        The memory and the momentum (M, Y): float32 (float64 for float64 inputs) or bfloat16; zeros
        by default.
    output_final_state : bool
        Return the pair (M, Y) after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mask : array [B,T], optional
        0 at padding, which may lie anywhere. The other tokens of a row are one sequence, which has
        the row's state. o is 0 at padding.
    mode : {"chunk", "recurrent", "parallel"}
        A chunk of tokens at a time, token by token, or all at once (quadratic in T). They agree.
    chunk_size : int, optional
        Tokens per chunk, which has whole batches.
    qk_l2norm : bool
        q, k <- x / sqrt(sum x^2 + 1e-6) along K.
    state_v_first : bool
        Both states are [N,HV,V,K].
    allow_tf32 : bool, optional
        May products of float32 numbers be rounded as tf32's are? No kernel of this op uses that
        yet. By default as :func:`linattn.set_float32_precision` says.
    out : array [B,T,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,T,HV,V], dtype of v
    final_state : pair of arrays [N,HV,K,V] or None

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
    titans_step, titans_backward : One token; the gradients.
    linattn.reference.titans : The same in NumPy, float64.

    References
    ----------
    Behrouz et al., 2025, *Titans: Learning to Memorize at Test Time*, arXiv:2501.00663.

    Examples
    --------
    Token 0 writes 4. Token 1 has no error, but half of the momentum of token 0 goes on:

    >>> import numpy as np, linattn
    >>> k, v = np.ones((2, 1)), np.full((2, 1), 4.0)  # one head: [T,K] and [T,V]
    >>> _, (M, Y) = linattn.titans(k, k, v, beta=1, eta=0.5, alpha=1, output_final_state=True)
    >>> M.item(), Y.item()
    (6.0, 2.0)
    """
    if _unknown:
        refuse_unknown("titans", _unknown)
    return core_for(q, mask)(
        "titans",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
        beta=beta,
        eta=eta,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        out=out,
        output_final_state=output_final_state,
        scale=scale,
        mode=mode,
        chunk_size=chunk_size,
        batch=batch,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
        allow_tf32=allow_tf32,
    )


def titans_step(
    q: Array,
    k: Array,
    v: Array,
    beta: AnyArray,
    eta: AnyArray | None = None,
    g: AnyArray | None = None,
    *,
    alpha: AnyArray | None = None,
    state: AnyArray,
    state_indices: AnyArray | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: AnyArray | None = None,
) -> Array:
    """One token of :func:`titans`, a batch of its own; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    beta : array [B,HV] or float
        How much of the prediction error is written; 0 to 1 with keys of norm 1. The paper's theta.
    eta : array [B,HV] or float, optional
        How much of the momentum a token keeps, in [0, 1]; no momentum by default.
    g : array [B,HV] or float, optional
        Natural LOG of the decay of the memory, <= 0.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g: 1 minus the paper's alpha.
    state : pair of arrays [B,HV,K,V]
        The memory and the momentum (M, Y): float32 (float64 for float64 inputs) or bfloat16; their
        rows contiguous. Each may be :func:`linattn.zeros_state`'s.
    state_indices : int array [B], optional
        ``state`` is then a pair of pools [P,HV,K,V]: row n has state ``state_indices[n]``, and -1
        none (its o is zeros). No state twice.
    scale, qk_l2norm, state_v_first : see :func:`titans`
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
    A token that writes nothing moves the memory on by the momentum that it keeps:

    >>> import numpy as np, linattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 4))  # [B,H,K]
    >>> M, Y = np.zeros((1, 2, 4, 4)), np.ones((1, 2, 4, 4))  # [B,HV,K,V]
    >>> o = linattn.titans_step(q, k, v, beta=0, eta=0.5, g=0, state=(M, Y))
    >>> float(M.min()), float(Y.max())
    (0.5, 0.5)
    """
    return step_for(q)(
        "titans",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
        beta=beta,
        eta=eta,
        state_indices=state_indices,
        state=state,
        out=out,
        scale=scale,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
    )


def titans_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    beta: AnyArray,
    eta: AnyArray | None = None,
    g: AnyArray | None = None,
    *,
    alpha: AnyArray | None = None,
    d_final_state: AnyArray | None = None,
    batch: int = 1,
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
    """The gradients of :func:`titans`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    beta : array [B,T,HV] or float
        How much of the prediction error is written; 0 to 1 with keys of norm 1. The paper's theta.
    eta : array [B,T,HV] or float, optional
        How much of the momentum a token keeps, in [0, 1]; no momentum by default.
    g : array [B,T,HV] or float, optional
        Natural LOG of the decay of the memory, <= 0.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g: 1 minus the paper's alpha.
    d_final_state : pair of arrays [N,HV,K,V], optional
        The gradients of the final states, float32 (float64 for float64 inputs).
    batch, scale, initial_state, cu_seqlens, mask, mode, chunk_size, qk_l2norm, state_v_first :
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
    The states have a pair of gradients, and a number has a number:

    >>> import numpy as np, linattn
    >>> do, q, k, v = np.random.default_rng(0).standard_normal((4, 6, 3))  # one head: [T,K]
    >>> start = np.ones((3, 3)), np.zeros((3, 3))  # M and Y
    >>> grads = linattn.titans_backward(do, q, k, v, 0.1, 0.5, g=-0.1, initial_state=start)
    >>> [dS.shape for dS in grads.d_initial_state], type(grads.deta).__name__
    ([(3, 3), (3, 3)], 'float')
    """
    if _unknown:
        refuse_unknown("titans_backward", _unknown)
    grads = backward_for(do, mask)(
        "titans",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
        beta=beta,
        eta=eta,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        do=do,
        d_final_state=d_final_state,
        scale=scale,
        mode=mode,
        chunk_size=chunk_size,
        batch=batch,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
    )
    return Gradients(*grads)
