"""Complex arrays as the core takes them: pairs of reals, neighbours along the last axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from linattn._linattn import shares_memory
from linattn.features import is_tensor, is_traced, library_of
from linattn.ops._core import other_ways

__all__ = ["as_complex", "as_pairs", "dtype_name", "is_complex", "with_state"]


def is_complex(x: Any) -> bool:
    return "complex" in str(getattr(x, "dtype", ""))


def as_pairs(name: str, x: Any, *, in_place: bool = False) -> Any:
    """[...,N] complex as [...,2N] real. None stays None.

    In place: in the memory of x. Where PyTorch traces they are not: it does not trace writes to
    complex memory that is seen as real. Nor are they in linattn.jax, which changes no array.
    """
    pairs = _pairs_of(name, x)
    if in_place and other_ways(x) is not None:
        return pairs
    if in_place and is_traced(x):
        return pairs.clone()
    if in_place and x is not None and not shares_memory(x.real, pairs):
        raise ValueError(
            f"{name}: expected an array whose innermost axis is contiguous (it is written in place)"
        )
    return pairs


def _pairs_of(name: str, x: Any) -> Any:
    if x is None:
        return None
    if not is_complex(x):
        raise TypeError(f"{name}: expected complex numbers, as A has them, got {dtype_name(x)}")
    if x.ndim == 0:
        raise ValueError(f"{name}: expected an axis of numbers, got a scalar")
    if is_tensor(x):
        return library_of(x).view_as_real(x.resolve_conj()).flatten(-2)
    xp = library_of(x)
    if _has_views(x):
        return xp.ascontiguousarray(x).view(x.real.dtype)
    return xp.stack([x.real, x.imag], -1).reshape(*x.shape[:-1], -1)


def as_complex(x: Any) -> Any:
    """The way back."""
    if x is None:
        return None
    if is_tensor(x):
        return library_of(x).view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    if _has_views(x):
        return library_of(x).ascontiguousarray(x).view(np.result_type(x.dtype, np.complex64))
    return x[..., ::2] + 1j * x[..., 1::2]


def with_state(found: Any, x: Any, pairs: Any) -> Any:
    """What a step has found: y. Its state, the pairs of x, goes to x unless they lie there.

    linattn.jax finds y and a new state, which becomes complex.
    """
    if isinstance(found, tuple):
        y, state = found
        return y, as_complex(state)
    if is_traced(x):
        x.copy_(as_complex(pairs))
    return found


def _has_views(x: Any) -> bool:
    """Can the same memory be seen in another dtype, as NumPy and CuPy do it?"""
    return isinstance(x, np.ndarray) or type(x).__module__.partition(".")[0] == "cupy"


def dtype_name(x: Any) -> str:
    return str(getattr(x, "dtype", type(x))).removeprefix("torch.")
