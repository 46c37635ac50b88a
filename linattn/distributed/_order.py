"""The messages of a graph: they stay, and they stay in their order.

Each rank has a graph of its own. A graph may have no use for a message. Two messages of it may not
depend on each other. A compiler may then drop one, or swap two. The ranks would wait for each
other, or mix up their messages.

PyTorch keeps the calls of an operator that has an effect, and their order, in its own graphs.
Inductor 2.13 does not keep their order. So each call takes a token of the call before it, and makes
one for the next.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

__all__ = ["after", "is_traced", "kept_in_order", "token_before", "unseen"]

# Without a graph of all of it, a function is called between two graphs. Its own calls then stay out
# of graphs, too. PyTorch has no public decorator that does not import its compiler at once.
unseen: Any = getattr(torch, "_disable_dynamo", lambda function: function)


def is_traced() -> bool:
    """Is there a tracer? Other modes, such as one that counts operations, may be on one rank alone:
    the messages do not depend on them."""
    return any(mode is not None for mode in _modes("FAKE", *_WRITE))


def kept_in_order(op: Any) -> None:
    """Tell PyTorch that an operator has an effect."""
    if hasattr(op, "register_effect"):  # newer PyTorch
        from torch._library.effects import EffectType

        op.register_effect(EffectType.ORDERED)
        return
    from torch._higher_order_ops import effects

    effects._register_effectful_op(op._opoverload, effects._EffectType.ORDERED)


_WRITE = ("FUNCTIONAL", "PROXY")  # the modes that write a graph, which are others in each trace


def _modes(*names: str) -> list[Any]:
    keys = torch._C._TorchDispatchModeKey
    return [torch._C._get_dispatch_mode(getattr(keys, name)) for name in names]


class _Last(threading.local):
    """The modes of this thread's last trace, and the token of its last message."""

    modes: tuple[Any, ...] = ()  # weak references
    token: Tensor | None = None


_LAST = _Last()


def token_before() -> Tensor | None:
    """Of the last message of this trace."""
    known = [mode() for mode in _LAST.modes]
    return _LAST.token if known and known == _writing() else None


def after(token: Tensor) -> None:
    """This token is of the last message now."""
    _LAST.modes = tuple(map(weakref.ref, _writing()))
    _LAST.token = token if _LAST.modes else None


def _writing() -> list[Any]:
    """The modes of this trace that write a graph."""
    return [mode for mode in _modes(*_WRITE) if mode is not None]
