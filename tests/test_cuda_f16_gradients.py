"""Gradients of float16 arrays in chunks: in the range of float16 where the numbers are not, and
token by token where one of them is too large."""

import numpy as np
import pytest
from support.compare import assert_same_bits, leaves, over_arrays
from support.gpu import APART, PLAIN, distance, gpu_problem, needs_gpu, run, with_look
from support.tensors import to_numpy, torch
from support.variants import NORMALISED, PREDICTS

import linattn
from linattn.testing import assert_accurate

pytestmark = needs_gpu

OPS = [op for op, kind in linattn.VARIANTS.items() if kind.rule != "dplr" and kind.decay != "pair"]
ops = pytest.mark.parametrize("op", [*OPS, PLAIN])


def name_of(op):
    return op.split(",")[0]


def f16_problem(op, **shape):
    return gpu_problem(op, dtype="float16", pass_="backward", **shape)


def gradients(op, x, **options):
    return run(op, x, "backward", **options)


def kernel_of(op, x):
    return linattn.explain_kernel(getattr(linattn, f"{name_of(op)}_backward"), **x).kernel


def was_in_range(got, by_token):
    """Do these gradients come from chunks? A repeated call has the bits of the other way."""
    return not all(torch.equal(a, b) for a, b in zip(got, by_token, strict=True))


def times(x, factor):
    """The incoming gradients times a number."""
    given = {name: x[name] for name in ("do", "d_final_state") if name in x}
    return x | over_arrays(lambda a: a * factor, given)


def state_times(x, name, factor):
    """A state, or both of a pair, times a number."""
    return {name: over_arrays(lambda a: a * factor, x[name])}


@pytest.mark.parametrize("K, V", [(64, 128), (128, 64), (128, 200), (40, 72), (200, 64)])
@pytest.mark.parametrize("H, HV", [(2, 2), (2, 4)])
@ops
def test_as_token_by_token(op, H, HV, K, V):
    x = f16_problem(op, H=H, HV=HV, K=K, V=V)
    assert kernel_of(op, x) == "chunks"
    got, want = gradients(op, x), gradients(op, x, mode="recurrent")
    for a, b in zip(got, want, strict=True):
        assert torch.equal(torch.isfinite(a), torch.isfinite(b))  # some sums are above 65504
        assert distance(a, b) < APART["float16"]
    assert was_in_range(got, want)
    assert_same_bits(gradients(op, x), got)


@pytest.mark.parametrize("K", [128, 256])
@ops
def test_norms_and_maps(op, K):
    x = f16_problem(op, K=K)
    x |= {"qk_l2norm": True} if op != PLAIN else {"feature_map": "elu+1"}
    for a, b in zip(gradients(op, x), gradients(op, x, mode="recurrent"), strict=True):
        assert distance(a, b) < APART["float16"]


@pytest.mark.parametrize("K", [128, 200])
@pytest.mark.parametrize("op", [op for op in OPS if op in PREDICTS])
def test_a_look_of_its_own(op, K):
    x = with_look(f16_problem(op, K=K))
    for a, b in zip(gradients(op, x), gradients(op, x, mode="recurrent"), strict=True):
        assert distance(a, b) < APART["float16"]


@pytest.mark.parametrize("power", [-18, -10, 6])
@ops
def test_gradients_of_any_size_have_the_same_digits(op, power):
    """A loss may be scaled by a power of two. The gradients of float32 gates lose nothing by it."""
    x = f16_problem(op)
    x |= {name: x[name].float() for name in ("g", "beta", "gamma", "slopes") if name in x}
    x["do"] = x["do"].clamp(-2, 2)
    x["do"][x["do"].abs() < 2**-4] = 0  # so that each is a float16 number after all factors
    x["do"] = (x["do"] * 64).round() / 64
    once, scaled = (gradients(op, times(x, factor)) for factor in (1, 2.0**power))
    for a, b in zip(once, scaled, strict=True):
        if a.dtype == torch.float32:
            assert_same_bits(a * 2.0**power, b)
        else:  # each is rounded once, and numbers below 2^-14 have fewer digits
            least = 2.0**-24 * max(1, 2.0**power)
            torch.testing.assert_close(b.double(), a.double() * 2.0**power, rtol=2**-10, atol=least)


TOO_LARGE = {
    "scores": lambda x: {"scale": 1e5},
    "a state": lambda x: state_times(x, "initial_state", 1e6),
    "a gradient of a state": lambda x: state_times(x, "d_final_state", float("inf")),
    "gradients of states beside do": lambda x: state_times(x, "d_final_state", 2.0**17),
}


@pytest.mark.parametrize("which", TOO_LARGE)
@ops
def test_too_large_for_float16(op, which):
    """The call is repeated token by token, in float32."""
    x = f16_problem(op)
    x |= TOO_LARGE[which](x)
    assert_same_bits(gradients(op, x), gradients(op, x, mode="recurrent"))


@pytest.mark.parametrize("name", ["do", "q", "k", "v"])
@ops
def test_a_nan_goes_where_it_goes_token_by_token(op, name):
    x = f16_problem(op)
    x[name][1, 77, 0, 3] = float("nan")
    assert_same_bits(gradients(op, x), gradients(op, x, mode="recurrent"))


@ops
def test_in_a_graph(op):
    """Each replay finds its own range, and whether to repeat."""
    x = f16_problem(op)
    gradients(op, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients(op, x)
    plain = x["do"].clone()
    for factor in (1.0, 2.0**-12, float("nan"), 1.0):
        x["do"].copy_(plain)
        x["do"][0, 5] *= factor
        graph.replay()
        assert_same_bits(got, gradients(op, x))


@pytest.mark.parametrize("op", OPS)
def test_by_the_rule(op):
    x = f16_problem(op, B=1, T=500, K=128, V=128)
    exact = over_arrays(lambda a: a.double() if a.is_floating_point() else a, x)
    three = (gradients(op, x), gradients(op, exact), gradients(op, x, mode="recurrent"))
    for arrays in zip(*three, strict=True):
        dtype = to_numpy(arrays[0]).dtype
        got, want, by_token = (to_numpy(a.double()) for a in arrays)
        assert_accurate(got, want, by_token, dtype=np.float16, gradient=True, name=f"{op} {dtype}")


normalised = pytest.mark.parametrize("op", NORMALISED)


@normalised
def test_long_rows_of_normalised_ops(op):
    """The divisors of the last tokens are 10^4 times those of the first, and their gradients are as
    much smaller. They keep their digits."""
    T = 20000
    x = f16_problem(op, B=1, T=T, H=1, K=64, V=64)
    del x["d_final_state"]  # its gradients may be so large that the call is repeated
    got, want = gradients(op, x), gradients(op, x, mode="recurrent")
    assert was_in_range(got, want)
    of_tokens = [(a, b) for a, b in zip(got, want, strict=True) if a.shape[1] == T]
    assert len(of_tokens) >= 3
    for a, b in of_tokens:
        assert distance(a[:, -200:], b[:, -200:]) < APART["float16"]


@normalised
def test_divisors_that_are_too_far_apart(op):
    """One token has a divisor of about 10^-5 of the others: the call is repeated."""
    x = f16_problem(op)
    x["q"][:, 7] = -12  # elu(q) + 1 = 6e-6
    got, want = gradients(op, x), gradients(op, x, mode="recurrent")
    assert not was_in_range(got, want)


@ops
def test_no_tokens(op):
    """The gradients of the initial states are those of the final ones."""
    x = f16_problem(op, T=0)
    got = getattr(linattn, f"{name_of(op)}_backward")(**x).d_initial_state
    assert_same_bits(leaves(got), leaves(x["d_final_state"]))


def test_others_say_why():
    """Why float16 gradients of noncausal calls and of DPLR go token by token."""
    dplr = next(op for op, kind in linattn.VARIANTS.items() if kind.rule == "dplr")
    for op, options in ((NORMALISED[0], {"causal": False}), (dplr, {})):
        told = linattn.explain_kernel(
            getattr(linattn, f"{op}_backward"), **f16_problem(op), **options
        )
        assert told.kernel == "token by token" and "float16 gradients in chunks" in told.why
