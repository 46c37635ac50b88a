"""Bound steps: a step whose arguments are checked once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from linattn import _linattn

__all__ = ["bind"]


def bind(step: Callable[..., Any], *args: Any, **kwargs: Any) -> _linattn.BoundStep:
    """A step whose arguments are looked at once, to be run many times over the same arrays.

    ::

        step = linattn.bind(linattn.kda_step, q, k, v, g, beta, state=state, out=o)
        for token in tokens:
            ...              # new numbers into q, k, v, g and beta, where they lie
            step()           # one token: state moves on, o is written and returned

    Parameters
    ----------
    step : function
        One of the eight ``<op>_step``.
    *args, **kwargs
        Its arguments. All checks are made now, but nothing is run. Without ``out`` an array for o
        is made, once.

    Returns
    -------
    BoundStep
        Called without arguments it does what the step would do with what the arrays hold by then,
        and returns ``out``, always the same array. On a GPU it is enqueued on the stream that is
        current when it is called, and can be captured in a graph.

    What lies in the arrays is the caller's to change: q, k, v, gates, beta, the state, and
    ``state_indices``, which on the CPU are looked at in every call. What is no array stays as it
    was: options, a number given for a gate. The arrays are kept alive; they must keep the memory
    that they have (no ``resize``, no ``set_``). Two threads may call a bound step at once where
    they could call the step: not for one state.

    Refused (ValueError) is what would silently go on with old numbers: a feature map that is a
    function, since it makes copies of q and k; an array that its library exports as a copy; on a
    GPU arrays of other libraries than PyTorch or CuPy, or of two, whose current streams are not
    known.
    """
    name = getattr(step, "__name__", None) or repr(step)
    op = name.removesuffix("_step")
    module = sys.modules.get(f"linattn.ops.{op}")
    if op == name or module is None or getattr(module, name) is not step:
        error = ValueError if callable(step) else TypeError
        raise error(f"step: expected one of the functions <op>_step, got {name}")
    try:
        given = inspect.signature(step).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{name}() {error}") from None
    given.apply_defaults()
    arguments_of = getattr(module, "bound_arguments", dict)
    return _linattn.bind(op, **arguments_of(**given.arguments))
