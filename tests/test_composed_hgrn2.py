"""hgrn2, against its own loop over tokens and against gla."""

from itertools import pairwise

import numpy as np
import pytest
from support.compare import assert_same_bits
from support.composed import DTYPES, assert_near, assert_slopes, judged, state_dtype
from support.device import imported

import linattn
from linattn import reference

ENDS = np.array([0, 7, 7, 23])
BY_TOKEN = ("q", "g", "v", "do")


def inputs(rng, dtype=np.float64, packed=False, B=2, T=23, H=3, K=6, V=5):
    B, wide = 1 if packed else B, state_dtype(dtype)
    N = len(ENDS) - 1 if packed else B
    made = {
        "q": rng.standard_normal((B, T, H, K)).astype(dtype),
        "g": -rng.exponential(0.5, (B, T, H, K)).astype(wide),
        "v": rng.standard_normal((B, T, H, V)).astype(dtype),
        "initial_state": rng.standard_normal((N, H, K, V)).astype(wide),
    }
    return made | ({"cu_seqlens": ENDS} if packed else {})


def output_gradients(rng, x):
    S = x["initial_state"]
    return {
        "do": rng.standard_normal(x["v"].shape).astype(x["v"].dtype),
        "d_final_state": rng.standard_normal(S.shape).astype(S.dtype),
    }


def forward(**x):
    o, state = linattn.hgrn2(**x, output_final_state=True, mode="recurrent")
    return {"o": o, "state": state}


def plain(**x):
    o, state = reference.hgrn2(**x)
    return {"o": o, "state": state}


def backward(mode="recurrent", **x):
    grads = linattn.hgrn2_backward(**x, mode=mode)._asdict()
    return {
        name.removeprefix("d_").removeprefix("d"): g for name, g in grads.items() if g is not None
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward(dtype, packed, rng):
    judged(lambda: inputs(rng, dtype, packed), forward, plain, dtype)

    def draw():
        x = inputs(rng, dtype, packed)
        return x | output_gradients(rng, x)

    judged(draw, backward, reference.hgrn2_backward, dtype, gradient=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step(dtype, rng):
    def steps(q, g, v, initial_state):
        S = initial_state.copy()
        o = [linattn.hgrn2_step(q[:, t], g[:, t], v[:, t], state=S) for t in range(q.shape[1])]
        return {"o": np.stack(o, 1), "state": S}

    judged(lambda: inputs(rng, dtype), steps, plain, dtype)


def test_the_reference_by_differences(rng):
    x = inputs(rng, T=6)
    d = output_gradients(rng, x)

    def loss():
        o, state = reference.hgrn2(**x, scale=0.7)
        return (o * d["do"]).sum() + (state * d["d_final_state"]).sum()

    assert_slopes(loss, x, reference.hgrn2_backward(**x, **d, scale=0.7), rng)


# ---- identities ----


def test_it_is_gla_of_what_is_forgotten(rng):
    x = inputs(rng)
    k = -np.expm1(x["g"])
    final = {"output_final_state": True, "initial_state": x["initial_state"]}
    assert_same_bits(
        linattn.hgrn2(**x, output_final_state=True),
        linattn.gla(x["q"], k, x["v"], x["g"], scale=1, **final),
    )
    assert_same_bits(
        linattn.hgrn2(**x, scale=None), linattn.hgrn2(**x, scale=x["q"].shape[3] ** -0.5)
    )


def test_a_gate_near_one_keeps_its_digits(rng):
    """f = 1 - 1e-9 is 1 in float32, and still 1e-9 of the input is written."""
    x = inputs(rng, np.float32)
    x["g"][...] = -1e-9
    x["initial_state"][...] = 0
    o, _ = linattn.hgrn2(**x)
    exact, _ = reference.hgrn2(**x)
    assert_near(o, exact, 1e-6)
    assert np.abs(exact).max() > 1e-10


def test_a_gate_of_zero_forgets_all(rng):
    x = inputs(rng)
    x["g"][:, 9] = -np.inf
    d = output_gradients(rng, x)
    o, _ = linattn.hgrn2(**x)
    at = {name: a[:, 9:] if name in BY_TOKEN else a for name, a in x.items()}
    at["initial_state"] = 0 * at["initial_state"] + 5
    assert_near(o[:, 9:], linattn.hgrn2(**at)[0], 1e-13)
    grads = linattn.hgrn2_backward(**x, **d)
    assert np.isfinite(grads.dg).all() and not grads.dg[:, 9].any()


@pytest.mark.parametrize("how", [{}, {"chunk_size": 7}, {"mode": "parallel"}])
def test_modes_agree(how, rng):
    x = inputs(rng, packed=True)
    d = output_gradients(rng, x)
    assert_near(linattn.hgrn2(**x, **how)[0], reference.hgrn2(**x)[0], 1e-12)
    grads, expected = linattn.hgrn2_backward(**x, **d, **how), reference.hgrn2_backward(**x, **d)
    for name in ("q", "g", "v"):
        assert_near(getattr(grads, "d" + name), expected[name], 1e-12, name)


def test_packed_is_separate(rng):
    x = inputs(rng, packed=True)
    ends = x.pop("cu_seqlens")
    o, states = linattn.hgrn2(**x, cu_seqlens=ends, output_final_state=True)
    for n, (start, end) in enumerate(pairwise(ends)):
        one = {name: a[:, start:end] if name in BY_TOKEN else a[n : n + 1] for name, a in x.items()}
        o_n, state = linattn.hgrn2(**one, output_final_state=True)
        assert_near(o[:, start:end], o_n, 1e-14)
        assert_near(states[n : n + 1], state, 1e-14)


def test_a_number_stands_for_an_array(rng):
    x = inputs(rng)
    d = output_gradients(rng, x)
    full = x | {"g": np.full(x["g"].shape, -0.3)}
    assert_same_bits(linattn.hgrn2(**x | {"g": -0.3}), linattn.hgrn2(**full))
    number, array = (linattn.hgrn2_backward(**y, **d).dg for y in (x | {"g": -0.3}, full))
    assert isinstance(number, float)
    assert_near(number, array.sum(), 1e-12)


# ---- errors ----


def test_errors_name_the_argument(rng):
    x = inputs(rng, np.float32)
    for error, text, changed in (
        (TypeError, "q: expected an array", {"q": [1.0]}),
        (TypeError, "g: expected an array or a number, got None", {"g": None}),
        (ValueError, "g: expected [B,T,H,K] = (2, 23, 3, 6), got (2, 23, 3, 5)", {"g": x["v"]}),
        (ValueError, "v: expected [B,T,H,V] = (2, 23, 3, 4)", {"v": x["v"][:, :, :2, :4]}),
        (TypeError, "v: expected float32 (the dtype of q)", {"v": x["v"].astype("f8")}),
        (ValueError, "initial_state: expected", {"initial_state": x["initial_state"][:1]}),
        (ValueError, "mode: ", {"mode": "chunks"}),
    ):
        with pytest.raises(error) as caught:
            linattn.hgrn2(**x | changed)
        assert text in str(caught.value), caught.value
    with pytest.warns(RuntimeWarning, match="g: expected"):
        linattn.hgrn2(**x | {"g": -x["g"]})


# ---- PyTorch ----


def test_torch_records_it(rng):
    torch = imported("torch")
    x = inputs(rng)
    d = output_gradients(rng, x)
    given = {name: torch.from_numpy(a.copy()).requires_grad_() for name, a in x.items()}
    out = linattn.hgrn2(**given, output_final_state=True)
    torch.autograd.backward(out, [torch.from_numpy(a) for a in d.values()])
    grads = backward(mode="chunk", **x, **d)
    for name, a in given.items():
        assert_near(a.grad, grads[name], 1e-12, name)
