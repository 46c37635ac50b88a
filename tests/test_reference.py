"""The reference against itself: three forms of one recurrence, and gradients by differences."""

import time
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from support.compare import leaves, over_arrays
from support.problems import KEY_HEADS
from support.variants import GATED, PAIR_DECAY, PREDICTS, ops_with

from linattn import reference
from linattn.testing import GATES, assert_accurate, make_inputs, make_output_gradients

OPS = tuple(GATES)
LINEAR_ATTENTION = {
    "plain": {},
    "add": {"normalize": "add", "eps": 1e-2},
    "numerator only": {"normalize": False, "feature_map": "identity"},
    "non-causal": {"causal": False},
    "non-causal, add, relu": {"causal": False, "normalize": "add", "feature_map": "relu+eps"},
    "non-causal, numerator only": {"causal": False, "normalize": False, "feature_map": "exp"},
    "relu squared": {"feature_map": "relu2", "normalize": "add", "eps": 0.5},
    "pair": {"feature_map": ("exp", "elu+1")},
    "callable": {
        "feature_map": lambda x: np.concatenate([np.exp(x), np.exp(-x)], -1) / 2,
        "normalize": False,
    },
    "clamped": {"eps": 6.0},
    "forced": {"feature_map": "identity", "normalize": "force", "eps": 0.5},
}
CASES = [(op, {}) for op in OPS if op != "linear_attention"]
CASES += [("linear_attention", options) for options in LINEAR_ATTENTION.values()]
CASES += [(op, {"x": True}) for op in PREDICTS]
CASE_NAMES = [op for op in OPS if op != "linear_attention"]
CASE_NAMES += [f"linear_attention, {name}" for name in LINEAR_ATTENTION]
CASE_NAMES += [f"{op}, x" for op in PREDICTS]


def with_options(op, options, seed=0, **shape):
    """Inputs for the op with its options, the initial state's width fitted to the feature map."""
    options = dict(options)
    made = {"x": options.pop("x", False), "normalize": options.get("normalize", True)}
    inputs = make_inputs(op, np.random.default_rng(seed), **shape, **made)
    if callable(options.get("feature_map")) and "initial_state" in inputs:
        inputs["initial_state"] = np.concatenate([inputs["initial_state"]] * 2, -2)
    return {**inputs, **options}


def call(op, inputs, **more):
    return getattr(reference, op)(**inputs, **more)


def arrays(result):
    """o and the state's arrays, flat."""
    o, state = result
    return [o, *(state if isinstance(state, tuple) else (state,))]


@pytest.mark.parametrize(("op", "options"), CASES, ids=CASE_NAMES)
@pytest.mark.parametrize("more", [{}, {"qk_l2norm": True, "scale": 0.7}], ids=["", "l2norm"])
def test_the_forms_agree(op, options, more):
    inputs = with_options(op, options, B=2, T=37, H=2, HV=4, K=6, V=5, initial_state=True)
    expected = arrays(call(op, inputs, **more))
    forms = [{"form": "parallel"}] + [{"form": "chunk", "chunk_size": c} for c in (1, 5, 16, 64)]
    for form in forms:
        for x, y in zip(arrays(call(op, inputs, **form, **more)), expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12 * np.abs(y).max())


@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunk"])
@pytest.mark.parametrize("op", OPS)
def test_packed_sequences_are_separate_ones(op, form):
    ends = [0, 4, 4, 11, 12]
    rng = np.random.default_rng(1)
    inputs = make_inputs(op, rng, T=12, H=2, HV=4, cu_seqlens=ends, initial_state=True)
    o, state = arrays(call(op, inputs, form=form, chunk_size=3))[:2]
    del inputs["cu_seqlens"]
    initial = inputs.pop("initial_state")
    for n, (start, end) in enumerate(pairwise(ends)):
        one = {name: x[:, start:end] if x.ndim > 2 else x for name, x in inputs.items()}
        one["initial_state"] = (
            tuple(x[n : n + 1] for x in initial)
            if isinstance(initial, tuple)
            else initial[n : n + 1]
        )
        o_n, state_n = arrays(call(op, one, form=form, chunk_size=3))[:2]
        np.testing.assert_array_equal(o[:, start:end], o_n)
        np.testing.assert_array_equal(state[n : n + 1], state_n)


@pytest.mark.parametrize("op", OPS)
def test_resumes_where_it_stopped(op):
    inputs = make_inputs(op, np.random.default_rng(2), T=9, initial_state=True)
    o, state = call(op, inputs)
    per_token = {name for name, x in inputs.items() if name != "initial_state" and x.ndim > 2}
    first = {name: x[:, :4] if name in per_token else x for name, x in inputs.items()}
    rest = {name: x[:, 4:] if name in per_token else x for name, x in inputs.items()}
    o_first, rest["initial_state"] = call(op, first)
    o_rest, state_rest = call(op, rest)
    np.testing.assert_array_equal(np.concatenate([o_first, o_rest], 1), o)
    for x, y in zip(arrays((o_rest, state_rest))[1:], arrays((o, state))[1:], strict=True):
        np.testing.assert_array_equal(x, y)


def test_the_family_is_one_recurrence():
    """Each op is a special case of the next: a plain decay, a decay of 1, a write of all of v."""
    rng = np.random.default_rng(3)
    inputs = make_inputs("kda", rng, B=2, T=11, H=2, HV=4, K=3, V=5, initial_state=True)
    g, beta = inputs.pop("g")[..., 0], inputs.pop("beta")
    per_key = np.repeat(g[..., None], 3, -1)

    def same(x, y):
        for x_i, y_i in zip(arrays(x), arrays(y), strict=True):
            np.testing.assert_allclose(x_i, y_i, rtol=1e-12, atol=1e-13)

    r = reference
    same(r.kda(**inputs, g=per_key, beta=beta), r.gated_delta_rule(**inputs, g=g, beta=beta))
    same(r.gated_delta_rule(**inputs, g=g * 0, beta=beta), r.delta_rule(**inputs, beta=beta))
    same(r.gla(**inputs, g=per_key), r.simple_gla(**inputs, g=g))
    same(r.gla(**inputs, alpha=np.exp(per_key)), r.simple_gla(**inputs, alpha=np.exp(g)))
    slopes = rng.uniform(0, 1, 4)
    constant = np.broadcast_to(-slopes, g.shape)
    same(r.lightning_attention(**inputs, slopes=slopes), r.simple_gla(**inputs, g=constant))
    gamma = [1 - 2.0 ** (-5 - h) for h in range(4)]
    same(
        r.lightning_attention(**inputs, slopes=slopes), r.retention(**inputs, gamma=np.exp(-slopes))
    )
    same(r.retention(**inputs), r.retention(**inputs, gamma=gamma))
    same(
        r.simple_gla(**inputs, g=g * 0),
        r.linear_attention(**inputs, feature_map="identity", normalize=False),
    )


@pytest.mark.parametrize("op", OPS)
def test_value_heads_share_the_query_and_key_head_beside_them(op):
    """Value heads 0, 1 read head 0 and 2, 3 head 1: as if q, k were repeated, dq, dk summed."""
    inputs = make_inputs(op, np.random.default_rng(16), B=2, T=6, H=2, HV=4, initial_state=True)
    d_outputs = make_output_gradients(op, np.random.default_rng(17), inputs)
    shared_heads = {name: axis for name, axis in KEY_HEADS.items() if name in inputs}
    repeated = inputs | {n: np.repeat(inputs[n], 2, axis) for n, axis in shared_heads.items()}
    for x, y in zip(arrays(call(op, inputs)), arrays(call(op, repeated)), strict=True):
        np.testing.assert_array_equal(x, y)
    shared = reference.backward(op, **inputs, **d_outputs)
    single = reference.backward(op, **repeated, **d_outputs)
    for name, axis in shared_heads.items():
        of_two, of_one = getattr(shared, f"d{name}"), getattr(single, f"d{name}")
        first, second = (of_one.take(heads, axis) for heads in ([0, 2], [1, 3]))
        np.testing.assert_allclose(of_two, first + second, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(shared.dv, single.dv)
    other = {**inputs, "q": inputs["q"].copy()}
    other["q"][:, :, 1] += 1
    changed = (call(op, other)[0] != call(op, inputs)[0]).any(axis=(0, 1, 3))
    np.testing.assert_array_equal(changed, [False, False, True, True])


def test_implicit_weights_are_the_op():
    inputs = make_inputs("kda", np.random.default_rng(4), B=2, T=7, H=2, HV=4)
    v = inputs.pop("v")
    A = reference.implicit_weights("kda", **inputs)
    assert A.shape == (2, 4, 7, 7)
    o, _ = reference.kda(v=v, **inputs)
    np.testing.assert_allclose(np.einsum("bhij,bjhv->bihv", A, v), o, rtol=1e-12, atol=1e-13)
    assert not A[..., ~np.tri(7, dtype=bool)].any()
    numbers = reference.implicit_weights("kda", inputs["q"], inputs["k"], alpha=0.9, beta=0.5)
    arrays = {"alpha": np.full((2, 7, 2, 4), 0.9), "beta": np.full((2, 7, 2), 0.5)}
    same = reference.implicit_weights("kda", inputs["q"], inputs["k"], **arrays)
    np.testing.assert_array_equal(numbers, same)
    rows = reference.implicit_weights("linear_attention", inputs["q"], inputs["k"])
    np.testing.assert_allclose(rows.sum(-1), 1, rtol=1e-13)


# ---- one head


def without_heads(name, x):
    """An array of one batch entry and one head, as users of one head give it."""
    if isinstance(x, tuple):
        return tuple(without_heads(name, part) for part in x)
    if name in ("initial_state", "d_final_state", "d_initial_state"):
        return x[0, 0]
    if name.removeprefix("d") == "bonus":
        return x[0]
    return x if name in ("gamma", "slopes") or x.ndim == 1 else x[0, :, 0]


@pytest.mark.parametrize("op", OPS)
def test_arrays_of_one_head(op):
    inputs = make_inputs(op, np.random.default_rng(20), B=1, T=6, H=1, HV=1, initial_state=True)
    d_outputs = make_output_gradients(op, np.random.default_rng(21), inputs)
    one_head = {name: without_heads(name, x) for name, x in inputs.items()}
    d_one_head = {name: without_heads(name, x) for name, x in d_outputs.items()}
    o, *states = arrays(call(op, inputs))
    for x, y in zip(
        arrays(call(op, one_head)), (o[0, :, 0], *(x[0, 0] for x in states)), strict=True
    ):
        np.testing.assert_array_equal(x, y)
    gradients = reference.backward(op, **inputs, **d_outputs)._asdict()
    for name, x in reference.backward(op, **one_head, **d_one_head)._asdict().items():
        expected = gradients[name]
        assert (x is None) == (expected is None)
        if x is not None:
            np.testing.assert_equal(x, without_heads(name, expected))
    del inputs["v"], inputs["initial_state"], one_head["v"], one_head["initial_state"]
    np.testing.assert_array_equal(
        reference.implicit_weights(op, **one_head), reference.implicit_weights(op, **inputs)[0, 0]
    )


@pytest.mark.parametrize("op", OPS)
def test_packed_sequences_of_one_head(op):
    inputs = make_inputs(op, np.random.default_rng(22), T=6, H=1, HV=1, cu_seqlens=[0, 4, 6])
    one_head = {name: without_heads(name, x) for name, x in inputs.items()}
    o, *states = arrays(call(op, inputs))
    o_one, *states_one = arrays(call(op, one_head))
    np.testing.assert_array_equal(o_one, o[0, :, 0])
    for x, y in zip(states_one, states, strict=True):
        np.testing.assert_array_equal(x, y[:, 0])


# ---- softmax attention


def softmax_problem(Lq, Lkv, H=2, HV=4):
    rng = np.random.default_rng(30)
    q, k = rng.standard_normal((2, Lq, H, 3)), rng.standard_normal((2, Lkv, H, 3))
    return {"q": q, "k": k, "v": rng.standard_normal((2, Lkv, HV, 5))}


@pytest.mark.parametrize(("causal", "Lq", "Lkv"), [(True, 6, 6), (False, 6, 6), (False, 4, 7)])
@pytest.mark.parametrize("scale", [None, 2.5])
def test_softmax_attention_is_a_weighted_mean(causal, Lq, Lkv, scale):
    x = softmax_problem(Lq, Lkv)
    o = reference.softmax_attention(**x, causal=causal, scale=scale)
    for b, i, h in np.ndindex(2, Lq, 4):
        seen = slice(i + 1 if causal else Lkv)
        scores = (x["k"][b, seen, h // 2] @ x["q"][b, i, h // 2]) * (scale or 3**-0.5)
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(o[b, i, h], weights @ x["v"][b, seen, h], rtol=1e-12, atol=1e-14)
    one_head = {name: a[0, :, 0] for name, a in x.items()}
    mine = reference.softmax_attention(**one_head, causal=causal, scale=scale)
    np.testing.assert_allclose(mine, o[0, :, 0], rtol=1e-13, atol=1e-15)
    A = reference.softmax_weights(one_head["q"], one_head["k"], causal=causal, scale=scale)
    np.testing.assert_allclose(A.sum(-1), 1, rtol=1e-14)
    np.testing.assert_allclose(A @ one_head["v"], mine, rtol=1e-13, atol=1e-15)


def test_softmax_attention_of_large_scores():
    """exp(1000) overflows; the weights do not."""
    q = np.array([[1000.0], [-1000.0]])
    o = reference.softmax_attention(q, np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]]), scale=1)
    np.testing.assert_array_equal(o, [[3.0], [3.0]])
    with pytest.raises(ValueError, match=r"^k: expected as many tokens as q has, 2, got 3"):
        reference.softmax_attention(q, np.ones((3, 1)), np.ones((3, 1)))


@pytest.mark.parametrize(("causal", "Lq", "Lkv"), [(True, 4, 4), (False, 3, 5)])
def test_gradients_of_softmax_attention(causal, Lq, Lkv):
    x = softmax_problem(Lq, Lkv)
    do = np.random.default_rng(31).standard_normal((2, Lq, 4, 5))

    def loss():
        return (do * reference.softmax_attention(**x, causal=causal, scale=0.9)).sum()

    gradients = reference.softmax_attention_backward(do, **x, causal=causal, scale=0.9)
    for name, dx in zip(("q", "k", "v"), gradients, strict=True):
        assert dx.shape == x[name].shape
        for i in np.ndindex(dx.shape):
            saved = x[name][i]
            x[name][i] = saved + 1e-5
            up = loss()
            x[name][i] = saved - 1e-5
            slope = (up - loss()) / 2e-5
            x[name][i] = saved
            np.testing.assert_allclose(dx[i], slope, rtol=2e-7, atol=2e-8)
    one = {name: a[0, :, 0] for name, a in x.items()}
    dq = reference.softmax_attention_backward(do[0, :, 0], **one, causal=causal, scale=0.9).dq
    assert dq.shape == one["q"].shape


# ---- gradients

GRADIENT_OF = {
    "q": "dq",
    "k": "dk",
    "v": "dv",
    "beta": "dbeta",
    "x": "dx",
    "y": "dy",
    "bonus": "dbonus",
    "eta": "deta",
    "g": "dg",
    "alpha": "dg",
    "gamma": "dg",
    "slopes": "dg",
    "initial_state": "d_initial_state",
}


def assert_gradients(op, inputs, d_outputs):
    """Every element of every input, nudged by 1e-5 either way, against reference.backward."""

    def loss():
        o, state = call(op, inputs)
        pairs = zip(
            arrays((o, state)), arrays((d_outputs["do"], d_outputs["d_final_state"])), strict=True
        )
        return sum((x * dx).sum() for x, dx in pairs)

    gradients = reference.backward(
        op, d_outputs["do"], **inputs, d_final_state=d_outputs["d_final_state"]
    )
    given = [name for name in GRADIENT_OF if name in inputs]
    absent = set(gradients._fields) - {GRADIENT_OF[name] for name in given}
    assert all(getattr(gradients, name) is None for name in absent)
    for name in given:
        xs, dxs = inputs[name], getattr(gradients, GRADIENT_OF[name])
        xs, dxs = (xs, dxs) if isinstance(xs, tuple) else ((xs,), (dxs,))
        for x, dx in zip(xs, dxs, strict=True):
            assert x.shape == dx.shape
            numerical = np.empty_like(dx)
            for i in np.ndindex(x.shape):
                saved, step = x[i], 1e-5
                x[i] = saved + step
                up = loss()
                x[i] = saved - step
                numerical[i] = (up - loss()) / (2 * step)
                x[i] = saved
            np.testing.assert_allclose(dx, numerical, rtol=2e-7, atol=2e-8, err_msg=f"{op}: {name}")


@pytest.mark.parametrize(("op", "options"), CASES, ids=CASE_NAMES)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_gradients(op, options, packed):
    shape = {"B": 1, "T": 5, "cu_seqlens": [0, 2, 2, 5]} if packed else {"B": 2, "T": 4}
    inputs = with_options(op, options, seed=5, H=1, HV=2, K=3, V=2, initial_state=True, **shape)
    rng = np.random.default_rng(6)
    d_outputs = make_output_gradients(op, rng, inputs)
    if callable(options.get("feature_map")):
        d_outputs["d_final_state"] = rng.standard_normal(inputs["initial_state"].shape)
    assert_gradients(op, inputs, d_outputs)


@pytest.mark.parametrize(("op", "options"), CASES, ids=CASE_NAMES)
def test_the_gradients_of_the_forms_agree(op, options):
    inputs = with_options(op, options, B=2, T=37, H=2, HV=4, K=6, V=5, initial_state=True)
    state = inputs["initial_state"]
    rng = np.random.default_rng(6)
    made = {"do": rng.standard_normal(inputs["v"].shape)}
    made["d_final_state"] = (
        tuple(rng.standard_normal(x.shape) for x in state)
        if isinstance(state, tuple)
        else rng.standard_normal(state.shape)
    )
    expected = reference.backward(op, **made, **inputs)
    forms = [{"form": "parallel"}] + [{"form": "chunk", "chunk_size": c} for c in (1, 5, 16, 64)]
    for form in forms:
        found = reference.backward(op, **made, **inputs, **form)
        for x, y in zip(leaves(found), leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12 * np.abs(y).max())


@pytest.mark.parametrize("op", OPS)
def test_gradients_through_the_l2_norm(op):
    rng = np.random.default_rng(7)
    inputs = make_inputs(op, rng, T=4, HV=2, K=3, V=2, initial_state=True)
    inputs |= {"qk_l2norm": True, "scale": 1.3}
    assert_gradients(op, inputs, make_output_gradients(op, rng, inputs))


@pytest.mark.parametrize("op", GATED)
def test_gradients_of_alpha(op):
    rng = np.random.default_rng(8)
    inputs = make_inputs(op, rng, T=4, HV=2, K=3, V=2)
    inputs["alpha"] = np.exp(inputs.pop("g"))
    assert_gradients(op, inputs, make_output_gradients(op, rng, inputs))


# ---- extremes


@pytest.mark.parametrize("op", GATED)
@pytest.mark.parametrize("extreme", [-np.inf, -1e4, 0.0])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_extreme_gates(op, extreme, dtype):
    inputs = make_inputs(op, np.random.default_rng(9), T=40, HV=2, dtype=dtype, initial_state=True)
    inputs["g"][:, ::8] = extreme
    o, state = call(op, inputs, dtype=dtype)
    gradients = reference.backward(
        op, np.ones_like(o), **inputs, d_final_state=over_arrays(np.ones_like, state), dtype=dtype
    )
    assert all(np.isfinite(x).all() for x in leaves((o, state, gradients)))
    for form in ("parallel", "chunk"):
        other = call(op, inputs, form=form, chunk_size=16)
        for x, y in zip(leaves(other), leaves(call(op, inputs)), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)
    if extreme < 0:
        assert not gradients.dg[:, ::8].any()
        inputs["initial_state"] = over_arrays(lambda S: 7 * S, inputs["initial_state"])
        same = (call(op, inputs, dtype=dtype)[0] == o).all(axis=(0, 2, 3))
        assert same[1:].all() == (op not in REMEMBER)  # forgotten at token 0
        assert same[0] == (op not in LOOK_BEFORE)


# After a decay of 0 these still have something of the state before it: they look it up or read it
# before the decay, or have a second state.
LOOK_BEFORE = ops_with(rule="dplr") + ops_with(rule="bonus") + PAIR_DECAY
REMEMBER = ops_with(rule="dplr") + PAIR_DECAY


def test_elu_keeps_its_tail_in_float32():
    phi = reference.FEATURE_MAPS["elu+1"][0]
    x = np.array([-90, -30, -18, 0, 3, 1e30], np.float32)
    with np.errstate(over="raise", invalid="raise"):
        assert (phi(x) > 0).all()
    np.testing.assert_allclose(phi(x)[:3], np.exp(x[:3].astype(np.float64)), rtol=1e-6)


def test_nothing_in_nothing_out():
    for op in OPS:
        for B, T in ((0, 3), (2, 0)):
            inputs = make_inputs(op, np.random.default_rng(10), B=B, T=T, initial_state=True)
            for form in ("recurrent", "parallel", "chunk"):
                o, state = call(op, inputs, form=form)
                assert o.shape == (B, T, 1, 4)
                for x, y in zip(
                    arrays((o, state))[1:], arrays((o, inputs["initial_state"]))[1:], strict=True
                ):
                    np.testing.assert_array_equal(x, y)
            gradients = reference.backward(op, o, **inputs)
            assert gradients.dq.shape == inputs["q"].shape


def test_inputs_are_not_written():
    for op in OPS:
        inputs = make_inputs(op, np.random.default_rng(11), initial_state=True)
        copies = {
            name: tuple(np.copy(y) for y in x) if isinstance(x, tuple) else np.copy(x)
            for name, x in inputs.items()
        }
        d_outputs = make_output_gradients(op, np.random.default_rng(12), inputs)
        call(op, inputs)
        reference.backward(op, **inputs, **d_outputs)
        for name, x in inputs.items():
            np.testing.assert_equal(x, copies[name])


def test_long_enough_is_fast_enough():
    inputs = make_inputs("kda", np.random.default_rng(13), T=4096, HV=2, K=64, V=64)
    start = time.process_time()
    reference.kda(**inputs)
    assert time.process_time() - start < 10  # measured: 0.1 s; the room is for loaded machines


# ---- naive, and the acceptance rule ----


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_the_chunk_form_is_accepted_against_the_tokens(op, dtype):
    """The rule passes a correct algorithm in another order, and fails a small systematic error."""
    inputs = make_inputs(op, np.random.default_rng(14), T=64, HV=2, K=16, V=16, dtype=dtype)
    wide = np.longdouble if np.dtype(dtype) == np.float64 else np.float64
    ref, _ = call(op, inputs, dtype=wide)
    naive, state = call(op, inputs, dtype=dtype)
    out, _ = call(op, inputs, dtype=dtype, form="chunk", chunk_size=16)
    assert naive.dtype == dtype
    sums = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    assert arrays((naive, state))[1].dtype == sums
    assert_accurate(out, ref, naive, dtype=dtype, name=op)
    with pytest.raises(AssertionError, match="rms"):
        assert_accurate((ref * 1.05).astype(dtype), ref, naive, dtype=dtype, name=op)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_gradients_of_the_naive_twin(op, dtype):
    rng = np.random.default_rng(15)
    inputs = make_inputs(op, rng, T=32, HV=2, K=8, V=8, dtype=dtype, initial_state=True)
    d_outputs = make_output_gradients(op, rng, inputs)
    ref = reference.backward(op, **inputs, **d_outputs)
    naive = reference.backward(op, **inputs, **d_outputs, dtype=dtype)
    for name in ("dq", "dk", "dv"):
        out = getattr(naive, name)
        assert out.dtype == dtype
        assert_accurate(out, getattr(ref, name), out, dtype=dtype, gradient=True, name=name)
    assert naive.dg is None or naive.dg.dtype == dtype


class TestTheRule:
    ref = np.array([1.0, -2.0, 3.0])

    def check(self, out, ref=ref, naive=None, **more):
        naive = np.asarray(ref, np.float32) if naive is None else naive
        assert_accurate(
            np.asarray(out, np.float32), np.asarray(ref), naive, **({"dtype": np.float32} | more)
        )

    def test_passes_what_is_right(self):
        self.check(self.ref)
        self.check(np.zeros((2, 0)), np.zeros((2, 0)))
        self.check([np.nan, np.inf, -np.inf, 1], [np.nan, np.inf, -np.inf, 1])
        self.check([np.inf], [1e39], np.array([np.inf]))

    @pytest.mark.parametrize("out", [[1, -2, np.nan], [1, -2, np.inf], [1, -2, 3.001]])
    def test_fails_what_is_wrong(self, out):
        with pytest.raises(AssertionError, match="layer 3: not accurate for float32"):
            self.check(out, name="layer 3")

    def test_infinity_has_a_sign(self):
        with pytest.raises(AssertionError, match="-inf: 1 in out, 0 in ref64"):
            self.check([-np.inf], [np.inf])

    def test_a_missing_nan_is_found(self):
        with pytest.raises(AssertionError, match=r"NaN: 0 in out, 1 in ref64.*\(1,\)"):
            self.check([1, 2], [1, np.nan])

    def test_a_reference_of_zeros_asks_for_zeros(self):
        self.check([0, -0.0], [0, 0])
        self.check([0, 1e-9], [0, 0], np.array([0, 1e-9]))
        with pytest.raises(AssertionError, match="max"):
            self.check([0, 1e-9], [0, 0])

    def test_a_small_result_is_not_excused(self):
        """Tiny errors of a tiny result pass rule 2, by its rounding term, and fail the rms rule."""
        with pytest.raises(AssertionError, match="rms"):
            self.check([2e-9], [1e-9])

    def test_a_broken_yardstick_is_refused(self):
        with pytest.raises(AssertionError, match="naive is not finite"):
            self.check(self.ref, naive=self.ref * np.inf)

    def test_shapes_must_agree(self):
        with pytest.raises(AssertionError, match="shapes differ"):
            self.check(self.ref[:1])

    def test_gradients_and_tf32_have_more_room(self):
        naive = self.ref * (1 + 1e-3)
        out = self.ref * (1 + 3e-6)
        self.check(out, naive=naive, gradient=True)
        with pytest.raises(AssertionError, match=r"2\.0e-06"):
            self.check(out, naive=naive)
        self.check(self.ref * (1 + 9e-4), naive=naive, tf32=True)
