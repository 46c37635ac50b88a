"""Mamba's selective scan. Forward, step, backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from linattn import _rooms
from linattn.features import shape_of
from linattn.ops._core import AnyArray, Array
from linattn.scans._pairs import as_complex, as_pairs, is_complex, with_state

__all__ = [
    "SelectiveScanGradients",
    "selective_scan",
    "selective_scan_backward",
    "selective_scan_step",
]


class SelectiveScanGradients(NamedTuple):
    """The gradients of :func:`selective_scan`, each with the shape and dtype of its input.

    The gradient of an array that the call was not given is None. That of a complex array is
    complex: its real part belongs to the real part of the array, and its imaginary part to the
    imaginary one.

    Attributes
    ----------
    du, ddelta : array [B,T,D]
    dA : array [D,N]
    dB, dC : array [B,T,G,N]
    dD : array [D] or None
    dz : array [B,T,D] or None
    ddelta_bias : array [D] or None
    d_initial_state : array [S,D,N] or None
        float32 (float64 for float64 inputs).

    Examples
    --------
    >>> import numpy as np, linattn
    >>> u, A, BC = np.ones((1, 3, 2)), -np.ones((2, 4)), np.ones((1, 3, 1, 4))
    >>> grads = linattn.selective_scan_backward(u, u, u, A, BC, BC)
    >>> grads.dA.shape, grads.dB.shape, grads.dD is None
    ((2, 4), (1, 3, 1, 4), True)
    """

    du: Any
    ddelta: Any
    dA: Any
    dB: Any
    dC: Any
    dD: Any | None
    dz: Any | None
    ddelta_bias: Any | None
    d_initial_state: Any | None


def selective_scan(
    u: Array,
    delta: Array,
    A: AnyArray,
    B: AnyArray,
    C: AnyArray,
    *,
    D: AnyArray | None = None,
    z: Array | None = None,
    delta_bias: AnyArray | None = None,
    delta_softplus: bool = False,
    initial_state: AnyArray | None = None,
    output_final_state: bool = False,
    cu_seqlens: AnyArray | None = None,
    out: Array | None = None,
) -> tuple[Array, Any]:
    """Mamba's recurrence: a decay for each channel and each number of its state.

    With delta <- softplus(delta + delta_bias) where that is asked for, each channel d has::

        h[n] <- exp(delta A[n]) h[n] + delta u B[n],   y = (sum over n of C[n] h[n] + D u) silu(z)

    Parameters
    ----------
    u : array [B,T,D]
        The input of each channel. Any strides: ``x.transpose(1, 2)`` of an array [B,D,T] is read
        where it lies.
    delta : array [B,T,D], dtype of u
        The time step.
    A : array [D,N]
        The rates, negative. Real, or complex for states of conjugate pairs: then B, C and the
        states are complex too, and y is twice the real part of the sum. delta A is the natural LOG
        of the decay.
    B, C : array [B,T,G,N], dtype of u
        Of G groups of channels; G divides D. [B,T,N] is one group.
    D : array [D], optional
        The part of u in y.
    z : array [B,T,D], dtype of u, optional
        The gate of the output.
    delta_bias : array [D], optional
    delta_softplus : bool
        softplus has all digits at both ends. Mamba's takes its argument itself above 20, which is
        the same in float32.
    initial_state : array [S,D,N], optional
        Zeros where it is absent. float32 (float64 for float64 inputs) or bfloat16, or complex.
    output_final_state : bool
    cu_seqlens : int array [S+1], optional
        B is 1, and S sequences lie behind one another. They begin at these tokens; T is last.
    out : array [B,T,D], dtype of u, optional
        Where y is to go.

    Returns
    -------
    y : array [B,T,D], dtype of u
    final_state : array [S,D,N] or None
        S sequences: B, or those of cu_seqlens.

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of u.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold y, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    See Also
    --------
    linattn.ssd : Mamba-2, whose decay is one number a head: products of matrices.
    linattn.s4d : The same recurrence with constant A, B and C.

    Notes
    -----
    The gradients need no array [B,T,D,N]: a state is kept for every 16 tokens of a few channels at
    a time, and what lies between is computed again.

    References
    ----------
    Gu and Dao, 2023, *Mamba: Linear-Time Sequence Modeling with Selective State Spaces*,
    arXiv:2312.00752.

    Examples
    --------
    A time step of 0 writes nothing and forgets nothing. A long one forgets:

    >>> import numpy as np, linattn
    >>> u, BC = np.ones((1, 3, 1)), np.ones((1, 3, 1, 2))
    >>> delta = np.array([1.0, 0.0, 50.0])[None, :, None]
    >>> A = np.array([[-1.0, -2.0]])
    >>> y, _ = linattn.selective_scan(u, delta, A, BC, BC)
    >>> y[0, :, 0].tolist()
    [2.0, 2.0, 100.0]
    """
    arrays = {
        "u": u,
        "delta": delta,
        "A": A,
        "B": _grouped(B),
        "C": _grouped(C),
        "D": D,
        "z": z,
        "delta_bias": delta_bias,
        "cu_seqlens": cu_seqlens,
        "initial_state": initial_state,
    }
    pairs = _pair_up(arrays)
    y, state = _rooms.forward(
        "scan",
        "selective",
        arrays,
        out=out,
        complex=pairs,
        delta_softplus=delta_softplus,
        output_final_state=output_final_state,
    )
    return y, as_complex(state) if pairs else state


def selective_scan_step(
    state: AnyArray,
    u: Array,
    delta: Array,
    A: AnyArray,
    B: AnyArray,
    C: AnyArray,
    *,
    D: AnyArray | None = None,
    z: Array | None = None,
    delta_bias: AnyArray | None = None,
    delta_softplus: bool = False,
    state_indices: AnyArray | None = None,
    out: Array | None = None,
) -> Array:
    """One token of :func:`selective_scan`; ``state`` is changed in place.

    Parameters
    ----------
    state : array [B,D,N]
        float32 (float64 for float64 inputs) or bfloat16, or complex; its rows contiguous.
    u, delta : array [B,D]
    A : array [D,N]
        Negative. delta A is the natural LOG of the decay.
    B, C : array [B,G,N], or [B,N]
    D, delta_bias : array [D], optional
    z : array [B,D], optional
    delta_softplus : bool
    state_indices : int array [B], optional
        ``state`` is then a pool [P,D,N]: row n has state ``state_indices[n]``, and -1 none (its y
        is zeros). No state twice.
    out : array [B,D], optional

    Returns
    -------
    y : array [B,D], dtype of u

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of u.
    ValueError
        Shapes, values or options do not fit, or the state is not contiguous.
    MemoryError
        The memory does not hold y.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Examples
    --------
    Tokens one by one are the sequence:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> u, delta = rng.uniform(0, 1, (2, 1, 5, 3))
    >>> A, (B, C) = -rng.uniform(1, 2, (3, 4)), rng.standard_normal((2, 1, 5, 1, 4))
    >>> state = np.zeros((1, 3, 4))
    >>> y = [
    ...     linattn.selective_scan_step(state, u[:, t], delta[:, t], A, B[:, t], C[:, t])
    ...     for t in range(5)
    ... ]
    >>> np.allclose(np.stack(y, 1), linattn.selective_scan(u, delta, A, B, C)[0])
    True
    """
    arrays = {
        "u": u,
        "delta": delta,
        "A": A,
        "B": _grouped(B, 2),
        "C": _grouped(C, 2),
        "D": D,
        "z": z,
        "delta_bias": delta_bias,
        "state_indices": state_indices,
        "state": state,
    }
    pairs = is_complex(A)
    if pairs:
        _pair_up(arrays, state="state", in_place=True)
    found = _rooms.step(
        "scan", "selective", arrays, out=out, complex=pairs, delta_softplus=delta_softplus
    )
    y: Array = with_state(found, state, arrays["state"]) if pairs else found
    return y


def selective_scan_backward(
    dy: Array,
    u: Array,
    delta: Array,
    A: AnyArray,
    B: AnyArray,
    C: AnyArray,
    *,
    D: AnyArray | None = None,
    z: Array | None = None,
    delta_bias: AnyArray | None = None,
    delta_softplus: bool = False,
    initial_state: AnyArray | None = None,
    d_final_state: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
) -> SelectiveScanGradients:
    """The gradients of :func:`selective_scan`.

    Parameters
    ----------
    dy : array [B,T,D], dtype of u
        The gradient of y.
    d_final_state : array [S,D,N], optional
        The gradient of the final state, float32 (float64 for float64 inputs), or complex.
    u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state, cu_seqlens :
        As in the forward call.

    Returns
    -------
    SelectiveScanGradients

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of u.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the gradients, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Examples
    --------
    A sum of outputs, by its u at one token:

    >>> import numpy as np, linattn
    >>> u, A, BC = np.ones((1, 3, 1)), -np.ones((1, 1)), np.ones((1, 3, 1, 1))
    >>> grads = linattn.selective_scan_backward(u, u, u, A, BC, BC)
    >>> np.allclose(grads.du[0, :, 0], [1 + np.exp(-1) + np.exp(-2), 1 + np.exp(-1), 1])
    True
    """
    arrays = {
        "dy": dy,
        "u": u,
        "delta": delta,
        "A": A,
        "B": _grouped(B),
        "C": _grouped(C),
        "D": D,
        "z": z,
        "delta_bias": delta_bias,
        "cu_seqlens": cu_seqlens,
        "initial_state": initial_state,
        "d_final_state": d_final_state,
    }
    pairs = _pair_up(arrays)
    found = _rooms.backward(
        "scan", "selective", arrays, complex=pairs, delta_softplus=delta_softplus
    )
    if pairs:
        for name in ("dA", "dB", "dC", "d_initial_state"):
            found[name] = as_complex(found[name])
    for name, given in (("dB", B), ("dC", C)):
        found[name] = found[name].reshape(given.shape)
    return SelectiveScanGradients(**found)


def _grouped(x: Any, before: int = 3) -> Any:
    """Rows [B,T,N] as those of one group. `before`: the axes of an array without groups."""
    shape = shape_of(x)
    if shape is None or len(shape) != before:
        return x
    return x[..., None, :]


def _pair_up(
    arrays: dict[str, Any], state: str = "initial_state", *, in_place: bool = False
) -> bool:
    """Complex arrays as pairs of reals, if A is complex."""
    if not is_complex(arrays["A"]):
        return False
    for name in ("A", "B", "C"):
        arrays[name] = as_pairs(name, arrays[name])
    arrays[state] = as_pairs(state, arrays[state], in_place=in_place)
    if "d_final_state" in arrays:
        arrays["d_final_state"] = as_pairs("d_final_state", arrays["d_final_state"])
    return True
