"""The arrays of a call: its sequences, gates, states and groups, in the dtype of the sums."""

from itertools import pairwise

import numpy as np

from .._loops import cast, rounded_like, working


def sequences(B, T, cu_seqlens):
    """(batch, tokens) of every sequence."""
    if cu_seqlens is None:
        return [(b, slice(0, T)) for b in range(B)]
    return [(0, slice(start, end)) for start, end in pairwise(int(end) for end in cu_seqlens)]


def gate(x, shape, dtype):
    """A gate as an array of this shape, in the dtype of the sums. A number stands for an array."""
    return np.broadcast_to(cast(x, working(dtype)), shape)


def given(dx, x, dtype):
    """The gradient of a gate as it was given: of a number, a number."""
    if x is None:
        return None
    return float(dx.sum()) if np.ndim(x) == 0 else rounded_like(dx, x, working(dtype))


def state_of(x, shape, dtype):
    """A state as a new array; zeros where none was given."""
    return np.zeros(shape, working(dtype)) if x is None else cast(x, working(dtype)).copy()


def for_heads(x, H):
    """Rows [B,T,G,N] of groups as rows of the H heads that share them."""
    return x.repeat(H // x.shape[2], 2)


def of_groups(dx, G):
    """The gradient of rows that heads shared: the sum over the heads of each group."""
    B, T, H, N = dx.shape
    return dx.reshape(B, T, G, H // G, N).sum(3)


def sigmoid(x):
    return np.where(x >= 0, 1, np.exp(-abs(x))) / (1 + np.exp(-abs(x)))


def softplus(x):
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))
