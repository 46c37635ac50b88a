"""How a call of a rank's tokens is computed, and how its gradients are: plain functions.

First comes what a rank gives to others, by calls that make states alone: its map, its final state,
or in a backward pass the gradient of its initial state. The exchange follows. Then comes the call
itself, from the state that arrived. So no rank waits for another one's call.

The gradient of the initial state of a normalised op comes from a whole backward pass, to which the
gradient of its final state is added (_later.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from linattn.distributed._calls import Call, Derivatives, States
from linattn.distributed._context import Context
from linattn.distributed._exchange import Form, exchange, exchange_back, owned, wide
from linattn.distributed._later import add_later, can_add
from linattn.distributed._sections import (
    Sections,
    gradients_along,
    lengths_of,
    states_along,
    whole_map,
)

__all__ = ["Kept", "backward", "forward", "shapes_kept"]

Arrays = Mapping[str, Tensor]
Kept = list[Tensor | None]  # what a backward pass needs beside the arrays and the states given


class Way(NamedTuple):
    """A forward pass, its backward pass, and the shapes of what it keeps, None for nothing."""

    forward: Any  # of (call, context, given, arrays): o, the final states, Kept
    backward: Any  # of (call, context, gradients, given, arrays, Kept): those of given, of arrays
    kept: Any  # of (call, context, were states given?)


# ---- which tokens wait for what ----


class _Piece(NamedTuple):
    """Some of the parts of sequences that are here."""

    tokens: slice
    parts: slice
    edges: Tensor | None

    def of(self, call: Call, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return call.cut(arrays, self.tokens)

    def states(self, S: States | None) -> States | None:
        return None if S is None else tuple(x[self.parts] for x in S)


_EVERYTHING = slice(None)


def _pieces(context: Context, device: torch.device) -> tuple[_Piece | None, _Piece | None]:
    """The part that goes on with a sequence of the ranks before, and the rest."""
    share, edges = context.share, context.local_edges
    if not share.joins:
        return None, _Piece(_EVERYTHING, _EVERYTHING, context.on(device))
    if share.parts == 1 or edges is None:
        return _Piece(_EVERYTHING, _EVERYTHING, None), None
    cut = edges[1]
    later = context.on(device)
    assert later is not None
    return (
        _Piece(slice(0, cut), slice(0, 1), None),
        _Piece(slice(cut, None), slice(1, None), later[1:] - cut),
    )


def _last_part(context: Context) -> _Piece:
    """The last part of a sequence here, and of others nothing; all rows, if they are not packed."""
    edges = context.local_edges
    if edges is None:
        return _Piece(_EVERYTHING, _EVERYTHING, None)
    return _Piece(slice(edges[-2], edges[-1]), slice(-1, None), None)


def _crossing(context: Context) -> slice:
    """Of the parts here, the last one; all rows, if they are not packed."""
    return _EVERYTHING if context.edges is None else slice(-1, None)


def _joined(found: list[Any]) -> tuple[Tensor, States]:
    """Outputs and states of the pieces, in order."""
    if len(found) == 1:
        o, S = found[0]
        return o, S
    o = torch.cat([o for o, _ in found], 1)
    return o, tuple(torch.cat(S) for S in zip(*(S for _, S in found), strict=True))


# ---- states and gradients ----


def _part_of(call: Call, states: States | None, part: slice) -> Tensor:
    assert states is not None
    return call.as_rows([S[part] for S in states])


def _with(states: States | None, more: States, part: slice) -> States:
    """States with more added to those of a part."""
    assert states is not None
    added = tuple(S.clone() for S in states)
    for S, x in zip(added, more, strict=True):
        S[part] += x
    return added


def _whole_gradients(
    call: Call, context: Context, gradients: list[Tensor | None]
) -> tuple[Tensor, States]:
    """Of o and of the final states, zeros for those that did not come."""
    do, *d_finals = gradients
    if do is None:
        do = call.like.new_zeros(call.o_shape)
    count = call.B if context.edges is None else context.share.parts
    ends = zip(d_finals, call.zeros(count), strict=True)
    return do, tuple(zeros if d is None else d for d, zeros in ends)


def _summed(call: Call, found: list[Derivatives]) -> list[Tensor | None]:
    """The gradients of the arrays: of tokens behind each other, of others added, left to right."""
    gradients: list[Tensor | None] = []
    for x in call.names:
        pieces = [d.arrays[x] for d in found if x in d.arrays]
        if len(pieces) < 2 or x not in call.of_tokens:
            gradients.append(sum(pieces[1:], pieces[0]) if pieces else None)
        else:
            gradients.append(torch.cat(pieces, 1))
    return gradients


# ---- causal calls ----


def _from_left(call: Call, context: Context, given: States | None, arrays: Arrays) -> Any:
    share = context.share
    head, rest = _pieces(context, call.like.device)
    form = call.form(call.B)
    last = _last_part(context) if share.goes_on and not share.passes else None
    found = []
    X = M = None
    with record_function("linattn.distributed: map"):
        if share.passes:
            X, M = call.map(arrays)
        elif last is not None:
            own, before = last.of(call, arrays), last.states(given)
            X = call.as_rows(call.final_states(own, before))
    with record_function("linattn.distributed: exchange"):
        S_in, M_kept = exchange(context, form, X, M)
    if head is not None:
        assert S_in is not None
        found.append(call.run(head.of(call, arrays), call.as_states(S_in), head.edges))
    if rest is not None:
        found.append(call.run(rest.of(call, arrays), rest.states(given), rest.edges))
    o, finals = _joined(found)
    return o, finals, [S_in, M_kept]


def _from_left_back(
    call: Call,
    context: Context,
    gradients: list[Tensor | None],
    given: States | None,
    arrays: Arrays,
    kept: Kept,
) -> tuple[States, list[Tensor | None]]:
    share = context.share
    head, rest = _pieces(context, call.like.device)
    form = call.form(call.B)
    do, d_finals = _whole_gradients(call, context, gradients)
    S_in, M_kept = kept
    found: list[Derivatives] = []

    def back(piece: _Piece, S: States | None, G: Tensor | None) -> Derivatives:
        d_states = piece.states(d_finals)
        if G is not None:
            d_states = _with(d_states, call.as_states(G), _crossing(context))
        own = piece.of(call, arrays)
        return call.derivatives(do[:, piece.tokens], own, S, d_states, piece.edges)

    E = before = first = None
    if head is not None:
        assert S_in is not None
        before = call.as_states(S_in)
        with record_function("linattn.distributed: gradient of the initial state"):
            if call.has_gradient_alone:
                own, ends = head.of(call, arrays), head.states(d_finals)
                assert ends is not None
                E = call.as_rows(call.d_initial_states(do[:, head.tokens], own, ends))
            else:
                first = back(head, before, None)
                assert first.states is not None
                E = call.as_rows(first.states)
                if not share.passes:
                    found.append(first)
    with record_function("linattn.distributed: exchange"):
        G = exchange_back(context, form, E, M_kept)
    if head is not None and not found:
        if first is not None and can_add(call):
            if G is not None:
                add_later(call, first, head.of(call, arrays), call.as_states(G))
            found.append(first)
        else:
            found.append(back(head, before, G if share.passes else None))
    if rest is not None:
        found.append(back(rest, rest.states(given), G))
    d_given = tuple(torch.zeros_like(S) for S in given or ())
    if given is not None and rest is not None:
        for d, its in zip(d_given, found[-1].states or (), strict=True):
            d[rest.parts] = its
    return d_given, _summed(call, found)


def _kept_from_left(call: Call, context: Context, _: bool) -> list[tuple[int, ...] | None]:
    form = call.form(call.B)
    return [(form.rows, form.K, form.V) if context.share.joins else None, _M_kept(form, context)]


def _M_kept(form: Form, context: Context) -> tuple[int, ...] | None:
    """The shape of what an exchange keeps."""
    passing = sum(share.passes for share in context.shares)
    if not passing or not form.transition:
        return None
    return passing, owned(context, form), *form.transition


# ---- causal calls whose tokens each rank cuts into sections (_sections.py) ----


def _in_sections(call: Call, context: Context, given: States | None, arrays: Arrays) -> Any:
    sections, share, form = Sections.of(call), context.share, call.form(call.B)
    with record_function("linattn.distributed: map"):
        X, M = sections.maps(call, arrays)
        S = call.as_rows(call.zeros(1) if given is None else given)
        one = product = along = None
        if share.passes:
            one, product = whole_map(X, M)
        elif not share.joins:
            along = states_along(X, M, S)
            one = along[-1] if share.goes_on else None
    with record_function("linattn.distributed: exchange"):
        S_in, M_kept = exchange(context, form, _as(one, form), product)
    if along is None:
        along = states_along(X, M, S if S_in is None else S_in)
    starts = torch.cat(along[:-1]).to(form.dtype)
    o, finals = call.run(arrays, call.as_states(starts), sections.edges)
    last = tuple(x[-1:].clone() for x in finals)
    return o, last, [starts, M_kept, _as(M, form)]


def _in_sections_back(
    call: Call,
    context: Context,
    gradients: list[Tensor | None],
    given: States | None,
    arrays: Arrays,
    kept: Kept,
) -> tuple[States, list[Tensor | None]]:
    sections, share, form = Sections.of(call), context.share, call.form(call.B)
    do, d_last = _whole_gradients(call, context, gradients)
    starts, M_kept, M = kept
    assert starts is not None
    M = None if M is None else wide(M)
    with record_function("linattn.distributed: gradient of the initial state"):
        E = sections.gradients(call, do, arrays, d_last)
        none = torch.zeros_like(E[0])
        before = gradients_along(E, M, none)[0] if share.joins else None
    with record_function("linattn.distributed: exchange"):
        G = exchange_back(context, form, _as(before, form), M_kept)
    more = none if G is None else wide(G)
    ends = [*gradients_along(E, M, more)[1:], call.as_rows(d_last) + more]
    d_ends = call.as_states(torch.cat(ends).to(form.dtype))
    found = call.derivatives(do, arrays, call.as_states(starts), d_ends, sections.edges)
    assert found.states is not None
    d_given = tuple(torch.zeros_like(S) for S in given or ())
    if given is not None and not share.joins:
        d_given = tuple(S[:1].clone() for S in found.states)
    return d_given, _summed(call, [found])


def _as(x: Tensor | None, form: Form) -> Tensor | None:
    return None if x is None else x.to(form.dtype)


def _kept_in_sections(call: Call, context: Context, _: bool) -> list[tuple[int, ...] | None]:
    count, form = len(lengths_of(call)), call.form(call.B)
    return [
        (count * form.rows, form.K, form.V),
        _M_kept(form, context),
        (count, form.rows, *form.transition) if form.transition else None,
    ]


# ---- calls whose tokens read all tokens of their sequence: sums without a decay, which arrive from
# both sides ----


def _from_both_sides(call: Call, context: Context, given: States | None, arrays: Arrays) -> Any:
    share, edges = context.share, context.on(call.like.device)
    form = call.form(call.B)
    crossing = _crossing(context)
    left = _EVERYTHING if edges is None else slice(0, 1)
    start = given
    if share.joins or share.goes_on:
        count = call.B if edges is None else share.parts
        start = call.zeros(count) if given is None else tuple(S.clone() for S in given)
        if share.joins:
            for S in start:
                S[left] = 0
    alone = None
    if share.joins or share.goes_on:
        alone = call.final_states({**arrays, "q": arrays["k"]}, start, edges)
    to_right = _part_of(call, alone, crossing) if share.goes_on else None
    to_left = _part_of(call, alone, left) if share.joins else None
    from_left, _ = exchange(context, form, to_right, None)
    from_right = exchange_back(context, form, to_left, None)
    if from_left is not None:
        start = _with(start, call.as_states(from_left), left)
    if from_right is not None:
        start = _with(start, call.as_states(from_right), crossing)
    o, finals = call.run(arrays, start, edges)
    return o, finals, list(start or ())


def _from_both_sides_back(
    call: Call,
    context: Context,
    gradients: list[Tensor | None],
    given: States | None,
    arrays: Arrays,
    kept: Kept,
) -> tuple[States, list[Tensor | None]]:
    start = tuple(S for S in kept if S is not None) or None
    share, edges = context.share, context.on(call.like.device)
    form = call.form(call.B)
    crossing = _crossing(context)
    left = _EVERYTHING if edges is None else slice(0, 1)
    do, ends = _whole_gradients(call, context, gradients)
    E = None
    if share.joins or share.goes_on:
        if call.has_gradient_alone:
            as_many = {"k": arrays["q"], "v": do}  # tokens, which may be more or fewer in k and v
            E = call.d_initial_states(do, {**arrays, **as_many}, ends, edges)
        else:
            E = call.derivatives(do, arrays, start, ends, edges).states
    # what arrived from a side goes back to that side
    to_left = _part_of(call, E, left) if share.joins else None
    to_right = _part_of(call, E, crossing) if share.goes_on else None
    from_right = exchange_back(context, form, to_left, None)
    from_left, _ = exchange(context, form, to_right, None)
    if from_right is not None:
        ends = _with(ends, call.as_states(from_right), crossing)
    if from_left is not None:
        ends = _with(ends, call.as_states(from_left), left)
    found = call.derivatives(do, arrays, start, ends, edges)
    d_given: States = ()
    if given is not None:
        assert found.states is not None
        d_given = tuple(d.clone() for d in found.states)
        if share.joins:
            for d in d_given:
                d[left] = 0
    return d_given, _summed(call, [found])


def _kept_from_both_sides(
    call: Call, context: Context, has_given: bool
) -> list[tuple[int, ...] | None]:
    share = context.share
    if not (share.joins or share.goes_on or has_given):
        return []
    count = call.B if context.edges is None else share.parts
    return [(count, *shape) for shape in call.shapes]


# ---- either ----

_CAUSAL = Way(_from_left, _from_left_back, _kept_from_left)
_IN_SECTIONS = Way(_in_sections, _in_sections_back, _kept_in_sections)
_NONCAUSAL = Way(_from_both_sides, _from_both_sides_back, _kept_from_both_sides)


def _way_of(call: Call, context: Context) -> Way:
    if not call.causal:
        return _NONCAUSAL
    is_cut = context.edges is None and len(lengths_of(call)) > 1
    return _IN_SECTIONS if is_cut else _CAUSAL


def _unlike_autocast(call: Call) -> Any:
    """Arrays were cast where the call began."""
    return torch.autocast(call.like.device.type, enabled=False)


def forward(
    call: Call, context: Context, given: States, arrays: Arrays
) -> tuple[list[Tensor], Kept]:
    """o and the final states, and what the backward pass needs. `given`: no states, or all."""
    with _unlike_autocast(call):
        o, finals, kept = _way_of(call, context).forward(call, context, given or None, arrays)
    return [o, *finals], kept


def backward(
    call: Call,
    context: Context,
    gradients: list[Tensor | None],
    given: States,
    arrays: Arrays,
    kept: Kept,
) -> list[Tensor | None]:
    """The gradients of `given` and of the arrays, from those of o and of the final states."""
    with _unlike_autocast(call):
        back = _way_of(call, context).backward
        of_given, of_arrays = back(call, context, gradients, given or None, arrays, kept)
    return [*of_given, *of_arrays]


def shapes_kept(call: Call, context: Context, has_given: bool) -> list[tuple[int, ...] | None]:
    """Of what `forward` keeps, None where it keeps nothing."""
    shapes: list[tuple[int, ...] | None] = _way_of(call, context).kept(call, context, has_given)
    return shapes
