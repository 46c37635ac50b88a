"""Weights of writes, and reads with a part of v: the core's simple_gla as ssd calls it.

The sizes are those of tensor cores. The acceptance rule judges.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
from support import device
from support.grid import Case, Pool, bits_multiplied, inputs_of, rounds_products, wider

from linattn import _linattn, reference

BASE = "simple_gla"
LENGTHS = (8, 63, 64, 65, 128, 257)
HEADS = ((1, 1), (1, 4), (2, 2), (2, 4))
DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)
SIZES = list(itertools.product((64, 100, 128, 256), (64, 72), DTYPES))
MODES = ("chunk", "recurrent")


def pytest_generate_tests(metafunc):
    if "size" not in metafunc.fixturenames:
        return
    sizes = SIZES[:: 5 if device.on_host() else 1]
    metafunc.parametrize("size", sizes, ids=lambda x: f"K{x[0]}-V{x[1]}-{np.dtype(x[2]).name}")


@device.taken
def forward(q, k, v, g, weight, skip, initial_state=None, cu_seqlens=None, **options):
    given = {"g": g, "weight": weight, "skip": skip, "cu_seqlens": cu_seqlens}
    return _linattn.forward(
        BASE, q, k, v, **given, initial_state=initial_state, output_final_state=True, **options
    )


@device.taken
def step(q, k, v, g, weight, skip, state, **options):
    return _linattn.step(BASE, q, k, v, g=g, weight=weight, skip=skip, state=state, **options)


def expected(x, dtype, **how):
    """The weights go to v, and the skip is added to the reads before their scale."""
    x = dict(x)
    weight, skip, v = (x[name].astype(dtype) for name in ("weight", "skip", "v"))
    del x["weight"], x["skip"]
    x["v"] = weight[..., None] * v
    o, state = reference.simple_gla(**x, dtype=dtype, **how)
    scale = x.get("scale", x["q"].shape[-1] ** -0.5)
    o = o.astype(dtype) + (scale * skip[:, None]).astype(dtype) * v
    return {"o": o, "final_state": state}


def drawn(case, rng):
    x = inputs_of(case, rng)
    x["weight"] = rng.uniform(0, 1, x["g"].shape).astype(np.float32)
    x["skip"] = rng.standard_normal(x["v"].shape[2]).astype(np.float32)
    return x


def cases(size, mode):
    """One of each length; packed sequences and l2-normed keys take turns."""
    K, V, dtype = size
    for i, T in enumerate(LENGTHS):
        H, HV = HEADS[(i + K + V) % len(HEADS)]
        flags = {"packed": i % 2 == 1, "l2norm": i % 3 == 1}
        yield Case(BASE, mode, dtype, T, None, K, V, H, HV, 2 - i % 2, **flags)


@pytest.mark.parametrize("mode", MODES)
def test_forward(mode, size, rng):
    pools = {}
    for case in cases(size, mode):
        x = drawn(case, rng)
        o, state = forward(**x, mode=mode)
        rounded = rounds_products(BASE, case.dtype, case.K, mode, case.T)
        pool = pools.setdefault(rounded, Pool(case.dtype if rounded else None))
        pool.add(
            {"o": o, "final_state": state},
            expected(x, wider(case.dtype), form="recurrent"),
            lambda x, dtype=case.dtype: expected(x, dtype, form="chunk", chunk_size=64),
            x,
        )
    dtype = np.dtype(size[2])
    tf32 = device.on_host() and bits_multiplied(BASE, dtype, mode) == 16
    for pool in pools.values():
        pool.judge(f"weighed {size} {mode}", tf32=tf32)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("heads", [(2, 4), (48, 96)])  # with many states a GPU has another kernel
def test_steps_are_the_recurrence(heads, state_v_first, rng):
    case = Case(BASE, "recurrent", np.float32, 5, None, 128, 128, *heads, 4)
    x = drawn(case, rng)
    x.pop("initial_state", None)
    o, final = forward(**x, mode="recurrent", state_v_first=state_v_first)
    state = np.zeros_like(final)
    tokens = [name for name in x if name != "skip"]
    for t in range(case.T):
        at = {name: x[name][:, t].copy() for name in tokens}
        found = step(**at, skip=x["skip"], state=state, state_v_first=state_v_first)
        np.testing.assert_allclose(found, o[:, t], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, final, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_number_is_an_array(mode, rng):
    x = drawn(Case(BASE, mode, np.float32, 70, None, 64, 64, 2, 4, 1), rng)
    x["weight"] = np.full_like(x["weight"], 0.5)
    x["skip"] = np.full_like(x["skip"], -0.25)
    o, state = forward(**x, mode=mode)
    found, found_state = forward(**x | {"weight": 0.5, "skip": -0.25}, mode=mode)
    np.testing.assert_array_equal(found, o)
    np.testing.assert_array_equal(found_state, state)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["weight", "k"])
def test_a_nan_leaves_the_tokens_before_it(name, mode, rng):
    x = drawn(Case(BASE, mode, ml_dtypes.bfloat16, 150, None, 64, 64, 1, 1, 1), rng)
    before, _ = forward(**x, mode=mode)
    x[name] = x[name].copy()
    x[name][0, 100, 0] = np.nan
    after, _ = forward(**x, mode=mode)
    assert np.isfinite(after[0, :100].astype(np.float32)).all()
    assert np.isnan(after[0, 100:].astype(np.float32)).all()
    near = np.abs(after[0, :100].astype(np.float32) - before[0, :100].astype(np.float32))
    assert near.max() <= 0.05 * np.abs(before.astype(np.float32)).max()


def test_gradients_have_none(rng):
    x = inputs_of(Case(BASE, "chunk", np.float32, 5, None, 4, 4, 1, 1, 1), rng)
    with pytest.raises(TypeError, match="weight"):
        _linattn.backward(BASE, **x, do=x["v"], weight=1.0)
