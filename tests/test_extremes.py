"""Legal inputs at their limits: gates that forget everything, denominators of nothing,
ill-conditioned solves, NaN, denormal numbers, long sequences. By the acceptance rule, in every
mode, with gradients.

The rule compares largest errors, which on few numbers are accidents: a problem is many short
sequences, and no array that is judged has fewer than 1000 numbers.
"""

import contextlib
import functools

import ml_dtypes
import numpy as np
import pytest
from support import device
from support.compare import leaves, over_arrays
from support.device import ops as linattn
from support.grid import (
    MODES,
    SEEDS,
    STATES,
    assert_accurate_retried,
    bits_multiplied,
    gradients_on_tensor_cores,
    parts,
    retried,
    rounds_products,
    taking_turns,
    wider,
)
from support.variants import DELTA, GATED, KEY_DECAY, ops_with

from linattn import reference, testing

REALS = (np.float64, np.float32)
ALL = (*REALS, np.float16, ml_dtypes.bfloat16)
STRONG_CHUNKS = (1, 2, 15, 16, 17, 64)

B, T, K, V = 100, 21, 8, 8  # 2100 tokens, and states of 6400 numbers


def make(op, rng, dtype, **shape):
    shape = {"B": B, "T": T, "K": K, "V": V} | shape
    return testing.make_inputs(op, rng, dtype=dtype, initial_state=True, **shape)


def judge(op, rng, x, *, modes=MODES, chunk_sizes=(None,), gradients=True):
    """The forward and the gradients of x against the reference, in every mode and chunk size."""
    dtype = x["v"].dtype
    function = getattr(reference, op)
    ref_o, ref_state = function(**x, dtype=wider(dtype))
    runs = [
        (mode, chunk) for mode in modes for chunk in (chunk_sizes if mode == "chunk" else (None,))
    ]
    for mode, chunk in runs:
        o, state = getattr(linattn, op)(**x, mode=mode, chunk_size=chunk, output_final_state=True)

        rounded = rounds_products(op, dtype, x["q"].shape[-1], mode, chunk=chunk)
        tf32 = device.on_host() and bits_multiplied(op, dtype, mode, chunk=chunk) == 16
        form = mode if device.on_host() or rounded else "recurrent"

        def naive(x, form=form, chunk=chunk):
            o, state = function(**x, dtype=dtype, form=form, chunk_size=chunk or 16)
            return {"o": o, "final_state": state}

        compare(
            f"{op} {mode} {chunk}",
            dtype,
            False,
            naive,
            x,
            ("o", o, ref_o),
            ("final_state", state, ref_state),
            rounded=rounded,
            tf32=tf32,
        )
    if gradients:
        judge_gradients(op, rng, x, runs)


def judge_gradients(op, rng, x, runs):
    """The gradients of x, each (mode, chunk size) beside its own naive gradients."""
    dtype = x["v"].dtype
    d = testing.make_output_gradients(op, rng, x)
    refs = reference.backward(op, **d, **x, dtype=wider(dtype))
    for mode, chunk in runs:
        grads = getattr(linattn, f"{op}_backward")(**d, **x, mode=mode, chunk_size=chunk)
        rounded = not device.on_host() and gradients_on_tensor_cores(
            op, dtype, x["q"].shape[-1], x["v"].shape[-1], mode
        )
        compare(
            f"{op}_backward {mode} {chunk}",
            dtype,
            True,
            naive_gradients(op, dtype, mode, chunk),
            x | d,
            *(
                (name, getattr(grads, name), getattr(refs, name))
                for name in grads._fields
                if name != "dbonus"  # a few sums over all tokens: test_backward.py
            ),
            rounded=rounded,
        )


def naive_gradients(op, dtype, mode, chunk):
    """The reference's gradients at `dtype`, as a function of the inputs."""

    def naive(x):
        grads = reference.backward(op, **x, dtype=dtype, form=mode, chunk_size=chunk or 16)
        return grads._asdict()

    return naive


def compare(label, dtype, gradient, naive, x, *outputs, rounded=False, tf32=False):
    """Judge each (name, output, reference) beside naive(x), with retries before a failure. rounded:
    a state is a sum of products of numbers of `dtype`; tf32: two such numbers stand for each."""
    problems, naives = [], naive(x)
    shuffled = functools.cache(lambda seed: retried(naive, x, seed))  # several outputs need it
    for name, out, ref in outputs:
        labels = [part for part, _ in parts(name, out)]
        for i, part in enumerate(labels):
            a, b, c = (parts(name, y)[i][1] for y in (out, ref, naives[name]))
            assert a.size >= 1000, (label, part, a.shape)
            # A longdouble holds exp(-1e4). float64 does not, and 0 is right there.
            if b.dtype == np.longdouble:
                b = np.where(b.astype(a.dtype) == 0, 0, b)
            # a gate's gradient has the gate's dtype, a state float32 beside two-byte inputs
            short = rounded and name in STATES
            c = c.astype(dtype) if short else c
            how = {
                "dtype": dtype if short or a.itemsize == 2 else a.dtype,
                "gradient": gradient,
                "name": f"{label} {part}",
                "tf32": tf32,
            }
            again = (parts(name, shuffled(seed)[name])[i][1] for seed in SEEDS)
            others = (y.astype(dtype) if short else y for y in again)
            try:
                assert_accurate_retried(a, b, c, others, **how)
            except AssertionError as error:
                problems.append(str(error))
    assert not problems, "\n".join(problems)


# ---- gates ----


def strong(kind, x, op, rng):
    """x with its g replaced by a strong gate."""
    g = x["g"].copy()
    if kind == "-1e4":
        g[:] = -1e4
    elif kind == "-inf":
        g[:] = -np.inf
    elif kind == "mixed":  # -1e4 every 8th token, next to decays that keep almost everything
        g[:] = -rng.uniform(0, 0.1, g.shape)
        g[:, ::8] = -1e4
        if op in KEY_DECAY:
            g[:, 3::8, :, ::3] = -np.inf
    elif kind == "-inf now and then":
        g[rng.random(g.shape) < 0.1] = -np.inf
    elif kind == "zero":
        g[:] = 0
    elif kind == "near the end of exp":  # exp is denormal, then 0
        g[:] = (
            rng.uniform(-110, -80, g.shape)
            if x["v"].dtype != np.float64
            else rng.uniform(-760, -700, g.shape)
        )
    elif kind == "spread":  # from hardly any decay to all of it, beside each other
        g[:] = -(10.0 ** rng.uniform(-6, 4, g.shape))
    return x | {"g": g}


GATES = ("-1e4", "-inf", "mixed", "-inf now and then", "zero", "near the end of exp", "spread")


@pytest.mark.parametrize(("op", "kind", "dtype"), taking_turns(GATED, GATES, turns=REALS))
def test_strong_gates(op, kind, dtype, rng):
    judge(op, rng, strong(kind, make(op, rng, dtype), op, rng))


@pytest.mark.parametrize("dtype", (np.float16, ml_dtypes.bfloat16))
@pytest.mark.parametrize("kind", ("mixed", "-inf now and then"))
@pytest.mark.parametrize("op", GATED)
def test_strong_gates_in_two_bytes(op, kind, dtype, rng):
    judge(op, rng, strong(kind, make(op, rng, dtype), op, rng))


@pytest.mark.parametrize(
    ("op", "kind", "dtype"), taking_turns(GATED, ("mixed", "spread"), turns=REALS)
)
def test_strong_gates_in_chunks_of_every_size(op, kind, dtype, rng):
    x = strong(kind, make(op, rng, dtype, B=30, T=70), op, rng)
    judge(op, rng, x, modes=("chunk",), chunk_sizes=STRONG_CHUNKS, gradients=op in DELTA)


ALPHAS = (0, 1, "0 and 1", "0 among others")


@pytest.mark.parametrize(("op", "alpha", "dtype"), taking_turns(GATED, ALPHAS, turns=REALS))
def test_alpha_at_its_ends(op, alpha, dtype, rng):
    x = make(op, rng, dtype)
    g = x.pop("g")
    if alpha == "0 and 1":
        x["alpha"] = (rng.random(g.shape) < 0.5).astype(dtype)
    elif alpha == "0 among others":
        x["alpha"] = np.where(rng.random(g.shape) < 0.2, 0, np.exp(g)).astype(dtype)
    else:
        x["alpha"] = np.full_like(g, alpha)
    judge(op, rng, x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", GATED)
def test_the_gradient_of_alpha_zero_is_not_zero(op, mode, rng):
    """A decay of 0 forgets the state; how much a little more would have kept is its gradient."""
    x = make(op, rng, np.float64)
    x["alpha"] = np.zeros_like(x.pop("g"))
    d = testing.make_output_gradients(op, rng, x)
    grads = getattr(linattn, f"{op}_backward")(**d, **x, mode=mode)
    # with all decays 0 the state before token t is k u' of token t-1 alone: nothing is exactly 0
    assert np.isfinite(grads.dg).all() and (grads.dg != 0).mean() > 0.99
    assert not leaves(grads.d_initial_state)[0][0, 0].any() or grads.dg[:, 0].any()


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize(
    "op,ends",
    (
        ("retention", (0, 1)),
        ("lightning_attention", (0, 1e4)),
        ("lightning_attention", (0, np.inf)),
    ),
)
def test_one_decay_per_head_at_its_ends(op, ends, dtype, rng):
    x = make(op, rng, dtype, B=1, T=9, H=1000, K=3, V=3)
    gate = "gamma" if op == "retention" else "slopes"
    x[gate][::3], x[gate][1::3] = ends
    judge(op, rng, x, chunk_sizes=(4,))


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("value", (np.nan, -np.nan))
@pytest.mark.parametrize("op", GATED)
def test_a_nan_gate_is_no_growing_gate(op, value, dtype, rng):
    """It makes NaN, and no warning that the decay exceeds one: NaN is not above zero."""
    x = make(op, rng, dtype, B=1, T=5)
    x["g"][0, 2] = np.copysign(np.float64(np.nan), np.copysign(1, value))
    o, _ = getattr(linattn, op)(**x)  # a warning is an error in this suite
    o = o.astype(np.float64)
    first = 2 + (op in ops_with(rule="bonus"))  # this rule reads before the decay
    assert np.isfinite(o[0, :first]).all() and np.isnan(o[0, first:]).all()
    x["alpha"] = np.abs(x.pop("g"))
    x["alpha"][0, :2] = 1
    x["alpha"][0, 3:] = 1
    o, _ = getattr(linattn, op)(**x)
    assert np.isnan(o[0, first:].astype(np.float64)).all()


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("op", GATED)
def test_a_gate_above_one_warns_and_grows(op, dtype, rng):
    """Slow growth: under a fast one the largest error is that of the one row that grew most, and by
    chance."""
    x = make(op, rng, dtype)
    x["g"] = np.abs(x["g"]) / 32
    warns = pytest.warns(RuntimeWarning, match="g: expected the log decay")
    with warns if device.on_host() else contextlib.nullcontext():
        judge(op, rng, x, modes=("chunk", "recurrent"))


# ---- the delta rule ----


BETAS = ((0, T), (1, T), (2, T), (-1, 6), (1e3, 3), (-0.0, T))  # each with a length


@pytest.mark.parametrize(("op", "far", "dtype"), taking_turns(DELTA, BETAS, turns=REALS))
def test_beta_far_out(op, far, dtype, rng):
    """A token multiplies what lies along its unit key by 1 - beta: few tokens where that grows."""
    beta, length = far
    x = make(op, rng, dtype, T=length, B=-(-B * T // length))
    x["beta"][:] = beta
    judge(op, rng, x, gradients=False)
    if "g" in x:
        x["g"][:] = 0
    judge_gradients(op, rng, x, (("recurrent", None), ("chunk", None), ("parallel", None)))


@pytest.mark.parametrize("op", DELTA)
def test_beta_that_overflows(op, rng):
    """One key, beta 1e3: the state grows by 999 a token until float32 has no number for it."""
    x = testing.make_inputs(op, rng, B=4, T=40, K=1, V=4, dtype=np.float32)
    x["k"][:] = 1
    x["beta"][:] = 1e3
    x["v"][:] = np.abs(x["v"]) + 1
    if "g" in x:
        x["g"][:] = 0
    ref = getattr(reference, op)(**x, dtype=np.float64)[0]
    for mode in ("recurrent", "chunk"):
        o = getattr(linattn, op)(**x, mode=mode, chunk_size=1)[0]
        small, huge = np.abs(ref) < 1e37, np.abs(ref) > 1e40
        assert huge.any() and np.isfinite(o[small]).all() and not np.isfinite(o[huge]).any()


@pytest.mark.parametrize(("op", "beta", "dtype"), taking_turns(DELTA, (1, 2), turns=REALS))
def test_equal_keys(op, beta, dtype, rng):
    """Every key of a sequence the same: I + L is all ones below its diagonal, or all twos. The few
    sequences with the largest numbers decide, so there are more of them."""
    many = 256
    x = make(op, rng, dtype, B=many)
    k = rng.standard_normal((many, 1, 1, K))
    x["k"][:] = k / np.linalg.norm(k, axis=-1, keepdims=True)
    x["beta"][:] = beta
    if "g" in x:
        x["g"][:] = 0
    judge(op, rng, x, chunk_sizes=(None, 17), gradients=False)
    judge_gradients(
        op, rng, x, (("recurrent", None), ("chunk", None), ("chunk", 17), ("parallel", None))
    )


@pytest.mark.parametrize("op", DELTA)
def test_raw_keys_grow_and_normed_keys_do_not(op, rng):
    """Keys of norm 4 and beta = 1: each token multiplies by up to 1 - 16. That is the mathematics,
    not a fault; qk_l2norm is the cure."""
    x = make(op, rng, np.float64, K=16, B=8, T=130)
    x["k"] = rng.standard_normal(x["k"].shape)  # norm about 4
    x["beta"][:] = 1
    if "g" in x:
        x["g"][:] = 0
    ref = getattr(reference, op)(**x)[1]
    assert np.abs(ref).max() > 1e30
    for mode in MODES:
        _, state = getattr(linattn, op)(**x, mode=mode, output_final_state=True)
        assert np.isfinite(state).all() and np.abs(state).max() > 1e30, mode
    short = make(op, rng, np.float64, K=16)
    short["k"] = rng.standard_normal(short["k"].shape)
    judge(op, rng, short | {"qk_l2norm": True})
    _, state = getattr(linattn, op)(**x, qk_l2norm=True, output_final_state=True)
    # a projection shrinks the state, and every write adds |v| at most
    assert np.abs(state).max() < np.abs(x["initial_state"]).max() * 16 + 130 * 16


# ---- NaN and infinity in one token ----


@pytest.mark.parametrize("dtype", (np.float32, ml_dtypes.bfloat16))
@pytest.mark.parametrize("name", ("q", "k", "v", "beta"))
@pytest.mark.parametrize("op", linattn.OPS)
def test_not_finite_in_one_token(op, name, dtype, rng):
    x = make(op, rng, dtype, B=3)
    if name not in x:
        pytest.skip(f"{op} has no {name}")
    clean = {mode: getattr(linattn, op)(**x, mode=mode)[0] for mode in MODES}
    for value in (np.nan, np.inf, -np.inf):
        sick = x | {name: x[name].copy()}
        sick[name][1, 20] = value
        # The whole token is hit, so inf - inf may occur. The order of the sums decides between inf
        # and NaN; in any order the result is not finite.
        want = getattr(reference, op)(**sick, dtype=dtype)
        for mode in MODES:
            o, state = getattr(linattn, op)(**sick, mode=mode, output_final_state=True)
            for a, b in zip(leaves((o, state)), leaves(want), strict=True):
                np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b), f"{mode} {value}")
            assert o[1, :20].tobytes() == clean[mode][1, :20].tobytes(), (mode, value)
            assert o[[0, 2]].tobytes() == clean[mode][[0, 2]].tobytes(), (mode, value)
            if np.isnan(value):
                np.testing.assert_array_equal(np.isnan(o), np.isnan(want[0]), mode)


@pytest.mark.parametrize("dtype", (np.float32, ml_dtypes.bfloat16))
@pytest.mark.parametrize("value", (np.nan, np.inf))
@pytest.mark.parametrize("name", ("q", "k", "v", "initial_state"))
@pytest.mark.parametrize("op", linattn.OPS)
def test_not_finite_in_one_number(op, name, value, dtype, rng):
    """As above. Elements that it does not reach stay finite, for example the other columns of v."""
    plain = {"feature_map": "identity", "normalize": False} if op == "linear_attention" else {}
    x = testing.make_inputs(op, rng, B=2, T=70, K=40, V=24, dtype=dtype, initial_state=True)
    if plain:
        x["initial_state"] = x["initial_state"][0]
    sick = x | {name: over_arrays(np.copy, x[name])}
    leaves(sick[name])[0][(1, 20, 0, 7) if name != "initial_state" else (1, 0, 20, 7)] = value
    want = getattr(reference, op)(**sick, **plain, dtype=np.float64)
    for mode in MODES:
        clean, _ = getattr(linattn, op)(**x, **plain, mode=mode)
        o, state = getattr(linattn, op)(**sick, **plain, mode=mode, output_final_state=True)
        assert not np.isfinite(o).all(), mode
        for a, b in zip(leaves((o, state)), leaves(want), strict=True):
            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b), mode)
        assert o[0].tobytes() == clean[0].tobytes(), mode
        if name != "initial_state":
            assert o[1, :20].tobytes() == clean[1, :20].tobytes(), mode


@pytest.mark.parametrize("op", linattn.OPS)
def test_nan_in_one_column_of_v_stays_in_its_column(op, rng):
    x = make(op, rng, np.float32, B=1)
    x["v"][0, 5, 0, 3] = np.nan
    for mode in MODES:
        o, _ = getattr(linattn, op)(**x, mode=mode)
        nan = np.isnan(o)
        assert nan[0, 5:, 0, 3].all() and nan.sum() == T - 5


# ---- denormal numbers and signed zeros ----


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("op", linattn.OPS)
def test_denormal_values_are_not_flushed(op, dtype, rng):
    tiny = np.finfo(dtype).tiny  # the least normal number
    x = make(op, rng, dtype, T=20)
    del x["initial_state"]
    x["v"] = (x["v"] * (tiny / 8)).astype(dtype)
    ref, _ = getattr(reference, op)(**x, dtype=np.longdouble)
    # Below tiny every result is a multiple of the least denormal: at most half of one is lost in
    # each of the 20 writes, 20 predictions of 8 terms and the read of 8 terms that a number passes.
    least = np.finfo(dtype).smallest_subnormal
    rounded = 20 + 20 * 8 + 8
    for mode in MODES:
        o, _ = getattr(linattn, op)(**x, mode=mode)
        assert np.abs(o - ref).max() <= rounded * least, mode
        assert (np.abs(o) < tiny).mean() > 0.5 and (o != 0).mean() > 0.95, mode


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize(
    "op", [op for op in linattn.OPS if op not in DELTA + ops_with(rule="dplr")]
)
def test_denormal_keys_are_read(op, dtype, rng):
    """Denormal keys beside huge values: their products are ordinary numbers. A chunk fades the keys
    themselves, and a denormal key then loses digits: with a decay only the recurrence has them.
    dplr reads its own write by q . k, which loses them too."""
    x = make(op, rng, dtype)
    options = {}
    if op == "linear_attention":
        x = testing.make_inputs(
            op, rng, B=B, T=T, K=K, V=V, dtype=dtype, normalize=False, initial_state=True
        )
        options = {"feature_map": "identity"}
    tiny = float(np.finfo(dtype).tiny)
    x["k"] = (x["k"] * (tiny / 16)).astype(dtype)
    x["v"] = (x["v"] / (4 * tiny)).astype(dtype)
    x["initial_state"] = x["initial_state"] / 64  # as small as what is written
    modes = MODES if op == "linear_attention" else ("recurrent",)
    judge(op, rng, x | options, modes=modes, gradients=False)


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize("op", linattn.OPS)
def test_negative_zero_is_zero(op, dtype, rng):
    x = make(op, rng, dtype, B=2)
    zeros = {}
    for name in ("q", "k", "v", "g", "beta", "slopes"):
        if name in x:
            x[name] = x[name].copy()
            x[name][..., ::2] = 0
            zeros[name] = np.where(x[name] == 0, -x[name], x[name]).astype(x[name].dtype)
            assert np.signbit(zeros[name]).any()
    d = testing.make_output_gradients(op, rng, x)
    forward, backward = getattr(linattn, op), getattr(linattn, f"{op}_backward")
    for mode in MODES:
        for call, more in ((forward, {"output_final_state": True}), (backward, d)):
            both = (call(**more, **y, mode=mode) for y in (x, x | zeros))
            for a, b in zip(*map(leaves, both), strict=True):
                np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64), mode)


# ---- linear attention: denominators and feature maps ----


def linear_problem(rng, dtype, **options):
    x = testing.make_inputs("linear_attention", rng, B=B, T=T, K=24, V=V, dtype=dtype)
    return x | options  # z has 2400 numbers


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("normalize", ("clamp", "add"))
@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.filterwarnings("ignore:normalize. expected denominators")  # test_features.py has it
def test_denominators_that_are_negative(causal, normalize, dtype, rng):
    """phi = identity, insisted on: q > 0, k < 0 in every second sequence, and far from zero."""
    x = linear_problem(rng, dtype, feature_map="identity", normalize=normalize, causal=causal)
    x["q"], x["k"] = (np.abs(x[name]) + x[name].dtype.type(0.1) for name in ("q", "k"))
    x["k"][::2] *= -1
    judge("linear_attention", rng, x)


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("normalize", ("clamp", "add"))
@pytest.mark.parametrize("feature_map", ("identity", "relu2"))
def test_denominators_of_zero(feature_map, normalize, dtype, rng):
    """No key has been written yet, or the query sees none: 0 / eps = 0, and finite gradients."""
    x = linear_problem(rng, dtype, feature_map=feature_map, normalize=normalize)
    x["q"], x["k"] = (np.abs(x[name]) + x[name].dtype.type(0.1) for name in ("q", "k"))
    x["k"][:, :9] = 0 if feature_map == "identity" else -1
    x["q"][:, 15:18] = 0 if feature_map == "identity" else -1
    for mode in MODES:
        o, _ = linattn.linear_attention(**x, mode=mode)
        assert not o[:, :9].any() and not o[:, 15:18].any()
    # Where den is 0 the gradient is do / eps, a million times the rest. The ordinary rows are
    # judged by themselves, with do = 0 in those.
    judge("linear_attention", rng, x, gradients=False)
    do = rng.standard_normal(x["v"].shape).astype(dtype)
    do[:, :9] = 0
    do[:, 15:18] = 0
    compare_gradients(x, do)


def compare_gradients(x, do):
    dtype = x["v"].dtype
    refs = reference.backward("linear_attention", do, **x, dtype=wider(dtype))
    for mode in MODES:
        grads = linattn.linear_attention_backward(do, **x, mode=mode)
        compare(
            f"linear_attention_backward {mode}",
            dtype,
            True,
            naive_gradients("linear_attention", dtype, mode, 16),
            x | {"do": do},
            *((name, getattr(grads, name), getattr(refs, name)) for name in ("dq", "dk", "dv")),
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("normalize", ("clamp", "add"))
@pytest.mark.parametrize("causal", (True, False))
def test_a_denominator_that_is_nan(causal, normalize, dtype, mode, rng):
    """A NaN stays NaN where the numerator is a number: no clamp takes it for small."""
    x = testing.make_inputs(
        "linear_attention", rng, B=2, T=T, K=K, V=V, dtype=dtype, initial_state=True
    )
    x["initial_state"][1][1, 0, 2] = np.nan
    o, (S, z) = linattn.linear_attention(
        **x, normalize=normalize, causal=causal, mode=mode, output_final_state=True
    )
    assert np.isnan(o[1]).all() and np.isfinite(o[0]).all()
    assert np.isfinite(S).all() and np.argwhere(~np.isfinite(z)).tolist() == [[1, 0, 2]]


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("normalize", ("clamp", "add"))
def test_gradients_at_denominators_of_zero(normalize, dtype, rng):
    x = linear_problem(rng, dtype, feature_map="relu2", normalize=normalize)
    x["q"], x["k"] = (np.abs(x[name]) + x[name].dtype.type(0.1) for name in ("q", "k"))
    x["k"][:, :9] = -1
    x["q"][:, 15:18] = -1
    compare_gradients(x, rng.standard_normal(x["v"].shape).astype(dtype))


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("normalize", (True, "add", False))
def test_elu_far_below_zero(normalize, dtype, rng):
    """exp(-20) to exp(-100) are numbers; expm1(x) + 1 would be exactly 0 from -17.5 on."""
    x = linear_problem(rng, dtype, normalize=normalize, eps=0.0)
    x["k"] = rng.uniform(-40, -20, x["k"].shape).astype(dtype)
    judge("linear_attention", rng, x)
    # one key: o = phi(q) phi(k) v, as far down as float32's denormal numbers go
    k = np.linspace(-100, -20, 81).astype(dtype).reshape(81, 1, 1, 1)
    one = np.ones((81, 1, 1, 1), dtype)
    for mode in MODES:
        o, _ = linattn.linear_attention(0 * one, k, one, normalize=False, scale=1.0, mode=mode)
        assert (o > 0).all()
        exact = np.exp(k.astype(np.float64))
        least = np.finfo(dtype).smallest_subnormal
        np.testing.assert_array_less(np.abs(o - exact), 2 * np.finfo(dtype).eps * exact + 2 * least)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", REALS)
def test_exp_map_overflows_where_numpy_does(dtype, mode):
    top = np.log(np.finfo(dtype).max.astype(np.float64))
    x = np.concatenate([np.linspace(-top - 60, top + 60, 400), [-np.inf, np.inf, np.nan]])
    x = x[np.abs(np.abs(x) - top) > 1e-3].astype(dtype).reshape(-1, 1, 1, 1)
    one = np.ones_like(x)
    with np.errstate(all="ignore"):
        want = np.exp(x)
    got, _ = linattn.linear_attention(
        one, x, one, feature_map=("identity", "exp"), normalize=False, scale=1.0, mode=mode
    )
    for is_so in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(is_so(got), is_so(want))
    normal = np.isfinite(want) & (want > np.finfo(dtype).tiny)
    np.testing.assert_allclose(got[normal], want[normal], rtol=3 * np.finfo(dtype).eps)
    low = want <= np.finfo(dtype).tiny
    assert np.abs(got[low] - want[low]).max() <= 2 * np.finfo(dtype).smallest_subnormal


@pytest.mark.parametrize("dtype", REALS)
def test_exp_map_with_a_row_that_overflows(dtype, rng):
    x = testing.make_inputs("linear_attention", rng, B=3, T=T, K=K, V=V, dtype=dtype)
    x |= {"feature_map": "exp"}
    x["k"][1, 20, 0, 2] = 800
    x["v"] = np.abs(x["v"])  # inf - inf would depend on the order of the sums
    with np.errstate(over="ignore"):
        ref, _ = reference.linear_attention(**x, dtype=dtype)
    for mode in MODES:
        o, _ = linattn.linear_attention(**x, mode=mode)
        np.testing.assert_array_equal(np.isfinite(o), np.isfinite(ref))


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", REALS)
def test_a_sum_of_keys_that_overflows(dtype, mode, causal):
    """Then z is infinite and reads are 0. Neither becomes NaN with the next tokens."""
    device.needs_host("the test is of the host's sums")
    huge = np.finfo(dtype).max / 4
    q = np.ones((1, 70, 1, 1), dtype)
    o, (S, z) = linattn.linear_attention(
        q,
        q * huge,
        q / huge,
        feature_map="identity",
        normalize="clamp",
        mode=mode,
        causal=causal,
        output_final_state=True,
    )
    assert np.isposinf(z).all()
    np.testing.assert_allclose(S, 70, rtol=1e-5)
    assert not o[:, 8:].any()


# ---- long sequences ----


@pytest.mark.parametrize("mode", ("chunk", "recurrent"))
@pytest.mark.parametrize("op", ("linear_attention", "gla", "gated_delta_rule"))
def test_a_long_sequence(op, mode, rng):
    """2^15 tokens in float32. The chunk form of the reference, in float64, is exact to 1e-12.
    test_long.py has more, against a reference that goes token by token."""
    x = testing.make_inputs(op, rng, T=2**15, K=8, V=8, dtype=np.float32)
    o, state = getattr(linattn, op)(**x, mode=mode, output_final_state=True)
    function = getattr(reference, op)
    ref_o, ref_state = function(**x, form="chunk")
    naive_o, naive_state = function(**x, dtype=np.float32, form=mode, chunk_size=16)
    testing.assert_accurate(o, ref_o, naive_o, dtype=np.float32, name=op)
    del state, ref_state, naive_state


@pytest.mark.parametrize("op", ("simple_gla", "gated_delta_rule", "kda"))
def test_a_million_tokens(op, rng):
    """2^20 tokens. The gates forget: after 512 tokens, a decay of e^-400, nothing of the earlier
    ones is left, and the reference may start there."""
    T, tail, lead = 2**20, 2048, 512
    x = testing.make_inputs(op, rng, T=T, K=8, V=8, dtype=np.float32)
    chunk, _ = getattr(linattn, op)(**x)
    recurrent, _ = getattr(linattn, op)(**x, mode="recurrent")
    function = getattr(reference, op)
    for start in (2**19, T - lead - tail):
        part = {name: a[:, start : start + lead + tail] for name, a in x.items()}
        ref = function(**part)[0][:, lead:]
        for o, form in ((chunk, "chunk"), (recurrent, "recurrent")):
            naive = function(**part, dtype=np.float32, form=form, chunk_size=16)[0][:, lead:]
            testing.assert_accurate(
                o[:, start + lead : start + lead + tail],
                ref,
                naive,
                dtype=np.float32,
                name=f"{op} {form} from {start}",
            )
