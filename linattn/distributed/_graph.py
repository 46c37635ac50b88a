"""Calls that ranks share, in the graphs of PyTorch's compiler.

A tracer sees two operators. One is a call, which also returns the numbers that its gradients need.
The other one makes these gradients. The exchange is inside of them, and so is the comparison of the
ranks' calls. So a compiled call does what an eager one does. The arguments are tensors and a text
in JSON, which says all else. PyTorch keeps graphs on disk, so the text has to mean the same in
another process. A group is in it by its name, as in PyTorch's own collectives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linattn.distributed import _ways
from linattn.distributed._agreement import prepared
from linattn.distributed._calls import Call, States, names_of_states
from linattn.distributed._context import Context, at, place_of, rows
from linattn.distributed._order import after, kept_in_order, token_before
from linattn.distributed._ways import Kept
from linattn.features import FeatureMap

__all__ = ["backward", "forward"]


# ---- what an operator's signature has no place for ----


def _written(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return {"tuple": [_written(name, x) for x in value]}
    if isinstance(value, FeatureMap) and value.forward is None:
        return {"map": [value.name, value.eps]}
    if isinstance(value, np.integer | np.floating):
        return value.item()
    if value is not None and not isinstance(value, bool | int | float | str):
        got = type(value).__name__
        raise TypeError(f"{name}: expected a value that a graph can hold as text, got {got}")
    return value


def _read(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "map" in value:
        name, eps = value["map"]
        return FeatureMap(name, eps)
    return tuple(map(_read, value["tuple"]))


def _said(call: Call, context: Context) -> str:
    words = {
        "name": call.name,
        "arrays": call.names,
        "state_v_first": call.state_v_first,
        "options": {x: _written(x, value) for x, value in call.options.items()},
        # without lengths it was made from a group, which an eager call names, too
        "place": place_of(context if context.lengths else context.group),
        "recorded": call.recorded,
        "wanted": call.wanted,
    }
    return json.dumps(words, sort_keys=True)


class _Heard:
    """The contents of a text, with its tensors."""

    def __init__(self, text: str, given: Sequence[Tensor], arrays: Sequence[Tensor]) -> None:
        words = json.loads(text)
        self.name, self.wanted, self.recorded = words["name"], words["wanted"], words["recorded"]
        self.state_v_first = words["state_v_first"]
        self.group = at(words["place"])
        is_context = isinstance(self.group, Context)
        self.context: Context = self.group if is_context else rows(self.group, ())
        self.given: States = tuple(given)
        self.arrays = dict(zip(words["arrays"], arrays, strict=True))
        options = {x: _read(value) for x, value in words["options"].items()}
        self.arguments = self.arrays | options

    def call(self, states: States | None, is_packed: bool) -> Call:
        call = Call(self.name, self.arguments)
        call.probe(states, is_packed)
        call.recorded, call.wanted = self.recorded, self.wanted
        call.state_v_first = self.state_v_first
        return call

    def alone(self) -> Call:
        """The call, without a comparison: the ranks have agreed on it, or its tensors have no
        memory."""
        call = self.call(self.given or None, self.context.edges is not None)
        call.taken()
        return call

    def agreed(self) -> Call:
        initial, final = names_of_states(self.name)
        wanted = self.wanted == "here" or self.wanted
        given = self.arguments | {initial: self.given or None, final: wanted}
        names = (initial, final)
        call, *_ = prepared(self.name, given, self.group, self.call, names, needs_lengths=False)
        found: Call = call
        found.taken()
        return found


def _own(made: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
    """An operator returns no argument, and contiguous tensors, as its fake does."""
    return [x.clone() if any(x is y for y in given) else x.contiguous() for x in made]


def _of_all(like: Tensor, tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """An operator returns tensors alone: one without elements for what is absent."""
    return [like.new_empty(0) if x is None else x for x in tensors]


def _held(call: Call, context: Context, given: Sequence[Tensor], tensors: Sequence[Tensor]) -> Kept:
    """The way back, of what a call keeps for its gradients."""
    shapes = _ways.shapes_kept(call, context, bool(given))
    return [None if shape is None else x for x, shape in zip(tensors, shapes, strict=True)]


# ---- the operators ----


@torch.library.custom_op(
    "linattn::shared_by_ranks",
    mutates_args=(),
    schema="(str text, Tensor? token, Tensor[] given, Tensor[] arrays) -> Tensor[]",
)
def _shared(
    text: str, token: Tensor | None, given: Sequence[Tensor], arrays: Sequence[Tensor]
) -> list[Tensor]:
    """A token, o, the final states, what the gradients need."""
    heard = _Heard(text, given, arrays)
    call = heard.agreed()
    outputs, kept = _ways.forward(call, heard.context, heard.given, heard.arrays)
    return _own([call.like.new_zeros(1), *outputs, *_of_all(call.like, kept)], given)


@_shared.register_fake
def _(
    text: str, token: Tensor | None, given: Sequence[Tensor], arrays: Sequence[Tensor]
) -> list[Tensor]:
    heard = _Heard(text, given, arrays)
    call, context = heard.alone(), heard.context
    count = call.B if context.edges is None else context.share.parts
    like = call.like
    fakes = [like.new_empty(1), like.new_empty(call.o_shape), *call.zeros(count)]
    for shape in _ways.shapes_kept(call, context, bool(given)):
        fakes.append(like.new_empty(shape or (0,), dtype=call.real if shape else None))
    return fakes


@torch.library.custom_op(
    "linattn::shared_by_ranks_backward",
    mutates_args=(),
    schema=(
        "(str text, Tensor? token, Tensor[] gradients, bool[] is_there, Tensor[] given, "
        "Tensor[] arrays, Tensor[] kept) -> Tensor[]"
    ),
)
def _shared_backward(
    text: str,
    token: Tensor | None,
    gradients: Sequence[Tensor],
    is_there: Sequence[bool],
    given: Sequence[Tensor],
    arrays: Sequence[Tensor],
    kept: Sequence[Tensor],
) -> list[Tensor]:
    """A token, and the gradients of `given` and of the arrays. gradients: those that are there."""
    heard = _Heard(text, given, arrays)
    call = heard.alone()
    every = iter(gradients)
    whole = [next(every) if there else None for there in is_there]
    held = _held(call, heard.context, given, kept)
    found = _ways.backward(call, heard.context, whole, heard.given, heard.arrays, held)
    made = [call.like.new_zeros(1), *_of_all(call.like, found)]
    return _own(made, (*gradients, *given, *arrays))


@_shared_backward.register_fake
def _(
    text: str,
    token: Tensor | None,
    gradients: Sequence[Tensor],
    is_there: Sequence[bool],
    given: Sequence[Tensor],
    arrays: Sequence[Tensor],
    kept: Sequence[Tensor],
) -> list[Tensor]:
    smooth = [_is_smooth(x) for x in arrays]
    of_arrays = [
        x.new_empty(x.shape) if is_smooth else x.new_empty(0)
        for x, is_smooth in zip(arrays, smooth, strict=True)
    ]
    return [arrays[0].new_empty(1), *(S.new_empty(S.shape) for S in given), *of_arrays]


kept_in_order(_shared)
kept_in_order(_shared_backward)


def _is_smooth(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


# ---- for autograd, in the place of those of _ways ----


def forward(
    call: Call, context: Context, given: States, arrays: Mapping[str, Tensor]
) -> tuple[list[Tensor], Kept]:
    token, *made = torch.ops.linattn.shared_by_ranks(
        _said(call, context), token_before(), list(given), list(arrays.values())
    )
    after(token)
    outputs = 1 + len(call.shapes)
    return made[:outputs], _held(call, context, given, made[outputs:])


def backward(
    call: Call,
    context: Context,
    gradients: list[Tensor | None],
    given: States,
    arrays: Mapping[str, Tensor],
    kept: Kept,
) -> list[Tensor | None]:
    every = list(arrays.values())
    token, *found = torch.ops.linattn.shared_by_ranks_backward(
        _said(call, context),
        token_before(),
        [x for x in gradients if x is not None],
        [x is not None for x in gradients],
        list(given),
        every,
        _of_all(call.like, kept),
    )
    after(token)
    smooth = [True] * len(given) + [_is_smooth(x) for x in every]
    return [x if is_smooth else None for x, is_smooth in zip(found, smooth, strict=True)]
