"""The table of ops, csrc/variants.def, as Python sees it.

Whatever depends on an op's kind asks here: a list of ops by name is written nowhere else.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from linattn import _linattn

__all__ = ["OPS", "VARIANTS", "Variant"]


class Variant(NamedTuple):
    """A row of the table.

    name : the op's name
    decay : ``"none"``; ``"head"`` (one constant per value head); ``"token"`` (one per token and
        value head); ``"key"`` (one per token, value head and key)
    rule : ``"additive"`` (u = v) or ``"delta"`` (u = beta (v - k'S))
    normaliser : may the op divide by q'z, where z is the running sum of keys?
    """

    name: str
    decay: Literal["none", "head", "token", "key"]
    rule: Literal["additive", "delta"]
    normaliser: bool


OPS: tuple[str, ...] = _linattn.OPS
VARIANTS: dict[str, Variant] = {row[0]: Variant(*row) for row in _linattn.VARIANTS}
