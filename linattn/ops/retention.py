"""Retention (RetNet): a constant decay per head. Forward, step, backward."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Literal, Never, Unpack, overload

import numpy as np

from linattn.features import has_memory, is_traced, shape_of
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

__all__ = ["retention", "retention_backward", "retention_step"]


@lru_cache(maxsize=64)
def _default_gamma(HV: int) -> np.ndarray:
    gamma = 1 - 2.0 ** (-5 - np.arange(HV))
    gamma.flags.writeable = False
    return gamma


def _gamma_of(q: Any, k: Any, v: Any, ndim: int) -> Any:
    """RetNet's decays for v's heads; None where the core will say what is wrong with v."""
    shape = shape_of(v)
    if shape is None:
        if has_memory(q) and has_memory(k) and has_memory(v):  # the core would take all three
            raise TypeError(
                f"gamma: expected [HV], since v has no shape to make it of; got None ({type(v)})"
            )
        return None
    if len(shape) not in (ndim, ndim - 2):
        return None
    HV = shape[-2] if len(shape) == ndim else 1
    if is_traced(v):
        torch = sys.modules["torch"]
        return torch.tensor([1 - 2.0 ** (-5 - h) for h in range(HV)], dtype=torch.float64)
    try:
        return _default_gamma(HV)
    except TypeError:  # that is no number, so v is no array
        return None
    except (MemoryError, ValueError):  # NumPy's, of an array beyond the memory or its addresses
        raise MemoryError(
            f"v: expected as many heads as fit in memory, got [HV] = ({HV},)"
        ) from None


@overload
def retention(
    q: Array,
    k: Array,
    v: Array,
    *,
    output_final_state: Literal[False] = ...,
    gamma: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, None]: ...
@overload
def retention(
    q: Array,
    k: Array,
    v: Array,
    *,
    output_final_state: Literal[True],
    gamma: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray]: ...
@overload
def retention(
    q: Array,
    k: Array,
    v: Array,
    *,
    output_final_state: bool,
    gamma: AnyArray | None = ...,
    **options: Unpack[ForwardOptions],
) -> tuple[Array, AnyArray | None]: ...
def retention(
    q: Array,
    k: Array,
    v: Array,
    *,
    gamma: AnyArray | None = None,
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
    """RetNet's retention: one constant decay per head.

    ::

        S <- gamma_h S + k v',   o = scale * S' q

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    gamma : array [HV] or float, optional
        The decay itself, in [0, 1]; 1 - 2**(-5 - h) by default.
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
        An argument is not an array of a supported dtype.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the results, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: gamma is outside [0, 1], so the state may grow without bound.

    See Also
    --------
    retention_step, retention_backward : One token; the gradients.
    linattn.reference.retention : The same in NumPy, float64.

    References
    ----------
    Sun et al., 2023, *Retentive Network: A Successor to Transformer for Large Language Models*,
    arXiv:2307.08621.

    Examples
    --------
    A write fades by gamma with every token. With rows of the identity as values, o[i, j] is the
    weight with which token i reads token j, gamma**(i - j):

    >>> import numpy as np, linattn
    >>> x = np.ones((4, 1))  # one head: [T,K]
    >>> o, _ = linattn.retention(x, x, np.eye(4), gamma=0.5)
    >>> o
    array([[1.   , 0.   , 0.   , 0.   ],
           [0.5  , 1.   , 0.   , 0.   ],
           [0.25 , 0.5  , 1.   , 0.   ],
           [0.125, 0.25 , 0.5  , 1.   ]])
    """
    if _unknown:
        refuse_unknown("retention", _unknown)
    gate = _gamma_of(q, k, v, 4) if gamma is None else gamma
    return core_for(q, mask)(
        "retention",
        q,
        k,
        v,
        gamma=gate,
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


def retention_step(
    q: Array,
    k: Array,
    v: Array,
    *,
    gamma: AnyArray | None = None,
    state: AnyArray,
    state_indices: AnyArray | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_v_first: bool = False,
    out: AnyArray | None = None,
) -> Array:
    """One token of :func:`retention`; ``state`` is changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    gamma : array [HV] or float, optional
        The decay itself, in [0, 1]; 1 - 2**(-5 - h) by default.
    state : array [B,HV,K,V]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous. See
        :func:`linattn.zeros_state`.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,HV,K,V]: row n has state ``state_indices[n]``, and -1 none (its
        o is zeros). No state twice.
    scale, qk_l2norm, state_v_first : see :func:`retention`
    out : array [B,HV,V], optional
        Where o goes.

    Returns
    -------
    o : array [B,HV,V], dtype of v

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype.
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
        On the CPU: gamma is outside [0, 1], so the state may grow without bound.

    See Also
    --------
    linattn.bind : A step whose arguments are checked once.

    Examples
    --------
    Step by step, the outputs are those of one forward call:

    >>> import numpy as np, linattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 6, 2, 4))  # [B,T,H,K]
    >>> state = linattn.zeros_state(1, 2, 4, 4, dtype=np.float64)
    >>> o = [linattn.retention_step(q[:, t], k[:, t], v[:, t], state=state) for t in range(6)]
    >>> np.allclose(np.stack(o, 1), linattn.retention(q, k, v)[0])
    True
    """
    gate = _gamma_of(q, k, v, 3) if gamma is None else gamma
    return step_for(q)(
        "retention",
        q,
        k,
        v,
        gamma=gate,
        state_indices=state_indices,
        state=state,
        out=out,
        scale=scale,
        qk_l2norm=qk_l2norm,
        state_v_first=state_v_first,
    )


def bound_arguments(*, q: Any, k: Any, v: Any, gamma: Any, **rest: Any) -> dict[str, Any]:
    """A step's arguments as the core takes them, for a step that is bound."""
    gate = _gamma_of(q, k, v, 3) if gamma is None else gamma
    return {"q": q, "k": k, "v": v, "gamma": gate, **rest}


def retention_backward(
    do: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    gamma: AnyArray | None = None,
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
    """The gradients of :func:`retention`.

    Parameters
    ----------
    do : array [B,T,HV,V], dtype of v
        The gradient of o.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    gamma : array [HV] or float, optional
        The decay itself, in [0, 1]; 1 - 2**(-5 - h) by default.
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
        An argument is not an array of a supported dtype.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the gradients, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: gamma is outside [0, 1], so the state may grow without bound.

    See Also
    --------
    linattn.reference.backward : The same in NumPy, float64.

    Examples
    --------
    dg is the gradient of gamma [HV], of the default one too. o is linear in v, so v'dv = o'do:

    >>> import numpy as np, linattn
    >>> do, q, k, v = np.random.default_rng(0).standard_normal((4, 2, 6, 3, 4))  # [B,T,H,K]
    >>> grads = linattn.retention_backward(do, q, k, v)
    >>> grads.dg.shape
    (3,)
    >>> o, _ = linattn.retention(q, k, v)
    >>> np.allclose((v * grads.dv).sum(), (o * do).sum())
    True
    """
    if _unknown:
        refuse_unknown("retention_backward", _unknown)
    gate = _gamma_of(q, k, v, 4) if gamma is None else gamma
    grads = backward_for(do, mask)(
        "retention",
        q,
        k,
        v,
        gamma=gate,
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
