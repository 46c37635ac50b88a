"""favor: an unbiased estimate of softmax's weights, its gradient, and what its docstring says."""

import copy
import math
import pickle
import re

import ml_dtypes
import numpy as np
import pytest
from support.device import imported

import linattn
from linattn import reference
from linattn.testing import assert_accurate

KERNELS = ("softmax", "relu")
kernels = pytest.mark.parametrize("kernel", KERNELS)
GIVEN = {
    "softmax": {},
    "independent": {"orthogonal": False},
    "relu": {"kernel": "relu"},
    "softmax, eps": {"eps": 0.5},
    "relu, eps": {"kernel": "relu", "eps": 0.5},
}
given = pytest.mark.parametrize("options", GIVEN.values(), ids=GIVEN)


def formula(x, W, kernel="softmax", eps=0.0, dtype=np.float64):
    """phi, one row at a time."""
    W, eps = W.astype(dtype), dtype(eps)
    m, K = W.shape
    rows = []
    for row in x.reshape(-1, K).astype(dtype):
        y = row * dtype(K**-0.25)
        u = np.maximum(W @ y, 0) if kernel == "relu" else np.exp(W @ y - (y @ y) / 2)
        rows.append((u + eps) / dtype(math.sqrt(m)))
    return np.array(rows, dtype).reshape(*x.shape[:-1], m)


def differences(function, x, direction, h=1e-6):
    return (function(x + h * direction) - function(x - h * direction)) / (2 * h)


# ---- W ----


def test_the_projection_comes_from_the_seed_alone():
    W = linattn.favor(3, dim=2, seed=7, orthogonal=False).projection
    want = [  # numpy.random.Philox(7): models keep a seed, not W
        [-1.4035643350339762, 0.8484195143593849],
        [1.3086802652913172, -1.2232638292156024],
        [0.22571301416332154, 0.0962038998303864],
    ]
    assert W.dtype == np.float64 and not W.flags.writeable
    np.testing.assert_array_equal(W, want)
    np.testing.assert_array_equal(W, linattn.favor(3, dim=2, seed=7, orthogonal=False).projection)


def test_rows_of_a_block_are_orthogonal_and_as_long_as_normal_ones():
    K = 8
    W = linattn.favor(500 * K + 3, dim=K).projection
    assert W.shape == (500 * K + 3, K)
    blocks = W[: 500 * K].reshape(500, K, K)
    products = blocks @ blocks.transpose(0, 2, 1)
    lengths = np.sqrt(np.diagonal(products, axis1=1, axis2=2))
    apart = products - lengths[..., None] ** 2 * np.eye(K)
    assert abs(apart).max() < 1e-13 * products.max()
    assert abs((lengths**2).mean() - K) < 5 * math.sqrt(2 * K / lengths.size)
    assert abs((lengths**2).var() / (2 * K) - 1) < 0.2  # chi-squared, not one length
    assert abs(W.mean(0)).max() < 5 / math.sqrt(len(W))  # no signs preferred
    assert abs(W[0] @ W[K]) > 1e-3  # rows of two blocks
    independent = linattn.favor(K, dim=K, orthogonal=False).projection
    assert abs(independent @ independent.T - np.diag((independent**2).sum(1))).max() > 1e-3


def test_redraw_changes_the_projection_alone():
    for options in GIVEN.values():
        phi = linattn.favor(20, dim=6, seed=3, **options)
        other = phi.redraw(4)
        assert abs(phi.projection - other.projection).max() > 0.1
        np.testing.assert_array_equal(
            other.projection, linattn.favor(20, dim=6, seed=4, **options).projection
        )
        assert repr(other) == repr(phi).replace("seed=3", "seed=4")
        assert repr(eval(repr(phi), {"favor": linattn.favor})) == repr(phi)
        x = np.ones((2, 6))
        np.testing.assert_array_equal(other.redraw(3).forward(x), phi.forward(x))


def test_a_map_is_copied_and_pickled():
    phi, x = linattn.favor(20, dim=6, seed=3, kernel="relu"), np.ones((2, 6))
    want = phi.forward(x)
    for other in (copy.deepcopy(phi), pickle.loads(pickle.dumps(phi))):
        assert repr(other) == repr(phi)
        np.testing.assert_array_equal(other.forward(x), want)
        np.testing.assert_array_equal(other.backward(x, want), phi.backward(x, want))


# ---- what it estimates ----


def arc_cosine(q, k):
    """The mean of max(w.q, 0) max(w.k, 0) over normal w: Cho and Saul, 2009, order 1."""
    lengths = np.linalg.norm(q, axis=-1)[:, None] * np.linalg.norm(k, axis=-1)
    angle = np.arccos(q @ k.T / lengths)
    return lengths / (2 * np.pi) * (np.sin(angle) + (np.pi - angle) * np.cos(angle))


@pytest.mark.parametrize("orthogonal", [True, False])
@kernels
def test_the_mean_over_w_is_the_kernel(kernel, orthogonal):
    """At full length the tails of the estimates are too heavy for a test of means."""
    K, n = 16, 300
    q, k = 0.4 * np.random.default_rng(0).standard_normal((2, 20, K))
    exact = np.exp(q @ k.T / K**0.5) if kernel == "softmax" else arc_cosine(q, k) / K**0.5
    found = []
    for seed in range(n):
        phi = linattn.favor(64, dim=K, seed=seed, kernel=kernel, orthogonal=orthogonal).forward
        found.append(phi(q) @ phi(k).T)
    errors = (np.mean(found, 0) - exact) / (np.std(found, 0) / n**0.5)
    assert abs(errors).max() < 4.5  # of 400 pairs
    assert 0.5 < abs(errors).mean() < 1.1  # 0.8 for a normal error


def test_orthogonal_rows_vary_less():
    K = 16
    q, k = 0.4 * np.random.default_rng(0).standard_normal((2, 20, K))
    variance = {}
    for orthogonal in (True, False):
        maps = [linattn.favor(64, dim=K, seed=n, orthogonal=orthogonal) for n in range(200)]
        variance[orthogonal] = np.var([m.forward(q) @ m.forward(k).T for m in maps], axis=0)
    assert np.median(variance[True] / variance[False]) < 0.9


def table_of_the_docstring():
    """{(unit norm?, K): errors for m = 16, 64, 256, 1024 and of the mean of the values}."""
    row = r"(normal|unit norm), K = (\d+) +([\d. ]+)\n"
    found = re.findall(row, linattn.favor.__doc__)
    return {(a == "unit norm", int(K)): [float(x) for x in n.split()] for a, K, n in found}


@pytest.mark.parametrize("K", [16, 64])
@pytest.mark.parametrize("unit", [False, True])
def test_how_close_to_softmax_it_is_as_the_docstring_says(unit, K):
    q, k, v = np.random.default_rng(1).standard_normal((3, 64, K))
    if unit:
        q, k = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, k))
    want = reference.softmax_attention(q, k, v)

    def off(o):
        return abs(o - want).mean()

    def estimate(m, seed):
        phi = linattn.favor(m, dim=K, seed=seed)
        return linattn.linear_attention(q, k, v, feature_map=phi, scale=1, eps=1e-30)[0]

    assert 0.25 < want.std() < 0.4
    said = table_of_the_docstring()[unit, K]
    found = [np.mean([off(estimate(m, n)) for n in range(20)]) for m in (16, 64, 256, 1024)]
    found.append(off(np.cumsum(v, 0) / np.arange(1, 65)[:, None]))
    np.testing.assert_allclose(found, said, rtol=0.2, atol=0.0006)
    assert (np.diff(found[:4]) < 0).all()


def test_the_eps_of_the_normaliser_replaces_denominators_of_long_queries():
    """As the docstring says, from about 5 K^(1/4) on."""
    K = 64
    q, k, v = np.random.default_rng(0).standard_normal((3, 40, K))
    unit = q / np.linalg.norm(q, axis=1, keepdims=True)
    phi = linattn.favor(256, dim=K)

    def moved(length):
        """By how much the default eps moves the outputs of queries so long."""
        both = [
            linattn.linear_attention(length * unit, k, v, feature_map=phi, **eps)[0]
            for eps in ({}, {"eps": 1e-30})
        ]
        return abs(both[0] - both[1]).max()

    assert moved(5 * K**0.25) == 0
    assert moved(9 * K**0.25) > 0.1


# ---- numbers, dtypes ----


@given
def test_features_are_the_formula(options):
    phi = linattn.favor(24, dim=6, seed=1, **options)
    x = np.random.default_rng(0).standard_normal((2, 3, 6))
    own = {name: value for name, value in options.items() if name != "orthogonal"}
    want = formula(x, phi.projection, **own, dtype=np.longdouble)
    naive = formula(x, phi.projection, **own)
    assert_accurate(phi.forward(x), want, naive, dtype=np.float64)
    assert_accurate(linattn.apply_feature_map(x, phi), want, naive, dtype=np.float64)
    narrow = x.astype(np.float32)
    got, want = phi.forward(narrow), formula(narrow, phi.projection, **own)
    assert got.dtype == np.float32
    naive = formula(narrow, phi.projection, **own, dtype=np.float32)
    assert_accurate(got, want, naive, dtype=np.float32)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@kernels
def test_half_numbers_are_computed_in_float32_and_rounded_once(kernel, dtype):
    phi = linattn.favor(24, dim=6, kernel=kernel)
    x, dy = np.random.default_rng(0).standard_normal((2, 2, 3, 24)).astype(dtype)
    x = x[..., :6]
    wide, d = x.astype(np.float32), dy.astype(np.float32)
    got, dx = phi.forward(x), phi.backward(x, dy)
    assert got.dtype == dx.dtype == dtype
    np.testing.assert_array_equal(got, phi.forward(wide).astype(dtype))
    np.testing.assert_array_equal(dx, phi.backward(wide, d).astype(dtype))


def test_the_range_is_that_of_the_dtype():
    """A key along a row of W, as long as that row, has the largest feature there is."""
    phi = linattn.favor(64, dim=64)
    w = phi.projection[0]
    longest = (w * 64**0.25)[None]
    assert 20 < np.log(phi.forward(longest).max()) < 45
    assert np.isfinite(phi.forward(longest.astype(np.float32))).all()
    assert np.isfinite(phi.forward(longest.astype(ml_dtypes.bfloat16)).astype(float)).all()
    assert np.isinf(phi.forward(longest.astype(np.float16))).any()
    beyond = linattn.favor(4, dim=512)
    longest = (beyond.projection[:1] * 512**0.25).astype(np.float32)
    assert np.isinf(beyond.forward(longest)).any()  # and no warning


# ---- gradients ----


@given
def test_the_gradient_is_that_of_differences(options):
    rng, phi = np.random.default_rng(0), linattn.favor(24, dim=6, seed=1, **options)
    x, way = rng.standard_normal((2, 4, 5, 6))
    dy = rng.standard_normal((4, 5, 24))
    want = differences(lambda x: (phi.forward(x) * dy).sum(), x, way)
    got = (phi.backward(x, dy) * way).sum()
    np.testing.assert_allclose(got, want, rtol=1e-7)


@kernels
@pytest.mark.parametrize("qk_l2norm", [False, True])
def test_gradients_through_linear_attention(kernel, qk_l2norm):
    rng, phi = np.random.default_rng(0), linattn.favor(24, dim=6, kernel=kernel)
    q, k, v, do = rng.standard_normal((4, 2, 19, 3, 6))
    options = {"feature_map": phi, "qk_l2norm": qk_l2norm, "eps": 1e-30}
    grads = linattn.linear_attention_backward(do, q, k, v, **options)
    for name, x in (("q", q), ("k", k), ("v", v)):
        way, arrays = rng.standard_normal(x.shape), {"q": q, "k": k, "v": v}

        def loss(x, name=name, arrays=arrays):
            o, _ = linattn.linear_attention(**arrays | {name: x}, **options)
            return (o * do).sum()

        got = (getattr(grads, f"d{name}") * way).sum()
        np.testing.assert_allclose(got, differences(loss, x, way), rtol=1e-6)


# ---- as a feature map ----


def test_on_from_a_state_and_token_by_token():
    """Nothing is taken over the sequence, so parts of it are the whole."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 20, 3, 8))
    options = {"feature_map": linattn.favor(40, dim=8)}
    o, (S, z) = linattn.linear_attention(q, k, v, **options, output_final_state=True)
    assert S.shape == (2, 3, 40, 8) and z.shape == (2, 3, 40)
    state = linattn.zeros_state(2, 3, 40, 8, normalized=True, dtype=np.float64)
    for t in range(20):
        last = linattn.linear_attention_step(q[:, t], k[:, t], v[:, t], state=state, **options)
        np.testing.assert_allclose(last, o[:, t], rtol=1e-10, atol=1e-12)
    for x, y in zip(state, (S, z), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)
    x = np.zeros((0, 3, 8))
    assert linattn.apply_feature_map(x, options["feature_map"]).shape == (0, 3, 40)


def test_another_library_than_numpy_and_pytorch():
    """Its own functions are called, on its own W: here a library that can do what is needed."""

    class Other:
        def __init__(self, x):
            self.x = x
            self.shape, self.dtype = x.shape, x.dtype

        def __array_namespace__(self):
            return Library

        def wrap(name):
            def method(self, *args):
                plain = [a.x if isinstance(a, Other) else a for a in args]
                return Other(getattr(self.x, name)(*plain))

            return method

        __mul__, __rmul__, __sub__ = wrap("__mul__"), wrap("__rmul__"), wrap("__sub__")
        __add__, __radd__, __matmul__ = wrap("__add__"), wrap("__radd__"), wrap("__matmul__")
        reshape, clip, astype = wrap("reshape"), wrap("clip"), wrap("astype")
        T = property(lambda self: Other(self.x.T))

        def sum(self, axis, keepdims):
            return Other(self.x.sum(axis, keepdims=keepdims))

    class Library:
        @staticmethod
        def exp(x):
            return Other(np.exp(x.x))

        @staticmethod
        def asarray(x, dtype):
            return Other(np.asarray(x, dtype))

    x = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    for kernel in KERNELS:
        phi = linattn.favor(20, dim=8, kernel=kernel)
        got = phi.forward(Other(x))
        assert isinstance(got, Other)
        np.testing.assert_array_equal(got.x, phi.forward(x))


# ---- PyTorch ----


def torch_and(kernel, **options):
    torch = imported("torch")
    phi = linattn.favor(24, dim=6, seed=1, kernel=kernel, **options)
    generator = torch.Generator().manual_seed(0)
    return torch, phi, torch.randn(2, 9, 3, 6, generator=generator, dtype=torch.float64)


@kernels
def test_tensors_have_numpys_features_and_gradients(kernel):
    torch, phi, x = torch_and(kernel, eps=0.1)
    x.requires_grad_()
    y = phi.forward(x)
    np.testing.assert_allclose(y.detach().numpy(), phi.forward(x.detach().numpy()), rtol=1e-13)
    dy = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape)
    (dx,) = torch.autograd.grad(y, x, dy)
    want = phi.backward(x.detach().numpy(), dy.numpy())
    np.testing.assert_allclose(dx.numpy(), want, rtol=1e-11, atol=1e-13)
    assert torch.autograd.gradcheck(phi.forward, x, fast_mode=True)
    own = phi.backward(x.detach(), dy)  # for tensors that are not recorded
    np.testing.assert_allclose(own.numpy(), want, rtol=1e-11, atol=1e-13)


@kernels
def test_tensors_through_linear_attention(kernel):
    torch, phi, x = torch_and(kernel)
    q, k, v = (a.detach().requires_grad_() for a in (x, x.flip(1), x.flip(0)))
    o, _ = linattn.linear_attention(q, k, v, feature_map=phi, eps=1e-30)
    do = torch.ones_like(o)
    found = torch.autograd.grad(o, (q, k, v), do)
    arrays = [a.detach().numpy() for a in (do, q, k, v)]
    want = linattn.linear_attention_backward(*arrays, feature_map=phi, eps=1e-30)
    for got, exact in zip(found, want[:3], strict=True):
        np.testing.assert_allclose(got.numpy(), exact, rtol=1e-10, atol=1e-12)


def test_half_tensors_and_autocast():
    torch, phi, x = torch_and("softmax")
    single = x.float()
    want = phi.forward(single)
    with torch.autocast("cpu", torch.bfloat16):  # which would round the exponent to 8 bits
        assert torch.equal(phi.forward(single), want)
    for dtype in (torch.float16, torch.bfloat16):
        half = x.to(dtype)
        got = phi.forward(half)
        assert got.dtype == dtype and torch.equal(got, phi.forward(half.float()).to(dtype))


def test_a_traced_call_and_one_in_inference_mode_leave_the_map_as_it_is():
    torch, phi, x = torch_and("softmax")

    def call(x):
        return linattn.linear_attention(x, x, x, feature_map=phi)[0]

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        phi.forward(x)
    x.requires_grad_()
    y = compiled(x)
    torch.testing.assert_close(y, call(x))
    (got,) = torch.autograd.grad(y.square().sum(), x)
    (want,) = torch.autograd.grad(call(x).square().sum(), x)
    torch.testing.assert_close(got, want)
    jac = torch.func.jacrev(lambda x: phi.forward(x).sum(-1))(x[0, 0].detach())
    assert jac.shape == (3, 3, 6)
    phi.forward(x).sum().backward()


def test_in_a_layer():
    imported("torch")
    from linattn import nn

    phi = linattn.favor(20, dim=4)
    layer = nn.LinearAttention(16, 8, 12, num_heads=2, feature_map=phi)
    assert [tuple(a.shape) for a in layer.zeros_state(3).memory] == [(3, 2, 20, 6), (3, 2, 20)]
    assert "feature_map=favor(20, dim=4, seed=0)" in repr(layer)
    assert copy.deepcopy(layer).feature_map.projection.shape == (20, 4)


# ---- errors ----


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_features": 0}, ValueError, "num_features: expected a size >= 1, got 0"),
        ({"num_features": 2.0}, TypeError, "num_features: expected an int, got float"),
        ({"dim": 0}, ValueError, "dim: expected a size >= 1, got 0"),
        ({"seed": -1}, ValueError, "seed: expected an int >= 0, got -1"),
        ({"seed": "a"}, TypeError, "seed: expected an int, got str"),
        ({"orthogonal": 1}, TypeError, "orthogonal: expected True or False, got int"),
        ({"kernel": "cos"}, ValueError, "kernel: expected one of 'softmax', 'relu', got 'cos'"),
        ({"eps": "a"}, TypeError, "eps: expected a number, got str"),
        ({"eps": -1}, ValueError, "eps: expected a finite number >= 0, got -1"),
        ({"eps": math.inf}, ValueError, "eps: expected a finite number >= 0, got inf"),
    ],
)
def test_wrong_arguments(options, error, text):
    with pytest.raises(error) as caught:
        linattn.favor(**{"num_features": 8, "dim": 4} | options)
    assert str(caught.value) == text


def test_a_map_of_another_dim_is_refused():
    x, phi = np.ones((1, 5, 2, 8)), linattn.favor(8, dim=4)
    text = r"^feature_map: expected q and k \[...,dim\] with favor's dim = 4, got \(1, 5, 2, 8\)$"
    for call in (
        lambda: linattn.linear_attention(x, x, x, feature_map=phi),
        lambda: linattn.linear_attention_backward(x, x, x, x, feature_map=phi),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(ValueError, match="got float"):
        phi.forward(1.0)
