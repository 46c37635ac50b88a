"""What the tests of the systems share: the acceptance rule over many draws, and differences."""

import ml_dtypes
import numpy as np

from linattn.testing import assert_accurate
from support import device

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
POOL = 1000  # numbers of each result: the naive twin's largest error is then no accident


def wider(dtype):
    """The dtype of the yardstick."""
    return np.longdouble if dtype == np.float64 else np.float64


def state_dtype(dtype):
    """That of states and sums, and here that of gates too."""
    return np.float64 if dtype == np.float64 else np.float32


def judged(draw, call, reference, dtype, *, gradient=False, on_gpu=False):
    """call(**draw()) and reference(**draw(), dtype=...) by the acceptance rule.

    Both give dicts of arrays. Problems are drawn until every array has enough numbers. float64 is
    compared as identities are: relative to the largest number. on_gpu: the call goes to a GPU,
    whatever `--device` names.
    """
    found, exact, naive = {}, {}, {}
    # a GPU's tests have time for more
    pool = 8 * POOL if on_gpu or not device.on_host() else POOL
    while not found or min(sum(x.size for x in xs) for xs in found.values()) < pool:
        given = draw()
        for kept, results in (
            (found, call(**given)),
            (exact, reference(**given, dtype=wider(dtype))),
            (naive, reference(**given, dtype=dtype)),
        ):
            for name, x in results.items():
                if x is not None:
                    kept.setdefault(name, []).append(np.asarray(x))
        if dtype == np.float64:
            break
    assert found.keys() == exact.keys() == naive.keys()
    for name, xs in found.items():
        assert [x.shape for x in xs] == [x.shape for x in exact[name]], name
        assert xs[0].dtype in (dtype, state_dtype(dtype)), (name, xs[0].dtype)
        out, ref64, twin = (
            np.concatenate([x.ravel() for x in kept[name]]) for kept in (found, exact, naive)
        )
        assert np.abs(ref64).max() > 1e-3, name
        if dtype == np.float64:
            assert_near(out, ref64, 1e-12, name)
        else:
            assert_accurate(out, ref64, twin, dtype=dtype, gradient=gradient, name=name)


def assert_near(found, expected, bound, name=""):
    """The largest difference, relative to the largest number."""
    found, expected = (np.asarray(x, np.longdouble) for x in (found, expected))
    assert found.shape == expected.shape, (name, found.shape, expected.shape)
    size = np.abs(expected).max(initial=0)
    worst = np.abs(found - expected).max(initial=0)
    assert worst <= bound * max(size, 1e-300), f"{name}: {worst:.2e} of {size:.2e}"


def slopes(loss, x, rng, many=6, h=1e-6):
    """(index, central difference) of loss() by some numbers of x, which is changed in between."""
    flat = x.reshape(-1)
    for i in rng.choice(flat.size, min(many, flat.size), replace=False):
        before, values = flat[i], []
        for changed in (before + h, before - h):
            flat[i] = changed
            values.append(loss())
        flat[i] = before
        yield i, (values[0] - values[1]) / (2 * h)


def assert_slopes(loss, arrays, gradients, rng, bound=1e-6):
    """The gradients (a dict like the arrays) against central differences of loss()."""
    for name, x in arrays.items():
        dx = np.asarray(gradients[name]).reshape(-1)
        size = max(1.0, np.abs(dx).max())
        for i, slope in slopes(loss, x, rng):
            assert abs(dx[i] - slope) < bound * size, (name, i, dx[i], slope)
