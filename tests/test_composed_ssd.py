"""ssd: Mamba-2's recurrence, against its own loop over tokens and against simple_gla."""

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
    state_dtype,
)
from support.device import imported

import linattn
from linattn import reference

SIZES = {"B": 2, "T": 41, "H": 4, "G": 2, "P": 5, "N": 6}
JUDGED = {"B": 1, "H": 64, "G": 16}  # many heads: each has its A, of which the rule needs many
ENDS = np.array([0, 13, 13, 30, 41])
OPTIONS = {
    "plain": {},
    "D": {"D": "H"},
    "D by value": {"D": "H P"},
    "z": {"z": "B T H P"},
    "softplus": {"dt_bias": "H", "dt_softplus": True},
    "limits": {"dt_bias": "H", "dt_softplus": True, "dt_limit": (0.3, 1.5)},
    "all": {
        "D": "H P",
        "z": "B T H P",
        "dt_bias": "H",
        "dt_softplus": True,
        "dt_limit": (0.3, 1.5),
        "initial_states": "S H P N",
    },
}


def inputs(rng, option="all", dtype=np.float64, packed=False, **sizes):
    """The arguments of a call. Gates have the dtype of the sums."""
    options, size = OPTIONS[option], SIZES | sizes
    if packed:
        size["B"] = 1
    size["S"] = len(ENDS) - 1 if packed else size["B"]

    def normal(letters, dtype=dtype):
        return rng.standard_normal([size[x] for x in letters.split()]).astype(dtype)

    wide = state_dtype(dtype)
    made = {
        "x": normal("B T H P"),
        "dt": normal("B T H", wide),
        "A": -np.exp(normal("H", wide)),
        "B": normal("B T G N"),
        "C": normal("B T G N"),
    }
    if "dt_softplus" not in options:
        made["dt"] = np.exp(made["dt"] - 1)
    for name, value in options.items():
        of_x = dtype if name == "z" else wide
        made[name] = normal(value, of_x) if isinstance(value, str) else value
    if packed:
        made["cu_seqlens"] = ENDS
    return made


def forward(**given):
    y, states = linattn.ssd(**given, return_final_states=True, mode="recurrent")
    return {"y": y, "states": states}


def plain(**given):
    y, states = reference.ssd(**given)
    return {"y": y, "states": states}


def backward(**given):
    grads = linattn.ssd_backward(**given, mode="recurrent")._asdict()
    return {name[2:] if name[:2] == "d_" else name[1:]: x for name, x in grads.items()}


def output_gradients(rng, given):
    S = len(given["cu_seqlens"]) - 1 if "cu_seqlens" in given else len(given["x"])
    shape = (S, *given["x"].shape[2:], given["B"].shape[3])
    wide = state_dtype(given["x"].dtype)
    return {
        "dy": rng.standard_normal(given["x"].shape).astype(given["x"].dtype),
        "d_final_states": rng.standard_normal(shape).astype(wide),
    }


# ---- against the reference ----


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(option, dtype, packed, rng):
    judged(lambda: inputs(rng, option, dtype, packed, **JUDGED), forward, plain, dtype)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backward(option, dtype, packed, rng):
    def draw():
        given = inputs(rng, option, dtype, packed, **JUDGED)
        return given | output_gradients(rng, given)

    judged(draw, backward, reference.ssd_backward, dtype, gradient=True)


@pytest.mark.parametrize("option", ["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_step(option, dtype, rng):
    """Token by token from the initial states."""

    def steps(x, dt, B, C, A, z=None, initial_states=None, **options):
        (batch, T, H, P), N = x.shape, B.shape[3]
        h = np.zeros((batch, H, P, N), state_dtype(dtype))
        h = h if initial_states is None else initial_states.copy()
        y = np.empty_like(x)
        for t in range(T):
            z_t = None if z is None else z[:, t]
            at = (a[:, t] for a in (x, dt))
            y[:, t] = linattn.ssd_step(h, *at, A, B[:, t], C[:, t], z=z_t, **options)
        return {"y": y, "states": h}

    judged(lambda: inputs(rng, option, dtype, **JUDGED), steps, plain, dtype)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_reference_by_differences(option, rng):
    given = inputs(rng, option, T=7)
    d = output_gradients(rng, given)
    grads = reference.ssd_backward(**given, **d)

    def loss():
        y, states = reference.ssd(**given)
        return (y * d["dy"]).sum() + (states * d["d_final_states"]).sum()

    arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    assert_slopes(loss, arrays, grads, rng)


@pytest.mark.parametrize("packed", [False, True])
def test_chunks_are_the_recurrence(packed, rng):
    x = inputs(rng, "all", packed=packed)
    x |= output_gradients(rng, x)
    tokens = linattn.ssd_backward(**x, mode="recurrent")
    for how in ({}, {"chunk_size": 5}, {"mode": "parallel"}):
        for one, expected in zip(linattn.ssd_backward(**x, **how), tokens, strict=True):
            assert_near(one, expected, 1e-12)
        given = {name: a for name, a in x.items() if name not in ("dy", "d_final_states")}
        assert_near(linattn.ssd(**given, **how)[0], forward(**given)["y"], 1e-12)


# ---- identities ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_options_and_steps_it_is_simple_gla(dtype, rng):
    x = inputs(rng, "plain", dtype)
    x["dt"] = np.ones_like(x["dt"])
    how = {"scale": 1, "output_final_state": True, "state_v_first": True}
    expected = linattn.simple_gla(x["C"], x["B"], x["x"], x["dt"] * x["A"], **how)
    assert_same_bits(linattn.ssd(**x, return_final_states=True), expected)


@pytest.mark.parametrize("mode", ["chunk", "recurrent", "parallel"])
def test_time_steps_are_weights_of_simple_gla(mode, rng):
    x = inputs(rng, "plain")
    y, states = linattn.ssd(**x, mode=mode, return_final_states=True)
    v = x["dt"][..., None] * x["x"]
    how = {"scale": 1, "mode": mode, "output_final_state": True, "state_v_first": True}
    o, S = linattn.simple_gla(x["C"], x["B"], v, x["dt"] * x["A"], **how)
    assert_near(y, o, 1e-13)
    assert_near(states, S, 1e-13)


def test_a_skip_and_a_gate_are_added_after(rng):
    x = inputs(rng, "plain")
    y, _ = linattn.ssd(**x)
    D, z = rng.standard_normal(SIZES["H"]), rng.standard_normal(y.shape)
    gated, _ = linattn.ssd(**x, D=D, z=z)
    assert_near(gated, (y + D[:, None] * x["x"]) * z / (1 + np.exp(-z)), 1e-14)


def test_the_limits_hold(rng):
    x = inputs(rng, "softplus")
    limited, _ = linattn.ssd(**x, dt_limit=(0.3, 1.5))
    dt = np.clip(np.log1p(np.exp(x["dt"] + x["dt_bias"])), 0.3, 1.5)
    assert (dt == 0.3).any() and (dt == 1.5).any()
    del x["dt_bias"], x["dt_softplus"]
    assert_near(limited, linattn.ssd(**x | {"dt": dt})[0], 1e-14)


def test_a_negative_time_step_is_none(rng):
    """The least time step is 0: such a token writes nothing."""
    x = inputs(rng, "plain")
    x["dt"][:, ::3] *= -1
    y, _ = linattn.ssd(**x)
    assert_same_bits(y, linattn.ssd(**x | {"dt": np.maximum(x["dt"], 0)})[0])


def test_softplus_is_its_argument_above_20(rng):
    x = inputs(rng, "plain")
    x["dt"] = rng.uniform(20.001, 30, x["dt"].shape)
    assert_same_bits(linattn.ssd(**x, dt_softplus=True), linattn.ssd(**x))
    grads = linattn.ssd_backward(x["x"], **x, dt_softplus=True)
    assert_same_bits(grads.ddt, linattn.ssd_backward(x["x"], **x).ddt)


def test_the_gradient_at_a_limit_is_one_of_torchs_clamp(rng):
    x = inputs(rng, "plain", T=4)
    x["dt"][0, :, 0] = [0.1, 0.5, 0.6, 0.05]
    grads = linattn.ssd_backward(x["x"], **x, dt_limit=(0.1, 0.5))
    assert ((grads.ddt[0, :, 0] != 0) == [True, True, False, False]).all()


@pytest.mark.parametrize("numbers", ["cu_seqlens", "seq_idx"])
def test_packed_is_separate(numbers, rng):
    x = inputs(rng, "all", packed=True)
    ends = x.pop("cu_seqlens")
    d = output_gradients(rng, x | {"cu_seqlens": ends})
    packed = {"cu_seqlens": ends}
    if numbers == "seq_idx":
        ends = np.array([0, 13, 30, 41])  # an empty sequence has no number
        packed = {"seq_idx": np.repeat([7, 3, 4], np.diff(ends))[None].astype(np.int32)}
        for given in (x, d):
            for name in given.keys() & {"initial_states", "d_final_states"}:
                given[name] = given[name][:3]
    y, states = linattn.ssd(**x, **packed, return_final_states=True)
    grads = linattn.ssd_backward(**x, **d, **packed)
    by_token = ("x", "dt", "B", "C", "z", "dy")
    sums = dict.fromkeys(("dA", "dD", "ddt_bias"), 0)
    for n, (start, end) in enumerate(pairwise(ends)):

        def one(given, n=n, at=slice(start, end)):
            return {
                name: a[:, at] if name in by_token else a[n : n + 1] if "states" in name else a
                for name, a in given.items()
            }

        y_n, state = linattn.ssd(**one(x), return_final_states=True)
        assert_near(y[:, start:end], y_n, 1e-14)
        assert_near(states[n : n + 1], state, 1e-14)
        g = linattn.ssd_backward(**one(x), **one(d))
        for name in ("dx", "ddt", "dB", "dC", "dz"):
            assert_near(getattr(grads, name)[:, start:end], getattr(g, name), 1e-13, name)
        assert_near(grads.d_initial_states[n : n + 1], g.d_initial_states, 1e-13)
        sums = {name: total + getattr(g, name) for name, total in sums.items()}
    for name, total in sums.items():
        assert_near(getattr(grads, name), total, 1e-13, name)


def test_a_split_call_is_one_call(rng):
    x = inputs(rng, "all")
    y, states = linattn.ssd(**x, return_final_states=True)
    parts, h = [], x.pop("initial_states")
    for at in (slice(0, 17), slice(17, None)):
        part = {
            name: a[:, at] if name in ("x", "dt", "B", "C", "z") else a for name, a in x.items()
        }
        y_part, h = linattn.ssd(**part, initial_states=h, return_final_states=True)
        parts.append(y_part)
    assert_near(np.concatenate(parts, 1), y, 1e-13)
    assert_near(h, states, 1e-13)


def test_numbers_stand_for_arrays(rng):
    x = inputs(rng, "plain")
    numbers = {"dt": 0.4, "A": -0.7, "D": 1.5, "dt_bias": -0.2}
    shape = x["dt"].shape
    arrays = {
        "dt": np.full(shape, 0.4),
        "A": np.full(shape[2], -0.7),
        "D": np.full(shape[2], 1.5),
        "dt_bias": np.full(shape[2], -0.2),
    }
    assert_same_bits(linattn.ssd(**x | numbers), linattn.ssd(**x | arrays))
    grads = linattn.ssd_backward(x["x"], **x | numbers)
    expected = linattn.ssd_backward(x["x"], **x | arrays)
    for name in numbers:
        total = getattr(grads, "d" + name)
        assert isinstance(total, float)
        assert_near(total, getattr(expected, "d" + name).sum(), 1e-13, name)


def test_no_tokens(rng):
    x = inputs(rng, "all", T=0)
    y, states = linattn.ssd(**x, return_final_states=True)
    assert y.shape == x["x"].shape
    assert_same_bits(states, x["initial_states"])
    d = output_gradients(rng, x)
    grads = linattn.ssd_backward(**x, **d)
    assert not grads.dA.any() and not grads.ddt_bias.any()
    assert_same_bits(grads.d_initial_states, d["d_final_states"])


def test_a_pool_of_states(rng):
    x = inputs(rng, "all", np.float32, T=1, B=3)
    pool = rng.standard_normal((5, 4, 5, 6)).astype("f4")
    before = pool.copy()
    del x["initial_states"]
    token = {name: a[:, 0] if name in ("x", "dt", "B", "C", "z") else a for name, a in x.items()}
    y = linattn.ssd_step(pool, **token, state_batch_indices=np.array([4, -1, 0]))
    assert not y[1].any()  # nothing of D x either
    states = before[[4, 1, 0]]
    expected = linattn.ssd_step(states, **token)
    assert_same_bits((y[0], y[2], pool[4], pool[0]), (expected[0], expected[2], *states[::2]))
    assert_same_bits(pool[1:4], before[1:4])


def test_decays_near_one_need_dt_in_float32(rng):
    """dt A is taken in float32 beside bfloat16 rows: with dt in bfloat16 the decay is another."""
    x = inputs(rng, "plain", BFLOAT16)
    x["dt"][...], x["A"][...] = 1.001e-3, -1.0
    y, _ = linattn.ssd(**x)
    short, _ = linattn.ssd(**x | {"dt": x["dt"].astype(BFLOAT16), "A": x["A"].astype(BFLOAT16)})
    assert y.dtype == short.dtype == BFLOAT16
    h = np.full((1, 1, 1, 1), 1e3, np.float32)
    one = np.zeros((1, 2000, 1, 1), BFLOAT16)
    how = {"initial_states": h, "return_final_states": True}
    dt = np.full((1, 2000, 1), 1.001e-3, np.float32)
    _, kept = linattn.ssd(one, dt, -1.0, one, one, **how)
    _, lost = linattn.ssd(one, dt.astype(BFLOAT16), -1.0, one, one, **how)
    assert_near(kept, h * np.exp(-2.002), 1e-5)
    assert abs(lost / kept - 1).max() > 1e-3


# ---- errors ----


def refused(kind, text, function=linattn.ssd, **changed):
    rng = np.random.default_rng(0)
    x = inputs(rng, "all", np.float32)
    if function is linattn.ssd_backward:
        x |= output_gradients(rng, x)
    with pytest.raises(kind) as error:
        function(**x | changed)
    assert text in str(error.value), error.value


def test_errors_name_the_argument():
    f4 = np.zeros((2, 41, 4, 5), np.float32)
    refused(TypeError, "x: expected an array, got <class 'list'>", x=[1.0])
    refused(
        TypeError, "x: expected float64, float32, float16 or bfloat16, got int64", x=f4.astype(int)
    )
    refused(ValueError, "x: expected [B,T,H,P], got (41, 4, 5)", x=f4[0])
    refused(ValueError, "dt: expected [B,T,H] = (2, 41, 4), got (2, 40, 4)", dt=f4[:, :40, :, 0])
    refused(TypeError, "dt: expected an array or a number, got None", dt=None)
    refused(TypeError, "dt: expected an array, got <class 'str'>", dt="1")
    refused(TypeError, "A: expected an array or a number, got None", A=None)
    refused(ValueError, "A: expected [H] = (4,), got (3,)", A=np.zeros(3, np.float32))
    refused(
        TypeError, "B: expected float32 (the dtype of x), got float64", B=np.zeros((2, 41, 2, 6))
    )
    refused(ValueError, "C: expected [B,T,G,N] = (2, 41, 2, 6), got", C=f4)
    three = np.zeros((2, 41, 3, 6), np.float32)
    refused(ValueError, "B: expected G to divide H = 4, got G = 3", B=three, C=three)
    refused(ValueError, "D: expected [H,P] = (4, 5), got (5, 4)", D=np.zeros((5, 4), np.float32))
    refused(ValueError, "D: expected [H], got (2, 41, 4, 5)", D=f4)
    refused(TypeError, "z: expected an array, got <class 'float'>", z=1.0)
    refused(ValueError, "z: expected [B,T,H,P], got (2, 41, 4)", z=f4[..., 0])
    refused(ValueError, "dt_bias: expected [H] = (4,), got (2,)", dt_bias=np.zeros(2, np.float32))
    refused(TypeError, "dt_softplus: expected True or False", dt_softplus=1)
    refused(TypeError, "dt_limit: expected a pair of numbers, got 3", dt_limit=3)
    refused(ValueError, "dt_limit: expected a pair (low, high)", dt_limit=(2.0, 1.0))
    refused(ValueError, "dt_limit: expected a pair (low, high)", dt_limit=(0.0, float("nan")))
    masked = np.ma.masked_array(f4)
    refused(TypeError, "z: expected an array without a mask", z=masked)
    zeros = np.zeros((2, 41), int)
    refused(
        ValueError, "seq_idx: expected packed sequences to have B = 1, got B = 2", seq_idx=zeros
    )
    refused(TypeError, "seq_idx: expected int32 or int64, got float64", seq_idx=zeros * 1.0)
    both = {"seq_idx": zeros, "cu_seqlens": ENDS}
    refused(ValueError, "seq_idx: expected None beside cu_seqlens", **both)


def test_errors_of_the_op_have_the_names_of_the_system():
    wrong = np.zeros((2, 4, 5, 7), np.float32)
    refused(ValueError, "initial_states: expected [N,HV,V,K] = (2, 4, 5, 6)", initial_states=wrong)
    refused(ValueError, "d_final_states: expected", linattn.ssd_backward, d_final_states=wrong)
    refused(ValueError, "dy: expected [B,T,H,P]", linattn.ssd_backward, dy=wrong)
    refused(ValueError, "chunk_size: expected >= 1, got 0", chunk_size=0)
    refused(ValueError, "cu_seqlens: expected packed", cu_seqlens=ENDS)
    x = inputs(np.random.default_rng(0), "plain", np.float32, T=1)
    token = {name: a[:, 0] if name != "A" else a for name, a in x.items()}
    state = np.zeros((2, 4, 5, 6), np.float32)
    twice = np.zeros(2, int)
    for indices, text in ((twice, "state_batch_indices: "), (twice * 1.0, "state_batch_indices: ")):
        with pytest.raises((TypeError, ValueError), match=text):
            linattn.ssd_step(state, **token, state_batch_indices=indices)
    with pytest.raises(ValueError, match="state: expected"):
        linattn.ssd_step(state[:1], **token)
    assert not state.any()


def test_a_growing_state_is_a_warning_of_the_system():
    x = inputs(np.random.default_rng(0), "plain", np.float32)
    with pytest.warns(RuntimeWarning, match="dt \\* A: expected") as caught:
        linattn.ssd(**x | {"A": -x["A"]})
    assert caught[0].filename == __file__


# ---- PyTorch ----


def tensors(torch, x, **how):
    return {
        name: torch.from_numpy(a.copy()).requires_grad_(**how) if isinstance(a, np.ndarray) else a
        for name, a in x.items()
    }


@pytest.mark.parametrize("option", OPTIONS)
def test_torch_records_it(option, rng):
    torch = imported("torch")
    x = inputs(rng, option)
    d = output_gradients(rng, x)
    given = tensors(torch, x)
    y, states = linattn.ssd(**given, return_final_states=True)
    assert_near(y.detach(), linattn.ssd(**x)[0], 1e-14)
    torch.autograd.backward((y, states), [torch.from_numpy(a) for a in d.values()])
    grads = backward(**x, **d)
    for name, a in given.items():
        if isinstance(a, torch.Tensor):
            assert_near(a.grad, grads[name], 1e-12, name)


def test_torch_has_the_passes_of_numpy(rng):
    torch = imported("torch")
    x = inputs(rng, "all", np.float32, packed=True)
    d = output_gradients(rng, x)
    make = torch.from_numpy
    given, d_given = (
        {n: make(a) if isinstance(a, np.ndarray) else a for n, a in y.items()} for y in (x, d)
    )
    found = linattn.ssd_backward(**given, **d_given)
    for one, expected in zip(found, linattn.ssd_backward(**x, **d), strict=True):
        assert isinstance(one, torch.Tensor)
        assert_near(one, expected, 1e-5)
    del given["cu_seqlens"]
    seq_idx = torch.repeat_interleave(torch.arange(4), make(np.diff(ENDS)))[None]
    given["initial_states"] = given["initial_states"][[0, 2, 3]]
    y, _ = linattn.ssd(**given, seq_idx=seq_idx)
    assert_near(y, linattn.ssd(**x)[0], 1e-5)


def test_torch_in_bfloat16_with_gates_in_float32(rng):
    torch = imported("torch")
    x = inputs(rng, "all", np.float32)
    given = {name: torch.from_numpy(a) if isinstance(a, np.ndarray) else a for name, a in x.items()}
    short = {n: a.bfloat16() if n in ("x", "B", "C", "z") else a for n, a in given.items()}
    y, _ = linattn.ssd(**short)
    assert y.dtype == torch.bfloat16
    rounded = {n: a.float() if n in ("x", "B", "C", "z") else a for n, a in short.items()}
    assert_near(y.float(), linattn.ssd(**rounded)[0], 2e-2)


def test_what_no_pass_records_is_refused(rng):
    torch = imported("torch")
    given = tensors(torch, inputs(rng, "plain"))
    with pytest.raises(ValueError, match=r"dy: requires gradients.*dy.detach\(\)|x: requires"):
        linattn.ssd_backward(given["x"], **given)
    with torch.no_grad():
        linattn.ssd_backward(given["x"], **given)
    with pytest.raises(TypeError, match="dt: expected an array of torch like x"):
        linattn.ssd(**given | {"dt": np.ones((2, 41, 4))})
