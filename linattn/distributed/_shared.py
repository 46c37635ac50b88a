"""The ops and scans on the tokens of one rank, recorded by PyTorch as one step each.

First comes what a rank gives to others, by calls that make states alone: its map, its final state,
or in a backward pass the gradient of its initial state. The exchange follows. Then comes the call
itself, from the state that arrived. So no rank waits for another one's call.

Scans, systems and normalised ops have no calls for states alone. There a sequence that begins on a
rank is run before the exchange, which takes its final state, and a rank that a sequence passes
walks over its tokens twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

import linattn
from linattn.distributed._agreement import asks_for_states, prepared, refuse_edges
from linattn.distributed._calls import Call, Derivatives, States, names_of_states
from linattn.distributed._carried import CARRIED
from linattn.distributed._context import Context, group_of, not_traced
from linattn.distributed._exchange import everywhere, exchange, exchange_back
from linattn.distributed._systems import SYSTEMS
from linattn.segments import by_name
from linattn.variants import ARRAYS, VARIANTS

__all__ = ["shared"]


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


class _Shared(torch.autograd.Function):
    """A causal call. The first `n` tensors are the states that this rank was given."""

    @staticmethod
    def forward(ctx: Any, call: Call, context: Context, n: int, *tensors: Tensor) -> Any:
        given = tensors[:n] or None
        arrays = dict(zip(call.names, tensors[n:], strict=True))
        share = context.share
        head, rest = _pieces(context, call.like.device)
        form = call.form(call.B)
        last = _last_part(context) if share.goes_on and not share.passes else None
        found = []
        X = M = None

        def run_rest() -> None:
            if rest is not None:
                found.append(call.run(rest.of(call, arrays), rest.states(given), rest.edges))

        with _unlike_autocast(call):
            with record_function("linattn.distributed: map"):
                if share.passes:
                    X, M = call.map(arrays)
                elif last is not None and call.is_linear:
                    own, before = last.of(call, arrays), last.states(given)
                    X = call.as_rows(call.final_states(own, before))
                elif last is not None:
                    run_rest()
                    X = call.as_rows([S[_crossing(context)] for S in found[-1][1]])
            with record_function("linattn.distributed: exchange"):
                S_in, kept = exchange(context, form, X, M)
            if not found:
                run_rest()
            if head is not None:
                assert S_in is not None
                ran = call.run(head.of(call, arrays), call.as_states(S_in), head.edges)
                found.insert(0, ran)
        o, finals = _joined(found)
        ctx.what = call, context, n
        ctx.save_for_backward(S_in, kept, *tensors)
        ctx.set_materialize_grads(False)
        return (o, *finals)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, *d_finals: Tensor | None) -> tuple[Any, ...]:
        call, context, n = ctx.what
        S_in, kept, *tensors = ctx.saved_tensors
        given = tuple(tensors[:n]) or None
        arrays = dict(zip(call.names, tensors[n:], strict=True))
        share = context.share
        head, rest = _pieces(context, call.like.device)
        form = call.form(call.B)
        do, d_finals = _whole_gradients(call, context, do, d_finals)
        found: list[Derivatives] = []

        def back(piece: _Piece, S: States | None, G: Tensor | None) -> Derivatives:
            d_states = piece.states(d_finals)
            if G is not None:
                d_states = _with(d_states, call.as_states(G), _crossing(context))
            own = piece.of(call, arrays)
            return call.derivatives(do[:, piece.tokens], own, S, d_states, piece.edges)

        with _unlike_autocast(call):
            E = before = None
            if head is not None:
                before = call.as_states(S_in)
                with record_function("linattn.distributed: gradient of the initial state"):
                    if call.is_linear:
                        own, ends = head.of(call, arrays), head.states(d_finals)
                        E = call.as_rows(call.d_initial_states(do[:, head.tokens], own, ends))
                    else:
                        first = back(head, before, None)
                        assert first.states is not None
                        E = call.as_rows(first.states)
                        if not share.passes:
                            found.append(first)
            with record_function("linattn.distributed: exchange"):
                G = exchange_back(context, form, E, kept)
            if head is not None and not found:
                found.append(back(head, before, G if share.passes else None))
            if rest is not None:
                found.append(back(rest, rest.states(given), G))
        d_given: tuple[Any, ...] = ()
        if given is not None:
            d_given = tuple(torch.zeros_like(S) for S in given)
            if rest is not None:
                for d, its in zip(d_given, found[-1].states or (), strict=True):
                    d[rest.parts] = its
        return (None, None, None, *d_given, *_summed(call, found))


class _SharedByAll(torch.autograd.Function):
    """A call whose tokens read all tokens of their sequence: sums without a decay, which arrive
    from both sides."""

    @staticmethod
    def forward(ctx: Any, call: Call, context: Context, n: int, *tensors: Tensor) -> Any:
        given = tensors[:n] or None
        arrays = dict(zip(call.names, tensors[n:], strict=True))
        share, edges = context.share, context.on(call.like.device)
        form = call.form(call.B)
        crossing = _crossing(context)
        left = _EVERYTHING if edges is None else slice(0, 1)
        with _unlike_autocast(call):
            start = given
            if share.joins or share.goes_on:
                count = call.B if edges is None else share.parts
                start = call.zeros(count) if given is None else tuple(S.clone() for S in given)
                if share.joins:
                    for S in start:
                        S[left] = 0
            alone = None
            if share.joins or share.goes_on:
                alone = call.run({**arrays, "q": arrays["k"]}, start, edges)[1]
            to_right = _part_of(call, alone, crossing) if share.goes_on else None
            to_left = _part_of(call, alone, left) if share.joins else None
            from_left, _ = exchange(context, form, to_right, None)
            from_right = exchange_back(context, form, to_left, None)
            if from_left is not None:
                start = _with(start, call.as_states(from_left), left)
            if from_right is not None:
                start = _with(start, call.as_states(from_right), crossing)
            o, finals = call.run(arrays, start, edges)
        ctx.what = call, context, n
        ctx.save_for_backward(*(start or ()), *tensors)
        ctx.starts = len(start or ())
        ctx.set_materialize_grads(False)
        return (o, *finals)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor | None, *d_finals: Tensor | None) -> tuple[Any, ...]:
        call, context, n = ctx.what
        start = tuple(ctx.saved_tensors[: ctx.starts]) or None
        tensors = ctx.saved_tensors[ctx.starts :]
        arrays = dict(zip(call.names, tensors[n:], strict=True))
        share, edges = context.share, context.on(call.like.device)
        form = call.form(call.B)
        crossing = _crossing(context)
        left = _EVERYTHING if edges is None else slice(0, 1)
        do, ends = _whole_gradients(call, context, do, d_finals)
        with _unlike_autocast(call):
            E = None
            if share.joins or share.goes_on:
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
        d_given: tuple[Any, ...] = ()
        if n:
            assert found.states is not None
            d_given = tuple(d.clone() for d in found.states)
            if share.joins:
                for d in d_given:
                    d[left] = 0
        return (None, None, None, *d_given, *_summed(call, [found]))


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
    call: Call, context: Context, do: Tensor | None, d_finals: tuple[Tensor | None, ...]
) -> tuple[Tensor, States]:
    """Zeros for the gradients that did not come."""
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


def _unlike_autocast(call: Call) -> Any:
    """Arrays were cast where the call began."""
    return torch.autocast(call.like.device.type, enabled=False)


# ---- a call ----


def _cast(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """As the op itself casts its arrays under autocast."""
    first = next(iter(given.values()))
    device = first.device.type if isinstance(first, Tensor) else "cpu"
    if name not in VARIANTS or not torch.is_autocast_enabled(device):
        return given
    dtype, like_q = torch.get_autocast_dtype(device), {x.label for x in ARRAYS if x.dtype == "OF_Q"}
    return {
        x: value.to(dtype)
        if x in like_q and isinstance(value, Tensor) and value.dtype != torch.float64
        else value
        for x, value in given.items()
    }


def _check_batches(context: Context, batch: int) -> None:
    """Tokens that predict from one state are on one rank."""
    if batch == 1:
        return
    cut = 0
    for rank, length in enumerate(context.lengths[:-1]):
        cut += length
        begins = [0] if context.edges is None else [e for e in context.edges if e <= cut]
        if cut < sum(context.lengths) and (cut - begins[-1]) % batch:
            raise ValueError(
                f"batch: expected whole batches of {batch} tokens on each rank, got "
                f"{(cut - begins[-1]) % batch} tokens of one at the end of rank {rank}"
            )


@not_traced  # type: ignore[untyped-decorator]
def shared(name: str, group: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """The function `name` of linattn on this rank's tokens."""
    function = getattr(linattn, name)
    initial, final = names_of_states(name)
    base = group if isinstance(group, Context) else None
    size = base.size if base is not None else group_of(group).size()
    if size == 1:
        given = given | {final: asks_for_states(final, given.get(final)) is not None}
        if given.get("out") is not None:
            raise ValueError("out: expected None where ranks share the tokens")
        first = args[0] if args else next(iter(given.values()))
        device = getattr(first, "device", torch.device("cpu"))
        edges = given.get("cu_seqlens")
        if base is not None and base.edges is not None:
            refuse_edges(edges)
            given["cu_seqlens"] = base.on(device)
        elif isinstance(edges, list | tuple):
            given["cu_seqlens"] = torch.tensor(edges, dtype=torch.int64, device=device)
        return function(*args, **given)

    def made(states: States | None, is_packed: bool) -> Call:
        call = Call(name, _cast(name, by_name(function, args, given)))
        if call.state_v_first and states is not None:
            states = tuple(S.mT if S.dim() == 4 else S for S in states)
        call.probe(states, is_packed)
        return call

    batch = given.get("batch", 1)
    is_carried = name in SYSTEMS and SYSTEMS[name].is_carried
    call, states, context = prepared(
        name, given, group, made, (initial, final), needs_lengths=batch != 1 or is_carried
    )
    wanted = asks_for_states(final, given.get(final))
    if is_carried:
        return _carried(call, states, context, wanted)
    _check_batches(context, batch)
    flip = call.state_v_first

    def flipped(S: Tensor) -> Tensor:
        return S.mT if flip and S.dim() == 4 else S

    begun = tuple(flipped(S).to(call.like.device, call.real) for S in states or ())
    kind = _Shared if call.causal else _SharedByAll
    o, *finals = kind.apply(call, context, len(begun), *begun, *call.taken())
    if wanted is None:
        return o, None
    if wanted == "all":
        finals = [everywhere(context, S) for S in finals]
    finals = [flipped(S).contiguous() for S in finals]  # a step writes them in place
    return o, tuple(finals) if len(finals) == 2 else finals[0]


def _carried(call: Call, states: States | None, context: Context, wanted: str | None) -> Any:
    """A system that is an op of other arrays. The ranks have agreed on its call, and the op's
    follows from it."""

    def run(op: str, arguments: dict[str, Any], context: Context) -> Any:
        quiet = replace(context, check=False)
        return shared(op, quiet, (), arguments | {"output_final_state": True})

    given = call.options | call.arrays
    o, finals = CARRIED[call.name](given, states, context, run)
    if wanted is None:
        return o, None
    if wanted == "all":
        finals = getattr(finals, "_make", tuple)(everywhere(context, S) for S in finals)
    return o, finals
