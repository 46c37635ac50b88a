"""Gated DeltaNet 2: the delta rule with a gate for each key erased and for each value written.

Forward, step, backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from linattn.composed._arrays import Arrays
from linattn.composed._names import called
from linattn.features import is_tensor, l2norm_backward
from linattn.ops._core import (
    AnyArray,
    Array,
    Gradients,
    Mode,
    backward_for,
    core_for,
    step_for,
    unrecorded_core,
)
from linattn.ops.kda import kda

__all__ = ["GDN2Gradients", "gdn2", "gdn2_backward", "gdn2_step"]

_NAMES = {"x": "b * k"}


class GDN2Gradients(NamedTuple):
    """The gradients of :func:`gdn2`, each with the shape and dtype of its input.

    That of a number is a number.

    Attributes
    ----------
    dq, dk : array [B,T,H,K]
    dv : array [B,T,HV,V]
    db : array [B,T,H,K] or float
    dw : array [B,T,HV,V] or float
    dg : array [B,T,HV,K] or float
        The gradient of the gate as it was given: g or alpha.
    d_initial_state : array [N,HV,K,V] or None
        float32 (float64 for float64 inputs).

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.ones((1, 3, 2, 4))  # [B,T,H,K]
    >>> grads = linattn.gdn2_backward(x, x, x, x, b=0.1, w=x, g=-1.0)
    >>> type(grads.db).__name__, grads.dw.shape, grads.d_initial_state is None
    ('float', (1, 3, 2, 4), True)
    """

    dq: Any
    dk: Any
    dv: Any
    db: Any
    dw: Any
    dg: Any
    d_initial_state: Any | None


class _Problem:
    """The arguments of a call, checked, and what kda is called with."""

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        b: Any,
        w: Any,
        qk_l2norm: Any,
        tokens: str = "T ",
        recorded: bool = True,
    ) -> None:
        call = Arrays("q", q, f"B {tokens}H K", recorded=recorded)
        call.array("k", k, f"B {tokens}H K")
        call.array("v", v, f"B {tokens}HV V")
        call.multiple("v", "HV", "H")
        for name, gate in (("b", b), ("w", w)):
            if gate is None:
                raise TypeError(f"{name}: expected an array or a number, got None")
        self.b_given = call.wide("b", b, f"B {tokens}H K")
        self.w_given = call.wide("w", w, f"B {tokens}HV V")
        if not isinstance(qk_l2norm, bool):
            raise TypeError(f"qk_l2norm: expected True or False, got {type(qk_l2norm)}")
        self.call, self.k, self.v, self.qk_l2norm = call, k, v, qk_l2norm

    def is_watched(self, *given: Any) -> bool:
        """Does PyTorch record or trace a call? The core's factor of x has no gradient."""
        if not is_tensor(self.call.like):
            return False
        from linattn import autograd

        return autograd.is_watched("kda", (self.call.like, self.k, self.v, *given))

    def norm(self) -> Any:
        """What k is multiplied by: the key that is erased is a part of the one that is written."""
        if not self.qk_l2norm:
            return 1
        wide = self.call.real_of(self.k)
        return 1 / ((wide * wide).sum(-1)[..., None] + 1e-6) ** 0.5

    def x(self) -> Any:
        """b k."""
        call = self.call
        if not self.qk_l2norm:
            return call.scaled(self.b_given, self.k)
        return call.short(call.real_of(self.b_given) * (call.real_of(self.k) * self.norm()))

    def written(self) -> Any:
        """w v."""
        return self.call.scaled(self.w_given, self.v)

    def for_core(self, smooth: bool = False) -> tuple[Any, dict[str, Any], dict[str, str]]:
        """v, the arrays beside it, and their names.

        The core multiplies by gates of the dtype of q. smooth: gradients are wanted, and the core
        has those of the gate of v alone.
        """
        arrays: dict[str, Any] = {"beta": 1.0}
        names = _NAMES | {"value_gate": "w"}
        if self.call.by_jax:
            return self.written(), arrays | {"x": self.x()}, dict(_NAMES)
        if self.call.is_like(self.b_given) and not smooth:
            arrays |= {"x": self.b_given, "x_is_factor": True}
            names["x"] = "b"
        else:
            arrays["x"] = self.x()
        if not self.call.is_like(self.w_given):
            return self.written(), arrays, names
        return self.v, arrays | {"value_gate": self.w_given}, names


def gdn2(
    q: Array,
    k: Array,
    v: Array,
    b: AnyArray | float,
    w: AnyArray | float,
    g: AnyArray | float | None = None,
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
    """Gated DeltaNet 2: one gate for each key that is erased, another for each value written.

    ::

        S <- diag(exp(g_t)) S;   S <- S + k (w * v - S' (b * k))',   o = scale * S' q

    It is :func:`kda` with x = b * k, the value w * v and beta = 1. With b = w = beta, one number
    for each token and head, it is kda with that beta.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    b : array [B,T,H,K] or float
        How much is erased, for every key; in [0, 1] with keys of norm 1.
    w : array [B,T,HV,V] or float
        How much is written, for every value.
    g : array [B,T,HV,K] or float, optional
        Natural LOG of the decay, <= 0, for every key.
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
    mode, chunk_size, qk_l2norm, state_v_first, allow_tf32 : see :func:`kda`

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
    gdn2_step, gdn2_backward : One token; the gradients.
    linattn.kda : The op that it calls.

    References
    ----------
    Hatamizadeh, Choi and Kautz, 2026, *Gated DeltaNet-2: Decoupling Erase and Write in Linear
    Attention*, arXiv:2605.22791.

    Examples
    --------
    With one gate for both it is Kimi Delta Attention:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g, beta = -rng.uniform(0, 1, (1, 8, 2, 4)), rng.uniform(0, 1, (1, 8, 2))
    >>> gate = beta[..., None].repeat(4, -1)  # [B,T,H,K] and [B,T,HV,V]
    >>> o, _ = linattn.gdn2(q, k, v, gate, gate, g, qk_l2norm=True)
    >>> np.allclose(o, linattn.kda(q, k, v, g, beta, qk_l2norm=True)[0])
    True
    """
    p = _Problem(q, k, v, b, w, qk_l2norm)
    options: dict[str, Any] = {
        "alpha": alpha,
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "cu_seqlens": cu_seqlens,
        "mode": mode,
        "chunk_size": chunk_size,
        "qk_l2norm": qk_l2norm,
        "state_v_first": state_v_first,
        "allow_tf32": allow_tf32,
    }
    if p.call.by_jax:
        with called(_NAMES, q):
            return kda(q, k, p.written(), g, 1.0, x=p.x(), **options)
    watched = p.is_watched(b, w, g, alpha, initial_state)
    values, arrays, names = p.for_core(smooth=watched)
    core = core_for(q) if watched else unrecorded_core(q)
    with called(names, q):
        result: tuple[Array, AnyArray | None] = core("kda", q, k, values, g=g, **arrays, **options)
    return result


def gdn2_step(
    q: Array,
    k: Array,
    v: Array,
    b: AnyArray | float,
    w: AnyArray | float,
    g: AnyArray | float | None = None,
    *,
    state: AnyArray,
    alpha: AnyArray | float | None = None,
    state_indices: AnyArray | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
) -> Array:
    """One token of :func:`gdn2`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    b : array [B,H,K] or float
        How much is erased, for every key; in [0, 1] with keys of norm 1.
    w : array [B,HV,V] or float
        How much is written, for every value.
    g : array [B,HV,K] or float, optional
        Natural LOG of the decay, <= 0, for every key.
    alpha : array like g, or float, optional
        The decay itself, in [0, 1], instead of g.
    state : array [B,HV,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,HV,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, qk_l2norm, state_v_first : see :func:`gdn2`

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
    Nothing is erased along the second key, and nothing written of the second value:

    >>> import numpy as np, linattn
    >>> k, v = np.array([[[0.6, 0.8]]]), np.array([[[5.0, 5.0]]])  # [B,H,K] and [B,HV,V]
    >>> b, w = np.array([[[1.0, 0.0]]]), np.array([[[1.0, 0.0]]])
    >>> state = np.zeros((1, 1, 2, 2))  # [B,HV,K,V]
    >>> o = linattn.gdn2_step(k, k, v, b, w, g=0, state=state)
    >>> np.allclose(state[0, 0], [[3, 0], [4, 0]])
    True
    """
    p = _Problem(q, k, v, b, w, qk_l2norm, tokens="", recorded=False)
    values, arrays, names = p.for_core()
    with called(names, q):
        o: Array = step_for(q)(
            "kda",
            q,
            k,
            values,
            g=g,
            alpha=alpha,
            **arrays,
            state=state,
            state_indices=state_indices,
            scale=scale,
            qk_l2norm=qk_l2norm,
            state_v_first=state_v_first,
        )
    return o


def gdn2_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    b: AnyArray | float,
    w: AnyArray | float,
    g: AnyArray | float | None = None,
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
) -> GDN2Gradients:
    """The gradients of :func:`gdn2`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    b : array [B,T,H,K] or float
        How much is erased, for every key; in [0, 1] with keys of norm 1.
    w : array [B,T,HV,V] or float
        How much is written, for every value.
    g : array [B,T,HV,K] or float, optional
        Natural LOG of the decay, <= 0, for every key.
    alpha : array like g, or float, optional
        The decay itself, in [0, 1], instead of g.
    d_final_state : array [N,HV,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mode, chunk_size, qk_l2norm, state_v_first :
        As in the forward call.

    Returns
    -------
    GDN2Gradients

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
    A gate of erasing has no gradient while the state is zero:

    >>> import numpy as np, linattn
    >>> do, q, k, v = np.random.default_rng(0).standard_normal((4, 1, 6, 2, 4))  # [B,T,H,K]
    >>> grads = linattn.gdn2_backward(do, q, k, v, b=0.2 * np.ones_like(k), w=1.0, g=-0.1)
    >>> bool(grads.db[:, 0].any()), bool(grads.db[:, 1:].all())
    (False, True)
    """
    p = _Problem(q, k, v, b, w, qk_l2norm, recorded=False)
    values, arrays, names = p.for_core(smooth=True)
    with called(names, q):
        grads = Gradients(
            *backward_for(do)(
                "kda",
                q,
                k,
                values,
                do=do,
                g=g,
                alpha=alpha,
                **arrays,
                d_final_state=d_final_state,
                scale=scale,
                initial_state=initial_state,
                cu_seqlens=cu_seqlens,
                mode=mode,
                chunk_size=chunk_size,
                qk_l2norm=qk_l2norm,
                state_v_first=state_v_first,
            )
        )
    call = p.call
    # x = b * k, of the key before or after its norm
    if call.is_like(p.b_given) and not qk_l2norm:
        dk, db = call.plus(grads.dk, b, grads.dx), p.k * grads.dx
    else:
        dx = call.real_of(grads.dx)
        dk, db = call.factor(p.b_given) * dx, p.k * (p.norm() * dx)
        dk = call.short(grads.dk + (l2norm_backward(call.real_of(k), dk) if qk_l2norm else dk))
    dv, dw = grads.dv, grads.dvalue_gate
    if dw is None:  # was w v
        d_written = call.real_of(grads.dv)
        dv, dw = call.short(call.factor(p.w_given) * d_written), v * d_written
    return GDN2Gradients(
        dq=grads.dq,
        dk=dk,
        dv=dv,
        db=call.as_given(db, p.b_given),
        dw=call.as_given(dw, p.w_given),
        dg=grads.dg,
        d_initial_state=grads.d_initial_state,
    )
