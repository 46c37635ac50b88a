"""PyTorch: how many operations the operators of ours count for torch.utils.flop_counter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch.utils.flop_counter import register_flop_formula

from linattn.cost import flops

__all__ = ["count"]


def _sizes(q: Sequence[int], v: Sequence[int]) -> dict[str, int]:
    """By the shapes of a pass, [B,T,H,K] or of one head [T,K], or of a step, which has no T."""
    step, alone = len(q) % 2, len(q) < 3
    T = 1 if step else q[-2 if alone else 1]
    B, H, HV = (1, 1, 1) if alone else (q[0], q[-2], v[-2])
    return {"B": B, "T": T, "H": H, "HV": HV, "K": q[-1], "V": v[-1]}


def count(
    operator: Any,
    op: str,
    names: Sequence[str],
    passes: Literal["forward", "backward"] = "forward",
) -> None:
    """By linattn.flops, of a call whose arguments have these names. Packed sequences are counted
    as one sequence. A step has no mode."""

    def formula(*arguments: Any, **_: Any) -> int:
        given = dict(zip(names, arguments, strict=False))
        features = given["features"]
        return flops(
            op,
            **_sizes(given["q"], given["v"]),
            mode=given.get("mode", "recurrent"),
            chunk_size=given.get("chunk_size"),
            normalize=features is not None and features[4] != 0,
            x=given["x"] is not None and op != "dplr_delta_rule",
            passes=passes,
        )

    register_flop_formula(operator.overloadpacket)(formula)
