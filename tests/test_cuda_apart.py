"""Long sequences of few heads with the delta rule, where on Hopper some blocks prepare and others
walk (csrc/cuda/delta_apart.cuh). Elsewhere these are calls like any other."""

import numpy as np
import pytest
from support.compare import assert_same_bits
from support.few_heads import (
    assert_graph_repeats,
    assert_near,
    assert_number_stays_behind,
    assert_packed_alone,
    token_by_token,
)
from support.gpu import busy, gpu_problem, needs_gpu, run
from support.tensors import torch
from support.variants import ops_with

import linattn

pytestmark = needs_gpu

OPS = [op for op in ops_with(rule="delta") if linattn.VARIANTS[op].decay in ("none", "token")]
ops = pytest.mark.parametrize("op", OPS)

# T, K, V, H, HV, B: enough chunks for few heads
SHAPES = {
    "64x64": (900, 64, 64, 1, 4, 2),
    "56x40": (1111, 56, 40, 1, 3, 1),  # 40 of 64 columns, and a last chunk of 23 tokens
    "104x128": (1024, 104, 128, 2, 2, 2),
    "128x72": (700, 128, 72, 2, 4, 1),  # the second panel has 8 columns
    "128x256": (700, 128, 256, 1, 2, 1),
    "many heads": (800, 128, 128, 24, 48, 1),  # two panels of columns in a block
}
shapes = pytest.mark.parametrize("shape", SHAPES)


def problem_of(op, shape, **options):
    T, K, V, H, HV, B = SHAPES[shape]
    return gpu_problem(op, T=T, K=K, V=V, H=H, HV=HV, B=B, **options)


@pytest.mark.parametrize("l2norm", [False, True], ids=["as given", "l2norm"])
@shapes
@ops
def test_as_token_by_token(op, shape, l2norm):
    x = problem_of(op, shape) | {"qk_l2norm": l2norm}
    assert_near(run(op, x), token_by_token(op, x))


@ops
def test_packed_sequences(op):
    """An empty one, one of one token, and lengths on both sides of a chunk."""
    edges = [0, 0, 1, 640, 704, 769, 2500]
    x = gpu_problem(
        op, B=1, T=edges[-1], K=128, V=128, H=1, HV=2, cu_seqlens=np.array(edges, np.int32)
    )
    assert_packed_alone(op, x, edges, 704)


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "g", "initial_state"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e30])
@ops
def test_numbers_that_are_not_finite_or_nearly_so(op, name, number):
    assert_number_stays_behind(op, problem_of(op, "104x128"), name, number)


@ops
def test_streams_side_by_side(op):
    """Blocks wait for one another, so all of a call are on the device at once. Calls of several
    streams must not keep each other's blocks out for ever."""
    x = problem_of(op, "many heads")
    want = run(op, x)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                busy(0.001)
                results.append(run(op, x))
    torch.cuda.synchronize()
    for got in results:
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)


@ops
def test_a_graph_again_and_again(op):
    """The counters with which blocks meet begin at zero in every replay."""
    assert_graph_repeats(op, problem_of(op, "104x128"))
