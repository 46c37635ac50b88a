"""PyTorch: what DTensor has to know of our operators, so that tensors may lie in parts on a mesh.

A call goes part by part where rows or heads (of a scan or a convolution: channels) are apart:
neither mixes with another one. The gradient of what all parts share is a sum over them. Arrays that
lie otherwise are moved before the call, as DTensor does it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

__all__ = ["Letters", "know", "replicated"]

# The axes that parts may cut, beside rows, by the letters of the tables. The first of a pair is
# cut. The second is cut too, unless its size is 1.
_HEADS = ("h", "H")
_CHANNELS = ("D", "G")


class Letters(NamedTuple):
    """The axes of a call's arrays by their letters: None for what is no array, or absent."""

    inputs: Sequence[str | None]
    outputs: Sequence[str | None]
    is_sum: bool  # the outputs are gradients: sums over the parts of what these share
    rows: str  # the letters of rows and their states; none where sequences are packed


def _ways_apart(letters: Letters, sizes: Mapping[str, int], parts: int) -> Iterable[str]:
    if letters.rows:
        yield letters.rows
    for always, shared in (_HEADS, _CHANNELS):
        if sizes.get(always, 1) % parts:
            continue
        many = sizes.get(shared, 1)
        if many % parts == 0:
            yield always + shared
        elif many == 1:
            yield always


def _placed(letters: str | None, apart: str, otherwise: Any) -> Any:
    axes = [i for i, letter in enumerate(letters or "") if letter in apart]
    return Shard(axes[0]) if axes else otherwise


def _rules(letters: Letters, arguments: Sequence[Any]) -> list[tuple[list[Any], list[Any]]]:
    sizes: dict[str, int] = {}
    parts = 1
    for axes, x in zip(letters.inputs, arguments, strict=True):
        if axes is not None and x is not None:
            sizes.update(zip(axes, x.shape, strict=False))
            parts = x.mesh.size()
    rules = []
    for apart in ("", *_ways_apart(letters, sizes, parts)):
        inputs = [None if x is None else _placed(x, apart, Replicate()) for x in letters.inputs]
        shared = Partial() if letters.is_sum and apart else Replicate()
        outputs = [Replicate() if x is None else _placed(x, apart, shared) for x in letters.outputs]
        rules.append((outputs, inputs))
    return rules


def know(operator: Any, letters_of: Any) -> None:
    """Tell DTensor of an operator. letters_of: from a call's arguments to its Letters."""

    @register_sharding(operator)
    def rules(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        return _rules(letters_of(arguments), arguments)


def replicated(x: Tensor, like: Tensor) -> Tensor:
    """A tensor made from a number or an array that is no tensor, beside a DTensor: whole on all."""
    if isinstance(like, DTensor) and not isinstance(x, DTensor):
        mesh = like.device_mesh
        return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return x
