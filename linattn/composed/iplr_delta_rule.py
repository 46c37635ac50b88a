"""The delta rule of the identity plus a low rank (IPLR). Forward, step, backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from linattn.composed._arrays import Arrays
from linattn.ops._core import AnyArray, Array, Mode
from linattn.ops.dplr_delta_rule import (
    dplr_delta_rule,
    dplr_delta_rule_backward,
    dplr_delta_rule_step,
)

__all__ = [
    "IPLRGradients",
    "iplr_delta_rule",
    "iplr_delta_rule_backward",
    "iplr_delta_rule_step",
]


class IPLRGradients(NamedTuple):
    """The gradients of :func:`iplr_delta_rule`, each with the shape and dtype of its input.

    Attributes
    ----------
    dq, dk : array [B,T,H,K]
    dv : array [B,T,HV,V]
    da, db : array [B,T,H,K]
    d_initial_state : array [N,HV,K,V] or None
        float32 (float64 for float64 inputs).

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.ones((1, 3, 2, 4)) / 4  # [B,T,H,K]
    >>> linattn.iplr_delta_rule_backward(x, x, x, x, -x, x).da.shape
    (1, 3, 2, 4)
    """

    dq: Any
    dk: Any
    dv: Any
    da: Any
    db: Any
    d_initial_state: Any | None


def _looked_up(q: Any, a: Any, b: Any, tokens: str = "T ", recorded: bool = True) -> Any:
    """x of dplr_delta_rule."""
    call = Arrays("q", q, f"B {tokens}H K", recorded=recorded)
    call.array("b", b, f"B {tokens}H K")
    return -call.array("a", a, f"B {tokens}H K")


def iplr_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    *,
    scale: float | None = None,
    initial_state: AnyArray | None = None,
    output_final_state: bool = False,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    state_v_first: bool = False,
    allow_tf32: bool | None = None,
) -> tuple[Array, AnyArray | None]:
    """The delta rule of the identity plus a low rank: nothing decays.

    ::

        S <- S + b (a' S) + k v',   o = scale * S' q

    It is :func:`dplr_delta_rule` with g = 0, x = -a and y = b. With a = -beta k and b = k, and v
    times beta, it is :func:`delta_rule`.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    a : array [B,T,H,K], dtype of q
        The key that is looked up.
    b : array [B,T,H,K], dtype of q
        The key to which the look is added. The state can grow without bound where a . b is not
        between -2 and 0.
    scale : float, optional
        Of the reads; K**-0.5 by default.
    initial_state : array [N,HV,K,V], optional
        float32 (float64 for float64 inputs) or bfloat16; zeros by default.
    output_final_state : bool
        Return the state after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mode, chunk_size, state_v_first, allow_tf32 : see :func:`dplr_delta_rule`

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

    See Also
    --------
    iplr_delta_rule_step, iplr_delta_rule_backward : One token; the gradients.
    linattn.dplr_delta_rule : The op that it calls.

    References
    ----------
    Yang et al., 2024, *Parallelizing Linear Transformers with the Delta Rule over Sequence Length*,
    arXiv:2406.06484, for the delta rule.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> k /= np.linalg.norm(k, axis=-1, keepdims=True)
    >>> o, _ = linattn.iplr_delta_rule(q, k, 0.5 * v, -0.5 * k, k)
    >>> np.allclose(o, linattn.delta_rule(q, k, v, beta=0.5)[0])
    True
    """
    return dplr_delta_rule(
        q,
        k,
        v,
        _looked_up(q, a, b),
        b,
        0.0,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode=mode,
        chunk_size=chunk_size,
        state_v_first=state_v_first,
        allow_tf32=allow_tf32,
    )


def iplr_delta_rule_step(
    q: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    *,
    state: AnyArray,
    state_indices: AnyArray | None = None,
    scale: float | None = None,
    state_v_first: bool = False,
) -> Array:
    """One token of :func:`iplr_delta_rule`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    a : array [B,H,K], dtype of q
        The key that is looked up.
    b : array [B,H,K], dtype of q
        The key to which the look is added. The state can grow without bound where a . b is not
        between -2 and 0.
    state : array [B,HV,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,HV,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, state_v_first : see :func:`iplr_delta_rule`

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

    Examples
    --------
    The state is 2 along the first key. The look doubles it along the second:

    >>> import numpy as np, linattn
    >>> first, second = np.eye(2)[:, None, None]  # [B,H,K]
    >>> state = np.array([[[[2.0], [0.0]]]])  # [B,HV,K,V]
    >>> v = np.zeros((1, 1, 1))
    >>> o = linattn.iplr_delta_rule_step(first, first, v, 2 * first, second, state=state)
    >>> state.ravel().tolist()
    [2.0, 4.0]
    """
    return dplr_delta_rule_step(
        q,
        k,
        v,
        _looked_up(q, a, b, tokens="", recorded=False),
        b,
        0.0,
        state=state,
        state_indices=state_indices,
        scale=scale,
        state_v_first=state_v_first,
    )


def iplr_delta_rule_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    a: Array,
    b: Array,
    *,
    d_final_state: AnyArray | None = None,
    scale: float | None = None,
    initial_state: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    state_v_first: bool = False,
) -> IPLRGradients:
    """The gradients of :func:`iplr_delta_rule`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    a : array [B,T,H,K], dtype of q
        The key that is looked up.
    b : array [B,T,H,K], dtype of q
        The key to which the look is added. The state can grow without bound where a . b is not
        between -2 and 0.
    d_final_state : array [N,HV,K,V], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    scale, initial_state, cu_seqlens, mode, chunk_size, state_v_first :
        As in the forward call.

    Returns
    -------
    IPLRGradients

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

    Examples
    --------
    >>> import numpy as np, linattn
    >>> do, q, k, v, b = np.random.default_rng(0).standard_normal((5, 1, 6, 2, 4)) / 2
    >>> grads = linattn.iplr_delta_rule_backward(do, q, k, v, 0 * b, b)
    >>> bool(grads.db.any()), bool(grads.da.any())  # nothing is looked up
    (False, True)
    """
    grads = dplr_delta_rule_backward(
        do,
        q,
        k,
        v,
        _looked_up(q, a, b, recorded=False),
        b,
        0.0,
        d_final_state=d_final_state,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        mode=mode,
        chunk_size=chunk_size,
        state_v_first=state_v_first,
    )
    dx: Any = grads.dx
    return IPLRGradients(
        dq=grads.dq,
        dk=grads.dk,
        dv=grads.dv,
        da=-dx,
        db=grads.dy,
        d_initial_state=grads.d_initial_state,
    )
