"""Bound steps: a step whose arguments are checked once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from linattn import _linattn

__all__ = ["bind"]


def bind(step: Callable[..., Any], *args: Any, **kwargs: Any) -> _linattn.BoundStep:
    """A step whose arguments are checked once, to be run many times over the same arrays.

    Parameters
    ----------
    step : function
        One of the functions ``<op>_step``.
    *args, **kwargs
        Its arguments. All checks are made now, but nothing is run. Without ``out`` an array for o
        is made, once.

    Returns
    -------
    BoundStep
        Called without arguments it does what the step would do with what the arrays hold by then,
        and returns ``out``, always the same array. On a GPU it is enqueued on the stream that is
        current when it is called, and can be captured in a graph.

    Raises
    ------
    TypeError
        ``step`` is not a function, or the step would raise it for the arguments.
    ValueError
        ``step`` is another function, or the step would raise it for the arguments. Or a bound step
        would go on with old numbers: a feature map is a function, which makes copies of q and k;
        an array is exported by its library as a copy; on a GPU, an array is of another library than
        PyTorch or CuPy, or two are of different ones, so that their streams are not known.

    Notes
    -----
    The caller may change the contents of the arrays: q, k, v, gates, beta, the state, and
    ``state_indices``, which on the CPU are checked in every call. Arguments that are not arrays
    stay as they were: options, a number given for a gate. The arrays are kept alive; they must keep
    the memory that they have (no ``resize``, no ``set_``). Two threads may call a bound step at
    once where they could call the step, so not with one state.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = np.zeros((3, 1, 2, 4), "float32")  # [B,H,K]
    >>> state = linattn.zeros_state(1, 2, 4, 4)
    >>> step = linattn.bind(linattn.retention_step, q, k, v, state=state)
    >>> for _ in range(3):
    ...     q[...], k[...], v[...] = rng.standard_normal((3, 1, 2, 4))  # where the arrays lie
    ...     o = step()  # one token: the state moves on, o is written and returned
    >>> o is step()
    True
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
