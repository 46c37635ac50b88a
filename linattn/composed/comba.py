"""Comba: a delta rule whose prediction does not decay with the state. Forward, step, backward."""

from __future__ import annotations

from typing import Any

from linattn.composed._arrays import Arrays
from linattn.composed._names import called
from linattn.features import l2norm, l2norm_backward
from linattn.ops._core import AnyArray, Array, Gradients, Mode
from linattn.ops.dplr_delta_rule import (
    dplr_delta_rule,
    dplr_delta_rule_backward,
    dplr_delta_rule_step,
)

__all__ = ["comba", "comba_backward", "comba_step"]

_NAMES = {"y": "beta * k"}


class _Problem:
    """The arguments of a call, checked, and what dplr_delta_rule is called with."""

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        x: Any,
        g: Any,
        beta: Any,
        alpha: Any,
        qk_l2norm: Any,
        tokens: str = "T ",
        recorded: bool = True,
    ) -> None:
        call = Arrays("q", q, f"B {tokens}H K", recorded=recorded)
        call.array("k", k, f"B {tokens}H K")
        call.array("v", v, f"B {tokens}HV V")
        call.multiple("v", "HV", "H")
        call.array("x", x, f"B {tokens}H K")
        if beta is None:
            raise TypeError("beta: expected an array or a number, got None")
        if (g is None) == (alpha is None):
            got = "None" if g is None else "both"
            raise TypeError(
                "g: expected the log decay [B,T,HV] (or alpha=, the decay itself), got " + got
            )
        self.gate, given = ("g", g) if alpha is None else ("alpha", alpha)
        self.beta_given = call.wide("beta", beta, f"B {tokens}HV")
        self.decay_given = call.wide(self.gate, given, f"B {tokens}HV")
        if not isinstance(qk_l2norm, bool):
            raise TypeError(f"qk_l2norm: expected True or False, got {type(qk_l2norm)}")
        self.call, self.q_given, self.k_given, self.qk_l2norm = call, q, k, qk_l2norm
        q, k = (l2norm(q), l2norm(k)) if qk_l2norm else (q, k)
        # y = beta k has a beta for each head of values, so that no two of them share a key
        self.group = call.sizes["HV"] // call.sizes["H"]
        self.q, self.k, self.x = (self.for_heads(a) for a in (q, k, x))
        self.beta = call.real_of(self.beta_given)[..., None]
        self.k_wide, self.v_wide = call.real_of(self.k), call.real_of(v)
        self.y, self.v = call.short(self.beta * self.k_wide), call.short(self.beta * self.v_wide)
        every_key = [call.sizes[letter] for letter in f"B {tokens}HV K".split()]
        self.decay = call.full(every_key, 0.0) + call.real_of(self.decay_given)[..., None]

    def for_heads(self, a: Any) -> Any:
        """An array of keys for each of the heads of values that share it."""
        if self.group == 1:
            return a
        parts = self.call.xp.stack([a] * self.group, -2)
        return parts.reshape((*a.shape[:-2], a.shape[-2] * self.group, a.shape[-1]))

    def of_heads(self, da: Any) -> Any:
        """Its adjoint: the sum over these."""
        if self.group == 1:
            return da
        heads = (*da.shape[:-2], da.shape[-2] // self.group, self.group, da.shape[-1])
        return da.reshape(heads).sum(-2)


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
    part of p, is the caller's. It is :func:`dplr_delta_rule` with y = beta k and the value beta v.

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
    mode, chunk_size, qk_l2norm, state_v_first, allow_tf32 : see :func:`dplr_delta_rule`

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
    linattn.dplr_delta_rule : The op that it calls.

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
    p = _Problem(q, k, v, x, g, beta, alpha, qk_l2norm)
    decay: Any = {p.gate: p.decay}
    with called(_NAMES, q):
        return dplr_delta_rule(
            p.q,
            p.k,
            p.v,
            p.x,
            p.y,
            **decay,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            mode=mode,
            chunk_size=chunk_size,
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
    p = _Problem(q, k, v, x, g, beta, alpha, qk_l2norm, tokens="", recorded=False)
    decay: Any = {p.gate: p.decay}
    with called(_NAMES, q):
        return dplr_delta_rule_step(
            p.q,
            p.k,
            p.v,
            p.x,
            p.y,
            **decay,
            state=state,
            state_indices=state_indices,
            scale=scale,
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
    p = _Problem(q, k, v, x, g, beta, alpha, qk_l2norm, recorded=False)
    decay: Any = {p.gate: p.decay}
    with called(_NAMES, q):
        grads = dplr_delta_rule_backward(
            do,
            p.q,
            p.k,
            p.v,
            p.x,
            p.y,
            **decay,
            d_final_state=d_final_state,
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            mode=mode,
            chunk_size=chunk_size,
            state_v_first=state_v_first,
        )
    call = p.call
    dv, dy, d_decay = call.real_of(grads.dv), call.real_of(grads.dy), grads.dg
    # y = beta k, and the value is beta v
    dq = p.of_heads(call.real_of(grads.dq))
    dk = p.of_heads(call.real_of(grads.dk) + p.beta * dy)
    if p.qk_l2norm:
        dq, dk = l2norm_backward(p.q_given, dq), l2norm_backward(p.k_given, dk)
    return grads._replace(
        dq=call.short(dq),
        dk=call.short(dk),
        dv=call.short(p.beta * dv),
        dg=call.as_given(call.real_of(d_decay).sum(-1), p.decay_given),
        dbeta=call.as_given((dv * p.v_wide).sum(-1) + (dy * p.k_wide).sum(-1), p.beta_given),
        dx=call.short(p.of_heads(call.real_of(grads.dx))),
        dy=None,
    )
