"""The messages of a graph: they stay, and they stay in their order.

Each rank has a graph of its own. In one of them a message may be without use, or two of them may
not depend on each other. A compiler that drops one there, or turns them round, lets the ranks wait
for each other, or mix up what they send.

That an operator has an effect keeps its calls, and their order in PyTorch's own graphs. Inductor
(2.13) schedules calls that do not depend on each other as it likes, effects or not. So each call
takes a token of the call before it, and makes one for the next.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from linattn.autograd import _modes

__all__ = ["after", "is_traced", "kept_in_order", "token_before"]


def is_traced() -> bool:
    """Is there a tracer, or another mode that has to see operators?"""
    return _modes() > 0


def kept_in_order(op: Any) -> None:
    """Tell PyTorch that an operator has an effect."""
    if hasattr(op, "register_effect"):  # newer PyTorch
        from torch._library.effects import EffectType

        op.register_effect(EffectType.ORDERED)
        return
    from torch._higher_order_ops import effects

    effects._register_effectful_op(op._opoverload, effects._EffectType.ORDERED)


_KEYS = ("FUNCTIONAL", "PROXY")  # of the modes that write a graph
_LAST: list[tuple[Any, Tensor]] = []  # the modes of a trace, and the token of its last message


def _trace() -> tuple[Any, ...]:
    """The modes that write a graph, which are others in each trace."""
    keys = torch._C._TorchDispatchModeKey
    return tuple(torch._C._get_dispatch_mode(getattr(keys, key)) for key in _KEYS)


def _is_same(trace: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(a is b for a, b in zip(trace, other, strict=True))


def token_before() -> Tensor | None:
    """Of the last message of this trace."""
    return _LAST[0][1] if _LAST and _is_same(_LAST[0][0], _trace()) else None


def after(token: Tensor) -> None:
    """This token is of the last message now."""
    trace = _trace()
    _LAST[:] = [(trace, token)] if any(mode is not None for mode in trace) else []
