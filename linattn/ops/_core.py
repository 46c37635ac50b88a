"""What the ops share: types, gradients, the way to the core, the warning of a gate that grows."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from contextvars import ContextVar, copy_context
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn, TypedDict, TypeVar

import numpy as np

from linattn import _linattn
from linattn.features import is_seen, is_tensor, is_traced, shape_of

__all__ = [
    "ASKS",
    "NAMES",
    "WAYS",
    "AnyArray",
    "Array",
    "CoreCall",
    "ForwardOptions",
    "Gradients",
    "LayoutHint",
    "Mode",
    "State",
    "Ways",
    "backward_for",
    "core_for",
    "hint_at_layout",
    "other_ways",
    "refuse_unknown",
    "step_for",
    "unrecorded_core",
    "warn_of_clamp",
    "warn_of_growth",
]

# q, k, v and o are of one type, numpy.ndarray or torch.Tensor with its dtype. The other arrays of a
# call are of the same library, but gates and states may have dtypes of their own.
Array = TypeVar("Array")
AnyArray = Any
State = Any  # S, or the pair (S, z) of an op that is normalised, or the pair (M, Y) of titans
Mode = Literal["chunk", "recurrent", "parallel"]


class ForwardOptions(TypedDict, total=False):
    """The keywords that every forward function has, for type checkers; ops.gla spells them out."""

    scale: float | None
    initial_state: Any
    cu_seqlens: Any
    mask: Any
    mode: Mode
    chunk_size: int | None
    qk_l2norm: bool
    state_v_first: bool
    allow_tf32: bool | None
    out: Any


class Gradients(NamedTuple):
    """The gradients that a backward returns, each with the shape and dtype of its input.

    The gradient of an array that the op does not have, or that the call was not given, is None. The
    default gamma of :func:`linattn.retention` has one.

    Attributes
    ----------
    dq, dk : array [B,T,H,K]
    dv : array [B,T,HV,V]
    dg : array, float or None
        The gradient of the gate as it was given: g, alpha, gamma or slopes. That of a number is a
        float.
    dbeta : array [B,T,HV], float or None
    dx, dy : array [B,T,H,K] or None
    dbonus : array [H,K], float or None
    deta : array [B,T,HV], float or None
    dvalue_gate, dweight, dskip : array, float or None
        Of factors of v, which systems such as :func:`linattn.ssd` have, and no op.
    d_initial_state : array [N,HV,K,V], or None
        Of a normalised op the pair (dS, dz), of titans the pair (dM, dY);
        float32 (float64 for float64 inputs).

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.ones((3, 2))  # one head: [T,K]
    >>> grads = linattn.delta_rule_backward(x, x, x, x, beta=np.ones(3))
    >>> grads.dv.shape, grads.dbeta.shape
    ((3, 2), (3,))
    >>> isinstance(linattn.delta_rule_backward(x, x, x, x, beta=1).dbeta, float)
    True
    >>> grads.dg is None, grads.d_initial_state is None
    (True, True)
    """

    dq: Any
    dk: Any
    dv: Any
    dg: Any | None
    dbeta: Any | None
    dx: Any | None
    dy: Any | None
    dbonus: Any | None
    deta: Any | None
    dvalue_gate: Any | None
    dweight: Any | None
    dskip: Any | None
    d_initial_state: State | None

    def __repr__(self) -> str:
        """Dtypes and shapes: the numbers of whole arrays cannot be read."""
        parts = (f"{name}={_described(x)}" for name, x in self._asdict().items())
        return f"Gradients({', '.join(parts)})"


def _described(x: Any) -> str:
    if isinstance(x, tuple | list):
        return f"({', '.join(map(_described, x))})"
    shape, dtype = shape_of(x), getattr(x, "dtype", None)
    if shape is None or dtype is None:
        return repr(x)
    name = getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")
    return f"{name}[{','.join(map(str, shape))}]"


# Keywords of flash-linear-attention and PyTorch, and how the same is said here.
_FOREIGN = {
    "use_qk_l2norm_in_kernel": "write qk_l2norm=True",
    "head_first": "arrays are [B,T,H,K]; x.transpose(1, 2) is a view of [B,H,T,K] that fits",
    "transpose_state_layout": "write state_v_first=True",
    "is_causal": "only linear_attention has causal=",
    "gk": "a log decay is g=, per token in simple_gla and per key in gla",
}


def refuse_unknown(function: str, unknown: Mapping[str, object]) -> NoReturn:
    """Refuse keywords that the function does not have."""
    name = next(iter(unknown))
    hint = f" ({_FOREIGN[name]})" if name in _FOREIGN else ""
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


class Ways(NamedTuple):
    """What is called in the core's place: passes of ops, and of rooms (linattn/_rooms.py)."""

    forward: Callable[..., Any]
    step: Callable[..., Any]
    room_forward: Callable[..., Any]
    room_step: Callable[..., Any]


# The functions of linattn.jax call those of linattn, which come to these.
WAYS: ContextVar[Ways | None] = ContextVar("WAYS", default=None)


def other_ways(x: object) -> Ways | None:
    """What a call with x takes in the core's place: linattn.jax's functions, or None."""
    return None if type(x) is np.ndarray or is_tensor(x) else WAYS.get()


class CoreCall(Exception):
    """A pass of the core that an op, a system or a scan would call. linattn/segments.py calls it,
    for states alone. It is an exception, so that it ends the function, which would go on with
    outputs.
    """

    def __init__(
        self, core: Callable[..., Any], words: tuple[str, ...], arguments: Mapping[str, Any]
    ) -> None:
        super().__init__(*words)
        self.core, self.words, self.arguments = core, words, arguments
        self._context = copy_context()  # it has the names for warnings

    def states_alone(self, **more: Any) -> tuple[Any, ...]:
        """The core's results without o, and without gradients but that of the first state."""
        arguments = {**self.arguments, **more}
        found: tuple[Any, ...] = self._context.run(
            self.core, *self.words, **arguments, states_only=True
        )
        return found


def _asked(core: Callable[..., Any], op: str, *qkv: Any, **arguments: Any) -> NoReturn:
    raise CoreCall(core, (op,), {**dict(zip("qkv", qkv, strict=False)), **arguments})


# Is a function called for its CoreCall alone?
ASKS: ContextVar[bool] = ContextVar("ASKS", default=False)


def asks(x: object) -> bool:
    return not is_traced(x) and ASKS.get()  # torch.compile reads no such variable


def core_for(q: object, mask: object = None) -> Callable[..., tuple[Any, Any]]:
    """The forward pass for arrays like q: the core's, or PyTorch's way to it, which records. With a
    mask, that of the tokens it leaves."""
    if mask is not None:
        from linattn.ops import _padding

        return _padding.masked_forward(core_for(q), mask)
    if asks(q):
        return unrecorded_core(q)
    if not is_tensor(q):
        ways = other_ways(q)
        return _linattn.forward if ways is None else ways.forward
    from linattn import autograd

    return autograd.forward


def unrecorded_core(q: object) -> Callable[..., tuple[Any, Any]]:
    """The core's forward pass, which PyTorch does not record."""
    return partial(_asked, _linattn.forward) if asks(q) else _linattn.forward


def backward_for(do: object, mask: object = None) -> Callable[..., tuple[Any, ...]]:
    """The core's backward pass; with a mask, that of the tokens it leaves."""
    if mask is None:
        return partial(_asked, _linattn.backward) if asks(do) else _linattn.backward
    from linattn.ops import _padding

    return _padding.masked_backward(mask)


def step_for(q: object) -> Callable[..., Any]:
    """The step for arrays like q: the core's, or the operator that a tracer sees."""
    if type(q) is np.ndarray:
        return _linattn.step
    if not is_tensor(q):
        ways = WAYS.get()
        return _linattn.step if ways is None else ways.step
    if not is_seen(q):
        return _linattn.step
    from linattn import _traced_steps

    return _traced_steps.step


# A system of linattn/composed calls an op under other names than its caller's: the caller's, by
# the op's.
NAMES: ContextVar[Mapping[str, str]] = ContextVar("NAMES", default=MappingProxyType({}))


def _is_ours(name: object) -> bool:
    ours = ("linattn.ops", "linattn.composed", "linattn.segments")
    return isinstance(name, str) and name.startswith(ours)


def warn_of_growth(name: str, expected: str) -> None:
    """Called by the core, before it computes: some decay is above one."""
    name = NAMES.get().get(name, name)
    _warn(f"{name}: expected {expected}; the state may grow without bound")


def warn_of_clamp() -> None:
    """Called by the core, after it has computed: a denominator below zero was clamped."""
    _warn(
        "normalize: expected denominators >= 0, got some below zero, which were clamped to eps; "
        "use a feature map that is never negative, or normalize=False"
    )


class LayoutHint(UserWarning):
    """q has more heads than tokens, as an array [B,H,T,K] would.

    A process hears of it once, from its first forward call of such arrays with at least 2 tokens.
    If the arrays are right, switch it off::

        warnings.filterwarnings("ignore", category=linattn.LayoutHint)

    Examples
    --------
    >>> import linattn
    >>> issubclass(linattn.LayoutHint, UserWarning)
    True
    """


def hint_at_layout(T: int, H: int) -> None:
    """Called by the core, once."""
    name = NAMES.get().get("q", "q")
    _warn(
        f"{name}: got more heads than tokens, H = {H} and T = {T}; linattn's arrays are [B,T,H,K], "
        "and transpose(1, 2) is a view of [B,H,T,K] that fits (linattn.LayoutHint, told once)",
        LayoutHint,
    )


def _warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """A warning that names the line that called the public function.

    Where none was called (a bound step, a compiled graph), it names the line that called the core.
    """
    frame: FrameType | None = sys._getframe(2)
    level = caller = 3
    while frame is not None:
        ours = _is_ours(frame.f_globals.get("__name__"))
        if ours:  # one op may call another
            caller = level + 1
        elif caller > 3:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=caller)
