"""Calls of the rooms beside the table (csrc/room.h): their tables, and the way to the core.

A room's functions call :func:`forward`, :func:`step` and :func:`backward` with the arrays by the
labels of its table. PyTorch records and traces a forward call: _recorded_rooms.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from linattn import _linattn
from linattn.features import is_recorded, is_seen, is_tensor
from linattn.ops._core import WAYS, CoreCall, asks, other_ways

__all__ = ["ALONE", "ROOMS", "Line", "Room", "backward", "forward", "refuse_recorded", "step"]


class Line(NamedTuple):
    """An array of a room. An index has no gradient."""

    label: str
    letters: str
    passes: str
    role: str
    required: bool
    gradient: str | None
    forms: tuple[str, ...]


class Room(NamedTuple):
    """A room's table."""

    name: str
    left_out: dict[str, str]  # by the name of a form, the letters that its arrays leave out
    lines: tuple[Line, ...]
    options: tuple[tuple[str, str, bool], ...]  # label, passes, is it a word

    @property
    def entry(self) -> Callable[..., Any]:
        entry: Callable[..., Any] = getattr(_linattn, self.name)
        return entry

    def inputs(self, form: str) -> tuple[Line, ...]:
        """The arrays that a forward call takes, without an out."""
        return tuple(
            line
            for line in self.lines
            if form in line.forms and "F" in line.passes and line.role != "OUTPUT"
        )

    def gradients(self, form: str) -> tuple[str, ...]:
        """The labels of what a backward pass returns, in order."""
        return tuple(line.gradient for line in self.inputs(form) if line.gradient)

    def options_behind(self) -> tuple[tuple[str, bool], ...]:
        """Those that a backward pass has as the forward pass had them: label, is it a word."""
        return tuple((x, w) for x, passes, w in self.options if "B" in passes and x not in ALONE)


#: Options of calls for states alone, which nothing records (linattn/segments.py)
ALONE = ("states_only", "segment_map")

ROOMS = {
    name: Room(name, dict(forms), tuple(Line(*line) for line in lines), options)
    for name, forms, lines, options in _linattn.ROOMS
}


def forward(
    room: str, form: str, arrays: Mapping[str, Any], *, out: Any = None, **options: Any
) -> tuple[Any, Any]:
    """(y, final state). The first array says of which library they are."""
    first = next(iter(arrays.values()))
    if asks(first):
        raise CoreCall(ROOMS[room].entry, (form, "forward"), {**arrays, **options})
    if is_tensor(first):
        from linattn import _recorded_rooms

        return _recorded_rooms.forward(room, form, arrays, out, options)
    ways = other_ways(first)
    if ways is not None:
        return ways.room_forward(room, form, arrays, options)
    y, state = ROOMS[room].entry(form, "forward", **arrays, out=out, **options)
    return y, state


def step(
    room: str, form: str, arrays: Mapping[str, Any], *, out: Any = None, **options: Any
) -> Any:
    """One token, whose state is changed in place."""
    refuse_recorded(arrays, "a step")
    first = next(iter(arrays.values()))
    if is_tensor(first) and is_seen(first):
        from linattn import _traced_steps

        return _traced_steps.room_step(room, form, arrays, out, options)
    ways = None if type(first) is np.ndarray else WAYS.get()
    if ways is not None:
        return ways.room_step(room, form, arrays, options)
    return ROOMS[room].entry(form, "step", **arrays, out=out, **options)


def backward(room: str, form: str, arrays: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """The gradients by their labels."""
    refuse_recorded(arrays, "gradients")
    if asks(next(iter(arrays.values()))):
        raise CoreCall(ROOMS[room].entry, (form, "backward"), {**arrays, **options})
    found = ROOMS[room].entry(form, "backward", **arrays, **options)
    return dict(zip(ROOMS[room].gradients(form), found, strict=True))


def refuse_recorded(arrays: Mapping[str, Any], of: str) -> None:
    for name, x in arrays.items():
        if is_recorded(x):
            raise ValueError(
                f"{name}: requires gradients, which are not recorded of {of}; pass "
                f"{name}.detach(), or call it under torch.no_grad()"
            )
