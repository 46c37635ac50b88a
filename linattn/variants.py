"""The tables csrc/variants.def (the ops) and csrc/arrays.def (the arrays), as Python sees them.

Code that depends on the kind of an op, or on which arrays there are, asks here: no list of ops or
of arrays is written a second time.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from linattn import _linattn

__all__ = ["ARRAYS", "BY_TOKEN", "GATES", "OPS", "VARIANTS", "ArrayLine", "Variant"]

GATES = ("g", "alpha", "gamma", "slopes")  # the keywords that give a decay


class Variant(NamedTuple):
    """A row of the table of ops, ``linattn.VARIANTS``.

    Attributes
    ----------
    name : str
        The op's name.
    decay : {"none", "head", "token", "key", "pair"}
        ``"head"`` is one constant per value head, ``"token"`` one number per token and value head,
        ``"key"`` one per token, value head and key. ``"pair"`` is as ``"token"``, for the first of
        two states, a memory and its momentum.
    rule : {"additive", "delta", "dplr", "bonus"}
        u = v, or u = beta (v - S'k). ``"dplr"`` takes y p' off, with p = S'x of the state before
        its decay. ``"bonus"`` reads before the decay and the write, and adds a token's own write
        times a bonus.
    normaliser : bool
        May the op divide by q'z, where z is the running sum of keys?

    Examples
    --------
    >>> import linattn
    >>> linattn.VARIANTS["kda"].decay, linattn.VARIANTS["kda"].rule
    ('key', 'delta')
    >>> [name for name, x in linattn.VARIANTS.items() if x.normaliser]
    ['linear_attention']
    """

    name: str
    decay: Literal["none", "head", "token", "key", "pair"]
    rule: Literal["additive", "delta", "dplr", "bonus"]
    normaliser: bool


#: The names of the ops, in the order of the table.
OPS: tuple[str, ...] = _linattn.OPS
#: The table of the ops: the :class:`Variant` of each name.
VARIANTS: dict[str, Variant] = {row[0]: Variant(*row) for row in _linattn.VARIANTS}


def op_named(op: object, known: tuple[str, ...] = OPS) -> str:
    """An op's name, from the name or from its function; a ValueError says which there are."""
    name = getattr(op, "__name__", repr(op)) if callable(op) else op
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"op: expected one of {', '.join(known)}, got {name!r}")
    return name


class ArrayLine(NamedTuple):
    """A line of csrc/arrays.def, in its own words, which that file explains.

    Lines of one label are the state, and the second one of an op whose state is a pair.

    Examples
    --------
    >>> from linattn.variants import ARRAYS, VARIANTS
    >>> line = next(line for line in ARRAYS if line.label == "beta")
    >>> line.letters, line.is_of(VARIANTS["kda"]), line.is_of(VARIANTS["gla"])
    ('BTh', True, False)
    """

    label: str
    letters: str
    passes: str
    role: str
    dtype: str
    part_of: str
    needed: str
    gradient: str | None

    def is_of(self, variant: Variant) -> bool:
        """Does the op have this array, in one of its passes and with some options?"""
        return {
            "ALWAYS": True,
            "DECAY": variant.decay != "none",
            "DELTA": variant.rule == "delta",
            "PREDICTS": variant.rule in ("delta", "dplr") and variant.decay != "pair",
            "DPLR": variant.rule == "dplr",
            "BONUS": variant.rule == "bonus",
            "PAIR": variant.decay == "pair",
            "WEIGHED": variant.decay == "token" and variant.rule == "additive",
            "GATED": variant.decay == "key" and variant.rule == "delta",
            "NORMALISED": variant.normaliser,
        }[self.part_of]

    def is_needed_by(self, variant: Variant) -> bool:
        """Is no call of the op legal without it?"""
        needed = self.needed == "REQUIRED" or (self.needed == "IN_DPLR" and variant.rule == "dplr")
        return needed and self.is_of(variant)


ARRAYS: tuple[ArrayLine, ...] = tuple(ArrayLine(*line) for line in _linattn.ARRAYS)
#: The keywords of the arrays that have tokens.
BY_TOKEN = {x.label for x in ARRAYS if x.role == "INPUT" and "T" in x.letters} | {"alpha"}
