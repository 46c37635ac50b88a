"""mlstm, against its own loop over tokens."""

from itertools import pairwise

import numpy as np
import pytest
from support.compare import assert_same_bits
from support.composed import (
    BFLOAT16,
    DTYPES,
    assert_near,
    assert_slopes,
    judged,
    slopes,
    state_dtype,
)
from support.device import imported

import linattn
from linattn import reference

ENDS = np.array([0, 7, 7, 23])
BY_TOKEN = ("q", "k", "v", "i", "f", "dh")


def inputs(rng, dtype=np.float64, packed=False, size=1.0, B=2, T=23, H=2, HV=4, K=6, V=5):
    """Gates about as large as `size`."""
    B, wide = 1 if packed else B, state_dtype(dtype)
    N = len(ENDS) - 1 if packed else B

    def normal(*shape, dtype=dtype, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(dtype)

    made = {
        "q": normal(B, T, H, K),
        "k": normal(B, T, H, K),
        "v": normal(B, T, HV, V),
        "i": normal(B, T, HV, dtype=wide, scale=size),
        "f": normal(B, T, HV, dtype=wide, scale=size),
        "initial_state": (
            normal(N, HV, K, V, dtype=wide),
            normal(N, HV, K, dtype=wide),
            normal(N, HV, dtype=wide),
        ),
    }
    return made | ({"cu_seqlens": ENDS} if packed else {})


def output_gradients(rng, x):
    C, n, _ = x["initial_state"]
    return {
        "dh": rng.standard_normal(x["v"].shape).astype(x["v"].dtype),
        "d_final_state": tuple(rng.standard_normal(y.shape).astype(y.dtype) for y in (C, n)),
    }


def outputs(h, state):
    """C and n without their unit, which may differ by the rounding of m."""
    C, n, m = state
    unit = np.exp(m.astype(np.longdouble))
    C, n = (C * unit[..., None, None]).astype(C.dtype), (n * unit[..., None]).astype(n.dtype)
    return {"h": h, "C": C, "n": n, "m": m}


def forward(**x):
    return outputs(*linattn.mlstm(**x, output_final_state=True, mode="recurrent"))


def plain(**x):
    return outputs(*reference.mlstm(**x))


def backward(mode="recurrent", **x):
    grads = linattn.mlstm_backward(**x, mode=mode)._asdict()
    state = grads.pop("d_initial_state")
    named = {name[1:]: g for name, g in grads.items()}
    return named if state is None else named | dict(zip("Cn", state, strict=True))


@pytest.mark.parametrize("eps", [0.0, 0.2])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_backward(dtype, packed, eps, rng):
    judged(lambda: inputs(rng, dtype, packed) | {"eps": eps}, forward, plain, dtype)

    def draw():
        x = inputs(rng, dtype, packed) | {"eps": eps}
        return x | output_gradients(rng, x)

    judged(draw, backward, reference.mlstm_backward, dtype, gradient=True)


def steps(q, k, v, i, f, initial_state, eps):
    state = tuple(x.copy() for x in initial_state)
    h = [
        linattn.mlstm_step(*(x[:, t] for x in (q, k, v, i, f)), state=state, eps=eps)
        for t in range(q.shape[1])
    ]
    return np.stack(h, 1), state


@pytest.mark.parametrize("eps", [0.0, 0.2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step(dtype, eps, rng):
    judged(
        lambda: inputs(rng, dtype) | {"eps": eps}, lambda **x: outputs(*steps(**x)), plain, dtype
    )


def test_the_reference_by_differences(rng):
    """C and n in the unit of the final state as it is: a loss of them that moves no m."""
    x = inputs(rng, T=6)
    d = output_gradients(rng, x)
    dC, dn = d["d_final_state"]
    unit = reference.mlstm(**x)[1][2]

    def loss():
        h, (C, n, m) = reference.mlstm(**x)
        scale = np.exp(m - unit)
        of_state = (C * scale[..., None, None] * dC).sum() + (n * scale[..., None] * dn).sum()
        return (h * d["dh"]).sum() + of_state

    C, n, m = x["initial_state"]
    arrays = {name: a for name, a in x.items() if name in BY_TOKEN} | {"C": C, "n": n}
    grads = reference.mlstm_backward(**x, **d)
    assert_slopes(loss, arrays, grads, rng)
    dh = d["dh"]
    d["dh"], dC[...], dn[...] = dh, 0, 0
    # h has no part of m of its own: with C and n of the same memory it is the same
    before = reference.mlstm(**x)[0]
    m += 3
    C *= np.exp(-3)
    n *= np.exp(-3)
    assert_near(reference.mlstm(**x)[0], before, 1e-13)


@pytest.mark.parametrize("eps", [0.0, 0.3])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_the_gradients_by_differences(size, eps, rng):
    """Of linattn's own function, both branches of the denominator among the tokens. With eps the
    gates have a part by way of m."""
    x = inputs(rng, T=9, size=size) | {"eps": eps}
    dh = rng.standard_normal(x["v"].shape)
    grads = linattn.mlstm_backward(dh, **x)
    for name in ("q", "k", "v", "i", "f"):
        dx = getattr(grads, "d" + name)
        bound = 1e-6 * max(1.0, np.abs(dx).max())
        for at, slope in slopes(lambda: (linattn.mlstm(**x)[0] * dh).sum(), x[name], rng):
            assert abs(dx.reshape(-1)[at] - slope) < bound, (name, at)


# ---- identities ----


@pytest.mark.parametrize("size", [30.0, 300.0, 3000.0])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, BFLOAT16], ids=str)
def test_large_gates_stay_finite(dtype, size, rng):
    x = inputs(rng, np.dtype(dtype), size=size)
    h, state = linattn.mlstm(**x, output_final_state=True)
    for a in (h, *state):
        assert np.isfinite(a.astype(np.float64)).all()
    grads = linattn.mlstm_backward(x["v"], **x)
    for a in (*grads[:5], *grads.d_initial_state):
        assert np.isfinite(a.astype(np.float64)).all()
    if dtype == np.float64:
        assert_near(h, reference.mlstm(**x, dtype=np.longdouble)[0], 1e-10)


def test_a_query_of_zero_reads_zero(rng):
    """0 / max(0, exp(-m)), where exp(-m) is too small for a float32."""
    x = inputs(rng, np.float32)
    x["i"][...] = 300
    x["q"][:, 5] = 0
    assert not linattn.mlstm(**x)[0][:, 5].any()


def test_m_is_the_running_maximum(rng):
    x = inputs(rng)
    for T in (0, 1, 2, 3, 17, 23):
        short = {name: a[:, :T] if name in BY_TOKEN else a for name, a in x.items()}
        _, (_, _, m) = linattn.mlstm(**short, output_final_state=True)
        expected = x["initial_state"][2].copy()
        for t in range(T):
            expected = np.maximum(-np.logaddexp(0, -x["f"][:, t]) + expected, x["i"][:, t])
        assert_near(m, expected, 1e-14)


def test_h_does_not_depend_on_the_unit(rng):
    x = inputs(rng)
    C, n, m = x.pop("initial_state")
    h, _ = linattn.mlstm(**x, initial_state=(C, n, m))
    c = np.exp(-5.0)
    again, _ = linattn.mlstm(**x, initial_state=(c * C, c * n, m + 5))
    assert_near(again, h, 1e-13)


def test_long_memories_in_float32(rng):
    """m is taken in float64: its rounding in float32 would be an error of each of 4000 decays."""
    T = 4000
    x = inputs(rng, np.float32, B=1, T=T, H=1, HV=1)
    x["f"] = (9 + rng.standard_normal((1, T, 1))).astype("f4")
    x["i"][:, 1:] = -9
    x["i"][:, 0] = 80
    _, (C, n, m) = linattn.mlstm(**x, output_final_state=True)
    _, exact = reference.mlstm(**x)
    assert abs(m - exact[2]).max() < 1e-5  # a float32 near 80
    found, expected = (
        y[0].astype("f8") * np.exp(y[2].astype("f8"))[..., None, None] for y in ((C, n, m), exact)
    )
    assert_near(found, expected, 2e-6)


def test_the_state_is_in_the_unit_of_the_rounded_m(rng):
    """A float32 near 250 is off by up to 8e-6, which would be an error of C and n."""
    x = inputs(rng, np.float32, B=8, T=3)
    x["i"][:, 0] += 250
    x["i"][:, 1:] = -9
    _, (C, n, m) = linattn.mlstm(**x, output_final_state=True)
    _, (C64, n64, m64) = reference.mlstm(**x)
    between = np.exp(m.astype("f8") - m64)
    assert abs(between - 1).max() > 4e-6
    assert_near(C * between[..., None, None], C64, 1e-6)
    assert_near(n * between[..., None], n64, 1e-6)
    d = output_gradients(rng, x)
    grads = linattn.mlstm_backward(**x, **d)
    dC, dn = d["d_final_state"]
    in_its_unit = dC / between[..., None, None], dn / between[..., None]
    expected = reference.mlstm_backward(**x | d | {"d_final_state": in_its_unit})
    assert_near(grads.dv, expected["v"], 1e-5)


@pytest.mark.parametrize("how", [{}, {"chunk_size": 7}, {"mode": "parallel"}, {"scale": 0.3}])
def test_modes_and_options_agree(how, rng):
    x = inputs(rng, packed=True)
    d, scale = output_gradients(rng, x), how.get("scale")
    assert_near(linattn.mlstm(**x, **how)[0], reference.mlstm(**x, scale=scale)[0], 1e-12)
    grads = linattn.mlstm_backward(**x, **d, **how)
    expected = reference.mlstm_backward(**x, **d, scale=scale)
    for name in ("q", "k", "v", "i", "f"):
        assert_near(getattr(grads, "d" + name), expected[name], 1e-12, name)


def test_packed_is_separate(rng):
    x = inputs(rng, packed=True)
    d = output_gradients(rng, x)
    ends = x.pop("cu_seqlens")
    h, states = linattn.mlstm(**x, cu_seqlens=ends, output_final_state=True)
    grads = linattn.mlstm_backward(**x, **d, cu_seqlens=ends)
    for s, (start, end) in enumerate(pairwise(ends)):

        def one(given, s=s, at=slice(start, end)):
            return {
                name: a[:, at] if name in BY_TOKEN else tuple(y[s : s + 1] for y in a)
                for name, a in given.items()
            }

        h_s, state = linattn.mlstm(**one(x), output_final_state=True)
        assert_near(h[:, start:end], h_s, 1e-13)
        for whole, part in zip(states, state, strict=True):
            assert_near(whole[s : s + 1], part, 1e-13)
        g = linattn.mlstm_backward(**one(x), **one(d))
        for name in ("dq", "dk", "dv", "di", "df"):
            assert_near(getattr(grads, name)[:, start:end], getattr(g, name), 1e-12, name)
        for whole, part in zip(grads.d_initial_state, g.d_initial_state, strict=True):
            assert_near(whole[s : s + 1], part, 1e-12)


def test_a_split_call_is_one_call(rng):
    """Forward; and backward, with the second call's d_initial_state as the first's."""
    x = inputs(rng)
    d = output_gradients(rng, x)
    h, state = linattn.mlstm(**x, output_final_state=True)
    grads = linattn.mlstm_backward(**x, **d)
    S0 = x.pop("initial_state")
    first, second = (
        {name: a[:, at] for name, a in x.items()} for at in (slice(0, 9), slice(9, None))
    )
    h1, S1 = linattn.mlstm(**first, initial_state=S0, output_final_state=True)
    h2, S2 = linattn.mlstm(**second, initial_state=S1, output_final_state=True)
    assert_near(np.concatenate([h1, h2], 1), h, 1e-13)
    for one, expected in zip(S2, state, strict=True):
        assert_near(one, expected, 1e-13)
    last = {"d_final_state": d["d_final_state"], "initial_state": S1}
    g2 = linattn.mlstm_backward(d["dh"][:, 9:], **second, **last)
    more = {"d_final_state": g2.d_initial_state, "initial_state": S0}
    g1 = linattn.mlstm_backward(d["dh"][:, :9], **first, **more)
    for name in ("dq", "dk", "dv", "di", "df"):
        joined = np.concatenate([getattr(g1, name), getattr(g2, name)], 1)
        assert_near(joined, getattr(grads, name), 1e-12, name)
    for one, expected in zip(g1.d_initial_state, grads.d_initial_state, strict=True):
        assert_near(one, expected, 1e-12)


def test_numbers_stand_for_arrays(rng):
    x = inputs(rng)
    shape = x["i"].shape
    full = x | {"i": np.full(shape, 0.3), "f": np.full(shape, 1.5)}
    numbers = x | {"i": 0.3, "f": 1.5}
    assert_same_bits(linattn.mlstm(**numbers), linattn.mlstm(**full))
    number, array = (linattn.mlstm_backward(x["v"], **y) for y in (numbers, full))
    for name in ("di", "df"):
        assert isinstance(getattr(number, name), float)
        assert_near(getattr(number, name), getattr(array, name).sum(), 1e-12)


def test_a_pool_of_states(rng):
    x = inputs(rng, np.float32, B=3, T=1)
    token = {name: a[:, 0] for name, a in x.items() if name in BY_TOKEN}
    pool = tuple(a for a in inputs(rng, np.float32, B=5)["initial_state"])
    before = tuple(a.copy() for a in pool)
    states = tuple(a[[4, 1, 0]].copy() for a in pool)
    h = linattn.mlstm_step(**token, state=pool, state_indices=np.array([4, -1, 0]))
    expected = linattn.mlstm_step(**token, state=states)
    assert not h[1].any()
    for whole, old, part in zip(pool, before, states, strict=True):
        assert_same_bits((whole[4], whole[0]), (part[0], part[2]))
        assert_same_bits(whole[1:4], old[1:4])
    assert_same_bits((h[0], h[2]), (expected[0], expected[2]))
    for wrong in ([5, 0, 1], [0, 0, 1]):
        old = tuple(a.copy() for a in pool)
        with pytest.raises(ValueError, match="state_indices: "):
            linattn.mlstm_step(**token, state=pool, state_indices=np.array(wrong))
        assert_same_bits(pool, old)


# ---- errors ----


def test_errors_name_the_argument(rng):
    x = inputs(rng, np.float32)
    C, n, m = x["initial_state"]
    for error, text, changed in (
        (TypeError, "q: expected an array", {"q": [1.0]}),
        (ValueError, "k: expected [B,T,H,K] = (2, 23, 2, 6), got", {"k": x["v"]}),
        (ValueError, "v: expected H to divide HV = 3, got H = 2", {"v": x["v"][:, :, :3]}),
        (TypeError, "i: expected an array or a number, got None", {"i": None}),
        (ValueError, "f: expected [B,T,HV] = (2, 23, 4), got (2, 23, 3)", {"f": x["f"][..., :3]}),
        (TypeError, "initial_state: expected (C, n, m), got <class", {"initial_state": C}),
        (ValueError, "initial_state: expected (C, n, m), got 2", {"initial_state": (C, n)}),
        (ValueError, "initial_state: n: expected [N,HV,K]", {"initial_state": (C, m, m)}),
        (
            TypeError,
            "initial_state: m: expected float32, got float64",
            {"initial_state": (C, n, m.astype("f8"))},
        ),
        (ValueError, "cu_seqlens: expected packed", {"cu_seqlens": ENDS}),
        (ValueError, "chunk_size: expected >= 1", {"chunk_size": 0}),
        (TypeError, "eps: expected a number, got str", {"eps": "1"}),
        (ValueError, "eps: expected a finite number >= 0, got -1.0", {"eps": -1.0}),
    ):
        with pytest.raises(error) as caught:
            linattn.mlstm(**x | changed)
        assert text in str(caught.value), caught.value
    with pytest.raises(TypeError, match="d_final_state: expected the pair"):
        linattn.mlstm_backward(x["v"], **x, d_final_state=C)
    token = {name: a[:, 0] for name, a in x.items() if name in BY_TOKEN}
    before = tuple(a.copy() for a in (C, n, m))
    for state, text in (
        ((C, n[:1], m), "state: n: expected [B,HV,K] = (2, 4, 6), got (1, 4, 6)"),
        ((C.astype("f8"), n, m), "state: C: expected float32 or bfloat16, got float64"),
        ((C[..., ::2], n, m), "state: C: "),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            linattn.mlstm_step(**token, state=state)
        assert text in str(caught.value), caught.value
    n.flags.writeable = False
    with pytest.raises(ValueError, match="state: n: expected a writable array"):
        linattn.mlstm_step(**token, state=(C, n, m))
    assert_same_bits((C, n, m), before)


# ---- PyTorch ----


def tensors(torch, x, grad=False):
    return {
        name: tuple(torch.from_numpy(b.copy()).requires_grad_(grad) for b in a)
        if isinstance(a, tuple)
        else a
        if isinstance(a, float)
        else torch.from_numpy(a.copy()).requires_grad_(grad and a.dtype.kind == "f")
        for name, a in x.items()
    }


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("eps", [0.0, 0.3])
def test_torch_records_it(packed, eps, rng):
    torch = imported("torch")
    x = inputs(rng, packed=packed) | {"eps": eps}
    d = output_gradients(rng, x)
    given = tensors(torch, x, grad=True)
    h, (C, n, m) = linattn.mlstm(**given, output_final_state=True)
    assert not m.requires_grad
    assert_near(h.detach(), linattn.mlstm(**x)[0], 1e-14)
    torch.autograd.backward(
        (h, C, n), [torch.from_numpy(a) for a in (d["dh"], *d["d_final_state"])]
    )
    grads = backward(mode="chunk", **x, **d)
    for name in ("q", "k", "v", "i", "f"):
        assert_near(given[name].grad, grads[name], 1e-12, name)
    for name, part in zip("Cn", given["initial_state"], strict=False):
        assert_near(part.grad, grads[name], 1e-12, name)


def test_torch_has_the_passes_of_numpy(rng):
    torch = imported("torch")
    x = inputs(rng, np.float32, packed=True)
    given = tensors(torch, x)
    grads, expected = (
        linattn.mlstm_backward(given["v"], **given),
        linattn.mlstm_backward(x["v"], **x),
    )
    for one, its in zip(grads[:5], expected[:5], strict=True):
        assert isinstance(one, torch.Tensor)
        assert_near(one, its, 1e-5)
    token = {name: a[:, 0] for name, a in given.items() if name in BY_TOKEN}
    state = tuple(a[:1].clone() for a in given["initial_state"])
    token_of_numpy = {name: a[:, 0] for name, a in x.items() if name in BY_TOKEN}
    state_of_numpy = tuple(a[:1].copy() for a in x["initial_state"])
    h = linattn.mlstm_step(**token, state=state)
    assert_near(h, linattn.mlstm_step(**token_of_numpy, state=state_of_numpy), 1e-6)
    for one, its in zip(state, state_of_numpy, strict=True):
        assert_near(one, its, 1e-6)
