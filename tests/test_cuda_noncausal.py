"""Noncausal gradients in chunks on a GPU, beside the same call token by token."""

import pytest
from support.compare import assert_same_bits
from support.gpu import APART, distance, gpu_problem, needs_gpu, run
from support.tensors import torch

import linattn

pytestmark = needs_gpu

OP = "linear_attention"
shapes = pytest.mark.parametrize(
    ("T", "K", "V"), [(200, 64, 64), (64, 128, 128), (1000, 128, 64), (77, 48, 40), (200, 100, 136)]
)
normalizes = pytest.mark.parametrize("normalize", ["clamp", "add", False], ids=str)
maps = pytest.mark.parametrize("feature_map", ["identity", "elu+1", "relu+eps"])


def noncausal(feature_map="elu+1", normalize=True, **shape):
    x = gpu_problem(OP, pass_="backward", normalize=normalize, **shape)
    if feature_map == "identity":  # a sum of weights of both signs may be near zero
        x |= {name: x[name].abs() for name in "qk"}
    return x | {"feature_map": feature_map, "causal": False}


def gradients(x, **options):
    return run(OP, x, "backward", **options)


def explained(x):
    return linattn.explain_kernel(linattn.linear_attention_backward, **x)


def assert_near_recurrent(x):
    got, want = gradients(x), gradients(x, mode="recurrent")
    assert explained(x).kernel == "chunks"
    for a, b in zip(got, want, strict=True):
        assert torch.isfinite(a).all()
        assert distance(a, b) < 2 * APART["bfloat16"]


@shapes
@maps
@normalizes
def test_token_by_token(T, K, V, feature_map, normalize):
    assert_near_recurrent(noncausal(feature_map, normalize, T=T, K=K, V=V))


@normalizes
@pytest.mark.parametrize("HV", [2, 6])
def test_heads(HV, normalize):
    assert_near_recurrent(noncausal(normalize=normalize, T=3000, H=2, HV=HV, B=1))


def test_norm():
    assert_near_recurrent(noncausal("identity", False, K=128) | {"qk_l2norm": True})


@normalizes
@pytest.mark.parametrize("edges", [(0, 70, 70, 1000), (0, 64, 65, 128)])
def test_packed(edges, normalize):
    """Each sequence has the gradients that it has alone."""
    x = noncausal(normalize=normalize, B=1, T=edges[-1])
    shared = ("initial_state", "d_final_state")
    several = x | {
        name: tuple(s.repeat_interleave(3, 0) for s in x[name])
        if isinstance(x[name], tuple)
        else x[name].repeat_interleave(3, 0)
        for name in shared
    }
    cu = torch.tensor(edges, device="cuda")
    packed = gradients(several | {"cu_seqlens": cu})
    assert_near_recurrent(several | {"cu_seqlens": cu})
    for i in range(3):
        one = {
            name: a[:, edges[i] : edges[i + 1]] if name in ("q", "k", "v", "do") else a
            for name, a in x.items()
        }
        alone = gradients(one)
        for a, b in zip(packed[:3], alone[:3], strict=True):
            assert distance(a[:, edges[i] : edges[i + 1]], b) < APART["bfloat16"] or not b.numel()


@pytest.mark.parametrize("normalize", [True, False])
def test_the_same_bits_twice(normalize):
    x = noncausal(normalize=normalize, T=5000, B=1)
    assert_same_bits(gradients(x), gradients(x))


def test_strides_that_no_copy_takes():
    x = noncausal(normalize=False)
    x["v"] = x["v"].transpose(1, 2).contiguous().transpose(1, 2)  # these can be copied
    assert_near_recurrent(x)
    x["do"] = x["do"][:, :, :1].expand(x["do"].shape)
    told = explained(x)
    assert told.kernel == "token by token" and "strides" in told.why


def test_other_tokens_of_queries():
    x = noncausal(normalize=False)
    x |= {name: x[name][:, :150] for name in ("q", "do")}
    assert explained(x).why == "q has other tokens than k and v"
