"""mamba3, against its own loop over tokens, against ssd and against simple_gla."""

from itertools import pairwise

import numpy as np
import pytest
from support.compare import assert_same_bits
from support.composed import DTYPES, assert_near, assert_slopes, judged, state_dtype
from support.device import imported

import linattn
from linattn import reference

ENDS = np.array([0, 7, 7, 23])
BY_TOKEN = ("x", "dt", "B", "C", "trap", "angles", "z", "dy")
STATE = linattn.Mamba3States._fields
OPTIONS = ("plain", "angles", "all angles", "A by head", "all")


def inputs(rng, option="all", dtype=np.float64, packed=False, B=2, T=23, H=4, G=2, P=5, N=6):
    B, wide = 1 if packed else B, state_dtype(dtype)
    S, R = len(ENDS) - 1 if packed else B, 3 if option == "all angles" else 2

    def normal(*shape, dtype=dtype):
        return rng.standard_normal(shape).astype(dtype)

    made = {
        "x": normal(B, T, H, P),
        "dt": rng.uniform(0.02, 1, (B, T, H)).astype(wide),
        "A": -rng.uniform(0.05, 2, (H,) if option == "A by head" else (B, T, H)).astype(wide),
        "B": normal(B, T, G, N),
        "C": normal(B, T, G, N),
        "trap": rng.uniform(0, 1, (B, T, H)).astype(wide),
    }
    if option in ("angles", "all angles", "all"):
        made["angles"] = normal(B, T, H, R, dtype=wide)
    if option == "all":
        made["D"], made["z"] = normal(H, P, dtype=wide), normal(B, T, H, P)
        shapes = ((S, H, R), (S, H, P, N), (S, H, N), (S, H, P))
        angle, *others = (normal(*shape, dtype=wide) for shape in shapes)
        made["initial_states"] = (angle.astype("f8"), *others)
    return made | ({"cu_seqlens": ENDS} if packed else {})


def output_gradients(rng, x):
    (B, _, H, P), N = x["x"].shape, x["B"].shape[3]
    S = len(ENDS) - 1 if "cu_seqlens" in x else B
    R = x["angles"].shape[3] if "angles" in x else 0
    wide = state_dtype(x["x"].dtype)
    shapes = ((S, H, R), (S, H, P, N), (S, H, N), (S, H, P))
    return {
        "dy": rng.standard_normal(x["x"].shape).astype(x["x"].dtype),
        "d_final_states": tuple(rng.standard_normal(shape).astype(wide) for shape in shapes),
    }


def outputs(y, states):
    """The angle as a point on the circle: near 0 it may be near 2 pi."""
    named = dict(zip(STATE, states, strict=True)) | {"y": y}
    angle = named.pop("angle")
    if angle.size:
        wide = named["ssm"].dtype
        named |= {"cos": np.cos(angle).astype(wide), "sin": np.sin(angle).astype(wide)}
    return named


def forward(**x):
    return outputs(*linattn.mamba3(**x, return_final_states=True, mode="recurrent"))


def plain(**x):
    return outputs(*reference.mamba3(**x))


def backward(mode="recurrent", **x):
    grads = linattn.mamba3_backward(**x, mode=mode)._asdict()
    states = grads.pop("d_initial_states")
    named = {name[1:]: g for name, g in grads.items()}
    return named if states is None else named | states._asdict()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward(dtype, option, packed, rng):
    sizes = {"B": 1, "H": 64, "G": 16} if option == "A by head" else {}
    judged(lambda: inputs(rng, option, dtype, packed, **sizes), forward, plain, dtype)

    def draw():
        x = inputs(rng, option, dtype, packed, **sizes)
        x.pop("D", None)  # a few numbers, tested with ssd
        return x | output_gradients(rng, x)

    judged(draw, backward, reference.mamba3_backward, dtype, gradient=True)


def steps(x, dt, A, B, C, trap, angles, D, z, initial_states):
    state = tuple(one.copy() for one in initial_states)
    y = [
        linattn.mamba3_step(
            state, *(a[:, t] for a in (x, dt, A, B, C, trap, angles)), D=D, z=z[:, t]
        )
        for t in range(x.shape[1])
    ]
    return np.stack(y, 1), state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step(dtype, rng):
    judged(lambda: inputs(rng, "all", dtype), lambda **x: outputs(*steps(**x)), plain, dtype)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_reference_by_differences(option, rng):
    x = inputs(rng, option, T=6)
    d = output_gradients(rng, x)

    def loss():
        y, states = reference.mamba3(**x)
        of_states = sum((a * da).sum() for a, da in zip(states, d["d_final_states"], strict=True))
        return (y * d["dy"]).sum() + of_states

    arrays = {name: a for name, a in x.items() if isinstance(a, np.ndarray)}
    if "initial_states" in x:
        arrays |= dict(zip(STATE, x["initial_states"], strict=True))
    assert_slopes(loss, arrays, reference.mamba3_backward(**x, **d), rng)


# ---- identities ----


def test_eulers_rule_without_angles_is_mamba_2(rng):
    x = inputs(rng, "A by head")
    D = rng.standard_normal(4)
    y, states = linattn.mamba3(**x | {"trap": 1.0}, D=D, return_final_states=True)
    del x["trap"]
    expected, h = linattn.ssd(**x, D=D, return_final_states=True)
    assert_near(y, expected, 1e-14)
    assert_near(states.ssm, h, 1e-14)


def test_without_its_own_row_it_is_mamba_2_one_token_later(rng):
    """trap = 0: a token writes the row before it, and decays it."""
    x = inputs(rng, "A by head")
    y, _ = linattn.mamba3(**x | {"trap": 0.0})
    moved = {name: np.zeros_like(x[name]) for name in ("x", "B")}
    for name in moved:
        moved[name][:, 1:] = x[name][:, :-1]
    del x["trap"]
    decay = np.exp(x["dt"] * x["A"])
    late, _ = linattn.ssd(**x | moved | {"x": moved["x"] * decay[..., None]})
    assert_near(y, late, 1e-13)


def test_turning_all_alike_changes_nothing(rng):
    x = inputs(rng, "all")
    y, states = linattn.mamba3(**x, return_final_states=True)
    angle, ssm, k, v = x["initial_states"]
    turn = rng.standard_normal(angle.shape)

    def turned(rows):
        a, b, rows = rows[..., 0:4:2], rows[..., 1:4:2], rows.copy()
        by = turn if rows.ndim == 3 else turn[:, :, None]
        rows[..., 0:4:2] = a * np.cos(by) - b * np.sin(by)
        rows[..., 1:4:2] = a * np.sin(by) + b * np.cos(by)
        return rows

    moved = (angle + turn, turned(ssm), turned(k), v)
    again, last = linattn.mamba3(**x | {"initial_states": moved}, return_final_states=True)
    assert_near(again, y, 1e-13)
    assert_near(last.ssm, turned(states.ssm), 1e-13)


def test_angles_of_long_sequences_in_float32(rng):
    """Their sum is taken in float64."""
    T = 20000
    x = inputs(rng, "angles", np.float32, B=1, T=T, H=1, G=1)
    x["dt"][...], x["A"][...] = 1.0, -1.0
    _, states = linattn.mamba3(**x, return_final_states=True)
    exact = np.cumsum(x["angles"].astype("f8"), 1)[0, -1]
    turn = np.exp(1j * states.angle[0].astype("f8")) / np.exp(1j * exact)
    assert abs(turn - 1).max() < 1e-6


@pytest.mark.parametrize("how", [{}, {"chunk_size": 7}, {"mode": "parallel"}])
def test_modes_agree(how, rng):
    x = inputs(rng, packed=True)
    d = output_gradients(rng, x)
    assert_near(linattn.mamba3(**x, **how)[0], reference.mamba3(**x)[0], 1e-12)
    grads = backward(**{"mode": "chunk"} | how, **x, **d)
    expected = reference.mamba3_backward(**x, **d)
    for name, one in grads.items():
        assert_near(one, expected[name], 1e-12, name)


def test_packed_is_separate(rng):
    x = inputs(rng, packed=True)
    d = output_gradients(rng, x)
    ends = x.pop("cu_seqlens")
    y, states = linattn.mamba3(**x, cu_seqlens=ends, return_final_states=True)
    grads = linattn.mamba3_backward(**x, **d, cu_seqlens=ends)
    for n, (start, end) in enumerate(pairwise(ends)):

        def one(given, n=n, at=slice(start, end)):
            return {
                name: tuple(a[n : n + 1] for a in given[name])
                if "states" in name
                else a[:, at]
                if name in BY_TOKEN or name == "A"
                else a
                for name, a in given.items()
            }

        y_n, state = linattn.mamba3(**one(x), return_final_states=True)
        assert_near(y[:, start:end], y_n, 1e-13)
        for whole, part in zip(states, state, strict=True):
            assert_near(whole[n : n + 1], part, 1e-13)
        g = linattn.mamba3_backward(**one(x), **one(d))
        for name in ("dx", "ddt", "dA", "dB", "dC", "dtrap", "dangles", "dz"):
            assert_near(getattr(grads, name)[:, start:end], getattr(g, name), 1e-12, name)
        for whole, part in zip(grads.d_initial_states, g.d_initial_states, strict=True):
            assert_near(whole[n : n + 1], part, 1e-12)


def test_a_split_call_is_one_call(rng):
    """Forward; and backward, with the second call's d_initial_states as the first's."""
    x = inputs(rng)
    d = output_gradients(rng, x)
    y, states = linattn.mamba3(**x, return_final_states=True)
    grads = linattn.mamba3_backward(**x, **d)
    S0 = x.pop("initial_states")
    first, second = (
        {name: a if name == "D" else a[:, at] for name, a in x.items()}
        for at in (slice(0, 9), slice(9, None))
    )
    y1, S1 = linattn.mamba3(**first, initial_states=S0, return_final_states=True)
    y2, S2 = linattn.mamba3(**second, initial_states=S1, return_final_states=True)
    assert_near(np.concatenate([y1, y2], 1), y, 1e-13)
    for one, expected in zip(S2, states, strict=True):
        assert_near(one, expected, 1e-13)
    last = {"d_final_states": d["d_final_states"], "initial_states": S1}
    g2 = linattn.mamba3_backward(d["dy"][:, 9:], **second, **last)
    more = {"d_final_states": g2.d_initial_states, "initial_states": S0}
    g1 = linattn.mamba3_backward(d["dy"][:, :9], **first, **more)
    for name in ("dx", "ddt", "dA", "dB", "dC", "dtrap", "dangles", "dz"):
        joined = np.concatenate([getattr(g1, name), getattr(g2, name)], 1)
        assert_near(joined, getattr(grads, name), 1e-12, name)
    assert_near(g1.dD + g2.dD, grads.dD, 1e-12)
    for one, expected in zip(g1.d_initial_states, grads.d_initial_states, strict=True):
        assert_near(one, expected, 1e-12)


def test_no_tokens(rng):
    x = inputs(rng, T=0)
    y, states = linattn.mamba3(**x, return_final_states=True)
    assert y.shape == x["x"].shape
    assert_same_bits(tuple(states), x["initial_states"])
    d = output_gradients(rng, x)
    grads = linattn.mamba3_backward(**x, **d)
    assert_same_bits(tuple(grads.d_initial_states), d["d_final_states"])


def test_numbers_stand_for_arrays(rng):
    x = inputs(rng)
    numbers = {"dt": 0.4, "A": -0.7, "trap": 0.3, "D": 1.5}
    shape = x["dt"].shape
    arrays = {name: np.full(shape, value) for name, value in numbers.items() if name != "D"}
    arrays |= {"D": np.full(shape[2], 1.5), "A": np.full(shape[2], -0.7)}
    assert_same_bits(linattn.mamba3(**x | numbers), linattn.mamba3(**x | arrays))
    number, array = (linattn.mamba3_backward(x["x"], **x | one) for one in (numbers, arrays))
    for name in numbers:
        assert isinstance(getattr(number, "d" + name), float)
        assert_near(getattr(number, "d" + name), getattr(array, "d" + name).sum(), 1e-12, name)


def test_a_pool_of_states(rng):
    x = inputs(rng, "all", np.float32, B=3, T=1)
    token = {name: a[:, 0] for name, a in x.items() if name in BY_TOKEN or name == "A"}
    token["D"] = x["D"]
    pool = inputs(rng, "all", np.float32, B=5)["initial_states"]
    before = tuple(a.copy() for a in pool)
    states = tuple(a[[4, 1, 0]].copy() for a in pool)
    y = linattn.mamba3_step(pool, **token, state_batch_indices=np.array([4, -1, 0]))
    expected = linattn.mamba3_step(states, **token)
    assert not y[1].any()
    for whole, old, part in zip(pool, before, states, strict=True):
        assert_same_bits((whole[4], whole[0]), (part[0], part[2]))
        assert_same_bits(whole[1:4], old[1:4])
    assert_same_bits((y[0], y[2]), (expected[0], expected[2]))
    for wrong in ([5, 0, 1], [0, 0, 1]):
        old = tuple(a.copy() for a in pool)
        with pytest.raises(ValueError, match="state_batch_indices: "):
            linattn.mamba3_step(pool, **token, state_batch_indices=np.array(wrong))
        assert_same_bits(pool, old)


# ---- errors ----


def test_errors_name_the_argument(rng):
    x = inputs(rng, "all", np.float32)
    angle, ssm, k, v = x["initial_states"]
    for error, text, changed in (
        (TypeError, "x: expected an array", {"x": [1.0]}),
        (ValueError, "dt: expected [B,T,H] = (2, 23, 4), got (2, 23, 3)", {"dt": x["dt"][..., :3]}),
        (ValueError, "A: expected [H] = (4,), got (3,)", {"A": x["A"][0, 0, :3]}),
        (TypeError, "trap: expected an array or a number, got None", {"trap": None}),
        (
            ValueError,
            "angles: expected R <= N / 2 = 3, got R = 4",
            {"angles": np.zeros((2, 23, 4, 4), "f4")},
        ),
        (ValueError, "B: expected G to divide H = 4, got G = 3", three(x)),
        (TypeError, "C: expected float32 (the dtype of x)", {"C": x["C"].astype("f8")}),
        (TypeError, "initial_states: expected (angle, ssm, k, v)", {"initial_states": ssm}),
        (ValueError, "expected (angle, ssm, k, v), got 3 items", {"initial_states": (ssm, k, v)}),
        (
            ValueError,
            "initial_states: k: expected [S,H,N] = (2, 4, 6), got (2, 4, 5)",
            {"initial_states": (angle, ssm, v, v)},
        ),
        (ValueError, "cu_seqlens: expected packed", {"cu_seqlens": ENDS}),
        (ValueError, "chunk_size: expected >= 1", {"chunk_size": 0}),
    ):
        with pytest.raises(error) as caught:
            linattn.mamba3(**x | changed)
        assert text in str(caught.value), caught.value
    with pytest.raises(ValueError, match="d_final_states: ssm: expected"):
        linattn.mamba3_backward(x["x"], **x, d_final_states=(None, ssm[:1], None, None))
    with pytest.warns(RuntimeWarning, match="dt \\* A: expected"):
        linattn.mamba3(**x | {"A": -x["A"]})


def three(x):
    return {name: np.repeat(x[name][:, :, :1], 3, 2) for name in "BC"}


# ---- PyTorch ----


def tensors(torch, x, grad=False):
    return {
        name: tuple(torch.from_numpy(b.copy()).requires_grad_(grad) for b in a)
        if isinstance(a, tuple)
        else torch.from_numpy(a.copy()).requires_grad_(grad and a.dtype.kind == "f")
        for name, a in x.items()
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
def test_torch_records_it(option, packed, rng):
    torch = imported("torch")
    x = inputs(rng, option, packed=packed)
    d = output_gradients(rng, x)
    given = tensors(torch, x, grad=True)
    y, states = linattn.mamba3(**given, return_final_states=True)
    assert_near(y.detach(), linattn.mamba3(**x)[0], 1e-13)
    out = [(y, d["dy"]), *zip(states, d["d_final_states"], strict=True)]
    out = [(a, torch.from_numpy(da)) for a, da in out if a.requires_grad]
    torch.autograd.backward([a for a, _ in out], [da for _, da in out])
    grads = backward(mode="chunk", **x, **d)
    for name, a in given.items():
        for key, one in zip(STATE, a, strict=True) if isinstance(a, tuple) else [(name, a)]:
            if one.is_floating_point():
                assert_near(one.grad, grads[key], 1e-12, key)


def test_torch_has_the_passes_of_numpy(rng):
    torch = imported("torch")
    x = inputs(rng, "all", np.float32)
    given = tensors(torch, x)
    for one, its in zip(
        linattn.mamba3_backward(given["x"], **given)[:9],
        linattn.mamba3_backward(x["x"], **x)[:9],
        strict=True,
    ):
        assert isinstance(one, torch.Tensor)
        assert_near(one, its, 1e-5)
    (y, state), (expected, its) = steps(**x), (None, None)
    state = tuple(a.clone() for a in given["initial_states"])
    expected = [
        linattn.mamba3_step(
            state,
            *(given[n][:, t] for n in ("x", "dt", "A", "B", "C", "trap", "angles")),
            D=given["D"],
            z=given["z"][:, t],
        )
        for t in range(y.shape[1])
    ]
    assert_near(torch.stack(expected, 1), y, 1e-5)
