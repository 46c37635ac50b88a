"""Scans whose sizes make a GPU choose other kernels than those of test_scans.py."""

import pytest
from support.composed import DTYPES
from support.gpu import needs_gpu
from support.scans import Selective, judge_gradients

pytestmark = needs_gpu

# float16 has no number for some gradients of so many tokens.
OF_MANY_TOKENS = [dtype for dtype in DTYPES if dtype != "float16"]
of_dtypes = pytest.mark.parametrize("dtype", OF_MANY_TOKENS, ids=lambda dtype: dtype.name)


@of_dtypes
def test_gradients_of_many_channels(dtype, rng):
    """A block of the adjoint takes four sets of channels, and a sequence is cut into pieces."""
    scan = Selective("selective_scan", all=True)
    judge_gradients(scan, rng, dtype, 4, B=4, T=1024, D=1024, N=4, G=1, on_gpu=True)


@pytest.mark.parametrize("S", [1, 4])
@pytest.mark.parametrize("N", [4, 5])
@of_dtypes
def test_gradients_of_pieces(dtype, N, S, rng):
    scan = Selective("selective_scan", all=True)
    judge_gradients(scan, rng, dtype, S, B=1, T=600, D=520, N=N, G=2, on_gpu=True)
