"""PyTorch: vmap of an operator of ours. A mapped axis joins the axis of batches or sequences.

Where it cannot, the calls are made one after another, as PyTorch does it: of arrays without such an
axis (a decay per head, packed sequences, one head alone).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["rule"]


def _one_by_one(call: Any, n: int, dims: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    found = [
        call(*(x if d is None else x.select(d, i) for x, d in zip(arguments, dims, strict=True)))
        for i in range(n)
    ]
    if isinstance(found[0], Tensor):
        return [torch.stack(found)]
    return [torch.stack(parts) for parts in zip(*found, strict=True)]


def _joined(x: Any, dim: int | None, n: int) -> Any:
    """The mapped axis in front of the first one, with which it becomes one."""
    if not isinstance(x, Tensor):
        return x
    mapped = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
    return mapped.flatten(0, 1)


def _parted(y: Tensor, n: int) -> Tensor:
    nothing = y.dim() == 1 and not y.numel()  # an array that the call does not have
    return y.expand(n, 0) if nothing else y.unflatten(0, (n, y.shape[0] // n))


def rule(call: Any, joins: Callable[[Sequence[Any]], Sequence[bool] | None]) -> Any:
    """A rule for torch.library. joins: of each argument, does a mapped axis join its first one?
    None if the call has no such axis, or sums over it."""

    def mapped(info: Any, dims: Sequence[Any], *arguments: Any) -> Any:
        n = info.batch_size
        dims = [d if isinstance(d, int) else None for d in dims]
        # a call's arguments have no mapped axis; of what is mapped, one is taken for the question
        one = [x if d is None else x.select(d, 0) for x, d in zip(arguments, dims, strict=True)]
        joined = joins(one) if n else None
        alone = [d is not None for d in dims]
        if joined is None or any(a and not j for a, j in zip(alone, joined, strict=True)):
            found = _one_by_one(call, n, dims, arguments)
        else:
            given = [
                _joined(x, d, n) if j else x
                for x, d, j in zip(arguments, dims, joined, strict=True)
            ]
            made = call(*given)
            made = (made,) if isinstance(made, Tensor) else made
            found = [_parted(y, n) for y in made]
        return (found[0], 0) if len(found) == 1 else (tuple(found), (0,) * len(found))

    return mapped
