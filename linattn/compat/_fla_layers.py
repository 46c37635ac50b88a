"""The functions that layers of flash-linear-attention call, and what takes the place of each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from linattn.compat import _fla_modules, fla
from linattn.compat._replace import Table

__all__ = ["TABLE"]

_OURS: dict[str, Callable[..., Any]] = {
    name: getattr(fla, name) for name in fla.__all__ if name not in ("use_linattn",)
} | _fla_modules.FUNCTIONS
_ACTIVATIONS = "ACT2FN"


def _name_of(value: Any) -> str | None:
    """The name of a function of fla's; None for all else."""
    owner = value
    if inspect.isbuiltin(value) or inspect.ismethod(value):  # the apply of an autograd function
        if getattr(value, "__name__", "") != "apply":
            return None
        owner = getattr(value, "__self__", None)
    elif not isinstance(value, FunctionType):
        return None
    if not str(getattr(owner, "__module__", "")).startswith("fla."):
        return None
    return str(getattr(owner, "__name__", "")) or None


def _replacement(name: str, value: Any) -> Any:
    """Ours for what a layer calls by this name; None if it is something else.

    Raises ValueError if fla's function has a parameter that ours lacks.
    """
    if name == _ACTIVATIONS and isinstance(value, dict):
        return _fla_modules.ACTIVATIONS
    theirs = _name_of(value)
    ours = _OURS.get(theirs or "")
    if ours is None:
        return None
    if isinstance(value, FunctionType):
        taken = inspect.signature(ours).parameters
        wanted = [
            parameter.name
            for parameter in inspect.signature(value).parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        missing = [parameter for parameter in wanted if parameter not in taken]
        if missing:
            raise ValueError(
                f"{theirs}: expected fla-core 0.6.0's parameters ({', '.join(taken)}), got "
                f"{', '.join(missing)} besides"
            )
    return ours


def _expected(model: nn.Module) -> str:
    return (
        "model: expected a layer or a model of flash-linear-attention (fla), got "
        f"{type(model).__name__}, which calls none of its functions"
    )


TABLE = Table(lambda name: True, _replacement, lambda layer: None, _expected)
