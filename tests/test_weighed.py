"""Weights of writes, and reads with a part of v: the core's simple_gla as ssd calls it.

The sizes are those of tensor cores. The acceptance rule judges.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
from support import device
from support.grid import Case, Pool, bits_multiplied, inputs_of, rounds_products, wider

import linattn
from linattn import _linattn, reference, testing

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


# ---- gradients ----


@device.taken
def backward(q, k, v, g, weight, skip, do, d_final_state, **options):
    given = {"g": g, "weight": weight, "skip": skip, "do": do, "d_final_state": d_final_state}
    return linattn.Gradients(*_linattn.backward(BASE, q, k, v, **given, **options))


def expected_gradients(x, do, dST, dtype, **how):
    """Was v weighed, and added to the reads."""
    x = dict(x)
    weight, skip, v, do = (y.astype(dtype) for y in (x.pop("weight"), x.pop("skip"), x["v"], do))
    weighed = weight[..., None] * v
    grads = reference.backward(
        BASE, do, **x | {"v": weighed}, d_final_state=dST, dtype=dtype, **how
    )
    scale = x.get("scale", x["q"].shape[-1] ** -0.5)
    du = grads.dv.astype(dtype)
    return {
        "dq": grads.dq,
        "dk": grads.dk,
        "dg": grads.dg,
        "dv": weight[..., None] * du + scale * skip[:, None] * do,
        "dweight": (du * v).sum(-1),
        "dskip": scale * (do * v).sum((0, 1, 3)),
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(64, 64, 1, 4), (40, 20, 2, 2), (16, 7, 1, 1)], ids=str)
def test_gradients(sizes, mode, rng):
    K, V, H, HV = sizes
    for packed in (False, True):
        case = Case(BASE, mode, np.float64, 130, None, K, V, H, HV, 2 - packed, packed=packed)
        x = drawn(case, rng)
        x = {name: y.astype(np.float64) if y.dtype.kind == "f" else y for name, y in x.items()}
        o, state = forward(**x, mode=mode)
        do, dST = rng.standard_normal(o.shape), rng.standard_normal(state.shape)
        found = backward(**x, do=do, d_final_state=dST, mode=mode)
        assert found.dvalue_gate is None
        for name, want in expected_gradients(x, do, dST, np.float64).items():
            np.testing.assert_allclose(getattr(found, name), want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
def test_gradients_of_short_numbers(dtype, rng):
    x = drawn(Case(BASE, "chunk", dtype, 200, None, 64, 72, 2, 4, 2), rng)
    x.pop("initial_state", None)
    o, state = forward(**x)
    do = rng.standard_normal(o.shape).astype(dtype)
    dST = rng.standard_normal(state.shape).astype(np.float32)
    found = backward(**x, do=do, d_final_state=dST)
    bound = testing.RMS_BOUND[np.dtype(dtype).name]
    for name, want in expected_gradients(x, do, dST, np.float64).items():
        got = np.asarray(getattr(found, name)).astype(np.float64)
        assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) <= bound, name
        assert getattr(found, name).dtype == x[name[1:]].dtype


@pytest.mark.parametrize("given", [("weight",), ("skip",), ()])
def test_each_factor_alone(given, rng):
    x = drawn(Case(BASE, "chunk", np.float64, 70, None, 16, 8, 1, 2, 1), rng)
    x = {name: y.astype(np.float64) for name, y in x.items()}
    absent = {name: None for name in ("weight", "skip") if name not in given}
    neutral = {"weight": np.ones_like(x["weight"]), "skip": np.zeros_like(x["skip"])}
    o, state = forward(**x)
    do, dST = rng.standard_normal(o.shape), rng.standard_normal(state.shape)
    found = backward(**x | absent, do=do, d_final_state=dST)
    whole = backward(**x | {name: neutral[name] for name in absent}, do=do, d_final_state=dST)
    for name in ("dq", "dk", "dv", "dg", *(f"d{name}" for name in given)):
        np.testing.assert_allclose(
            getattr(found, name), getattr(whole, name), rtol=1e-12, atol=1e-12
        )
    assert all(getattr(found, f"d{name}") is None for name in absent)


def test_gradients_of_numbers_and_of_no_tokens(rng):
    x = drawn(Case(BASE, "chunk", np.float64, 30, None, 16, 8, 1, 2, 1), rng)
    x = {name: y.astype(np.float64) for name, y in x.items()}
    do = rng.standard_normal(x["v"].shape)
    dST = np.zeros((1, 2, 16, 8))
    same = {"weight": np.full_like(x["weight"], 0.5), "skip": np.full_like(x["skip"], -2.0)}
    whole = backward(**x | same, do=do, d_final_state=dST)
    found = backward(**x | {"weight": 0.5, "skip": -2.0}, do=do, d_final_state=dST)
    assert found.dweight == pytest.approx(whole.dweight.sum())
    assert found.dskip == pytest.approx(whole.dskip.sum())
    np.testing.assert_array_equal(found.dv, whole.dv)
    none = {name: y[:, :0] if name not in ("skip", "initial_state") else y for name, y in x.items()}
    for name in ("no state", "initial_state"):
        none.pop(name, None)
        found = backward(**none, do=do[:, :0], d_final_state=dST)
        assert found.dweight.shape == (1, 0, 2) and (found.dskip == 0).all()


@pytest.mark.skipif(not device.on_host(), reason="memory of the host")
@pytest.mark.parametrize("nth", [1, 2])
def test_gradients_without_memory(nth, rng):
    x = drawn(Case(BASE, "chunk", np.float64, 30, None, 16, 8, 1, 2, 1), rng)
    _linattn._fail_allocation(nth)
    with pytest.raises(MemoryError, match="not enough memory"):
        _linattn.backward(BASE, **x, do=x["v"])


def test_gradients_of_states_alone_depend_on_no_factor(rng):
    x = drawn(Case(BASE, "chunk", np.float64, 90, None, 16, 8, 1, 2, 1), rng)
    x = {name: y.astype(np.float64) for name, y in x.items()}
    do = rng.standard_normal(x["v"].shape)
    q, k, v, g = (x[name] for name in "qkvg")
    *_, want = _linattn.backward(BASE, q, k, v, g=g, do=do, states_only=True)
    factors = {name: x[name] for name in ("weight", "skip")}
    *others, found = _linattn.backward(BASE, q, k, v, g=g, do=do, **factors, states_only=True)
    np.testing.assert_array_equal(found, want)
    assert others == [None] * len(others)
