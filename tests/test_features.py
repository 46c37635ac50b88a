"""Feature maps: each against its formula where floats run out, callables against the core's own."""

import warnings

import ml_dtypes
import numpy as np
import pytest
from support import device
from support.compare import assert_same_bits
from support.device import ops as linattn

from linattn import FeatureMap, linear_attention
from linattn.features import FEATURE_MAPS
from linattn.testing import make_inputs, make_output_gradients

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(d) for d in (np.float64, np.float32, np.float16, BFLOAT16)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.name)
maps = pytest.mark.parametrize("name", FEATURE_MAPS)

FORMULAS = {
    "identity": lambda x: x,
    "elu+1": lambda x: np.where(x > 0, x + 1, np.exp(np.where(x > 0, 0, x))),
    "relu+eps": lambda x: np.where(x < 0, 0, x) + 1e-3,
    "relu2": lambda x: np.where(x < 0, 0, x) ** 2,
    "exp": np.exp,
}
SLOPES = {
    "identity": lambda x: np.ones_like(x),
    "elu+1": lambda x: np.where(x > 0, 1, np.exp(np.where(x > 0, 0, x))),
    "relu+eps": lambda x: np.where(x > 0, 1.0, 0.0),
    "relu2": lambda x: 2 * np.where(x > 0, x, 0),
    "exp": np.exp,
}
EXTREMES = [
    0.0,
    -0.0,
    1e-30,
    -1e-30,
    1.0,
    -1.0,
    3.5,
    -5.0,
    -16.5,
    -17.5,
    -18.0,
    -30.0,
    -60.0,
    -80.0,
    -87.0,
    -1e4,
    -1e30,
    10.0,
    80.0,
    88.0,
    1e4,
    1e30,
    np.inf,
    -np.inf,
    np.nan,
]


def phi_of_k(name, x):
    """The core's phi(x), in its float32 or float64: one token, S = 0 + phi(k) * 1, K = 1 a head."""
    k = x.reshape(-1, 1, 1, 1)
    one = np.ones_like(k)
    _, S = linattn.linear_attention(
        one,
        k,
        one,
        feature_map=("identity", name),
        normalize=False,
        mode="recurrent",
        output_final_state=True,
    )
    return S.reshape(-1)


def phi_of_q(name, x):
    """The same for q, in x's dtype: o = S phi(q) with S = 1."""
    q = x.reshape(-1, 1, 1, 1)
    real = np.float64 if x.dtype == np.float64 else np.float32
    o, _ = linattn.linear_attention(
        q,
        np.zeros_like(q),
        np.zeros_like(q),
        feature_map=(name, "identity"),
        normalize=False,
        scale=1.0,
        mode="recurrent",
        initial_state=np.ones(q.shape, real),
    )
    return o.reshape(-1)


def assert_close(got, want, ulps):
    """Within some units in the last place of got's dtype; the same infinities and NaN."""
    with np.errstate(all="ignore"):
        want = np.asarray(want, np.float64).astype(got.dtype)
    got64, want64 = got.astype(np.float64), want.astype(np.float64)
    assert np.array_equal(np.isnan(got64), np.isnan(want64))
    assert np.array_equal(np.isinf(got64), np.isinf(want64))
    info = ml_dtypes.finfo(got.dtype)
    tiny = float(info.smallest_normal)  # below it a machine may flush to zero
    finite = np.isfinite(want64)
    error = np.abs(got64[finite] - want64[finite])
    bound = ulps * float(info.eps) * np.abs(want64[finite]) + tiny
    assert (error <= bound).all(), (got[finite][error > bound], want[finite][error > bound])
    assert np.array_equal(
        np.signbit(got64[finite & (want64 < 0)]), np.signbit(want64[finite & (want64 < 0)])
    )


@maps
@dtypes
def test_each_map_is_its_formula_at_the_extremes(name, dtype):
    with np.errstate(all="ignore"):
        x = np.array(EXTREMES).astype(dtype)
        want = FORMULAS[name](x.astype(np.float64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        k, q = phi_of_k(name, x), phi_of_q(name, x)
    with np.errstate(all="ignore"):
        assert_close(k, want, 4)
        assert_close(q, want, 4)


@maps
@dtypes
def test_each_map_is_its_formula_on_a_grid(name, dtype):
    x = np.linspace(-20, 20, 4001).astype(dtype)
    with np.errstate(all="ignore"):
        want = FORMULAS[name](x.astype(np.float64))
        assert_close(phi_of_k(name, x), want, 4)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, BFLOAT16])
def test_elu1_never_rounds_to_zero_where_exp_does_not(dtype):
    """expm1(x) + 1 is exactly 0 from about -17 on in float32."""
    x = np.arange(-87, 0, 0.5).astype(dtype)
    k = phi_of_k("elu+1", x)
    assert (k > 0).all()
    assert (np.diff(k.astype(np.float64)) >= 0).all()


@pytest.mark.parametrize("name", ["elu+1", "relu+eps", "relu2", "exp"])
def test_maps_are_never_negative(name):
    x = np.concatenate([np.linspace(-100, 80, 1001), [-np.inf, -1e30]]).astype(np.float32)
    assert (phi_of_k(name, x) >= 0).all()


@maps
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("mode", ["chunk", "recurrent", "parallel"])
def test_slopes_at_the_extremes(name, dtype, mode):
    """dk = phi'(k) (dS v): with v = dS = 1 and no read it is the slope alone."""
    x = np.array([e for e in EXTREMES if np.isfinite(e) and abs(e) < 1e5]).astype(dtype)
    k = x.reshape(-1, 1, 1, 1)
    one, zero = np.ones_like(k), np.zeros_like(k)
    grads = linattn.linear_attention_backward(
        zero,
        one,
        k,
        one,
        feature_map=("identity", name),
        normalize=False,
        mode=mode,
        d_final_state=np.ones(k.shape, dtype),
    )
    with np.errstate(all="ignore"):
        assert_close(grads.dk.reshape(-1), SLOPES[name](x.astype(np.float64)), 4)


@maps
def test_one_nan_stays_in_its_own_sequence(name):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 9, 1, 4)).astype(np.float32)
    clean, _ = linattn.linear_attention(q, k, v, feature_map=name, normalize="add")
    k[1, 4, 0, 2] = np.nan
    o, _ = linattn.linear_attention(q, k, v, feature_map=name, normalize="add")
    assert o[0].tobytes() == clean[0].tobytes()
    assert o[1, :4].tobytes() == clean[1, :4].tobytes()
    assert np.isnan(o[1, 4:]).all()


# ---- FeatureMap ----


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"name": "softmax"}, ValueError, "'softmax'"),
        ({"name": ""}, ValueError, "feature_map: expected one of 'identity'"),
        ({"name": 3}, TypeError, "name"),
        ({"name": None}, TypeError, "name"),
        ({"name": ["exp"]}, TypeError, "name"),
        ({"name": "relu+eps", "eps": -1}, ValueError, "eps >= 0, got -1"),
        ({"name": "relu+eps", "eps": np.nan}, ValueError, "eps >= 0, got nan"),
        ({"name": "relu+eps", "eps": np.inf}, ValueError, "eps >= 0, got inf"),
        ({"name": "relu+eps", "eps": "x"}, TypeError, "eps"),
        ({"name": "relu+eps", "eps": None}, TypeError, "eps"),
        ({"name": "mine", "forward": 3}, TypeError, "forward"),
        ({"name": "mine", "forward": np.exp, "backward": 3}, TypeError, "backward"),
        ({"name": "exp", "backward": lambda x, dy: dy}, ValueError, "backward"),
    ],
    ids=range(13),
)
def test_a_wrong_feature_map_is_refused_when_it_is_made(arguments, error, text):
    with pytest.raises((TypeError, ValueError)) as caught:
        FeatureMap(**arguments)
    assert caught.type is error and text in str(caught.value), str(caught.value)
    assert "feature_map" in str(caught.value)


def inputs(**options):
    return make_inputs(
        "linear_attention", np.random.default_rng(1), B=2, T=37, H=2, HV=4, K=8, V=5, **options
    )


@maps
def test_a_name_a_feature_map_and_a_pair_are_the_same(name):
    made = inputs(normalize="add")
    want, _ = linattn.linear_attention(**made, feature_map=name)
    for given in (FeatureMap(name), (name, name), [name, name], (FeatureMap(name), name)):
        o, _ = linattn.linear_attention(**made, feature_map=given)
        assert o.tobytes() == want.tobytes()


@pytest.mark.parametrize("causal", [True, False])
def test_attend_is_the_plainest_form(causal):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 9, 3, 4)) for _ in range(3))
    plain = {"feature_map": "identity", "normalize": False, "causal": causal}
    for scale in (1.0, 0.5):  # attend of NumPy's arrays, on every --device
        o = linattn.attend(q, k, v, causal=causal, scale=scale)
        assert_same_bits(o, linear_attention(q, k, v, scale=scale, **plain)[0])
    one = [x[0, :, 0] for x in (q, k, v)]
    scores = one[0] @ one[1].T
    want = (np.tril(scores) if causal else scores) @ one[2]
    np.testing.assert_allclose(linattn.attend(*one, causal=causal), want, rtol=1e-12, atol=1e-12)


def negative(dtype, **changed):
    """Queries above zero, keys below: every denominator is negative under the identity."""
    q = np.full((1, 70, 2, 3), 0.5, dtype)
    return {"q": q, "k": -q, "v": q, "feature_map": "identity", "normalize": "clamp"} | changed


CLAMPED = pytest.warns(RuntimeWarning, match="normalize: expected denominators >= 0, got some")


@pytest.mark.parametrize(
    "how", [{}, {"mode": "recurrent"}, {"mode": "parallel"}, {"causal": False}], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_clamped_denominator_is_told_of(dtype, how):
    device.needs_host("nothing waits for a device")
    made = negative(dtype, **how)
    with CLAMPED as caught:
        linattn.linear_attention(**made)
    assert [x.filename for x in caught] == [__file__]
    own = FeatureMap("own", forward=lambda x: x)  # the core cannot know that it is signed
    with CLAMPED:
        linattn.linear_attention(**made | {"feature_map": own, "normalize": True})
    one = made["k"].copy()
    made["k"] = abs(one)
    made["k"][0, 60, 0] = -100  # the denominators of one token and those after it
    with CLAMPED:
        linattn.linear_attention(**made)


def test_a_clamped_denominator_of_a_step_is_told_of():
    device.needs_host("nothing waits for a device")
    made = negative(np.float32)
    made |= {name: np.ascontiguousarray(made[name][:, 0]) for name in "qkv"}
    state = linattn.zeros_state(1, 2, 3, 3, normalized=True)
    with CLAMPED:
        linattn.linear_attention_step(**made, state=state)
    assert state[1].any()  # the call was complete
    with CLAMPED as caught:
        linattn.bind(linattn.linear_attention_step, **made, state=state)()
    assert [x.filename for x in caught] == [__file__]


def test_other_denominators_are_not_told_of():
    made = negative(np.float32)
    linattn.linear_attention(**made | {"normalize": "add", "eps": 100.0})
    linattn.linear_attention(**made | {"k": made["q"]})
    linattn.linear_attention(**made | {"k": 0 * made["q"]})  # zero is no sign of a signed map
    linattn.linear_attention_backward(made["v"], **made)


def test_eps_of_relu():
    x = np.array([-1.0, 0.0, 2.0])
    assert np.array_equal(phi_of_k(FeatureMap("relu+eps", eps=0.5), x), [0.5, 0.5, 2.5])
    assert np.array_equal(phi_of_k(FeatureMap("relu+eps", eps=0), x), [0, 0, 2])


def test_a_pair_maps_q_with_the_first_and_k_with_the_second():
    x = np.array([-2.0, -0.5, 0.5, 2.0])
    assert_close(phi_of_k("exp", x), np.exp(x), 4)
    assert_close(phi_of_q("exp", x), np.exp(x), 4)
    made = inputs(normalize=False)
    o, S = linattn.linear_attention(**made, feature_map=("exp", "relu2"), output_final_state=True)
    mapped = made | {"q": np.exp(made["q"]), "k": np.maximum(made["k"], 0) ** 2}
    want, S_want = linattn.linear_attention(
        **mapped, feature_map="identity", output_final_state=True
    )
    np.testing.assert_allclose(o, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(S, S_want, rtol=1e-12, atol=1e-12)


# ---- functions of one's own ----


def elu1(x):
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def elu1_backward(x, dy):
    return np.where(x > 0, 1, np.exp(np.minimum(x, 0))) * dy


OWN = FeatureMap("my elu", forward=elu1, backward=elu1_backward)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "given",
    [elu1, OWN, (elu1, "elu+1"), ("elu+1", elu1)],
    ids=["function", "map", "first", "second"],
)
def test_a_function_equals_the_cores_own(given, norm):
    for normalize in (True, False, "add"):
        made = inputs(normalize=normalize, initial_state=True)
        o, state = linattn.linear_attention(
            **made, feature_map=given, qk_l2norm=norm, output_final_state=True
        )
        want, state_want = linattn.linear_attention(**made, qk_l2norm=norm, output_final_state=True)
        np.testing.assert_allclose(o, want, rtol=1e-12, atol=1e-13)
        parts = zip(state, state_want, strict=True) if normalize else [(state, state_want)]
        for x, y in parts:
            np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    "given", [OWN, (OWN, "elu+1"), ("elu+1", OWN)], ids=["both", "first", "second"]
)
@pytest.mark.parametrize("normalize", [True, False, "add"])
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_a_function_equal_the_cores_own(given, norm, normalize, causal):
    made = inputs(normalize=normalize, initial_state=True)
    made |= make_output_gradients("linear_attention", np.random.default_rng(2), made)
    options = {"qk_l2norm": norm, "causal": causal}
    got = linattn.linear_attention_backward(**made, feature_map=given, **options)
    want = linattn.linear_attention_backward(**made, **options)
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-10, atol=1e-12)
    assert got.dg is None and got.dbeta is None


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_gradients_keep_the_dtype(dtype):
    made = inputs(dtype=dtype)
    made |= make_output_gradients("linear_attention", np.random.default_rng(2), made)
    wide = FeatureMap(
        "wide",
        forward=lambda x: elu1(x.astype(np.float64)),
        backward=lambda x, dy: elu1_backward(x.astype(np.float64), dy),
    )
    for given in (OWN, wide):
        o, _ = linattn.linear_attention(made["q"], made["k"], made["v"], feature_map=given)
        grads = linattn.linear_attention_backward(**made, feature_map=given, qk_l2norm=True)
        assert o.dtype == dtype
        assert {x.dtype for x in grads[:3]} == {np.dtype(dtype)}


def test_a_function_may_change_k():
    def squares(x):  # [x, x^2]: K' = 2 K
        return np.concatenate([x, x * x], -1)

    def squares_backward(x, dy):
        first, second = np.split(dy, 2, -1)
        return first + 2 * x * second

    phi = FeatureMap("squares", forward=squares, backward=squares_backward)
    made = inputs(normalize=False)
    o, S = linattn.linear_attention(**made, feature_map=phi, output_final_state=True)
    mapped = made | {"q": squares(made["q"]), "k": squares(made["k"])}
    want, S_want = linattn.linear_attention(
        **mapped, feature_map="identity", output_final_state=True
    )
    assert S.shape == (2, 4, 16, 5)
    assert o.tobytes() == want.tobytes() and S.tobytes() == S_want.tobytes()

    do = np.random.default_rng(3).standard_normal(made["v"].shape)
    got = linattn.linear_attention_backward(do, **made, feature_map=phi)
    inner = linattn.linear_attention_backward(do, **mapped, feature_map="identity")
    assert got.dq.shape == made["q"].shape
    np.testing.assert_allclose(got.dq, squares_backward(made["q"], inner.dq), rtol=1e-14)
    np.testing.assert_allclose(got.dk, squares_backward(made["k"], inner.dk), rtol=1e-14)

    state = np.zeros((2, 4, 16, 5))
    for t in range(37):
        last = linattn.linear_attention_step(
            *(made[x][:, t] for x in "qkv"), state=state, feature_map=phi, normalize=False
        )
    np.testing.assert_allclose(last, o[:, -1], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(state, S, rtol=1e-10, atol=1e-12)


def test_functions_that_disagree_about_k_are_refused():
    with pytest.raises(ValueError, match=r"k: expected \[B,T,H,K\] = \(2, 37, 2, 8\)"):
        linattn.linear_attention(**inputs(), feature_map=("exp", lambda x: x[..., :3]))


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x[:1], lambda x: None, lambda x: 3.0, lambda x: x.tolist(), lambda x: x.sum()],
    ids=["rows", "None", "number", "list", "scalar"],
)
def test_a_function_that_gives_the_wrong_thing_is_refused(wrong):
    for call in (linattn.linear_attention, linattn.linear_attention_backward):
        made = inputs()
        if call is linattn.linear_attention_backward:
            made["do"] = made["v"]
        phi = FeatureMap("wrong", forward=wrong, backward=lambda x, dy: dy)
        with pytest.raises((TypeError, ValueError), match="feature_map: expected wrong to give"):
            call(**made, feature_map=phi)


def test_a_backward_that_gives_the_wrong_shape_is_refused():
    phi = FeatureMap("wrong", forward=np.exp, backward=lambda x, dy: dy[..., :1])
    made = inputs()
    with pytest.raises(ValueError, match="feature_map: "):
        linattn.linear_attention_backward(made["v"], **made, feature_map=phi)


def test_a_functions_own_exception_comes_through():
    def broken(x):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        linattn.linear_attention(**inputs(), feature_map=broken)


@pytest.mark.parametrize(
    "given",
    [elu1, (elu1, "exp"), ("exp", FeatureMap("x", forward=elu1))],
    ids=["function", "first", "second"],
)
def test_the_gradient_of_a_function_needs_its_backward(given):
    made = inputs()
    with pytest.raises(ValueError, match="feature_map: the gradient of a function of your own"):
        linattn.linear_attention_backward(made["v"], **made, feature_map=given)


def test_what_cannot_be_hashed_can_still_map():
    class Map:
        __hash__ = None

        def __call__(self, x):
            return elu1(x)

    made = inputs()
    want, _ = linattn.linear_attention(**made, feature_map=elu1)
    o, _ = linattn.linear_attention(**made, feature_map=Map())
    assert o.tobytes() == want.tobytes()


@maps
def test_the_l2_norm_comes_before_the_map(name):
    made = inputs(normalize="add")
    o, _ = linattn.linear_attention(**made, feature_map=name, qk_l2norm=True)

    def unit(x):
        return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)

    by_hand = made | {"q": unit(made["q"]), "k": unit(made["k"])}
    want, _ = linattn.linear_attention(**by_hand, feature_map=name)
    after = made | {"q": unit(FORMULAS[name](made["q"])), "k": unit(FORMULAS[name](made["k"]))}
    other, _ = linattn.linear_attention(**after, feature_map="identity")
    np.testing.assert_allclose(o, want, rtol=1e-11, atol=1e-12)
    if name != "identity":
        assert not np.allclose(o, other, rtol=1e-3)


def test_a_map_shows_what_matters():
    def square(x):
        return x * x

    for phi, shown in (
        (FeatureMap("elu+1"), "FeatureMap('elu+1')"),
        (FeatureMap("relu+eps", 0.5), "FeatureMap('relu+eps', eps=0.5)"),
        (FeatureMap("mine", forward=square), "FeatureMap('mine', forward=square)"),
        (
            FeatureMap("mine", forward=square, backward=np.multiply),
            "FeatureMap('mine', forward=square, backward=multiply)",
        ),
    ):
        assert repr(phi) == shown
