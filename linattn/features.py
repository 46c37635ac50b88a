"""Feature maps phi: what replaces the softmax's exponential in linear attention.

Softmax attention weighs value j by exp(q_i . k_j); linear attention weighs it by
phi(q_i) . phi(k_j), so that the sum over j can be taken once (Katharopoulos et al., 2020).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["FEATURE_MAPS", "FeatureMap"]

# The core's numbers, in the order of la_map in csrc/linattn.h.
_CORE = {"identity": 0, "elu+1": 1, "relu+eps": 2, "relu2": 3, "exp": 4}


@dataclass(frozen=True)
class FeatureMap:
    """A feature map: one of the core's by name, or functions of your own.

    Parameters
    ----------
    name : str
        ``"identity"``, ``"elu+1"`` (x + 1 above zero, exp(x) below), ``"relu+eps"``
        (max(x, 0) + eps), ``"relu2"`` (max(x, 0)**2), ``"exp"``; these run inside the kernels.
        Any other name needs ``forward``.
    eps : float
        Of ``"relu+eps"``, 1e-3 by default.
    forward : callable, optional
        phi itself, from an array [..., K] to an array [..., K'] of the same dtype. It gets the
        caller's own arrays: NumPy's, PyTorch's, ...
    backward : callable, optional
        ``backward(x, dy)`` gives the gradient of x when dy is the gradient of phi(x). Only
        ``linear_attention_backward`` needs it: PyTorch records what ``forward`` does.
    """

    name: str
    eps: float = 1e-3
    forward: Callable[[Any], Any] | None = None
    backward: Callable[[Any, Any], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"feature_map: expected name to be a str, got {type(self.name)}")
        for what in ("forward", "backward"):
            function = getattr(self, what)
            if function is not None and not callable(function):
                raise TypeError(
                    f"feature_map: expected {what} to be callable, got {type(function)}"
                )
        if self.forward is None and self.backward is not None:
            raise ValueError("feature_map: expected forward beside backward, got backward alone")
        if self.forward is None and self.name not in _CORE:
            raise ValueError(
                f"feature_map: expected one of {', '.join(map(repr, _CORE))} or a callable, "
                f"got {self.name!r}"
            )
        if isinstance(self.eps, bool) or not isinstance(
            self.eps, int | float | np.floating | np.integer
        ):
            raise TypeError(f"feature_map: expected eps to be a number, got {type(self.eps)}")
        if not 0 <= self.eps < float("inf"):
            raise ValueError(f"feature_map: expected a finite eps >= 0, got {self.eps!r}")

    @property
    def core(self) -> int:
        """The core's number; 0 (identity) for a map that is applied before the core is called."""
        return _CORE[self.name] if self.forward is None else 0

    @property
    def may_be_negative(self) -> bool:
        """Is this map known to reach below zero, so that a denominator could too?"""
        return self.forward is None and self.name == "identity"


FEATURE_MAPS: tuple[str, ...] = tuple(_CORE)

FeatureMapLike = str | FeatureMap | Callable[[Any], Any]


def _one(given: object) -> FeatureMap:
    if isinstance(given, FeatureMap):
        return given
    if isinstance(given, str):
        return FeatureMap(given)
    if callable(given):
        return FeatureMap(getattr(given, "__name__", "callable"), forward=given)
    raise TypeError(
        "feature_map: expected a name, a FeatureMap, a callable or a pair of them, "
        f"got {type(given).__name__}"
    )


def feature_maps(given: object) -> tuple[FeatureMap, FeatureMap]:
    """The maps of q and of k: one for both, or a pair."""
    if isinstance(given, tuple | list):
        if len(given) != 2:
            raise ValueError(
                f"feature_map: expected one map or a pair (phi_q, phi_k), got {len(given)}"
            )
        return _one(given[0]), _one(given[1])
    return _one(given), _one(given)


# ---- arithmetic on the user's own arrays ----


_NUMPYS = (np.ndarray, np.generic)  # a tuple: torch.compile reads the line that asks


def is_array(x: object) -> bool:
    """Is this an array of some library's? What is in it, the core will say."""
    if isinstance(x, _NUMPYS):
        return isinstance(x, np.ndarray)
    return shape_of(x) is not None and hasattr(x, "dtype") and has_memory(x)


def has_memory(x: object) -> bool:
    """Does this show its memory in a way that the core knows?"""
    return hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")


def shape_of(x: object) -> tuple[Any, ...] | None:
    """x's shape; None if it has none."""
    try:
        shape = x.shape  # type: ignore[attr-defined]
    except Exception:  # what is no array may fail in any way, and so do PyTorch's nested tensors
        return None
    return shape if isinstance(shape, tuple) else None


def cast(x: Any, dtype: Any) -> Any:
    """x in this dtype; x itself if it has it."""
    if x.dtype == dtype:
        return x
    return x.astype(dtype) if hasattr(x, "astype") else x.to(dtype)


def _wide(x: Any) -> Any:
    """x in float32 or better."""
    if x.dtype.itemsize >= 4:
        return x
    return x.astype("float32") if hasattr(x, "astype") else x.float()


def l2norm(x: Any) -> Any:
    """x / sqrt(sum x^2 + 1e-6) along the last axis, in float32 or better."""
    y = _wide(x)
    return cast(y / ((y * y).sum(-1, keepdims=True) + 1e-6) ** 0.5, x.dtype)


def l2norm_backward(x: Any, dy: Any) -> Any:
    """The gradient of x when dy is that of l2norm(x): r (dy - y y'dy), r the factor."""
    x, dy = _wide(x), _wide(dy)
    r = 1 / ((x * x).sum(-1, keepdims=True) + 1e-6) ** 0.5
    y = x * r
    return r * (dy - y * (y * dy).sum(-1, keepdims=True))
