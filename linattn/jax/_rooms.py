"""The rooms beside the table (csrc/room.h) as functions that JAX differentiates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax

from linattn import _linattn
from linattn._rooms import ROOMS
from linattn.jax._calls import Call, Options, Row, called
from linattn.jax._gradients import cotangents, once

__all__ = ["forward", "step"]

Arrays = dict[str, Any]  # by their labels


def _run(pass_: str, room: str, form: str, arrays: Arrays, options: Options) -> dict[str, Any]:
    """What the pass makes, by its label."""
    rows = _linattn.outline_room(room, form, pass_, **arrays, **dict(options))
    given, made = ([Row(*row) for row in side] for side in rows)
    call = Call(
        f"linattn_room_{pass_}",
        (("room", room), ("form", form), *options),
        tuple((row.label, row.letters) for row in given),
        tuple((row.label, row.letters, row.dtype) for row in made),
        "BS",
        "DG",
    )
    found = called(call, [arrays[row.label] for row in given])
    return {row.label: x for row, x in zip(made, found, strict=True)}


@lru_cache(maxsize=256)
def _recorded(room: str, form: str, options: Options) -> Any:
    passes = {name: letters for name, letters, _ in ROOMS[room].options}
    behind = tuple((name, x) for name, x in options if "B" in passes[name])
    labels = {line.gradient: line.label for line in ROOMS[room].inputs(form) if line.gradient}

    def gradients(arrays: Arrays) -> Arrays:
        found = _run("backward", room, form, arrays, behind)
        return {labels[name]: x for name, x in found.items()}

    backward = once(f"{room}'s functions", gradients)

    @jax.custom_vjp
    def call(arrays: Arrays) -> tuple[Any, Any]:
        found = _run("forward", room, form, arrays, options)
        return found["out"], found.get("final_state")

    def differentiated(arrays: Arrays, d: tuple[Any, Any]) -> tuple[Arrays]:
        dy, d_final = d
        asked = {"dy": dy} | ({} if d_final is None else {"d_final_state": d_final})
        return (cotangents(arrays, backward(arrays | asked)),)

    call.defvjp(lambda arrays: (call(arrays), arrays), differentiated)
    return call


def _there(given: Mapping[str, Any]) -> Arrays:
    return {name: x for name, x in given.items() if x is not None}


def forward(
    room: str, form: str, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Any, Any]:
    call = _recorded(room, form, tuple(_there(options).items()))
    y, state = call(_there(arrays))
    return y, state


def step(
    room: str, form: str, arrays: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Any, Any]:
    found = _run("step", room, form, _there(arrays), tuple(_there(options).items()))
    return found["out"], found["state"]
