"""PyTorch: the calls of rooms (_rooms.py) as operators of its own, recorded and traced.

_rooms.py imports it when the first tensor comes. Each form of a room is an operator, with another
one for its gradients: their signatures are read from the room's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linattn import _by_pytorch, _linattn, autograd
from linattn._rooms import ROOMS, Line, Room
from linattn.autograd import or_nothing

__all__ = ["forward"]


def _argument(line: Line) -> str:
    return f"Tensor{'' if line.required else '?'} {line.label}"


class _Form:
    """One form of a room: its arguments in order, its operators."""

    def __init__(self, room: Room, form: str) -> None:
        self.room, self.form = room, form
        self.lines = room.inputs(form)
        self.smooth = [line for line in self.lines if line.gradient]
        options = room.options_behind()
        self.options = {name: None if word else False for name, word in options}  # and defaults
        arrays = ", ".join(map(_argument, self.lines))
        more = "".join(f", {'str?' if word else 'bool'} {name}" for name, word in options)
        forward = f"({arrays}{more}, bool output_final_state) -> (Tensor, Tensor)"
        gradients = ", ".join(["Tensor"] * len(self.smooth))
        backward = f"(Tensor dy, Tensor? d_final_state, {arrays}{more}) -> ({gradients})"
        self.ways = autograd.register(
            f"{room.name}_{form}",
            autograd.Part(forward, self.run_forward, self.fake_forward, self.joins, self.letters),
            autograd.Part(
                backward,
                self.run_backward,
                self.fake_backward,
                self.joins_backward,
                self.letters_backward,
            ),
            self.derivative,
            self.set_up,
            autograd.Again(
                self.run_again,
                self.check,
                len(self.lines) + len(self.options),
                2,
                tuple(i for i, line in enumerate(self.lines) if line.gradient),
            ),
        )

    # ---- what they run ----

    def named(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        names = [*(line.label for line in self.lines), *self.options]
        return dict(zip(names, arguments, strict=True))

    def run_forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        *given, final = arguments
        y, state = self.room.entry(
            self.form, "forward", **self.named(tuple(given)), output_final_state=final
        )
        return y, or_nothing(state, y)

    def run_backward(self, dy: Tensor, d_state: Tensor | None, *arguments: Any) -> tuple[Any, ...]:
        found = self.room.entry(
            self.form, "backward", dy=dy, d_final_state=d_state, **self.named(arguments)
        )
        return tuple(or_nothing(x, dy) for x in found)

    def run_again(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        given = self.named(arguments)
        if self.room.name == "convolve":
            return _by_pytorch.convolution(given)
        return _by_pytorch.scan(self.form, given)

    def check(self, *arguments: Any) -> None:
        given = {name: _by_pytorch.outline(x) for name, x in self.named(arguments).items()}
        _linattn.outline_room(self.room.name, self.form, "forward", **given)

    def sizes(self, given: dict[str, Any]) -> dict[str, Any]:
        """The sizes of the letters of the table in a call; a tracer may have symbols for them."""
        sizes: dict[str, Any] = {}
        for line in self.lines:
            x = given[line.label]
            if x is None or not line.gradient:
                continue
            letters = [c for c in line.letters if c not in self.room.left_out[self.form]]
            for letter, size in zip(letters, x.shape, strict=True):
                sizes.setdefault(letter.upper(), size + int(letter.islower()))
        ends = given.get("cu_seqlens")
        sizes["S"] = sizes["B"] if ends is None else ends.shape[0] - 1
        return sizes

    def fake_forward(self, *arguments: Any) -> tuple[Tensor, Tensor]:
        *rest, final = arguments
        given = self.named(tuple(rest))
        first = rest[0]
        if not final:
            return first.new_empty(first.shape), first.new_empty(0)
        line = next(line for line in self.room.lines if line.label == "final_state")
        sizes, left_out = self.sizes(given), self.room.left_out[self.form]
        shape = [  # a small letter is one less than its capital
            sizes[letter.upper()] - int(letter.islower())
            for letter in line.letters
            if letter not in left_out
        ]
        return first.new_empty(first.shape), first.new_empty(shape, dtype=autograd.real(first))

    def fake_backward(self, dy: Tensor, d_state: Any, *arguments: Any) -> tuple[Tensor, ...]:
        given = self.named(arguments)
        fakes = []
        for line in self.smooth:
            x = given[line.label]
            if x is not None:
                dtype = autograd.real(dy) if line.role == "STATE" else x.dtype
                x = x.new_empty(x.shape, dtype=dtype)
            fakes.append(or_nothing(x, dy))
        return tuple(fakes)

    # ---- what vmap joins ----

    def joins(self, arguments: Sequence[Any]) -> list[bool] | None:
        """The arrays of a forward pass whose first axis is that of rows or of states."""
        n = len(self.lines)
        given = zip(self.lines, arguments, strict=False)
        if any(line.label == "cu_seqlens" and x is not None for line, x in given):
            return None
        rows = (line.letters[:1] in ("B", "S") for line in self.lines)
        return [*rows, *[False] * (len(arguments) - n)]

    def joins_backward(self, arguments: Sequence[Any]) -> list[bool] | None:
        """The gradient of what all rows share is a sum over them."""
        joined = self.joins(arguments[2:])
        given = zip(self.lines, arguments[2:], joined or (), strict=False)
        if joined is None or any(line.gradient and x is not None and not j for line, x, j in given):
            return None
        return [True, True, *joined]

    # ---- what DTensor keeps apart ----

    def letters_of(self, arguments: Sequence[Any]) -> tuple[list[str | None], str]:
        left_out = self.room.left_out[self.form]
        letters: list[str | None] = []
        rows = "BS"
        for line, x in zip(self.lines, arguments, strict=False):
            found = "".join(letter for letter in line.letters if letter not in left_out)
            letters.append(None if x is None else found)
            rows = "" if line.label == "cu_seqlens" and x is not None else rows
        return letters, rows

    def letters(self, arguments: Sequence[Any]) -> Any:
        from linattn._sharded import Letters

        inputs, rows = self.letters_of(arguments)
        rest = [None] * (len(arguments) - len(inputs))
        state = next(line.letters for line in self.lines if line.role == "STATE")
        outputs = ["BTD", state if arguments[-1] else None]
        return Letters([*inputs, *rest], outputs, False, rows)

    def letters_backward(self, arguments: Sequence[Any]) -> Any:
        from linattn._sharded import Letters

        inputs, rows = self.letters_of(arguments[2:])
        state = next(line.letters for line in self.lines if line.role == "STATE")
        of_outputs = ["BTD", None if arguments[1] is None else state]
        gradients = [x for x, line in zip(inputs, self.lines, strict=True) if line.gradient]
        rest = [None] * (len(arguments) - 2 - len(inputs))
        return Letters([*of_outputs, *inputs, *rest], gradients, True, rows)

    # ---- how they are recorded ----

    def set_up(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        n = len(self.lines)
        ctx.save_for_backward(*inputs[:n])
        ctx.options, ctx.final = inputs[n:-1], inputs[-1]
        ctx.set_materialize_grads(False)

    def derivative(self, run: Any) -> Any:
        def backward(ctx: Any, dy: Any, d_state: Any) -> tuple[Any, ...]:
            arrays = ctx.saved_tensors
            dy = torch.zeros_like(arrays[0]) if dy is None else dy
            end = d_state if ctx.final else None
            found = iter(run(dy, end, *arrays, *ctx.options))
            gradients: list[Any] = []
            for line, x in zip(self.lines, arrays, strict=True):
                dx = next(found) if line.gradient else None
                gradients.append(None if x is None or dx is None else dx.to(x.dtype))
            return (*gradients, *[None] * len(ctx.options), None)

        return backward


# A compiler that reads `forward` finds them made.
_FORMS = {(room.name, form): _Form(room, form) for room in ROOMS.values() for form in room.left_out}
autograd.tell_dtensor()


def _tensor(name: str, x: Any, first: Tensor) -> Tensor | None:
    """An array as an operator takes it. Starts of sequences may be NumPy's."""
    if x is None or isinstance(x, Tensor):
        return x
    if name == "cu_seqlens" and isinstance(x, np.ndarray) and x.dtype.kind == "i":
        return autograd.beside(torch.as_tensor(x, device=first.device), first)
    raise TypeError(f"{name}: expected a tensor where gradients are recorded, got {type(x)}")


def forward(
    room: str, form: str, arrays: Mapping[str, Any], out: Any, options: dict[str, Any]
) -> tuple[Any, Any]:
    """A forward pass of tensors: recorded where PyTorch records one of them."""
    made = _FORMS[room, form]
    given = [arrays.get(line.label) for line in made.lines]
    first: Tensor = given[0]
    if torch.compiler.is_compiling():
        way = made.ways.operator
    elif autograd.has_tangents(tuple(given)):
        way = made.ways.again
    else:
        way = autograd.way(made.ways, first.device.type, tuple(given))
    final = options.get("output_final_state", False)
    if way is None:
        y, state = made.room.entry(form, "forward", **arrays, out=out, **options)
        return y, state
    if out is not None:
        raise ValueError("out: expected None where PyTorch records or traces the call")
    fitted = [_tensor(line.label, x, first) for line, x in zip(made.lines, given, strict=True)]
    settled = {**made.options, **{k: x for k, x in options.items() if k in made.options}}
    y, state = way(*fitted, *settled.values(), final)
    return y, state if final else None
