"""Long sequences of few heads with the additive rule. On Hopper they are cut into segments, and
the states before these come first (csrc/cuda/segment_sums.cuh). Elsewhere these calls are like
others."""

import numpy as np
import pytest
from support.compare import assert_same_bits, over_arrays
from support.few_heads import (
    assert_gradients,
    assert_graph_repeats,
    assert_kernels,
    assert_nan_stays_with_its_token,
    assert_near,
    assert_number_stays_behind,
    assert_packed_alone,
    assert_packed_gradients,
    token_by_token,
)
from support.gpu import PLAIN, gpu_problem, needs_gpu, run, to_gpu
from support.tensors import torch
from support.variants import ops_with

import linattn

pytestmark = needs_gpu

ADDITIVE = [PLAIN if op == "linear_attention" else op for op in ops_with(rule="additive")]
# With feature maps and a normaliser the sums of keys come first, too.
OPS = [*(op for op in ADDITIVE if op not in ops_with(decay="key")), "linear_attention"]
ops = pytest.mark.parametrize("op", OPS)
GATED = [op for op in OPS if op in ops_with(decay="token")]
gated = pytest.mark.parametrize("op", GATED)
# Gradients of all of these are cut, with feature maps and a normaliser too.
recorded = pytest.mark.parametrize("op", [*ADDITIVE, "linear_attention", *ops_with(rule="bonus")])
unmapped = [op for op in OPS if op != "linear_attention"]

# T, K, V, H, HV, B
SHAPES = {
    "64x64": (4500, 64, 64, 1, 2, 1),
    "56x40": (4111, 56, 40, 1, 1, 2),  # 40 of 64 columns, and a last chunk of 15 tokens
    "104x128": (4096, 104, 128, 1, 2, 2),
    "128x72": (5000, 128, 72, 2, 2, 1),  # the second panel has 8 columns
    "72x256": (4500, 72, 256, 1, 2, 1),  # two tiles of columns
    "many segments": (20000, 128, 128, 1, 2, 1),
}
shapes = pytest.mark.parametrize("shape", SHAPES)


def problem_of(op, shape, **options):
    T, K, V, H, HV, B = SHAPES[shape]
    x = gpu_problem(op, T=T, K=K, V=V, H=H, HV=HV, B=B, **options)
    return x | ({"feature_map": "identity"} if op == PLAIN else {})


@shapes
@ops
def test_these_calls_are_cut(op, shape):
    assert_kernels(op, problem_of(op, shape), ["sum_part", "additive_forward"])


@shapes
@ops
def test_as_token_by_token(op, shape):
    x = problem_of(op, shape)
    got = run(op, x)
    assert_near(got, token_by_token(op, x))
    assert_same_bits(got, run(op, x))


@pytest.mark.parametrize("feature_map", ["elu+1", "relu2", "exp", "identity"])
@pytest.mark.parametrize("normalize", [False, "clamp", "add"])
@pytest.mark.parametrize("shape", ["many segments", "56x40"])
def test_maps_and_normalisers(shape, feature_map, normalize):
    op = "linear_attention"
    x = problem_of(op, shape)
    if not normalize:
        x["initial_state"] = x["initial_state"][0]
    if feature_map == "identity":  # denominators above zero
        x |= {name: x[name].abs() for name in ("q", "k")}
    x |= {"feature_map": feature_map, "normalize": normalize, "eps": 0.25}
    if (feature_map, normalize) != ("identity", False):
        assert_kernels(op, x, ["sum_part", "additive_forward"])
    assert_near(run(op, x), token_by_token(op, x))


def test_normed_rows_are_mapped_before():
    x = problem_of("linear_attention", "128x72") | {"qk_l2norm": True}
    assert_kernels("linear_attention", x, ["map_rows", "sum_part", "additive_forward"])
    assert_near(run("linear_attention", x), token_by_token("linear_attention", x))


def test_a_map_of_q_alone():
    x = problem_of(PLAIN, "many segments") | {"feature_map": ("elu+1", "identity")}
    assert_kernels(PLAIN, x, ["sum_part", "additive_forward"])
    assert_near(run(PLAIN, x), token_by_token(PLAIN, x))


@pytest.mark.parametrize("log_decay", [-torch.inf, -3.0, -0.01, 0.0, 0.001])
@gated
def test_decays(op, log_decay):
    x = problem_of(op, "many segments")
    x["g"] = torch.full_like(x["g"], log_decay)
    assert_near(run(op, x), token_by_token(op, x))


@gated
def test_a_decay_of_zero_lets_a_nan_stay(op):
    x = problem_of(op, "104x128")
    x["g"] = torch.full_like(x["g"], -torch.inf)
    x["initial_state"][1, 1, 5, 7] = torch.nan
    x["v"][0, 517, 1, 3] = torch.nan
    assert_near(run(op, x), token_by_token(op, x))


@ops
def test_packed_sequences(op):
    """An empty one, one of one token, lengths on both sides of a chunk, and short and long ones."""
    edges = [0, 0, 1, 3000, 3064, 3129, 9500]
    x = gpu_problem(
        op, B=1, T=edges[-1], K=128, V=128, H=1, HV=1, cu_seqlens=np.array(edges, np.int32)
    )
    assert_packed_alone(op, x | ({"feature_map": "identity"} if op == PLAIN else {}), edges, 3064)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "initial_state"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e30])
@ops
def test_numbers_that_are_not_finite_or_nearly_so(op, name, number):
    assert_number_stays_behind(op, problem_of(op, "104x128"), name, number)


@ops
def test_a_graph_again_and_again(op):
    assert_graph_repeats(op, problem_of(op, "104x128"))


def test_weights_of_writes():
    """ssd's steps are weights of what is written, and D passes values by."""
    of = np.random.default_rng(0).standard_normal
    T, H, P, N = 4500, 2, 64, 128
    arrays = {
        "x": of((1, T, H, P)),
        "dt": 0.1 * np.abs(of((1, T, H))),
        "A": -np.exp(of(H)),
        "B": of((1, T, 1, N)),
        "C": of((1, T, 1, N)),
        "D": of(H),
    }
    x = over_arrays(to_gpu, {name: array.astype("float32") for name, array in arrays.items()})
    x |= {name: x[name].bfloat16() for name in ("x", "B", "C")}
    got = linattn.ssd(**x, return_final_states=True)
    assert_near(got, linattn.ssd(**x, return_final_states=True, mode="recurrent"))


# ---- gradients ----


@shapes
@recorded
def test_these_gradients_are_cut(op, shape):
    x = problem_of(op, shape, pass_="backward")
    assert_kernels(op, x, ["sum_part", "chunks_both_ways"], "backward")


@shapes
@recorded
def test_gradients_as_token_by_token(op, shape):
    assert_gradients(op, problem_of(op, shape, pass_="backward"))


@pytest.mark.parametrize(("HV", "V"), [(1, 128), (2, 72)])
@recorded
def test_gradients_of_packed_sequences(op, HV, V):
    assert_packed_gradients(op, HV, V)


@pytest.mark.parametrize("K", [60, 100])
@pytest.mark.parametrize("op", ["simple_gla", "gla"])
def test_rows_without_boxes_go_in_chunks(op, K):
    """They are not cut: the copy engine takes no rows of so many keys."""
    x = gpu_problem(op, pass_="backward", B=1, T=9000, K=K, V=64, H=1, HV=2)
    told = linattn.explain_kernel(getattr(linattn, f"{op}_backward"), **x)
    assert told.kernel == "chunks"
    assert_gradients(op, x)


@pytest.mark.parametrize("name", ["k", "v", "do"])
@pytest.mark.parametrize("op", [op for op in unmapped if op not in ops_with(decay="head")])
def test_a_nan_reaches_no_gradient_that_it_has_no_part_in(op, name):
    assert_nan_stays_with_its_token(op, problem_of(op, "104x128", pass_="backward"), name)
