"""Linear attention with a decay per token and head. Forward, step, backward."""

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

__all__ = ["simple_gla", "simple_gla_backward", "simple_gla_step"]


@overload
def simple_gla(
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | None = ...,
    *,
    output_final_state: Literal[False] = ...,
    alpha: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, None]: ...
@overload
def simple_gla(
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | None = ...,
    *,
    output_final_state: Literal[True],
    alpha: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray]: ...
@overload
def simple_gla(
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | None = ...,
    *,
    output_final_state: bool,
    alpha: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray | None]: ...
def simple_gla(
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | None = None,
    *,
    alpha: AnyArray | None = None,
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
    """Scalar-gated linear attention: one decay per token and head (Mamba-2's recurrence).

    ::

        S <- exp(g_t) S + k v',   o = scale * S' q

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV] or float, optional
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
        An argument is not an array of a supported dtype, or the gate is missing.
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
    simple_gla_step, simple_gla_backward : One token; the gradients.
    linattn.reference.simple_gla : The same in NumPy, float64.

    References
    ----------
    Yang et al., 2024, *Gated Linear Attention Transformers with Hardware-Efficient Training*,
    arXiv:2312.06635; Dao and Gu, 2024, *Transformers are SSMs: Generalized Models and Efficient
    Algorithms Through Structured State Space Duality*, arXiv:2405.21060.

    Examples
    --------
    The gate may be given as alpha, the decay itself. A decay of 0 forgets everything:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> alpha = rng.uniform(0, 1, (1, 8, 2))  # [B,T,HV]
    >>> alpha[:, 5] = 0  # token 5 begins anew
    >>> o, _ = linattn.simple_gla(q, k, v, alpha=alpha)
    >>> with np.errstate(divide="ignore"):
    ...     np.allclose(o, linattn.simple_gla(q, k, v, np.log(alpha))[0])
    True
    >>> q, k, v, alpha = (x[:, 5:] for x in (q, k, v, alpha))
    >>> np.allclose(o[:, 5:], linattn.simple_gla(q, k, v, alpha=alpha)[0])
    True
    """
    if _unknown:
        refuse_unknown("simple_gla", _unknown)
    return core_for(q, mask)(
        "simple_gla",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
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


def simple_gla_step(
    q: Array,
    k: Array,
    v: Array,
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
    """One token of :func:`simple_gla`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    g : array [B,HV] or float, optional
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

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, or the gate is missing.
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
    A state may be stored with its value axis first. Its numbers are the same:

    >>> import numpy as np, linattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 4)).astype("f4")  # [B,H,K]
    >>> S, transposed = linattn.zeros_state(1, 2, 4, 4), linattn.zeros_state(1, 2, 4, 4)
    >>> o = linattn.simple_gla_step(q, k, v, alpha=0.9, state=S)
    >>> o = linattn.simple_gla_step(q, k, v, alpha=0.9, state=transposed, state_v_first=True)
    >>> np.allclose(S, transposed.swapaxes(2, 3))
    True
    """
    return step_for(q)(
        "simple_gla",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
        state_indices=state_indices,
        state=state,
        out=out,
        scale=scale,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
    )


def simple_gla_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | None = None,
    *,
    alpha: AnyArray | None = None,
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
    """The gradients of :func:`simple_gla`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV] or float, optional
        Natural LOG of the decay, <= 0.
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
        An argument is not an array of a supported dtype, or the gate is missing.
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
    dg is the gradient of the gate that was given. With g = log(alpha), the gradient of g is alpha
    times the gradient of alpha:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> do, q, k, v = rng.standard_normal((4, 1, 8, 2, 4))  # [B,T,H,K]
    >>> alpha = rng.uniform(0.5, 1, (1, 8, 2))  # [B,T,HV]
    >>> of_alpha = linattn.simple_gla_backward(do, q, k, v, alpha=alpha).dg
    >>> of_g = linattn.simple_gla_backward(do, q, k, v, np.log(alpha)).dg
    >>> np.allclose(of_g, alpha * of_alpha)
    True
    """
    if _unknown:
        refuse_unknown("simple_gla_backward", _unknown)
    grads = backward_for(do, mask)(
        "simple_gla",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
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
