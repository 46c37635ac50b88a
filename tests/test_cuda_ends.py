"""Very long sequences of few heads with the delta rule. On Hopper they are walked in segments, and
the ends of these come first (csrc/cuda/delta_ends.cuh). Elsewhere these calls are like others."""

import numpy as np
import pytest
from support.compare import assert_same_bits
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
from support.gpu import distance, gpu_problem, needs_gpu, run
from support.tensors import torch
from support.variants import ops_with

import linattn

pytestmark = needs_gpu

OPS = [op for op in ops_with(rule="delta") if linattn.VARIANTS[op].decay in ("none", "token")]
ops = pytest.mark.parametrize("op", OPS)
GATED = [op for op in OPS if linattn.VARIANTS[op].decay == "token"]
gated = pytest.mark.parametrize("op", GATED)

# T, K, V, H, HV, B
SHAPES = {
    "64x64": (4500, 64, 64, 1, 2, 1),
    "56x40": (4111, 56, 40, 1, 1, 2),  # 40 of 64 columns, and a last chunk of 15 tokens
    "104x128": (4096, 104, 128, 1, 2, 2),
    "128x72": (5000, 128, 72, 2, 2, 1),  # the second panel has 8 columns
    "72x256": (4500, 72, 256, 1, 2, 1),  # two tiles of columns, and an odd number of key slices
    "many segments": (20000, 128, 128, 1, 2, 1),
}
shapes = pytest.mark.parametrize("shape", SHAPES)


def problem_of(op, shape, **options):
    T, K, V, H, HV, B = SHAPES[shape]
    return gpu_problem(op, T=T, K=K, V=V, H=H, HV=HV, B=B, **options)


def with_decay(x, log_decay):
    return x | {"g": torch.full_like(x["g"], log_decay)}


@shapes
@ops
def test_these_calls_go_by_ends(op, shape):
    assert_kernels(op, problem_of(op, shape), ["delta_ends"])


@pytest.mark.parametrize("l2norm", [False, True], ids=["as given", "l2norm"])
@shapes
@ops
def test_as_token_by_token(op, shape, l2norm):
    x = problem_of(op, shape) | {"qk_l2norm": l2norm}
    got = run(op, x)
    assert_near(got, token_by_token(op, x))
    assert_same_bits(got, run(op, x))


# The map of a segment of 512 tokens is zero where the decay is less than exp(-87).
@pytest.mark.parametrize("log_decay", [-3.0, -0.2, -0.1, -1e-3, 0.0])
@gated
def test_decays_with_and_without_a_map(op, log_decay):
    x = with_decay(problem_of(op, "many segments"), log_decay)
    assert_near(run(op, x), token_by_token(op, x))


@gated
def test_a_decay_of_zero_lets_a_nan_stay(op):
    x = with_decay(problem_of(op, "104x128"), -torch.inf)
    assert_near(run(op, x), token_by_token(op, x))
    x["initial_state"][1, 1, 5, 7] = torch.nan
    x["v"][0, 517, 1, 3] = torch.nan
    assert_near(run(op, x), token_by_token(op, x))


@gated
def test_strong_writes_outlast_the_decay(op):
    """All keys are one key. A token with beta |k|^2 = 3.85 multiplies what lies along it by -2.85,
    so with a decay of 0.35 the state shrinks by 0.0025 a token. The decay alone would be zero. The
    inverse of a chunk has numbers of 1.35 with signs that alternate. Rounded to bfloat16 they make
    2^-9 sqrt(64) 1.35 = 0.021 of an error a chunk, and 0.067 in the ten chunks that are looked at.
    Without a map all would be lost, which is an error of 1."""
    x = problem_of(op, "104x128", seed=3)
    key = torch.nn.functional.normalize(torch.ones_like(x["k"], dtype=torch.float32), dim=-1)
    x["k"] = (2 * key).to(x["k"].dtype)
    square = x["k"].float().square().sum(-1)
    x["beta"] = (3.85 / square).repeat_interleave(2, -1).to(x["beta"].dtype)
    x = with_decay(x, float(np.log(0.35)))
    x["v"][:, 600:] = 0
    got, want = run(op, x), token_by_token(op, x)
    later = slice(600, 1200)
    assert want[0][:, later].abs().max() > 1e-3
    assert distance(got[0][:, later], want[0][:, later]) < 0.1


@gated
def test_a_product_that_is_too_large(op):
    """The product of the state and a key is 1e40 before a decay of exp(-20), and is finite then."""
    x = with_decay(problem_of(op, "104x128"), -1e-3) | {"qk_l2norm": False}
    x["v"][1, 3500, 1, 3] = 3e32
    x["beta"][1, 3520:3584] = 0  # its chunk has no other write: float16 does not hold both
    x["k"][1, 3530] = 0
    x["k"][1, 3530, :, 2] = 1e9
    x["beta"][1, 3530] = 1e-18
    x["g"][1, 3530] = -20
    got, want = run(op, x), token_by_token(op, x)
    assert want[0].isfinite().all()
    assert_near(got, want)


@ops
def test_packed_sequences(op):
    """An empty one, one of one token, lengths on both sides of a chunk, and short and long ones."""
    edges = [0, 0, 1, 3000, 3064, 3129, 9500]
    x = gpu_problem(
        op, B=1, T=edges[-1], K=128, V=128, H=1, HV=1, cu_seqlens=np.array(edges, np.int32)
    )
    assert_packed_alone(op, x, edges, 3064)


@ops
def test_an_infinity_stays_alone_where_there_is_no_token(op):
    """Segments without a token, of an empty sequence and of one with one token."""
    edges = [0, 0, 1, 9500]
    x = gpu_problem(
        op, B=1, T=edges[-1], K=128, V=128, H=1, HV=1, cu_seqlens=np.array(edges, np.int32)
    )
    x["initial_state"][:2, 0, 5, 7] = torch.inf
    got, want = run(op, x), token_by_token(op, x)
    assert_near(got, want)
    assert_same_bits(got[1][0], x["initial_state"][0])


@pytest.mark.parametrize("name", ["q", "k", "v", "beta", "g", "initial_state"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e30])
@ops
def test_numbers_that_are_not_finite_or_nearly_so(op, name, number):
    assert_number_stays_behind(op, problem_of(op, "104x128"), name, number)


@ops
def test_a_graph_again_and_again(op):
    assert_graph_repeats(op, problem_of(op, "104x128"))


# ---- gradients: both walks in segments ----


@shapes
@ops
def test_these_gradients_go_in_segments(op, shape):
    x = problem_of(op, shape, pass_="backward")
    assert_kernels(op, x, ["delta_ends", "delta_starts", "join_starts"], "backward")


@pytest.mark.parametrize("l2norm", [False, True], ids=["as given", "l2norm"])
@shapes
@ops
def test_gradients_as_token_by_token(op, shape, l2norm):
    assert_gradients(op, problem_of(op, shape, pass_="backward") | {"qk_l2norm": l2norm})


@pytest.mark.parametrize("log_decay", [-3.0, -0.2, -1e-3, 0.0])
@gated
def test_gradients_with_and_without_a_map(op, log_decay):
    assert_gradients(op, with_decay(problem_of(op, "many segments", pass_="backward"), log_decay))


@ops
def test_the_gradient_of_the_final_state_goes_all_the_way(op):
    """Keys that hardly change the state, and no decay: dS_0 is nearly the gradient of the final
    state, which passes all segments."""
    x = problem_of(op, "104x128", pass_="backward")
    x["beta"] = torch.full_like(x["beta"], 1e-3)
    if "g" in x:
        x = with_decay(x, 0.0)
    x["do"] = torch.zeros_like(x["do"])
    got = run(op, x, "backward")
    want = run(op, x, "backward", mode="recurrent")
    there = [j for j, b in enumerate(want) if b.any()]
    assert_near([got[j] for j in there], [want[j] for j in there])
    d_initial = [b for b in got if b.shape == x["d_final_state"].shape]
    assert distance(d_initial[-1], x["d_final_state"]) < 0.9


@pytest.mark.parametrize(("HV", "V"), [(1, 128), (2, 72)])
@ops
def test_gradients_of_packed_sequences(op, HV, V):
    assert_packed_gradients(op, HV, V)


@pytest.mark.parametrize("name", ["k", "v", "do", "beta", "g"])
@ops
def test_a_nan_reaches_no_gradient_of_tokens_apart_from_it(op, name):
    assert_nan_stays_with_its_token(op, problem_of(op, "104x128", pass_="backward"), name)
