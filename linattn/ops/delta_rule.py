"""The delta rule (DeltaNet): forward, step, backward."""

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

__all__ = ["delta_rule", "delta_rule_backward", "delta_rule_step"]


@overload
def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: AnyArray,
    *,
    output_final_state: Literal[False] = ...,
    x: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, None]: ...
@overload
def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: AnyArray,
    *,
    output_final_state: Literal[True],
    x: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray]: ...
@overload
def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: AnyArray,
    *,
    output_final_state: bool,
    x: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray | None]: ...
def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    beta: AnyArray,
    *,
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
    """The delta rule (DeltaNet): write what the state does not yet predict.

    ::

        S <- S + beta_t k (v - S' k)',   o = scale * S' q

    With keys of norm well above 1 the state can grow without bound; ``qk_l2norm=True`` is the cure.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    beta : array [B,T,HV] or float
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
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
        An argument is not an array of a supported dtype, or ``beta`` is missing.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the results, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    See Also
    --------
    delta_rule_step, delta_rule_backward : One token; the gradients.
    linattn.reference.delta_rule : The same in NumPy, float64.

    References
    ----------
    Schlag et al., 2021, *Linear Transformers Are Secretly Fast Weight Programmers*,
    arXiv:2102.11174; Yang et al., 2024, *Parallelizing Linear Transformers with the Delta Rule over
    Sequence Length*, arXiv:2406.06484.

    Examples
    --------
    A value that is written for a key replaces the one before it. Linear attention adds them:

    >>> import numpy as np, linattn
    >>> k = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])  # tokens 0 and 2 have the same key
    >>> v = np.array([[1.0], [2.0], [5.0]])
    >>> _, S = linattn.delta_rule(k, k, v, beta=1, output_final_state=True)
    >>> print(S.ravel())
    [5. 2.]
    >>> options = {"feature_map": "identity", "normalize": False}
    >>> _, S = linattn.linear_attention(k, k, v, output_final_state=True, **options)
    >>> print(S.ravel())
    [6. 2.]
    """
    if _unknown:
        refuse_unknown("delta_rule", _unknown)
    return core_for(q, mask)(
        "delta_rule",
        q,
        k,
        v,
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


def delta_rule_step(
    q: Array,
    k: Array,
    v: Array,
    beta: AnyArray,
    *,
    x: AnyArray | None = None,
    state: AnyArray,
    state_indices: AnyArray | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: AnyArray | None = None,
) -> Array:
    """One token of :func:`delta_rule`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    beta : array [B,HV] or float
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
    x : array [B,H,K], optional
        The key that predicts, where it is not the key that is written; dtype of q. k by default.
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

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, or ``beta`` is missing.
    ValueError
        Shapes, values or options do not fit, or the innermost axis of an array is not contiguous: a
        step copies nothing.
    MemoryError
        The memory does not hold o.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    See Also
    --------
    linattn.bind : A step whose arguments are checked once.

    Examples
    --------
    With beta = 1 and a key of norm 1, the state then answers the key with the value, whatever it
    was before:

    >>> import numpy as np, linattn
    >>> state = np.random.default_rng(0).standard_normal((1, 1, 2, 3))  # [B,HV,K,V]
    >>> k, v = np.array([[[0.6, 0.8]]]), np.array([[[1.0, 2.0, 3.0]]])
    >>> o = linattn.delta_rule_step(k, k, v, beta=1, state=state, scale=1)
    >>> np.allclose(k @ state, v), np.allclose(o, v)
    (True, True)
    """
    return step_for(q)(
        "delta_rule",
        q,
        k,
        v,
        beta=beta,
        x=x,
        state_indices=state_indices,
        state=state,
        out=out,
        scale=scale,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
    )


def delta_rule_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    beta: AnyArray,
    *,
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
    """The gradients of :func:`delta_rule`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    beta : array [B,T,HV] or float
        How much of the prediction error is written; after the sigmoid, 0 to 2 is meaningful.
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
        An argument is not an array of a supported dtype, or ``beta`` is missing.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the gradients, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    See Also
    --------
    linattn.reference.backward : The same in NumPy, float64.

    Examples
    --------
    beta is the share of the prediction error that is written. Where there is no error, as in token
    1 here, its gradient is 0:

    >>> import numpy as np, linattn
    >>> k, v = np.ones((2, 1)), np.full((2, 1), 3.0)  # one head: [T,K]
    >>> do, beta = np.ones((2, 1)), np.ones(2)
    >>> linattn.delta_rule_backward(do, k, k, v, beta).dbeta
    array([3., 0.])
    """
    if _unknown:
        refuse_unknown("delta_rule_backward", _unknown)
    grads = backward_for(do, mask)(
        "delta_rule",
        q,
        k,
        v,
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
