"""The arrays in arguments and results, and whether two of these are the same bit for bit."""

import sys

import numpy as np


def leaves(x):
    """The members of dicts, tuples and lists, at any depth and in order; None is left out."""
    if isinstance(x, dict):
        return leaves(list(x.values()))
    if isinstance(x, tuple | list):
        return [y for one in x for y in leaves(one)]
    return [] if x is None else [x]


def arrays_in(x):
    """The NumPy arrays among the leaves."""
    return [y for y in leaves(x) if isinstance(y, np.ndarray)]


def over_arrays(function, x):
    """x with function(array) in the place of every array in it, of any library."""
    if isinstance(x, dict):
        return {name: over_arrays(function, value) for name, value in x.items()}
    if isinstance(x, tuple | list):
        return type(x)(over_arrays(function, value) for value in x)
    return function(x) if hasattr(x, "shape") else x


def snapshot(made):
    """The contents of every array, to see later whether one was written."""
    return [x.tobytes() for x in arrays_in(made) if not x.dtype.hasobject]


def agree(got, want):
    """float64 results of two ways to the same."""
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def assert_same_bits(got, want, name=""):
    """The same number of arrays, each with the dtype, the shape and the bits of its counterpart.

    NumPy's arrays or PyTorch's tensors, alone or in tuples, lists and dicts. Tensors are compared
    on the device that they lie on.
    """
    got, want = leaves(got), leaves(want)
    assert len(got) == len(want), (name, len(got), len(want))
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, (name, x.dtype, y.dtype, x.shape, y.shape)
        if isinstance(x, np.ndarray):
            if x.tobytes() != y.tobytes():
                np.testing.assert_array_equal(
                    x.astype(np.float64), y.astype(np.float64), err_msg=name
                )
                raise AssertionError(
                    f"{name}: equal, but for the sign of a zero or the bits of a NaN"
                )
        else:
            torch = sys.modules["torch"]
            same = torch.equal(*(a.contiguous().view(torch.uint8) for a in (x, y)))
            assert same, (name, (x.float() - y.float()).abs().max())
