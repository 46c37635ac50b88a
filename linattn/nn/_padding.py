"""Rows with padding: a layer reads the real tokens alone, packed behind one another."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from linattn.ops._padding import Tokens


class Padding(Tokens):
    """The real tokens of a layer's x [B,T,...]: those where the mask [B,T] is not 0."""

    def __init__(self, layer: Any, attention_mask: Any, x: Tensor) -> None:
        if layer.process_group is not None:
            raise ValueError("attention_mask: expected None in a layer with a process group")
        if not isinstance(attention_mask, Tensor):
            name = type(attention_mask).__name__
            raise TypeError(f"attention_mask: expected a torch.Tensor, got {name}")
        if attention_mask.shape != x.shape[:2]:
            raise ValueError(
                f"attention_mask: expected [B,T] = {tuple(x.shape[:2])}, "
                f"got {tuple(attention_mask.shape)}"
            )
        super().__init__(attention_mask.to(x.device) != 0)


def without_padding(
    layer: Any,
    attention_mask: Any,
    x: Tensor,
    state: Any,
    cu_seqlens: Any,
    v_first: Tensor | None = None,
    **options: Any,
) -> Any:
    """A layer's forward pass of the real tokens of each row."""
    if cu_seqlens is not None:
        raise ValueError("attention_mask: expected None with cu_seqlens, got a mask")
    padding = Padding(layer, attention_mask, x)
    if v_first is not None:
        options["v_first"] = padding.packed(v_first)
    y, after, *made = layer.forward(padding.packed(x), state, padding.cu_seqlens, **options)
    return (padding.spread(y), after, *map(padding.spread, made))
