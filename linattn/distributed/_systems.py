"""The systems of linattn.composed that ranks can share: what a map of their tokens needs to know.

A system turns the state S before its tokens into M S + X, as the op under it does. If all
values are zeros, nothing is written: then the columns of the state become M times themselves. The
carried ones have no such map: their ranks tell each other more than a state.
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
    is_carried: bool = False  # is it an op of arrays that other ranks have a part in (_carried.py)?


SYSTEMS = {
    "comba": System("v", True),
    "gated_delta_product": System("v", True),
    "gdn2": System("v", True, like_value=("w",)),
    "hgrn2": System("v", False),
    "iplr_delta_rule": System("v", True),
    "mamba3": System(
        "x", False, initial="initial_states", final="return_final_states", is_carried=True
    ),
    "mlstm": System("v", False, is_carried=True),
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
