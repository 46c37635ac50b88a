"""The gated delta rule with a preconditioner: Newton's direction in the place of the gradient's.

Forward, step, backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from linattn.composed._arrays import Arrays
from linattn.composed._names import called
from linattn.features import l2norm, l2norm_backward
from linattn.ops._core import AnyArray, Array, Mode
from linattn.ops.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_rule_backward,
    gated_delta_rule_step,
)

__all__ = [
    "PrecondGradients",
    "precond_gated_delta_rule",
    "precond_gated_delta_rule_backward",
    "precond_gated_delta_rule_step",
]

_NAMES = {"k": "preconditioner * k", "x": "k"}


class PrecondGradients(NamedTuple):
    """The gradients of :func:`precond_gated_delta_rule`, with the shapes and dtypes of its inputs.

    That of a number is a number.

    Attributes
    ----------
    dq, dk : array [B,T,H,K]
    dv : array [B,T,HV,V]
    dpreconditioner : array [B,T,H,K] or float
    dg : array [B,T,HV] or float
        The gradient of the gate as it was given: g or alpha.
    dbeta : array [B,T,HV] or float
    d_initial_state : array [N,HV,K,V] or None
        float32 (float64 for float64 inputs).

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.ones((1, 3, 2, 4))  # [B,T,H,K]
    >>> grads = linattn.precond_gated_delta_rule_backward(x, x, x, x, 0.5, g=-1.0, beta=0.1)
    >>> type(grads.dpreconditioner).__name__, grads.dk.shape
    ('float', (1, 3, 2, 4))
    """

    dq: Any
    dk: Any
    dv: Any
    dpreconditioner: Any
    dg: Any
    dbeta: Any
    d_initial_state: Any | None


class _Problem:
    """The arguments of a call, checked, and what gated_delta_rule is called with."""

    def __init__(
        self,
        q: Any,
        k: Any,
        preconditioner: Any,
        qk_l2norm: Any,
        tokens: str = "T ",
        recorded: bool = True,
    ) -> None:
        call = Arrays("q", q, f"B {tokens}H K", recorded=recorded)
        call.array("k", k, f"B {tokens}H K")
        if preconditioner is None:
            raise TypeError("preconditioner: expected an array or a number, got None")
        self.given = call.wide("preconditioner", preconditioner, f"B {tokens}H K")
        if not isinstance(qk_l2norm, bool):
            raise TypeError(f"qk_l2norm: expected True or False, got {type(qk_l2norm)}")
        # the norm is that of the key before its preconditioner, so it is taken here
        self.q_given, self.k_given, self.qk_l2norm = q, k, qk_l2norm
        self.q, self.k = (l2norm(q), l2norm(k)) if qk_l2norm else (q, k)
        self.written = call.scaled(self.given, self.k)
        self.call = call


def precond_gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    preconditioner: AnyArray | float,
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
    """The gated delta rule whose key is written times a diagonal preconditioner.

    ::

        S <- exp(g_t) S;   S <- S + beta_t (m * k) (v - S' k)',   o = scale * S' q

    It is :func:`gated_delta_rule` with the key m * k, m the preconditioner, and x = k. How m comes
    of the keys so far is the caller's: a running mean of k * k is one choice, its inverse root
    another.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    preconditioner : array [B,T,H,K] or float
        m, which is multiplied with the key that is written. The state can grow without bound where
        beta times k . (m * k) is above 2.
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
    precond_gated_delta_rule_step, precond_gated_delta_rule_backward : One token; the gradients.
    linattn.gated_delta_rule : The op that it calls.

    References
    ----------
    Tumma, Loo and Rus, 2026, *Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear
    Recurrences*, arXiv:2604.21100.

    Examples
    --------
    A preconditioner of one number may stand in beta:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> call = {"alpha": 0.9, "qk_l2norm": True}
    >>> o, _ = linattn.precond_gated_delta_rule(q, k, v, 0.5, beta=0.8, **call)
    >>> np.allclose(o, linattn.gated_delta_rule(q, k, v, beta=0.4, **call)[0])
    True
    """
    p = _Problem(q, k, preconditioner, qk_l2norm)
    with called(_NAMES, q):
        return gated_delta_rule(
            p.q,
            p.written,
            v,
            g,
            beta,
            alpha=alpha,
            x=p.k,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            mode=mode,
            chunk_size=chunk_size,
            state_v_first=state_v_first,
            allow_tf32=allow_tf32,
        )


def precond_gated_delta_rule_step(
    q: Array,
    k: Array,
    v: Array,
    preconditioner: AnyArray | float,
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
    """One token of :func:`precond_gated_delta_rule`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    preconditioner : array [B,H,K] or float
        m, which is multiplied with the key that is written. The state can grow without bound where
        beta times k . (m * k) is above 2.
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
    scale, qk_l2norm, state_v_first : see :func:`precond_gated_delta_rule`

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
    >>> k, v = np.array([[[0.6, 0.8]]]), np.array([[[5.0]]])  # [B,H,K] and [B,HV,V]
    >>> m = np.array([[[2.0, 1.0]]])  # [B,H,K]
    >>> state = np.zeros((1, 1, 2, 1))  # [B,HV,K,V]
    >>> o = linattn.precond_gated_delta_rule_step(k, k, v, m, g=0, beta=0.5, state=state)
    >>> np.allclose(state.ravel(), [3, 2])
    True
    """
    p = _Problem(q, k, preconditioner, qk_l2norm, tokens="", recorded=False)
    with called(_NAMES, q):
        return gated_delta_rule_step(
            p.q,
            p.written,
            v,
            g,
            beta,
            alpha=alpha,
            x=p.k,
            state=state,
            state_indices=state_indices,
            scale=scale,
            state_v_first=state_v_first,
        )


def precond_gated_delta_rule_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    preconditioner: AnyArray | float,
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
) -> PrecondGradients:
    """The gradients of :func:`precond_gated_delta_rule`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    preconditioner : array [B,T,H,K] or float
        m, which is multiplied with the key that is written. The state can grow without bound where
        beta times k . (m * k) is above 2.
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
    PrecondGradients

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
    >>> import numpy as np, linattn
    >>> do, q, k, v = np.random.default_rng(0).standard_normal((4, 1, 6, 2, 4))  # [B,T,H,K]
    >>> m = np.full(k.shape, 0.5)
    >>> grads = linattn.precond_gated_delta_rule_backward(do, q, k, v, m, alpha=0.9, beta=0.1)
    >>> as_number = linattn.precond_gated_delta_rule_backward(do, q, k, v, 0.5, alpha=0.9, beta=0.1)
    >>> np.allclose(grads.dpreconditioner.sum(), as_number.dpreconditioner)
    True
    """
    p = _Problem(q, k, preconditioner, qk_l2norm, recorded=False)
    with called(_NAMES, q):
        grads = gated_delta_rule_backward(
            do,
            p.q,
            p.written,
            v,
            g,
            beta,
            alpha=alpha,
            x=p.k,
            d_final_state=d_final_state,
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            mode=mode,
            chunk_size=chunk_size,
            state_v_first=state_v_first,
        )
    call = p.call
    # the key that is written was m * k, and the key that predicts is k
    if call.is_like(p.given) and not p.qk_l2norm:
        dk, dm, dq = call.plus(grads.dx, p.given, grads.dk), p.k * grads.dk, grads.dq
    else:
        d_written = call.real_of(grads.dk)
        dk, dm, dq = grads.dx + call.factor(p.given) * d_written, p.k * d_written, grads.dq
    if p.qk_l2norm:
        dq, dk = l2norm_backward(p.q_given, dq), l2norm_backward(p.k_given, dk)
    return PrecondGradients(
        dq=call.short(dq),
        dk=call.short(dk),
        dv=grads.dv,
        dpreconditioner=call.as_given(dm, p.given),
        dg=grads.dg,
        dbeta=grads.dbeta,
        d_initial_state=grads.d_initial_state,
    )
