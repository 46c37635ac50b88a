"""The short convolutions in front of the recurrences, as the layers of transformers call them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from linattn.compat.transformers._shared import either, is_step, refuse_others
from linattn.convolution import causal_conv1d, causal_conv1d_step
from linattn.features import cast

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]

_SILU = {"silu": "silu", "swish": "silu"}


def _finished(y: Tensor, activation: str | None, dtype: torch.dtype) -> Tensor:
    """y after an activation that the convolution does not have."""
    if activation is not None and activation not in _SILU:
        y = import_module("transformers.activations").ACT2FN[activation](y)
    return cast(y, dtype)


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """:func:`linattn.causal_conv1d` of an array [B,D,T], which is not copied for that.

    hidden_states [B,D,T], weight [D,W], bias [D] -> y [B,D,T]. seq_idx [1,T] keeps packed sequences
    apart, and so does cu_seqlens. An activation but silu is transformers' own.

    Examples
    --------
    >>> import torch
    >>> from linattn.compat.transformers import causal_conv1d_fn
    >>> x, weight = torch.tensor([[[1.0, 10.0, 100.0]]]), torch.tensor([[2.0, 1.0]])
    >>> causal_conv1d_fn(x, weight).tolist()
    [[[1.0, 12.0, 120.0]]]
    >>> causal_conv1d_fn(x, weight, seq_idx=torch.tensor([[0, 0, 1]])).tolist()
    [[[1.0, 12.0, 100.0]]]
    """
    x, edges = hidden_states, either(cu_seqlens, others)
    silu = _SILU.get(activation or "")
    y, _ = causal_conv1d(cast(x, weight.dtype).mT, weight, bias, activation=silu, cu_seqlens=edges)
    return _finished(y, activation, x.dtype).mT


def causal_conv1d_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **others: Any,
) -> Tensor:
    """:func:`linattn.causal_conv1d_step`: the next tokens, the state changes in place.

    hidden_states [B,D,T], conv_state [B,D,S], weight [D,W], bias [D] -> y [B,D,T]. The state is the
    last S inputs, of which the convolution reads W - 1.

    Examples
    --------
    >>> import torch
    >>> from linattn.compat.transformers import causal_conv1d_update
    >>> state, weight = torch.tensor([[[7.0, 1.0]]]), torch.tensor([[2.0, 1.0]])
    >>> causal_conv1d_update(torch.tensor([[[10.0]]]), state, weight).tolist(), state.tolist()
    ([[[12.0]]], [[[1.0, 10.0]]])
    """
    refuse_others(others)
    x, silu = hidden_states, _SILU.get(activation or "")
    given = cast(x, weight.dtype)
    older = conv_state.shape[2] - (weight.shape[1] - 1)
    steps = x.shape[2] == 1 and older >= 0
    if steps and is_step(conv_state, given, weight, bias, plain=True):
        y = causal_conv1d_step(given[..., 0], weight, bias, state=conv_state, activation=silu)
        return _finished(y, activation, x.dtype)[..., None]
    kept = torch.cat([conv_state, cast(x, conv_state.dtype)], -1)
    y, _ = causal_conv1d(
        given.mT,
        weight,
        bias,
        activation=silu,
        initial_state=cast(conv_state[..., older:], weight.dtype),
    )
    with torch.no_grad():
        conv_state.copy_(kept[..., -conv_state.shape[2] :])
    return _finished(y, activation, x.dtype).mT
