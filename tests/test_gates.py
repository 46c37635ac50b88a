"""linattn.gates: the formulas where floats run out, gradients, dtypes, and what is refused.

`there` are the gates of NumPy's arrays, by way of the device's. `gates` are those of the arrays
that a test makes itself.
"""

import math

import ml_dtypes
import numpy as np
import pytest
from support import device
from support.compare import assert_same_bits
from support.device import gates as there
from support.device import imported

import linattn
from linattn import _linattn, gates
from linattn.testing import assert_accurate

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
    got = getattr(there, name)(*parameters(name, x, none, none))  # warnings are errors
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
    got = getattr(there, name)(*arrays)
    np.testing.assert_allclose(got, FORMULAS[name](*arrays).astype(float), rtol=1e-14)
    assert got.shape == arrays[0].shape


def test_options_and_defaults(rng):
    x, A_log, dt = of_keys(rng)
    for name in WITH_RATE:
        function = getattr(there, name)
        np.testing.assert_array_equal(function(x, A_log), function(x, A_log, 0 * dt))
    bound = there.bounded(x, A_log, dt)
    np.testing.assert_allclose(there.bounded(x, A_log, dt, lower_bound=-2.5), bound / 2, rtol=1e-15)
    np.testing.assert_array_equal(there.bounded(x, None, dt), there.bounded(x, 0 * A_log, dt))
    np.testing.assert_array_equal(there.beta(x, True), 2 * there.beta(x))
    per_head = there.softplus(x[..., 0], A_log[:, 0], dt[:, 0])
    np.testing.assert_array_equal(per_head, there.softplus(x, A_log, dt)[..., 0])


def test_a_large_rate_clears_the_state():
    with np.errstate(all="raise"):
        g = there.softplus(np.ones(2, np.float32), np.full(2, 100, np.float32))
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


# ---- one pass, against the formulas ----

DTYPES = [np.dtype(x) for x in (np.float64, np.float32, np.float16)] + [BFLOAT16]
FACTORS = {"softplus": -1.0, "bounded": -5.0, "rwkv7": -math.exp(-0.5), "beta": 1.0}
SLOPES_OF_SIGMOID = {"bounded": -5, "rwkv7": -np.exp(wide(-0.5)), "beta": 1}
# x, A_log, dt_bias: tokens shorter and longer than a lane, and than a piece of a row; no parameter,
# one alone, one number for all, and one along each axis
SHAPES = [
    ((2, 37, 3), (3,), (3,)),
    ((2, 9, 3, 20), (3, 1), (3, 20)),
    ((1, 20, 2, 1100), (2, 1), (1100,)),
    ((300, 1), (1,), None),
    ((5,), (5,), (1,)),
    ((1, 1, 32, 128), (32, 1), (32, 128)),
    ((4, 3, 8), (1, 8), (3, 1)),
    ((2, 2500, 5), None, (5,)),
    ((3, 40, 40), (40, 40), None),
]


def sum_to(d, like):
    """d, summed over the axes along which `like` was one number."""
    if like is None:
        return None
    new = d.ndim - like.ndim
    axes = tuple(i for i in range(d.ndim) if i < new or like.shape[i - new] != d.shape[i])
    return d.sum(axes).reshape(like.shape)


def long_gradients(name, d, x, A_log=None, dt_bias=None):
    """(dx, dA_log, ddt_bias) in long double."""
    rate = 1 if A_log is None else np.exp(wide(A_log))
    u = wide(x) + (0 if dt_bias is None else wide(dt_bias))
    if name == "softplus":
        du, along = -rate * d * long_sigmoid(u), -rate * d * long_softplus(u)
    else:
        dw = SLOPES_OF_SIGMOID[name] * d * long_sigmoid(rate * u) * long_sigmoid(-rate * u)
        du, along = rate * dw, dw * rate * u
    return du, sum_to(along, A_log), sum_to(du, dt_bias)


def drawn(rng, shapes, dtype, name):
    x, A_log, dt = shapes
    if name in WITH_RATE:
        A_log = (1,) if name == "softplus" and A_log is None else A_log
    else:
        A_log = dt = None
    arrays = [
        3 * rng.standard_normal(x),
        A_log and rng.uniform(-1, 1, A_log),
        dt and rng.standard_normal(dt),
    ]
    arrays = [a if a is None else a.astype(dtype) for a in arrays]
    return arrays if name in WITH_RATE else arrays[:1]


def single(dtype):
    """The dtype in which numbers of this one are computed."""
    return np.promote_types(dtype, np.float32) if dtype != BFLOAT16 else np.dtype(np.float32)


def by_formula(name, arrays, d=None):
    """What NumPy makes of the formula at the dtype of the result."""
    x, A_log, dt = (*arrays, None, None)[:3]
    given = (name, FACTORS[name], x, A_log, dt)
    return gates.by_formula(*given) if d is None else gates.gradients_by_formula(*given, d)


def exact_gate(name, x, A_log=None, dt_bias=None):
    u = wide(x) if dt_bias is None else wide(x) + wide(dt_bias)
    rate = 1 if A_log is None else np.exp(wide(A_log))
    if name == "softplus":
        return -rate * long_softplus(u)
    return SLOPES_OF_SIGMOID[name] * long_sigmoid(rate * u)


def judge(where, name, shapes, dtype, rng):
    """The gate and its gradients by the acceptance rule, of some draws together: a parameter may be
    one number, and the error of one number is a matter of luck."""
    real, draws = single(dtype), []
    for _ in range(8 if math.prod(shapes[0]) < 5000 else 3):
        arrays = drawn(rng, shapes, dtype, name)
        d = rng.standard_normal(arrays[0].shape).astype(real)
        got, grads = getattr(where, name)(*arrays), getattr(where, f"{name}_backward")(d, *arrays)
        assert got.dtype == real and got.flags.c_contiguous
        for dx, a in zip(grads, (*arrays, None, None), strict=False):
            assert dx is None if a is None else dx.dtype == a.dtype
        draws.append(
            (
                (got, *grads),
                (exact_gate(name, *arrays), *long_gradients(name, wide(d), *arrays)),
                (by_formula(name, arrays), *by_formula(name, arrays, d)),
            )
        )
    for i, label in enumerate(("", "dx", "dA_log", "ddt_bias")):
        out, ref, naive = ([draw[k][i] for draw in draws] for k in range(3))
        if out[0] is not None:
            assert_accurate(
                *map(np.stack, (out, ref, naive)),
                dtype=dtype if i else real,
                gradient=i > 0,
                name=f"{name} {label}",
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@every
def test_accuracy(name, shapes, dtype, rng):
    judge(there, name, shapes, dtype, rng)


def laid_out(x, kind):
    """x in another layout."""
    if kind == "gaps":
        wider = np.zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype)
        wider[..., 1:-2] = x
        return wider[..., 1:-2]
    if kind == "every second":
        wider = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        wider[..., ::2] = x
        return wider[..., ::2]
    if kind == "backwards":
        return np.ascontiguousarray(x[::-1])[::-1]
    order = {"heads first": (0, 2, 1, 3), "tokens first": (1, 0, 2, 3), "keys first": (3, 0, 1, 2)}
    axes = order[kind]
    return np.ascontiguousarray(x.transpose(axes)).transpose(np.argsort(axes))


LAYOUTS = ["gaps", "every second", "backwards", "heads first", "tokens first", "keys first"]


@pytest.mark.parametrize("kind", LAYOUTS)
@every
def test_layouts_change_no_bit(name, kind, rng):
    """The layout of x, of the gradient, and of both: rows may be one axis in x and two in d."""
    if kind == "backwards" and not device.negative_strides():
        return
    shapes = ((3, 5, 4, 24), (4, 1), (4, 24))
    x, *rest = drawn(rng, shapes, np.float32, name)
    d = rng.standard_normal(x.shape).astype(np.float32)
    backward = getattr(there, f"{name}_backward")
    plain, plain_grads = getattr(there, name)(x, *rest), backward(d, x, *rest)
    other, other_d = laid_out(x, kind), laid_out(d, kind)
    assert not other.flags.c_contiguous
    assert_same_bits(getattr(there, name)(other, *rest), plain)
    # sums are taken in another order where rows lie apart: as close as roundings of float64
    for given in ((d, other), (other_d, x), (other_d, other)):
        for got, want in zip(backward(*given, *rest), plain_grads, strict=True):
            if want is not None:
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    for got in (backward(d, other, *rest).dx, backward(other_d, x, *rest).dx):
        assert_same_bits(got, plain_grads.dx)


@with_rate
def test_parameters_of_any_layout(name, rng):
    x, A_log, dt = drawn(rng, ((2, 5, 4, 6), (4, 1), (4, 6)), np.float32, name)
    want = getattr(there, name)(x, A_log, dt)
    turned = np.ascontiguousarray(dt.T).T
    apart = np.repeat(A_log, 3, 0)[::3]
    assert_same_bits(getattr(there, name)(x, apart, turned), want)
    one = np.float32(rng.standard_normal())
    spread = np.broadcast_to(one, (4, 6))
    full = getattr(there, name)(x, A_log, np.full((4, 6), one))
    assert_same_bits(getattr(there, name)(x, A_log, spread), full)


def test_one_number_for_a_whole_x(rng):
    x = np.broadcast_to(np.float32(0.5), (3, 4, 5))
    np.testing.assert_array_equal(gates.beta(x), gates.beta(np.full(x.shape, 0.5, np.float32)))
    d = rng.standard_normal(x.shape).astype(np.float32)
    np.testing.assert_array_equal(gates.beta_backward(x, d).dx, gates.beta_backward(x + 0, d).dx)


@pytest.mark.parametrize("shape", [(0,), (2, 0, 3, 4), (2, 5, 0, 4), (2, 5, 3, 0), (0, 3)])
@every
def test_arrays_without_elements(name, shape, rng):
    """The gradients of parameters are sums of nothing."""
    per_key = len(shape) == 4
    A_log = np.ones((shape[-2], 1) if per_key else shape[-1:], np.float32)
    dt = np.ones(shape[-2:] if per_key else shape[-1:])
    x = np.ones(shape, BFLOAT16)
    arrays = parameters(name, x, A_log, dt)
    got = getattr(there, name)(*arrays)
    assert got.shape == shape and got.dtype == np.float32
    grads = getattr(there, f"{name}_backward")(got, *arrays)
    for dx, a in zip(grads, arrays, strict=False):
        assert dx.shape == a.shape and dx.dtype == a.dtype and not dx.any()


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), BFLOAT16], ids=str)
@every
def test_bits_are_the_same_twice_and_for_any_number_of_threads(name, dtype, rng):
    for shapes in (((1, 3000, 40), (40,), (40,)), ((1, 600, 4, 300), (4, 1), (4, 300))):
        arrays = drawn(rng, shapes, dtype, name)
        d = rng.standard_normal(arrays[0].shape).astype(np.float32)
        threads, found = linattn.get_num_threads(), []
        try:
            for n in (1, 1, 2, 3, 7):
                linattn.set_num_threads(n)
                made = getattr(there, name)(*arrays)
                found.append((made, *getattr(there, f"{name}_backward")(d, *arrays)))
        finally:
            linattn.set_num_threads(threads)
        for other in found[1:]:
            assert_same_bits(other, found[0], name)


@pytest.mark.parametrize("isa", [name for name, here in _linattn.isa()[1].items() if here])
@every
def test_every_instruction_set(name, isa, rng):
    device.needs_numpy("instruction sets are the host's")
    before = _linattn.isa()[0]
    try:
        _linattn.set_isa(isa)
        for dtype in (np.dtype(np.float64), np.dtype(np.float32)):
            judge(gates, name, SHAPES[1], dtype, rng)
    finally:
        _linattn.set_isa(before)


def test_what_one_pass_does_not_take_goes_by_the_formula(rng):
    """More axes, parameters with three of them, and numbers of no axis."""
    x = rng.standard_normal((2, 1, 3, 4, 5))
    A_log, dt = rng.standard_normal((4, 1)), rng.standard_normal((3, 4, 5))
    for arrays in ((x, A_log), (x, A_log, dt), (x[0], A_log, dt), (x[0], A_log[0, 0:1], dt[0])):
        got = gates.softplus(*arrays)
        np.testing.assert_allclose(
            got, FORMULAS["softplus"](*(*arrays, 0)[:3]).astype(float), 1e-14
        )
        d = rng.standard_normal(got.shape)
        found, exact = gates.softplus_backward(d, *arrays), long_gradients("softplus", d, *arrays)
        for a, want in zip(found, exact, strict=True):
            if want is not None:
                np.testing.assert_allclose(a, want.astype(float), rtol=1e-12, atol=1e-13)
    assert gates.beta(np.array(0.0)) == 0.5


# ---- gradients ----


@every
def test_gradients_are_those_of_differences(name, rng):
    arrays, h = parameters(name, *of_keys(rng)), 1e-6
    d = rng.standard_normal(arrays[0].shape)
    grads = getattr(there, f"{name}_backward")(d, *arrays)
    assert isinstance(grads, gates.GateGradients)
    for i, (got, x) in enumerate(zip(grads, arrays, strict=False)):
        assert got.shape == x.shape
        way = rng.standard_normal(x.shape)

        def loss(x, i=i):
            return (getattr(there, name)(*arrays[:i], x, *arrays[i + 1 :]) * d).sum()

        want = (loss(x + h * way) - loss(x - h * way)) / (2 * h)
        np.testing.assert_allclose((got * way).sum(), want, rtol=1e-7)
    assert all(x is None for x in grads[len(arrays) :])


def test_gradients_of_options(rng):
    x, A_log, dt = of_keys(rng)
    d = rng.standard_normal(x.shape)
    whole = there.bounded_backward(d, x, A_log, dt)
    half = there.bounded_backward(d, x, A_log, dt, lower_bound=-2.5)
    for a, b in zip(half, whole, strict=True):
        np.testing.assert_allclose(2 * a, b, rtol=1e-14)
    for name in WITH_RATE:
        backward = getattr(there, f"{name}_backward")
        without = backward(d, x, A_log)
        assert without.ddt_bias is None
        np.testing.assert_array_equal(without.dx, backward(d, x, A_log, 0 * dt).dx)
    none = there.bounded_backward(d, x, None, dt)
    assert none.dA_log is None
    np.testing.assert_array_equal(none.dx, there.bounded_backward(d, x, 0 * A_log, dt).dx)
    twice = there.beta_backward(d, x, True).dx
    np.testing.assert_array_equal(twice, 2 * there.beta_backward(d, x).dx)


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
    got = getattr(there, f"{name}_backward")(one, *parameters(name, x, none, none)).dx
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
    got, want = compiled(*tensors), function(*tensors)
    assert torch.equal(got, want)
    d = torch.from_numpy(rng.standard_normal(tuple(want.shape)))
    found = (torch.autograd.grad(result, tensors, d) for result in (got, want))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@every
def test_what_is_recorded_is_x_and_the_parameters(name, rng):
    torch = imported("torch")
    tensors = [torch.from_numpy(a).requires_grad_() for a in parameters(name, *of_keys(rng))]
    kept = []

    def keep(x):
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        getattr(gates, name)(*tensors)
    assert len(kept) == len(tensors)
    assert {x.data_ptr() for x in kept} == {x.data_ptr() for x in tensors}


@pytest.mark.filterwarnings("default::UserWarning")  # PyTorch's own, of gradients it looks at
@every
def test_opcheck(name, rng):
    torch = imported("torch")
    tensors = [torch.from_numpy(a).requires_grad_() for a in parameters(name, *of_keys(rng))]
    getattr(gates, name)(*tensors)  # the operators are defined with the first tensor
    missing = [None] * (3 - len(tensors))
    given = name, FACTORS[name], *tensors, *missing
    torch.library.opcheck(torch.ops.linattn.gate.default, given)
    given = name, FACTORS[name], *(x.detach() for x in tensors), *missing
    d = torch.from_numpy(rng.standard_normal(tuple(tensors[0].shape)))
    torch.library.opcheck(torch.ops.linattn.gate_backward.default, (*given, d))


# PyTorch's own, as it loads what jvp needs
@pytest.mark.filterwarnings("default::FutureWarning", "default:.*torch.jit:DeprecationWarning")
@every
def test_derivatives_of_other_kinds(name, rng):
    """A second derivative, transforms and forward-mode derivatives go by the formula."""
    torch = imported("torch")
    arrays = [a[:1, :2, :2] if a.ndim == 4 else a[:2] for a in of_keys(rng)]
    tensors = [torch.from_numpy(a.copy()).requires_grad_() for a in parameters(name, *arrays)]
    function = getattr(gates, name)
    assert torch.autograd.gradcheck(function, tensors)
    assert torch.autograd.gradgradcheck(function, tensors)
    given = tuple(x.detach() for x in tensors)
    want = function(*given)
    rows = torch.func.vmap(function, in_dims=(1, *[None] * (len(given) - 1)), out_dims=1)(*given)
    torch.testing.assert_close(rows, want)
    _, along = torch.func.jvp(lambda x: function(x, *given[1:]), given[:1], (want,))
    slopes = getattr(gates, f"{name}_backward")(want, *given).dx
    torch.testing.assert_close(along, slopes)


@every
def test_gradients_of_every_dtype_are_pytorchs(name, rng):
    """What the formula gives in PyTorch's own functions, whose rounding is another."""
    torch = imported("torch")
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        tensors = [torch.from_numpy(a).to(dtype) for a in parameters(name, *of_keys(rng))]
        own, theirs = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
        got = getattr(gates, name)(*own)
        want = by_formula(name, theirs)
        torch.testing.assert_close(got, want)
        d = torch.from_numpy(rng.standard_normal(tuple(want.shape))).to(want.dtype)
        found = torch.autograd.grad(got, own, d)
        for a, b in zip(found, torch.autograd.grad(want, theirs, d), strict=True):
            torch.testing.assert_close(a, b)


def test_tensors_of_odd_layouts_are_recorded(rng):
    """The gradient of a sum is one number for all, and x may be turned."""
    torch = imported("torch")
    x, A_log, dt = (torch.from_numpy(a).requires_grad_() for a in of_keys(rng))
    gates.softplus(x.transpose(0, 1), A_log, dt).sum().backward()
    want = gates.softplus_backward(np.ones(x.shape), *(a.detach().numpy() for a in (x, A_log, dt)))
    for a, exact in zip((x, A_log, dt), want, strict=True):
        np.testing.assert_allclose(a.grad.numpy(), exact, rtol=1e-12, atol=1e-13)


def test_sums_over_many_tokens():
    """A rate's gradient is a sum over all tokens: in float32 it would stop to grow."""
    T = 1 << 18
    x, A_log = np.zeros((T, 1), np.float32), np.zeros(1, np.float32)
    x[0], d = 20, np.full((T, 1), 1e-3, np.float32)
    grads = there.softplus_backward(d, x, A_log, A_log)
    exact = -np.float64(d[0, 0]) * (20 + (T - 1) * math.log(2))
    assert grads.dA_log.dtype == np.float32
    np.testing.assert_allclose(grads.dA_log, exact, rtol=3e-7)


# ---- dtypes, and what is refused ----


@pytest.mark.parametrize("half", [np.dtype(np.float16), BFLOAT16], ids=str)
@every
def test_results_of_half_numbers_are_float32(name, half, rng):
    narrow = parameters(name, *of_keys(rng, half))
    single = [a.astype(np.float32) for a in narrow]
    got, want = (getattr(there, name)(*arrays) for arrays in (narrow, single))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)
    d = rng.standard_normal(got.shape).astype(np.float32)
    backward = getattr(there, f"{name}_backward")
    for x, exact in zip(backward(d, *narrow), backward(d, *single), strict=True):
        if exact is not None:
            assert x.dtype == half
            np.testing.assert_array_equal(x, exact.astype(half))


@with_rate
def test_parameters_are_taken_in_the_dtype_of_the_result(name, rng):
    x, A_log, dt = of_keys(rng)
    narrow = x.astype(BFLOAT16)
    got = getattr(there, name)(narrow, A_log, dt)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(
        got, getattr(there, name)(narrow, A_log.astype(np.float32), dt.astype(np.float32))
    )
    grads = getattr(there, f"{name}_backward")(got, narrow, A_log, dt)
    assert [a.dtype for a in grads] == [BFLOAT16, np.float64, np.float64]
    assert getattr(there, name)(x, A_log.astype(np.float16), dt).dtype == np.float64


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
    floats = "expected float64, float32, float16 or bfloat16"
    for call, error, text in (
        (lambda: gates.rwkv7(0.5), TypeError, "x: expected an array, got float"),
        (lambda: gates.beta([0.5]), TypeError, "x: expected an array, got list"),
        (lambda: gates.beta(np.ones(3, int)), TypeError, f"x: {floats}, got int64"),
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


def test_the_core_says_what_is_wrong():
    """Its own checks, whatever Python has asked before: they come before anything is written."""
    x, A_log = np.ones((2, 5, 3)), np.ones(3)
    many = np.ones((1, 1, 1, 1, 1))
    for args, error, text in (
        (("softplus", -1.0, x), TypeError, "gate: expected 5 or 6 arguments, got 3"),
        (("swish", -1.0, x, None, None), ValueError, "gate: expected the name of a gate, got .*"),
        (("beta", "a", x, None, None), TypeError, "factor: expected a number, got .*"),
        (("beta", 1, None, None, None), TypeError, "x: expected an array, got None"),
        (("beta", 1, [0.5], None, None), TypeError, "x: expected an array, got .*"),
        (("beta", 1, x > 0, None, None), TypeError, "x: expected float64, .*, got bool"),
        (("beta", 1, many, None, None), ValueError, "x: expected up to 4 dimensions, got .*"),
        (("bounded", 1, x, A_log[:2], None), ValueError, r"A_log: expected a shape .*, got \(2,\)"),
        (
            ("bounded", 1, x, None, np.ones((2, 1, 3))),
            ValueError,
            r"dt_bias: expected numbers along the last two axes of x alone, \(2, 5, 3\), got .*",
        ),
        (
            ("bounded", 1, x, None, np.ones(3, int)),
            TypeError,
            "dt_bias: expected float64, .*, got int64",
        ),
        (("beta", 1, x, None, None, x[0]), ValueError, r"dbeta: expected the shape of x, .*"),
        (("rwkv7", 1, x, None, None, x[0]), ValueError, r"dg: expected the shape of x, .*"),
    ):
        with pytest.raises(error, match=f"^{text}$"):
            _linattn.gate(*args)


def test_no_memory_is_an_error():
    device.needs_numpy("scratch of the host")
    x, A_log = np.ones((2, 5, 3)), np.ones(3)
    for backward in (False, True):
        _linattn._fail_allocation(1)
        with pytest.raises(MemoryError, match=r"^not enough memory for the call's scratch$"):
            gates.softplus_backward(x, x, A_log) if backward else gates.softplus(x, A_log)
    assert gates.softplus(x, A_log).shape == x.shape


def test_arrays_of_two_libraries_are_refused(rng):
    torch = imported("torch")
    x, A_log, _ = of_keys(rng)
    with pytest.raises(TypeError, match=r"^A_log: expected an array of x's library, got ndarray$"):
        gates.softplus(torch.from_numpy(x), A_log)
    with pytest.raises(TypeError, match=r"^A_log: expected an array of x's library, got Tensor$"):
        gates.softplus(x, torch.from_numpy(A_log))
