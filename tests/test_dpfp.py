"""dpfp: the formula of its paper, its gradient, and what its docstring says."""

import pickle

import ml_dtypes
import numpy as np
import pytest
from support.device import imported

import linattn

nus = pytest.mark.parametrize("nu", [1, 2, 5, 9])  # of K = 5: 2 K - 1 = 9


def formula(x, nu):
    """The products, one at a time."""
    K = x.shape[-1]
    phi = np.zeros((*x.shape[:-1], 2 * K * nu), x.dtype)
    for at in np.ndindex(x.shape[:-1]):
        r = [max(a, 0) for a in x[at]] + [max(-a, 0) for a in x[at]]
        for j in range(1, nu + 1):
            for i in range(2 * K):
                phi[(*at, (j - 1) * 2 * K + i)] = r[i] * r[(i - j) % (2 * K)]
    return phi


@nus
def test_features_are_the_formula(nu):
    x = np.random.default_rng(0).standard_normal((2, 3, 5))
    phi = linattn.dpfp(nu)
    np.testing.assert_array_equal(phi.forward(x), formula(x, nu))
    again = pickle.loads(pickle.dumps(phi))
    np.testing.assert_array_equal(again.forward(x), formula(x, nu))
    assert f"dpfp(nu={nu})" in repr(phi)


def test_an_entry_times_itself_is_no_feature():
    """So nu ends at 2 K - 1, and all products of two entries are there."""
    x = np.abs(np.random.default_rng(0).standard_normal(5)) + 1
    features = linattn.dpfp(9).forward(x)
    assert np.count_nonzero(features) == 5 * 4
    pairs = sorted(a * b for i, a in enumerate(x) for j, b in enumerate(x) if i != j)
    np.testing.assert_allclose(np.sort(features[features > 0]), pairs, rtol=1e-15)
    wrong = r"^feature_map: expected q and k \[...,K\] with 2 K > nu = 10 for dpfp, got \(5,\)$"
    with pytest.raises(ValueError, match=wrong):
        linattn.dpfp(10).forward(x)
    for nu, error, text in (
        (0, ValueError, "nu: expected a size >= 1, got 0"),
        (1.5, TypeError, "nu: expected an int, got float"),
    ):
        with pytest.raises(error, match=f"^{text}$"):
            linattn.dpfp(nu)


@nus
def test_the_gradient_is_that_of_differences(nu):
    rng, phi, h = np.random.default_rng(0), linattn.dpfp(nu), 1e-6
    x, way = rng.standard_normal((2, 4, 3, 5))
    dy = rng.standard_normal((4, 3, 10 * nu))
    up, down = ((phi.forward(x + s * h * way) * dy).sum() for s in (1, -1))
    np.testing.assert_allclose((phi.backward(x, dy) * way).sum(), (up - down) / (2 * h), rtol=1e-7)


@nus
def test_through_linear_attention_and_on_from_a_state(nu):
    q, k, v, do = np.random.default_rng(0).standard_normal((4, 2, 20, 3, 5))
    options = {"feature_map": linattn.dpfp(nu), "normalize": "add", "eps": 1.0}
    o, (S, _) = linattn.linear_attention(q, k, v, **options, output_final_state=True)
    same, _ = linattn.linear_attention(
        formula(q, nu), formula(k, nu), v, **options | {"feature_map": "identity"}
    )
    np.testing.assert_array_equal(o, same)
    assert S.shape == (2, 3, 10 * nu, 5)
    grads = linattn.linear_attention_backward(do, q, k, v, **options)
    way, h = np.random.default_rng(1).standard_normal(k.shape), 1e-6
    up, down = (
        (linattn.linear_attention(q, k + s * h * way, v, **options)[0] * do).sum() for s in (1, -1)
    )
    np.testing.assert_allclose((grads.dk * way).sum(), (up - down) / (2 * h), rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_dtypes_are_kept_and_half_numbers_rounded_once(dtype):
    phi, rng = linattn.dpfp(2), np.random.default_rng(0)
    x, dy = rng.standard_normal((3, 5)).astype(dtype), rng.standard_normal((3, 20)).astype(dtype)
    wide, d = x.astype(np.float32), dy.astype(np.float32)
    for got, want in (
        (phi.forward(x), phi.forward(wide)),
        (phi.backward(x, dy), phi.backward(wide, d)),
    ):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, want.astype(dtype))
    long = np.full(5, 300, np.float16)
    assert np.isinf(phi.forward(long)).any() and np.isfinite(phi.forward(long // 2)).all()


@nus
def test_tensors_have_numpys_features_and_gradients(nu):
    torch = imported("torch")
    phi, rng = linattn.dpfp(nu), np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((2, 3, 5))).requires_grad_()
    y = phi.forward(x)
    np.testing.assert_array_equal(y.detach().numpy(), formula(x.detach().numpy(), nu))
    dy = torch.from_numpy(rng.standard_normal(y.shape))
    (dx,) = torch.autograd.grad(y, x, dy)
    want = phi.backward(x.detach().numpy(), dy.numpy())
    np.testing.assert_allclose(dx.numpy(), want, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(phi.backward(x.detach(), dy).numpy(), want, rtol=1e-13, atol=1e-14)
    compiled = torch.compile(phi.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), y)
