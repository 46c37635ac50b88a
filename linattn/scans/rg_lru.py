"""Griffin's real-gated linear recurrent unit. Forward, step, backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from linattn import _rooms
from linattn._elementwise import held_root, sigmoid, softplus
from linattn.composed._arrays import Arrays, is_number, total
from linattn.ops._core import AnyArray, Array

__all__ = ["RGLRUGradients", "rg_lru", "rg_lru_backward", "rg_lru_step"]

_LIMIT = 1000.0  # RecurrentGemma's


class RGLRUGradients(NamedTuple):
    """The gradients of :func:`rg_lru`, each with the shape and dtype of its input.

    Attributes
    ----------
    dx, dr, di : array [B,T,D]
    dLambda : array [D]
    d_initial_state : array [S,D] or None
        float32 (float64 for float64 inputs).

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.ones((1, 3, 2))
    >>> linattn.rg_lru_backward(x, x, x, x, np.ones(2)).dLambda.shape
    (2,)
    """

    dx: Any
    dr: Any
    di: Any
    dLambda: Any
    d_initial_state: Any | None


def rg_lru(
    x: Array,
    r: Array,
    i: Array,
    Lambda: AnyArray,
    *,
    c: float = 8.0,
    reset: AnyArray | None = None,
    gradient_limit: float = _LIMIT,
    initial_state: AnyArray | None = None,
    output_final_state: bool = False,
    cu_seqlens: AnyArray | None = None,
) -> tuple[Array, Any]:
    """Griffin's recurrence: one number for each channel, whose write is scaled by its decay.

    Each channel has, with sqrt(1 - a^2) as sqrt(-expm1(2 log a)), which keeps its digits where a is
    near 1::

        log a = -c softplus(Lambda) r,   h <- a h + sqrt(1 - a^2) i x,   y = h

    Parameters
    ----------
    x : array [B,T,D]
    r, i : array [B,T,D]
        The recurrence gate and the input gate, in [0, 1]: after the sigmoid.
    Lambda : array [D]
        -c softplus(Lambda) is the natural LOG of the decay where r is 1.
    c : float
    reset : bool array [B,T], optional
        At these tokens the state is forgotten, and i x is written unscaled. RecurrentGemma resets
        at the first token of each text.
    gradient_limit : float
        The derivative of the square root is at most this: at a = 1 it is infinite. RecurrentGemma's
        is 1000, which the kernels have. With another limit the root is made before them, and a call
        takes longer.
    initial_state : array [S,D], optional
        Zeros where it is absent. float32 (float64 for float64 x) or bfloat16.
    output_final_state : bool
    cu_seqlens : int array [S+1], optional
        B is 1, and S sequences lie behind one another. They begin at these tokens; T is last.

    Returns
    -------
    y : array [B,T,D], dtype of x
    final_state : array [S,D] or None

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of x.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold y.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    See Also
    --------
    linattn.hgrn : A gate whose write is scaled by 1 - f.

    References
    ----------
    De et al., 2024, *Griffin: Mixing Gated Linear Recurrences with Local Attention for Efficient
    Language Models*, arXiv:2402.19427.

    Examples
    --------
    A recurrence gate of 0 keeps the state as it is:

    >>> import numpy as np, linattn
    >>> x = np.ones((1, 3, 1))
    >>> r = np.array([1.0, 0.0, 0.0])[None, :, None]
    >>> y, _ = linattn.rg_lru(x, r, x, np.ones(1))
    >>> bool(y[0, 0, 0] == y[0, 1, 0] == y[0, 2, 0])
    True
    """
    p = _Problem(x, r, i, Lambda, c, reset, gradient_limit)
    arrays = p.arrays() | {"cu_seqlens": cu_seqlens, "initial_state": initial_state}
    y, state = _rooms.forward(
        "scan", "gated", arrays, write=p.write, output_final_state=output_final_state
    )
    return p.call.short(y), state


def rg_lru_step(
    state: AnyArray,
    x: Array,
    r: Array,
    i: Array,
    Lambda: AnyArray,
    *,
    c: float = 8.0,
    reset: AnyArray | None = None,
    state_indices: AnyArray | None = None,
) -> Array:
    """One token of :func:`rg_lru`; ``state`` is changed in place.

    Parameters
    ----------
    state : array [B,D]
        float32 (float64 for float64 inputs) or bfloat16.
    x, r, i : array [B,D]
        The gates are after the sigmoid.
    Lambda : array [D]
        -c softplus(Lambda) is the natural LOG of the decay where r is 1.
    c : float
    reset : bool array [B], optional
        Of these sequences the state is forgotten, and i x is written unscaled.
    state_indices : int array [B], optional
        ``state`` is then a pool [P,D]: row n has state ``state_indices[n]``, and -1 none (its y is
        zeros). No state twice.

    Returns
    -------
    y : array [B,D], dtype of x

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of x.
    ValueError
        Shapes, values or options do not fit, or the state is not contiguous.
    MemoryError
        The memory does not hold y.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> state, x = np.zeros((1, 1)), np.ones((1, 1))
    >>> y = linattn.rg_lru_step(state, x, x, x, np.ones(1))
    >>> bool(y == state)
    True
    """
    y: Array = _step_of(
        _Problem(x, r, i, Lambda, c, reset, _LIMIT, tokens=""), state, state_indices
    )
    return y


def checked_step(state: Any, x: Any, r: Any, i: Any, Lambda: Any, *, reset: Any = None) -> Any:
    """:func:`rg_lru_step` of arrays that were checked: an adapter's, in its shapes."""
    return _step_of(_Problem.of_step(x, r, i, Lambda, reset), state, None)


def _step_of(p: _Problem, state: Any, state_indices: Any) -> Any:
    arrays = p.arrays() | {"state_indices": state_indices, "state": state}
    return p.call.short_of_step(_rooms.step("scan", "gated", arrays, write=p.write))


def rg_lru_backward(
    dy: Array,
    x: Array,
    r: Array,
    i: Array,
    Lambda: AnyArray,
    *,
    c: float = 8.0,
    reset: AnyArray | None = None,
    gradient_limit: float = _LIMIT,
    initial_state: AnyArray | None = None,
    d_final_state: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
) -> RGLRUGradients:
    """The gradients of :func:`rg_lru`.

    Parameters
    ----------
    dy : array [B,T,D], dtype of x
        The gradient of y.
    d_final_state : array [S,D], optional
        The gradient of the final state, float32 (float64 for float64 inputs).
    x, r, i, Lambda, c, reset, gradient_limit, initial_state, cu_seqlens :
        As in the forward call. -c softplus(Lambda) is the natural LOG of the decay where r is 1.

    Returns
    -------
    RGLRUGradients

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of x.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the gradients.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Examples
    --------
    At a decay of 1 the square root's derivative is held, and everything stays finite:

    >>> import numpy as np, linattn
    >>> x = np.ones((1, 2, 1))
    >>> grads = linattn.rg_lru_backward(x, x, 0 * x, x, np.ones(1))
    >>> bool(np.isfinite(grads.dr).all())
    True
    """
    p = _Problem(x, r, i, Lambda, c, reset, gradient_limit)
    p.call.array("dy", dy, "B T D")
    arrays = {"dy": p.call.real_of(dy), **p.arrays(), "cu_seqlens": cu_seqlens}
    arrays |= {"initial_state": initial_state, "d_final_state": d_final_state}
    found = _rooms.backward("scan", "gated", arrays, write=p.write)
    du, d_log = found["du"], found["dg"]
    xp = p.call.xp
    if p.write is None:
        # was u = s i x, s = sqrt(-expm1(2 log a)): ds / dlog a = -a^2 / s
        ds = du * p.i * p.x * p.root_slope() * -2 * xp.exp(2 * p.log)
        if p.reset is not None:  # was u = i x and log a = -inf
            ds, d_log = xp.where(p.reset, 0 * ds, ds), xp.where(p.reset, 0 * d_log, d_log)
        d_log = d_log + ds
        du = du * p.scale()
    # was log a = -c softplus(Lambda) r
    rate = p.rate()
    dLambda = total(xp, d_log * p.r, (0, 1)) * -p.c * sigmoid(p.Lambda)
    return RGLRUGradients(
        dx=p.call.short(du * p.i),
        dr=p.call.as_given(d_log * rate, r),
        di=p.call.as_given(du * p.x, i),
        dLambda=p.call.as_given(dLambda, Lambda),
        d_initial_state=found["d_initial_state"],
    )


class _Problem:
    def __init__(
        self,
        x: Any,
        r: Any,
        i: Any,
        Lambda: Any,
        c: Any,
        reset: Any,
        gradient_limit: Any,
        tokens: str = "T ",
    ) -> None:
        self.call = call = Arrays("x", x, f"B {tokens}D")
        for name, gate in (("r", r), ("i", i), ("Lambda", Lambda)):
            if gate is None:
                raise TypeError(f"{name}: expected an array, got None")
        call.wide("r", r, f"B {tokens}D", number=False)
        call.wide("i", i, f"B {tokens}D", number=False)
        call.wide("Lambda", Lambda, "D", number=False)
        for name, value in (("c", c), ("gradient_limit", gradient_limit)):
            if not is_number(value):
                raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
            if not 0 < value < math.inf:
                raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")
        if reset is not None:
            call.flags("reset", reset, f"B {tokens}".strip())
        self._take(x, r, i, Lambda, float(c), reset, float(gradient_limit))

    @classmethod
    def of_step(cls, x: Any, r: Any, i: Any, Lambda: Any, reset: Any) -> _Problem:
        """That of a token whose arrays were checked."""
        p = cls.__new__(cls)
        p.call = Arrays.checked(x)
        p._take(x, r, i, Lambda, 8.0, reset, _LIMIT)
        return p

    def _take(
        self, x: Any, r: Any, i: Any, Lambda: Any, c: float, reset: Any, limit: float
    ) -> None:
        self.reset = None if reset is None else reset[..., None]
        self.x, self.r, self.i, self.Lambda = map(self.call.real_of, (x, r, i, Lambda))
        self.c, self.limit = c, limit
        self.log = self.rate() * self.r

    def rate(self) -> Any:
        return -self.c * softplus(self.Lambda)

    @property
    def write(self) -> str | None:
        """The core's kernels scale what is written, and hold the derivative of the root at 1000."""
        return "root" if self.limit == _LIMIT else None

    def arrays(self) -> dict[str, Any]:
        u, log = self.i * self.x, self.log
        if self.reset is not None:  # then a = 0, and the scale is 1
            log = self.call.xp.where(self.reset, -math.inf, log)
        return {"u": u if self.write else self.scale() * u, "g": log}

    def scale(self) -> Any:
        xp = self.call.xp
        scale = held_root(-xp.expm1(2 * self.log), self.limit)  # of 1 - a^2
        return scale if self.reset is None else xp.where(self.reset, 1.0, scale)

    def root_slope(self) -> Any:
        """The derivative of sqrt at 1 - a^2, held."""
        xp = self.call.xp
        least = (0.5 / self.limit) ** 2
        square = -xp.expm1(2 * self.log)
        return 0.5 / xp.sqrt(xp.clip(square, least, None))
