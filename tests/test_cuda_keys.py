"""Decays per key in chunks on a GPU. Their rows are made in blocks of 16 tokens, and pairs of
tokens in a block with strong decays are multiplied one by one."""

import pytest
from support.compare import assert_same_bits
from support.gpu import (
    APART,
    distance,
    gpu_problem,
    judge,
    kinds,
    needs_gpu,
    run,
    with_normed_rows,
)
from support.tensors import torch
from support.variants import KEY_DECAY

import linattn

pytestmark = needs_gpu

ops = pytest.mark.parametrize("op", KEY_DECAY)
keys = pytest.mark.parametrize("K, V", [(64, 64), (128, 128), (48, 40)])


def assert_near_recurrent(op, x, dtype):
    """o and the last state are those of the call token by token."""
    for got, want in zip(run(op, x), run(op, x, mode="recurrent"), strict=True):
        assert torch.isfinite(got).all()
        assert distance(got, want) < APART[dtype]


@keys
@kinds
@ops
@pytest.mark.parametrize("strength", [10, 100])
def test_strong_decays(op, K, V, dtype, strength):
    """Every seventh token, and all tokens of a block, leave the reach of the tiles."""
    x = gpu_problem(op, dtype=dtype, K=K, V=V)
    x["g"][:, 5::7] *= strength
    x["g"][:, 80:96, :, ::3] *= strength
    assert_near_recurrent(op, x, dtype)


def assert_gradients_near_recurrent(op, x):
    """And the gradients. Where decays are strong they are small: each is judged on its own."""
    got, want = (run(op, x, "backward", **mode) for mode in ({}, {"mode": "recurrent"}))
    for a, b in zip(got, want, strict=True):
        assert torch.isfinite(a).all()
        assert distance(a, b) < 2 * APART["bfloat16"]


@keys
@ops
@pytest.mark.parametrize("strength", [1, 10, 100])
def test_gradients_of_strong_decays(op, K, V, strength):
    x = gpu_problem(op, pass_="backward", K=K, V=V)
    x["g"][:, 5::7] *= strength
    x["g"][:, 80:96, :, ::3] *= strength
    assert_gradients_near_recurrent(op, x)
    assert_gradients_near_recurrent(op, x | {"g": x["g"] * strength})


@keys
@pytest.mark.parametrize("strength", [1, 30])
def test_gradients_with_x(K, V, strength):
    x = gpu_problem("kda", pass_="backward", K=K, V=V)
    x["x"] = x["k"] + 0.1 * torch.randn_like(x["k"])
    x["g"][:, 20:50:3] *= strength
    assert_gradients_near_recurrent("kda", x)


@keys
@pytest.mark.parametrize("op", ["gla", "rwkv6"])
def test_gradients_of_decays_above_one(op, K, V):
    x = gpu_problem(op, pass_="backward", K=K, V=V)
    x["g"] = x["g"].abs() / 100
    assert_gradients_near_recurrent(op, x)


@keys
@kinds
@pytest.mark.parametrize("op", ["gla", "rwkv6"])
def test_decays_above_one(op, K, V, dtype):
    x = gpu_problem(op, dtype=dtype, K=K, V=V)
    x["g"] = x["g"].abs() / 100
    assert_near_recurrent(op, x, dtype)


@keys
@kinds
@ops
@pytest.mark.parametrize("t", [70, 77, 128])
@pytest.mark.parametrize("strength", [1, 100])
def test_later_tokens_change_no_bit(op, K, V, dtype, t, strength):
    x = gpu_problem(op, dtype=dtype, K=K, V=V)
    other = gpu_problem(op, 1, dtype=dtype, K=K, V=V)
    x["g"][:, 5::7] *= strength
    changed = {
        name: torch.cat([a[:, :t], other[name][:, t:]], 1)
        if name in ("q", "k", "v", "g", "beta", "x", "y")
        else a
        for name, a in x.items()
    }
    assert_same_bits([run(op, changed)[0][:, :t]], [run(op, x)[0][:, :t]], "before")


@keys
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "x", "y", "beta"])
@ops
def test_a_nan_stays_behind_its_token(op, K, V, name):
    x = gpu_problem(op, K=K, V=V)
    if name not in x:
        pytest.skip(f"{op} has no {name}")
    want = run(op, x)[0]
    x[name][(1, 90, 1, 5)[: x[name].ndim]] = torch.nan
    got = run(op, x)[0]
    assert_same_bits([got[0], got[1, :90]], [want[0], want[1, :90]], "before")
    assert got[1, 90:].isnan().any()


@pytest.mark.parametrize("K, V", [(64, 64), (48, 72)])
def test_dplr_takes_norms_in_chunks(K, V):
    x = gpu_problem("dplr_delta_rule", K=K, V=V)
    x["q"] *= 3
    x |= {"k": x["k"] * 5, "qk_l2norm": True}
    assert linattn.explain_kernel("dplr_delta_rule", **x).kernel == "chunks"
    judge("dplr_delta_rule", with_normed_rows(x), run("dplr_delta_rule", x)[0], "norms")


@pytest.mark.parametrize("K, V", [(64, 64), (48, 72)])
@pytest.mark.parametrize("HV", [2, 4])
def test_gradients_of_dplr_through_norms(K, V, HV):
    x = gpu_problem("dplr_delta_rule", pass_="backward", K=K, V=V, HV=HV)
    x["q"] *= 3
    x |= {"k": x["k"] * 5, "qk_l2norm": True}
    assert linattn.explain_kernel(linattn.dplr_delta_rule_backward, **x).kernel == "chunks"
    assert_gradients_near_recurrent("dplr_delta_rule", x)


@pytest.mark.parametrize("B, T, H, HV", [(1, 2000, 1, 2), (3, 777, 2, 2), (1, 65, 1, 1)])
def test_dplr_accurate(B, T, H, HV):
    """Few heads go in segments."""
    x = gpu_problem("dplr_delta_rule", B=B, T=T, H=H, HV=HV, V=96)
    judge("dplr_delta_rule", x, run("dplr_delta_rule", x)[0], "dplr")
