"""The short convolution of tokens that ranks share: W - 1 inputs travel to the right, a halo."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import linattn
from linattn.autograd import real
from linattn.distributed._agreement import asks_for_states, prepared
from linattn.distributed._context import Context, group_of, not_traced
from linattn.distributed._exchange import everywhere, moved
from linattn.distributed._shared import shared

__all__ = ["causal_conv1d"]


class _Inputs:
    """The arrays of a call, its options, and how their gradients are taken."""

    def __init__(self, given: dict[str, Any], states: Any, is_packed: bool) -> None:
        names = ("x", "weight", "bias")
        self.arrays = {n: given[n] for n in names if given[n] is not None}
        self.activation = given["activation"]
        for n, array in self.arrays.items():
            if not isinstance(array, Tensor):
                got = type(array).__name__
                raise TypeError(f"{n}: expected a tensor of PyTorch's, got {got}")
        x = self.arrays["x"]
        if x.dim() != 3:
            raise ValueError(f"x: expected [B,T,D], got {tuple(x.shape)}")
        self.B, self.T, self.like = x.shape[0], x.shape[1], x.detach().new_empty(0)
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


class _Convolved(torch.autograd.Function):
    """y and the state after this rank's tokens of each part. `given` is its initial state."""

    @staticmethod
    def forward(
        ctx: Any, inputs: _Inputs, context: Context, given: Tensor | None, *arrays: Tensor
    ) -> Any:
        x, weight, bias = (*arrays, None)[:3]
        share, width = context.share, inputs.width
        edges, local = context.on(x.device), context.local_edges
        begin = 0 if local is None or len(local) < 2 else local[-2]
        rows = len(x)
        wide = real(x)
        ctx.part = part = slice(None) if local is None else slice(-1, None)
        ctx.takes = takes = _takes(context, width)
        channels = x.shape[2]

        ctx.tail = 0  # this rank's inputs that others may need
        flat = x.new_empty(0, dtype=wide)
        if share.goes_on:
            tail = x[:, begin:][:, -width:] if width else x[:, :0]
            tail = tail.to(wide)
            ctx.own = tail.shape[1]  # of which so many are tokens
            if not share.passes and ctx.own < width:
                before = tail.new_zeros(rows, width, channels)
                if given is not None:
                    before = given[part].mT.to(wide)
                tail = torch.cat([before[:, ctx.own :], tail], 1)
            ctx.tail = tail.shape[1]
            mine = tail.transpose(0, 1)
            sends = [takes[r][context.rank] for r in range(context.size)]
            flat = torch.cat([mine[len(mine) - n :].reshape(-1) for n in sends])
        start = given
        unit = rows * channels
        if any(map(any, takes)):
            gets = [n * unit for n in takes[context.rank]]
            out = [takes[r][context.rank] * unit for r in range(context.size)]
            found = moved(context, flat, gets, out)
            if share.joins:
                halo = found.view(width, rows, channels).permute(1, 2, 0)
                start = halo
                if local is not None and share.parts > 1:
                    others = halo.new_zeros(share.parts - 1, channels, width)
                    start = torch.cat([halo, others if given is None else given[1:].to(wide)])
        y, state = linattn.causal_conv1d(
            x,
            weight,
            bias,
            activation=inputs.activation,
            initial_state=start,
            output_final_state=True,
            cu_seqlens=edges,
        )
        ctx.what = inputs, context, unit, begin, given is not None
        ctx.save_for_backward(start, *arrays)
        ctx.set_materialize_grads(False)
        return y, state

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_state: Tensor | None) -> tuple[Any, ...]:
        inputs, context, unit, begin, was_given = ctx.what
        start, *arrays = ctx.saved_tensors
        x, weight, bias = (*arrays, None)[:3]
        share, takes, width = context.share, ctx.takes, inputs.width
        rows, _, channels = x.shape
        dy = torch.zeros_like(x) if dy is None else dy.contiguous()
        found = linattn.causal_conv1d_backward(
            dy,
            x,
            weight,
            bias,
            activation=inputs.activation,
            initial_state=start,
            d_final_state=d_state,
            cu_seqlens=context.on(x.device),
        )
        dx: Any = found.dx
        d_start: Any = found.d_initial_state
        if d_start is not None:
            d_start = d_start.clone()
        if any(map(any, takes)):
            flat = dx.new_empty(0, dtype=real(x))
            if share.joins:
                d_halo = d_start if context.edges is None else d_start[:1]
                flat = d_halo.permute(2, 0, 1).reshape(-1)
            gets = [takes[r][context.rank] * unit for r in range(context.size)]
            sends = [n * unit for n in takes[context.rank]]
            back = moved(context, flat, gets, sends)
            if share.goes_on:
                d_tail = back.new_zeros(ctx.tail, rows, channels)
                for piece in back.split(gets):  # in the order of the ranks
                    if len(piece):
                        d_tail[-(len(piece) // unit) :] += piece.view(-1, rows, channels)
                d_tail = d_tail.transpose(0, 1)
                own = ctx.own
                if own:
                    dx = dx.clone()
                    end = dx[:, begin:][:, -own:]
                    end.copy_(end.to(d_tail.dtype) + d_tail[:, ctx.tail - own :])
                if was_given and not share.passes and own < width:
                    d_start[ctx.part][:, :, own:] += d_tail[:, : width - own].mT
        d_given = None
        if was_given:
            d_given = d_start
            if share.joins:
                d_given[slice(None) if context.edges is None else slice(0, 1)] = 0
        gradients = (dx, found.dweight, found.dbias)[: len(arrays)]
        return (None, None, d_given, *gradients)


@not_traced  # type: ignore[untyped-decorator]
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
    size = group.size if isinstance(group, Context) else group_of(group).size()
    if size == 1:
        alone: tuple[Any, Any] = shared("causal_conv1d", group, (), given)
        return alone
    inputs, states, context = prepared(
        "causal_conv1d",
        given,
        group,
        lambda states, is_packed: _Inputs(given, states, is_packed),
        needs_lengths=True,
    )
    begun = None if states is None else states[0]
    arrays, inputs.arrays = tuple(inputs.arrays.values()), {}
    y, state = _Convolved.apply(inputs, context, begun, *arrays)
    wanted = asks_for_states("output_final_state", output_final_state)
    if wanted is None:
        return y, None
    return y, everywhere(context, state) if wanted == "all" else state
