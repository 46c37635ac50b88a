"""gated_delta_product, against its own loop over tokens and against gated_delta_rule."""

from itertools import pairwise

import numpy as np
import pytest
from support.compare import assert_same_bits
from support.composed import DTYPES, assert_near, assert_slopes, judged, state_dtype
from support.device import imported

import linattn
from linattn import reference

SIZES = {"B": 2, "T": 23, "H": 2, "HV": 4, "K": 6, "V": 5}
ENDS = np.array([0, 7, 7, 23])
BY_TOKEN = ("q", "g", "do")
BY_WRITE = ("k", "v", "beta")


def inputs(rng, R, dtype=np.float64, packed=False, decay=True, **sizes):
    """Keys of about unit norm, and beta in (0, 2)."""
    size = SIZES | sizes | ({"B": 1} if packed else {})
    B, T, H, HV, K, V = size.values()
    wide = state_dtype(dtype)
    k = rng.standard_normal((B, T * R, H, K))
    made = {
        "q": rng.standard_normal((B, T, H, K)).astype(dtype),
        "k": (k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-2)).astype(dtype),
        "v": rng.standard_normal((B, T * R, HV, V)).astype(dtype),
        "beta": rng.uniform(0.02, 1.98, (B, T * R, HV)).astype(wide),
        "num_householder": R,
        "initial_state": rng.standard_normal((len(ENDS) - 1 if packed else B, HV, K, V)).astype(
            wide
        ),
    }
    if decay:
        made["g"] = -rng.exponential(0.5, (B, T, HV)).astype(wide)
    return made | ({"cu_seqlens": ENDS} if packed else {})


def output_gradients(rng, x):
    shape = (*x["q"].shape[:2], *x["v"].shape[2:])
    return {
        "do": rng.standard_normal(shape).astype(x["v"].dtype),
        "d_final_state": rng.standard_normal(x["initial_state"].shape).astype(
            x["initial_state"].dtype
        ),
    }


def forward(**x):
    o, state = linattn.gated_delta_product(**x, output_final_state=True, mode="recurrent")
    return {"o": o, "state": state}


def plain(**x):
    o, state = reference.gated_delta_product(**x)
    return {"o": o, "state": state}


def backward(mode="recurrent", **x):
    grads = linattn.gated_delta_product_backward(**x, mode=mode)._asdict()
    return {name.removeprefix("d_").removeprefix("d"): g for name, g in grads.items()}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("R", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward(dtype, R, decay, packed, rng):
    how = {"dtype": dtype, "packed": packed, "decay": decay}
    judged(lambda: inputs(rng, R, **how), forward, plain, dtype)

    def draw():
        x = inputs(rng, R, **how)
        return x | output_gradients(rng, x)

    judged(draw, backward, reference.gated_delta_product_backward, dtype, gradient=True)


@pytest.mark.parametrize("R", [1, 3])
@pytest.mark.parametrize("decay", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step(dtype, decay, R, rng):
    def steps(q, k, v, beta, initial_state, num_householder, g=None):
        S, o = initial_state.copy(), []
        for t in range(q.shape[1]):
            writes = slice(t * R, t * R + R)
            at = (q[:, t], k[:, writes], v[:, writes])
            g_t, how = None if g is None else g[:, t], {"num_householder": num_householder}
            o.append(linattn.gated_delta_product_step(*at, g_t, beta[:, writes], state=S, **how))
        return {"o": np.stack(o, 1), "state": S}

    judged(lambda: inputs(rng, R, dtype, decay=decay), steps, plain, dtype)


@pytest.mark.parametrize("R", [1, 3])
def test_the_reference_by_differences(R, rng):
    x = inputs(rng, R, T=5)
    d = output_gradients(rng, x)

    def loss():
        o, state = reference.gated_delta_product(**x)
        return (o * d["do"]).sum() + (state * d["d_final_state"]).sum()

    arrays = {name: a for name, a in x.items() if isinstance(a, np.ndarray)}
    assert_slopes(loss, arrays, reference.gated_delta_product_backward(**x, **d), rng)


# ---- identities ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_write_is_the_gated_delta_rule(dtype, rng):
    x = inputs(rng, 1, dtype)
    d = output_gradients(rng, x)
    y = {name: a for name, a in x.items() if name != "num_householder"}
    final = {"output_final_state": True}
    assert_same_bits(
        linattn.gated_delta_product(**x, **final), linattn.gated_delta_rule(**y, **final)
    )
    assert_same_bits(
        linattn.gated_delta_product_backward(**x, **d), linattn.gated_delta_rule_backward(**y, **d)
    )
    alpha = np.exp(x.pop("g"))
    del y["g"]
    assert_same_bits(
        linattn.gated_delta_product(**x, alpha=alpha, **final),
        linattn.gated_delta_rule(**y, alpha=alpha, **final),
    )


def test_the_decay_itself(rng):
    x = inputs(rng, 3)
    o, state = linattn.gated_delta_product(**x, output_final_state=True)
    d = output_gradients(rng, x)
    dg = linattn.gated_delta_product_backward(**x, **d).dg
    alpha = np.exp(x.pop("g"))
    again = linattn.gated_delta_product(**x, alpha=alpha, output_final_state=True)
    for one, expected in zip(again, (o, state), strict=True):
        assert_near(one, expected, 1e-13)
    dalpha = linattn.gated_delta_product_backward(**x, **d, alpha=alpha).dg
    assert_near(alpha * dalpha, dg, 1e-13)
    # a decay of 0 begins anew
    alpha[:, 11] = 0
    o, _ = linattn.gated_delta_product(**x, alpha=alpha)
    x["initial_state"][...] = 0
    y = {n: a[:, 33:] if n in BY_WRITE else a for n, a in x.items()} | {"q": x["q"][:, 11:]}
    assert_near(o[:, 11:], linattn.gated_delta_product(**y, alpha=alpha[:, 11:])[0], 1e-13)


@pytest.mark.parametrize("how", [{}, {"chunk_size": 7}, {"mode": "parallel"}, {"scale": 0.3}])
def test_modes_and_options_agree(how, rng):
    x = inputs(rng, 2, packed=True)
    d = output_gradients(rng, x)
    scale = how.get("scale")
    o, _ = linattn.gated_delta_product(**x, **how)
    assert_near(o, reference.gated_delta_product(**x, scale=scale)[0], 1e-12)
    grads = linattn.gated_delta_product_backward(**x, **d, **how)
    expected = reference.gated_delta_product_backward(**x, **d, scale=scale)
    for name in ("q", "k", "v", "g", "beta"):
        assert_near(getattr(grads, "d" + name), expected[name], 1e-12, name)


def test_packed_is_separate(rng):
    x = inputs(rng, 3, packed=True)
    ends = x.pop("cu_seqlens")
    o, states = linattn.gated_delta_product(**x, cu_seqlens=ends, output_final_state=True)
    for n, (start, end) in enumerate(pairwise(ends)):
        one = {
            name: a[:, start:end]
            if name in BY_TOKEN
            else a[:, 3 * start : 3 * end]
            if name in BY_WRITE
            else a
            for name, a in x.items()
        }
        one["initial_state"] = x["initial_state"][n : n + 1]
        o_n, state = linattn.gated_delta_product(**one, output_final_state=True)
        assert_near(o[:, start:end], o_n, 1e-14)
        assert_near(states[n : n + 1], state, 1e-14)


def test_a_split_call_is_one_call(rng):
    x = inputs(rng, 2)
    o, state = linattn.gated_delta_product(**x, output_final_state=True)
    S, parts = x.pop("initial_state"), []
    for at in (slice(0, 9), slice(9, None)):
        writes = slice(0, 18) if at.start == 0 else slice(18, None)
        part = {
            name: a[:, at] if name in BY_TOKEN else a[:, writes] if name in BY_WRITE else a
            for name, a in x.items()
        }
        o_part, S = linattn.gated_delta_product(**part, initial_state=S, output_final_state=True)
        parts.append(o_part)
    assert_near(np.concatenate(parts, 1), o, 1e-13)
    assert_near(S, state, 1e-13)


@pytest.mark.parametrize("R", [1, 2])
def test_numbers_stand_for_arrays(R, rng):
    x = inputs(rng, R)
    d = output_gradients(rng, x)
    g, beta = np.full(x["g"].shape, -0.3), np.full(x["beta"].shape, 0.7)
    numbers = linattn.gated_delta_product_backward(**x | {"g": -0.3, "beta": 0.7}, **d)
    arrays = linattn.gated_delta_product_backward(**x | {"g": g, "beta": beta}, **d)
    assert isinstance(numbers.dg, float) and isinstance(numbers.dbeta, float)
    assert_near(numbers.dg, arrays.dg.sum(), 1e-12)
    assert_near(numbers.dbeta, arrays.dbeta.sum(), 1e-12)
    o, _ = linattn.gated_delta_product(**x | {"g": -0.3, "beta": 0.7})
    assert_near(o, linattn.gated_delta_product(**x | {"g": g, "beta": beta})[0], 1e-13)


@pytest.mark.parametrize("empty", ["T", "B"])
def test_no_tokens(empty, rng):
    x = inputs(rng, 2, **{empty: 0})
    o, state = linattn.gated_delta_product(**x, output_final_state=True)
    assert o.shape == (*x["q"].shape[:2], 4, 5)
    assert_same_bits(state, x["initial_state"])
    d = output_gradients(rng, x)
    assert_same_bits(
        linattn.gated_delta_product_backward(**x, **d).d_initial_state, d["d_final_state"]
    )


def test_a_pool_of_states(rng):
    x = inputs(rng, 2, np.float32, B=3, T=1)
    del x["initial_state"]
    x["q"], x["g"] = x["q"][:, 0], x["g"][:, 0]
    pool = rng.standard_normal((5, 4, 6, 5)).astype("f4")
    before, states = pool.copy(), pool[[4, 1, 0]].copy()
    o = linattn.gated_delta_product_step(**x, state=pool, state_indices=np.array([4, -1, 0]))
    expected = linattn.gated_delta_product_step(**x, state=states)
    assert not o[1].any()
    assert_same_bits((o[0], o[2], pool[4], pool[0]), (expected[0], expected[2], *states[::2]))
    assert_same_bits(pool[1:4], before[1:4])


# ---- errors ----


def test_errors_name_the_argument(rng):
    x = inputs(rng, 2, np.float32)
    for error, text, changed in (
        (ValueError, "num_householder: expected a size >= 1, got 0", {"num_householder": 0}),
        (TypeError, "num_householder: expected an int, got float", {"num_householder": 2.0}),
        (
            ValueError,
            "k: expected [B,TR,H,K] = (2, 69, 2, 6), got (2, 46, 2, 6)",
            {"num_householder": 3},
        ),
        (TypeError, "q: expected an array", {"q": None}),
        (ValueError, "v: expected H to divide HV = 3, got H = 2", {"v": x["v"][:, :, :3]}),
        (ValueError, "v: expected [B,TR,HV,V], got (46, 4, 5)", {"v": x["v"][0]}),
        (TypeError, "v: expected float32 (the dtype of q)", {"v": x["v"].astype("f8")}),
        (ValueError, "g: expected [B,T,HV] = (2, 23, 4), got (2, 46, 4)", {"g": x["beta"]}),
        (TypeError, "alpha: expected None beside g, got both", {"alpha": x["g"]}),
        (TypeError, "beta: expected an array or a number, got None", {"beta": None}),
        (ValueError, "beta: expected [B,TR,HV] = (2, 46, 4), got (2, 23, 4)", {"beta": x["g"]}),
        (ValueError, "cu_seqlens: expected packed", {"cu_seqlens": ENDS}),
        (ValueError, "initial_state: expected", {"initial_state": x["initial_state"][:1]}),
    ):
        with pytest.raises(error) as caught:
            linattn.gated_delta_product(**x | changed)
        assert text in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ([1, 23], "start at 0, got 1"),
        ([0, 46], "end at T = 23, got 46"),
        ([0, 9, 8, 23], "never to fall, got [0, 9, 8, 23]"),
        ([[0, 23]], "[N+1], got (1, 2)"),
        ([0.0, 23.0], "int32 or int64, got float64"),
    ],
)
def test_the_ends_of_sequences_are_those_of_tokens(ends, text, rng):
    x = inputs(rng, 2, packed=True) | {"cu_seqlens": np.array(ends)}
    with pytest.raises((TypeError, ValueError)) as caught:
        linattn.gated_delta_product(**x)
    assert str(caught.value).startswith("cu_seqlens: expected ") and text in str(caught.value)


def test_a_refused_step_writes_nothing(rng):
    x = inputs(rng, 2, np.float32, T=1)
    S = x.pop("initial_state")
    x["q"], x["g"], before = x["q"][:, 0], x["g"][:, 0], S.copy()
    with pytest.raises(ValueError, match="beta: expected"):
        linattn.gated_delta_product_step(**x | {"beta": x["beta"][:, :1]}, state=S)
    with pytest.raises(ValueError, match="state: expected"):
        linattn.gated_delta_product_step(**x, state=S[:, :2])
    assert_same_bits(S, before)


# ---- PyTorch ----


@pytest.mark.parametrize("R", [1, 2])
def test_torch_records_it(R, rng):
    torch = imported("torch")
    x = inputs(rng, R, packed=True)
    d = output_gradients(rng, x)
    given = {
        name: torch.from_numpy(a.copy()).requires_grad_(a.dtype.kind == "f")
        if isinstance(a, np.ndarray)
        else a
        for name, a in x.items()
    }
    out = linattn.gated_delta_product(**given, output_final_state=True)
    assert_near(out[0].detach(), linattn.gated_delta_product(**x)[0], 1e-14)
    torch.autograd.backward(out, [torch.from_numpy(a) for a in d.values()])
    grads = backward(mode="chunk", **x, **d)
    for name, a in given.items():
        if isinstance(a, torch.Tensor) and a.is_floating_point():
            assert_near(a.grad, grads[name], 1e-12, name)
