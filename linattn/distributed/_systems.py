"""The systems of linattn.composed that ranks can share: what a map of their tokens needs to know.

A system turns the state S before its tokens into M S + X, as the op under it does. The carried ones
have no such map: their ranks tell each other more than a state.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SYSTEMS", "System"]


class System(NamedTuple):
    """A system by its arguments."""

    value: str  # what is written
    op: str  # what it calls
    initial: str = "initial_state"
    final: str = "output_final_state"
    state_v_first: bool = False  # are states always [N,HV,V,K]?
    refused: tuple[str, ...] = ()  # options that know of no other ranks
    is_carried: bool = False  # is it an op of arrays that other ranks have a part in (_carried.py)?


SYSTEMS = {
    "comba": System("v", "gated_delta_rule"),
    "gated_delta_product": System("v", "gated_delta_rule"),
    "gdn2": System("v", "kda"),
    "hgrn2": System("v", "gla"),
    "iplr_delta_rule": System("v", "dplr_delta_rule"),
    "mamba3": System(
        "x", "simple_gla", initial="initial_states", final="return_final_states", is_carried=True
    ),
    "mlstm": System("v", "simple_gla", is_carried=True),
    "precond_gated_delta_rule": System("v", "gated_delta_rule"),
    "rwkv7": System("v", "dplr_delta_rule"),
    "ssd": System(
        "x",
        "simple_gla",
        initial="initial_states",
        final="return_final_states",
        state_v_first=True,
        refused=("seq_idx",),
    ),
}
