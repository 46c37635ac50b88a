"""linattn.layer_step on a GPU, beside the functions that it puts together."""

import pytest
from support.compare import assert_same_bits, over_arrays
from support.gpu import distance, needs_gpu, to_gpu
from support.layers import OPS, by_functions, layer_arguments, mamba2_arguments
from support.tensors import tensors_in, torch

import linattn
from linattn.testing import RMS_BOUND

pytestmark = needs_gpu

ops = pytest.mark.parametrize("op", OPS)
DTYPES = ("float64", "float32", "float16", "bfloat16")


def arguments(op, dtype="bfloat16", **sizes):
    return over_arrays(to_gpu, layer_arguments(op, **{"dtype": dtype, "K": 64, "V": 128} | sizes))


def states_of(x):
    return [x["state"], *(x[f"{name}_conv"][2] for name in "qkv" if x.get(f"{name}_conv"))]


def assert_as_functions(op, x, dtype="bfloat16"):
    y = over_arrays(torch.clone, x)
    got, want = linattn.layer_step(op, **x), by_functions(op, y)
    assert got.dtype == x["v"].dtype
    assert distance(got, want) <= RMS_BOUND.get(dtype, 1e-14)
    assert_same_bits(states_of(x), states_of(y))


@pytest.mark.parametrize("dtype", DTYPES)
@ops
def test_all_stages(op, dtype):
    x = arguments(op, dtype)
    for _ in range(3):
        assert_as_functions(op, x, dtype)


@pytest.mark.parametrize("sizes", [{"N": 1, "H": 1, "HV": 1}, {"N": 70, "K": 24, "V": 40, "W": 2}])
@ops
def test_sizes(op, sizes):
    assert_as_functions(op, arguments(op, **sizes))


@pytest.mark.parametrize("left_out", ["q_conv", "v_conv", "norm_weight", "output_gate", "dt_bias"])
def test_without_a_stage(left_out):
    x = arguments("gated_delta_rule")
    del x[left_out]
    assert_as_functions("gated_delta_rule", x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 1, "HV": 24, "V": 64},  # a row for a block
        {"groups": 3, "HV": 24, "V": 64, "N": 70},
        {"groups": None},
    ],
    ids=str,
)
def test_the_stages_of_mamba2(options, dtype):
    x = over_arrays(to_gpu, mamba2_arguments(**{"dtype": dtype, "K": 64, "V": 128} | options))
    for _ in range(3):
        y = over_arrays(torch.clone, x)
        got, want = linattn.layer_step("simple_gla", **x), by_functions("simple_gla", y)
        assert distance(got, want) <= RMS_BOUND.get(dtype, 1e-14)
        assert distance(x["state"], y["state"]) <= (1e-14 if dtype == "float64" else 1e-6)
        assert_same_bits(states_of(x)[1:], states_of(y)[1:])


@pytest.mark.parametrize("options", [{"gate_first": False}, {"weigh": False}, {"skip": None}])
def test_some_stages_of_mamba2(options):
    x = over_arrays(to_gpu, mamba2_arguments(dtype="float32", V=200)) | options
    y = over_arrays(torch.clone, x)
    got, want = linattn.layer_step("simple_gla", **x), by_functions("simple_gla", y)
    assert distance(got, want) <= RMS_BOUND["float32"]


@pytest.mark.parametrize("N", [1, 3])
@pytest.mark.parametrize("innermost", ["inputs", "channels"])
@pytest.mark.parametrize("older", [0, 1])
def test_states_of_convolutions_in_one_array(innermost, older, N):
    """The parts of its channels lie between one another, and share no number."""
    x = arguments("gated_delta_rule", N=N)
    sizes = [x[name].shape[1] for name in "qkv"]
    shape = (N, sum(sizes), 3 + older) if innermost == "inputs" else (N, 3 + older, sum(sizes))
    whole = torch.randn(shape, device="cuda").bfloat16()
    parts = (whole if innermost == "inputs" else whole.mT).split(sizes, 1)
    for name, part in zip("qkv", parts, strict=True):
        weight, bias, _ = x[f"{name}_conv"]
        x[f"{name}_conv"] = weight, bias, part
    for _ in range(3):
        assert_as_functions("gated_delta_rule", x)


def test_wide_gates_of_narrow_arrays():
    x = arguments("kda")
    assert_as_functions("kda", x | {name: x[name].double() for name in ("g", "beta")})


def test_states_by_their_places():
    x = arguments("gated_delta_rule", N=5)
    for name in ("q", "k", "v", "g", "beta", "output_gate"):
        x[name] = x[name][:3]
    places = torch.tensor([4, -1, 0], device="cuda")
    assert_as_functions("gated_delta_rule", x | {"state_indices": places})


def test_in_a_graph():
    x = arguments("gated_delta_rule", N=8)
    y = over_arrays(torch.clone, x)
    want = [linattn.layer_step("gated_delta_rule", **y) for _ in range(4)]
    first = over_arrays(torch.clone, states_of(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = linattn.layer_step("gated_delta_rule", **x)
    for state, before in zip(states_of(x), first, strict=True):
        state.copy_(before)
    for one in want:
        graph.replay()
        assert_same_bits(got, one)
    assert_same_bits(tensors_in(x), tensors_in(y))


def test_another_stream_waits():
    x = arguments("kda")
    y = over_arrays(torch.clone, x)
    want = linattn.layer_step("kda", **y)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x["state"].mul_(1)
        got = linattn.layer_step("kda", **x)
        assert_same_bits(got, want)
