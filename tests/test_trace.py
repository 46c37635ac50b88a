"""explain, states and apply_feature_map, against the ops, the reference and golden fractions."""

import inspect
import json
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.problems import PER_TOKEN
from support.variants import GATED

import linattn
from linattn import features, reference
from linattn.testing import GATES, make_inputs

GOLDEN = json.loads((Path(__file__).parent / "golden" / "cat_sat.json").read_text())
WORDS = ("The", "cat", "sat", "on", "mat")


def fractions(x):
    return np.vectorize(Fraction, otypes=[object])(np.array(x, dtype=object))


Q, K, V = (fractions(GOLDEN[name]) for name in "QKV")


# ---- explain


@pytest.mark.parametrize(
    ("name", "feature_map"), [("seed_elu1", "elu+1"), ("derived_relu_eps_1e3", "relu+eps")]
)
def test_explains_the_worked_example_in_fractions(name, feature_map):
    golden = {what: fractions(x) for what, x in GOLDEN[name].items()}
    how = {"tokens": WORDS, "feature_map": feature_map}
    got = linattn.explain(Q, K, V, causal=False, exact=True, **how)
    for what, expected in {
        "phi_q": golden["phi_q"],
        "phi_k": golden["phi_k"],
        "numerators": golden["num"],
        "denominators": golden["den"],
        "weights": golden["weights"],
        "output": golden["out"],
    }.items():
        np.testing.assert_array_equal(getattr(got, what), expected, err_msg=what)
    np.testing.assert_array_equal(got.S[-1], golden["KV"])
    np.testing.assert_array_equal(got.z[-1], golden["key_sum"])
    got = linattn.explain(Q, K, V, exact=True, **how)
    np.testing.assert_array_equal(got.numerators, golden["causal_num"])
    np.testing.assert_array_equal(got.denominators, golden["causal_den"])
    np.testing.assert_array_equal(got.output, golden["causal_out"])
    assert all(isinstance(x, Fraction) for x in got.output.flat)


OPTIONS = {
    "": {},
    "add": {"normalize": "add", "eps": 0.25},
    "pair": {"feature_map": ("relu2", "exp")},
    "numerator": {"normalize": False, "feature_map": "identity", "scale": 0.5},
    "callable": {"feature_map": lambda x: np.exp(-x), "causal": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_explains_the_op(options):
    x = np.random.default_rng(0).standard_normal((3, 6, 4))
    got = linattn.explain(*x, **options)
    o, state = linattn.linear_attention(*x, **({"scale": 1.0} | options), output_final_state=True)
    S, z = state if options.get("normalize", True) else (state, got.z[-1])
    for mine, expected in (
        (got.output, o),
        (got.S[-1], S),
        (got.z[-1], z),
        (got.weights @ x[2], o),
    ):
        np.testing.assert_allclose(mine, expected, rtol=1e-12, atol=1e-12)


def test_explanation_is_a_page():
    got = linattn.explain(Q, K, V, tokens=["<The>", *WORDS[1:]], exact=True)
    text, page = repr(got), got._repr_html_()
    assert text.startswith(
        "linear attention of 5 tokens, K = 4, V = 4\n\nphi(q)\ntoken  0  1  2  3\n"
    )
    (line,) = (line for line in text.splitlines() if "cat <- <The>" in line)
    weight = str(got.weights[1, 0])
    assert line.split()[3] == weight and line.endswith("#" * round(float(got.weights[1, 0]) * 20))
    assert "&lt;The&gt;" in page and "<The>" not in page and f">{weight}<" in page
    assert page.count("<table>") == page.count("</table>") == 5


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"q": np.ones(3)}, "q: expected one head, [T,K] or [T,V], got (3,)"),
        ({"k": np.ones((2, 4))}, "k: expected [T,K] = (3, 4) like q, got (2, 4)"),
        ({"v": np.ones((2, 4))}, "v: expected [T,V] with T = 3 like q, got (2, 4)"),
        ({"tokens": ["a"]}, "tokens: expected 3 names, one a token, got 1"),
        ({"feature_map": "identity"}, "normalize: with feature_map='identity'"),
        ({"feature_map": "exp", "exact": True}, "exact: expected one of identity, relu+eps, relu2"),
        ({"q": -np.ones((3, 4)), "exact": True}, "exact: elu+1 of -1 is exp(-1)"),
        (
            {name: np.ones((65, 4)) for name in "qkv"},
            "q: expected 1 to 64 tokens to explain, got 65",
        ),
    ],
)
def test_explain_refuses(bad, text):
    with pytest.raises(ValueError) as caught:
        linattn.explain(**{name: np.ones((3, 4)) for name in "qkv"} | bad)
    assert str(caught.value).startswith(text)


# ---- states


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("every", [1, 3, 100])
def test_states_are_those_of_prefixes(op, every):
    x = make_inputs(op, np.random.default_rng(1), B=2, T=7, H=2, HV=4, initial_state=True)
    got = linattn.states(op, **x, every=every)
    expected_read = [*range(every, 7, every), 7]
    assert got.read.tolist() == expected_read
    for i, read in enumerate(expected_read):
        first = {name: a[:, :read] if name in PER_TOKEN else a for name, a in x.items()}
        _, state = getattr(reference, op)(**first)
        S, z = state if isinstance(state, tuple) else (state, None)
        np.testing.assert_allclose(got.S[i], S, rtol=1e-12, atol=1e-12)
        if z is None:
            assert got.z is None
        else:
            np.testing.assert_allclose(got.z[i], z, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("op", [*GATED, "lightning_attention", "delta_rule"])
def test_states_take_gates_by_position(op):
    x = make_inputs(op, np.random.default_rng(2), T=5)
    after_v = list(inspect.signature(getattr(linattn, op)).parameters)[3:]
    gates = [x[name] for name in after_v if name in x]
    got = linattn.states(op, x["q"], x["k"], x["v"], *gates)
    np.testing.assert_array_equal(got.S, linattn.states(getattr(linattn, op), **x).S)


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ({"op": "mamba"}, ValueError, "op: expected one of linear_attention"),
        ({"every": 0}, ValueError, "every: expected a size >= 1, got 0"),
        ({"every": 0.5}, TypeError, "every: expected an int, got float"),
        ({"cu_seqlens": [0, 3]}, ValueError, "cu_seqlens: expected whole sequences"),
        ({name: np.ones((0, 4)) for name in "qkv"}, ValueError, "q: expected at least 1 token"),
    ],
)
def test_states_refuse(bad, error, text):
    with pytest.raises(error) as caught:
        linattn.states(**{name: np.ones((3, 4)) for name in "qkv"} | {"op": "retention"} | bad)
    assert str(caught.value).startswith(text)


# ---- feature maps


@pytest.mark.parametrize("name", features.FEATURE_MAPS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_apply_feature_map_is_the_kernels(name, dtype):
    """With one key that is 1 and no normaliser, an op of one token returns phi(q) phi(k)."""
    x = np.random.default_rng(3).standard_normal((50, 1)).astype(dtype)
    y = linattn.apply_feature_map(x, name)
    assert y.dtype == x.dtype
    one = np.ones_like(x)
    o, _ = linattn.linear_attention(
        *(a[:, None, None] for a in (x, one, one)),
        feature_map=(name, "identity"),
        normalize=False,
        scale=1.0,
    )
    rounding = {2: 2**-7, 4: 3e-7, 8: 1e-15}[np.dtype(dtype).itemsize]
    np.testing.assert_allclose(y[:, 0].astype("d"), o[:, 0, 0, 0].astype("d"), rtol=rounding)


def test_apply_feature_map_of_far_numbers():
    x = np.array([-np.inf, -1e4, 1e4, np.inf, np.nan])
    np.testing.assert_array_equal(linattn.apply_feature_map(x), [0, 0, 10001, np.inf, np.nan])
    np.testing.assert_array_equal(
        linattn.apply_feature_map(x, "exp"), [0, 0, np.inf, np.inf, np.nan]
    )
    doubled = linattn.apply_feature_map(x[1:3], lambda x: np.concatenate([x, -x], -1))
    np.testing.assert_array_equal(doubled, [-1e4, 1e4, 1e4, -1e4])


@pytest.mark.parametrize(
    ("x", "name", "error", "text"),
    [
        ([1.0], "exp", TypeError, "x: expected an array of NumPy's or PyTorch's, got list"),
        (np.array([1]), "exp", TypeError, "x: expected a floating dtype, got int64"),
        (np.ones(2), "softmax", ValueError, "feature_map: expected one of 'identity'"),
    ],
)
def test_apply_feature_map_refuses(x, name, error, text):
    with pytest.raises(error) as caught:
        linattn.apply_feature_map(x, name)
    assert str(caught.value).startswith(text)


# ---- PyTorch's tensors


def test_tensors():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(4)
    x = make_inputs("gla", rng, B=2, T=5, H=2, HV=4)
    t = {name: torch.from_numpy(a) for name, a in x.items()}
    got = linattn.states("gla", **t, every=2)
    assert isinstance(got.S, torch.Tensor)
    np.testing.assert_array_equal(got.S, linattn.states("gla", **x, every=2).S)
    del t["v"], x["v"]
    A = linattn.implicit_weights(op="gla", **t)
    assert isinstance(A, torch.Tensor)
    np.testing.assert_array_equal(A, linattn.implicit_weights(op="gla", **x))
    one = linattn.implicit_weights(t["q"][0, :, 0], t["k"][0, :, 0])
    np.testing.assert_array_equal(one, linattn.implicit_weights(x["q"][0, :, 0], x["k"][0, :, 0]))
    for name in features.FEATURE_MAPS:
        q = t["q"].clone().requires_grad_()
        y = linattn.apply_feature_map(q, name)
        np.testing.assert_allclose(
            y.detach(), linattn.apply_feature_map(x["q"], name), rtol=1e-15, atol=1e-15
        )
        y.sum().backward()
        assert q.grad is not None
    why = linattn.explain(t["q"][0, :, 0], t["k"][0, :, 0], t["k"][0, :, 1])
    assert isinstance(why.output, np.ndarray)
