"""comba at the sizes of tensor cores, by the acceptance rule.

It has no reference of its own: it is the reference's dplr_delta_rule with y = beta k and the values
beta v, for every value head by itself.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
from support import device
from support.device import ops as linattn
from support.grid import Case, Pool, gradients_on_tensor_cores, rounds_products, wider
from support.variants import PREDICTS

from linattn import reference, testing

BFLOAT16 = ml_dtypes.bfloat16
LENGTHS = (63, 64, 65, 128, 257)
HEADS = ((1, 1), (1, 2), (2, 2), (2, 4))
SIZES = list(itertools.product((64, 100, 128, 256), (64, 72, 128), (BFLOAT16, np.float16)))


def pytest_generate_tests(metafunc):
    if "size" not in metafunc.fixturenames:
        return
    sizes = SIZES[:: 5 if device.on_host() else 1]
    metafunc.parametrize("size", sizes, ids=lambda x: f"K{x[0]}-V{x[1]}-{np.dtype(x[2]).name}")


def problems(size, rng):
    """The case of each length, its inputs, and those of a backward pass."""
    K, V, dtype = size
    for i, T in enumerate(LENGTHS):
        H, HV = HEADS[(i + K + V) % len(HEADS)]
        packed, l2norm = i % 2 == 1, i % 3 == 1
        cu = np.array([0, T // 3, T // 3, T]) if packed else None
        case = Case(
            "comba", "chunk", dtype, T, None, K, V, H, HV, 1 if packed else 2, l2norm=l2norm
        )
        x = testing.make_inputs(
            "gated_delta_rule",
            rng,
            B=case.B,
            T=T,
            H=H,
            HV=HV,
            K=K,
            V=V,
            dtype=dtype,
            initial_state=True,
            cu_seqlens=cu,
            x=True,
        )
        made = testing.make_output_gradients("gated_delta_rule", rng, x)
        yield case, x | ({"qk_l2norm": True} if l2norm else {}), made


def as_dplr(x, dtype):
    """The arguments of dplr_delta_rule, a head of keys for each value head."""
    x = dict(x)
    group = x["v"].shape[2] // x["k"].shape[2]
    wide = {n: x[n].astype(np.result_type(x[n].dtype, np.float64)) for n in ("q", "k", "x", "v")}
    if x.pop("qk_l2norm", False):
        wide |= {n: reference.l2norm(wide[n]) for n in ("q", "k")}
    q, k, look = (wide[n].repeat(group, 2) for n in ("q", "k", "x"))
    beta = x.pop("beta")[..., None].astype(np.float64)
    g = x.pop("g")[..., None].repeat(q.shape[-1], -1)
    x |= {"q": q, "k": k, "x": look, "v": beta * wide["v"], "y": beta * k, "g": g}
    return x | {"dtype": dtype}


def forward(x, dtype, **how):
    return dict(
        zip(
            ("o", "final_state"), reference.dplr_delta_rule(**as_dplr(x, dtype), **how), strict=True
        )
    )


def test_forward(size, rng):
    pools = {}
    for case, x, _ in problems(size, rng):
        o, state = linattn.comba(**x, output_final_state=True)
        rounded = rounds_products("gated_delta_rule", case.dtype, case.K, "chunk", case.T)
        pool = pools.setdefault(rounded, Pool(case.dtype if rounded else None))
        pool.add(
            {"o": o, "final_state": state},
            forward(x, wider(case.dtype), form="recurrent"),
            lambda x, dtype=case.dtype: forward(x, dtype, form="chunk", chunk_size=64),
            x,
        )
    for pool in pools.values():
        pool.judge(f"comba {size}")


def gradients(x, made, dtype, **how):
    """By the names of comba's arguments. Heads that share keys add theirs up."""
    given = as_dplr(x, dtype)
    found = reference.backward("dplr_delta_rule", **given, **made, **how)._asdict()
    H, group = x["k"].shape[2], x["v"].shape[2] // x["k"].shape[2]
    beta, v = (x[n].astype(np.float64) for n in ("beta", "v"))
    wide = {n: np.asarray(y, np.float64) for n, y in found.items() if y is not None}
    dy, dv = wide["dy"], wide["dv"]
    dk = wide["dk"] + beta[..., None] * dy
    shared = {"dq": wide["dq"], "dk": dk, "dx": wide["dx"]}
    for name, y in shared.items():
        shared[name] = y.reshape(*y.shape[:2], H, group, -1).sum(3)
    if x.get("qk_l2norm"):
        for name in ("dq", "dk"):
            row, d = x[name[1:]].astype(np.float64), shared[name]
            by = 1 / np.sqrt((row * row).sum(-1, keepdims=True) + 1e-6)
            unit = row * by
            shared[name] = by * (d - unit * (unit * d).sum(-1, keepdims=True))
    return shared | {
        "dv": beta[..., None] * dv,
        "dbeta": (dy * given["k"]).sum(-1) + (dv * v).sum(-1),
        "dg": wide["dg"].sum(-1),
        "d_initial_state": wide["d_initial_state"],
    }


def test_backward(size, rng):
    pools = {}
    for case, x, made in problems(size, rng):
        found = linattn.comba_backward(made["do"], **x, d_final_state=made["d_final_state"])
        rounded = not device.on_host() and gradients_on_tensor_cores(
            case.dtype, case.K, case.V, "chunk", case.T
        )
        exact = gradients(x, made, wider(case.dtype), form="recurrent")
        pool = pools.setdefault(rounded, Pool(case.dtype if rounded else None))
        pool.add(
            {name: getattr(found, name) for name in exact},
            exact,
            lambda x, made=made, dtype=case.dtype, found=found: {
                name: y.astype(getattr(found, name).dtype)
                for name, y in gradients(x, made, dtype, form="chunk", chunk_size=64).items()
            },
            x,
        )
    for pool in pools.values():
        pool.judge(f"comba {size}", gradient=True)


@pytest.mark.parametrize("op", PREDICTS)
def test_a_gpu_has_chunks_with_x(op, rng):
    if device.on_host():
        pytest.skip("a GPU's kernels")
    x = testing.make_inputs(op, rng, B=1, T=65, H=2, K=64, V=64, dtype=BFLOAT16, x=True)
    x = {name: device.arrays.from_numpy(y) for name, y in x.items()}
    report = linattn.explain_kernel(op, **x)
    assert (report.kernel, report.unit) == ("chunks", "tensor cores")
