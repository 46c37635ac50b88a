"""PyTorch: how many operations the operators of ours count for torch.utils.flop_counter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch.utils.flop_counter import register_flop_formula

from linattn.cost import flops

__all__ = ["count_pass", "count_step"]

Shape = Sequence[int]


def _sizes(q: Shape, v: Shape) -> dict[str, int]:
    """Without an axis of heads there is one, and one row."""
    if len(q) == 4:
        return dict(zip(("B", "T", "H", "K"), q, strict=True)) | {"HV": v[2], "V": v[3]}
    return {"B": 1, "T": q[0], "H": 1, "K": q[1], "HV": 1, "V": v[1]}


def count_pass(
    operator: Any,
    op: str,
    names: Sequence[str],
    passes: Literal["forward", "backward"],
) -> None:
    """By linattn.flops, of a call whose arguments have these names. Packed sequences are counted
    as one sequence."""

    def count(*arguments: Any, **_: Any) -> int:
        given = dict(zip(names, arguments, strict=False))
        features = given["features"]
        return flops(
            op,
            **_sizes(given["q"], given["v"]),
            mode=given["mode"],
            chunk_size=given["chunk_size"],
            normalize=features is not None and features[4] != 0,
            x=given["x"] is not None and op != "dplr_delta_rule",
            passes=passes,
        )

    _register(operator, count)


def count_step(operator: Any, op: str, names: Sequence[str]) -> None:
    def count(*arguments: Any, **_: Any) -> int:
        given = dict(zip(names, arguments, strict=False))
        q, v, features = given["q"], given["v"], given["features"]
        one_head = len(q) == 1
        B, H, K = (1, 1, *q) if one_head else q
        return flops(
            op,
            T=1,
            K=K,
            V=v[-1],
            B=B,
            H=H,
            HV=1 if one_head else v[1],
            mode="recurrent",
            normalize=features is not None and features[4] != 0,
            x=given["x"] is not None and op != "dplr_delta_rule",
        )

    _register(operator, count)


def _register(operator: Any, count: Callable[..., int]) -> None:
    register_flop_formula(operator.overloadpacket)(count)
