"""Calls that ranks share, of DTensors: tokens apart on a dimension of a mesh, heads on others.

v says how the arrays lie. Every other array has to lie in the same way where it has the axis, and
whole where it has none. Each rank calls with its parts, and o lies as v does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from linattn.autograd import number_letters
from linattn.distributed._context import Context, group_of
from linattn.variants import ARRAYS, GATES, VARIANTS

__all__ = ["are_there", "by_parts"]

_FAMILIES = {"B": "BN", "T": "TL", "h": "hH"}  # the axes that are cut where v's is


def are_there(arguments: Iterable[Any]) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return False
    return any(isinstance(x, module.DTensor) for y in arguments for x in _parts(y))


def _parts(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def _letters(op: str) -> dict[str, str]:
    """The letters of a forward pass's arrays, by their labels."""
    found = {line.label: line.letters for line in ARRAYS if "F" in line.passes}
    found |= number_letters(op, 4) | {"mask": "BT"}
    return found | dict.fromkeys(GATES, found["g"])


class _Layout:
    """How v lies: the letter of its axis that each dimension of the mesh cuts, or None."""

    def __init__(self, v: Any) -> None:
        from torch.distributed.tensor import Partial, Replicate, Shard

        self.Partial, self.Replicate, self.Shard = Partial, Replicate, Shard
        self.mesh, self.placements, self.shape = v.device_mesh, v.placements, tuple(v.shape)
        self.cut: list[str | None] = []
        for i, placement in enumerate(self.placements):
            letter = "BThV"[placement.dim] if placement.is_shard() else None
            if letter == "V" or placement.is_partial():
                raise ValueError(
                    f"v: expected rows, tokens or heads apart, or none, on dimension {i} of the "
                    f"mesh, got {placement}"
                )
            if letter in ("B", "h") and v.shape[placement.dim] % self.mesh.size(i):
                raise ValueError(
                    f"v: expected {self.mesh.size(i)} equal parts on dimension {i} of the mesh, "
                    f"got {v.shape[placement.dim]} {'rows' if letter == 'B' else 'heads'}"
                )
            self.cut.append(letter)

    def of(self, letters: str, shape: tuple[int, ...]) -> list[Any]:
        """The placements of an array of these letters."""
        placements = []
        for cut in self.cut:
            family = _FAMILIES[cut] if cut else ""
            axis = next((i for i, letter in enumerate(letters) if letter in family), None)
            is_shared = axis is None or (letters[axis] == "H" and shape[axis] == 1)
            placements.append(self.Replicate() if is_shared else self.Shard(axis))
        return placements

    def local(self, name: str, x: Any, letters: str) -> Tensor:
        """This rank's part. The gradient of an array that parts share is a sum over them."""
        if not hasattr(x, "placements"):
            got = type(x).__name__
            raise TypeError(f"{name}: expected a DTensor, as v is one, got {got}")
        wanted = self.of(letters, tuple(x.shape))
        if x.device_mesh != self.mesh or list(x.placements) != wanted:
            raise ValueError(
                f"{name}: expected placements {tuple(wanted)} on the mesh of v, got "
                f"{tuple(x.placements)} on {x.device_mesh}"
            )
        sums = [
            self.Partial() if cut and placement.is_replicate() else placement
            for cut, placement in zip(self.cut, wanted, strict=True)
        ]
        local: Tensor = x.to_local(grad_placements=sums)
        return local

    def whole(self, x: Tensor, letters: str, shape: tuple[int, ...]) -> Any:
        """The DTensor of which this rank has the part x."""
        from torch.distributed.tensor import DTensor

        strides = [1]
        for n in reversed(shape[1:]):
            strides.append(strides[-1] * max(n, 1))
        placements = self.of(letters, shape)
        return DTensor.from_local(
            x.contiguous(),
            self.mesh,
            placements,
            run_check=False,
            shape=shape,
            stride=tuple(reversed(strides)),
        )

    def is_first(self) -> bool:
        """Is it the first of the ranks that share tokens? All of them have the final states, and
        add their gradients, so the gradient of a whole one counts on one rank."""
        place = self.mesh.get_coordinate()
        return all(not place[i] for i, cut in enumerate(self.cut) if cut == "T")

    def check_group(self, group: Any) -> None:
        own = group.group if isinstance(group, Context) else group_of(group)
        ranks = dist.get_process_group_ranks(own)
        for i, cut in enumerate(self.cut):
            if cut == "T" and dist.get_process_group_ranks(self.mesh.get_group(i)) != ranks:
                raise ValueError(
                    f"group: expected that of dimension {i} of the mesh, on which v's tokens are "
                    f"apart, got ranks {ranks}"
                )


def by_parts(
    call: Callable[[dict[str, Any]], Any], op: str, group: Any, given: Mapping[str, Any]
) -> Any:
    """call(arguments), of this rank's parts of all arrays; o and states as DTensors."""
    if op not in VARIANTS:
        raise TypeError(f"{op}: expected tensors that are no DTensors: x.to_local() gives a part")
    if not hasattr(given["v"], "placements"):
        raise TypeError(f"v: expected a DTensor, as others are, got {type(given['v']).__name__}")
    layout, letters = _Layout(given["v"]), _letters(op)
    layout.check_group(group)
    wanted = given.get("output_final_state")
    if wanted and wanted != "all" and "T" in layout.cut:
        raise ValueError(
            f"output_final_state: expected False or 'all' where the tokens of DTensors are apart, "
            f"got {wanted!r}"
        )
    local = dict(given)
    for name, x in given.items():
        if not any(isinstance(y, Tensor) for y in _parts(x)) or name == "cu_seqlens":
            continue
        of = "NhKV" if name == "initial_state" else letters[name]
        parts = tuple(layout.local(name, y, of) for y in _parts(x))
        local[name] = parts if isinstance(x, tuple | list) else parts[0]
    o, state = call(local)
    whole = layout.whole(o, "BThV", layout.shape)
    if state is None:
        return whole, None
    for S in _parts(state):
        if S.requires_grad and not layout.is_first():
            S.register_hook(torch.zeros_like)
    found = tuple(layout.whole(S, "NhKV"[: S.dim()], _grown(S, layout)) for S in _parts(state))
    return whole, found if isinstance(state, tuple) else found[0]


def _grown(S: Tensor, layout: _Layout) -> tuple[int, ...]:
    """The shape of all parts of a state together."""
    shape = list(S.shape)
    for i, cut in enumerate(layout.cut):
        if cut in ("B", "h"):
            shape["Bh".index(cut)] *= layout.mesh.size(i)
    return tuple(shape)
