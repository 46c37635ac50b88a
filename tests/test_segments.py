"""Maps of segments: S becomes M S + X, and the gradient of the first state alone."""

import inspect

import ml_dtypes
import numpy as np
import pytest
from support.compare import assert_same_bits, leaves, over_arrays
from support.variants import KEY_DECAY, PAIR_DECAY, PREDICTS, ops_with

import linattn
from linattn import _linattn, testing

DTYPES = [np.float64, np.float32, np.float16, np.dtype(ml_dtypes.bfloat16)]
MATRIX = [*PREDICTS, *ops_with(rule="dplr")]
EDGES = [0, 9, 9, 40]
# Of the log decays that make_inputs draws: with these themselves M of 40 tokens is 1e-12, and then
# M S + X does not show it.
WEAK = 1 / 32
ops = pytest.mark.parametrize("op", linattn.OPS)
packed = pytest.mark.parametrize("edges", [None, EDGES], ids=["rows", "packed"])
layouts = pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])


def a_call(op, rng, edges=None, *, T=40, dtype=np.float64, v_first=False, **sizes):
    sizes = {"B": 2 if edges is None else 1, "H": 2, "K": 6, "V": 5} | sizes
    x = testing.make_inputs(op, rng, T=T, dtype=dtype, **sizes)
    x |= {name: WEAK * x[name] for name in ("g", "slopes") if name in x}
    if "gamma" in x:
        x["gamma"] = x["gamma"] ** WEAK
    options = {"state_v_first": v_first}
    if "normalize" in inspect.signature(getattr(linattn, op)).parameters:
        options["normalize"] = False
    if edges is not None:
        x["cu_seqlens"] = np.array(edges)
    return x, options


def a_state(op, rng, x, v_first=False, dtype=np.float64):
    edges, (B, _, HV, V) = x.get("cu_seqlens"), x["v"].shape
    N, K = B if edges is None else len(edges) - 1, x["k"].shape[-1]
    shape = (N, HV, V, K) if v_first else (N, HV, K, V)
    states = tuple(rng.standard_normal(shape).astype(dtype) for _ in range(2))
    return states if op in PAIR_DECAY else states[0]


def stacked(S, v_first):
    """[N,HV,K,V], the second state of a pair below the first."""
    parts = [x.swapaxes(-1, -2) if v_first else x for x in (S if isinstance(S, tuple) else (S,))]
    return np.concatenate(parts, -2)


def times(M, S):
    """M S, whatever M is."""
    if M is None:
        return S
    if M.ndim == 4:
        return M @ S
    return M.reshape(*M.shape, *[1] * (4 - M.ndim)) * S


def is_seen(M):
    """Has M of each sequence a number a million times the tolerance, so that a wrong one fails?"""
    return M is None or np.abs(M).reshape(len(M), -1).max(1).min() > 1e-6


@ops
@packed
@layouts
def test_a_segment_maps_the_state_before_it(op, edges, v_first, rng):
    x, options = a_call(op, rng, edges, v_first=v_first)
    S = a_state(op, rng, x, v_first)
    _, want = getattr(linattn, op)(**x, **options, initial_state=S, output_final_state=True)
    X, M = linattn.segment_map(op, **x, **options)
    assert is_seen(M)
    got = times(M, stacked(S, v_first)) + stacked(X, v_first)
    np.testing.assert_allclose(got, stacked(want, v_first), rtol=1e-12, atol=1e-12)


@ops
def test_m_has_the_shape_of_its_kind(op, rng):
    x, options = a_call(op, rng)
    M = linattn.segment_map(op, **x, **options).M
    if op in PAIR_DECAY:
        assert M.shape == (2, 2, 12, 12)
    elif op in MATRIX:
        assert M.shape == (2, 2, 6, 6)
    elif op in KEY_DECAY:
        assert M.shape == (2, 2, 6)
    elif linattn.VARIANTS[op].decay == "none":
        assert M is None
    else:
        assert M.shape == (2, 2)


@ops
@packed
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("T", [0, 1, 40, 700])
def test_the_gradient_of_the_first_state_has_the_bits_of_the_whole_call(op, T, dtype, edges, rng):
    """It does not depend on the state, nor on which one that is."""
    edges = None if edges is None else [0, T // 4, T // 4, T]
    x, options = a_call(op, rng, edges, T=T, dtype=dtype)
    real = np.float64 if dtype == np.float64 else np.float32
    S, G = a_state(op, rng, x, dtype=real), a_state(op, rng, x, dtype=real)
    do = rng.standard_normal(x["v"].shape).astype(dtype)
    whole = getattr(linattn, f"{op}_backward")(do, **x, **options, d_final_state=G, initial_state=S)
    for final in (G, None):
        got = linattn.segment_map_backward(op, do, **x, **options, d_final_state=final)
        if final is None:
            whole = getattr(linattn, f"{op}_backward")(do, **x, **options, initial_state=S)
        assert_same_bits(got, whole.d_initial_state)


@ops
@pytest.mark.parametrize("mode", ["chunk", "recurrent", "parallel"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_the_last_state_has_the_bits_of_the_whole_call(op, dtype, mode, rng):
    x, options = a_call(op, rng, T=100, dtype=dtype, K=20, V=70)
    options |= {"mode": mode}
    real = np.float64 if dtype == np.float64 else np.float32
    S = a_state(op, rng, x, dtype=real)
    own = {name: value for name, value in options.items() if name != "normalize"}
    o, X, M = _linattn.forward(op, **x, **own, initial_state=S, states_only=True, segment_map=True)
    if "normalize" in options:  # the core has no map unless it is told
        options["feature_map"] = "identity"
    want = getattr(linattn, op)(**x, **options, initial_state=S, output_final_state=True)
    assert o is None and (M is None) != (op in MATRIX)
    assert_same_bits(X, want[1])


@ops
@pytest.mark.parametrize("threads", [1, 3])
def test_two_segments_are_one(op, threads, rng):
    x, options = a_call(op, rng, T=90)
    before = linattn.get_num_threads()
    linattn.set_num_threads(threads)
    try:
        whole, parts = linattn.segment_map(op, **x, **options), []
        for part in (slice(0, 37), slice(37, 90)):
            own = {name: a[:, part] if np.ndim(a) > 2 else a for name, a in x.items()}
            parts.append(linattn.segment_map(op, **own, **options))
    finally:
        linattn.set_num_threads(before)
    assert all(is_seen(found.M) for found in (whole, *parts))
    X = times(parts[1].M, stacked(parts[0].X, False)) + stacked(parts[1].X, False)
    np.testing.assert_allclose(X, stacked(whole.X, False), rtol=1e-12, atol=1e-12)
    if whole.M is not None:
        one, two = parts[0].M, parts[1].M
        two = two @ one if op in (*MATRIX, *PAIR_DECAY) else two * one
        np.testing.assert_allclose(two, whole.M, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("given", ["array", "number"])
@pytest.mark.parametrize(
    ("op", "gate"),
    [("simple_gla", "g"), ("simple_gla", "alpha"), ("gla", "g"), ("gla", "alpha")],
)
def test_m_is_the_product_of_the_decays(op, gate, given, rng):
    x, _ = a_call(op, rng)
    shape = x["g"].shape
    a = np.full(shape, 0.9) if given == "array" else 0.9
    x = {name: x[name] for name in "qkv"} | {gate: np.log(a) if gate == "g" else a}
    M = linattn.segment_map(op, **x).M
    np.testing.assert_allclose(M, np.full(shape[:1] + shape[2:], 0.9**40), rtol=1e-13)


def test_a_decay_that_forgets_has_a_map_of_zeros(rng):
    """Exactly: a sum of logarithms of -1e4 is a decay of zero."""
    x, _ = a_call("simple_gla", rng)
    x["g"] = np.full_like(x["g"], -1e4)
    assert not linattn.segment_map("simple_gla", **x).M.any()


@ops
def test_a_mask_leaves_padding_out(op, rng):
    x, options = a_call(op, rng, T=30)
    mask = rng.random((2, 30)) < 0.7
    S = a_state(op, rng, x)
    call = getattr(linattn, op)
    _, want = call(**x, **options, mask=mask, initial_state=S, output_final_state=True)
    X, M = linattn.segment_map(op, **x, **options, mask=mask)
    assert is_seen(M)
    got = times(M, stacked(S, False)) + stacked(X, False)
    np.testing.assert_allclose(got, stacked(want, False), rtol=1e-12, atol=1e-12)
    do = rng.standard_normal(x["v"].shape)
    back = getattr(linattn, f"{op}_backward")
    whole = back(do, **x, **options, mask=mask, d_final_state=S, initial_state=S)
    got = linattn.segment_map_backward(op, do, **x, **options, mask=mask, d_final_state=S)
    assert_same_bits(got, whole.d_initial_state)


@pytest.mark.parametrize("op", ops_with(decay="head"))
def test_default_gates(op, rng):
    """An op with a default gate has it here too, with tokens and without. Another one says what is
    missing, as the op does."""
    for T in (0, 1, 9):
        x, options = a_call(op, rng, T=T)
        gate = next(name for name in ("gamma", "slopes") if name in x)
        given = {name: a for name, a in x.items() if name != gate} | {gate: None}
        try:
            _, want = getattr(linattn, op)(**given, **options, output_final_state=True)
        except TypeError as error:
            with pytest.raises(TypeError, match=str(error)[:20].replace("[", r"\[")):
                linattn.segment_map(op, **given, **options)
            continue
        X, M = linattn.segment_map(op, **given, **options)
        assert_same_bits(X, want)
        assert M.shape == (2, 2) and (M == 1).all() == (T == 0)


@pytest.mark.parametrize("op", PAIR_DECAY)
def test_segments_of_whole_batches(op, rng):
    x, options = a_call(op, rng, T=14)
    options["batch"] = 3
    whole = linattn.segment_map(op, **x, **options).M
    first, second = (
        linattn.segment_map(op, **{name: a[:, part] for name, a in x.items()}, **options).M
        for part in (slice(0, 6), slice(6, 14))
    )
    assert is_seen(whole)
    np.testing.assert_allclose(second @ first, whole, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("default")  # PyTorch's own, while it traces
@pytest.mark.parametrize("op", PREDICTS[:1])
def test_a_compiled_function_calls_it_outside_of_its_graph(op, rng):
    torch = pytest.importorskip("torch")
    x, options = a_call(op, rng)
    tensors = over_arrays(torch.from_numpy, x)
    do = torch.from_numpy(rng.standard_normal(x["v"].shape))

    def both(do, **tensors):
        do = 2 * do
        found = linattn.segment_map(op, **tensors, **options)
        return *found, linattn.segment_map_backward(op, do, **tensors, **options)

    with torch.no_grad():
        compiled = torch.compile(both, backend="eager")
        assert_same_bits(compiled(do, **tensors), both(do, **tensors))
    torch.compiler.reset()


def test_a_warning_names_the_line_of_the_caller(rng):
    x, _ = a_call("gla", rng)
    x["g"] = x["g"] + 10
    with pytest.warns(RuntimeWarning, match="g: expected the log decay") as seen:
        linattn.segment_map("gla", **x)
    assert seen[0].filename == __file__


@ops
def test_one_head(op, rng):
    whole, options = a_call(op, rng, B=1, H=1)
    x = {name: one_head(name, a) for name, a in whole.items()}
    X, M = linattn.segment_map(op, **x, **options)
    want = linattn.segment_map(op, **whole, **options)
    for a, b in zip(leaves((X, M)), leaves(tuple(want)), strict=True):
        if b is not None:
            assert_same_bits(np.asarray(a), np.asarray(b[0, 0]))


def one_head(name, x):
    """Without the axes of rows and of heads."""
    if name == "bonus" or np.ndim(x) == 1:
        return x[0]
    return x[0] if np.ndim(x) == 2 else x[0, :, 0]


def test_a_normalised_call_has_sums_of_keys_too(rng):
    x, _ = a_call("linear_attention", rng)
    X, M = linattn.segment_map("linear_attention", **x)
    _, want = linattn.linear_attention(**x, output_final_state=True)
    assert M is None
    assert_same_bits(X, want)


@ops
def test_tensors_have_the_bits_of_arrays(op, rng):
    torch = pytest.importorskip("torch")
    x, options = a_call(op, rng, EDGES)
    tensors = over_arrays(lambda a: torch.from_numpy(np.asarray(a)), x)
    do = rng.standard_normal(x["v"].shape)
    want = linattn.segment_map(op, **x, **options)
    got = linattn.segment_map(op, **tensors, **options)
    assert all(isinstance(y, torch.Tensor) for y in leaves(tuple(got)) if y is not None)
    for a, b in zip(leaves(tuple(got)), leaves(tuple(want)), strict=True):
        if b is not None:
            assert_same_bits(a.numpy(), np.ascontiguousarray(b))
    want = linattn.segment_map_backward(op, do, **x, **options)
    got = linattn.segment_map_backward(op, torch.from_numpy(do), **tensors, **options)
    assert_same_bits(over_arrays(lambda a: a, tuple(y.numpy() for y in leaves(got))), leaves(want))


def test_what_pytorch_would_record_is_refused(rng):
    torch = pytest.importorskip("torch")
    x = torch.randn(1, 5, 2, 4, requires_grad=True)
    with pytest.raises(TypeError, match="q: expected a tensor without requires_grad"):
        linattn.segment_map("delta_rule", x, x, x, 0.5)
    with torch.no_grad():
        assert linattn.segment_map("delta_rule", x, x, x, 0.5).M.shape == (1, 2, 4, 4)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"initial_state": np.zeros((1, 2, 4, 4))}, ValueError, "initial_state: expected None"),
        ({"mask": np.ones((1, 4))}, ValueError, r"mask: expected \[B,T\]"),
        ({"out": np.zeros((1, 5, 2, 4))}, ValueError, "out: expected None"),
        ({"output_final_state": True}, ValueError, "output_final_state: expected False"),
        ({"scales": 1}, TypeError, "unexpected keyword argument 'scales'"),
        ({"beta": np.ones((1, 4, 2))}, ValueError, "beta: expected"),
    ],
)
def test_other_arguments_are_refused(given, error, words, rng):
    q, k, v = rng.standard_normal((3, 1, 5, 2, 4))
    with pytest.raises(error, match=words):
        linattn.segment_map("delta_rule", q, k, v, **{"beta": 0.5} | given)


def test_other_calls_are_refused(rng):
    q, k, v = rng.standard_normal((3, 1, 5, 2, 4))
    with pytest.raises(ValueError, match="op: expected one of linear_attention"):
        linattn.segment_map("attention", q, k, v)
    with pytest.raises(TypeError, match=r"delta_rule\(\) missing a required argument: 'v'"):
        linattn.segment_map("delta_rule", q, k)
    with pytest.raises(ValueError, match="causal: expected True, got False"):
        linattn.segment_map("linear_attention", q, k, v, causal=False)
    with pytest.raises(ValueError, match="normalize: expected False, got True"):
        linattn.segment_map_backward("linear_attention", v, q, k, v, normalize=True)


def test_the_core_makes_no_o_and_no_other_gradient(rng):
    x, _ = a_call("kda", rng)
    do = rng.standard_normal(x["v"].shape)
    *others, dS = _linattn.backward("kda", **x, do=do, states_only=True)
    assert dS.shape == (2, 2, 6, 5) and others == [None] * len(others)
    with pytest.raises(ValueError, match="out: expected None, as the call makes no o"):
        _linattn.forward("kda", **x, states_only=True, out=np.zeros(x["v"].shape))
    assert _linattn.forward("kda", **x, segment_map=True)[0] is None
    q, k, v = (x[name] for name in "qkv")
    features = [0.0, 0.0, 0.0, 0.0, 1.0, 1e-6, 1.0]  # normalised
    made = _linattn.forward("linear_attention", q, k, v, features=features, states_only=True)
    assert made[0] is None and len(made[1]) == 2
    with pytest.raises(ValueError, match="states_only: expected gradients without a normaliser"):
        _linattn.backward("linear_attention", q, k, v, do=v, features=features, states_only=True)
    features[-1] = 0.0  # not causal
    with pytest.raises(ValueError, match="states_only: expected a causal call"):
        _linattn.forward("linear_attention", q, k, v, features=features, states_only=True)


@pytest.mark.parametrize("mode", ["chunk", "recurrent"])
def test_the_kernel_of_a_gradient_of_states_is_named(mode, rng):
    x, _ = a_call("delta_rule", rng)
    linattn.segment_map_backward("delta_rule", x["v"], **x, mode=mode)
    kernel, _, why, *_ = _linattn.taken()
    assert kernel == "chunks"
    assert why == ("" if mode == "chunk" else "gradients of states alone go in chunks")


def test_memory_that_is_not_there(rng):
    x, _ = a_call("delta_rule", rng)
    for allocation in (1, 2):
        _linattn._fail_allocation(allocation)
        try:
            with pytest.raises(MemoryError, match="scratch"):
                linattn.segment_map("delta_rule", **x)
        finally:
            _linattn._fail_allocation(0)
