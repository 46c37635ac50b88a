"""Which kernel takes a call, and why."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

from linattn import _linattn, ops
from linattn.features import is_tensor
from linattn.variants import op_named

__all__ = ["KernelReport", "explain_kernel"]


class KernelReport(NamedTuple):
    """The kernel that took a call: see :func:`linattn.explain_kernel`.

    Attributes
    ----------
    kernel : str
        ``"chunks"``, ``"token by token"``, ``"one token"`` (a step), ``"noncausal"``; ``"scan"`` or
        ``"convolution"`` for the functions of ``linattn.scans`` and ``linattn.causal_conv1d``; or
        ``"none"`` for a call without elements.
    unit : str
        On the CPU the instruction set; on a GPU ``"tensor cores"`` or ``"CUDA cores"``.
    why : str
        The reason, where the kernel is not the one that the mode names; else empty.
    chunk : int or None
        Tokens in a chunk on the CPU; None where there are none, and on a GPU.
    bits : int
        Of the numbers that are multiplied: 53, 24, or fewer where products are rounded.
    parts : tuple of (str, KernelReport)
        The calls that a rank made for a function of ``linattn.distributed``, in their order:
        ``"map"``, ``"final state"``, ``"call"``. Empty for other functions.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.ones((1, 100, 2, 4), np.float32)
    >>> report = linattn.explain_kernel(linattn.delta_rule, x, x, x, 0.5)
    >>> report.kernel, report.bits, report.why
    ('chunks', 24, '')
    """

    kernel: str
    unit: str
    why: str
    chunk: int | None
    bits: int
    parts: tuple[tuple[str, KernelReport], ...] = ()


_PARTS: ContextVar[list[tuple[str, KernelReport]] | None] = ContextVar("parts", default=None)


def note(part: str) -> None:
    """Note that the last call of the core was this part of a shared call."""
    found = _PARTS.get()
    if found is not None:
        found.append((part, _taken()))


def _taken() -> KernelReport:
    kernel, unit, why, chunk, bits = _linattn.taken()
    return KernelReport(kernel, unit, why, chunk or None, bits)


def explain_kernel(op: str | Callable[..., Any], *args: Any, **keywords: Any) -> KernelReport:
    """Which kernel takes this call, and why it is not another one.

    The call is made, and its results are dropped: only a kernel knows all that decides. A step's
    state is copied first, so it stays as it is. A system that is built over an op reports the last
    call of that op.

    Parameters
    ----------
    op : function or str
        ``linattn.kda``, ``linattn.kda_step``, ``linattn.selective_scan_backward``,
        ``linattn.distributed.kda``, ..., or an op's name.
    *args, **keywords
        As the function takes them.

    Returns
    -------
    KernelReport

    Raises
    ------
    ValueError
        There is no op of that name.
    Exception
        The call itself is refused.

    See Also
    --------
    show_config : the instruction sets and devices of this build.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.ones((1, 100, 2, 4))
    >>> linattn.explain_kernel("gla", x, x, x, alpha=0.9, mode="recurrent").kernel
    'token by token'
    >>> linattn.explain_kernel(linattn.gla_step, x[0], x[0], x[0], alpha=0.9,
    ...                        state=linattn.zeros_state(100, 2, 4, 4, dtype=float)).kernel
    'one token'
    >>> linattn.explain_kernel(linattn.causal_conv1d, x[:, :, 0], np.ones((4, 3))).kernel
    'convolution'
    """
    function = op if callable(op) else getattr(ops, op_named(op))
    call = inspect.signature(function).bind(*args, **keywords)
    if call.arguments.get("state") is not None:
        call.arguments["state"] = _copied(call.arguments["state"])
    parts: list[tuple[str, KernelReport]] = []
    before = _PARTS.set(parts)
    try:
        function(*call.args, **call.kwargs)
    finally:
        _PARTS.reset(before)
    return _taken()._replace(parts=tuple(parts))


def _copied(state: Any) -> Any:
    if isinstance(state, tuple | list):
        return tuple(map(_copied, state))
    return state.clone() if is_tensor(state) else copy.copy(state)
