"""linattn.causal_conv1d: the acceptance rule, layouts, sequences, states, gradients, PyTorch."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from support import device
from support.compare import assert_same_bits
from support.composed import BFLOAT16, DTYPES, assert_near, assert_slopes, judged, state_dtype
from support.device import imported
from support.device import ops as linattn
from support.layouts import ROWS_BROKEN, ROWS_KEPT

from linattn import _linattn, convolution, reference

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 11)
widths = pytest.mark.parametrize("W", WIDTHS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
activations = pytest.mark.parametrize("activation", [None, "silu"])
INPUTS = ("x", "weight", "bias", "initial_state")


def tokens_inside(x):
    """[B,T,D] over memory [B,D,T]."""
    if x.ndim < 2:
        return x.copy()
    return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)


def problem(rng, W, dtype=np.float64, *, B=2, T=29, D=21, S=None, cu=None):
    """Arrays of a call by their keywords. States and sums have the dtype that they may have."""
    S = B if S is None else S
    real = state_dtype(np.dtype(dtype))
    made = {
        "x": rng.standard_normal((B, T, D)).astype(dtype),
        "weight": rng.standard_normal((D, W)).astype(dtype),
        "bias": rng.standard_normal(D).astype(dtype),
        "initial_state": rng.standard_normal((S, D, W - 1)).astype(real),
    }
    return made if cu is None else {**made, "cu_seqlens": np.array(cu)}


def gradients_of_outputs(rng, given):
    x, S0 = given["x"], given["initial_state"]
    dS = rng.standard_normal(S0.shape).astype(state_dtype(x.dtype))
    return {"dy": rng.standard_normal(x.shape).astype(x.dtype), "d_final_state": dS}


def forward(**given):
    y, state = linattn.causal_conv1d(**given, output_final_state=True)
    return {"y": y, "state": state}


def forward_reference(**given):
    y, state = reference.causal_conv1d(**given)
    return {"y": y, "state": state}


def backward(dy, x, weight, bias=None, **given):
    found = linattn.causal_conv1d_backward(dy, x, weight, bias, **given)
    return dict(zip(INPUTS, found, strict=True))


# ---- numbers ----


@widths
@dtypes
@activations
def test_forward_by_the_rule(W, dtype, activation, rng):
    def draw():
        # A state of one tap has no numbers, so it is left out of the judgement.
        return problem(rng, W, dtype, T=40, D=37)

    def without_empty(run):
        return lambda **given: {
            name: x for name, x in run(activation=activation, **given).items() if x.size
        }

    judged(draw, without_empty(forward), without_empty(forward_reference), dtype)


@widths
@dtypes
@activations
def test_gradients_by_the_rule(W, dtype, activation, rng):
    def draw():
        given = problem(rng, W, dtype, T=40, D=37)
        return {**given, **gradients_of_outputs(rng, given)}

    def without_empty(run):
        return lambda **given: {
            name: x for name, x in run(activation=activation, **given).items() if x.size
        }

    reference_run = without_empty(reference.causal_conv1d_backward)
    judged(draw, without_empty(backward), reference_run, dtype, gradient=True)


@pytest.mark.parametrize("D", [1, 2, 15, 16, 17, 127, 128, 129, 1025, 2100])
@pytest.mark.parametrize("T", [1, 2, 3, 4, 17, 65, 530])
def test_sizes_around_the_cuts(D, T, rng):
    given = problem(rng, 4, np.float32, B=1, T=T, D=D)
    given |= gradients_of_outputs(rng, given)
    d = {name: given.pop(name) for name in ("dy", "d_final_state")}
    for layout in (np.asarray, tokens_inside):
        x = {**given, "x": layout(given["x"])}
        found, wanted = forward(**x, activation="silu"), forward_reference(**x, activation="silu")
        for name, y in found.items():
            assert_near(y, wanted[name], 2e-6, name)
        got = backward(**d, **x, activation="silu")
        want = reference.causal_conv1d_backward(**d, **x, activation="silu")
        for name, dx in got.items():
            assert_near(dx, want[name], 2e-6, name)


@pytest.mark.parametrize("W", [1, 4, 6])
@activations
def test_gradients_are_slopes(W, activation, rng):
    given = problem(rng, W, B=1, T=9, D=3, S=3, cu=[0, 5, 5, 9])
    d = gradients_of_outputs(rng, given)
    arrays = {name: given[name] for name in INPUTS if given[name].size}

    def loss():
        found = forward(**given, activation=activation)
        return (found["y"] * d["dy"]).sum() + (found["state"] * d["d_final_state"]).sum()

    found = backward(**d, **given, activation=activation)
    assert_slopes(loss, arrays, found, rng)


def test_sums_over_many_tokens_keep_their_digits(rng):
    """65536 ones are counted exactly: a sum in float32 of sums would lose none here either, so a
    small number is beside them, which it would lose."""
    x = np.ones((1, 65536, 1), np.float32)
    x[0, 0] = 2.0**-10
    weight, bias = np.ones((1, 1), np.float64), np.ones(1, np.float64)
    found = linattn.causal_conv1d_backward(np.ones_like(x), x, weight, bias)
    assert found.dweight[0, 0] == 65535 + 2.0**-10
    assert found.dbias[0] == 65536


@pytest.mark.parametrize("parameter", DTYPES, ids=lambda dtype: dtype.name)
@dtypes
def test_parameters_of_any_dtype(parameter, dtype, rng):
    given = problem(rng, 4, dtype)
    given |= {name: given[name].astype(parameter) for name in ("weight", "bias")}
    d = gradients_of_outputs(rng, given)
    y, _ = linattn.causal_conv1d(**given)
    bound = {8: 1e-12, 4: 1e-5, 2: 1e-2}
    assert y.dtype == dtype
    assert_near(y, reference.causal_conv1d(**given)[0], bound[dtype.itemsize])
    found, wanted = backward(**d, **given), reference.causal_conv1d_backward(**d, **given)
    for name in INPUTS:
        dx = found[name]
        like = given[name].dtype if name != "initial_state" else state_dtype(dtype)
        assert dx.dtype == like, name
        assert_near(dx, wanted[name], bound[min(dx.dtype.itemsize, dtype.itemsize)], name)


# ---- where floats end ----


def test_silu_and_its_slope_at_both_ends():
    z = np.array([0, 1, -1, 20, -20, 80, -80, 200, -200, 1e30, -1e30, np.inf, -np.inf, np.nan])
    wide = z.astype(np.longdouble)
    with np.errstate(all="ignore"):
        silu = wide / (1 + np.exp(-wide))
        s = 1 / (1 + np.exp(-wide))
        slope = s * (1 + wide / (1 + np.exp(wide)))
    silu[z == -np.inf], slope[z == -np.inf], slope[z == np.inf] = 0, 0, 1
    for dtype in (np.float64, np.float32):
        for layout in (np.asarray, tokens_inside):
            x = layout(np.repeat(z.astype(dtype)[None, :, None], 2, 2))
            weight, ones = np.ones((2, 1), dtype), np.ones_like(x)
            y, _ = linattn.causal_conv1d(x, weight, activation="swish")
            dx = linattn.causal_conv1d_backward(ones, x, weight, activation="silu").dx
            for d in range(2):
                np.testing.assert_allclose(y[0, :, d], silu, 1e-6, 1e-36)
                np.testing.assert_allclose(dx[0, :, d], slope, 1e-6, 1e-36)


@pytest.mark.parametrize("layout", [np.asarray, tokens_inside])
def test_a_nan_stays_in_its_channel_and_sequence(layout, rng):
    W, t = 4, 12
    given = problem(rng, W, np.float32, B=1, T=30, D=40, S=3, cu=[0, 8, 20, 30])
    clean = forward(**{**given, "x": layout(given["x"])})
    given["x"][0, t, 7] = np.nan
    given["initial_state"][2, 5, :] = np.nan
    found = forward(**{**given, "x": layout(given["x"])})
    wrong = np.zeros((30, 40), bool)
    wrong[t : t + W, 7] = True
    wrong[20 : 20 + W - 1, 5] = True
    assert np.array_equal(np.isnan(found["y"][0]), wrong)
    assert np.array_equal(found["y"][0][~wrong], clean["y"][0][~wrong])
    d = {"dy": np.ones_like(given["x"])}
    grads = backward(**d, **{**given, "x": layout(given["x"])}, activation="silu")
    assert set(np.nonzero(np.isnan(grads["weight"]).any(1))[0]) == {5, 7}
    assert set(np.nonzero(np.isnan(grads["x"][0]).any(0))[0]) == {5, 7}
    assert not np.isnan(grads["x"][0, : t - W + 1]).any()


# ---- layouts ----


@pytest.mark.parametrize("layout", [*ROWS_KEPT, *ROWS_BROKEN, tokens_inside])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_layouts_give_the_same_bits(layout, dtype, rng):
    if dtype != np.float32 and layout.__name__ in ("byte_swapped", "record_field"):
        pytest.skip("NumPy has no such arrays of bfloat16")
    if device.kind == "cupy" and layout.__name__ in ("misaligned", "record_field"):
        pytest.skip("CuPy cannot copy arrays whose elements are not aligned")
    given = problem(rng, 4, np.dtype(dtype), T=70, D=50)
    d = gradients_of_outputs(rng, given)
    there = {name: layout(x) for name, x in given.items()}
    options = {"activation": "silu"}
    assert_same_bits(forward(**there, **options), forward(**given, **options))
    d_there = {name: layout(x) for name, x in d.items()}
    assert_same_bits(backward(**d_there, **there, **options), backward(**d, **given, **options))


@pytest.mark.parametrize("W", [3, 5])
def test_nothing_is_copied_to_read_any_strides(W, rng):
    """out of each layout gets y, from x of each layout, and nothing around it is written."""
    given = problem(rng, W, np.float32, T=70, D=50)
    want = forward(**given)["y"]
    for of_x in (np.asarray, tokens_inside):
        for of_y in (np.asarray, tokens_inside, lambda x: np.full((2, 70, 53), 7, np.float32)):
            out = of_y(np.full(want.shape, 7, np.float32))
            part = out[..., :50]
            y, _ = linattn.causal_conv1d(**{**given, "x": of_x(given["x"])}, out=part)
            assert y is part
            assert_same_bits(np.ascontiguousarray(part), want)
            assert (out[..., 50:] == 7).all()


def test_a_large_result_is_written_past_the_caches(rng):
    """The same bits by another kind of store: from 32 MiB on, and where rows begin unaligned."""
    T, D = 2100, 4096
    given = problem(rng, 4, np.float32, B=1, T=T, D=D)
    room = np.empty(T * D + 16, np.float32)
    for shift in (0, 4, 7):
        out = room[shift : shift + T * D].reshape(1, T, D)
        y, _ = linattn.causal_conv1d(**given, activation="silu", out=out)
        for t in (slice(0, 9), slice(1000, 1009), slice(T - 9, T)):
            first = max(t.start - 3, 0)
            S = given["initial_state"] if t.start == 0 else np.zeros((1, D, 3), np.float32)
            part = {**given, "x": given["x"][:, first : t.stop], "initial_state": S}
            want, _ = linattn.causal_conv1d(**part, activation="silu")
            assert_same_bits(np.ascontiguousarray(y[:, t]), want[:, t.start - first :].copy())


# ---- sequences and states ----


@widths
@pytest.mark.parametrize("index", [np.int32, np.int64])
@activations
def test_packed_sequences_are_separate_calls(W, index, activation, rng):
    cu = [0, 0, 1, 4, 30, 30, 47]
    given = problem(rng, W, np.float32, B=1, T=47, D=21, S=len(cu) - 1, cu=cu)
    given["cu_seqlens"] = given["cu_seqlens"].astype(index)
    d = gradients_of_outputs(rng, given)
    y, S = forward(**given, activation=activation).values()
    packed = backward(**d, **given, activation=activation)
    shared = {name: 0 for name in ("weight", "bias")}
    for n, (start, end) in enumerate(pairwise(cu)):
        alone = {
            "x": given["x"][:, start:end],
            "initial_state": given["initial_state"][n : n + 1],
            "weight": given["weight"],
            "bias": given["bias"],
        }
        own = {"dy": d["dy"][:, start:end], "d_final_state": d["d_final_state"][n : n + 1]}
        one = forward(**alone, activation=activation)
        assert_same_bits(y[:, start:end].copy(), one["y"])
        assert_same_bits(S[n : n + 1], one["state"])
        found = backward(**own, **alone, activation=activation)
        assert_same_bits(packed["x"][:, start:end].copy(), found["x"])
        assert_same_bits(packed["initial_state"][n : n + 1], found["initial_state"])
        shared = {name: shared[name] + found[name].astype(np.float64) for name in shared}
    for name, total in shared.items():
        assert_near(packed[name], total, 1e-5, name)


@pytest.mark.parametrize("state", ["float32", "bfloat16", "x"])
@dtypes
def test_a_cut_anywhere_goes_on_from_the_state(state, dtype, rng):
    """The inputs of the first part are numbers of bfloat16, which every state holds."""
    W, T = 5, 14
    if dtype == np.float64:
        state = "x"
    of_state = dtype if state == "x" else BFLOAT16 if state == "bfloat16" else np.dtype(state)
    given = problem(rng, W, np.float32, T=T)
    given = {name: x.astype(BFLOAT16).astype(dtype) for name, x in given.items()}
    given["initial_state"] = given["initial_state"].astype(of_state)
    whole = forward(**given, activation="silu")
    for cut in range(T + 1):
        first = forward(**{**given, "x": given["x"][:, :cut]}, activation="silu")
        S = first["state"].astype(of_state)
        rest = {**given, "x": given["x"][:, cut:], "initial_state": S}
        rest = forward(**rest, activation="silu")
        assert_same_bits(np.concatenate([first["y"], rest["y"]], 1), whole["y"])
        assert_same_bits(rest["state"], whole["state"])


@widths
@dtypes
def test_steps_are_the_forward_pass(W, dtype, rng):
    given = problem(rng, W, dtype, T=12)
    whole = forward(**given, activation="silu")
    state = given.pop("initial_state").copy()
    x = given.pop("x")
    for t in range(12):
        y = linattn.causal_conv1d_step(x[:, t], **given, state=state, activation="silu")
        assert_same_bits(y, whole["y"][:, t].copy())
    assert_same_bits(state, whole["state"])


@pytest.mark.parametrize("older", [1, 3])
@widths
@dtypes
def test_a_state_may_hold_older_inputs(W, dtype, older, rng):
    """The step does not read them. They move on with the others."""
    given = problem(rng, W, dtype, T=6)
    x, short = given.pop("x"), given.pop("initial_state")
    long = np.concatenate([rng.standard_normal((*short.shape[:2], older)), short], 2)
    long = long.astype(short.dtype)
    for t in range(6):
        before = long.copy()
        y = linattn.causal_conv1d_step(x[:, t], **given, state=long, activation="silu")
        want = linattn.causal_conv1d_step(x[:, t], **given, state=short, activation="silu")
        assert_same_bits(y, want)
        assert_same_bits(long[..., older:].copy(), short)
        assert_same_bits(long[..., :-1].copy(), before[..., 1:].copy())


@pytest.mark.parametrize("layout", [np.asarray, np.asfortranarray, tokens_inside])
def test_a_step_picks_its_states(layout, rng):
    given = problem(rng, 4, np.float32, B=3, S=6)
    x, pool = given["x"][:, 0], layout(given["initial_state"])
    parameters = {name: given[name] for name in ("weight", "bias")}
    before, slots = pool.copy(), np.array([4, -1, 0])
    out = np.full_like(x, 7)
    y = linattn.causal_conv1d_step(x, **parameters, state=pool, state_indices=slots, out=out)
    assert y is out and (y[1] == 0).all()
    for b, p in enumerate(slots):
        if p < 0:
            continue
        S = before[p : p + 1].copy()
        want = linattn.causal_conv1d_step(x[b : b + 1], **parameters, state=S)
        assert_same_bits(y[b : b + 1], want)
        assert_same_bits(pool[p : p + 1].copy(), S)
    for p in (1, 2, 3, 5):
        assert_same_bits(pool[p].copy(), before[p].copy())


@pytest.mark.parametrize("B, T, D", [(2, 0, 5), (0, 3, 5), (2, 3, 0), (0, 0, 0)])
@pytest.mark.parametrize("W", [1, 4])
def test_without_numbers(B, T, D, W, rng):
    given = problem(rng, W, np.float32, B=B, T=T, D=D)
    d = gradients_of_outputs(rng, given)
    found = forward(**given)
    assert found["y"].shape == (B, T, D)
    if T == 0:
        assert_same_bits(found["state"], given["initial_state"])
    grads = backward(**d, **given)
    if T == 0:
        assert_same_bits(grads["initial_state"], d["d_final_state"])
    if B * T == 0:
        assert not grads["weight"].any() and not grads["bias"].any()
    for name in INPUTS:
        assert grads[name].shape == given[name].shape


def test_no_sequences(rng):
    given = problem(rng, 3, B=1, T=0, D=4, S=0, cu=[0])
    found = forward(**given)
    assert found["y"].shape == (1, 0, 4) and found["state"].shape == (0, 4, 2)


@pytest.mark.parametrize("D", [7, 8])  # number by number, and four channels at a time
@pytest.mark.parametrize("cu", [[0, 3, 5], [2, 4, 9], [0, 7, 4, 9], [0, 90, -3, 9]])
def test_a_gpu_gets_through_any_starts(cu, D, rng):
    """The host does not read them. Tokens before the first are the first sequence's, and so on."""
    S = len(cu) - 1
    given = problem(rng, 4, np.float32, B=1, T=9, D=D, S=S, cu=cu)
    d = gradients_of_outputs(rng, given)
    if device.on_host():
        with pytest.raises(ValueError, match="cu_seqlens: expected"):
            forward(**given)
        return
    found = forward(**given)["y"], backward(**d, **given)["x"]
    if sorted(cu) == cu:
        whole = given | {"cu_seqlens": np.array([0, *cu[1:-1], 9])}
        assert_same_bits(found, (forward(**whole)["y"], backward(**d, **whole)["x"]))


def test_what_is_not_given_is_zero(rng):
    given = problem(rng, 4)
    del given["initial_state"]
    zeros = {"bias": np.zeros(21), "initial_state": np.zeros((2, 21, 3))}
    assert_same_bits(forward(**{**given, "bias": None}), forward(**{**given, **zeros}))
    found = linattn.causal_conv1d_backward(given["x"], given["x"], given["weight"])
    assert found.dbias is None and found.d_initial_state is None
    assert linattn.causal_conv1d(given["x"], given["weight"])[1] is None


# ---- threads ----


@pytest.fixture
def threads():
    before = linattn.get_num_threads()
    yield linattn.set_num_threads
    linattn.set_num_threads(before)


@pytest.mark.parametrize("layout", [np.asarray, tokens_inside])
def test_threads_do_not_change_bits(layout, threads, rng):
    given = problem(rng, 4, np.float32, B=1, T=1300, D=1100, S=3, cu=[0, 700, 701, 1300])
    given["x"] = layout(given["x"])
    d = gradients_of_outputs(rng, given)
    found = []
    for n in (1, 2):
        threads(n)
        found.append(
            (forward(**given, activation="silu"), backward(**d, **given, activation="silu"))
        )
    assert_same_bits(found[0], found[1])


@pytest.mark.parametrize("pass_", ["forward", "backward", "step"])
def test_a_call_without_memory_writes_nothing(pass_, rng):
    device.needs_numpy("memory of the host is short")
    given = problem(rng, 4, np.float32)
    S, out = given["initial_state"], np.full_like(given["x"], 7)
    before = S.copy()
    _linattn._fail_allocation(1)
    try:
        with pytest.raises(MemoryError, match="not enough memory for the call's scratch"):
            if pass_ == "forward":
                linattn.causal_conv1d(**given, out=out)
            elif pass_ == "backward":
                backward(**gradients_of_outputs(rng, given), **given)
            else:
                linattn.causal_conv1d_step(
                    given["x"][:, 0], given["weight"], state=S, out=out[:, 0]
                )
    finally:
        _linattn._fail_allocation(0)
    assert (out == 7).all() and np.array_equal(S, before)


# ---- what is refused ----

BAD = {
    "x: expected an array, got None": {"x": None},
    "weight: expected an array, got None": {"weight": None},
    "x: expected float64, float32, float16 or bfloat16, got int64": {
        "x": np.zeros((2, 5, 3), np.int64)
    },
    "x: expected [B,T,D], got (5, 3)": {"x": np.zeros((5, 3))},
    "weight: expected [D,W], got (3, 1, 4)": {"weight": np.zeros((3, 1, 4))},
    "weight: expected [D,W], got (4, 4)": {"weight": np.zeros((4, 4))},
    "weight: expected W >= 1 taps, got W = 0": {
        "weight": np.zeros((3, 0)),
        "initial_state": None,
    },
    "weight: expected float64, float32, float16 or bfloat16, got int32": {
        "weight": np.zeros((3, 4), np.int32)
    },
    "bias: expected [D] = (3,), got (4,)": {"bias": np.zeros(4)},
    "bias: expected an array, got <class 'float'>": {"bias": 1.0},
    "initial_state: expected [S,D,W-1] = (2, 3, 3), got (2, 3, 4)": {
        "initial_state": np.zeros((2, 3, 4))
    },
    "initial_state: expected [S,D,W-1] = (2, 3, 3), got (1, 3, 3)": {
        "initial_state": np.zeros((1, 3, 3))
    },
    "initial_state: expected float64, got float32": {
        "initial_state": np.zeros((2, 3, 3), np.float32)
    },
    "activation: expected None, 'silu' or 'swish', got 'relu'": {"activation": "relu"},
    "activation: expected None, 'silu' or 'swish', got <class 'bool'>": {"activation": True},
    "output_final_state: expected True or False, got <class 'int'>": {"output_final_state": 1},
    "cu_seqlens: expected int32 or int64, got float64": {"cu_seqlens": np.zeros(3)},
    "out: expected [B,T,D] = (2, 5, 3), got (2, 5, 4)": {"out": np.zeros((2, 5, 4))},
    "out: expected float64 (the dtype of x), got float32": {"out": np.zeros((2, 5, 3), np.float32)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments(message, rng):
    given = {**problem(rng, 4, T=5, D=3), **BAD[message]}
    with pytest.raises((TypeError, ValueError)) as caught:
        linattn.causal_conv1d(given.pop("x"), given.pop("weight"), **given)
    assert message in str(caught.value)


def test_out_shares_no_memory(rng):
    x, weight = rng.standard_normal((1, 5, 3)), rng.standard_normal((3, 2))
    with pytest.raises(ValueError, match="out: "):
        linattn.causal_conv1d(x, weight, out=x)
    with pytest.raises(ValueError, match="out: "):
        linattn.causal_conv1d(x, weight, out=np.broadcast_to(np.zeros((1, 1, 3)), (1, 5, 3)))


def test_bad_steps_and_gradients(rng):
    x, weight, S = rng.standard_normal((2, 3)), rng.standard_normal((3, 4)), np.zeros((2, 3, 3))
    step = linattn.causal_conv1d_step
    outside = ([0, 0], [0, 2]) if device.on_host() else ()  # only the host reads them
    for message, bad in (
        ("state: expected an array, got None", {"state": None}),
        ("state: expected [S,D,W-1] = (2, 3, 3), got (3, 3, 3)", {"state": np.zeros((3, 3, 3))}),
        (
            "state: expected [P,D,W-1]",
            {"state": np.zeros((4, 3, 2)), "state_indices": np.array([0, 1])},
        ),
        *(("state_indices: ", {"state_indices": np.array(at)}) for at in outside),
        ("state_indices: expected [B] = (2,)", {"state_indices": np.array([0])}),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            step(x, weight, **{"state": S, **bad})
        assert message in str(caught.value)
    f16 = {"x": x.astype(np.float32), "weight": weight, "state": S.astype(np.float16)}
    with pytest.raises(TypeError, match="state: expected float32 or bfloat16, got float16"):
        step(**f16)
    with pytest.raises(ValueError, match="dy: expected"):
        linattn.causal_conv1d_backward(np.zeros((1, 3, 4)), np.zeros((1, 3, 3)), weight)
    with pytest.raises(TypeError, match="dy: expected an array, got None"):
        linattn.causal_conv1d_backward(None, np.zeros((1, 3, 3)), weight)


# ---- PyTorch ----


def tensors(rng, W=4, **sizes):
    if device.kind == "cupy":
        pytest.skip("cupy: these are tensors")
    torch = imported("torch")
    given = problem(rng, W, **{"T": 7, "D": 3, **sizes})
    place = "cuda" if device.kind == "cuda" else "cpu"
    return torch, {name: torch.from_numpy(x).to(place) for name, x in given.items()}


def recorded(given):
    return {name: x.requires_grad_() if x.is_floating_point() else x for name, x in given.items()}


@activations
def test_pytorch_records_it(activation, rng):
    torch, given = tensors(rng, B=1, S=3, cu=[0, 4, 4, 7])
    given = recorded(given)
    cu = given.pop("cu_seqlens")

    def run(*arrays):
        return convolution.causal_conv1d(
            *arrays[:3],
            initial_state=arrays[3],
            cu_seqlens=cu,
            activation=activation,
            output_final_state=True,
        )

    arrays = [given[name] for name in INPUTS]
    assert torch.autograd.gradcheck(run, arrays)
    y, state = run(*arrays)
    d = [torch.randn_like(a) for a in (y, state)]
    found = torch.autograd.grad((y, state), arrays, d)
    own = convolution.causal_conv1d_backward(
        d[0],
        *(a.detach() for a in arrays[:3]),
        initial_state=arrays[3].detach(),
        d_final_state=d[1],
        cu_seqlens=cu,
        activation=activation,
    )
    assert_same_bits(found, tuple(own))
    alone = torch.autograd.grad(run(*arrays)[1].sum(), arrays[:1])[0]
    assert alone.sum() == 3 * 6  # the last three inputs of two sequences, of three channels


def test_pytorch_of_unrecorded_tensors(rng):
    torch, given = tensors(rng)
    y, state = convolution.causal_conv1d(**given, output_final_state=True)
    want = forward(**{name: x.cpu().numpy() for name, x in given.items()})
    assert_same_bits((y.cpu().numpy(), state.cpu().numpy()), (want["y"], want["state"]))
    out = torch.empty_like(y)
    assert convolution.causal_conv1d(**given, out=out)[0] is out and torch.equal(out, y)
    with pytest.raises(ValueError, match="out: expected None where PyTorch records"):
        convolution.causal_conv1d(**recorded(given), out=out)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_pytorch_is_its_own_convolution(name, rng):
    """Of each dtype, with the gradients of all inputs, against a convolution of groups."""
    torch, given = tensors(rng, T=20, D=6)
    dtype = getattr(torch, name)
    x, weight, bias = (given[k].to(dtype).requires_grad_() for k in INPUTS[:3])
    y, _ = convolution.causal_conv1d(x, weight, bias, activation="silu")
    theirs = [a.detach().double().requires_grad_() for a in (x, weight, bias)]
    padded = torch.nn.functional.pad(theirs[0].mT, (3, 0))
    z = torch.nn.functional.conv1d(padded, theirs[1][:, None], theirs[2], groups=6).mT
    want = torch.nn.functional.silu(z)
    close = {"float32": (1e-5, 1e-5), "float16": (2e-3, 1e-2), "bfloat16": (2e-2, 5e-2)}[name]
    torch.testing.assert_close(y.double(), want, rtol=close[0], atol=close[1])
    d = torch.randn_like(want).to(dtype)
    found = torch.autograd.grad(y, (x, weight, bias), d)
    for a, b in zip(found, torch.autograd.grad(want, theirs, d.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=close[0], atol=close[1])


def test_pytorch_compiles_it(rng):
    torch, given = tensors(rng)
    given = recorded(given)

    def run(**arrays):
        return convolution.causal_conv1d(**arrays, activation="silu", output_final_state=True)

    for call in (run, lambda **arrays: convolution.causal_conv1d(**arrays)[:1]):
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        found, want = compiled(**given), call(**given)
        assert_same_bits(tuple(a.detach() for a in found), tuple(a.detach() for a in want))
        of_each = [
            torch.autograd.grad([a.sum() for a in made], given.values()) for made in (found, want)
        ]
        assert_same_bits(of_each[0], of_each[1])


def test_pytorchs_operators_hold(rng):
    torch, given = tensors(rng, B=1, S=2, cu=[0, 3, 7])
    given = recorded(given)
    arrays = tuple(given[name] for name in ("x", "weight", "bias", "cu_seqlens", "initial_state"))
    ops = torch.ops.linattn
    torch.library.opcheck(ops.convolve_causal.default, (*arrays, "silu", True))
    torch.library.opcheck(ops.convolve_causal.default, (*arrays[:2], None, None, None, None, False))
    dy = torch.randn_like(given["x"])
    torch.library.opcheck(
        ops.convolve_causal_backward.default,
        (dy, None, *arrays, "silu"),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.filterwarnings("default::FutureWarning", "default:.*torch.jit:DeprecationWarning")
def test_pytorch_transforms(rng):
    torch, given = tensors(rng)

    def loss(x):
        return convolution.causal_conv1d(**{**given, "x": x}, activation="silu")[0].square().sum()

    x = given["x"].clone().requires_grad_()
    want = torch.autograd.grad(loss(x), x)[0]
    assert torch.equal(torch.func.grad(loss)(given["x"]), want)


def test_pytorch_refuses_what_it_cannot_record(rng):
    torch, given = tensors(rng)
    given = recorded(given)
    with pytest.raises(TypeError, match="weight: expected a tensor where gradients are recorded"):
        convolution.causal_conv1d(given["x"], given["weight"].detach().cpu().numpy())
    with pytest.raises(TypeError, match="weight: expected an array, got None"):
        convolution.causal_conv1d(given["x"], None)
    packed = given["x"][:1], given["weight"]
    of_numpy, _ = convolution.causal_conv1d(*packed, cu_seqlens=np.array([0, 3, 7]))
    of_torch, _ = convolution.causal_conv1d(
        *packed, cu_seqlens=torch.tensor([0, 3, 7], device=packed[0].device)
    )
    assert of_numpy.requires_grad and torch.equal(of_numpy, of_torch)
