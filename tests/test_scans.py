"""linattn.scans: each against its reference by the acceptance rule, and what all promise."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from support import device
from support.compare import assert_same_bits, snapshot
from support.composed import DTYPES, assert_near, assert_slopes, judged
from support.device import imported
from support.device import ops as linattn
from support.scans import (
    SCANS,
    SHAPES,
    as_reals,
    ends_of,
    every,
    gradients,
    judge_gradients,
    of_dtypes,
    reference_gradients,
    run_reference,
)

from linattn import _linattn


def run(scan, arrays, **keywords):
    y, state = scan.forward(**arrays, **scan.keywords, output_final_state=True, **keywords)
    return {"y": y, "state": as_reals(state)}


# ---- values ----


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@of_dtypes
def test_forward(scan, shape, dtype, rng):
    judged(
        lambda: {"arrays": scan.draw(rng, dtype, **shape)},
        lambda arrays: run(scan, arrays),
        lambda arrays, dtype: run_reference(scan, dtype, arrays),
        dtype,
    )


@pytest.mark.parametrize("shape", [*SHAPES[:3], *SHAPES[4:]], ids=str)
@of_dtypes
def test_backward(scan, shape, dtype, rng):
    def draw():
        arrays = scan.draw(rng, dtype, **shape)
        dy = rng.standard_normal((shape["B"], shape["T"], shape["D"])).astype(dtype)
        d_state = scan.draw_state(rng, arrays, shape["B"])
        return {"dy": dy, "d_state": d_state, "arrays": arrays}

    judged(
        draw,
        lambda dy, d_state, arrays: gradients(scan, dy, d_state, arrays),
        lambda dy, d_state, arrays, dtype: reference_gradients(scan, dtype, dy, d_state, arrays),
        dtype,
        gradient=True,
    )


@pytest.mark.parametrize("S", [1, 4])
@every
def test_gradients_of_long_sequences(scan, S, rng):
    """A GPU cuts a sequence of 512 tokens into pieces, which it goes through side by side."""
    judge_gradients(scan, rng, DTYPES[0], S, B=1, T=600, D=8, N=4, G=2)


@every
def test_packed_sequences_are_separate_calls(scan, rng):
    ends = ends_of(rng, 50)
    arrays = scan.draw(rng, B=1, T=50, S=4)
    dy = rng.standard_normal((1, 50, 6))
    packed = run(scan, arrays, cu_seqlens=ends)
    grads = gradients(scan, dy, None, arrays, cu_seqlens=ends)
    want = reference_gradients(scan, np.longdouble, dy, None, arrays, cu_seqlens=ends)
    for name, x in grads.items():
        assert_near(x, want[name], 1e-12, name)
    for n, (start, end) in enumerate(pairwise(ends)):
        one = {name: x[:, start:end] if name in scan.tokens else x for name, x in arrays.items()}
        one["initial_state"] = arrays["initial_state"][n : n + 1]
        alone = run(scan, one)
        assert_same_bits(packed["y"][:, start:end], alone["y"])
        assert_same_bits(packed["state"][n : n + 1], alone["state"])


@every
def test_cut_anywhere_and_go_on(scan, rng):
    arrays = scan.draw(rng, T=40)
    whole = run(scan, arrays)
    for cut in (0, 1, 16, 23, 40):
        parts = [
            {name: x[:, at] if name in scan.tokens else x for name, x in arrays.items()}
            for at in (slice(0, cut), slice(cut, 40))
        ]
        y, state = scan.forward(**parts[0], **scan.keywords, output_final_state=True)
        parts[1]["initial_state"] = state
        rest = run(scan, parts[1])
        found = {"y": np.concatenate([y, rest["y"]], 1), "state": rest["state"]}
        if device.on_host() or scan.name not in ("hgrn", "rg_lru"):
            assert_same_bits(found, whole)
            continue
        for name, x in found.items():  # a GPU joins the tokens of a tile, which begins at the cut
            assert_near(x, whole[name], 1e-14, name)


def one_token(scan, arrays, t):
    return {
        name: np.ascontiguousarray(x[:, t]) if name in scan.tokens else x
        for name, x in arrays.items()
        if name != "initial_state"
    }


@of_dtypes
def test_steps_are_the_sequence(scan, dtype, rng):
    arrays = scan.draw(rng, dtype, T=7)
    state = arrays["initial_state"].copy()
    y, last = scan.forward(**arrays, **scan.keywords, output_final_state=True)
    ys = [scan.step(state, **one_token(scan, arrays, t), **scan.keywords) for t in range(7)]
    bound = 1e-12 if dtype == np.float64 else 4 * float(ml_dtypes.finfo(dtype).eps)
    assert_near(np.stack(ys, 1).astype(float), y.astype(float), bound)
    assert_near(as_reals(state), as_reals(last), 1e-12 if dtype == np.float64 else 1e-5)


@every
def test_steps_pick_their_states(scan, rng):
    arrays = scan.draw(rng, T=1, B=3)
    pool = scan.complex_or_real(rng, (5, *arrays["initial_state"].shape[1:]))
    before, picked = pool.copy(), np.array([4, -1, 0])
    token = one_token(scan, arrays, 0)
    y = scan.step(pool, **token, **scan.keywords, state_indices=picked)
    states = before[[4, 1, 0]].copy()
    want = scan.step(states, **token, **scan.keywords)
    assert_same_bits(y[[0, 2]], want[[0, 2]])
    assert not y[1].any()
    assert_same_bits(pool[[4, 0]], states[[0, 2]])
    assert_same_bits(pool[[1, 2, 3]], before[[1, 2, 3]])


@every
def test_gradients_are_differences(scan, rng):
    arrays = scan.draw(rng, T=9, D=4, N=3)
    dy = rng.standard_normal((2, 9, 4))
    d_state = scan.draw_state(rng, arrays, 2)
    made = gradients(scan, dy, d_state, arrays)

    def loss():
        y, state = scan.forward(**arrays, **scan.keywords, output_final_state=True)
        return (y * dy).sum() + (state * np.conj(d_state)).real.sum()

    flat = {
        name: x.view(np.float64) if np.iscomplexobj(x) else x
        for name, x in arrays.items()
        if name in made
    }
    assert_slopes(loss, flat, made, rng, bound=2e-6)


# ---- identities ----


def test_a_rate_for_all_numbers_is_ssd(rng):
    """Mamba-2 with a head for each channel: its state is [1,N] there."""
    scan = SCANS[0]
    arrays = scan.draw(rng, T=30, G=2, D=6, N=5)
    rates = arrays["A"][:, :1]
    arrays["A"] = np.repeat(rates, 5, 1)
    y, state = scan.forward(**arrays, output_final_state=True)
    want, last = linattn.ssd(
        arrays["u"][..., None],
        arrays["delta"],
        rates[:, 0],
        arrays["B"],
        arrays["C"],
        initial_states=arrays["initial_state"][:, :, None],
        return_final_states=True,
    )
    assert_near(y, want[..., 0], 1e-13)
    assert_near(state, last[:, :, 0], 1e-13)


def test_s4d_is_a_convolution(rng):
    arrays = SCANS[3].draw(rng, B=1, T=40, D=3, N=4)
    y, _ = linattn.s4d(**arrays)
    dt, A, B, C = (arrays[name] for name in ("dt", "A", "B", "C"))
    L = dt[:, None] * A
    powers = np.exp(L[..., None] * np.arange(41))
    kernel = 2 * np.einsum("dn,dnt->dt", C * (np.exp(L) - 1) / A * B, powers[..., :-1]).real
    want = np.stack([np.convolve(arrays["u"][0, :, d], kernel[d])[:40] for d in range(3)], 1)
    first = 2 * np.einsum("dn,dnt->td", C * arrays["initial_state"][0], powers[..., 1:]).real
    assert_near(y[0], want + first + arrays["D"] * arrays["u"][0], 1e-12)


@pytest.mark.parametrize("scan", SCANS[6:8], ids=repr)
def test_single_numbers_are_gla_of_one_key(scan, rng):
    arrays = scan.draw(rng, T=30)
    y, state = scan.forward(**arrays, output_final_state=True)
    if scan.name == "hgrn":
        log = arrays["g"]
        write = -np.expm1(log) * arrays["x"]
    else:
        log = -8 * np.log1p(np.exp(arrays["Lambda"])) * arrays["r"]
        write = np.sqrt(-np.expm1(2 * log)) * arrays["i"] * arrays["x"]
    one = np.ones((2, 30, 6, 1))
    want, last = linattn.gla(
        one,
        one,
        write[..., None],
        log[..., None],
        scale=1,
        initial_state=arrays["initial_state"][..., None, None],
        output_final_state=True,
    )
    assert_near(y, want[..., 0], 1e-13)
    assert_near(state, last[..., 0, 0], 1e-13)


# ---- extremes ----


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_time_steps_and_rates_without_measure(dtype, rng):
    scan = SCANS[0]
    arrays = scan.draw(rng, dtype, T=40)
    arrays["delta"][:, 3], arrays["delta"][:, 7] = 0, 1e4
    arrays["A"][0], arrays["A"][1], arrays["A"][2] = -1e4, 0, -np.inf
    arrays["delta"][:, 3, 2] = 1  # 0 times infinity is NaN in any spelling
    with np.errstate(all="ignore"):
        want = run_reference(scan, np.float64, arrays)
    got = run(scan, arrays)
    for name, x in got.items():
        assert np.isfinite(x).all()
        assert_near(x, want[name], 1e-12 if dtype == np.float64 else 1e-5, name)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("N", [1, 4, 8, 13])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_decays_are_right_to_the_last_digits(dtype, N, far):
    """One token, whose state is the decay alone. A channel that decays at once, `far`, takes its
    neighbours another way through the exponential."""
    D = 1024
    x = np.linspace(-80, 80, D)
    x[D // 2 - 64 : D // 2 + 64] = np.concatenate([-np.logspace(0, -9, 64), np.logspace(-9, 0, 64)])
    x = x.astype(dtype)
    A = np.tile(np.linspace(0.1, 1, N).astype(dtype), (D, 1))
    state, zeros = np.ones((1, D, N), dtype), np.zeros((1, 1, 1, N), dtype)
    delta = x[None, None].copy()
    if far:
        delta[..., ::8], A[::8] = 1, -1e6
    _, decays = linattn.selective_scan(
        np.zeros_like(delta), delta, A, zeros, zeros, initial_state=state, output_final_state=True
    )
    at_once = (np.arange(D) % 8 == 0) & far
    exponent = A[~at_once].astype(np.longdouble) * delta[0, 0, ~at_once, None]
    error = abs(decays[0, ~at_once] / np.exp(exponent) - 1)
    # exp takes over the roundings of its exponent: those of delta log2(e), and of that times A. A
    # GPU's power of two in float32 has 2 ulp of its own, and a shift of the exponent by 3e-8
    own = 2.3 if dtype == np.float32 and not device.on_host() else 1.1
    assert (error < np.finfo(dtype).eps * (own + abs(exponent))).all()
    assert not decays[0, at_once].any()


def test_softplus_has_its_digits_at_both_ends():
    raw = np.array([-80.0, -20.0, 19.9, 20.1, 60.0], np.float32)
    u = np.ones((1, 5, 1), np.float32)
    A, BC = np.full((1, 1), -1e4, np.float32), np.ones((1, 5, 1, 1), np.float32)
    y, _ = linattn.selective_scan(u, raw[None, :, None], A, BC, BC, delta_softplus=True)
    exact = np.log1p(np.exp(raw.astype(np.longdouble)))
    # the decay of 1e4 a unit of time leaves each token alone, but for the first ones
    h = np.longdouble(0)
    for t, step in enumerate(exact):
        h = np.exp(-1e4 * step) * h + step
        assert abs(float(y[0, t, 0]) / float(h) - 1) < 1e-6


def test_the_input_scale_keeps_its_digits_near_a_decay_of_one():
    """1 - a^2 in float32 loses everything at a > 1 - 3e-8."""
    r = np.logspace(-9, 0, 40, dtype=np.float32)[None, :, None]
    one = np.ones_like(r)
    Lambda = np.zeros(1, np.float32)
    state = np.zeros((40, 1), np.float32)
    y = linattn.rg_lru_step(state, one[0], r[0], one[0], Lambda)
    exact = np.sqrt(-np.expm1(-16 * np.log(2.0) * r[0].astype(np.float64)))
    assert abs(y / exact - 1).max() < 4e-7


def test_angles_of_many_turns(rng):
    """cos and sin of delta A, whose error is that of the angle itself."""
    turns = np.array([0.1, 3.0, 50.0, 700.0, 9000.0, 1e5])
    for dtype, tiny in ((np.float32, 6e-8), (np.float64, 1.2e-16)):
        A = (1j * turns[None]).astype(np.result_type(dtype, np.complex64))
        for n in range(len(turns)):
            one = np.ones((1, 2, 1, 1), A.dtype)
            u = np.array([1.0, 0.0], dtype)[None, :, None]
            delta = np.ones((1, 2, 1), dtype)
            y, _ = linattn.selective_scan(u, delta, A[:, n : n + 1], one, one)
            want = 2 * np.cos(np.longdouble(A[0, n].imag))
            assert abs(y[0, 1, 0] - want) < 8 * tiny * max(1, turns[n])


@pytest.mark.parametrize("angle", [2.0**14, 2.0**22, 2.0**30 + 2.0**10])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_angles_that_are_exact_lose_nothing(dtype, angle):
    """delta is 1, so the angle has no error, however large it is."""
    A = np.array([[1j * angle]], np.result_type(dtype, np.complex64))
    one = np.ones((1, 2, 1, 1), A.dtype)
    u = np.array([1.0, 0.0], dtype)[None, :, None]
    y, _ = linattn.selective_scan(u, np.ones((1, 2, 1), dtype), A, one, one)
    assert abs(y[0, 1, 0] - 2 * np.cos(angle)) < 8 * np.finfo(dtype).eps


@pytest.mark.parametrize("width", [8, 16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_step_whose_constants_have_strides(rng, dtype, width):
    """Every second number of A, B and C: N = 5 is no whole vector, so a row ends in padding."""
    N = 5
    u, delta = rng.random((2, 1, 6)).astype(dtype)
    A, state = -rng.random((6, N)).astype(dtype), rng.random((1, 6, N)).astype(dtype)
    B, C = rng.random((2, 1, 1, N)).astype(dtype)
    wide = [np.repeat(x, 2, -1)[..., ::2] for x in (A, B, C)]
    # the next call gets this one's scratch: threes, in rows of a vector's width
    filled = [np.full((*x.shape[:-1], width), 3, dtype) for x in (state, A, B, C)]
    linattn.selective_scan_step(filled[0], u, delta, *filled[1:])
    got, want = state.copy(), state.copy()
    y = linattn.selective_scan_step(got, u, delta, *wide)
    assert_same_bits(y, linattn.selective_scan_step(want, u, delta, A, B, C))
    assert_same_bits(got, want)


@every
def test_nan_stays_in_its_channel_sequence_and_future(scan, rng):
    arrays = scan.draw(rng, T=40)
    clean = run(scan, arrays)
    first = scan.tokens[0]
    arrays[first] = arrays[first].copy()
    arrays[first][1, 20, 2] = np.nan
    got = run(scan, arrays)
    assert np.isnan(got["y"][1, 20, 2])
    kept = np.ones(got["y"].shape, bool)
    kept[1, 20:, 2] = False
    assert_same_bits(got["y"][kept], clean["y"][kept])


# ---- promises ----


@every
def test_the_same_bits_for_any_number_of_threads_and_neighbours(scan, rng):
    arrays = scan.draw(rng, np.float32, B=3, T=200, D=300, N=4, G=1)
    dy = rng.standard_normal((3, 200, 300)).astype(np.float32)
    before = linattn.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            linattn.set_num_threads(threads)
            found.append((run(scan, arrays), gradients(scan, dy, None, arrays)))
    finally:
        linattn.set_num_threads(before)
    for other in found[1:]:
        assert_same_bits(other, found[0])
    one = {
        name: x[1:2] if name in scan.tokens or "state" in name else x for name, x in arrays.items()
    }
    assert_same_bits(run(scan, one)["y"], found[0][0]["y"][1:2])


@pytest.mark.parametrize("scan", SCANS[:3], ids=repr)
def test_any_layout_gives_the_same_bits(scan, rng):
    arrays = scan.draw(rng, T=40, D=22)
    want = run(scan, arrays)
    dy = rng.standard_normal((2, 40, 22))
    grads = gradients(scan, dy, None, arrays)
    turned = {
        name: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)
        if x.ndim == 3 and name in scan.tokens
        else x
        for name, x in arrays.items()
    }
    assert turned["u"].strides[1] == 8
    assert_same_bits(run(scan, turned), want)
    assert_same_bits(gradients(scan, dy, None, turned), grads)
    spread = {name: np.repeat(x, 2, -1)[..., ::2] for name, x in arrays.items()}
    assert_same_bits(run(scan, spread), want)


@every
def test_inputs_are_not_written(scan, rng):
    arrays = scan.draw(rng)
    before = snapshot(arrays)
    run(scan, arrays)
    gradients(scan, rng.standard_normal((2, 19, 6)), None, arrays)
    assert snapshot(arrays) == before


@every
def test_no_tokens(scan, rng):
    arrays = scan.draw(rng, T=0)
    got = run(scan, arrays)
    assert got["y"].shape == (2, 0, 6)
    d_state = scan.draw_state(rng, arrays, 2)
    grads = gradients(scan, np.zeros((2, 0, 6)), d_state, arrays)
    assert_same_bits(got["state"], as_reals(arrays["initial_state"]))
    assert_same_bits(grads.pop("initial_state"), as_reals(d_state))
    for name, x in grads.items():
        assert not np.any(x), name
    without_rows = scan.draw(rng, B=0, T=5)
    assert run(scan, without_rows)["y"].shape == (0, 5, 6)


def test_one_group_may_be_left_out(rng):
    arrays = SCANS[0].draw(rng, G=1)
    want = run(SCANS[0], arrays)
    flat = arrays | {name: arrays[name][:, :, 0] for name in "BC"}
    assert_same_bits(run(SCANS[0], flat), want)
    grads = linattn.selective_scan_backward(arrays["u"], **flat)
    assert grads.dB.shape == flat["B"].shape


def test_out_is_written(rng):
    arrays = SCANS[1].draw(rng)
    want = run(SCANS[1], arrays)["y"]
    out = np.empty_like(want)
    y, _ = linattn.selective_scan(**arrays, delta_softplus=True, out=out)
    assert y is out
    assert_same_bits(out, want)


# ---- what is refused ----


def refused(kind, message, scan, rng, **changes):
    arrays = scan.draw(rng) | changes
    with pytest.raises(kind) as error:
        scan.forward(**arrays, **scan.keywords)
    assert str(error.value) == message


def test_bad_arguments(rng):
    f = SCANS[0]
    x = np.zeros
    empty = {"A": x((6, 0)), "B": x((2, 19, 2, 0)), "C": x((2, 19, 2, 0)), "initial_state": None}
    refused(ValueError, "A: expected N >= 1, got N = 0", f, rng, **empty)
    refused(
        ValueError,
        "delta: expected [B,T,D] = (2, 19, 6), got (2, 19, 5)",
        f,
        rng,
        delta=x((2, 19, 5)),
    )
    refused(ValueError, "A: expected [D,N], got (6,)", f, rng, A=x(6))
    refused(
        ValueError,
        "C: expected [B,T,G,N] = (2, 19, 2, 5), got (2, 19, 2, 4)",
        f,
        rng,
        C=x((2, 19, 2, 4)),
    )
    refused(
        ValueError,
        "B: expected D = 6 to be a multiple of G, got G = 4",
        f,
        rng,
        B=x((2, 19, 4, 5)),
        C=x((2, 19, 4, 5)),
    )
    refused(
        ValueError,
        "initial_state: expected [S,D,N] = (2, 6, 5), got (3, 6, 5)",
        f,
        rng,
        initial_state=x((3, 6, 5)),
    )
    refused(
        TypeError,
        "delta: expected float64 (the dtype of u), got float32",
        f,
        rng,
        delta=x((2, 19, 6), np.float32),
    )
    refused(TypeError, "A: expected an array, got None", f, rng, A=None)
    refused(
        TypeError,
        "initial_state: expected float64, got float32",
        f,
        rng,
        initial_state=x((2, 6, 5), np.float32),
    )
    refused(
        TypeError,
        "B: expected complex numbers, as A has them, got float64",
        f,
        rng,
        A=1j * np.ones((6, 5)),
    )
    refused(
        ValueError,
        "cu_seqlens: expected packed sequences to have B = 1, got B = 2",
        f,
        rng,
        cu_seqlens=np.array([0, 19]),
    )
    with pytest.raises(TypeError, match="delta_softplus: expected True or False"):
        f.forward(**f.draw(rng), delta_softplus=1)
    with pytest.raises(TypeError, match="no argument of this pass is called 'q'"):
        _linattn.scan("selective", "forward", q=x(3))
    with pytest.raises(TypeError, match="expected a form and a pass"):
        _linattn.scan("quadratic", "forward")


def test_bad_arguments_of_the_others(rng):
    f = SCANS[3]
    x = np.zeros
    refused(ValueError, "dt: expected [D] = (6,), got (5,)", f, rng, dt=x(5))
    refused(
        TypeError, "C: expected complex numbers, as A has them, got float64", f, rng, C=x((6, 5))
    )
    refused(ValueError, "B: expected [D,N] = (6, 5), got (6, 4)", f, rng, B=1j * x((6, 4)))
    with pytest.raises(ValueError, match='discretization: expected "zoh" or "bilinear"'):
        linattn.s4d(**f.draw(rng), discretization="euler")
    refused(
        ValueError,
        "g: expected [B,T,D] = (2, 19, 6), got (2, 19, 5)",
        SCANS[6],
        rng,
        g=x((2, 19, 5)),
    )
    refused(
        ValueError,
        "initial_state: expected [S,D] = (2, 6), got (2, 6, 1)",
        SCANS[6],
        rng,
        initial_state=x((2, 6, 1)),
    )
    refused(TypeError, "Lambda: expected an array, got None", SCANS[7], rng, Lambda=None)
    refused(
        TypeError, "reset: expected bool, got int64", SCANS[7], rng, reset=np.zeros((2, 19), int)
    )
    for name in ("c", "gradient_limit"):
        with pytest.raises(ValueError, match=f"{name}: expected a finite number > 0"):
            linattn.rg_lru(**SCANS[7].draw(rng), **{name: -1.0})


def test_a_state_is_written_where_it_lies(rng):
    f = SCANS[0]
    arrays = f.draw(rng, T=1)
    token, state = one_token(f, arrays, 0), arrays["initial_state"]
    spread, dense = np.repeat(state, 2, -1), state.copy()
    assert_near(f.step(spread[..., ::2], **token), f.step(dense, **token), 1e-15)
    assert_near(spread[..., ::2], dense, 1e-15)
    np.testing.assert_array_equal(spread[..., 1::2], state)
    state.flags.writeable = False
    with pytest.raises(ValueError, match="state: expected a writable array"):
        f.step(state, **token)
    device.needs_host("only the host reads state_indices")
    with pytest.raises(ValueError, match="state_indices: expected no state twice"):
        f.step(state.copy(), **token, state_indices=np.array([1, 1]))
    with pytest.raises(ValueError, match="state_indices: expected 0 to P - 1 = 1"):
        f.step(state.copy(), **token, state_indices=np.array([1, 2]))


def test_a_complex_state_is_written_where_it_lies(rng):
    f = SCANS[2]
    arrays = f.draw(rng, T=1)
    token, state = one_token(f, arrays, 0), arrays["initial_state"]
    f.step(state, **token)
    with pytest.raises(ValueError, match="state: expected an array whose innermost axis is contig"):
        f.step(np.repeat(state, 2, -1)[..., ::2], **token)


# ---- PyTorch ----


def tensor(x):
    """A tensor of PyTorch's, on the device of the run."""
    torch = imported("torch")
    return torch.from_numpy(x).to("cuda" if device.kind == "cuda" else "cpu")


def tensors_of(arrays):
    return {name: tensor(x).requires_grad_(x.dtype != bool) for name, x in arrays.items()}


def call_of(scan):
    """The scan as users of PyTorch call it."""
    if device.kind == "cupy":
        pytest.skip("cupy: these are tensors")
    return getattr(linattn.scans, scan.name)


@every
def test_tensors_are_recorded(scan, rng):
    call = call_of(scan)
    arrays = scan.draw(rng, T=9, D=4, N=3)
    dy = rng.standard_normal((2, 9, 4))
    d_state = scan.draw_state(rng, arrays, 2)
    want = gradients(scan, dy, d_state, arrays)
    given = tensors_of(arrays)
    y, state = call(**given, **scan.keywords, output_final_state=True)
    loss = (y * tensor(dy)).sum()
    loss = loss + (state * tensor(d_state).conj()).real.sum()
    loss.backward()
    for name in want:
        x = given[name]
        assert_near(as_reals(x.grad.cpu().numpy()), want[name], 1e-12, name)


@every
def test_a_compiler_sees_one_operator(scan, rng):
    torch = imported("torch")
    arrays = scan.draw(rng, T=9, D=4, N=3, state=False)
    if any(np.iscomplexobj(x) for x in arrays.values()):
        pytest.skip("the backend that runs here compiles no complex numbers")
    call = call_of(scan)
    eager, compiled = tensors_of(arrays), tensors_of(arrays)

    def loss(given):
        return call(**given, **scan.keywords)[0].sum()

    loss(eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(compiled).backward()
    for name, x in eager.items():
        if x.requires_grad:
            assert_near(compiled[name].grad.cpu().numpy(), x.grad.cpu().numpy(), 1e-13, name)
