"""Properties that hold for every op and every shape: one algebraic property a test.

Where the contract promises bits, bits are compared. Elsewhere two ways to the same result are
compared in float64 (`assert_agree`), and in float32 by the acceptance rule with the reference.
Examples are derandomised: every run draws the same ones.
"""

import ml_dtypes
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import device, grid
from support.compare import assert_same_bits, over_arrays
from support.device import ops as linattn
from support.grid import MODES, parts
from support.problems import KEY_HEADS, PER_HEAD, PER_TOKEN
from support.variants import (
    GATED,
    HEAD_DECAY,
    KEY_DECAY,
    NORMALISED,
    PAIR_DECAY,
    PREDICTS,
    having,
    ops_with,
    with_decay,
)

from linattn import reference, testing

PROFILE = settings(
    max_examples=200,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

REALS = (np.float64, np.float64, np.float64, np.float32)
DTYPES = (*REALS, np.float16, ml_dtypes.bfloat16)


# ---- problems ----


@st.composite
def problems(
    draw,
    ops=linattn.OPS,
    dtypes=(np.float64,),
    least_T=0,
    most_T=70,
    least_B=1,
    most_B=2,
    options=True,
    l2norm=True,
    H=(1, 2),
    least_V=1,
):
    """An op, its keyword arguments (inputs and options), and how to run it (mode, chunk_size)."""
    op = draw(st.sampled_from(ops))
    heads = draw(st.sampled_from(H))
    K = draw(st.integers(1, 40))
    normalize = True
    if op == "linear_attention" and options:
        normalize = draw(st.sampled_from((True, "add", False)))
    x = testing.make_inputs(
        op,
        generator(draw),
        B=draw(st.integers(least_B, most_B)),
        T=draw(st.integers(least_T, most_T)),
        H=heads,
        HV=heads * draw(st.integers(1, 2)),
        K=K,
        V=draw(st.integers(least_V, 40)),
        dtype=draw(st.sampled_from(dtypes)),
        initial_state=draw(st.booleans()),
        normalize=normalize,
    )
    if op == "linear_attention" and options:
        maps = ("elu+1", "relu+eps", "exp", *(() if normalize else ("identity", "relu2")))
        x["feature_map"] = draw(st.sampled_from(maps))
    # With one key x / sqrt(x^2 + 1e-6) is all but constant: its gradient is a difference of equals,
    # and no two ways to it agree to many digits.
    if l2norm and K > 1 and draw(st.booleans()):
        x["qk_l2norm"] = True
    if op in PAIR_DECAY and options and draw(st.booleans()):
        x["batch"] = draw(st.integers(1, 70))
    run = {"mode": draw(st.sampled_from(MODES)), "chunk_size": draw(st.integers(1, 70))}
    return op, x, run


def generator(draw):
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1)))


def seeds():
    return st.integers(0, 2**32 - 1).map(np.random.default_rng)


def change(x, per_token=None, state=None, per_head=None):
    """x with a function applied to every [B,T,...] array, every state, every [HV] gate."""
    changed = dict(x)
    for name, value in x.items():
        if name in PER_TOKEN and per_token:
            changed[name] = per_token(value)
        elif name in PER_HEAD and per_head:
            changed[name] = per_head(value)
        elif name in ("initial_state", "d_final_state") and state:
            changed[name] = over_arrays(state, value)
    return changed


def heads_of(x, heads):
    """The problem of some value heads, each with a copy of the query and key head it reads."""
    group = x["v"].shape[2] // x["q"].shape[2]
    own_key_head = [h // group for h in heads]
    shared = {n: x[n].take(own_key_head, axis) for n, axis in KEY_HEADS.items() if n in x}
    own = {name: a for name, a in x.items() if name not in shared}
    return shared | change(own, lambda a: a[:, :, heads], lambda a: a[:, heads], lambda a: a[heads])


def forward(op, x, **run):
    """{"o": o, and the parts of the final state}."""
    o, state = getattr(linattn, op)(**x, **run, output_final_state=True)
    return {"o": o} | dict(parts("final_state", state))


def state_of(outputs):
    if "final_state" in outputs:
        return outputs["final_state"]
    return outputs["final_state[0]"], outputs["final_state[1]"]


def backward(op, x, d, **run):
    """{name: gradient}"""
    grads = getattr(linattn, f"{op}_backward")(**d, **x, **run)
    return {name: a for field in grads._fields for name, a in parts(field, getattr(grads, field))}


# ---- comparisons ----


def assert_all_same_bits(got, wanted, but=()):
    assert got.keys() == wanted.keys()
    for name in got:
        if name not in but:
            assert_same_bits(got[name], wanted[name], name)


def assert_agree(a, b, name="", gradient=False, size=None):
    """Compare two float64 ways to one result. The acceptance rule allows each an rms error of r =
    1e-12 (2e-12 for a gradient) of the rms of the result, so they may be twice that apart. Where b
    is a sum of larger terms, `size` is the rms to compare with."""
    assert a.shape == b.shape and a.dtype == b.dtype == np.float64, (name, a.dtype, b.dtype)
    assert np.isfinite(a).all() and np.isfinite(b).all(), name
    r = testing.RMS_BOUND["float64"] * (2 if gradient else 1)
    if size is None:
        size = rms(b)
    assert rms(a - b) <= 2 * r * size, f"{name}: {rms(a - b):.3e} of {size:.3e}"


def assert_all_agree(got, wanted, gradient=False):
    assert got.keys() == wanted.keys()
    for name in got:
        assert_agree(got[name], wanted[name], name, gradient)


def rms(a):
    return np.sqrt(np.mean(a * a)) if a.size else 0.0


# ---- the forms of one function ----


@PROFILE
@given(problems())
def test_the_three_modes_agree(problem):
    op, x, run = problem
    recurrent = forward(op, x, mode="recurrent")
    assert_all_agree(forward(op, x, mode="chunk", chunk_size=run["chunk_size"]), recurrent)
    assert_all_agree(forward(op, x, mode="parallel"), recurrent)


@PROFILE
@given(problems(dtypes=(np.float32,), least_T=1, most_T=40, most_B=1, least_V=16), seeds())
def test_the_three_modes_are_accurate_in_float32(problem, rng):
    op, x, run = problem
    # The rule compares largest errors; on fewer numbers than about 1000 those are accidents.
    _, T, HV, V = x["v"].shape
    B = -(-1000 // (T * HV * V))
    options = {name: x[name] for name in ("feature_map", "qk_l2norm", "batch") if name in x}
    x = (
        testing.make_inputs(
            op,
            rng,
            B=B,
            T=T,
            H=x["q"].shape[2],
            HV=HV,
            K=x["q"].shape[3],
            V=V,
            dtype=np.float32,
            normalize=x.get("normalize", True),
        )
        | options
    )
    function = getattr(reference, op)
    ref, _ = function(**x)
    for mode in MODES:
        o, _ = getattr(linattn, op)(**x, mode=mode, chunk_size=run["chunk_size"])
        form = {"form": mode, "chunk_size": run["chunk_size"]}
        naive, _ = function(**x, dtype=np.float32, **form)
        testing.assert_accurate(o, ref, naive, dtype=np.float32, name=f"{op} {mode}")


@PROFILE
@given(problems(), st.integers(1, 70))
def test_any_chunk_size_agrees(problem, other):
    op, x, run = problem
    chunked = forward(op, x, mode="chunk", chunk_size=run["chunk_size"])
    assert_all_agree(forward(op, x, mode="chunk", chunk_size=other), chunked)
    assert_all_agree(forward(op, x, mode="chunk", chunk_size=1), forward(op, x, mode="recurrent"))
    T = max(x["v"].shape[1], 1)
    assert_all_same_bits(
        forward(op, x, mode="chunk", chunk_size=T), forward(op, x, mode="parallel")
    )


@PROFILE
@given(problems(), st.data())
def test_a_sequence_may_be_cut_and_resumed_anywhere(problem, data):
    op, x, run = problem
    cut = data.draw(st.integers(0, x["v"].shape[1]))
    cut -= cut % x.get("batch", 1)
    whole = forward(op, x, **run)
    first = forward(op, change(x, lambda a: a[:, :cut]), **run)
    rest = forward(op, change(x, lambda a: a[:, cut:]) | {"initial_state": state_of(first)}, **run)
    rest["o"] = np.concatenate([first["o"], rest["o"]], axis=1)
    assert_all_agree(rest, whole)


@PROFILE
@given(problems(most_T=40), st.booleans())
def test_steps_equal_one_forward(problem, v_first):
    op, x, run = problem
    x.pop("batch", None)  # a step is a batch of its own
    whole = forward(op, x, **run)
    T = x["v"].shape[1]
    step = getattr(linattn, f"{op}_step")
    if "initial_state" in x:
        state = over_arrays(np.copy, x["initial_state"])
    else:
        state = over_arrays(np.zeros_like, state_of(whole))
    if v_first:
        state = grid.v_first(state)
    given_to_step = {name: a for name, a in x.items() if name != "initial_state"}
    o = np.empty_like(x["v"])
    for t in range(T):
        token = change(given_to_step, lambda a, t=t: a[:, t])
        o[:, t] = step(**token, state=state, state_v_first=v_first)
    if v_first:
        state = grid.v_first(state)
    assert_all_agree({"o": o} | dict(parts("final_state", state)), whole)


# ---- who can reach whom ----


@PROFILE
@given(problems(dtypes=DTYPES, least_T=1), st.data(), st.booleans(), seeds())
def test_the_future_does_not_reach_the_past(problem, data, nan, rng):
    op, x, run = problem
    cut = data.draw(st.integers(0, x["v"].shape[1]))

    def other_future(a):
        a = a.copy()
        a[:, cut:] = np.nan if nan else -np.abs(rng.standard_normal(a[:, cut:].shape))
        return a

    o = forward(op, x, **run)["o"]
    changed = forward(op, change(x, other_future), **run)["o"]
    assert_same_bits(changed[:, :cut], o[:, :cut])


@PROFILE
@given(problems(dtypes=DTYPES, least_T=1), st.data(), seeds())
def test_the_gradient_of_the_past_does_not_reach_the_future(problem, data, rng):
    op, x, run = problem
    cut = data.draw(st.integers(0, x["v"].shape[1]))
    d = testing.make_output_gradients(op, rng, x)
    changed = {**d, "do": d["do"].copy()}
    changed["do"][:, :cut] = np.nan
    grads, others = backward(op, x, d, **run), backward(op, x, changed, **run)
    for name in grads:
        if name[1:] in PER_TOKEN and grads[name].ndim > 1:
            assert_same_bits(others[name][:, cut:], grads[name][:, cut:], name)


@PROFILE
@given(problems(dtypes=DTYPES, least_T=1, least_B=2, most_B=3), st.data(), seeds())
def test_a_nan_stays_in_its_sequence_and_head(problem, data, rng):
    op, x, run = problem
    B, T, HV, _ = x["v"].shape
    group = HV // x["q"].shape[2]
    b, h, t = (data.draw(st.integers(0, n - 1)) for n in (B, HV, T))
    d = testing.make_output_gradients(op, rng, x)
    name = data.draw(st.sampled_from([n for n in PER_TOKEN if n in x]))
    sick = x | {name: x[name].copy()}
    by_key_head = name in KEY_HEADS
    sick[name][b, t, h // group if by_key_head else h] = np.nan
    # The rest: other sequences whole, and in this one the value heads of other groups.
    heads = [i for i in range(HV) if i // group != h // group]
    well, ill = forward(op, x, **run), forward(op, sick, **run)
    grads, ill_grads = backward(op, x, d, **run), backward(op, sick, d, **run)
    sequences = [i for i in range(B) if i != b]
    for key in well:
        axis = 2 if key == "o" else 1
        assert_same_bits(ill[key][sequences], well[key][sequences], key)
        assert_same_bits(ill[key][b].take(heads, axis - 1), well[key][b].take(heads, axis - 1), key)
    for key in grads:
        others = sorted({i // group for i in heads}) if key[1:] in KEY_HEADS else heads
        if grads[key].ndim <= 2:  # gamma's, slopes' and bonus': a sum over the sequences
            assert_same_bits(ill_grads[key][others], grads[key][others], key)
            continue
        assert_same_bits(ill_grads[key][sequences], grads[key][sequences], key)
        axis = 1 if key.startswith("d_initial") else 2
        assert_same_bits(
            ill_grads[key][b].take(others, axis - 1), grads[key][b].take(others, axis - 1), key
        )
    after = ill["o"][b, t:, h]
    if op in ops_with(rule="bonus") and name == "g":  # the next token reads it, or the last state
        after = ill["final_state"][b, h]
    assert np.isnan(after.astype(np.float64)).any()


@PROFILE
@given(problems(dtypes=DTYPES, least_B=2, most_B=3, least_T=1), seeds())
def test_sequences_and_heads_do_not_know_their_neighbours(problem, rng):
    op, x, run = problem
    B, _, HV, _ = x["v"].shape
    d = testing.make_output_gradients(op, rng, x)
    both = x | d
    o, grads = forward(op, x, **run), backward(op, x, d, **run)
    # sums over sequences
    but = ("dg",) if op in HEAD_DECAY else ("dbonus",) if "dbonus" in grads else ()

    order = rng.permutation(B)
    for rows in (order, order[:1]):  # another order, and one alone
        y = change(both, lambda a, rows=rows: a[rows], lambda a, rows=rows: a[rows])
        d_rows = {name: y.pop(name) for name in d}
        assert_all_same_bits(forward(op, y, **run), {n: a[rows] for n, a in o.items()})
        wanted = {n: a if n in but else a[rows] for n, a in grads.items()}
        assert_all_same_bits(backward(op, y, d_rows, **run), wanted, but)

    order = [int(h) for h in rng.permutation(HV)]
    for heads in (order, order[:1]):
        y = heads_of(both, heads)
        d_heads = {name: y.pop(name) for name in d}
        wanted = {n: a.take(heads, 2 if n == "o" else 1) for n, a in o.items()}
        assert_all_same_bits(forward(op, y, **run), wanted)
        got = backward(op, y, d_heads, **run)
        wanted = {
            n: a.take(
                heads,
                a.ndim - 2
                if n == "dg" and op in KEY_DECAY
                else a.ndim - 1
                if n == "dg"
                else 1
                if "state" in n
                else 2,
            )
            for n, a in grads.items()
            if n[1:] not in KEY_HEADS
        }
        for name in KEY_HEADS:  # sums over the group: below
            got.pop(f"d{name}", None)
        assert_all_same_bits(got, wanted)


# ---- the algebra ----


@PROFILE
@given(problems(), seeds())
def test_linear_in_v(problem, rng):
    op, x, run = problem
    zeros = change(x, state=np.zeros_like)
    v = x["v"]
    w = rng.standard_normal(v.shape)
    both, one, other, twice = (
        forward(op, zeros | {"v": values}, **run) for values in (v - 3 * w, v, w, 2 * v)
    )
    assert_same_bits(twice["o"], 2 * one["o"])
    size = rms(one["o"]) + 3 * rms(other["o"])
    assert_agree(both["o"], one["o"] - 3 * other["o"], "o", size=size)


@PROFILE
@given(problems(ops=PREDICTS, dtypes=REALS))
def test_beta_zero_writes_nothing(problem):
    op, x, run = problem
    x = x | {"beta": np.zeros_like(x["beta"])}
    nothing = forward(op, {n: a for n, a in x.items() if n != "initial_state"}, **run)
    assert not nothing["o"].any() and not nothing["final_state"].any()
    if "initial_state" not in x:
        return
    kept = forward(op, x, **run)["final_state"]
    S = x["initial_state"]
    if op == "delta_rule":
        np.testing.assert_array_equal(kept, S)
    elif x["v"].dtype == np.float64:
        decay = np.exp(x["g"].sum(1))  # [B,HV] or [B,HV,K]
        faded = S * (decay[..., None] if op == "kda" else decay[..., None, None])
        assert_agree(kept, faded, "final_state")


@PROFILE
@given(problems(ops=having(GATED, "none")))
def test_g_zero_is_no_gate_and_alpha_is_exp_g(problem):
    op, x, run = problem
    plain = with_decay(op, "none")
    y = {name: a for name, a in x.items() if name != "g"}
    options = {"feature_map": "identity", "normalize": False} if "beta" not in x else {}
    assert_all_agree(
        forward(op, x | {"g": np.zeros_like(x["g"])}, **run), forward(plain, y | options, **run)
    )
    assert_all_agree(forward(op, y | {"alpha": np.exp(x["g"])}, **run), forward(op, x, **run))


@PROFILE
@given(problems(), seeds())
def test_shared_heads_are_repeated_heads(problem, rng):
    op, x, run = problem
    group = x["v"].shape[2] // x["q"].shape[2]
    repeated = x | {n: np.repeat(x[n], group, axis) for n, axis in KEY_HEADS.items() if n in x}
    assert_all_same_bits(forward(op, x, **run), forward(op, repeated, **run))
    d = testing.make_output_gradients(op, rng, x)
    got, wanted = backward(op, x, d, **run), backward(op, repeated, d, **run)
    for name, axis in KEY_HEADS.items():
        if name not in x:
            continue
        terms, one = wanted.pop(f"d{name}"), got.pop(f"d{name}")
        total = np.stack(
            [terms[(slice(None),) * axis + (slice(i, None, group),)] for i in range(group)]
        )
        # the terms of the group's heads may cancel
        assert_agree(one, total.sum(0), name, gradient=True, size=rms(terms))
    assert_all_same_bits(got, wanted)


@PROFILE
@given(problems(dtypes=DTYPES, most_B=1), st.data(), st.booleans(), seeds())
def test_packed_sequences_are_separate_calls(problem, data, int32, rng):
    op, x, run = problem
    T = x["v"].shape[1]
    cuts = data.draw(st.lists(st.integers(0, T), max_size=4))
    cu = np.array([0, *sorted(cuts), T])
    N = len(cu) - 1
    few = {int(n) <= device.FEW_TOKENS for n in (*np.diff(cu), T) if n}
    if not device.on_host() and len(few) == 2:
        # otherwise some of these calls go token by token, and others by chunks
        run = run | {"mode": "recurrent"}
    one = {name: a for name, a in x.items() if name != "initial_state"}
    packed = one | {"cu_seqlens": cu.astype(np.int32 if int32 else np.int64)}
    d = testing.make_output_gradients(op, rng, packed)
    if "initial_state" in x:
        packed["initial_state"] = over_arrays(
            lambda a: np.concatenate([a * (n + 1) for n in range(N)]), x["initial_state"]
        )
    o, grads = forward(op, packed, **run), backward(op, packed, d, **run)
    sums = {}  # of the gradients that a sequence adds to
    for n in range(N):
        y = change(packed | d, lambda a, n=n: a[:, cu[n] : cu[n + 1]], lambda a, n=n: a[n : n + 1])
        del y["cu_seqlens"]
        d_n = {name: y.pop(name) for name in d}
        rows = {
            name: a[:, cu[n] : cu[n + 1]] if name == "o" else a[n : n + 1] for name, a in o.items()
        }
        assert_all_same_bits(forward(op, y, **run), rows)
        rows = {
            name: a[n : n + 1]
            if name.startswith("d_initial")
            else a
            if a.ndim <= 2
            else a[:, cu[n] : cu[n + 1]]
            for name, a in grads.items()
        }
        alone = backward(op, y, d_n, **run)
        summed = [name for name, a in alone.items() if a.ndim <= 2]
        assert_all_same_bits(alone, rows, summed)
        for name in summed:
            sums[name] = sums.get(name, 0) + alone[name]
    for name, total in sums.items():
        if x["v"].dtype == np.float64:
            assert_agree(grads[name], total, name, gradient=True)


@PROFILE
@given(problems(ops=("linear_attention",), least_T=1, most_T=40))
def test_normalised_rows_are_convex_combinations(problem):
    op, x, run = problem
    x = x | {"normalize": True, "scale": 1.0}
    if x.get("feature_map") in ("identity", "relu2"):
        x["feature_map"] = "elu+1"  # these may have no weight to share out
    x.pop("initial_state", None)
    v = x["v"]
    weights = linattn.implicit_weights(**{n: a for n, a in x.items() if n != "v"}, op=op, **run)
    weights = weights.repeat(v.shape[2] // x["q"].shape[2], axis=1)
    B, T, HV, _ = v.shape
    assert weights.shape == (B, HV, T, T)
    assert (weights >= 0).all()
    assert not np.triu(weights, 1).any()
    # every row is T correctly rounded quotients of a sum of T: an ulp for each
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=0, atol=T * K_EPS)
    o = forward(op, x, **run)["o"]
    assert_agree(o, (weights @ v.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3), "o")
    lowest, highest = (f.accumulate(v, axis=1) for f in (np.minimum, np.maximum))
    slack = T * K_EPS * np.abs(v).max()
    assert (lowest - slack <= o).all() and (o <= highest + slack).all()


K_EPS = 40 * np.finfo(np.float64).eps  # a score is a sum of up to 40 products


@PROFILE
@given(problems(), st.floats(0.1, 10))
def test_scale_is_a_factor_of_the_read(problem, factor):
    op, x, run = problem
    normalised = op == "linear_attention" and x.get("normalize", True)
    K = x["q"].shape[3]
    o = forward(op, x, **run)
    default = reference.OPS[op].default_scale or K**-0.5
    assert_all_same_bits(forward(op, x, scale=default, **run), o)
    scaled = forward(op, x, scale=factor * K**-0.5, **run)
    assert_all_same_bits(
        *({n: a for n, a in y.items() if n != "o"} for y in (scaled, o))
    )  # states do not read
    if not normalised:
        assert_agree(scaled["o"], factor * K**-0.5 / default * o["o"], "o")
        twice = forward(op, x, scale=2 * factor * K**-0.5, **run)
        assert_same_bits(twice["o"], 2 * scaled["o"])
    else:  # it cancels, but for eps
        exact = forward(op, x, eps=0.0, **run)["o"]
        assert_agree(forward(op, x, eps=0.0, scale=factor, **run)["o"], exact, "o")


# ---- layouts ----


def transposed(outputs):
    """Every S in forward's or backward's outputs with its axes changed over."""
    return {
        n: a.swapaxes(-1, -2) if "state" in n and a.ndim == 4 else a for n, a in outputs.items()
    }


@PROFILE
@given(problems(dtypes=DTYPES), seeds())
def test_state_v_first_is_the_transposed_state(problem, rng):
    op, x, run = problem
    d = testing.make_output_gradients(op, rng, x)
    y, d_y = dict(x), d | {"d_final_state": grid.v_first(d["d_final_state"])}
    if "initial_state" in x:
        y["initial_state"] = grid.v_first(x["initial_state"])
    assert_all_same_bits(
        transposed(forward(op, y, state_v_first=True, **run)), forward(op, x, **run)
    )
    assert_all_same_bits(
        transposed(backward(op, y, d_y, state_v_first=True, **run)), backward(op, x, d, **run)
    )


LAYOUTS = {
    "padded rows": lambda a: np.pad(a, [(0, 0)] * (a.ndim - 1) + [(2, 3)])[..., 2:-3],
    "every second": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "reversed": lambda a: np.ascontiguousarray(a[::-1])[::-1],
    "last axis first": lambda a: np.moveaxis(np.ascontiguousarray(np.moveaxis(a, -1, 0)), 0, -1),
    "other order": lambda a: a.T.copy().T,
    "tokens first": lambda a: a if a.ndim < 2 else a.swapaxes(0, 1).copy().swapaxes(0, 1),
}


@PROFILE
@given(problems(dtypes=DTYPES), st.data(), seeds())
def test_strided_inputs_and_out(problem, data, rng):
    op, x, run = problem

    layouts = [name for name in LAYOUTS if name != "reversed" or device.negative_strides()]

    def strided(a):
        return LAYOUTS[data.draw(st.sampled_from(sorted(layouts)))](a)

    d = testing.make_output_gradients(op, rng, x)
    y = change(x | d, strided, strided, strided)
    before = {n: over_arrays(np.copy, a) for n, a in y.items() if isinstance(a, np.ndarray | tuple)}
    d_y = {name: y.pop(name) for name in d}
    plain = forward(op, x, **run)
    assert_all_same_bits(forward(op, y, **run), plain)
    assert_all_same_bits(backward(op, y, d_y, **run), backward(op, x, d, **run))
    for name, a in before.items():  # inputs are never written
        assert_same_bits((y | d_y)[name], a, name)

    B, T, HV, V = x["v"].shape
    room = np.full((B, T, HV, V + 2), 7).astype(x["v"].dtype)
    out = room[..., 1:-1]
    o, state = getattr(linattn, op)(**x, **run, out=out)
    assert o is out and state is None
    assert_same_bits(o, plain["o"])
    assert (room[..., [0, -1]] == 7).all()


@PROFILE
@given(problems(dtypes=DTYPES, most_B=1, H=(1,)), seeds())
def test_one_head_without_its_axes(problem, rng):
    op, x, run = problem
    x = heads_of(x, [0])
    d = testing.make_output_gradients(op, rng, x)
    y = change(x | d, lambda a: a[0, :, 0], lambda a: a[0, 0])
    y |= {name: a[0] for name, a in y.items() if name == "bonus"}
    d_y = {name: y.pop(name) for name in d}

    def dropped(outputs):
        return {
            n: a
            if a.ndim == 1
            else a[0, 0]
            if "state" in n
            else a[0]
            if n == "dbonus"
            else a[0, :, 0]
            for n, a in outputs.items()
        }

    assert_all_same_bits(forward(op, y, **run), dropped(forward(op, x, **run)))
    assert_all_same_bits(backward(op, y, d_y, **run), dropped(backward(op, x, d, **run)))


# ---- one op is another ----


@PROFILE
@given(problems(ops=HEAD_DECAY + having(KEY_DECAY, "token")), seeds())
def test_special_cases(problem, rng):
    op, x, run = problem
    x.pop("g", None)
    B, T, HV, _ = x["v"].shape
    K = x["q"].shape[3]
    if op == "retention":
        g = np.broadcast_to(np.log(x["gamma"]), (B, T, HV))
        plain, y = "simple_gla", {n: a for n, a in x.items() if n != "gamma"} | {"g": g}
    elif op == "lightning_attention":
        plain, y = "retention", {n: a for n, a in x.items() if n != "slopes"}
        y["gamma"] = np.exp(-x["slopes"])
    else:
        g = -rng.exponential(1, (B, T, HV))
        x["g"] = np.broadcast_to(g[..., None], (B, T, HV, K)).copy()
        plain, y = with_decay(op, "token"), x | {"g": g}
    assert_all_agree(forward(op, x, **run), forward(plain, y, **run))


# ---- gradients ----


@PROFILE
@given(problems(), seeds())
def test_gradients_of_the_three_modes_agree(problem, rng):
    op, x, run = problem
    d = testing.make_output_gradients(op, rng, x)
    recurrent = backward(op, x, d, mode="recurrent")
    for mode in ("chunk", "parallel"):
        got = backward(op, x, d, mode=mode, chunk_size=run["chunk_size"])
        for name in got:
            alone = name == "dq" and reads_itself_alone(op, x)
            size = size_of_terms(op, x, d) if alone else None
            assert_agree(got[name], recurrent[name], name, True, size)


def reads_itself_alone(op, x):
    """Is each output the token's own value, whatever its weight? By the mathematics q has no
    gradient then: it is the difference of two equal terms, and the result is rounding alone."""
    normalised = op in NORMALISED and x.get("normalize", True) is not False
    return normalised and x["v"].shape[1] == 1 and "initial_state" not in x


def size_of_terms(op, x, d):
    """The rms of these terms: the gradient of q in the numerator alone, num = den v."""
    plain = x | {"normalize": False}
    num = forward(op, plain)["o"]
    return rms(backward(op, plain, {"do": d["do"] * x["v"] / num})["dq"])


@PROFILE
@given(problems(), seeds())
def test_gradients_are_linear_in_what_comes_back(problem, rng):
    op, x, run = problem
    d, e = (testing.make_output_gradients(op, rng, x) for _ in range(2))
    twice = {"do": 2 * d["do"], "d_final_state": over_arrays(lambda a: 2 * a, d["d_final_state"])}
    one = backward(op, x, d, **run)
    assert_all_same_bits(backward(op, x, twice, **run), {n: 2 * a for n, a in one.items()})

    # do of one problem and d_final_state of another: each alone is the other's complement
    only_o = backward(op, x, {"do": e["do"]}, **run)
    only_state = backward(
        op, x, {"do": np.zeros_like(d["do"]), "d_final_state": d["d_final_state"]}, **run
    )
    both = backward(op, x, {"do": e["do"], "d_final_state": d["d_final_state"]}, **run)
    for name in both:
        size = rms(only_o[name]) + rms(only_state[name])
        assert_agree(both[name], only_o[name] + only_state[name], name, gradient=True, size=size)


@PROFILE
@given(problems(most_T=20, most_B=1, H=(1,)), seeds())
def test_gradients_of_the_final_state_alone(problem, rng):
    op, x, run = problem
    d = testing.make_output_gradients(op, rng, x)
    d["do"] = np.zeros_like(d["do"])
    grads = backward(op, x, d, **run)
    assert not grads["dq"].any()  # a query reads, and writes nothing
    refs = reference.backward(op, **d, **x, dtype=np.longdouble)
    for field in refs._fields:
        for name, ref in parts(field, getattr(refs, field)):
            assert_agree(grads[name], ref.astype(np.float64), name, gradient=True)
