"""Titans in batches of several tokens, on from any token, one in the middle of a batch too.

The op begins a batch with each call. So a state has the three (M, Y, M0). M0 is the memory that the
open batch began from, and its other tokens predict from it. Where no batch is open, M0 is M. A call
cuts every sequence in three: the head ends the open batch, the body is whole batches, and the tail
opens one.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import ops
from linattn.nn._blocks import State, real_dtype, sequence_of

Tokens = dict[str, Tensor]  # the arrays of titans with an axis T, by their names
Memory = tuple[Tensor, Tensor, Tensor]  # M, Y, M0 [N,HV,K,V]


class Part(NamedTuple):
    """Some tokens of every sequence: where they are along T, how many, where sequences begin."""

    where: slice | Tensor
    length: int
    cu_seqlens: Tensor | None

    def of(self, tokens: Tokens) -> Tokens:
        return {name: a[:, self.where] for name, a in tokens.items()}


def forward(
    tokens: Tokens, state: State | None, cu_seqlens: Tensor | None, batch: int, **options: Any
) -> tuple[Tensor, Memory]:
    """o [B,T,HV,V] of N sequences, on from a state, and the memory after them."""
    (B, T), v = tokens["q"].shape[:2], tokens["v"]
    memory: Any = None
    M0 = done = None
    if state is not None:
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        (*memory, M0), position = opened(state, N, batch)
        done = position % batch  # how many tokens of the open batch
    tokens, (head, body, tail), back = cut(tokens, done, cu_seqlens, batch)

    def run(part: Part, x: Tokens) -> None:
        nonlocal memory
        o, memory = ops.titans(
            **x,
            **options,
            batch=batch,
            initial_state=memory,
            output_final_state=True,
            cu_seqlens=part.cu_seqlens,
        )
        reads.append(o.to(v.dtype))

    reads: list[Tensor] = []
    if head.length and M0 is not None:
        run(head, predicting_from(M0, memory[0], head.of(tokens), head.cu_seqlens))
    run(body, body.of(tokens))  # of no tokens too: the op looks at the arguments
    if M0 is None or done is None:
        M0 = memory[0].clone()  # a step writes it, the backward pass of the tail reads M
    else:
        length = T if cu_seqlens is None else cu_seqlens.diff()
        M0 = where_ended(done + length >= batch, memory[0], M0)
    if tail.length:
        run(tail, tail.of(tokens))
    o = torch.cat(reads, 1) if len(reads) > 1 else reads[0]
    return o if back is None else o[:, back].reshape(v.shape), (*memory, M0)


def step(tokens: Tokens, state: State, batch: int, **options: Any) -> Tensor:
    """o [N,HV,V] of a token [N,...] of each sequence; the memory moves on in place."""
    v = tokens["v"]
    (M, Y, M0), position = opened(state, v.shape[0], batch)
    x = {name: a[:, None] for name, a in tokens.items()}
    x = {name: a[:, 0] for name, a in predicting_from(M0, M, x, None).items()}
    o = ops.titans_step(**x, **options, state=(M, Y))
    M0.copy_(where_ended((position + 1) % batch == 0, M, M0))
    return o.to(v.dtype)


def opened(state: State, N: int, batch: int) -> tuple[Memory, Tensor]:
    """(M, Y, M0) and the tokens so far [N], of a state of this layer."""
    memory, position = state.memory, state.position
    if not isinstance(memory, tuple) or len(memory) != 3 or position is None:
        count = len(memory) if isinstance(memory, tuple) else 1
        raise ValueError(
            f"state: expected a memory (M, Y, M0) and a position, as batch = {batch} needs, got "
            f"{count} in the memory and {'no' if position is None else 'a'} position"
        )
    if position.shape != (N,):
        raise ValueError(f"state: expected that of {N} sequences, got that of {len(position)}")
    return memory, position


def where_ended(ended: Tensor, M: Tensor, M0: Tensor) -> Tensor:
    return torch.where(ended[:, None, None, None], M, M0)


def predicting_from(M0: Tensor, M: Tensor, x: Tokens, cu_seqlens: Tensor | None) -> Tokens:
    """The tokens with v + (M - M0)'k in the place of v, for an op that predicts from M.

    Its error is then v - M0'k. They are no narrower than float32, as the memory is: the op rounds
    nothing to the dtype of v that it would not round in one call.
    """
    real = real_dtype(x["v"])
    q, k, v = (x[name].to(real) for name in ("q", "k", "v"))
    moved, _ = ops.linear_attention(
        k,
        torch.zeros_like(k),
        torch.zeros_like(v),
        feature_map="identity",
        normalize=False,
        scale=1.0,
        initial_state=M.to(real) - M0.to(real),
        cu_seqlens=cu_seqlens,
        qk_l2norm=True,
    )
    return x | {"q": q, "k": k, "v": v + moved}


# ---- head, body and tail ----


def cut(
    tokens: Tokens, done: Tensor | None, cu_seqlens: Tensor | None, batch: int
) -> tuple[Tokens, tuple[Part, ...], Tensor | None]:
    """The tokens, perhaps packed; their three parts; what puts these in order, None if they are.

    With `done` or cu_seqlens the host waits for the device: it must know the sizes of the parts.
    """
    B, T = tokens["q"].shape[:2]
    if cu_seqlens is None:
        known = {0} if done is None else set(done.tolist())
        if len(known) < 2:
            return tokens, parts_of_rows(T, sum(known), batch), None
        tokens = {name: a.flatten(0, 1)[None] for name, a in tokens.items()}
        cu_seqlens = torch.arange(B + 1, device=tokens["q"].device) * T
    return tokens, *parts_of_packed(tokens["q"].shape[1], done, cu_seqlens, batch)


def parts_of_rows(T: int, done: int, batch: int) -> tuple[Part, ...]:
    """Of sequences of T tokens each, with the open batch at the same token."""
    head = min(-done % batch, T)
    edges = (0, head, head + (T - head) // batch * batch, T)
    return tuple(Part(slice(i, j), j - i, None) for i, j in pairwise(edges))


def parts_of_packed(
    T: int, done: Tensor | None, cu_seqlens: Tensor, batch: int
) -> tuple[tuple[Part, ...], Tensor]:
    """Of packed sequences; and the order of the tokens behind one another."""
    edges = cu_seqlens.to(torch.long)
    lengths = edges.diff()
    head = torch.minimum(-(torch.zeros_like(lengths) if done is None else done) % batch, lengths)
    body = (lengths - head) // batch * batch
    wrong = (edges[0] != 0) | (edges[-1] != T) | (lengths < 0).any()
    is_wrong, *sizes = torch.stack([wrong.long(), head.sum(), body.sum()]).tolist()
    if is_wrong:
        raise ValueError(
            f"cu_seqlens: expected to rise from 0 to T = {T}, got {cu_seqlens.tolist()}"
        )
    sizes.append(T - sum(sizes))
    token = torch.arange(T, device=edges.device)
    n = sequence_of(token, edges)
    at = token - edges[n]
    order = ((at >= head[n]).long() + (at >= (head + body)[n])).argsort(stable=True)
    parts = tuple(
        Part(where, size, F.pad(own.cumsum(0), (1, 0)))
        for where, size, own in zip(
            order.split(sizes), sizes, (head, body, lengths - head - body), strict=True
        )
    )
    return parts, order.argsort()
