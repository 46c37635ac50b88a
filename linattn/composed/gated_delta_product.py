"""DeltaProduct: several writes of the delta rule in a token. Forward, step, backward."""

from __future__ import annotations

from typing import Any

from linattn.arrays import as_size
from linattn.composed._arrays import Arrays
from linattn.ops._core import AnyArray, Array, Gradients, Mode
from linattn.ops.delta_rule import delta_rule, delta_rule_backward, delta_rule_step
from linattn.ops.gated_delta_rule import (
    gated_delta_rule,
    gated_delta_rule_backward,
    gated_delta_rule_step,
)

__all__ = ["gated_delta_product", "gated_delta_product_backward", "gated_delta_product_step"]


class _Problem:
    """The arguments of a call, checked, and what the delta rule is called with."""

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        alpha: Any,
        num_householder: Any,
        step: bool = False,
        recorded: bool = True,
    ) -> None:
        self.R = as_size("num_householder", num_householder, 1)
        tokens, writes = ("", "R ") if step else ("T ", "TR ")
        call = Arrays("q", q, f"B {tokens}H K", recorded=recorded)
        call.sizes |= {"R": self.R, "TR": call.sizes.get("T", 1) * self.R}
        self.k = call.array("k", k, f"B {writes}H K")
        self.v = call.array("v", v, f"B {writes}HV V")
        call.multiple("v", "HV", "H")
        if g is not None and alpha is not None:
            raise TypeError("alpha: expected None beside g, got both")
        if beta is None:
            raise TypeError("beta: expected an array or a number, got None")
        self.gate = "g" if alpha is None else "alpha"
        given = g if alpha is None else alpha
        self.decay = call.wide(self.gate, given, f"B {tokens}HV")
        call.wide("beta", beta, f"B {writes}HV")
        self.q, self.given, self.beta, self.call = q, given, beta, call

    def one_of_each(self, x: Any, first: bool, fill: float = 0.0) -> Any:
        """x [B,T,...] as [B,TR,...]: at the first or the last write of each token."""
        if self.R == 1:
            return x
        xp = self.call.xp
        others = xp.full_like(x[:, :, None], fill)
        parts = [others] * (self.R - 1)
        parts = [x[:, :, None], *parts] if first else [*parts, x[:, :, None]]
        return xp.concatenate(parts, 2).reshape((x.shape[0], x.shape[1] * self.R, *x.shape[2:]))

    def at(self, x: Any, first: bool) -> Any:
        """The reverse: of x [B,TR,...] the first or the last write of each token."""
        if self.R == 1:
            return x
        return self.call.contiguous(x[:, 0 if first else self.R - 1 :: self.R])

    def gates(self) -> dict[str, Any]:
        """beta, and the decay if there is one: 1 at every write of a token but the first."""
        if self.given is None:
            return {"beta": self.beta}
        decay = self.given
        if self.R > 1:
            decay = self.one_of_each(
                self.call.real_of(self.decay), True, 0.0 if self.gate == "g" else 1.0
            )
        return {self.gate: decay, "beta": self.beta}

    def ends(self, cu_seqlens: Any) -> Any:
        """cu_seqlens in writes."""
        ends = self.call.packed("cu_seqlens", cu_seqlens)
        return ends if ends is None or self.R == 1 else ends * self.R


def gated_delta_product(
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | float | None = None,
    beta: AnyArray | float | None = None,
    *,
    num_householder: int,
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
    """DeltaProduct: a token writes R = ``num_householder`` times by the delta rule, and reads once.

    ::

        S <- exp(g_t) S
        R times:  S <- S + beta k (v - S' k)'
        o = scale * S' q

    So the state is multiplied by a product of R generalised Householder matrices. It is
    :func:`gated_delta_rule` of T R tokens, of which every R-th reads. With R = 1 it is that op, bit
    by bit.

    Parameters
    ----------
    q : array [B,T,H,K]
    k : array [B,TR,H,K]
        The R keys of a token are neighbours.
    v : array [B,TR,HV,V]
    g : array [B,T,HV] or float, optional
        Natural LOG of the decay, <= 0. With neither g nor alpha nothing decays.
    beta : array [B,TR,HV] or float
        The share of each prediction error that is written, usually 0 to 2.
    num_householder : int
        R, the writes of a token.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    scale : float, optional
        Of the reads; K**-0.5 by default.
    initial_state : array [N,HV,K,V], optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after all writes of the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences, in tokens (not in writes).
    mode, chunk_size, qk_l2norm, state_v_first, allow_tf32 : see :func:`gated_delta_rule`
        A chunk has so many writes.

    Returns
    -------
    o : array [B,T,HV,V], dtype of v
    final_state : array [N,HV,K,V] or None

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, beta is missing, or both g and alpha are
        given.
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
    gated_delta_product_step, gated_delta_product_backward : One token; the gradients.
    linattn.reference.gated_delta_product : The same in NumPy, float64, token by token.

    References
    ----------
    Siems et al., 2025, *DeltaProduct: Improving State-Tracking in Linear RNNs via Householder
    Products*, arXiv:2502.10297.

    Examples
    --------
    Two writes with beta = 2 and unit keys reflect twice, which turns the state:

    >>> import numpy as np, linattn
    >>> q, v = np.array([1.0, 0.0]).reshape(1, 1, 1, 2), np.zeros((1, 2, 1, 2))
    >>> k = np.array([[1.0, 0.0], [2**-0.5, 2**-0.5]]).reshape(1, 2, 1, 2)
    >>> _, S = linattn.gated_delta_product(
    ...     q, k, v, beta=2.0, num_householder=2, initial_state=np.eye(2)[None, None],
    ...     output_final_state=True,
    ... )
    >>> np.allclose(S, [[0, -1], [1, 0]])  # by a quarter
    True
    """
    p = _Problem(q, k, v, g, beta, alpha, num_householder)
    ends = p.ends(cu_seqlens)
    op: Any = delta_rule if p.given is None else gated_delta_rule
    o, state = op(
        p.one_of_each(q, False),
        k,
        v,
        **p.gates(),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=ends,
        mode=mode,
        chunk_size=chunk_size,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
        allow_tf32=allow_tf32,
    )
    return p.at(o, False), state


def gated_delta_product_step(
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | float | None = None,
    beta: AnyArray | float | None = None,
    *,
    num_householder: int,
    state: AnyArray,
    alpha: AnyArray | float | None = None,
    state_indices: AnyArray | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> Array:
    """One token of :func:`gated_delta_product`; ``state`` is changed in place.

    Parameters
    ----------
    q : array [B,H,K]
    k : array [B,R,H,K]
    v : array [B,R,HV,V]
    g : array [B,HV] or float, optional
        Natural LOG of the decay, <= 0. With neither g nor alpha nothing decays.
    beta : array [B,R,HV] or float
    num_householder : int
        R, the writes of a token.
    state : array [B,HV,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,HV,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, qk_l2norm, state_v_first : see :func:`gated_delta_rule`

    Returns
    -------
    o : array [B,HV,V], dtype of v

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, beta is missing, or both g and alpha are
        given.
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

    Examples
    --------
    With unit keys and beta = 1 both values can be read back where the keys are orthogonal:

    >>> import numpy as np, linattn
    >>> k, v = np.eye(2).reshape(1, 2, 1, 2), np.array([[1.0, 2.0], [3.0, 4.0]]).reshape(1, 2, 1, 2)
    >>> state = linattn.zeros_state(1, 1, 2, 2, dtype=np.float64)
    >>> linattn.gated_delta_product_step(
    ...     k[:, 0], k, v, beta=1.0, num_householder=2, state=state, scale=1
    ... )
    array([[[1., 2.]]])
    >>> state[0, 0]
    array([[1., 2.],
           [3., 4.]])
    """
    p = _Problem(q, k, v, g, beta, alpha, num_householder, step=True, recorded=False)
    op: Any = delta_rule_step if p.given is None else gated_delta_rule_step
    gates: dict[str, Any] = {} if p.given is None else {p.gate: p.given}
    o: Any = None
    for r in range(p.R):
        if r == 1 and gates:
            gates[p.gate] = 0.0 if p.gate == "g" else 1.0
        found = op(
            q,
            k[:, r],  # type: ignore[index]
            v[:, r],  # type: ignore[index]
            beta=beta[:, r] if getattr(beta, "ndim", 0) else beta,  # type: ignore[index]
            **gates,
            state=state,
            state_indices=state_indices,
            scale=scale,
            qk_l2norm=qk_l2norm,
            state_v_first=state_v_first,
        )
        o, state = p.call.stepped(found, state)
    done: Array = p.call.with_state(o, state)
    return done


def gated_delta_product_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    g: AnyArray | float | None = None,
    beta: AnyArray | float | None = None,
    *,
    num_householder: int,
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
    """The gradients of :func:`gated_delta_product`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q : array [B,T,H,K]
    k : array [B,TR,H,K]
    v : array [B,TR,HV,V]
    g : array [B,T,HV] or float, optional
        Natural LOG of the decay, <= 0. With neither g nor alpha nothing decays.
    beta : array [B,TR,HV] or float
    num_householder : int
        R, the writes of a token.
    alpha : array like g, optional
        The decay itself, in [0, 1], instead of g.
    d_final_state : array [N,HV,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mode, chunk_size, qk_l2norm, state_v_first :
        As in the forward call.

    Returns
    -------
    Gradients
        dk, dv and dbeta have the writes, dq and dg the tokens.

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype, beta is missing, or both g and alpha are
        given.
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
    >>> q, k = np.ones((1, 3, 1, 4)), np.ones((1, 6, 1, 4))
    >>> grads = linattn.gated_delta_product_backward(
    ...     q, q, k, k, np.zeros((1, 3, 1)), 0.1, num_householder=2
    ... )
    >>> grads.dg.shape, grads.dk.shape, isinstance(grads.dbeta, float)
    ((1, 3, 1), (1, 6, 1, 4), True)
    """
    p = _Problem(q, k, v, g, beta, alpha, num_householder, recorded=False)
    p.call.array("do", do, "B T HV V")
    ends = p.ends(cu_seqlens)
    op: Any = delta_rule_backward if p.given is None else gated_delta_rule_backward
    grads: Gradients = op(
        p.one_of_each(do, False),
        p.one_of_each(q, False),
        k,
        v,
        **p.gates(),
        d_final_state=d_final_state,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=ends,
        mode=mode,
        chunk_size=chunk_size,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
    )
    dg = grads.dg
    if dg is not None and p.R > 1:
        dg = p.call.as_given(p.at(dg, True), p.decay)
    return grads._replace(dq=p.at(grads.dq, False), dg=dg)
