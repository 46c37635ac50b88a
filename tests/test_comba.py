"""comba at the sizes of tensor cores, by the acceptance rule.

It has no reference of its own: it is the reference's dplr_delta_rule with beta k in the places of k
and y, for every value head by itself.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
from support import device
from support.device import ops as linattn
from support.grid import (
    Case,
    Pool,
    gradients_on_tensor_cores,
    inputs_of,
    rounds_products,
    wider,
)
from support.variants import PREDICTS

import linattn as library
from linattn import reference, testing
from linattn.reference.elements import l2norm_adjoint

BFLOAT16 = ml_dtypes.bfloat16
BASE = "gated_delta_rule"  # comba has its arrays, and an x
LENGTHS = (63, 64, 65, 128, 257)
HEADS = ((1, 1), (1, 2), (2, 2), (2, 4))
SIZES = list(itertools.product((64, 100, 128, 256), (64, 72, 128), (BFLOAT16, np.float16)))


def pytest_generate_tests(metafunc):
    if "size" not in metafunc.fixturenames:
        return
    sizes = SIZES[:: 5 if device.on_host() else 1]
    metafunc.parametrize("size", sizes, ids=lambda x: f"K{x[0]}-V{x[1]}-{np.dtype(x[2]).name}")


def cases(size):
    """One of each length; packed sequences and l2-normed keys take turns."""
    K, V, dtype = size
    for i, T in enumerate(LENGTHS):
        H, HV = HEADS[(i + K + V) % len(HEADS)]
        B, flags = 2 - i % 2, {"packed": i % 2 == 1, "l2norm": i % 3 == 1, "x": True}
        yield Case(BASE, "chunk", dtype, T, None, K, V, H, HV, B, **flags)


def as_dplr(x):
    """The arguments of dplr_delta_rule, a head of keys for each value head, in float64."""
    x = dict(x)
    group = x["v"].shape[2] // x["k"].shape[2]
    wide = {name: x[name].astype(np.float64) for name in ("q", "k", "v", "x", "beta", "g")}
    if x.pop("qk_l2norm", False):
        wide |= {name: reference.l2norm(wide[name]) for name in ("q", "k")}
    q, k, looks = (wide[name].repeat(group, 2) for name in ("q", "k", "x"))
    written = wide["beta"][..., None] * k
    del x["beta"]
    g = wide["g"][..., None].repeat(q.shape[-1], -1)
    return x | {"q": q, "k": written, "v": wide["v"], "x": looks, "y": written, "g": g}, k


def forward(x, **how):
    o, state = reference.dplr_delta_rule(**as_dplr(x)[0], **how)
    return {"o": o, "final_state": state}


def gradients(x, made, **how):
    """By the names of comba's arguments. Heads that share keys add theirs up."""
    given, k = as_dplr(x)
    grads = reference.backward("dplr_delta_rule", **given, **made, **how)
    wide = {
        name: np.asarray(grad, np.float64)
        for name, grad in grads._asdict().items()
        if grad is not None
    }
    d_written = wide["dk"] + wide["dy"]  # was beta k
    shared = {
        "dq": wide["dq"],
        "dk": x["beta"][..., None].astype(np.float64) * d_written,
        "dx": wide["dx"],
    }
    H = x["k"].shape[2]
    for name, grad in shared.items():
        shared[name] = grad.reshape(*grad.shape[:2], H, -1, grad.shape[-1]).sum(3)
        if x.get("qk_l2norm") and name != "dx":
            shared[name] = l2norm_adjoint(x[name[1:]].astype(np.float64), shared[name])
    return shared | {
        "dv": wide["dv"],
        "dbeta": (d_written * k).sum(-1),
        "dg": wide["dg"].sum(-1),
        "d_initial_state": wide["d_initial_state"],
    }


def test_forward(size, rng):
    pools = {}
    for case in cases(size):
        x = inputs_of(case, rng)
        o, state = linattn.comba(**x, output_final_state=True)
        rounded = rounds_products(BASE, case.dtype, case.K, "chunk", case.T)
        pool = pools.setdefault(rounded, Pool(case.dtype if rounded else None))
        pool.add(
            {"o": o, "final_state": state},
            forward(x, dtype=wider(case.dtype), form="recurrent"),
            lambda x, dtype=case.dtype: forward(x, dtype=dtype, form="chunk", chunk_size=64),
            x,
        )
    for pool in pools.values():
        pool.judge(f"comba {size}")


def test_backward(size, rng):
    pools = {}
    for case in cases(size):
        x = inputs_of(case, rng)
        made = testing.make_output_gradients(BASE, rng, x)
        found = linattn.comba_backward(made["do"], **x, d_final_state=made["d_final_state"])
        exact = gradients(x, made, dtype=wider(case.dtype), form="recurrent")
        found = {name: getattr(found, name) for name in exact}

        def naive(x, made=made, found=found, dtype=case.dtype):
            grads = gradients(x, made, dtype=dtype, form="chunk", chunk_size=64)
            return {name: grad.astype(found[name].dtype) for name, grad in grads.items()}

        rounded = not device.on_host() and gradients_on_tensor_cores(
            BASE, case.dtype, case.K, case.V, "chunk", case.T
        )
        pool = pools.setdefault(rounded, Pool(case.dtype if rounded else None))
        pool.add(found, exact, naive, x)
    for pool in pools.values():
        pool.judge(f"comba {size}", gradient=True)


@pytest.mark.parametrize("op", PREDICTS)
def test_a_gpu_has_chunks_with_x(op, rng):
    if device.on_host():
        pytest.skip("a GPU's kernels")
    case = Case(op, "chunk", BFLOAT16, 65, None, 64, 64, 2, 2, 1, x=True)
    given = inputs_of(case, rng)
    made = testing.make_output_gradients(op, rng, given)
    for name, x in ((op, given), (f"{op}_backward", given | made)):
        there = {label: device.arrays.from_numpy(y) for label, y in x.items()}
        report = library.explain_kernel(getattr(library, name), **there)
        assert (report.kernel, report.unit) == ("chunks", "tensor cores")
