"""The short convolution of tokens that ranks share: W - 1 inputs travel to the right, a halo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import linattn
from linattn.autograd import real
from linattn.distributed._agreement import asks_for_states, prepared
from linattn.distributed._context import Context, Place, at, group_of, place_of
from linattn.distributed._exchange import everywhere, moved
from linattn.distributed._numpy import by_tensors, is_numpy
from linattn.distributed._order import unseen
from linattn.distributed._shared import called

__all__ = ["causal_conv1d"]


class _Inputs:
    """The arrays of a call, its options, and how their gradients are taken."""

    recorded = False

    def __init__(self, given: dict[str, Any], states: Any, is_packed: bool) -> None:
        names = ("x", "weight", "bias")
        self.arrays = {n: given[n] for n in names if n != "bias" or given[n] is not None}
        self.activation = given["activation"]
        for n, array in self.arrays.items():
            if not isinstance(array, Tensor):
                got = type(array).__name__
                raise TypeError(
                    f"{n}: expected a tensor of PyTorch's or an array of NumPy's, got {got}"
                )
        x = self.arrays["x"]
        if x.dim() != 3:
            raise ValueError(f"x: expected [B,T,D], got {tuple(x.shape)}")
        self.B, self.T, self.like = x.shape[0], x.shape[1], x.detach().new_empty(0)
        if states is not None and len(states) != 1:
            raise ValueError(f"initial_state: expected one tensor, got {len(states)}")
        edges = None
        if is_packed:
            count = 1 if states is None else len(states[0])
            edges = torch.zeros(count + 1, dtype=torch.int64, device=x.device)
        with torch.no_grad():
            linattn.causal_conv1d(
                x[:, :0],
                self.arrays["weight"],
                self.arrays.get("bias"),
                activation=self.activation,
                initial_state=None if states is None else states[0],
                cu_seqlens=edges,
            )
        self.width = self.arrays["weight"].shape[1] - 1

    def described(self) -> dict[str, str]:
        words = {"op": "causal_conv1d"}
        for n, array in self.arrays.items():
            words[f"dtype of {n}"] = str(array.dtype).removeprefix("torch.")
            shape = tuple(array.shape)
            words[f"shape of {n}"] = str((shape[0], shape[2]) if n == "x" else shape)
        return words | {"activation": repr(self.activation), "device": self.like.device.type}


def _takes(context: Context, width: int) -> list[list[int]]:
    """takes[r][j]: how many of rank j's last inputs rank r needs, all of them from the right end of
    a sequence. A rank where the sequence begins has all, its initial state before them."""
    lengths, takes = context.lengths, []
    for r, share in enumerate(context.shares):
        row, need = [0] * context.size, width if share.joins else 0
        for j in reversed(range(r)):
            has = min(lengths[j], width) if context.shares[j].passes else width
            row[j] = min(need, has)
            need -= row[j]
        takes.append(row)
    return takes


class _Moved(torch.autograd.Function):
    """The last inputs of this rank's sequence [n,rows,D] -> those [W-1,rows,D] before its own first
    tokens, from the ranks before; none where no sequence goes on from the left."""

    @staticmethod
    def forward(ctx: Any, tail: Tensor, context: Context, takes: list[list[int]]) -> Tensor:
        ctx.what = context, takes, tail.shape
        unit = tail[:0].new_empty(1, *tail.shape[1:]).numel()
        sends = [row[context.rank] for row in takes]
        flat = torch.cat([tail[len(tail) - n :].reshape(-1) for n in sends])
        gets = [n * unit for n in takes[context.rank]]
        found = moved(context, flat, gets, [n * unit for n in sends])
        return found.view(sum(takes[context.rank]), *tail.shape[1:])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Any, ...]:
        context, takes, shape = ctx.what
        d_tail = d.new_zeros(shape)
        unit = d_tail[:0].new_empty(1, *shape[1:]).numel()
        gets = [row[context.rank] * unit for row in takes]
        sends = [n * unit for n in takes[context.rank]]
        for piece in moved(context, d.reshape(-1), gets, sends).split(gets):  # in order of ranks
            if len(piece):
                d_tail[-(len(piece) // unit) :] += piece.view(-1, *shape[1:])
        return d_tail, None, None


def _tail(inputs: _Inputs, context: Context, given: Tensor | None) -> Tensor:
    """The last inputs of the sequence that goes on to the right [n,rows,D], as real numbers that
    are wide enough. Where it begins here, its initial state stands before them."""
    x, width, share = inputs.arrays["x"], inputs.width, context.share
    if not share.goes_on or not width:
        return x[:, :0].transpose(0, 1).to(real(x))
    edges = context.local_edges
    tail = x[:, 0 if edges is None else edges[-2] :][:, -width:].to(real(x))
    missing = width - tail.shape[1]
    if missing and not share.passes:
        before = tail.new_zeros(len(x), missing, x.shape[2])
        if given is not None:
            part = slice(None) if edges is None else slice(-1, None)
            before = given[part].mT[:, width - missing :].to(tail.dtype)
        tail = torch.cat([before, tail], 1)
    return tail.transpose(0, 1)


def _convolved(inputs: _Inputs, given: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
    """y, and the state after each part of a sequence."""
    takes = _takes(context, inputs.width)
    if not any(map(any, takes)):
        return _run(inputs, context, given, {})
    tail = _tail(inputs, context, given)
    for x in (*inputs.arrays.values(), *(() if given is None else (given,))):
        tail = tail + x.flatten()[:0].sum().to(tail.dtype)  # all ranks take part backwards
    halo = _Moved.apply(tail, context, takes).permute(1, 2, 0)  # type: ignore[no-untyped-call]
    if context.share.joins:
        return _run(inputs, context, _started(halo, given, context), {})
    if not halo.requires_grad:
        return _run(inputs, context, given, {})
    weight = inputs.arrays["weight"]
    return _run(
        inputs, context, given, {"weight": weight + halo.flatten()[:0].sum().to(weight.dtype)}
    )


def _started(halo: Tensor, given: Tensor | None, context: Context) -> Tensor:
    """The initial states, that of the first part from the left."""
    parts = context.share.parts
    if given is None:
        given = halo.new_zeros(len(halo) if context.edges is None else parts, *halo.shape[1:])
    if context.edges is not None and parts > 1:
        return torch.cat([halo, given[1:].to(halo.dtype)])
    return halo + given.flatten()[:0].sum().to(halo.dtype)  # its gradient is zero


def _run(
    inputs: _Inputs, context: Context, initial_state: Tensor | None, changed: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    done: tuple[Tensor, Tensor] = linattn.causal_conv1d(
        **inputs.arrays | changed,
        activation=inputs.activation,
        initial_state=initial_state,
        output_final_state=True,
        cu_seqlens=context.on(inputs.like.device),
    )
    return done


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    group: Any,
    activation: str | None = None,
    initial_state: Any = None,
    output_final_state: bool | str = False,
    cu_seqlens: Any = None,
    out: Any = None,
) -> tuple[Any, Any]:
    """:func:`linattn.causal_conv1d` of tokens that ranks share: W - 1 inputs travel to the right.

    Tensors may be NumPy's arrays on the host, as in all functions of this module.

    Parameters
    ----------
    x : Tensor [B,T,D]
        This rank's inputs.
    weight : Tensor [D,W]
    bias : Tensor [D], optional
    group : ProcessGroup, DeviceMesh of one dimension, Context, or None
        The ranks that share each row, in the order of its tokens. None is the default group.
    activation : "silu", "swish" or None
    initial_state : Tensor [S,D,W-1], optional
        A row for each part of a sequence on this rank. It counts where the sequence begins.
    output_final_state : bool or "all"
        True: the state after this rank's last token of each part. "all": the final states of all
        sequences, on all ranks.
    cu_seqlens : sequence of int, optional
        Of the WHOLE row, on the host. A :class:`Context` has its own.
    out :
        None.

    Returns
    -------
    y : Tensor [B,T,D]
    final_state : Tensor [S,D,W-1] or None

    Raises
    ------
    TypeError, ValueError
        As :func:`linattn.causal_conv1d`, and where the calls of the ranks do not match.
    RuntimeError
        torch.distributed is not initialised, or a rank is gone.

    Examples
    --------
    >>> import torch, torch.distributed as dist
    >>> import linattn.distributed as lad
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x, weight = torch.ones(1, 4, 1), torch.ones(1, 3)
    >>> lad.causal_conv1d(x, weight, group=None)[0].flatten().tolist()
    [1.0, 2.0, 3.0, 3.0]
    >>> dist.destroy_process_group()
    """
    given = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "activation": activation,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "cu_seqlens": cu_seqlens,
        "out": out,
    }
    if is_numpy(x, tuple(given.values())):
        return by_tensors(lambda **own: _shared(group, own), x, (), given)
    if torch.compiler.is_compiling():
        return _in_graph(place_of(group), given)
    return _shared(group, given)


@torch.compiler.allow_in_graph
def _in_graph(place: Place, given: dict[str, Any]) -> tuple[Any, Any]:
    found: tuple[Any, Any] = unseen(_shared)(at(place), given)
    return found


def _shared(group: Any, given: dict[str, Any]) -> tuple[Any, Any]:
    size = group.size if isinstance(group, Context) else group_of(group).size()
    if size == 1:
        alone: tuple[Any, Any] = called("causal_conv1d", group, (), given)
        return alone
    inputs, states, context = prepared(
        "causal_conv1d",
        given,
        group,
        lambda states, is_packed: _Inputs(given, states, is_packed),
        needs_lengths=True,
    )
    y, state = _convolved(inputs, None if states is None else states[0], context)
    wanted = asks_for_states("output_final_state", given["output_final_state"])
    if wanted is None:
        return y, None
    return y, everywhere(context, state) if wanted == "all" else state
