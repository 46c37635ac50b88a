"""What every test file shares: outputs that start as NaN, and the choice of cases.

The grid is too large for every run: `--grid=sample` (the default) takes a fixed sample of it,
`--grid=all` all of it.
"""

import numpy as np
import pytest


def pytest_addoption(parser):
    parser.addoption("--grid", choices=("sample", "all"), default="sample",
                     help="how much of the grid of shapes to run")


@pytest.fixture
def rng(request):
    """A generator of this test's own: the same numbers whatever runs beside it."""
    return np.random.default_rng(abs(hash_of(request.node.nodeid)))


def hash_of(text):
    """A hash that does not change from process to process."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value


def poisoned(shape, dtype):
    """An output buffer full of NaN: what is not written shows."""
    return np.full(shape, np.nan).astype(dtype)
