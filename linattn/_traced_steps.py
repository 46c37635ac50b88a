"""PyTorch: the steps of ops and rooms as operators of its own, which change their state in place.

A tracer (torch.compile, torch.export, make_fx) sees them. Every other step of tensors goes to the
core itself, which costs less. The signatures of the operators, ``linattn::<op>_step`` and
``linattn::<room>_<form>_step``, are read from the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from linattn import _flops, _linattn
from linattn._rooms import ROOMS, Line, Room, refuse_recorded
from linattn.autograd import FIT, declared, gate_of, is_number, number_letters, spread, tensor_of
from linattn.variants import ARRAYS, OPS

__all__ = ["room_step", "step"]

# ---- the ops of the table ----

_INPUTS = tuple(line for line in ARRAYS if "S" in line.passes and line.role == "INPUT")
_OPTIONS = (
    "str? gate, float? scale, bool predicts_before, bool x_is_factor, bool qk_l2norm, "
    "bool state_v_first, float[]? features"
)
_OPTION_NAMES = tuple(declared.split()[-1] for declared in _OPTIONS.split(","))


_ARRAYS = ", ".join(declared(line.label, line) for line in _INPUTS)
_STEP = f"({_ARRAYS}, Tensor(a!) state, Tensor(b!)? state_second, {_OPTIONS}) -> Tensor"


def _define(name: str, schema: str, run: Any, fake: Any) -> Any:
    mutated = ("state", "state_second") if "state_second" in schema else ("state",)
    op = torch.library.custom_op(f"linattn::{name}", run, mutates_args=mutated, schema=schema)
    op.register_fake(fake)
    return getattr(torch.ops.linattn, name).default


def _define_op(op: str) -> Any:
    n = len(_INPUTS)

    def run(*arguments: Any) -> Tensor:
        given = dict(zip((line.label for line in _INPUTS), arguments, strict=False))
        S, second, *options = arguments[n:]
        given |= zip(_OPTION_NAMES, options, strict=True)
        gate, decay = given.pop("gate"), given.pop("g")
        if gate is not None:
            given[gate] = decay
        o: Tensor = _linattn.step(op, state=S if second is None else (S, second), **given)
        return o

    def fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        return q.new_empty(v.shape)  # the core refuses a wrong shape later

    operator = _define(f"{op}_step", _STEP, run, fake)
    names = [line.label for line in _INPUTS]
    _flops.count(operator, op, [*names, "state", "state_second", *_OPTION_NAMES])
    return operator


def step(op: str, q: Tensor, k: Any, v: Any, *, state: Any, out: Any = None, **given: Any) -> Any:
    """``_linattn.step`` of tensors that a tracer looks at."""
    given |= {"q": q, "k": k, "v": v}
    given["gate"] = gate = gate_of(given)
    if gate is not None:
        given["g"] = given[gate]
    heads = slice(None) if q.dim() == 3 else slice(2, None)  # one head: neither B nor heads
    sizes = dict(zip("BHK"[heads], q.shape, strict=True)) | dict(
        zip("BhV"[heads], v.shape, strict=True)
    )
    letters = number_letters(op, q.dim())
    arrays = {}
    for line in _INPUTS:
        x = given.get(line.label)
        if is_number(x) and line.label in letters:
            x = spread(x, letters[line.label], sizes, q)
        arrays[line.label] = tensor_of(line.label, x)
    refuse_recorded(arrays, "a step")
    S, second = state if isinstance(state, tuple | list) else (state, None)
    options = [FIT[name][0](name, given.get(name, FIT[name][1])) for name in _OPTION_NAMES]
    o = _OPS[op](*arrays.values(), S, second, *options)
    return o if out is None else out.copy_(o)


_OPS = {op: _define_op(op) for op in OPS}

# ---- the rooms ----


class _Form:
    """One form of a room: its arrays and options in order, its operator."""

    def __init__(self, room: Room, form: str) -> None:
        self.room, self.form = room, form
        self.lines = [
            line
            for line in room.lines
            if form in line.forms and "S" in line.passes and line.role != "OUTPUT"
        ]
        self.options = {  # and their defaults
            name: None if word else False for name, passes, word in room.options if "S" in passes
        }
        words = {name for name, _, word in room.options if word}
        arrays = ", ".join(map(self.declared, self.lines))
        more = "".join(f", {'str?' if name in words else 'bool'} {name}" for name in self.options)
        name = f"{room.name}_{form}_step"
        self.operator = _define(name, f"({arrays}{more}) -> Tensor", self.run, self.fake)

    @staticmethod
    def label(line: Line) -> str:
        return "state" if line.role == "STATE" else line.label

    def declared(self, line: Line) -> str:
        if line.role == "STATE":
            return "Tensor(a!) state"
        return f"Tensor{'' if line.required else '?'} {line.label}"

    def run(self, *arguments: Any) -> Tensor:
        names = [*map(self.label, self.lines), *self.options]
        y: Tensor = self.room.entry(self.form, "step", **dict(zip(names, arguments, strict=True)))
        return y

    def fake(self, first: Tensor, *_: Any) -> Tensor:
        return first.new_empty(first.shape)

    def __call__(self, arrays: Mapping[str, Any], out: Any, options: Mapping[str, Any]) -> Any:
        given = [arrays.get(self.label(line)) for line in self.lines]
        more = [options.get(name, default) for name, default in self.options.items()]
        y = self.operator(*given, *more)
        return y if out is None else out.copy_(y)


_FORMS = {(room.name, form): _Form(room, form) for room in ROOMS.values() for form in room.left_out}


def room_step(
    room: str, form: str, arrays: Mapping[str, Any], out: Any, options: Mapping[str, Any]
) -> Any:
    """A room's step of tensors that a tracer looks at."""
    return _FORMS[room, form](arrays, out, options)
