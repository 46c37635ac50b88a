"""The gated delta rule and Kimi delta attention, as the layers of transformers call them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from linattn import autograd, ops
from linattn.compat.transformers._shared import Result, sequences, state_of

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_kda",
    "recurrent_gated_delta_rule",
    "recurrent_kda",
]


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    chunk_size: int | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> Result:
    """:func:`linattn.gated_delta_rule`, chunk by chunk.

    query, key [B,T,H,K], value [B,T,HV,V], log decays g and beta [B,T,HV]; states [B,HV,K,V],
    float32 (float64 for float64 inputs). Of `others` those that are about other parts of a model
    (``num_items_in_batch``, ``position_ids``, ...) make no difference; any other raises ValueError.

    Examples
    --------
    Arguments for other parts of a model make no difference:

    >>> import torch
    >>> from linattn.compat.transformers import chunk_gated_delta_rule
    >>> q, k, v = torch.randn(3, 1, 10, 2, 4, dtype=torch.float64)  # [B,T,H,K]
    >>> g, beta = -torch.rand(1, 10, 2), torch.rand(1, 10, 2)  # [B,T,HV]
    >>> at = torch.arange(10)[None]
    >>> o, state = chunk_gated_delta_rule(q, k, v, g, beta, position_ids=at, use_cache=True)
    >>> tuple(o.shape), state is None
    ((1, 10, 2, 4), True)
    """
    return ops.gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        scale=scale,
        initial_state=state_of(query, initial_state),
        output_final_state=output_final_state,
        cu_seqlens=sequences(cu_seqlens, others),
        chunk_size=chunk_size,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> Result:
    """:func:`chunk_gated_delta_rule`, token by token.

    Examples
    --------
    >>> import torch
    >>> from linattn.compat.transformers import chunk_gated_delta_rule, recurrent_gated_delta_rule
    >>> q, k, v = torch.randn(3, 1, 10, 2, 4, dtype=torch.float64)  # [B,T,H,K]
    >>> g, beta = -torch.rand(1, 10, 2), torch.rand(1, 10, 2)  # [B,T,HV]
    >>> options = {"use_qk_l2norm_in_kernel": True}
    >>> o, _ = recurrent_gated_delta_rule(q, k, v, g, beta, **options)
    >>> torch.allclose(o, chunk_gated_delta_rule(q, k, v, g, beta, **options)[0])
    True
    """
    return _recurrent(
        "gated_delta_rule",
        query,
        key,
        value,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        sequences(cu_seqlens, others),
    )


def chunk_kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    chunk_size: int | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> Result:
    """:func:`linattn.kda`: :func:`chunk_gated_delta_rule` with log decays g [B,T,HV,K].

    Examples
    --------
    >>> import torch
    >>> from linattn.compat.transformers import chunk_kda
    >>> q, k, v = torch.randn(3, 1, 10, 2, 4, dtype=torch.float64)  # [B,T,H,K]
    >>> g, beta = -torch.rand(1, 10, 2, 4), torch.rand(1, 10, 2)  # [B,T,HV,K] and [B,T,HV]
    >>> o, state = chunk_kda(q, k, v, g, beta, output_final_state=True)
    >>> tuple(state.shape), state.dtype
    ((1, 2, 4, 4), torch.float64)
    """
    return ops.kda(
        query,
        key,
        value,
        g,
        beta,
        scale=scale,
        initial_state=state_of(query, initial_state),
        output_final_state=output_final_state,
        cu_seqlens=sequences(cu_seqlens, others),
        chunk_size=chunk_size,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )


def recurrent_kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> Result:
    """:func:`chunk_kda`, token by token.

    Examples
    --------
    The next token after a prompt. The state that is given stays as it is:

    >>> import torch
    >>> from linattn.compat.transformers import recurrent_kda
    >>> q, k, v = torch.randn(3, 1, 10, 2, 4, dtype=torch.float64)  # [B,T,H,K]
    >>> g, beta = -torch.rand(1, 10, 2, 4), torch.rand(1, 10, 2)  # [B,T,HV,K] and [B,T,HV]
    >>> first, last = ([x[:, t] for x in (q, k, v, g, beta)] for t in (slice(9), slice(9, 10)))
    >>> _, state = recurrent_kda(*first, output_final_state=True, use_qk_l2norm_in_kernel=True)
    >>> o, _ = recurrent_kda(*last, initial_state=state, use_qk_l2norm_in_kernel=True)
    >>> torch.allclose(o, recurrent_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0][:, 9:])
    True
    """
    return _recurrent(
        "kda",
        query,
        key,
        value,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        sequences(cu_seqlens, others),
    )


def _recurrent(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    qk_l2norm: bool,
    cu_seqlens: Tensor | None,
) -> Result:
    """A token at a time. One token without gradients is a step, in half the time."""
    if (
        initial_state is None
        or query.shape[1] != 1
        or not output_final_state
        or cu_seqlens is not None
        or autograd.is_watched(op, (query, key, value, g, beta, initial_state))
    ):
        return getattr(ops, op)(
            query,
            key,
            value,
            g,
            beta,
            scale=scale,
            initial_state=state_of(query, initial_state),
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            mode="recurrent",
            qk_l2norm=qk_l2norm,
        )
    q, k, v, g, beta = (  # a step copies nothing
        x[:, 0] if x.stride(-1) == 1 else x[:, 0].contiguous() for x in (query, key, value, g, beta)
    )
    state = state_of(query, initial_state, copy=True)  # a step writes it
    step = getattr(ops, f"{op}_step")
    o = step(q, k, v, g, beta, state=state, scale=scale, qk_l2norm=qk_l2norm)
    return o[:, None], state
