"""RWKV-6: a decay per key, and a bonus for the token itself. Forward, step, backward."""

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

__all__ = ["rwkv6", "rwkv6_backward", "rwkv6_step"]


@overload
def rwkv6(
    q: Array,
    k: Array,
    v: Array,
    bonus: AnyArray,
    g: AnyArray | None = ...,
    *,
    output_final_state: Literal[False] = ...,
    alpha: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, None]: ...
@overload
def rwkv6(
    q: Array,
    k: Array,
    v: Array,
    bonus: AnyArray,
    g: AnyArray | None = ...,
    *,
    output_final_state: Literal[True],
    alpha: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray]: ...
@overload
def rwkv6(
    q: Array,
    k: Array,
    v: Array,
    bonus: AnyArray,
    g: AnyArray | None = ...,
    *,
    output_final_state: bool,
    alpha: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray | None]: ...
def rwkv6(
    q: Array,
    k: Array,
    v: Array,
    bonus: AnyArray,
    g: AnyArray | None = None,
    *,
    alpha: AnyArray | None = None,
    scale: float | None = 1.0,
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
    """RWKV-6 (Finch): a read before the decay, in which a token sees itself by a bonus.

    ::

        o = scale * (S' q + (q . (bonus * k)) v);   S <- diag(exp(g_t)) S + k v'

    RWKV's r, w and u are q, g and bonus here. Its own kernels take a w for which the decay is
    exp(-exp(w)): that is ``g=-exp(w)``.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    bonus : array [H,K] or float
        How much a token's own write counts in its read.
    g : array [B,T,HV,K] or float, optional
        Natural LOG of the decay, <= 0, for every key.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    scale : float, optional
        Of the reads; 1 by default, and None is K**-0.5.
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
        An argument is not an array of a supported dtype, or the gate or ``bonus`` is missing.
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
    rwkv6_step, rwkv6_backward : One token; the gradients.
    linattn.reference.rwkv6 : The same in NumPy, float64.

    References
    ----------
    Peng et al., 2024, *Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence*,
    arXiv:2404.05892.

    Examples
    --------
    Token 0 reads twice its own value. Token 1 reads that of token 0 too, before it decays:

    >>> import numpy as np, linattn
    >>> k, v = np.ones((2, 1)), np.array([[3.0], [1.0]])  # one head: [T,K] and [T,V]
    >>> linattn.rwkv6(k, k, v, bonus=2, alpha=0.5, output_final_state=True)
    (array([[6.],
           [5.]]), array([[2.5]]))
    """
    if _unknown:
        refuse_unknown("rwkv6", _unknown)
    return core_for(q, mask)(
        "rwkv6",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
        bonus=bonus,
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


def rwkv6_step(
    q: Array,
    k: Array,
    v: Array,
    bonus: AnyArray,
    g: AnyArray | None = None,
    *,
    alpha: AnyArray | None = None,
    state: AnyArray,
    state_indices: AnyArray | None = None,
    scale: float | None = 1.0,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: AnyArray | None = None,
) -> Array:
    """One token of :func:`rwkv6`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    bonus : array [H,K] or float
        How much a token's own write counts in its read.
    g : array [B,HV,K] or float, optional
        Natural LOG of the decay, <= 0, for every key.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    state : array [B,HV,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous. See
        :func:`linattn.zeros_state`.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,HV,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, qk_l2norm, state_v_first : see :func:`rwkv6`
    out : array [B,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,HV,V], dtype of v

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, or the gate or ``bonus`` is missing.
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
    Without a bonus a token does not see itself. The state has its write all the same:

    >>> import numpy as np, linattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 4))  # [B,H,K]
    >>> state = np.zeros((1, 2, 4, 4))  # [B,HV,K,V]
    >>> o = linattn.rwkv6_step(q, k, v, bonus=0, g=0, state=state)
    >>> bool(o.any()), np.allclose(state, k[..., None] * v[..., None, :])
    (False, True)
    """
    return step_for(q)(
        "rwkv6",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
        bonus=bonus,
        state_indices=state_indices,
        state=state,
        out=out,
        scale=scale,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
    )


def rwkv6_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    bonus: AnyArray,
    g: AnyArray | None = None,
    *,
    alpha: AnyArray | None = None,
    d_final_state: AnyArray | None = None,
    scale: float | None = 1.0,
    initial_state: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    mask: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    **_unknown: Never,
) -> Gradients:
    """The gradients of :func:`rwkv6`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    bonus : array [H,K] or float
        How much a token's own write counts in its read.
    g : array [B,T,HV,K] or float, optional
        Natural LOG of the decay, <= 0, for every key.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
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
        An argument is not an array of a supported dtype, or the gate or ``bonus`` is missing.
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
    The bonus of a head has the sum of the gradients of all its tokens:

    >>> import numpy as np, linattn
    >>> do, q, k, v = np.random.default_rng(0).standard_normal((4, 1, 6, 2, 4))  # [B,T,H,K]
    >>> grads = linattn.rwkv6_backward(do, q, k, v, np.ones((2, 4)), alpha=0.9)
    >>> np.allclose(grads.dbonus, (q * k * (do * v).sum(-1, keepdims=True)).sum((0, 1)))
    True
    """
    if _unknown:
        refuse_unknown("rwkv6_backward", _unknown)
    grads = backward_for(do, mask)(
        "rwkv6",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
        bonus=bonus,
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
