"""Gates of the keys that predict and of the values that are written: kda as gdn2 calls it.

The sizes are those of tensor cores. The acceptance rule judges.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
from support import device, layouts
from support.compare import assert_same_bits
from support.grid import Case, Pool, inputs_of, on_tensor_cores, rounds_products, wider

import linattn
from linattn import _linattn, reference
from linattn.composed._arrays import Arrays
from linattn.reference.elements import l2norm

BASE = "kda"
LENGTHS = (8, 63, 64, 65, 128, 257)
HEADS = ((1, 1), (1, 4), (2, 2), (2, 4))
DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)
SIZES = list(itertools.product((64, 100, 128, 256), (64, 72), DTYPES))
MODES = ("chunk", "recurrent")
GATES = {"x", "value_gate"}


def named(size):
    return f"K{size[0]}-V{size[1]}-{np.dtype(size[2]).name}"


def pytest_generate_tests(metafunc):
    if "size" in metafunc.fixturenames:
        sizes = SIZES[:: 5 if device.on_host() else 1]
        metafunc.parametrize("size", sizes, ids=named)
    if "wide_size" in metafunc.fixturenames:
        sizes = [size for size in SIZES if size[2] == np.float32 and size[0] <= 128]
        metafunc.parametrize("wide_size", sizes[:: 5 if device.on_host() else 1], ids=named)


@device.taken
def forward(q, k, v, g, beta, x, value_gate=None, initial_state=None, cu_seqlens=None, **options):
    options = {"x_is_factor": True, "output_final_state": True} | options
    arrays = {"x": x, "value_gate": value_gate, "initial_state": initial_state}
    return _linattn.forward(
        BASE, q, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens, **arrays, **options
    )


@device.taken
def step(q, k, v, g, beta, x, value_gate, state, state_indices=None, **options):
    arrays = {"g": g, "beta": beta, "x": x, "value_gate": value_gate}
    options = {"x_is_factor": True} | options
    return _linattn.step(
        BASE, q, k, v, **arrays, state=state, state_indices=state_indices, **options
    )


def multiplied(x, dtype=None):
    """The same problem without gates: the products are made first, in `dtype`."""
    x = dict(x)
    k, v, b, w = (x[name].astype(dtype or x["v"].dtype) for name in ("k", "v", "x", "value_gate"))
    del x["value_gate"]
    return x | {"x": b * (l2norm(k) if x.get("qk_l2norm") else k), "v": w * v}


def expected(x, dtype, **how):
    o, state = reference.kda(**multiplied(x, dtype), dtype=dtype, **how)
    return {"o": o, "final_state": state}


def drawn(case, rng):
    x = inputs_of(case, rng)
    for name, like in (("x", "k"), ("value_gate", "v")):
        x[name] = rng.uniform(0, 1, x[like].shape).astype(case.dtype)
    return x


def cases(size, mode):
    """One of each length; packed sequences, l2-normed keys and layouts take turns."""
    K, V, dtype = size
    for i, T in enumerate(LENGTHS):
        H, HV = HEADS[(i + K + V) % len(HEADS)]
        flags = {"packed": i % 2 == 1, "l2norm": i % 3 == 1}
        yield Case(BASE, mode, dtype, T, None, K, V, H, HV, 2 - i % 2, **flags)


def judged(size, mode, rng, tf32=False, **options):
    pools = {}
    for i, case in enumerate(cases(size, mode)):
        x = drawn(case, rng)
        given = x | {name: layouts.padded_rows(x[name]) for name in GATES if i % 4 == 2}
        o, state = forward(**given, mode=mode, **options)
        rounded = rounds_products(BASE, case.dtype, case.K, mode, case.T)
        short = tf32 and on_tensor_cores(case.dtype, case.K, mode, case.T, tf32=True)
        key = rounded, short and not device.on_host()
        pool = pools.setdefault(key, Pool(case.dtype if rounded else None))
        pool.add(
            {"o": o, "final_state": state},
            expected(x, wider(case.dtype), form="recurrent"),
            lambda x, dtype=case.dtype: expected(x, dtype, form="chunk", chunk_size=64),
            x,
        )
    for (_, short), pool in pools.items():
        pool.judge(f"gated {size} {mode}", tf32=short)


@pytest.mark.parametrize("mode", MODES)
def test_forward(mode, size, rng):
    judged(size, mode, rng)


def test_where_tf32_is_allowed(wide_size, rng):
    judged(wide_size, "chunk", rng, tf32=True, allow_tf32=True)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("heads", [(2, 4), (48, 96)])
def test_steps_are_the_recurrence(heads, state_v_first, rng):
    case = Case(BASE, "recurrent", np.float32, 5, None, 128, 128, *heads, 4)
    x = drawn(case, rng)
    x.pop("initial_state", None)
    o, final = forward(**x, mode="recurrent", state_v_first=state_v_first)
    state = np.zeros_like(final)
    for t in range(case.T):
        at = {name: array[:, t].copy() for name, array in x.items()}
        found = step(**at, state=state, state_v_first=state_v_first)
        np.testing.assert_allclose(found, o[:, t], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, final, rtol=1e-5, atol=1e-5)


def test_steps_of_a_pool(rng):
    x = drawn(Case(BASE, "recurrent", np.float32, 1, None, 32, 24, 2, 4, 3), rng)
    at = {name: array[:, 0].copy() for name, array in x.items() if name != "initial_state"}
    pool = rng.standard_normal((5, 4, 32, 24)).astype(np.float32)
    slots = np.array([4, -1, 0])
    want = pool[slots].copy()
    o_want = step(**at, state=want)
    o = step(**at, state=pool, state_indices=slots)
    assert_same_bits([o[::2], pool[slots[::2]]], [o_want[::2], want[::2]])
    assert not o[1].any()


@pytest.mark.parametrize("mode", [*MODES, "parallel"])
@pytest.mark.parametrize("dtype", [np.float64, *DTYPES], ids=lambda x: np.dtype(x).name)
def test_the_bits_are_those_of_products_made_before(dtype, mode, rng):
    """Where the core rounds a product as an array of it would be rounded."""
    case = Case(BASE, mode, dtype, 150, None, 64, 72, 2, 4, 1, packed=True)
    on_cores = not device.on_host() and on_tensor_cores(dtype, case.K, mode, case.T)
    if not on_cores and np.dtype(dtype).itemsize == 2:
        pytest.skip("these kernels do not round the products")
    x = drawn(case, rng)
    want = forward(**multiplied(x), mode=mode, x_is_factor=False)
    assert_same_bits(forward(**x, mode=mode), want)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["x", "value_gate"])
def test_one_gate_alone(name, mode, rng):
    """Each is used whether the other is there or not."""
    x = drawn(Case(BASE, mode, np.float32, 70, None, 64, 64, 2, 4, 1), rng)
    made = multiplied(x)
    if name == "x":
        found = forward(**x | {"v": made["v"], "value_gate": None}, mode=mode)
    else:
        found = forward(**x | {"x": made["x"]}, mode=mode, x_is_factor=False)
    assert_same_bits(found, forward(**made, mode=mode, x_is_factor=False))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["x", "value_gate", "k", "v"])
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


@pytest.mark.parametrize("name", ["x", "value_gate"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: np.dtype(x).name)
def test_a_nan_of_the_next_sequence_stays_there(name, dtype, rng):
    x = drawn(Case(BASE, "chunk", dtype, 150, None, 64, 72, 1, 2, 1, state=False), rng)
    x["cu_seqlens"] = np.array([0, 90, 150])
    before, state = forward(**x, allow_tf32=True)
    x[name] = x[name].copy()
    x[name][0, 90:] = np.nan
    after, state_after = forward(**x, allow_tf32=True)
    assert_same_bits([after[:, :90], state_after[0]], [before[:, :90], state[0]])
    assert np.isnan(after[0, 90:].astype(np.float32)).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_product_too_large_for_float16(mode, rng):
    """It is a number of the state, which float32 holds."""
    x = drawn(Case(BASE, mode, np.float16, 100, None, 64, 64, 1, 2, 1, state=False), rng)
    x["v"], x["value_gate"] = x["v"].copy(), x["value_gate"].copy()
    x["v"][0, 70], x["value_gate"][0, 70] = 300, 300
    o, state = forward(**x, mode=mode, scale=1e-4)
    want = expected(x, np.float64, form="recurrent", scale=1e-4)
    for found, right in ((o, want["o"]), (state, want["final_state"])):
        assert np.abs(found.astype(np.float64) - right).max() <= 5e-3 * np.abs(right).max()


# ---- gdn2 ----


def gdn2_arguments(rng, dtype, T=70):
    x = drawn(Case(BASE, "chunk", dtype, T, None, 64, 64, 2, 4, 1, state=False), rng)
    return {name: x[name] for name in "qkvg"} | {"b": x["x"], "w": x["value_gate"]}


def test_gdn2_makes_no_products(rng, monkeypatch):
    x = gdn2_arguments(rng, np.float32)
    v, b = x["w"] * x["v"], x["b"] * x["k"]
    want = _linattn.forward("kda", x["q"], x["k"], v, g=x["g"], beta=1.0, x=b)[0]
    monkeypatch.setattr(Arrays, "scaled", None)
    assert_same_bits([linattn.gdn2(**x)[0]], [want])
    state = np.zeros((1, 4, 64, 64), np.float32)
    o = linattn.gdn2_step(**{name: a[:, 0].copy() for name, a in x.items()}, state=state)
    np.testing.assert_allclose(o, want[:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("names", [["b"], ["w"], ["b", "w"]], ids="".join)
def test_gates_of_gdn2_may_have_another_dtype(names, l2norm, rng):
    x = gdn2_arguments(rng, np.float32)
    want, _ = linattn.gdn2(**x, qk_l2norm=l2norm)
    o, _ = linattn.gdn2(**x | {n: x[n].astype(np.float64) for n in names}, qk_l2norm=l2norm)
    np.testing.assert_allclose(o, want, rtol=1e-5, atol=1e-6)


def test_steps_of_gdn2_call_a_gate_by_its_name(rng):
    x = {name: a[:, 0].copy() for name, a in gdn2_arguments(rng, np.float32, T=1).items()}
    state = np.zeros((1, 4, 64, 64), np.float32)
    for name in "bw":
        wrong = layouts.every_other(x[name])
        with pytest.raises(ValueError, match=rf"^{name}: expected an aligned array"):
            linattn.gdn2_step(**x | {name: wrong}, state=state)


# ---- what is refused ----


@device.taken
def backward(q, k, v, g, beta, x, do, value_gate=None, **options):
    given = {"g": g, "beta": beta, "x": x, "do": do, "value_gate": value_gate}
    return linattn.Gradients(*_linattn.backward(BASE, q, k, v, **given, **options))


@pytest.mark.parametrize("mode", ["chunk", "recurrent"])
@pytest.mark.parametrize("V", [8, 40])
def test_gradients_of_a_gate_of_values(V, mode, rng):
    """Was u = gate v: of v gate du, and of the gate du v."""
    x = inputs_of(Case(BASE, mode, np.float64, 100, None, 16, V, 1, 2, 2), rng)
    x = {name: y.astype(np.float64) for name, y in x.items()} | {"x": x["k"].astype(np.float64)}
    gate, do = rng.uniform(0, 1, x["v"].shape), rng.standard_normal(x["v"].shape)
    gated = x | {"v": gate * x["v"]}
    want = backward(**gated, do=do, mode=mode)
    found = backward(**x, value_gate=gate, do=do, mode=mode)
    for name in ("dq", "dk", "dx", "dg", "dbeta"):
        np.testing.assert_array_equal(getattr(found, name), getattr(want, name))
    np.testing.assert_allclose(found.dv, gate * want.dv, rtol=1e-14)
    np.testing.assert_allclose(found.dvalue_gate, x["v"] * want.dv, rtol=1e-14)


def test_gradients_of_a_factor_of_x_there_are_none(rng):
    x = inputs_of(Case(BASE, "chunk", np.float32, 5, None, 4, 4, 1, 1, 1), rng)
    with pytest.raises(TypeError, match="x_is_factor"):
        _linattn.backward(BASE, **x, do=x["v"], x=x["k"], x_is_factor=True)


def test_gates_are_for_the_op_of_gdn2_alone(rng):
    x = inputs_of(Case("gated_delta_rule", "chunk", np.float32, 5, None, 4, 4, 1, 1, 1), rng)
    with pytest.raises(ValueError, match="x_is_factor: gated_delta_rule has no such form"):
        _linattn.forward("gated_delta_rule", **x, x=x["k"], x_is_factor=True)
    x = inputs_of(Case(BASE, "chunk", np.float32, 5, None, 4, 4, 1, 1, 1), rng)
    for wrong in ({"x_is_factor": True}, {"value_gate": x["v"]}):
        with pytest.raises(TypeError, match=r"^x: expected"):
            _linattn.forward(BASE, **x, **wrong)
