"""The forward pass of every op, mode and dtype over the grid, by the acceptance rule."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from support import device
from support.device import ops as linattn
from support.grid import (
    Case,
    bits_multiplied,
    cases,
    for_op,
    form_of,
    inputs_of,
    on_tensor_cores,
    reference_op,
    repeated,
    rounds_products,
    sampled,
    tensor_core_cases,
    v_first,
    wider,
)
from support.problems import poisoned

GRID = list(cases(seed=1, limit=6_000))
TENSOR_CORES = list(tensor_core_cases(seed=3))
# float32 at the same sizes, as far as it goes there, and at those of the grid
TF32 = [
    dataclasses.replace(case, dtype=np.float32)
    for case in TENSOR_CORES
    if case.dtype == ml_dtypes.bfloat16 and case.K <= 128
]
TF32_GRID = [case for case in GRID if case.dtype == np.float32 and case.K <= 128]


def pytest_generate_tests(metafunc):
    how = metafunc.config.getoption("grid")
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", sampled(GRID, 7, how), ids=str)
    if "tensor_case" in metafunc.fixturenames:
        how = how if device.on_host() else "all"
        metafunc.parametrize("tensor_case", sampled(TENSOR_CORES, 17, how), ids=str)
    if "tf32_case" in metafunc.fixturenames:
        # on the host test_forward has them, at other sizes
        every, every_of_grid = (68, 68) if device.on_host() else (1, 17)
        cases = [*sampled(TF32, every, how), *sampled(TF32_GRID, every_of_grid, how)]
        metafunc.parametrize("tf32_case", cases, ids=str)


def check(case, rng, tf32=False, options=None, **how):
    """The op against its reference, computed as `how` says; both are given the options."""

    def once(pool):
        x = inputs_of(case, rng) | (options or {})
        given = for_op(case, x) | ({"allow_tf32": True} if tf32 else {})
        out = poisoned(x["v"].shape, case.dtype)
        o, state = getattr(linattn, case.op)(**given, output_final_state=True, out=out)
        assert o is out
        if case.v_first:
            state = v_first(state)

        def reference(x, **how):
            return dict(zip(("o", "final_state"), reference_op(case)(**x, **how), strict=True))

        pool.add(
            {"o": o, "final_state": state},
            reference(x, dtype=wider(case.dtype), **how),
            lambda x: reference(x, dtype=case.dtype, **form_of(case, gpu)),
            x,
        )

    gpu = not device.on_host()
    rounded = rounds_products(case.op, case.dtype, case.K, case.mode, case.T, case.chunk)
    if gpu:
        tf32 = tf32 and on_tensor_cores(case.dtype, case.K, case.mode, case.T, tf32=True)
    else:
        tf32 = bits_multiplied(case.op, case.dtype, case.mode, case.T, case.chunk) == 16
    repeated(case, rng, once, case.dtype if rounded else None).judge(str(case), tf32=tf32)


def test_forward(case, rng):
    check(case, rng)


def test_forward_at_the_sizes_of_tensor_cores(tensor_case, rng):
    check(tensor_case, rng, form="chunk")


def test_forward_where_tf32_is_allowed(tf32_case, rng):
    """On the host this is float32 as ever."""
    check(tf32_case, rng, tf32=True, form="chunk")


@pytest.mark.parametrize("op", ["delta_rule", "gated_delta_rule"])
def test_long_chunks_of_few_keys(op, rng):
    """The solve of a long chunk feeds each rounding to all tokens after it."""
    check(Case(op, "chunk", ml_dtypes.bfloat16, T=257, chunk=128, K=3, V=16, H=1, HV=1, B=3), rng)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("normalize", [True, "add"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_whole_sequence_leaves_its_sums(dtype, normalize, packed, rng):
    """Not causal: every token reads all of them, and S and z are the sums over all."""
    case = Case(
        "linear_attention",
        "chunk",
        dtype,
        T=37,
        chunk=None,
        K=24,
        V=130,
        H=2,
        HV=4,
        B=1 if packed else 3,
        packed=packed,
    )
    check(case, rng, options={"causal": False, "normalize": normalize})
