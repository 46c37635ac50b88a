"""Layers whose recurrence is written out in their forward method, which is replaced whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn import autograd, ops
from linattn.compat.transformers._shared import is_step, refuse_others, state_of
from linattn.composed.mlstm import checked_step as checked_mlstm_step
from linattn.composed.mlstm import mlstm
from linattn.features import is_recorded
from linattn.scans import rg_lru
from linattn.scans.rg_lru import checked_step as checked_rg_lru_step

__all__ = ["lightning_attention", "matrix_lstm", "real_gated_lru"]


def _lightning(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The op and its next state. One token without gradients is a step."""
    watched = autograd.is_watched("lightning_attention", (q, k, v, slopes, state))
    if state is None or q.shape[1] != 1 or watched:
        return ops.lightning_attention(
            q, k, v, slopes, scale=1, initial_state=state_of(q, state), output_final_state=True
        )
    after = state_of(q, state, copy=True)  # a step writes it
    o = ops.lightning_attention_step(q[:, 0], k[:, 0], v[:, 0], slopes, state=after, scale=1)
    return o[:, None], after


def lightning_attention(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Any = None,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """MiniMax's layer, by :func:`linattn.lightning_attention`.

    The projections, the norm and the output gate are the layer's own. The cache keeps the state in
    float32 (float64 for float64 inputs). transformers before 5.24 calls it past_key_values.
    """
    refuse_others(others)
    cache = past_key_values if cache is None else cache
    B, T, _ = hidden_states.shape
    qkv = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None:
        qkv = (qkv * attention_mask[:, :, None]).to(qkv.dtype)
    q, k, v = qkv.reshape(B, T, layer.num_attention_heads, -1).split(layer.head_dim, 3)
    before = None
    if cache is not None:
        before = cache.get_linear_cache(layer.layer_idx)
    o, state = _lightning(q, k, v, layer.slope_rate.flatten().float(), before)
    o = layer.norm(o.reshape(B, T, -1))
    o = layer.out_proj(torch.sigmoid(layer.output_gate(hidden_states)) * o)
    if cache is not None:
        cache.set_linear_cache(layer.layer_idx, state)
    return o, state


def _state_of_mlstm(q: Tensor, c: Any, n: Any, m: Any, copy: bool) -> Any:
    """C, n and m [B,H], as the op takes them; None if none of them is given."""
    if c is None and n is None and m is None:
        return None
    for name, x in (("c_initial", c), ("n_initial", n), ("m_initial", m)):
        if x is None:
            raise ValueError(f"{name}: expected a tensor beside the others of the state, got None")
    return tuple(state_of(q, x, copy=copy) for x in (c, n, m[..., 0]))


def matrix_lstm(
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool | None = None,
    mode: str | None = None,
) -> Any:
    """xLSTM's cell, by :func:`linattn.mlstm`.

    query, key [B,H,T,K], value [B,H,T,V], igate, fgate [B,H,T]. Returns h [B,H,T,V], or (h, (C, n,
    m [B,H,1])): in inference always. A call of any length goes as it is, without padding.
    """
    mode = layer.config.mode if mode is None else mode
    if "inference" in mode:
        return_last_states = True
    elif return_last_states is None:
        return_last_states = layer.config.return_last_states
    real = torch.float64 if query.dtype == torch.float64 else torch.float32
    rows = (query, key.to(query.dtype), value.to(query.dtype), igate.to(real), fgate.to(real))
    eps = float(layer.config.eps)
    given = (c_initial, n_initial, m_initial)
    if query.shape[2] == 1 and c_initial is not None and is_step(c_initial, *rows, *given):
        state = _state_of_mlstm(query, *given, copy=True)  # a step writes it
        with torch.no_grad():
            h = checked_mlstm_step(*(x[:, :, 0] for x in rows), state=state, eps=eps)[:, :, None]
    else:
        state = _state_of_mlstm(query, *given, copy=False)
        h, state = mlstm(
            *(x.transpose(1, 2) for x in rows),
            eps=eps,
            initial_state=state,
            output_final_state=return_last_states,
        )
        h = h.transpose(1, 2)
    if not return_last_states:
        return h
    C, n, m = state
    return h, (C, n, m[..., None])


def _gates(x: Tensor, *of_gates: tuple[Tensor, Tensor]) -> Any:
    """sigmoid of x [B,T,D] times the matrix of each block of channels, for (weight, bias)."""
    blocks = x.reshape(-1, *of_gates[0][0].shape[:2]).transpose(0, 1)
    for weight, bias in of_gates:
        made = torch.baddbmm(bias[:, None], blocks, weight)
        yield torch.sigmoid(made.transpose(0, 1).reshape(x.shape))


def real_gated_lru(layer: Any, activations: Tensor, position_ids: Tensor) -> Tensor:
    """RecurrentGemma's unit, by :func:`linattn.rg_lru`. A position of 0 begins a new sequence."""
    r, i = _gates(
        activations,
        (layer.recurrent_gate_weight, layer.recurrent_gate_bias),
        (layer.input_gate_weight, layer.input_gate_bias),
    )
    Lambda, before = layer.recurrent_param, layer.recurrent_states
    watched = any(map(is_recorded, (activations, r, i, Lambda))) or torch.compiler.is_compiling()
    if before is None or activations.shape[1] != 1 or watched:
        reset = (position_ids == 0).expand(activations.shape[:2])
        y, layer.recurrent_states = rg_lru(
            activations,
            r,
            i,
            Lambda,
            reset=reset,
            initial_state=state_of(activations, before),
            output_final_state=True,
        )
        return y
    after = state_of(activations, before, copy=True)  # a step writes it
    first = position_ids[:, 0] == 0
    if first.is_cpu and not first.any():
        first = None  # a GPU would wait for the answer
    elif len(first) != len(after):
        first = first.expand(len(after))
    x, r, i = activations[:, 0], r[:, 0], i[:, 0]
    y = checked_rg_lru_step(after, x, r, i, Lambda, reset=first)
    layer.recurrent_states = after
    return y[:, None]
