"""linattn.gates: the formulas where floats run out, gradients, dtypes, and what is refused."""

import math

import ml_dtypes
import numpy as np
import pytest
from support.device import imported

import linattn
from linattn import gates

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
# Where exp(x) is no float32, where it is nothing beside 1, where 1 is nothing beside it.
EXTREMES = [0.0, -0.0, 1e-30, -1e-30, 0.5, -0.5, 5.0, -5.0, 15.0, -15.0, 17.5, -17.5, 19.9, 20.1]
EXTREMES += [-20.1, 30.0, -30.0, 80.0, -80.0, 86.0, -86.0, 300.0, -300.0, 1e4, -1e4, 1e30, -1e30]
EXTREMES += [np.inf, -np.inf, np.nan]


def long_softplus(u):
    return np.where(u > 0, u, 0) + np.log1p(np.exp(-abs(u)))


def long_sigmoid(u):
    return 1 / (1 + np.exp(-u))


def wide(x):
    return np.asarray(x, np.longdouble)


FORMULAS = {
    "softplus": lambda x, A_log, dt: -np.exp(wide(A_log)) * long_softplus(wide(x) + dt),
    "bounded": lambda x, A_log, dt: -5 * long_sigmoid(np.exp(wide(A_log)) * (wide(x) + dt)),
    "rwkv7": lambda x: -np.exp(wide(-0.5)) * long_sigmoid(wide(x)),
    "beta": lambda x: long_sigmoid(wide(x)),
}
WITH_RATE = ("softplus", "bounded")
every = pytest.mark.parametrize("name", FORMULAS)
with_rate = pytest.mark.parametrize("name", WITH_RATE)


def parameters(name, *arrays):
    return arrays if name in WITH_RATE else arrays[:1]


def of_keys(rng, dtype=np.float64):
    """x [B,T,HV,K], A_log [HV,1], dt_bias [HV,K]."""
    x, dt = rng.standard_normal((2, 5, 3, 4)), rng.standard_normal((3, 4))
    return [a.astype(dtype) for a in (x, rng.uniform(0, 2, (3, 1)), dt)]


# ---- values ----


def in_units(got, want):
    """The error in units of the last place of got; where want is no normal number, of the least."""
    want = np.asarray(want, np.longdouble)
    spacing = np.spacing(abs(np.asarray(want, got.dtype))).astype(np.longdouble)
    return abs(got.astype(np.longdouble) - want) / spacing


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every
def test_values_at_the_extremes(name, dtype):
    x = np.array(EXTREMES, dtype)
    none = np.zeros(1, dtype)
    with np.errstate(all="ignore"):
        want = FORMULAS[name](*parameters(name, x, none, none))
        held = want.astype(dtype)
    got = getattr(gates, name)(*parameters(name, x, none, none))  # warnings are errors
    assert got.dtype == dtype
    finite = np.isfinite(held)
    np.testing.assert_array_equal(got[~finite], held[~finite])
    assert np.isfinite(held).sum() >= len(EXTREMES) - 2
    assert in_units(got[finite], want[finite]).max() <= 4


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@every
def test_values_of_tensors_at_the_extremes(name, dtype):
    torch = imported("torch")
    x, none = np.array(EXTREMES, dtype), np.zeros(1, dtype)
    with np.errstate(all="ignore"):
        want = FORMULAS[name](*parameters(name, x, none, none))
        held = want.astype(dtype)
    tensors = [torch.from_numpy(a) for a in parameters(name, x, none, none)]
    got = getattr(gates, name)(*tensors).numpy()
    finite = np.isfinite(held)
    np.testing.assert_array_equal(got[~finite], held[~finite])
    normal = finite & (abs(held) > 2 * np.finfo(dtype).tiny)  # PyTorch's exp may flush the rest
    assert in_units(got[normal], want[normal]).max() <= 4
    assert abs(got[finite & ~normal]).max(initial=0) <= 4 * np.finfo(dtype).tiny


@every
def test_values_are_the_formula(name, rng):
    arrays = parameters(name, *of_keys(rng))
    got = getattr(gates, name)(*arrays)
    np.testing.assert_allclose(got, FORMULAS[name](*arrays).astype(float), rtol=1e-14)
    assert got.shape == arrays[0].shape


def test_options_and_defaults(rng):
    x, A_log, dt = of_keys(rng)
    for name in WITH_RATE:
        function = getattr(gates, name)
        np.testing.assert_array_equal(function(x, A_log), function(x, A_log, 0 * dt))
    bound = gates.bounded(x, A_log, dt)
    np.testing.assert_allclose(gates.bounded(x, A_log, dt, lower_bound=-2.5), bound / 2, rtol=1e-15)
    np.testing.assert_array_equal(gates.bounded(x, None, dt), gates.bounded(x, 0 * A_log, dt))
    np.testing.assert_array_equal(gates.beta(x, True), 2 * gates.beta(x))
    per_head = gates.softplus(x[..., 0], A_log[:, 0], dt[:, 0])
    np.testing.assert_array_equal(per_head, gates.softplus(x, A_log, dt)[..., 0])


def test_a_large_rate_clears_the_state():
    with np.errstate(all="raise"):
        g = gates.softplus(np.ones(2, np.float32), np.full(2, 100, np.float32))
    assert (g == -np.inf).all()


def test_gates_are_what_the_ops_take(rng):
    """No warning of a decay above one, and the same outputs as by hand."""
    q, k, v = rng.standard_normal((3, 2, 9, 3, 4))
    x, A_log, dt = rng.standard_normal((2, 9, 3)), rng.standard_normal(3), rng.standard_normal(3)
    g, beta = gates.softplus(x, A_log, dt), gates.beta(x)
    o, _ = linattn.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True)
    alpha = (1 + np.exp(x + dt)) ** -np.exp(A_log)
    by_hand = linattn.gated_delta_rule(
        q, k, v, alpha=alpha, beta=1 / (1 + np.exp(-x)), qk_l2norm=True
    )
    np.testing.assert_allclose(o, by_hand[0], rtol=1e-11, atol=1e-12)
    one = gates.softplus(x[0, 0, 0], A_log[:1][0])  # a step of one head
    np.testing.assert_allclose(one, -np.exp(A_log[0]) * np.log1p(np.exp(x[0, 0, 0])), rtol=1e-14)


# ---- gradients ----


@every
def test_gradients_are_those_of_differences(name, rng):
    arrays, h = parameters(name, *of_keys(rng)), 1e-6
    d = rng.standard_normal(arrays[0].shape)
    grads = getattr(gates, f"{name}_backward")(d, *arrays)
    assert isinstance(grads, gates.GateGradients)
    for i, (got, x) in enumerate(zip(grads, arrays, strict=False)):
        assert got.shape == x.shape
        way = rng.standard_normal(x.shape)

        def loss(x, i=i):
            return (getattr(gates, name)(*arrays[:i], x, *arrays[i + 1 :]) * d).sum()

        want = (loss(x + h * way) - loss(x - h * way)) / (2 * h)
        np.testing.assert_allclose((got * way).sum(), want, rtol=1e-7)
    assert all(x is None for x in grads[len(arrays) :])


def test_gradients_of_options(rng):
    x, A_log, dt = of_keys(rng)
    d = rng.standard_normal(x.shape)
    whole = gates.bounded_backward(d, x, A_log, dt)
    half = gates.bounded_backward(d, x, A_log, dt, lower_bound=-2.5)
    for a, b in zip(half, whole, strict=True):
        np.testing.assert_allclose(2 * a, b, rtol=1e-14)
    for name in WITH_RATE:
        backward = getattr(gates, f"{name}_backward")
        without = backward(d, x, A_log)
        assert without.ddt_bias is None
        np.testing.assert_array_equal(without.dx, backward(d, x, A_log, 0 * dt).dx)
    none = gates.bounded_backward(d, x, None, dt)
    assert none.dA_log is None
    np.testing.assert_array_equal(none.dx, gates.bounded_backward(d, x, 0 * A_log, dt).dx)
    twice = gates.beta_backward(d, x, True).dx
    np.testing.assert_array_equal(twice, 2 * gates.beta_backward(d, x).dx)


SLOPES = {
    "softplus": lambda u: -long_sigmoid(u),
    "bounded": lambda u: -5 * long_sigmoid(u) * long_sigmoid(-u),
    "rwkv7": lambda u: -np.exp(wide(-0.5)) * long_sigmoid(u) * long_sigmoid(-u),
    "beta": lambda u: long_sigmoid(u) * long_sigmoid(-u),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@every
def test_slopes_at_the_extremes(name, dtype):
    x = np.array([u for u in EXTREMES if np.isfinite(u)], dtype)
    with np.errstate(all="ignore"):
        want = SLOPES[name](wide(x))
    one, none = np.ones_like(x), np.zeros(1, dtype)
    got = getattr(gates, f"{name}_backward")(one, *parameters(name, x, none, none)).dx
    assert got.dtype == dtype and in_units(got, want).max() <= 6


@every
def test_gradients_of_tensors(name, rng):
    torch = imported("torch")
    arrays = parameters(name, *of_keys(rng))
    arrays[0][0, 0] = 0  # where a maximum and an absolute value have no slope of their own
    d = rng.standard_normal(arrays[0].shape)
    tensors = [torch.from_numpy(a).requires_grad_() for a in arrays]
    result = getattr(gates, name)(*tensors)
    found = torch.autograd.grad(result, tensors, torch.from_numpy(d))
    want = getattr(gates, f"{name}_backward")(d, *arrays)
    np.testing.assert_allclose(
        result.detach().numpy(), getattr(gates, name)(*arrays), rtol=1e-13, atol=1e-15
    )
    for got, exact in zip(found, want, strict=False):
        np.testing.assert_allclose(got.numpy(), exact, rtol=1e-11, atol=1e-13)
    own = getattr(gates, f"{name}_backward")(torch.from_numpy(d), *(x.detach() for x in tensors))
    for got, exact in zip(own, want, strict=True):
        if exact is None:
            assert got is None
        else:
            np.testing.assert_allclose(got.numpy(), exact, rtol=1e-11, atol=1e-13)


@every
def test_traced_without_a_break(name, rng):
    torch = imported("torch")
    tensors = [torch.from_numpy(a).requires_grad_() for a in parameters(name, *of_keys(rng))]
    function = getattr(gates, name)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), function(*tensors))


def test_sums_over_many_tokens():
    """A rate's gradient is a sum over all tokens: in float32 it would stop to grow."""
    T = 1 << 18
    x, A_log = np.zeros((T, 1), np.float32), np.zeros(1, np.float32)
    x[0], d = 20, np.full((T, 1), 1e-3, np.float32)
    grads = gates.softplus_backward(d, x, A_log, A_log)
    exact = -np.float64(d[0, 0]) * (20 + (T - 1) * math.log(2))
    assert grads.dA_log.dtype == np.float32
    np.testing.assert_allclose(grads.dA_log, exact, rtol=3e-7)


# ---- dtypes, and what is refused ----


@pytest.mark.parametrize("half", [np.dtype(np.float16), BFLOAT16], ids=str)
@every
def test_results_of_half_numbers_are_float32(name, half, rng):
    narrow = parameters(name, *of_keys(rng, half))
    single = [a.astype(np.float32) for a in narrow]
    got, want = (getattr(gates, name)(*arrays) for arrays in (narrow, single))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)
    d = rng.standard_normal(got.shape).astype(np.float32)
    backward = getattr(gates, f"{name}_backward")
    for x, exact in zip(backward(d, *narrow), backward(d, *single), strict=True):
        if exact is not None:
            assert x.dtype == half
            np.testing.assert_array_equal(x, exact.astype(half))


@with_rate
def test_parameters_are_taken_in_the_dtype_of_the_result(name, rng):
    x, A_log, dt = of_keys(rng)
    narrow = x.astype(BFLOAT16)
    got = getattr(gates, name)(narrow, A_log, dt)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(
        got, getattr(gates, name)(narrow, A_log.astype(np.float32), dt.astype(np.float32))
    )
    grads = getattr(gates, f"{name}_backward")(got, narrow, A_log, dt)
    assert [a.dtype for a in grads] == [BFLOAT16, np.float64, np.float64]
    assert getattr(gates, name)(x, A_log.astype(np.float16), dt).dtype == np.float64


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
@every
def test_half_tensors(name, half, rng):
    torch = imported("torch")
    made = [torch.from_numpy(a) for a in parameters(name, *of_keys(rng, np.float32))]
    narrow = [a.to(getattr(torch, half)).requires_grad_() for a in made]
    got = getattr(gates, name)(*narrow)
    assert got.dtype == torch.float32
    assert torch.equal(got, getattr(gates, name)(*(a.float() for a in narrow)))
    got.sum().backward()
    assert all(a.grad.dtype == a.dtype for a in narrow)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(getattr(gates, name)(*narrow), got)


def test_wrong_arguments(rng):
    x, A_log, dt = of_keys(rng)
    shapes = r"expected a shape that broadcasts to that of x, \(2, 5, 3, 4\) \(for a decay per key "
    shapes += r"A_log is \[HV,1\] and dt_bias \[HV,K\]\), got "
    number = r"lower_bound: expected a finite number < 0, got "
    for call, error, text in (
        (lambda: gates.rwkv7(0.5), TypeError, "x: expected an array, got float"),
        (lambda: gates.beta([0.5]), TypeError, "x: expected an array, got list"),
        (lambda: gates.beta(np.ones(3, int)), TypeError, "x: expected a floating dtype, got int64"),
        (
            lambda: gates.softplus(x, 1.0),
            TypeError,
            "A_log: expected an array, got float",
        ),
        (lambda: gates.softplus(x, A_log[:, 0]), ValueError, rf"A_log: {shapes}\(3,\)"),
        (lambda: gates.bounded(x, A_log, dt[:2]), ValueError, rf"dt_bias: {shapes}\(2, 4\)"),
        (
            lambda: gates.bounded(x[0, 0], A_log, x),
            ValueError,
            r"dt_bias: .* \(3, 4\) .*, got \(2, 5, 3, 4\)",
        ),
        (lambda: gates.bounded(x, A_log, lower_bound=0), ValueError, number + "0"),
        (lambda: gates.bounded(x, A_log, lower_bound=-np.inf), ValueError, number + "-inf"),
        (
            lambda: gates.bounded(x, A_log, lower_bound="a"),
            TypeError,
            "lower_bound: expected a number, got str",
        ),
        (
            lambda: gates.beta(x, 1),
            TypeError,
            "allow_neg_eigval: expected True or False, got int",
        ),
        (
            lambda: gates.softplus_backward(x[0], x, A_log),
            ValueError,
            r"dg: expected the shape of x, \(2, 5, 3, 4\), got \(5, 3, 4\)",
        ),
        (
            lambda: gates.beta_backward(x[0], x),
            ValueError,
            r"dbeta: expected the shape of x, .*",
        ),
    ):
        with pytest.raises(error, match=f"^{text}$"):
            call()


def test_arrays_of_two_libraries_are_refused(rng):
    torch = imported("torch")
    x, A_log, _ = of_keys(rng)
    with pytest.raises(TypeError, match=r"^A_log: expected an array of x's library, got ndarray$"):
        gates.softplus(torch.from_numpy(x), A_log)
    with pytest.raises(TypeError, match=r"^A_log: expected an array of x's library, got Tensor$"):
        gates.softplus(x, torch.from_numpy(A_log))
