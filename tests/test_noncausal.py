"""Noncausal linear attention where q has other tokens than k and v: [B,T,H,K] beside [B,L,H,K]."""

import numpy as np
import pytest
from support.compare import assert_same_bits
from support.device import ops as linattn
from support.grid import DTYPES, wider

from linattn import reference
from linattn.testing import assert_accurate

# T, L: more keys, more queries, one of either, whole tiles and parts of them, none of either
LENGTHS = [(5, 9), (70, 33), (1, 130), (130, 1), (64, 192), (9, 0), (0, 9)]


def problem(rng, T, L, dtype, *, HV=2, normalize=True, K=8, V=6):
    real = np.float64 if dtype == np.float64 else np.float32
    x = {
        "q": rng.standard_normal((2, T, 2, K)),
        "k": rng.standard_normal((2, L, 2, K)),
        "v": rng.standard_normal((2, L, HV, V)),
    }
    S, z = rng.standard_normal((2, HV, K, V)), rng.uniform(1, 2, (2, HV, K))
    state = (S.astype(real), z.astype(real)) if normalize else S.astype(real)
    x = {name: a.astype(dtype) for name, a in x.items()}
    return x | {"initial_state": state, "normalize": normalize, "causal": False}


def judge(got, ref, naive, dtype, name, gradient=False):
    for part, (x, y, z) in enumerate(zip(*map(parts, (got, ref, naive)), strict=True)):
        if x.size:
            label = f"{name}[{part}]"
            assert_accurate(x, y, z, dtype=x.dtype, gradient=gradient, name=label)
        assert x.shape == y.shape


def parts(x):
    return x if isinstance(x, tuple) else (x,)


@pytest.mark.parametrize("normalize", [True, "add", False], ids=["clamp", "add", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "L"), LENGTHS)
@pytest.mark.parametrize("HV", [2, 4])
def test_forward(T, L, HV, dtype, normalize, rng):
    x = problem(rng, T, L, dtype, HV=HV, normalize=normalize)
    got = linattn.linear_attention(**x, output_final_state=True)
    assert got[0].shape == (2, T, HV, 6)
    ref = reference.linear_attention(**x, dtype=wider(dtype))
    naive = reference.linear_attention(**x, dtype=dtype, form="parallel")
    for name, *three in zip(("o", "final_state"), got, ref, naive, strict=True):
        judge(*three, dtype, name)


@pytest.mark.parametrize("normalize", [True, False], ids=["clamp", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "L"), LENGTHS)
@pytest.mark.parametrize("HV", [2, 4])
def test_backward(T, L, HV, dtype, normalize, rng):
    x = problem(rng, T, L, dtype, HV=HV, normalize=normalize)
    state = x["initial_state"]
    d_state = tuple(rng.standard_normal(a.shape).astype(a.dtype) for a in parts(state))
    d = {
        "do": rng.standard_normal((2, T, HV, 6)).astype(dtype),
        "d_final_state": d_state if normalize else d_state[0],
    }
    got = linattn.linear_attention_backward(**d, **x)
    ref = reference.backward("linear_attention", **d, **x, dtype=wider(dtype))
    naive = reference.backward("linear_attention", **d, **x, dtype=dtype, form="parallel")
    for name in ("dq", "dk", "dv", "d_initial_state"):
        three = (getattr(g, name) for g in (got, ref, naive))
        judge(*three, dtype, name, gradient=True)


def test_wide_values(rng):
    """More value columns than a unit of the backward pass has."""
    x = problem(rng, 7, 20, np.float32, V=300, K=40)
    do = rng.standard_normal((2, 7, 2, 300)).astype(np.float32)
    got = linattn.linear_attention_backward(do, **x)
    ref = reference.backward("linear_attention", do, **x)
    naive = reference.backward("linear_attention", do, **x, dtype=np.float32)
    for name in ("dq", "dk", "dv"):
        three = (getattr(g, name) for g in (got, ref, naive))
        judge(*three, np.float32, name, gradient=True)


def test_one_head(rng):
    x = problem(rng, 5, 9, np.float32, HV=2)
    whole, _ = linattn.linear_attention(**x)
    of_head = {name: np.ascontiguousarray(x[name][1, :, 0]) for name in "qkv"}
    S, z = (a[1, 0].copy() for a in x["initial_state"])
    o, _ = linattn.linear_attention(**of_head, initial_state=(S, z), causal=False)
    assert_same_bits(o, np.ascontiguousarray(whole[1, :, 0]))


@pytest.mark.parametrize("normalize", [True, False])
def test_a_function_of_ones_own(normalize, rng):
    x = problem(rng, 5, 9, np.float64, normalize=normalize)
    own = linattn.FeatureMap(
        "own", forward=lambda x: np.abs(x) + 1, backward=lambda x, dy: dy * np.sign(x)
    )
    mapped = x | {"q": np.abs(x["q"]) + 1, "k": np.abs(x["k"]) + 1}
    plain = ("relu+eps", "relu+eps") if normalize else "identity"
    plain = linattn.FeatureMap("relu+eps", eps=0.0) if normalize else "identity"
    got, _ = linattn.linear_attention(**x, feature_map=own)
    assert_same_bits(got, linattn.linear_attention(**mapped, feature_map=plain)[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"causal": True}, "k: expected [B,T,H,K] = (2, 5, 2, 8), got (2, 9, 2, 8)"),
        ({"v": np.zeros((2, 5, 2, 6))}, "v: expected [B,L,HV,V] = (2, 9, 2, 6), got (2, 5, 2, 6)"),
        ({"out": np.zeros((2, 9, 2, 6))}, "out: expected [B,T,HV,V] = (2, 5, 2, 6), got "),
    ],
    ids=["causal", "v", "out"],
)
def test_wrong_lengths(change, text, rng):
    x = problem(rng, 5, 9, np.float64) | change
    with pytest.raises(ValueError) as caught:
        linattn.linear_attention(**x)
    assert str(caught.value).startswith(text)


def test_packed_sequences_have_one_length(rng):
    x = {name: a[:1] for name, a in problem(rng, 5, 9, np.float64).items() if name in "qkv"}
    with pytest.raises(ValueError, match=r"k: expected \[B,L,H,K\] = \(1, 5, 2, 8\), got "):
        linattn.linear_attention(**x, causal=False, cu_seqlens=np.array([0, 5]))
