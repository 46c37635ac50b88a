"""Elementwise functions for gates and systems: one spelling for every library of arrays.

PyTorch's own are right at 0, where the derivative of a spelling with abs would not be.
"""

from __future__ import annotations

import sys
from typing import Any

from linattn.features import is_tensor, library_of

__all__ = [
    "held_root",
    "logsigmoid",
    "sigmoid",
    "sigmoid_slope",
    "silu",
    "silu_slope",
    "softplus",
    "softplus_slope",
]


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)); the exponential is never above 1."""
    if is_tensor(x):
        return x.sigmoid()
    xp = library_of(x)
    small = xp.exp(-abs(x))  # no digit is lost for x far below 0
    return xp.where(x < 0, small, 1) / (1 + small)


def sigmoid_slope(x: Any) -> Any:
    """sigmoid(x) sigmoid(-x). 1 - sigmoid(x) would have no digits for x above 17 in float32."""
    small = library_of(x).exp(-abs(x))
    return small / ((1 + small) * (1 + small))


def silu(x: Any) -> Any:
    return x * sigmoid(x)


def silu_slope(x: Any) -> Any:
    """The derivative of x sigmoid(x)."""
    s = sigmoid(x)
    return s * (1 + x * (1 - s))


def softplus(x: Any, above: float = 40) -> Any:
    """log(1 + exp(x)), and x itself above a number; above 40 that is the same in float64 too."""
    xp = library_of(x)
    if is_tensor(x):
        return xp.nn.functional.softplus(x, 1, above)
    return xp.where(x > above, x, xp.clip(x, 0, None) + xp.log1p(xp.exp(-abs(x))))


def softplus_slope(x: Any, above: float = 40) -> Any:
    return library_of(x).where(x > above, 1, sigmoid(x))


def logsigmoid(x: Any) -> Any:
    """log(sigmoid(x)), with all digits for large x."""
    if is_tensor(x) and not hasattr(x, "device_mesh"):  # a DTensor has no gradient of it
        return library_of(x).nn.functional.logsigmoid(x)
    return -softplus(-x)


def held_root(square: Any, limit: float) -> Any:
    """sqrt. Recorded, its derivative is at most `limit`: that of sqrt above (0.5 / limit)^2, and
    below that of the tangent there."""
    xp = library_of(square)
    root = xp.sqrt(square)
    by_jax = xp.__name__.startswith("jax")
    if not is_tensor(square) and not by_jax:
        return root  # nothing is recorded
    least = (0.5 / limit) ** 2
    above, below = xp.clip(square, least, None), xp.clip(square, None, least)
    held = xp.sqrt(above) + limit * (below - least)
    if by_jax:
        return held + sys.modules["jax"].lax.stop_gradient(root - held)
    return held + (root - held).detach()
