"""The ops and scans on the tokens of one rank, recorded by PyTorch as one step each."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import linattn
from linattn.distributed import _graph, _ways
from linattn.distributed._agreement import asks_for_states, prepared, refuse_edges
from linattn.distributed._calls import Call, States, names_of_states
from linattn.distributed._carried import CARRIED
from linattn.distributed._context import Context, Place, at, group_of, place_of
from linattn.distributed._dtensors import are_there, by_parts
from linattn.distributed._exchange import everywhere
from linattn.distributed._numpy import by_tensors, is_numpy
from linattn.distributed._order import is_traced, unseen
from linattn.distributed._systems import SYSTEMS
from linattn.segments import by_name, signature_of
from linattn.variants import ARRAYS, VARIANTS

__all__ = ["called", "shared"]


class _Recorded(torch.autograd.Function):
    """A call. The first `n` tensors are the states that this rank was given."""

    @staticmethod
    def forward(ctx: Any, call: Call, context: Context, n: int, *tensors: Tensor) -> Any:
        given, arrays = tensors[:n], dict(zip(call.names, tensors[n:], strict=True))
        outputs, kept = (_graph if is_traced() else _ways).forward(call, context, given, arrays)
        ctx.what = call, context, n
        ctx.save_for_backward(*kept, *tensors)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        call, context, n = ctx.what
        saved = ctx.saved_tensors
        first = len(saved) - n - len(call.names)
        kept, given, arrays = saved[:first], saved[first : first + n], saved[first + n :]
        named = dict(zip(call.names, arrays, strict=True))
        backward = (_graph if is_traced() else _ways).backward
        found = backward(call, context, list(gradients), given, named, list(kept))
        return (None, None, None, *found)


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


def shared(name: str, group: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """The function `name` of linattn on this rank's tokens."""
    first = (
        args[0] if args else given.get(next(iter(signature_of(getattr(linattn, name)).parameters)))
    )
    if is_numpy(first, (*args, *given.values())):
        return by_tensors(partial(_of_tensors, name, group), first, args, given)
    if torch.compiler.is_compiling():
        return _in_graph(name, place_of(group), args, given)
    return called(name, group, args, given)


def _of_tensors(name: str, group: Any, *args: Any, **given: Any) -> Any:
    return called(name, group, args, given)


@torch.compiler.allow_in_graph
def _in_graph(name: str, place: Place, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """The compiler does not look into this. AOTAutograd traces it later, and sees the operators."""
    return unseen(called)(name, at(place), args, given)


def called(name: str, group: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """As `shared`. No compiler looks into it."""
    function = getattr(linattn, name)
    if are_there((*args, *given.values())):
        named = by_name(function, args, given)
        return by_parts(lambda own: called(name, group, (), own), name, group, named)
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
    call.wanted = wanted
    leaves = (*begun, *call.arrays.values())
    call.recorded = torch.is_grad_enabled() and any(x.requires_grad for x in leaves)
    o, *finals = _Recorded.apply(call, context, len(begun), *begun, *call.taken())
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
        return called(op, quiet, (), arguments | {"output_final_state": True})

    given = call.options | call.arrays
    o, finals = CARRIED[call.name](given, states, context, run)
    if wanted is None:
        return o, None
    if wanted == "all":
        finals = getattr(finals, "_make", tuple)(everywhere(context, S) for S in finals)
    return o, finals
