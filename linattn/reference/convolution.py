"""The causal convolution of each channel with its own few taps, and its gradients."""

import numpy as np

from ._loops import cast, rounded, rounded_like, working
from .composed._arrays import sequences, sigmoid


def causal_conv1d(
    x,
    weight,
    bias=None,
    *,
    activation=None,
    initial_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """y[t] = act(bias + sum over i of weight[:,W-1-i] x[t-i]).

    Parameters
    ----------
    x : array [B,T,D]
    weight : array [D,W]
        The last tap belongs to the token itself.
    bias : array [D], optional
    activation : "silu", "swish" or None
        silu and swish are one: z sigmoid(z).
    initial_state : array [S,D,W-1], optional
        The inputs before the first, the oldest first. None is zeros.
    cu_seqlens : array [S+1], optional
    dtype : dtype
        Of the arithmetic, as in :mod:`linattn.reference`.

    Returns
    -------
    y : ndarray [B,T,D]
    final_state : ndarray [S,D,W-1]

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> x = np.array([[[1.0], [10.0], [100.0]]])
    >>> y, state = reference.causal_conv1d(x, np.array([[3.0, 2.0, 1.0]]))
    >>> y.ravel().tolist(), state.tolist()
    ([1.0, 12.0, 123.0], [[[10.0, 100.0]]])
    """
    x, z = cast(x, dtype), np.zeros(x.shape, working(dtype))
    final = []
    for n, at in enumerate(sequences(*x.shape[:2], cu_seqlens)):
        inputs = _inputs(x[at], initial_state, n, weight)
        z[at] = _sums(inputs, weight, bias)
        final.append(inputs[len(x[at]) :].T)
    y = z if activation is None else z * sigmoid(z)
    D, W = weight.shape
    return rounded(y, dtype), np.array(final, z.dtype).reshape(len(final), D, W - 1)


def causal_conv1d_backward(
    dy,
    x,
    weight,
    bias=None,
    *,
    activation=None,
    initial_state=None,
    d_final_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """The gradients of :func:`causal_conv1d`.

    Parameters
    ----------
    dy : array [B,T,D]
        The gradient of y.
    x, weight, bias, activation, initial_state, cu_seqlens, dtype
        As in :func:`causal_conv1d`.
    d_final_state : array [S,D,W-1], optional

    Returns
    -------
    dict
        By the names of the arguments, None where one was not given.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> x = np.array([[[1.0], [10.0], [100.0]]])
    >>> grads = reference.causal_conv1d_backward(np.ones_like(x), x, np.array([[3.0, 2.0]]))
    >>> grads["x"].ravel().tolist(), grads["weight"].tolist()
    ([5.0, 5.0, 2.0], [[11.0, 111.0]])
    """
    x, dy = cast(x, dtype), cast(dy, dtype)
    work, W = x.dtype, weight.shape[1]
    taps = cast(weight, work)
    dx, dweight, dbias = np.zeros_like(x), np.zeros_like(taps), np.zeros(len(taps), work)
    states = []
    for n, at in enumerate(sequences(*x.shape[:2], cu_seqlens)):
        T = len(x[at])
        inputs = _inputs(x[at], initial_state, n, weight)
        z, dz = _sums(inputs, weight, bias), dy[at]
        if activation is not None:  # was y = z s, s = sigmoid(z)
            s = sigmoid(z)
            dz = dz * s * (1 + z * (1 - s))
        d_inputs = np.zeros_like(inputs)
        if d_final_state is not None:  # was the last W-1 inputs
            d_inputs[T:] = cast(d_final_state[n], work).T
        for j in range(W):  # was z[t] = bias + sum over j of taps[:,j] inputs[t+j]
            d_inputs[j : j + T] += taps[:, j] * dz
            dweight[:, j] += (dz * inputs[j : j + T]).sum(0)
        dbias += dz.sum(0)
        dx[at] = d_inputs[W - 1 :]
        states.append(d_inputs[: W - 1].T)
    return {
        "x": rounded(dx, dtype),
        "weight": rounded_like(dweight, weight, work),
        "bias": None if bias is None else rounded_like(dbias, bias, work),
        "initial_state": None if initial_state is None else np.array(states, work),
    }


def _inputs(x, initial_state, n, weight):
    """The tokens x [T,D] of sequence n behind the W-1 inputs before them."""
    D, W = weight.shape
    if initial_state is None:
        return np.concatenate([np.zeros((W - 1, D), x.dtype), x])
    return np.concatenate([cast(initial_state[n], x.dtype).T, x])


def _sums(inputs, weight, bias):
    """z [T,D]: taps times inputs, the token's own first."""
    W = weight.shape[1]
    T = len(inputs) - (W - 1)
    taps = cast(weight, inputs.dtype)
    z = np.zeros((T, len(taps)), inputs.dtype)
    if bias is not None:
        z += cast(bias, inputs.dtype)
    for j in reversed(range(W)):
        z += taps[:, j] * inputs[j : j + T]
    return z
