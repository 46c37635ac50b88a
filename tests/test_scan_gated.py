"""Gated scans whose kernels scale what is written: hgrn and rg_lru near a decay of 1, and at 0."""

import numpy as np
import pytest
from support.composed import assert_near
from support.device import ops as linattn
from support.scans import HGRN, RGLRU, gradients

import linattn as here
from linattn import _linattn, reference


def slow(rng, D=64):
    """Log decays from -1e-9 to -1, and two of 0 and of -inf."""
    g = np.tile(-np.logspace(-9, 0, D), (1, 20, 1))
    g[:, 3], g[:, 9] = 0, -np.inf
    return rng.standard_normal((1, 20, D)), g


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hgrn_keeps_the_digits_of_what_is_written(dtype, rng):
    """1 - exp(g) is 1e-9 where exp(g) is 1 in float32."""
    x, g = (a.astype(dtype) for a in slow(rng))
    y, _ = linattn.hgrn(x, g)
    want, _ = reference.hgrn(x, g, dtype=np.longdouble)
    assert_near(y / abs(want).max((0, 1)), want / abs(want).max((0, 1)), 20 * np.finfo(dtype).eps)


@pytest.mark.parametrize("limit", [5.0, 1000.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_derivative_of_the_root_is_held(limit, dtype, rng):
    """At 1000 by the kernel, and elsewhere around it. r = 0 is a decay of 1."""
    scan = RGLRU("rg_lru", resets=True)
    arrays = scan.draw(rng, dtype, T=40)
    arrays["r"] = np.where(rng.random(arrays["r"].shape) < 0.3, 1e-9, arrays["r"]).astype(dtype)
    arrays["r"][:, 5] = 0
    dy = rng.standard_normal((2, 40, 6)).astype(dtype)
    d_state = scan.draw_state(rng, arrays, 2)
    found = gradients(scan, dy, d_state, arrays, gradient_limit=limit)
    options = {"gradient_limit": limit, "d_final_state": d_state}
    want = reference.rg_lru_backward(dy, **arrays, **options, dtype=np.longdouble)
    for name, x in found.items():
        assert_near(x, want[name], 1e-12 if dtype == np.float64 else 3e-6, name)


def test_a_held_derivative_is_recorded(rng):
    torch = pytest.importorskip("torch")
    scan = RGLRU("rg_lru")
    arrays = scan.draw(rng, T=12)
    arrays["r"][:, 5] = 0
    dy = rng.standard_normal((2, 12, 6))
    for limit in (5.0, 1000.0):
        leaves = {n: torch.from_numpy(a.copy()).requires_grad_() for n, a in arrays.items()}
        y, _ = here.rg_lru(**leaves, gradient_limit=limit)
        y.backward(torch.from_numpy(dy))
        want = reference.rg_lru_backward(dy, **arrays, gradient_limit=limit, dtype=np.longdouble)
        for name, x in leaves.items():
            assert_near(x.grad.numpy(), want[name], 1e-12, name)


def test_a_write_is_that_of_a_gated_scan():
    x = np.zeros
    arrays = {"u": x((1, 3, 2)), "delta": x((1, 3, 2)), "A": x((2, 1))}
    arrays |= {"B": x((1, 3, 1, 1)), "C": x((1, 3, 1, 1))}
    with pytest.raises(ValueError, match="write: expected None, for the scan is not gated"):
        _linattn.scan("selective", "forward", **arrays, write="root")
    with pytest.raises(ValueError, match="write: expected None, 'share' or 'root', got 'all'"):
        _linattn.scan("gated", "forward", u=x((1, 3, 2)), g=x((1, 3, 2)), write="all")


@pytest.mark.parametrize("scan", [HGRN("hgrn"), RGLRU("rg_lru")], ids=repr)
def test_gates_may_be_wider_than_tokens(scan, rng):
    """y has the dtype of x, and the gradient of a gate the gate's."""
    arrays = scan.draw(rng, np.float16, T=30, state=False)
    want, _ = scan.reference(**arrays, dtype=np.float64)
    gate = "g" if "g" in arrays else "r"
    for short, wide in (
        (np.float16, np.float32),
        (np.float16, np.float64),
        (np.float32, np.float64),
    ):
        x = arrays | {"x": arrays["x"].astype(short), gate: arrays[gate].astype(wide)}
        y, _ = scan.forward(**x)
        grads = scan.backward(np.ones_like(x["x"]), **x)
        assert y.dtype == grads.dx.dtype == short
        assert getattr(grads, f"d{gate}").dtype == wide
        assert_near(y, want, 2e-3)


@pytest.mark.parametrize("limit", [5.0, 1000.0])
def test_jax_holds_the_derivative_too(limit, rng):
    jax = pytest.importorskip("jax")
    import linattn.jax

    arrays = RGLRU("rg_lru").draw(rng, np.float32, B=1, T=12, state=False)
    arrays["r"][:, 5] = 0
    dy = rng.standard_normal((1, 12, 6)).astype(np.float32)

    def loss(arrays):
        y, _ = linattn.jax.rg_lru(**arrays, gradient_limit=limit)
        return (y * dy).sum()

    want = reference.rg_lru_backward(dy, **arrays, gradient_limit=limit, dtype=np.float64)
    for name, x in jax.grad(loss)({n: jax.numpy.asarray(a) for n, a in arrays.items()}).items():
        assert_near(x, want[name], 1e-5, name)
