"""The gated delta rule (Gated DeltaNet): forward, step, backward."""

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

__all__ = ["gated_delta_rule", "gated_delta_rule_backward", "gated_delta_rule_step"]


@overload
def gated_delta_rule(
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
def gated_delta_rule(
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
def gated_delta_rule(
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
def gated_delta_rule(
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
    """The gated delta rule (Gated DeltaNet): decay, then the delta rule.

    ::

        S <- exp(g_t) S;   S <- S + beta_t k (v - S' k)',   o = scale * S' q

    The prediction is made from the decayed state.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV] or float, optional
        Natural LOG of the decay, <= 0.
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
    gated_delta_rule_step, gated_delta_rule_backward : One token; the gradients.
    linattn.reference.gated_delta_rule : The same in NumPy, float64.

    References
    ----------
    Yang et al., 2024, *Gated Delta Networks: Improving Mamba2 with Delta Rule*, arXiv:2412.06464.

    Examples
    --------
    The state after token 0 is 4. It decays to 2, which is the prediction for token 1. Half of the
    error, 2, is written:

    >>> import numpy as np, linattn
    >>> k = np.ones((2, 1))  # one head: [T,K]
    >>> v = np.full((2, 1), 4.0)
    >>> alpha, beta = np.array([1.0, 0.5]), np.array([1.0, 0.5])
    >>> linattn.gated_delta_rule(k, k, v, beta=beta, alpha=alpha, output_final_state=True)[1]
    array([[3.]])
    """
    if _unknown:
        refuse_unknown("gated_delta_rule", _unknown)
    return core_for(q, mask)(
        "gated_delta_rule",
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


def gated_delta_rule_step(
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
    """One token of :func:`gated_delta_rule`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    g : array [B,HV] or float, optional
        Natural LOG of the decay, <= 0.
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
    scale, qk_l2norm, state_v_first : see :func:`gated_delta_rule`
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
    Three rows of a batch, two of which have a state in a pool of eight:

    >>> import numpy as np, linattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 3, 2, 4)).astype("f4")  # [B,H,K]
    >>> pool = linattn.zeros_state(8, 2, 4, 4)
    >>> rows = np.array([6, -1, 2])  # row 1 is padding
    >>> gates = {"alpha": 0.9, "beta": 0.5}  # numbers: the same for all rows and heads
    >>> o = linattn.gated_delta_rule_step(q, k, v, **gates, state=pool, state_indices=rows)
    >>> np.flatnonzero(pool.any((1, 2, 3))), bool(o[1].any())
    (array([2, 6]), False)
    """
    return step_for(q)(
        "gated_delta_rule",
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


def gated_delta_rule_backward(
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
    """The gradients of :func:`gated_delta_rule`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    g : array [B,T,HV] or float, optional
        Natural LOG of the decay, <= 0.
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
    A long sequence in two parts. The gradient of the state between them goes from the later part to
    the earlier one:

    >>> import numpy as np, linattn
    >>> from linattn.testing import make_inputs
    >>> rng = np.random.default_rng(0)
    >>> x = make_inputs("gated_delta_rule", rng, T=8)  # q, k, v, g, beta
    >>> do = rng.standard_normal(x["v"].shape)
    >>> a, b = ({name: y[:, part] for name, y in x.items()} for part in (slice(4), slice(4, 8)))
    >>> _, S = linattn.gated_delta_rule(**a, output_final_state=True)
    >>> dS = linattn.gated_delta_rule_backward(do[:, 4:], **b, initial_state=S).d_initial_state
    >>> grads = linattn.gated_delta_rule_backward(do[:, :4], **a, d_final_state=dS)
    >>> np.allclose(grads.dk, linattn.gated_delta_rule_backward(do, **x).dk[:, :4])
    True
    """
    if _unknown:
        refuse_unknown("gated_delta_rule_backward", _unknown)
    grads = backward_for(do, mask)(
        "gated_delta_rule",
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
