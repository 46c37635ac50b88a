"""Mamba-2's state-space duality (SSD). Forward, step, backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from linattn._elementwise import silu, silu_slope, softplus, softplus_slope
from linattn.composed._arrays import Arrays, is_number, total
from linattn.composed._names import called
from linattn.ops._core import (
    AnyArray,
    Array,
    Gradients,
    Mode,
    backward_for,
    core_for,
    step_for,
    unrecorded_core,
)
from linattn.ops.simple_gla import simple_gla

__all__ = ["SSDGradients", "ssd", "ssd_backward", "ssd_step"]

_ITSELF = 20  # above it softplus is its argument, as PyTorch and Mamba have it

# The arguments of simple_gla by the names of this file.
_NAMES = {
    "q": "C",
    "k": "B",
    "v": "x",
    "g": "dt * A",
    "weight": "dt",
    "skip": "D",
    "do": "dy",
    "initial_state": "initial_states",
    "d_final_state": "d_final_states",
    "state_indices": "state_batch_indices",
}


class SSDGradients(NamedTuple):
    """The gradients of :func:`ssd`, each with the shape and dtype of its input.

    The gradient of an array that the call was not given is None. That of a number is a number.

    Attributes
    ----------
    dx : array [B,T,H,P]
    ddt : array [B,T,H] or float
    dA : array [H] or float
    dB, dC : array [B,T,G,N]
    dD : array [H] or [H,P], float or None
    dz : array [B,T,H,P] or None
    ddt_bias : array [H], float or None
    d_initial_states : array [S,H,P,N] or None
        float32 (float64 for float64 inputs).

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x, dt, BC = np.ones((1, 3, 2, 4)), np.ones((1, 3, 2)), np.ones((1, 3, 1, 5))
    >>> grads = linattn.ssd_backward(x, x, dt, -1.0, BC, BC)
    >>> grads.dB.shape, isinstance(grads.dA, float), grads.dD is None
    ((1, 3, 1, 5), True, True)
    """

    dx: Any
    ddt: Any
    dA: Any
    dB: Any
    dC: Any
    dD: Any | None
    dz: Any | None
    ddt_bias: Any | None
    d_initial_states: Any | None


def _limits(dt_limit: Any) -> tuple[float, float]:
    """dt_limit as two numbers, the lower one first."""
    if not isinstance(dt_limit, tuple | list) or not all(map(is_number, dt_limit)):
        raise TypeError(f"dt_limit: expected a pair of numbers, got {dt_limit!r}")
    if len(dt_limit) != 2 or not dt_limit[0] <= dt_limit[1]:
        raise ValueError(f"dt_limit: expected a pair (low, high), low <= high, got {dt_limit!r}")
    return float(dt_limit[0]), float(dt_limit[1])


class _Problem:
    """The arguments of a call, checked, then what simple_gla is called with."""

    def __init__(
        self,
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        D: Any,
        z: Any,
        dt_bias: Any,
        dt_softplus: Any,
        dt_limit: Any,
        tokens: str = "T ",
        recorded: bool = True,
    ) -> None:
        call = Arrays("x", x, f"B {tokens}H P", recorded=recorded)
        for name, required in (("dt", dt), ("A", A)):
            if required is None:
                raise TypeError(f"{name}: expected an array or a number, got None")
        self.dt_given = call.wide("dt", dt, f"B {tokens}H")
        self.A_given = call.wide("A", A, "H")
        self.B = call.array("B", B, f"B {tokens}G N")
        self.C = call.array("C", C, f"B {tokens}G N")
        call.multiple("B", "H", "G")
        self.D_given = call.wide("D", D, "H", "H P")
        self.z_given = call.wide("z", z, f"B {tokens}H P", number=False)
        self.bias_given = call.wide("dt_bias", dt_bias, "H")
        if not isinstance(dt_softplus, bool):
            raise TypeError(f"dt_softplus: expected True or False, got {type(dt_softplus)}")
        self.call, self.dt_softplus, self.limit = call, dt_softplus, _limits(dt_limit)

    def sequences(self, seq_idx: Any, cu_seqlens: Any) -> Any:
        """cu_seqlens as it is, or from the number of each token's sequence."""
        if seq_idx is None:
            return cu_seqlens
        if cu_seqlens is not None:
            raise ValueError("seq_idx: expected None beside cu_seqlens, got an array")
        numbers = self.call.integers("seq_idx", seq_idx, "B T")
        if self.call.sizes["B"] != 1:
            raise ValueError(
                f"seq_idx: expected packed sequences to have B = 1, got B = {self.call.sizes['B']}"
            )
        changes = numbers[0, 1:] != numbers[0, :-1]
        starts = [t for t, new in enumerate(changes.tolist(), 1) if new]
        return self.call.counts([0, *starts, self.call.sizes["T"]])

    def compute(self) -> None:
        """The time steps, and v and g of simple_gla. Arrays are in the dtype of the sums."""
        real = self.call.real_of
        self.A, self.D, self.z = map(real, (self.A_given, self.D_given, self.z_given))
        dt, bias = real(self.dt_given), real(self.bias_given)
        self.raw = dt if bias is None else dt + bias
        self.before_limit = softplus(self.raw, _ITSELF) if self.dt_softplus else self.raw
        self.dt = self.call.xp.clip(self.before_limit, *self.limit)
        self.g = self.dt * self.A
        #: D where it is a number for each head, which the core adds to its reads.
        self.skip = None
        if self.D is not None and self.D.ndim == 1:
            self.skip, self.D = self.D, self.D[:, None]

    @property
    def v(self) -> Any:
        """dt x, in the dtype of x."""
        return self.call.scaled(self.dt[..., None], self.call.like)

    def skipped(self, o: Any) -> Any:
        """o + D x, before the gate."""
        o = self.call.real_of(o)
        return o if self.D is None else o + self.D * self.call.like

    def finish(self, o: Any, skipped: bool) -> Any:
        """y from o, which has D x already if it is skipped."""
        skipped = skipped or self.D is None
        if skipped and self.z is None:
            return self.call.short(o)
        y = self.call.real_of(o) if skipped else self.skipped(o)
        return self.call.short(y if self.z is None else y * silu(self.z))

    def slope_of_dt(self) -> Any:
        """The derivative of the time step by dt: 0 outside of the limits, at which it is 1."""
        low, high = self.limit
        inside = (self.before_limit >= low) & (self.before_limit <= high)
        slope = softplus_slope(self.raw, _ITSELF) if self.dt_softplus else 1
        return inside * slope


def ssd(
    x: Array,
    dt: AnyArray | float,
    A: AnyArray | float,
    B: Array,
    C: Array,
    *,
    D: AnyArray | float | None = None,
    z: AnyArray | None = None,
    dt_bias: AnyArray | float | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: AnyArray | None = None,
    return_final_states: bool = False,
    seq_idx: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    allow_tf32: bool | None = None,
) -> tuple[Array, AnyArray | None]:
    """Mamba-2's recurrence: state-space duality, in the letters of its authors.

    ::

        dt <- softplus(dt + dt_bias), within dt_limit
        h  <- exp(dt A) h + dt x B'
        y   = h C + D x,   y <- y silu(z)

    It is :func:`simple_gla` with q = C, k = B, v = dt x, g = dt A and scale = 1. Heads share B and
    C by groups: G divides H. The layer's projections, convolution and norm are not in it.

    Parameters
    ----------
    x : array [B,T,H,P]
    dt : array [B,T,H] or float
        The time step. In float32 beside bfloat16 arrays it keeps decays near 1 apart.
    A : array [H] or float
        Negative. dt A is the natural LOG of the decay. (A layer that has A_log passes
        -exp(A_log).)
    B, C : array [B,T,G,N], dtype of x
    D : array [H] or [H,P], or float, optional
        The factor of x that is added to y, before the gate.
    z : array [B,T,H,P], optional
        The gate: y is multiplied by silu(z).
    dt_bias : array [H] or float, optional
    dt_softplus : bool
        Take the softplus of dt + dt_bias. Above 20 it is its argument.
    dt_limit : pair of numbers
        The least and the largest time step. With the default a negative dt counts as 0.
    initial_states : array [S,H,P,N], optional
        S is B, or the number of packed sequences. float32 (float64 for float64 inputs) or bfloat16;
        zeros by default.
    return_final_states : bool
        Return the states after the last tokens; else None is returned in their place.
    seq_idx : int array [B,T], optional
        Packed sequences by the number of each token's sequence, with B = 1. A new number begins a
        new sequence. The host reads the array.
    cu_seqlens : int array [S+1], optional
        The same by their ends: sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1].
    mode, chunk_size, allow_tf32 : see :func:`simple_gla`

    Returns
    -------
    y : array [B,T,H,P], dtype of x
    final_states : array [S,H,P,N] or None

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of x.
    ValueError
        Shapes, values or options do not fit, or both seq_idx and cu_seqlens are given.
    MemoryError
        The memory does not hold the results, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: dt A is above 0, so the state may grow without bound.

    See Also
    --------
    ssd_step, ssd_backward : One token; the gradients.
    linattn.reference.ssd : The same in NumPy, float64, token by token.

    References
    ----------
    Dao and Gu, 2024, *Transformers are SSMs: Generalized Models and Efficient Algorithms Through
    Structured State Space Duality*, arXiv:2405.21060.

    Examples
    --------
    Without options it is simple_gla, but for roundings:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> x, A = rng.standard_normal((1, 8, 4, 3)), np.array([-1.0, -2.0, -0.5, -1.0])
    >>> dt = rng.uniform(0.1, 1, (1, 8, 4))
    >>> B, C = rng.standard_normal((2, 1, 8, 2, 5))  # two heads share a group
    >>> y, _ = linattn.ssd(x, dt, A, B, C)
    >>> o, _ = linattn.simple_gla(C, B, dt[..., None] * x, g=dt * A, scale=1)
    >>> np.allclose(y, o, rtol=1e-13, atol=1e-13)
    True

    Two sequences in one row, with their states:

    >>> where = np.array([[0, 0, 0, 1, 1, 1, 1, 1]])
    >>> y, h = linattn.ssd(x, dt, A, B, C, seq_idx=where, return_final_states=True)
    >>> h.shape
    (2, 4, 3, 5)
    """
    p = _Problem(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit)
    ends = p.sequences(seq_idx, cu_seqlens)
    p.compute()
    options: dict[str, Any] = {
        "scale": 1,
        "initial_state": initial_states,
        "output_final_state": return_final_states,
        "cu_seqlens": ends,
        "mode": mode,
        "chunk_size": chunk_size,
        "state_v_first": True,
        "allow_tf32": allow_tf32,
    }
    with called(_NAMES, x):
        if p.call.by_jax:
            o, states = simple_gla(p.C, p.B, p.v, p.g, **options)
        else:
            o, states = core_for(x)(
                "simple_gla", p.C, p.B, x, g=p.g, weight=p.dt, skip=p.skip, **options
            )
    return p.finish(o, skipped=p.skip is not None and not p.call.by_jax), states


def ssd_step(
    state: AnyArray,
    x: Array,
    dt: AnyArray | float,
    A: AnyArray | float,
    B: Array,
    C: Array,
    *,
    D: AnyArray | float | None = None,
    z: AnyArray | None = None,
    dt_bias: AnyArray | float | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state_batch_indices: AnyArray | None = None,
) -> Array:
    """One token of :func:`ssd`; ``state`` is changed in place.

    Parameters
    ----------
    state : array [B,H,P,N]
        float32 (float64 for float64 inputs) or bfloat16; its rows contiguous.
    x : array [B,H,P]
    dt : array [B,H] or float
    A : array [H] or float
        Negative. dt A is the natural LOG of the decay.
    B, C : array [B,G,N], dtype of x
    D : array [H] or [H,P], or float, optional
    z : array [B,H,P], optional
    dt_bias, dt_softplus, dt_limit : see :func:`ssd`
    state_batch_indices : int array [B], optional
        ``state`` is then a pool: row n has state ``state_batch_indices[n]``, and -1 none (its y is
        zeros). No state twice.

    Returns
    -------
    y : array [B,H,P], dtype of x

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of x.
    ValueError
        Shapes, values or options do not fit, or the innermost axis of B, C or the state is not
        contiguous.
    MemoryError
        The memory does not hold y.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: dt A is above 0, so the state may grow without bound.

    Examples
    --------
    Tokens one by one are the sequence:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> x, dt = rng.standard_normal((1, 5, 2, 3)), rng.uniform(0.1, 1, (1, 5, 2))
    >>> B, C = rng.standard_normal((2, 1, 5, 1, 4))
    >>> state = linattn.zeros_state(1, 2, 4, 3, dtype=np.float64, state_v_first=True)
    >>> y = [
    ...     linattn.ssd_step(state, x[:, t], dt[:, t], -1.0, B[:, t], C[:, t], D=0.5)
    ...     for t in range(5)
    ... ]
    >>> np.allclose(np.stack(y, 1), linattn.ssd(x, dt, -1.0, B, C, D=0.5)[0])
    True
    """
    p = _Problem(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, tokens="", recorded=False)
    if state_batch_indices is not None:
        p.call.integers("state_batch_indices", state_batch_indices, "B")
    p.compute()
    skipped = p.skip is not None and not p.call.by_jax
    weighed = {} if p.call.by_jax else {"weight": p.dt, "skip": p.skip}
    with called(_NAMES, x):
        found = step_for(p.C)(
            "simple_gla",
            p.C,
            p.B,
            p.v if p.call.by_jax else x,
            g=p.g,
            **weighed,
            state=state,
            state_indices=state_batch_indices,
            scale=1,
            state_v_first=True,
        )
    o, state = p.call.stepped(found, state)
    y: Array = p.finish(o, skipped=skipped)
    if state_batch_indices is not None and p.D is not None and not skipped:
        there = (state_batch_indices >= 0) & (state_batch_indices < state.shape[0])
        y = p.call.xp.where(there[:, None, None], y, p.call.xp.zeros_like(y))
    done: Array = p.call.with_state(y, state)
    return done


def ssd_backward(
    dy: Array,
    x: Array,
    dt: AnyArray | float,
    A: AnyArray | float,
    B: Array,
    C: Array,
    *,
    D: AnyArray | float | None = None,
    z: AnyArray | None = None,
    dt_bias: AnyArray | float | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: AnyArray | None = None,
    d_final_states: AnyArray | None = None,
    seq_idx: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
) -> SSDGradients:
    """The gradients of :func:`ssd`.

    Parameters
    ----------
    dy : array [B,T,H,P], dtype of x
        The gradient of y.
    x : array [B,T,H,P]
    dt : array [B,T,H] or float
    A : array [H] or float
        Negative. dt A is the natural LOG of the decay.
    B, C : array [B,T,G,N], dtype of x
    D : array [H] or [H,P], or float, optional
    z : array [B,T,H,P], optional
        The outputs are then computed once more, for dz.
    d_final_states : array [S,H,P,N], optional
        The gradient of the final states, float32 (float64 for float64 inputs).
    dt_bias, dt_softplus, dt_limit, initial_states, seq_idx, cu_seqlens, mode, chunk_size :
        As in the forward call.

    Returns
    -------
    SSDGradients

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of x.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the gradients, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Warns
    -----
    RuntimeWarning
        On the CPU: dt A is above 0, so the state may grow without bound.

    Examples
    --------
    A time step at which the limit holds has no gradient:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> dy, x = rng.standard_normal((2, 1, 4, 2, 3))
    >>> B, C = rng.standard_normal((2, 1, 4, 1, 5))
    >>> dt = np.array([0.05, 0.2, 0.3, 0.4])[None, :, None] * np.ones(2)
    >>> grads = linattn.ssd_backward(dy, x, dt, -1.0, B, C, dt_limit=(0.1, 1.0))
    >>> (grads.ddt[0, :, 0] == 0).tolist()
    [True, False, False, False]
    """
    p = _Problem(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, recorded=False)
    p.call.array("dy", dy, "B T H P")
    ends = p.sequences(seq_idx, cu_seqlens)
    p.compute()
    call = p.call
    options: dict[str, Any] = {
        "scale": 1,
        "initial_state": initial_states,
        "cu_seqlens": ends,
        "mode": mode,
        "chunk_size": chunk_size,
        "state_v_first": True,
    }
    dz, do = None, dy
    if p.z is not None:  # was y = (o + D x) silu(z)
        dy_wide = call.real_of(dy)
        do = dy_wide * silu(p.z)
    with called(_NAMES, x):
        # first, so that linattn.segments finds this pass
        grads = Gradients(
            *backward_for(dy)(
                "simple_gla",
                p.C,
                p.B,
                x,
                do=call.short(do),
                g=p.g,
                weight=p.dt,
                skip=p.skip,
                d_final_state=d_final_states,
                **options,
            )
        )
        if p.z is not None:
            o, _ = unrecorded_core(x)(
                "simple_gla", p.C, p.B, x, g=p.g, weight=p.dt, skip=p.skip, **options
            )
            o = p.skipped(o) if p.skip is None else call.real_of(o)
            dz = dy_wide * o * silu_slope(p.z)
    d_dt = grads.dweight + grads.dg * p.A
    dA = total(call.xp, grads.dg * p.dt, (0, 1))
    dx, dD = grads.dv, grads.dskip
    if p.D is not None and p.skip is None:  # was o + D x, with a D of all values
        do = call.real_of(do)
        dx = call.short(call.real_of(dx) + p.D * do)
        dD = total(call.xp, do * x, (0, 1))
    d_raw = d_dt * p.slope_of_dt()
    return SSDGradients(
        dx=dx,
        ddt=call.as_given(d_raw, p.dt_given),
        dA=call.as_given(dA, p.A_given),
        dB=grads.dk,
        dC=grads.dq,
        dD=call.as_given(dD, p.D_given),
        dz=call.as_given(dz, p.z_given),
        ddt_bias=call.as_given(total(call.xp, d_raw, (0, 1)), p.bias_given),
        d_initial_states=grads.d_initial_state,
    )
