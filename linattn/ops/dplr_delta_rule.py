"""The delta rule of a diagonal plus a low rank (DPLR, RWKV-7). Forward, step, backward."""

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

__all__ = ["dplr_delta_rule", "dplr_delta_rule_backward", "dplr_delta_rule_step"]


@overload
def dplr_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    x: Array,
    y: Array,
    g: AnyArray | None = ...,
    *,
    output_final_state: Literal[False] = ...,
    alpha: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, None]: ...
@overload
def dplr_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    x: Array,
    y: Array,
    g: AnyArray | None = ...,
    *,
    output_final_state: Literal[True],
    alpha: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray]: ...
@overload
def dplr_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    x: Array,
    y: Array,
    g: AnyArray | None = ...,
    *,
    output_final_state: bool,
    alpha: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray | None]: ...
def dplr_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    x: Array,
    y: Array,
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
    """The delta rule of a diagonal plus a low rank: what is looked up, and what is taken off, are
    keys of their own.

    ::

        p = S' x;   S <- diag(exp(g_t)) S + k v' - y p',   o = scale * S' q

    x looks at the state before its decay, so that S <- (diag(exp(g_t)) - y x') S + k v'. RWKV-7 is
    :func:`linattn.rwkv7`.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    x : array [B,T,H,K], dtype of q
        The key that looks up p, in the state before its decay.
    y : array [B,T,H,K], dtype of q
        The key from which p is taken off. The state can grow without bound where x . y is not
        between 0 and 2.
    g : array [B,T,HV,K] or float, optional
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
    mask : array [B,T], optional
        0 at padding, which may lie anywhere. The other tokens of a row are one sequence, which has
        the row's state. o is 0 at padding.
    mode : {"chunk", "recurrent", "parallel"}
        A chunk of tokens at a time, token by token, or all at once (quadratic in T). They agree.
    chunk_size : int, optional
        Tokens per chunk.
    qk_l2norm : bool
        q, k <- x / sqrt(sum x^2 + 1e-6) along K, not x and y.
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
        An argument is not an array of a supported dtype, or an argument is missing.
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
    dplr_delta_rule_step, dplr_delta_rule_backward : One token; the gradients.
    linattn.reference.dplr_delta_rule : The same in NumPy, float64.

    References
    ----------
    Peng et al., 2025, *RWKV-7 "Goose" with Expressive Dynamic State Evolution*, arXiv:2503.14456.

    Examples
    --------
    With x = diag(exp(g)) k, and beta in y and v, it is Kimi Delta Attention:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> k /= np.linalg.norm(k, axis=-1, keepdims=True)
    >>> g, beta = -rng.uniform(0, 1, (1, 8, 2, 4)), rng.uniform(0, 1, (1, 8, 2))  # [B,T,HV,K]
    >>> b = beta[..., None]
    >>> o, _ = linattn.dplr_delta_rule(q, k, b * v, np.exp(g) * k, b * k, g)
    >>> np.allclose(o, linattn.kda(q, k, v, g, beta)[0])
    True
    """
    if _unknown:
        refuse_unknown("dplr_delta_rule", _unknown)
    return core_for(q, mask)(
        "dplr_delta_rule",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
        x=x,
        y=y,
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


def dplr_delta_rule_step(
    q: Array,
    k: Array,
    v: Array,
    x: Array,
    y: Array,
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
    """One token of :func:`dplr_delta_rule`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    x : array [B,H,K], dtype of q
        The key that looks up p, in the state before its decay.
    y : array [B,H,K], dtype of q
        The key from which p is taken off.
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
    scale, qk_l2norm, state_v_first : see :func:`dplr_delta_rule`
    out : array [B,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,HV,V], dtype of v

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, or an argument is missing.
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
    A token with x = 0 takes nothing off. With v = 0 and g = 0 it leaves the state as it is:

    >>> import numpy as np, linattn
    >>> q, k, y = np.random.default_rng(0).standard_normal((3, 1, 2, 4))  # [B,H,K]
    >>> before = np.ones((1, 2, 4, 4))  # [B,HV,K,V]
    >>> after = before.copy()
    >>> o = linattn.dplr_delta_rule_step(q, k, 0 * k, 0 * y, y, g=0, state=after)
    >>> np.array_equal(before, after)
    True
    """
    return step_for(q)(
        "dplr_delta_rule",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
        x=x,
        y=y,
        state_indices=state_indices,
        state=state,
        out=out,
        scale=scale,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
    )


def dplr_delta_rule_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    x: Array,
    y: Array,
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
    """The gradients of :func:`dplr_delta_rule`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    x : array [B,T,H,K], dtype of q
        The key that looks up p, in the state before its decay.
    y : array [B,T,H,K], dtype of q
        The key from which p is taken off.
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
        An argument is not an array of a supported dtype, or an argument is missing.
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
    x = 0 looks nothing up, so that y has no gradient. x has one:

    >>> import numpy as np, linattn
    >>> do, q, k, v, y = np.random.default_rng(0).standard_normal((5, 6, 4))  # one head: [T,K]
    >>> grads = linattn.dplr_delta_rule_backward(do, q, k, v, 0 * y, y, alpha=0.9)
    >>> bool(grads.dy.any()), bool(grads.dx.any()), type(grads.dg).__name__
    (False, True, 'float')
    """
    if _unknown:
        refuse_unknown("dplr_delta_rule_backward", _unknown)
    grads = backward_for(do, mask)(
        "dplr_delta_rule",
        q,
        k,
        v,
        g=g,
        alpha=alpha,
        x=x,
        y=y,
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
