"""HGRN2: gated linear attention whose key is what is forgotten. Forward, step, backward."""

from __future__ import annotations

from typing import Any

from linattn.composed._arrays import Arrays
from linattn.composed._names import called
from linattn.ops._core import AnyArray, Array, Gradients, Mode
from linattn.ops.gla import gla, gla_backward, gla_step

__all__ = ["hgrn2", "hgrn2_backward", "hgrn2_step"]

_NAMES = {"k": "g"}  # k is made of g


class _Problem:
    """The arguments of a call, checked, and what gla is called with."""

    def __init__(self, q: Any, g: Any, v: Any, tokens: str = "T ", recorded: bool = True) -> None:
        call = Arrays("q", q, f"B {tokens}H K", recorded=recorded)
        if g is None:
            raise TypeError("g: expected an array or a number, got None")
        self.given = call.wide("g", g, f"B {tokens}H K")
        call.array("v", v, f"B {tokens}H V")
        self.call = call

    def compute(self) -> None:
        """g in the dtype of the sums, and the key 1 - exp(g), with all digits near 0."""
        self.g = self.call.real_of(self.given)
        self.k = self.call.short(-self.call.xp.expm1(self.g))


def hgrn2(
    q: Array,
    g: AnyArray | float,
    v: Array,
    *,
    scale: float | None = 1.0,
    initial_state: AnyArray | None = None,
    output_final_state: bool = False,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    state_v_first: bool = False,
    allow_tf32: bool | None = None,
) -> tuple[Array, AnyArray | None]:
    """HGRN2: a token writes as much as it forgets.

    ::

        f = exp(g),   S <- diag(f) S + (1 - f) v',   o = scale * S' q

    It is :func:`gla` with k = 1 - exp(g), which is taken with all its digits where f is near 1.

    Parameters
    ----------
    q : array [B,T,H,K]
        The output gate of the paper.
    g : array [B,T,H,K] or float
        Natural LOG of the forget gate, <= 0.
    v : array [B,T,H,V]
        The input.
    scale : float, optional
        Of the reads; 1 by default, as in the paper, and K**-0.5 for None.
    initial_state : array [N,H,K,V], optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mode, chunk_size, state_v_first, allow_tf32 : see :func:`gla`

    Returns
    -------
    o : array [B,T,H,V], dtype of v
    final_state : array [N,H,K,V] or None

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of q.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the results, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: g is above 0, so the state may grow without bound.

    See Also
    --------
    hgrn2_step, hgrn2_backward : One token; the gradients.
    linattn.reference.hgrn2 : The same in NumPy, float64, token by token.

    References
    ----------
    Qin et al., 2024, *HGRN2: Gated Linear RNNs with State Expansion*, arXiv:2404.07904.

    Examples
    --------
    A constant input fills the state, whatever is forgotten:

    >>> import numpy as np, linattn
    >>> q, v = np.ones((1, 200, 1, 2)) / 2, np.full((1, 200, 1, 3), 7.0)
    >>> g = -np.random.default_rng(0).uniform(0.1, 1, (1, 200, 1, 2))
    >>> o, _ = linattn.hgrn2(q, g, v)
    >>> np.allclose(o[:, -1], 7)
    True
    """
    p = _Problem(q, g, v)
    p.compute()
    with called(_NAMES, q):
        return gla(
            q,
            p.k,
            v,
            p.g,
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            mode=mode,
            chunk_size=chunk_size,
            state_v_first=state_v_first,
            allow_tf32=allow_tf32,
        )


def hgrn2_step(
    q: Array,
    g: AnyArray | float,
    v: Array,
    *,
    state: AnyArray,
    state_indices: AnyArray | None = None,
    scale: float | None = 1.0,
    state_v_first: bool = False,
) -> Array:
    """One token of :func:`hgrn2`; ``state`` is changed in place.

    Parameters
    ----------
    q : array [B,H,K]
    g : array [B,H,K] or float
        Natural LOG of the forget gate, <= 0.
    v : array [B,H,V]
    state : array [B,H,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,H,K,V]: row n has state ``state_indices[n]``, and -1 none (its o
        is zeros). No state twice.
    scale, state_v_first : see :func:`hgrn2`

    Returns
    -------
    o : array [B,H,V], dtype of v

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of q.
    ValueError
        Shapes, values or options do not fit, or the innermost axis of q, v or the state is not
        contiguous.
    MemoryError
        The memory does not hold o.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: g is above 0, so the state may grow without bound.

    Examples
    --------
    Half is forgotten, and half of the input is written:

    >>> import numpy as np, linattn
    >>> state = np.full((1, 1, 2, 1), 4.0)
    >>> q, v = np.ones((1, 1, 2)), np.full((1, 1, 1), 8.0)
    >>> o = linattn.hgrn2_step(q, np.log(0.5), v, state=state)
    >>> np.allclose(state, 6), np.allclose(o, 12)
    (True, True)
    """
    p = _Problem(q, g, v, tokens="", recorded=False)
    p.compute()
    with called(_NAMES, q):
        o: Array = gla_step(
            q,
            p.k,
            v,
            p.g,
            state=state,
            state_indices=state_indices,
            scale=scale,
            state_v_first=state_v_first,
        )
    return o


def hgrn2_backward(
    do: Array,
    q: Array,
    g: AnyArray | float,
    v: Array,
    *,
    d_final_state: AnyArray | None = None,
    scale: float | None = 1.0,
    initial_state: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    state_v_first: bool = False,
) -> Gradients:
    """The gradients of :func:`hgrn2`.

    Parameters
    ----------
    do : array [B,T,H,V], dtype of v
        The gradient of o.
    q : array [B,T,H,K]
    g : array [B,T,H,K] or float
        Natural LOG of the forget gate, <= 0.
    v : array [B,T,H,V]
    d_final_state : array [N,H,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mode, chunk_size, state_v_first :
        As in the forward call.

    Returns
    -------
    Gradients
        dk is None. dg has two parts: g is the decay, and the key is made of it.

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of q.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the gradients, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: g is above 0, so the state may grow without bound.

    Examples
    --------
    Of one token from a zero state, o = (1 - exp(g)) v q, so dg = -exp(g) v q do:

    >>> import numpy as np, linattn
    >>> one = np.ones((1, 1, 1, 1))
    >>> grads = linattn.hgrn2_backward(one, 2 * one, -one, 3 * one)
    >>> np.allclose(grads.dg, -np.exp(-1) * 6), grads.dk is None
    (True, True)
    """
    p = _Problem(q, g, v, recorded=False)
    p.call.array("do", do, "B T H V")
    p.compute()
    with called(_NAMES, q):
        grads = gla_backward(
            do,
            q,
            p.k,
            v,
            p.g,
            d_final_state=d_final_state,
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            mode=mode,
            chunk_size=chunk_size,
            state_v_first=state_v_first,
        )
    # was k = 1 - exp(g)
    dg = grads.dg - p.call.real_of(grads.dk) * p.call.xp.exp(p.g)
    return grads._replace(dk=None, dg=p.call.as_given(dg, p.given))
