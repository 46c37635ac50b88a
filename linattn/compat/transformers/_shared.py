"""The arguments that all functions of this package have in common."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from linattn.features import is_recorded

Result: TypeAlias = "tuple[Tensor, Tensor | None]"

# Arguments that a model hands to all its parts, and that none of the functions here uses.
FOR_OTHERS = frozenset(
    (
        "cu_seq_lens_k",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "use_cache",
    )
)


def refuse_others(others: dict[str, Any]) -> None:
    for name, value in others.items():
        causal = name == "is_causal" and value is True  # as all of these are
        if value is not None and name not in FOR_OTHERS and not causal:
            got = repr(value) if isinstance(value, bool | int | float | str) else type(value)
            raise ValueError(f"{name}: not supported by linattn.compat.transformers, got {got}")


def _packed(cu_seqlens: Any, others: dict[str, Any]) -> tuple[Any, Any]:
    """The edges of packed sequences and the number of each token's, once every other argument is
    known to be harmless."""
    packed = others.pop("cu_seq_lens_q", None)  # what becomes cu_seqlens in some layers
    seq_idx = others.pop("seq_idx", None)
    refuse_others(others)
    return packed if cu_seqlens is None else cu_seqlens, seq_idx


def sequences(cu_seqlens: Any, others: dict[str, Any]) -> Any:
    """The edges of packed sequences, or None."""
    edges, seq_idx = _packed(cu_seqlens, others)
    # The convolution before this knows them apart by seq_idx, or refuses: by that alone.
    if edges is not None and seq_idx is None:
        raise ValueError(
            "cu_seqlens: expected seq_idx beside it, without which the layer's convolution mixes "
            "packed sequences"
        )
    if edges is None and seq_idx is not None:
        raise ValueError("seq_idx: expected cu_seqlens beside it, got None")
    return edges


def either(cu_seqlens: Any, others: dict[str, Any]) -> Any:
    """The edges of packed sequences, or None: as they are, or from the number of each token's
    sequence, seq_idx [1,T], which the host then reads."""
    edges, seq_idx = _packed(cu_seqlens, others)
    if edges is not None or seq_idx is None:
        return edges
    if seq_idx.dim() != 2 or seq_idx.shape[0] != 1:
        raise ValueError(f"seq_idx: expected [1,T], got {tuple(seq_idx.shape)}")
    starts = torch.nonzero(torch.diff(seq_idx[0]))[:, 0] + 1
    ends = starts.new_tensor([0]), starts, starts.new_tensor([seq_idx.shape[1]])
    return torch.cat(ends)


def state_of(query: Tensor, state: Tensor | None, copy: bool = False) -> Any:
    """A state as the ops take it: float32, or float64 beside float64."""
    if state is None:
        return None
    real = torch.float64 if query.dtype == torch.float64 else torch.float32
    kept = torch.contiguous_format if copy else torch.preserve_format
    return state.to(device=query.device, dtype=real, copy=copy, memory_format=kept)


def is_step(state: Tensor, x: Tensor, *arrays: Tensor | None, plain: bool = False) -> bool:
    """Can a step write this state in place? Else a pass over one token makes the next one.

    plain: the state holds inputs as they are, and may have their dtype.
    """
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    recorded = any(a is not None and is_recorded(a) for a in (x, *arrays))
    fits = state.dtype in (real, torch.bfloat16) or (plain and state.dtype == x.dtype)
    return fits and not recorded and not torch.compiler.is_compiling()
