"""The short causal convolution in front of a mixer: each channel with its own few taps.

Gated DeltaNet, KDA, Mamba and LFM2 have one in each layer. The state of a sequence is its last
inputs, so a layer goes on where it left off.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from linattn import _rooms

__all__ = [
    "ConvolutionGradients",
    "causal_conv1d",
    "causal_conv1d_backward",
    "causal_conv1d_step",
]


class ConvolutionGradients(NamedTuple):
    """The gradients of :func:`causal_conv1d`, each with the shape and dtype of its input.

    Attributes
    ----------
    dx : array [B,T,D]
    dweight : array [D,W]
    dbias : array [D] or None
        None for an array that was not given.
    d_initial_state : array [S,D,W-1] or None
        float32 (float64 for float64 x).

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x, weight = np.ones((1, 5, 2)), np.ones((2, 4))
    >>> grads = linattn.causal_conv1d_backward(x, x, weight)
    >>> grads.dx.shape, grads.dweight.shape, grads.dbias is None
    ((1, 5, 2), (2, 4), True)
    """

    dx: Any
    dweight: Any
    dbias: Any | None
    d_initial_state: Any | None


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    out: Any = None,
) -> tuple[Any, Any]:
    """y[t] = act(bias + sum over i of weight[:,W-1-i] x[t-i]), for each channel by itself.

    Parameters
    ----------
    x : array [B,T,D]
        float64, float32, float16 or bfloat16, with any strides: [B,D,T] may come transposed.
    weight : array [D,W]
        W taps for each channel, W >= 1. The last one belongs to the token itself. Of any of these
        dtypes, as bias is.
    bias : array [D], optional
    activation : "silu", "swish" or None
        silu and swish are two names of z sigmoid(z).
    initial_state : array [S,D,W-1], optional
        The inputs before the first token, the oldest first. None is zeros. Of the dtype of x,
        float32 or bfloat16; float64 for float64 x.
    output_final_state : bool
        Return the state after the last token too.
    cu_seqlens : array [S+1], int32 or int64, optional
        The starts of S sequences that are packed into one row (B = 1), and T last. Without it S is
        B.
    out : array [B,T,D], optional
        Where y is written: the dtype of x, any strides, in no memory of another argument.

    Returns
    -------
    y : array [B,T,D]
        The dtype of x. Sums are in float32, float64 for float64 x.
    final_state : array [S,D,W-1] or None
        The last W-1 inputs of each sequence, float32 (float64 for float64 x). A sequence that is
        shorter keeps the end of its initial state in front.

    Raises
    ------
    TypeError
        An argument is no array, or has another dtype.
    ValueError
        A shape does not fit, W is 0, or activation is another word.
    MemoryError
        There is no memory for the result or the scratch.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    See Also
    --------
    causal_conv1d_step : One token of each sequence.
    causal_conv1d_backward : The gradients, for arrays that no library records.

    References
    ----------
    Gu and Dao, 2023, *Mamba*, arXiv:2312.00752; Yang et al., 2024, *Gated Delta Networks*,
    arXiv:2412.06464; Kimi Team, 2025, *Kimi Linear*, arXiv:2510.26692.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x, weight = np.array([[[1.0], [10.0], [100.0]]]), np.array([[3.0, 2.0, 1.0]])
    >>> y, state = linattn.causal_conv1d(x, weight, output_final_state=True)
    >>> y.ravel().tolist(), state.tolist()
    ([1.0, 12.0, 123.0], [[[10.0, 100.0]]])

    A sequence in two parts:

    >>> first, state = linattn.causal_conv1d(x[:, :1], weight, output_final_state=True)
    >>> rest, _ = linattn.causal_conv1d(x[:, 1:], weight, initial_state=state)
    >>> np.array_equal(np.concatenate([first, rest], 1), y)
    True
    """
    arrays = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "cu_seqlens": cu_seqlens,
        "initial_state": initial_state,
    }
    return _rooms.forward(
        "convolve",
        "causal",
        arrays,
        out=out,
        activation=activation,
        output_final_state=output_final_state,
    )


def causal_conv1d_step(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    state: Any,
    activation: str | None = None,
    state_indices: Any = None,
    out: Any = None,
) -> Any:
    """One token of each sequence: :func:`causal_conv1d` with T = 1, and its state in place.

    Parameters
    ----------
    x : array [B,D]
    weight, bias, activation : see :func:`causal_conv1d`
    state : array [B,D,W-1], or [P,D,W-1] with state_indices
        The last W-1 inputs, the oldest first. The step takes x in and the oldest out. Of the dtype
        of x, float32 or bfloat16 (float64 for float64 x), with any strides. It may hold more inputs
        than W-1, as caches of transformers do: the oldest are not read, and move on.
    state_indices : array [B], int32 or int64, optional
        Which of P states each row of x has, each of them once. -1: none, and y is zero.
    out : array [B,D], optional
        Where y is written.

    Returns
    -------
    y : array [B,D]

    Raises
    ------
    TypeError, ValueError, MemoryError, RuntimeError
        As in :func:`causal_conv1d`. An index is below -1, not below P, or there twice.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> state, weight = np.zeros((1, 1, 2)), np.array([[3.0, 2.0, 1.0]])
    >>> for token in (1.0, 10.0, 100.0):
    ...     y = linattn.causal_conv1d_step(np.array([[token]]), weight, state=state)
    >>> y.tolist(), state.tolist()
    ([[123.0]], [[[10.0, 100.0]]])
    """
    arrays = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "state_indices": state_indices,
        "state": state,
    }
    return _rooms.step("convolve", "causal", arrays, out=out, activation=activation)


def causal_conv1d_backward(
    dy: Any,
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    initial_state: Any = None,
    d_final_state: Any = None,
    cu_seqlens: Any = None,
) -> ConvolutionGradients:
    """The gradients of :func:`causal_conv1d`.

    Parameters
    ----------
    dy : array [B,T,D]
        The gradient of y, in the dtype of x.
    x, weight, bias, activation, initial_state, cu_seqlens : see :func:`causal_conv1d`
    d_final_state : array [S,D,W-1], optional
        The gradient of the final state, float32 (float64 for float64 x). None is zeros.

    Returns
    -------
    ConvolutionGradients

    Raises
    ------
    TypeError, ValueError, MemoryError, RuntimeError
        As in :func:`causal_conv1d`.

    Notes
    -----
    The sums over tokens in dweight and dbias are taken in an order that depends on the sizes alone,
    so the number of threads does not change their bits.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.array([[[1.0], [10.0], [100.0]]])
    >>> grads = linattn.causal_conv1d_backward(np.ones_like(x), x, np.array([[3.0, 2.0]]))
    >>> grads.dx.ravel().tolist(), grads.dweight.tolist()
    ([5.0, 5.0, 2.0], [[11.0, 111.0]])
    """
    arrays = {
        "dy": dy,
        "x": x,
        "weight": weight,
        "bias": bias,
        "cu_seqlens": cu_seqlens,
        "initial_state": initial_state,
        "d_final_state": d_final_state,
    }
    found = _rooms.backward("convolve", "causal", arrays, activation=activation)
    return ConvolutionGradients(**found)
