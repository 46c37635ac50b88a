"""Lightning attention: a constant decay per head, given as its slope. Forward, step, backward."""

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

__all__ = ["lightning_attention", "lightning_attention_backward", "lightning_attention_step"]


@overload
def lightning_attention(
    q: Array,
    k: Array,
    v: Array,
    slopes: AnyArray,
    *,
    output_final_state: Literal[False] = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, None]: ...
@overload
def lightning_attention(
    q: Array,
    k: Array,
    v: Array,
    slopes: AnyArray,
    *,
    output_final_state: Literal[True],
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray]: ...
@overload
def lightning_attention(
    q: Array,
    k: Array,
    v: Array,
    slopes: AnyArray,
    *,
    output_final_state: bool,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray | None]: ...
def lightning_attention(
    q: Array,
    k: Array,
    v: Array,
    slopes: AnyArray,
    *,
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
    """Lightning Attention: one constant decay per head, given by its slope.

    ::

        S <- exp(-slope_h) S + k v',   o = scale * S' q

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    slopes : array [HV] or float
        Minus the log of the decay, >= 0.
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
        An argument is not an array of a supported dtype, or ``slopes`` is missing.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the results, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: a slope is below 0, so the state may grow without bound.

    See Also
    --------
    lightning_slopes : The slopes that were published.
    lightning_attention_step, lightning_attention_backward : One token; the gradients.
    linattn.reference.lightning_attention : The same in NumPy, float64.

    References
    ----------
    Qin et al., 2024, *Lightning Attention-2: A Free Lunch for Handling Unlimited Sequence Lengths
    in Large Language Models*, arXiv:2401.04658; MiniMax, 2025, *MiniMax-01: Scaling Foundation
    Models with Lightning Attention*, arXiv:2501.08313.

    Examples
    --------
    It is retention with gamma = exp(-slopes):

    >>> import numpy as np, linattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 10, 4, 8))  # [B,T,H,K]
    >>> slopes = linattn.lightning_slopes(4)
    >>> o, _ = linattn.lightning_attention(q, k, v, slopes)
    >>> np.allclose(o, linattn.retention(q, k, v, gamma=np.exp(-slopes))[0])
    True
    """
    if _unknown:
        refuse_unknown("lightning_attention", _unknown)
    return core_for(q, mask)(
        "lightning_attention",
        q,
        k,
        v,
        slopes=slopes,
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


def lightning_attention_step(
    q: Array,
    k: Array,
    v: Array,
    slopes: AnyArray,
    *,
    state: AnyArray,
    state_indices: AnyArray | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: AnyArray | None = None,
) -> Array:
    """One token of :func:`lightning_attention`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    slopes : array [HV] or float
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

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, or ``slopes`` is missing.
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
        On the CPU: a slope is below 0, so the state may grow without bound.

    See Also
    --------
    linattn.bind : A step whose arguments are checked once.

    Examples
    --------
    With ``out`` a loop needs no new array for each token:

    >>> import numpy as np, linattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, 8)).astype("f4")  # [B,H,K]
    >>> state, out = linattn.zeros_state(1, 4, 8, 8), np.empty_like(v)
    >>> slopes = linattn.lightning_slopes(4)
    >>> o = linattn.lightning_attention_step(q, k, v, slopes, state=state, out=out)
    >>> o is out, bool(state.any())
    (True, True)
    """
    return step_for(q)(
        "lightning_attention",
        q,
        k,
        v,
        slopes=slopes,
        state_indices=state_indices,
        state=state,
        out=out,
        scale=scale,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
    )


def lightning_attention_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    slopes: AnyArray,
    *,
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
    """The gradients of :func:`lightning_attention`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    slopes : array [HV] or float
        Minus the log of the decay, >= 0.
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
        An argument is not an array of a supported dtype, or ``slopes`` is missing.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the gradients, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: a slope is below 0, so the state may grow without bound.

    See Also
    --------
    linattn.reference.backward : The same in NumPy, float64.

    Examples
    --------
    dg is the gradient of the slopes: -gamma times the gradient of gamma = exp(-slope).

    >>> import numpy as np, linattn
    >>> do, q, k, v = np.random.default_rng(0).standard_normal((4, 1, 10, 4, 8))  # [B,T,H,K]
    >>> slopes = linattn.lightning_slopes(4)
    >>> gamma = np.exp(-slopes)
    >>> of_slopes = linattn.lightning_attention_backward(do, q, k, v, slopes).dg
    >>> of_gamma = linattn.retention_backward(do, q, k, v, gamma=gamma).dg
    >>> np.allclose(of_slopes, -gamma * of_gamma)
    True
    """
    if _unknown:
        refuse_unknown("lightning_attention_backward", _unknown)
    grads = backward_for(do, mask)(
        "lightning_attention",
        q,
        k,
        v,
        slopes=slopes,
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
