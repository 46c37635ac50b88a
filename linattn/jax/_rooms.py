"""The rooms beside the table (csrc/room.h) as functions that JAX differentiates."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from linattn import _linattn
from linattn._rooms import ROOMS, Line
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
def _backward(room: str, form: str, options: Options) -> Any:
    """The gradients by the labels of the arrays that have one."""
    labels_behind = dict(ROOMS[room].options_behind())
    behind = tuple((name, x) for name, x in options if name in labels_behind)
    labels = {line.gradient: line.label for line in ROOMS[room].inputs(form) if line.gradient}

    def gradients(arrays: Arrays) -> Arrays:
        found = _run("backward", room, form, arrays, behind)
        return {labels[name]: x for name, x in found.items()}

    return once(f"{room}'s functions", gradients)


@lru_cache(maxsize=256)
def _recorded(room: str, form: str, options: Options) -> Any:
    backward = _backward(room, form, options)

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


def _holds_more(lines: tuple[Line, ...], arrays: Arrays) -> bool:
    """Does a step's state hold more than a small letter says, one less than its capital?"""
    sizes: dict[str, int] = {}
    for line in lines:
        label = "state" if line.role == "STATE" else line.label
        if label not in arrays:
            continue
        letters = line.letters.replace("T", "")
        for letter, n in zip(letters, arrays[label].shape, strict=False):
            if letter.islower() and n > sizes[letter.upper()] - 1:
                return True
            sizes.setdefault(letter, n)
    return False


@lru_cache(maxsize=256)
def _recorded_step(room: str, form: str, options: Options) -> Any:
    """A step. It is a forward pass over one token, which has a backward pass."""
    backward = _backward(room, form, options)
    lines = ROOMS[room].inputs(form)
    axes = {line.label: line.letters.index("T") for line in lines if "T" in line.letters}

    @jax.custom_vjp
    def call(arrays: Arrays) -> tuple[Any, Any]:
        found = _run("step", room, form, arrays, options)
        return found["out"], found["state"]

    def differentiated(arrays: Arrays, d: tuple[Any, Any]) -> tuple[Arrays]:
        if "state_indices" in arrays:
            raise NotImplementedError(
                f"{room}'s steps have no gradients where they pick their states from a pool"
            )
        if _holds_more(lines, arrays):
            raise NotImplementedError(
                f"{room}'s steps have no gradients where their states hold older inputs"
            )
        dy, d_state = d
        first = next(iter(arrays.values()))
        real = jnp.float64 if first.dtype == jnp.float64 else jnp.float32
        asked: Arrays = {
            name: jnp.expand_dims(x, axes[name]) if name in axes else x
            for name, x in arrays.items()
            if name != "state"
        }
        asked |= {"initial_state": arrays["state"], "d_final_state": d_state.astype(real)}
        found = backward(asked | {"dy": jnp.expand_dims(dy, 1)})
        gradients = {
            name: jnp.squeeze(x, axes[name]) if name in axes else x for name, x in found.items()
        }
        gradients["state"] = gradients.pop("initial_state")
        return (cotangents(arrays, gradients),)

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
    call = _recorded_step(room, form, tuple(_there(options).items()))
    y, state = call(_there(arrays))
    return y, state
