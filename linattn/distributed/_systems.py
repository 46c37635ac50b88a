"""The systems of linattn.composed that ranks can share: what a map of their tokens needs to know.

A system turns the state S before its tokens into M S + X, as the op under it does. If all
values are zeros, nothing is written: then the columns of the state become M times themselves.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SYSTEMS", "System"]


class System(NamedTuple):
    """A system by its arguments."""

    value: str  # what is written
    has_matrix: bool  # does a delta rule mix keys? Else M is a decay of each key
    like_value: tuple[str, ...] = ()  # other arrays with the last axis of the value
    read: tuple[str, ...] = ()  # arrays that have a part in what is read alone
    initial: str = "initial_state"
    final: str = "output_final_state"
    state_v_first: bool = False  # are states always [N,HV,V,K]?
    refused: tuple[str, ...] = ()  # options that know of no other ranks


# The memory of mlstm and the states of mamba3 are no pairs (X, M): one has a maximum that is kept,
# the other one angles.
SYSTEMS = {
    "comba": System("v", True),
    "gated_delta_product": System("v", True),
    "gdn2": System("v", True, like_value=("w",)),
    "hgrn2": System("v", False),
    "iplr_delta_rule": System("v", True),
    "precond_gated_delta_rule": System("v", True),
    "rwkv7": System("v", True),
    "ssd": System(
        "x",
        False,
        read=("D", "z"),
        initial="initial_states",
        final="return_final_states",
        state_v_first=True,
        refused=("seq_idx",),
    ),
}
