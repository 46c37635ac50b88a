"""RWKV-7 (Goose), in both spellings of its authors. Forward, step, backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from linattn.composed._arrays import Arrays
from linattn.composed._names import called
from linattn.ops._core import AnyArray, Array, Mode
from linattn.ops.dplr_delta_rule import (
    dplr_delta_rule,
    dplr_delta_rule_backward,
    dplr_delta_rule_step,
)

__all__ = ["RWKV7Gradients", "rwkv7", "rwkv7_backward", "rwkv7_step"]

_NAMES = {"q": "r", "g": "w"}


class RWKV7Gradients(NamedTuple):
    """The gradients of :func:`rwkv7`, each with the shape and dtype of its input.

    The gradient of an array that the call was not given is None. That of a number is a number.

    Attributes
    ----------
    dr, dk : array [B,T,H,K]
    dw : array [B,T,H,K] or float
    dv : array [B,T,H,V]
    da : array [B,T,H,K]
    db, dkk : array [B,T,H,K] or None
    d_initial_state : array [N,H,K,V] or None
        float32 (float64 for float64 inputs).

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.ones((1, 3, 2, 4)) / 4  # [B,T,H,K]
    >>> grads = linattn.rwkv7_backward(x, x, -x, x, x, -x, x)
    >>> grads.da.shape, grads.db.shape, grads.dkk is None
    ((1, 3, 2, 4), (1, 3, 2, 4), True)
    """

    dr: Any
    dw: Any
    dk: Any
    dv: Any
    da: Any
    db: Any | None
    dkk: Any | None
    d_initial_state: Any | None


class _Problem:
    """The arguments of a call, checked, and what dplr_delta_rule is called with."""

    def __init__(
        self,
        r: Any,
        w: Any,
        k: Any,
        v: Any,
        a: Any,
        b: Any,
        kk: Any,
        tokens: str = "T ",
        recorded: bool = True,
    ) -> None:
        keys = f"B {tokens}H K"
        call = Arrays("r", r, keys, recorded=recorded)
        if w is None:
            raise TypeError("w: expected an array or a number, got None")
        call.wide("w", w, keys)
        call.array("k", k, keys)
        call.array("v", v, f"B {tokens}H V")
        if b is not None and kk is not None:
            raise TypeError("kk: expected None beside b, got both")
        if b is None and kk is None:
            raise TypeError("b: expected an array, or kk= in its place, got neither")
        self.call, self.kk = call, None
        if kk is None:
            self.x, self.y = -call.array("a", a, keys), call.array("b", b, keys)
            return
        self.kk = call.array("kk", kk, keys)
        self.a_given = call.wide("a", a, keys, number=False)
        if a is None:
            raise TypeError("a: expected an array, got None")
        self.x, self.y = kk, call.scaled(self.a_given, kk)


def rwkv7(
    r: Array,
    w: AnyArray | float,
    k: Array,
    v: Array,
    a: AnyArray | None = None,
    b: AnyArray | None = None,
    *,
    kk: AnyArray | None = None,
    scale: float | None = 1.0,
    initial_state: AnyArray | None = None,
    output_final_state: bool = False,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    state_v_first: bool = False,
    allow_tf32: bool | None = None,
) -> tuple[Array, AnyArray | None]:
    """RWKV-7: a decay per key, and a key that is looked up and another from which it is taken off.

    ::

        S <- diag(exp(w_t)) S + b (a' S) + k v',   o = scale * S' r
        with kk:  a = -kk and b = kk * a

    The look is of the state before its decay. It is :func:`dplr_delta_rule` with q = r, g = w,
    x = -a and y = b; or x = kk and y = kk * a. The norm of kk, the mixing of k with a, and the
    bonus of r . k are the layer's.

    Parameters
    ----------
    r : array [B,T,H,K]
        The receptance: the query.
    w : array [B,T,H,K] or float
        Natural LOG of the decay, <= 0, for every key. RWKV-7's layers have
        -exp(-1/2) sigmoid(...); a kernel of theirs that takes a w with the decay exp(-exp(w)) gets
        -exp(w) here.
    k : array [B,T,H,K], dtype of r
    v : array [B,T,H,V], dtype of r
    a : array [B,T,H,K]
        Minus the key that is looked up (with b), of the dtype of r; or how much of it is taken off
        (with kk).
    b : array [B,T,H,K], optional
        The key from which the look is taken off; dtype of r.
    kk : array [B,T,H,K], optional
        The key that is looked up, of norm 1; dtype of r.
    scale : float, optional
        Of the reads; 1 by default, and None is K**-0.5.
    initial_state : array [N,H,K,V], optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mode, chunk_size, state_v_first, allow_tf32 : see :func:`dplr_delta_rule`

    Returns
    -------
    o : array [B,T,H,V], dtype of v
    final_state : array [N,H,K,V] or None

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
        On the CPU: w is above 0, so the state may grow without bound.

    See Also
    --------
    rwkv7_step, rwkv7_backward : One token; the gradients.
    linattn.dplr_delta_rule : The op that it calls.

    References
    ----------
    Peng et al., 2025, *RWKV-7 "Goose" with Expressive Dynamic State Evolution*, arXiv:2503.14456.

    Examples
    --------
    The two spellings:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> r, k, v, kk = rng.standard_normal((4, 1, 8, 2, 4))  # [B,T,H,K]
    >>> kk /= np.linalg.norm(kk, axis=-1, keepdims=True)
    >>> a, w = rng.uniform(0, 1, (2, 1, 8, 2, 4))
    >>> o, _ = linattn.rwkv7(r, -w, k, v, a, kk=kk)
    >>> np.allclose(o, linattn.rwkv7(r, -w, k, v, -kk, kk * a)[0])
    True
    """
    p = _Problem(r, w, k, v, a, b, kk)
    with called(_NAMES, r):
        return dplr_delta_rule(
            r,
            k,
            v,
            p.x,
            p.y,
            w,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            mode=mode,
            chunk_size=chunk_size,
            state_v_first=state_v_first,
            allow_tf32=allow_tf32,
        )


def rwkv7_step(
    r: Array,
    w: AnyArray | float,
    k: Array,
    v: Array,
    a: AnyArray | None = None,
    b: AnyArray | None = None,
    *,
    state: AnyArray,
    kk: AnyArray | None = None,
    state_indices: AnyArray | None = None,
    scale: float | None = 1.0,
    state_v_first: bool = False,
) -> Array:
    """One token of :func:`rwkv7`; ``state`` is changed in place.

    Parameters
    ----------
    r : array [B,H,K]
        The receptance: the query.
    w : array [B,H,K] or float
        Natural LOG of the decay, <= 0, for every key. RWKV-7's layers have
        -exp(-1/2) sigmoid(...); a kernel of theirs that takes a w with the decay exp(-exp(w)) gets
        -exp(w) here.
    k : array [B,H,K], dtype of r
    v : array [B,H,V], dtype of r
    a : array [B,H,K]
        Minus the key that is looked up (with b), of the dtype of r; or how much of it is taken off
        (with kk).
    b : array [B,H,K], optional
        The key from which the look is taken off; dtype of r.
    kk : array [B,H,K], optional
        The key that is looked up, of norm 1; dtype of r.
    state : array [B,H,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,H,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, state_v_first : see :func:`rwkv7`

    Returns
    -------
    o : array [B,H,V], dtype of v

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
        On the CPU: w is above 0, so the state may grow without bound.

    Examples
    --------
    Tokens one by one are the sequence:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> r, k, v, b = rng.standard_normal((4, 1, 5, 2, 4)) / 2  # [B,T,H,K]
    >>> state = linattn.zeros_state(1, 2, 4, 4, dtype=np.float64)
    >>> for t in range(5):
    ...     x = r, k, v, -b, b
    ...     r_t, k_t, v_t, a_t, b_t = (y[:, t] for y in x)
    ...     o = linattn.rwkv7_step(r_t, -0.5, k_t, v_t, a_t, b_t, state=state)
    >>> np.allclose(o, linattn.rwkv7(r, -0.5, k, v, -b, b)[0][:, -1])
    True
    """
    p = _Problem(r, w, k, v, a, b, kk, tokens="", recorded=False)
    with called(_NAMES, r):
        return dplr_delta_rule_step(
            r,
            k,
            v,
            p.x,
            p.y,
            w,
            state=state,
            state_indices=state_indices,
            scale=scale,
            state_v_first=state_v_first,
        )


def rwkv7_backward(
    do: Array,
    r: Array,
    w: AnyArray | float,
    k: Array,
    v: Array,
    a: AnyArray | None = None,
    b: AnyArray | None = None,
    *,
    kk: AnyArray | None = None,
    d_final_state: AnyArray | None = None,
    scale: float | None = 1.0,
    initial_state: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    state_v_first: bool = False,
) -> RWKV7Gradients:
    """The gradients of :func:`rwkv7`.

    Parameters
    ----------
    do : array [B,T,H,V], dtype of v
        The gradient of o.
    r : array [B,T,H,K]
        The receptance: the query.
    w : array [B,T,H,K] or float
        Natural LOG of the decay, <= 0, for every key. RWKV-7's layers have
        -exp(-1/2) sigmoid(...); a kernel of theirs that takes a w with the decay exp(-exp(w)) gets
        -exp(w) here.
    k : array [B,T,H,K], dtype of r
    v : array [B,T,H,V], dtype of r
    a : array [B,T,H,K]
        Minus the key that is looked up (with b), of the dtype of r; or how much of it is taken off
        (with kk).
    b : array [B,T,H,K], optional
        The key from which the look is taken off; dtype of r.
    kk : array [B,T,H,K], optional
        The key that is looked up, of norm 1; dtype of r.
    d_final_state : array [N,H,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mode, chunk_size, state_v_first :
        As in the forward call.

    Returns
    -------
    RWKV7Gradients

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
        On the CPU: w is above 0, so the state may grow without bound.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> do, r, k, v, kk = np.random.default_rng(0).standard_normal((5, 1, 6, 2, 4))  # [B,T,H,K]
    >>> kk /= np.linalg.norm(kk, axis=-1, keepdims=True)
    >>> grads = linattn.rwkv7_backward(do, r, -0.5, k, v, np.full(kk.shape, 0.5), kk=kk)
    >>> grads.dkk.shape, grads.db is None, type(grads.dw).__name__
    ((1, 6, 2, 4), True, 'float')
    """
    p = _Problem(r, w, k, v, a, b, kk, recorded=False)
    with called(_NAMES, r):
        grads = dplr_delta_rule_backward(
            do,
            r,
            k,
            v,
            p.x,
            p.y,
            w,
            d_final_state=d_final_state,
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            mode=mode,
            chunk_size=chunk_size,
            state_v_first=state_v_first,
        )
    call = p.call
    dx: Any = grads.dx
    da, db, dkk = -dx, grads.dy, None
    if p.kk is not None:  # x = kk, y = kk * a
        if call.is_like(p.a_given):
            dkk, da = call.plus(dx, p.a_given, grads.dy), p.kk * grads.dy
        else:
            dy = call.real_of(grads.dy)
            dkk, da = call.short(dx + p.a_given * dy), p.kk * dy
        da, db = call.as_given(da, p.a_given), None
    return RWKV7Gradients(
        dr=grads.dq,
        dw=grads.dg,
        dk=grads.dk,
        dv=grads.dv,
        da=da,
        db=db,
        dkk=dkk,
        d_initial_state=grads.d_initial_state,
    )
