"""PyTorch: the calls of rooms (_rooms.py) as operators of its own, recorded and traced.

_rooms.py imports it when the first tensor comes. Each form of a room is an operator, with another
one for its gradients: their signatures are read from the room's table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from linattn import autograd
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
        self.flags = [name for name in room.flags if "B" in room.flags[name]]
        arrays = ", ".join(map(_argument, self.lines))
        flags = "".join(f", bool {name}" for name in self.flags)
        forward = f"({arrays}{flags}, bool output_final_state) -> (Tensor, Tensor)"
        gradients = ", ".join(["Tensor"] * len(self.smooth))
        backward = f"(Tensor dy, Tensor? d_final_state, {arrays}{flags}) -> ({gradients})"
        name = f"{room.name}_{form}"

        def twice(ctx: Any, *_: Any) -> Any:
            raise NotImplementedError(
                f"the gradients of linattn's {name} are not differentiable themselves: there is no "
                "double backward"
            )

        operator = self.define(
            f"{name}_backward", backward, self.run_backward, self.fake_backward, twice, None
        )
        self.ways = autograd.Ways(
            self.recorded(autograd.function, name, self.run_forward, self.run_backward, twice),
            self.define(
                name,
                forward,
                self.run_forward,
                self.fake_forward,
                self.derivative(operator),
                self.set_up,
            ),
            None,
        )
        self.ways = self.ways._replace(
            transformed=self.recorded(
                autograd.transformable, name, self.ways.operator, operator, twice
            )
        )

    def define(
        self, name: str, schema: str, run: Any, fake: Any, derivative: Any, set_up: Any
    ) -> Any:
        op = torch.library.custom_op(f"linattn::{name}", run, mutates_args=(), schema=schema)
        op.register_fake(fake)
        op.register_autograd(derivative, setup_context=set_up)
        return getattr(torch.ops.linattn, name).default

    def recorded(self, kind: Any, name: str, run: Any, gradients: Any, twice: Any) -> Any:
        again = kind(f"{name}_backward", gradients, twice, autograd.no_context)
        return kind(name, run, self.derivative(again), self.set_up)

    # ---- what they run ----

    def named(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        names = [*(line.label for line in self.lines), *self.flags]
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

    def sizes(self, given: dict[str, Any]) -> dict[str, Any]:
        """What the letters of the table are in a call; a tracer may have symbols for them."""
        sizes: dict[str, Any] = {}
        for line in self.lines:
            x = given[line.label]
            if x is None or not line.gradient:
                continue
            letters = [c for c in line.letters if c not in self.room.left_out[self.form]]
            for letter, size in zip(letters, x.shape, strict=True):
                sizes.setdefault(letter, size)
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
        shape = [sizes[letter] for letter in line.letters if letter not in left_out]
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

    # ---- how they are recorded ----

    def set_up(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        n = len(self.lines)
        ctx.save_for_backward(*inputs[:n])
        ctx.options, ctx.final = inputs[n:-1], inputs[-1]

    def derivative(self, run: Any) -> Any:
        def backward(ctx: Any, dy: Tensor, d_state: Tensor) -> tuple[Any, ...]:
            arrays = ctx.saved_tensors
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


def forward(
    room: str, form: str, arrays: Mapping[str, Any], out: Any, flags: dict[str, bool]
) -> tuple[Any, Any]:
    """A forward pass of tensors: recorded where PyTorch records one of them."""
    made = _FORMS[room, form]
    given = [arrays.get(line.label) for line in made.lines]
    first: Tensor = given[0]
    way = (
        made.ways.operator
        if torch.compiler.is_compiling()
        else autograd.way_of(made.ways, first.device.type, tuple(given))
    )
    final = flags.get("output_final_state", False)
    if way is None:
        y, state = made.room.entry(form, "forward", **arrays, out=out, **flags)
        return y, state
    if out is not None:
        raise ValueError("out: expected None where PyTorch records or traces the call")
    y, state = way(*given, *(flags.get(name, False) for name in made.flags), final)
    return y, state if final else None
