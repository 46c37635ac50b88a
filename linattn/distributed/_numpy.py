"""NumPy's arrays on tokens that ranks share: as tensors over the same memory, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linattn.features import is_recorded

__all__ = ["by_tensors", "is_numpy"]


def is_numpy(first: Any, others: tuple[Any, ...]) -> bool:
    """Does a call get its tokens as an array of NumPy's, and no tensor that PyTorch records?"""
    return type(first) is np.ndarray and not any(map(is_recorded, others))


def by_tensors(
    call: Callable[..., Any], first: Any, args: tuple[Any, ...], given: Mapping[str, Any]
) -> Any:
    """The results of call(*args, **given) as arrays. Nothing is recorded. first: the tokens."""
    named = {name: _there(x) for name, x in given.items()}
    with torch.no_grad():
        found = call(*map(_there, args), **named)
    return _back(found, first.dtype)


def _there(x: Any) -> Any:
    """A tensor of an array of numbers. Edges stay as they are, and so do arrays that do not fit:
    the call refuses these on all ranks."""
    if isinstance(x, tuple):
        return tuple(map(_there, x))
    if type(x) is not np.ndarray:
        return x
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(_plain(x).view(np.int16)).view(torch.bfloat16)
    if x.dtype.kind == "b" or (
        x.dtype.kind in "fc" and x.dtype.itemsize <= 8 << (x.dtype.kind == "c")
    ):
        return torch.from_numpy(_plain(x))
    return x


def _plain(x: Any) -> Any:
    """x, or a copy of it if it has memory that no tensor has."""
    size = x.itemsize
    is_fit = x.flags.aligned and x.flags.writeable and x.dtype.isnative
    if is_fit and all(step >= 0 and step % size == 0 for step in x.strides):
        return x
    return x.astype(x.dtype.newbyteorder("="), order="C", copy=True)


def _back(found: Any, dtype: Any) -> Any:
    """dtype: that of the tokens, which says what bfloat16 is in NumPy."""
    if isinstance(found, tuple):
        made = getattr(found, "_make", tuple)
        return made(_back(x, dtype) for x in found)
    if not isinstance(found, Tensor):
        return found
    if found.dtype == torch.bfloat16:
        return found.contiguous().view(torch.int16).numpy().view(dtype)
    return found.numpy()
