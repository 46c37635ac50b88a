"""The ops as functions that JAX differentiates: custom_vjp over the passes of the core."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from linattn import _linattn
from linattn.jax._calls import Options, gate_of, outlined, run, varying
from linattn.variants import ARRAYS, VARIANTS

__all__ = ["cotangents", "forward", "once", "step"]

Arrays = dict[str, Any]  # by the core's keywords; a pair of states is a tuple

_OPTIONS = {name: (kind, passes) for name, kind, passes in _linattn.OPTIONS}
_FIT: dict[str, Callable[[Any], Any]] = {
    "FLAG": bool,
    "DEFAULT": bool,
    "NUMBER": float,
    "COUNT": operator.index,
    "MAYBE": operator.index,
    "MODE": str,
    "FEATURES": tuple,
}
_LABELS = {line.gradient: line.label for line in ARRAYS if line.gradient}
_TOKENS = {
    line.label: line.letters.replace("L", "T").index("T")
    for line in ARRAYS
    if set(line.letters) & set("TL")
}


# ---- arguments ----


def _read(pass_: str, op: str, given: Mapping[str, Any]) -> tuple[Arrays, Options]:
    """The arrays and the options of a call, checked. None is for what is absent. A number becomes
    the array that it stands for."""
    there = {name: x for name, x in given.items() if x is not None}
    options = {name: x for name, x in there.items() if name in _OPTIONS}
    arrays = {name: _tuple(x) for name, x in there.items() if name not in _OPTIONS}
    rows, _ = outlined(pass_, op, arrays, tuple(options.items()))
    gate = gate_of(arrays)
    made = {gate if row.label == "g" else row.label: row for row in rows}
    arrays = {
        name: jnp.full(made[name].shape, x, made[name].dtype) if _is_number(x) else x
        for name, x in arrays.items()
    }
    return arrays, tuple((name, _FIT[_OPTIONS[name][0]](x)) for name, x in options.items())


def _tuple(x: Any) -> Any:
    return tuple(x) if isinstance(x, list) else x


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.generic)


def _of_pass(options: Options, letter: str) -> Options:
    return tuple((name, x) for name, x in options if letter in _OPTIONS[name][1])


# ---- a state ----


def _state_of(found: list[tuple[str, Any]], *labels: str) -> Any:
    """A state, the pair of one, or None."""
    parts = tuple(x for label, x in found if label in labels)
    return parts if len(parts) > 1 else next(iter(parts), None)


# ---- the passes ----


def _forward(op: str, arrays: Arrays, options: Options) -> tuple[Any, Any]:
    found = run("forward", op, arrays, options)
    return _state_of(found, "out"), _state_of(found, "final_state")


def _step(op: str, arrays: Arrays, options: Options) -> tuple[Any, Any]:
    found = run("step", op, arrays, options)
    return _state_of(found, "out"), _state_of(found, "initial_state")


def once(name: str, gradients: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Arrays]:
    """A backward pass, which has no gradients itself."""
    backward = jax.custom_vjp(gradients)

    def twice(arrays: Arrays) -> Any:
        raise NotImplementedError(
            f"the gradients of {name} are not differentiable themselves: there is no double "
            "backward"
        )

    backward.defvjp(twice, lambda _, d: (d,))
    return backward


@lru_cache(maxsize=256)
def _backward(op: str, options: Options) -> Callable[[Arrays], Arrays]:
    """The gradients by the keywords of the arrays that have one."""

    def gradients(arrays: Arrays) -> Arrays:
        found = run("backward", op, arrays, options)
        gate = gate_of(arrays)
        labels = dict.fromkeys(label for label, _ in found)
        keywords = {label: gate if _LABELS[label] == "g" else _LABELS[label] for label in labels}
        return {keywords[label]: _state_of(found, label) for label in labels}

    return once(f"linattn.jax.{op}", gradients)


def cotangents(arrays: Arrays, gradients: Arrays) -> Arrays:
    """Of the arrays' own dtypes: a state of bfloat16 has a gradient of float32."""

    def of(x: Any, d: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return np.zeros(x.shape, jax.dtypes.float0)
        over = tuple(varying(d) - varying(x))  # in shard_map: the same array on several devices
        return (jax.lax.psum(d, over) if over else d).astype(x.dtype)

    return {name: jax.tree.map(of, x, gradients.get(name, x)) for name, x in arrays.items()}


@lru_cache(maxsize=256)
def _recorded(op: str, options: Options) -> Callable[[Arrays], tuple[Any, Any]]:
    """A forward pass. Its backward pass needs the inputs alone."""
    backward = _backward(op, _of_pass(options, "B"))

    @jax.custom_vjp
    def call(arrays: Arrays) -> tuple[Any, Any]:
        return _forward(op, arrays, options)

    def differentiated(arrays: Arrays, d: tuple[Any, Any]) -> tuple[Arrays]:
        do, d_final = d
        asked = {"do": do} | ({} if d_final is None else {"d_final_state": d_final})
        return (cotangents(arrays, backward(arrays | asked)),)

    call.defvjp(lambda arrays: (call(arrays), arrays), differentiated)
    return call


def _token_axis(op: str, name: str, arrays: Arrays) -> int | None:
    """Where a whole sequence has its tokens, of which a step has one."""
    label = "out" if name == "do" else "g" if name == gate_of(arrays) else name
    per_head = label == "g" and VARIANTS[op].decay == "head"
    if label not in _TOKENS or per_head:
        return None
    return _TOKENS[label] if arrays["q"].ndim > 1 else 0


@lru_cache(maxsize=256)
def _recorded_step(op: str, options: Options) -> Callable[[Arrays], tuple[Any, Any]]:
    """A step. It is a forward pass over one token, which has a backward pass."""
    backward = _backward(op, _of_pass(options, "B"))

    @jax.custom_vjp
    def call(arrays: Arrays) -> tuple[Any, Any]:
        return _step(op, arrays, options)

    def differentiated(arrays: Arrays, d: tuple[Any, Any]) -> tuple[Arrays]:
        if "state_indices" in arrays:
            raise NotImplementedError(
                f"linattn.jax.{op}_step has no gradients where it picks its states from a pool"
            )
        do, d_state = d
        one = {name: x for name, x in arrays.items() if name != "state"} | {"do": do}
        axes = {name: _token_axis(op, name, arrays) for name in one}
        asked: Arrays = {
            name: x if axes[name] is None else jnp.expand_dims(x, axes[name])
            for name, x in one.items()
        }
        real = jnp.float64 if arrays["q"].dtype == jnp.float64 else jnp.float32
        asked["d_final_state"] = jax.tree.map(lambda x: x.astype(real), d_state)
        asked["initial_state"] = arrays["state"]
        found = backward(asked)
        found["state"] = found.pop("initial_state")
        gradients = {
            name: x if axes.get(name) is None else jnp.squeeze(x, axes[name])
            for name, x in found.items()
        }
        return (cotangents(arrays, gradients),)

    call.defvjp(lambda arrays: (call(arrays), arrays), differentiated)
    return call


# ---- what the ops call in the core's place ----


def forward(op: str, q: Any, k: Any, v: Any, **given: Any) -> tuple[Any, Any]:
    arrays, options = _read("forward", op, {"q": q, "k": k, "v": v, **given})
    return _recorded(op, options)(arrays)


def step(op: str, q: Any, k: Any, v: Any, **given: Any) -> tuple[Any, Any]:
    arrays, options = _read("step", op, {"q": q, "k": k, "v": v, **given})
    return _recorded_step(op, options)(arrays)
