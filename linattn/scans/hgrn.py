"""HGRN: a gated recurrence of single numbers. Forward, step, backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from linattn import _rooms
from linattn.composed._arrays import Arrays
from linattn.ops._core import AnyArray, Array

__all__ = ["HGRNGradients", "hgrn", "hgrn_backward", "hgrn_step"]


class HGRNGradients(NamedTuple):
    """The gradients of :func:`hgrn`, each with the shape and dtype of its input.

    Attributes
    ----------
    dx, dg : array [B,T,D]
    d_initial_state : array [S,D] or None
        float32 (float64 for float64 inputs).

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.ones((1, 3, 2))
    >>> linattn.hgrn_backward(x, x, -x).dg.shape
    (1, 3, 2)
    """

    dx: Any
    dg: Any
    d_initial_state: Any | None


def hgrn(
    x: Array,
    g: AnyArray,
    *,
    initial_state: AnyArray | None = None,
    output_final_state: bool = False,
    cu_seqlens: AnyArray | None = None,
) -> tuple[Array, Any]:
    """The hierarchically gated recurrence: one number for each channel, and a gate f = exp(g).

    Each channel has, with 1 - f as -expm1(g), which keeps its digits where f is near 1::

        h <- f h + (1 - f) x,   y = h

    Parameters
    ----------
    x : array [B,T,D]
        The candidates.
    g : array [B,T,D]
        The natural LOG of the gate, <= 0: ``log_sigmoid`` of a projection, or the log of the
        paper's lower bound and sigmoid.
    initial_state : array [S,D], optional
        Zeros where it is absent. float32 (float64 for float64 x) or bfloat16.
    output_final_state : bool
    cu_seqlens : int array [S+1], optional
        B is 1, and S sequences lie behind one another. They begin at these tokens; T is last.

    Returns
    -------
    y : array [B,T,D], dtype of x
    final_state : array [S,D] or None

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of x.
    ValueError
        Shapes do not fit.
    MemoryError
        The memory does not hold y.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    See Also
    --------
    linattn.hgrn2 : Its successor, with a matrix of numbers for each head.
    linattn.rg_lru : A gate whose write is scaled by sqrt(1 - f^2).

    References
    ----------
    Qin, Yang and Zhong, 2023, *Hierarchically Gated Recurrent Neural Network for Sequence
    Modeling*, arXiv:2311.04823.

    Examples
    --------
    Halfway to x with each token:

    >>> import numpy as np, linattn
    >>> x = np.ones((1, 3, 1))
    >>> y, _ = linattn.hgrn(x, np.log(0.5) * x)
    >>> y[0, :, 0].round(6).tolist()
    [0.5, 0.75, 0.875]
    """
    _check(x, g)
    arrays = {"u": x, "g": g, "cu_seqlens": cu_seqlens, "initial_state": initial_state}
    y: Array
    y, state = _rooms.forward(
        "scan", "gated", arrays, write=_WRITE, output_final_state=output_final_state
    )
    return y, state


def hgrn_step(
    state: AnyArray, x: Array, g: AnyArray, *, state_indices: AnyArray | None = None
) -> Array:
    """One token of :func:`hgrn`; ``state`` is changed in place.

    Parameters
    ----------
    state : array [B,D]
        float32 (float64 for float64 inputs) or bfloat16.
    x, g : array [B,D]
        g is the natural LOG of the gate.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,D]: row n has state ``state_indices[n]``, and -1 none (its y is
        zeros). No state twice.

    Returns
    -------
    y : array [B,D], dtype of x

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of x.
    ValueError
        Shapes do not fit, or the state is not contiguous.
    MemoryError
        The memory does not hold y.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> state, x = np.zeros((1, 1)), np.ones((1, 1))
    >>> [float(linattn.hgrn_step(state, x, np.log(0.5) * x).round(6)[0, 0]) for _ in range(2)]
    [0.5, 0.75]
    """
    _check(x, g, tokens="")
    arrays = {"u": x, "g": g, "state_indices": state_indices, "state": state}
    y: Array = _rooms.step("scan", "gated", arrays, write=_WRITE)
    return y


def hgrn_backward(
    dy: Array,
    x: Array,
    g: AnyArray,
    *,
    initial_state: AnyArray | None = None,
    d_final_state: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
) -> HGRNGradients:
    """The gradients of :func:`hgrn`.

    Parameters
    ----------
    dy : array [B,T,D], dtype of x
        The gradient of y.
    d_final_state : array [S,D], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    x, g, initial_state, cu_seqlens :
        As in the forward call. g is the natural LOG of the gate.

    Returns
    -------
    HGRNGradients

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of x.
    ValueError
        Shapes do not fit.
    MemoryError
        The memory does not hold the gradients.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Examples
    --------
    A gate of 1 writes nothing, so x has no gradient:

    >>> import numpy as np, linattn
    >>> x = np.ones((1, 2, 1))
    >>> float(abs(linattn.hgrn_backward(x, x, 0 * x).dx).max())
    0.0
    """
    _check(x, g).array("dy", dy, "B T D")
    arrays = {
        "dy": dy,
        "u": x,
        "g": g,
        "cu_seqlens": cu_seqlens,
        "initial_state": initial_state,
        "d_final_state": d_final_state,
    }
    found = _rooms.backward("scan", "gated", arrays, write=_WRITE)
    return HGRNGradients(dx=found["du"], dg=found["dg"], d_initial_state=found["d_initial_state"])


_WRITE = "share"  # 1 - f of x


def _check(x: Any, g: Any, tokens: str = "T ") -> Arrays:
    call = Arrays("x", x, f"B {tokens}D")
    if g is None:
        raise TypeError("g: expected an array, got None")
    call.wide("g", g, f"B {tokens}D", number=False)
    return call
