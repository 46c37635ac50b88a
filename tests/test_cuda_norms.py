"""The delta rules with an l2 norm of q and k, on a GPU, where one kernel takes the call.

The norm is a factor of each row there, and no normalised row is rounded."""

import pytest
from support.compare import assert_same_bits
from support.gpu import gpu_problem, judge, needs_gpu, run, with_normed_rows
from support.tensors import torch

pytestmark = needs_gpu

OPS = pytest.mark.parametrize("op", ["delta_rule", "gated_delta_rule"])
# 80 heads: one kernel is faster than two
MANY = {"B": 2, "T": 333, "H": 20, "HV": 40}


def normed_problem(op, dtype="bfloat16", **shape):
    x = gpu_problem(op, dtype=dtype, **MANY | shape)
    x["q"] *= 3
    x["k"] *= 5
    return x | {"qk_l2norm": True}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("K, V", [(64, 64), (128, 128), (128, 64), (100, 72), (68, 60)])
@OPS
def test_accurate(op, K, V, dtype):
    x = normed_problem(op, dtype, K=K, V=V)
    judge(op, with_normed_rows(x), run(op, x)[0], f"{K} {V} {dtype}")


@OPS
def test_rows_of_zeros(op):
    """The norm of a row of zeros is that of 1e-6: the row stays zeros."""
    x = normed_problem(op, K=128, V=128)
    x["q"][0, 100:120] = 0
    x["k"][1, 60:70] = 0
    o = run(op, x)[0]
    assert not o[0, 100:120].any()
    judge(op, with_normed_rows(x), o, "zeros")


@OPS
def test_strides_change_no_bit(op):
    """Rows of tokens may lie apart, or begin anywhere."""
    x = normed_problem(op, K=128, V=128)
    want = run(op, x)
    for apart in (
        lambda a: torch.stack([a, a], 2)[:, :, 1],
        lambda a: a.transpose(1, 2).contiguous().transpose(1, 2),
        lambda a: torch.nn.functional.pad(a, (1, 0))[..., 1:],
    ):
        assert_same_bits(run(op, x | {"q": apart(x["q"]), "k": apart(x["k"])}), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@OPS
def test_a_nan_stays_behind_its_token(op, name, norm, dtype):
    x = normed_problem(op, dtype, K=128, V=128)
    if name not in x:
        pytest.skip(f"{op} has no {name}")
    x |= {"qk_l2norm": norm, "k": x["k"] / 5}  # no longer than 1 without a norm
    want = run(op, x)[0]
    per_head = name not in ("q", "k")
    x[name][(1, 220, 3, 5)[: x[name].ndim]] = torch.nan
    got = run(op, x)[0]
    assert_same_bits([got[0], got[1, :220]], [want[0], want[1, :220]], "before")
    hv = 3 if per_head else 3 * 2
    assert got[1, 220, hv].isnan().any()
    others = [h for h in range(40) if h not in (hv, hv + (not per_head))]
    assert_same_bits([got[1, :, others]], [want[1, :, others]], "other heads")
