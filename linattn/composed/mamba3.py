"""Mamba-3 with one input and one output (SISO). Forward, step, backward."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from linattn._elementwise import silu, silu_slope
from linattn.composed._arrays import Arrays, Sequences, total
from linattn.composed._names import called
from linattn.features import cast
from linattn.ops._core import AnyArray, Array, Mode
from linattn.ops.simple_gla import simple_gla, simple_gla_backward, simple_gla_step

__all__ = ["Mamba3Gradients", "Mamba3States", "mamba3", "mamba3_backward", "mamba3_step"]

_NAMES = {
    "q": "C",
    "k": "B",
    "v": "x",
    "g": "dt * A",
    "do": "dy",
    "initial_state": "initial_states: ssm",
    "state": "state: ssm",
    "d_final_state": "d_final_states: ssm",
    "state_indices": "state_batch_indices",
}


class Mamba3States(NamedTuple):
    """The state of :func:`mamba3`, and the gradient of one. S is the number of sequences.

    Attributes
    ----------
    angle : array [S,H,R], float64
        The angles of the last token's rotation, from 0 to 2 pi. (Their gradient is float32 for
        arrays other than float64.)
    ssm : array [S,H,P,N]
    k : array [S,H,N]
        The last token's row of B, rotated.
    v : array [S,H,P]
        The last token's row of x.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x, dt, BC = np.ones((1, 3, 2, 4)), np.ones((1, 3, 2)), np.ones((1, 3, 1, 6))
    >>> angles = np.ones((1, 3, 2, 3))
    >>> _, state = linattn.mamba3(x, dt, -1.0, BC, BC, 0.5, angles, return_final_states=True)
    >>> state.angle.round(2)[0, 0].tolist(), state.ssm.shape, state.k.shape
    ([3.0, 3.0, 3.0], (1, 2, 4, 6), (1, 2, 6))
    """

    angle: Any
    ssm: Any
    k: Any
    v: Any


class Mamba3Gradients(NamedTuple):
    """The gradients of :func:`mamba3`, each with the shape and dtype of its input.

    The gradient of an array that the call was not given is None. That of a number is a number.

    Attributes
    ----------
    dx : array [B,T,H,P]
    ddt, dtrap : array [B,T,H] or float
    dA : array [B,T,H] or [H], or float
    dB, dC : array [B,T,G,N]
    dangles : array [B,T,H,R] or None
    dD : array [H] or [H,P], float or None
    dz : array [B,T,H,P] or None
    d_initial_states : Mamba3States or None

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x, dt, BC = np.ones((1, 3, 2, 4)), np.ones((1, 3, 2)), np.ones((1, 3, 1, 6))
    >>> grads = linattn.mamba3_backward(x, x, dt, -1.0, BC, BC, 0.5)
    >>> grads.dB.shape, isinstance(grads.dtrap, float), grads.dangles is None
    ((1, 3, 1, 6), True, True)
    """

    dx: Any
    ddt: Any
    dA: Any
    dB: Any
    dC: Any
    dtrap: Any
    dangles: Any | None
    dD: Any | None
    dz: Any | None
    d_initial_states: Mamba3States | None


def _turned(xp: Any, x: Any, cos: Any, sin: Any) -> Any:
    """The first pairs (x_0, x_1), (x_2, x_3), ... turned by their angles [...,R]."""
    R = cos.shape[-1]
    pairs = x[..., : 2 * R].reshape((*x.shape[:-1], R, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    turned = xp.stack([a * cos - b * sin, a * sin + b * cos], -1)
    return xp.concatenate([turned.reshape((*x.shape[:-1], 2 * R)), x[..., 2 * R :]], -1)


def _d_angle(x: Any, dx: Any, R: int) -> Any:
    """The gradient of the angles by which the rows x were turned."""
    shape = (*x.shape[:-1], R, 2)
    x, dx = x[..., : 2 * R].reshape(shape), dx[..., : 2 * R].reshape(shape)
    return dx[..., 1] * x[..., 0] - dx[..., 0] * x[..., 1]


def _outer(v: Any, k: Any) -> Any:
    return v[..., :, None] * k[..., None, :]


class _Problem:
    """The arguments of a call, checked, and what simple_gla is called with."""

    def __init__(
        self,
        x: Any,
        dt: Any,
        A: Any,
        B: Any,
        C: Any,
        trap: Any,
        angles: Any,
        D: Any,
        z: Any,
        tokens: str = "T ",
        recorded: bool = True,
    ) -> None:
        call = Arrays("x", x, f"B {tokens}H P", recorded=recorded)
        for name, required in (("dt", dt), ("A", A), ("trap", trap)):
            if required is None:
                raise TypeError(f"{name}: expected an array or a number, got None")
        gate = f"B {tokens}H"
        self.dt_given = call.wide("dt", dt, gate)
        self.A_given = call.wide("A", A, gate, "H")
        self.B_given = call.array("B", B, f"B {tokens}G N")
        self.C_given = call.array("C", C, f"B {tokens}G N")
        call.multiple("B", "H", "G")
        self.trap_given = call.wide("trap", trap, gate)
        self.angles_given = call.wide("angles", angles, f"B {tokens}H R", number=False)
        self.R = 0 if angles is None else call.sizes["R"]
        call.sizes["R"] = self.R
        if 2 * self.R > call.sizes["N"]:
            raise ValueError(
                f"angles: expected R <= N / 2 = {call.sizes['N'] // 2}, got R = {self.R}"
            )
        self.D_given = call.wide("D", D, "H", "H P")
        self.z_given = call.wide("z", z, f"B {tokens}H P", number=False)
        self.call, self.xp = call, call.xp
        self.state: Mamba3States | None = None

    def take_state(self, name: str, state: Any, letter: str, written: bool = False) -> None:
        """The four arrays of a state."""
        if state is None and not written:
            return
        if not isinstance(state, tuple | list):
            raise TypeError(f"{name}: expected (angle, ssm, k, v), got {type(state)}")
        if len(state) != 4:
            raise ValueError(f"{name}: expected (angle, ssm, k, v), got {len(state)} items")
        letters = [f"{letter} H {axes}" for axes in ("R", "P N", "N", "P")]
        parts = (
            self.call.state(f"{name}: {part}", x, its, written=written, angle=part == "angle")
            for part, x, its in zip(Mamba3States._fields, state, letters, strict=True)
        )
        self.state = Mamba3States(*parts)

    def sequences(self, cu_seqlens: Any) -> None:
        self.rows = Sequences(self.call, self.call.packed("cu_seqlens", cu_seqlens), "S")

    def zeros(self, letters: str) -> Any:
        return self.call.full([self.call.sizes[letter] for letter in letters.split()], 0.0)

    def gradient_of_state(self, d_state: Any) -> Mamba3States:
        """That of the final states; zeros in the place of None."""
        name = "d_final_states"
        given = (None,) * 4 if d_state is None else d_state
        if not isinstance(given, tuple | list):
            raise TypeError(f"{name}: expected (angle, ssm, k, v), got {type(given)}")
        if len(given) != 4:
            raise ValueError(f"{name}: expected (angle, ssm, k, v), got {len(given)} items")
        letters = [f"S H {axes}" for axes in ("R", "P N", "N", "P")]
        parts = [
            self.call.wide(f"{name}: {part}", x, its, number=False)
            for part, x, its in zip(Mamba3States._fields, given, letters, strict=True)
        ]
        return Mamba3States(
            *(
                self.zeros(its) if x is None else self.call.real_of(x)
                for x, its in zip(parts, letters, strict=True)
            )
        )

    # ---- what is computed ----

    def read(self) -> None:
        """The gates, and the weights of a write: for its own token, and for the next one."""
        real = self.call.real_of
        self.x, self.D, self.z = real(self.call.like), real(self.D_given), real(self.z_given)
        self.dt, self.A, self.trap = map(real, (self.dt_given, self.A_given, self.trap_given))
        self.angles = real(self.angles_given)
        self.own, self.other = self.trap * self.dt, (1 - self.trap) * self.dt
        self.g = self.dt * self.A
        if self.D is not None and self.D.ndim == 1:
            self.D = self.D[:, None]

    def for_heads(self, x: Any) -> Any:
        """Rows [...,G,N] of groups as rows of the H heads that share them."""
        H, G = self.call.sizes["H"], self.call.sizes["G"]
        if H == G:
            return x
        shape = (*x.shape[:-1], H // G, x.shape[-1])
        return self.xp.broadcast_to(x[..., None, :], shape).reshape((*x.shape[:-2], H, x.shape[-1]))

    def rate(self) -> Any:
        """By how much a token turns, in float64: a sum of many float32 angles has few digits."""
        return cast(self.dt[..., None] * self.angles, self.call.double)

    def turn(self, theta: Any) -> None:
        """q and k from the angles of the tokens, [...,H,R]."""
        real = self.call.real_of
        q, k = (self.for_heads(real(rows)) for rows in (self.C_given, self.B_given))
        if self.R:
            self.cos, self.sin = (
                cast(turn(theta), self.call.real) for turn in (self.xp.cos, self.xp.sin)
            )
            q, k = (_turned(self.xp, rows, self.cos, self.sin) for rows in (q, k))
        self.q, self.k = self.call.short(q), self.call.short(k)

    def within_a_turn(self, theta: Any) -> Any:
        turn = 2 * math.pi
        return theta - turn * self.xp.floor(theta / turn)

    def begin(self) -> None:
        """The gates, and the state before the first tokens. Its last row has no part that waits."""
        self.read()
        letters = ("S H R", "S H P N", "S H N", "S H P")
        if self.state is None:
            self.before = Mamba3States(*map(self.zeros, letters))
        else:
            self.before = Mamba3States(self.state[0], *map(self.call.real_of, self.state[1:]))
        angle = cast(self.before.angle, self.call.double)
        self.before = self.before._replace(angle=angle)
        self.own_before = self.zeros("S H")
        self.S = None if self.state is None else self.before.ssm

    def turn_tokens(self) -> None:
        """The angles, and with them q and k."""
        self.theta = None
        if self.R:
            self.theta = self.rows.sums(self.rate()) + self.rows.own(self.before.angle)
        self.turn(self.theta)

    def shift(self) -> None:
        """simple_gla of the write before each token, which decays with the state: its v and k.

        A token has the part of its own row by itself. Of the row before it comes the part that was
        its own, and the part that waited for this token.
        """
        rows, short = self.rows, self.call.short
        self.k_before = rows.earlier(self.k, short(self.before.k))
        self.x_before = rows.earlier(self.x, self.before.v)
        self.decay = self.xp.exp(self.g)
        self.weight = rows.earlier(self.own, self.own_before) + self.other
        self.v = short((self.decay * self.weight)[..., None] * self.x_before)
        self.score = (self.call.real_of(self.q) * self.call.real_of(self.k)).sum(-1)

    def compute(self) -> None:
        self.begin()
        self.turn_tokens()
        self.shift()

    def arguments(self) -> dict[str, Any]:
        """Those of simple_gla that are not the caller's own."""
        return {
            "q": self.q,
            "k": self.k_before,
            "v": self.v,
            "g": self.g,
            "scale": 1,
            "initial_state": self.S,
            "state_v_first": True,
        }

    def last_write(self) -> tuple[Any, Any, Any]:
        """Of every sequence: the part of the last row that is its own, and that row of k and x."""
        rows, before = self.rows, self.before
        k = rows.last(self.call.real_of(self.k), before.k)
        return rows.last(self.own, self.own_before), k, rows.last(self.x, before.v)

    def final(self, S: Any) -> Mamba3States:
        own, k, v = self.last_write()
        angle = self.before.angle
        if self.R:
            angle = self.rows.last(self.within_a_turn(self.theta), angle)
        return Mamba3States(angle, S + own[..., None, None] * _outer(v, k), k, v)

    def read_out(self, o: Any) -> Any:
        """The outputs before D and z."""
        return self.call.real_of(o) + (self.score * self.own)[..., None] * self.x

    def finish(self, o: Any) -> Any:
        o = o if self.D is None else o + self.D * self.x
        return self.call.short(o if self.z is None else o * silu(self.z))


def mamba3(
    x: Array,
    dt: AnyArray | float,
    A: AnyArray | float,
    B: Array,
    C: Array,
    trap: AnyArray | float,
    angles: AnyArray | None = None,
    *,
    D: AnyArray | float | None = None,
    z: AnyArray | None = None,
    initial_states: Mamba3States | tuple[AnyArray, ...] | None = None,
    return_final_states: bool = False,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    allow_tf32: bool | None = None,
) -> tuple[Array, Mamba3States | None]:
    """Mamba-3's recurrence with one input and one output (SISO).

    ::

        angle <- angle + dt angles,   k = B turned by angle,   q = C turned by angle
        h <- exp(dt A) (h + (1 - trap) dt x_before k_before') + trap dt x k'
        y  = h q + D x,   y <- y silu(z)

    A token writes by the trapezoidal rule: a part of its own row, and a part of the row before it,
    which decays with the state. It is :func:`simple_gla` of turned rows, one token later, and the
    part of its own row for each token. The layer's projections, norms and biases are not in it, nor
    is the form with several inputs and outputs (MIMO).

    Parameters
    ----------
    x : array [B,T,H,P]
    dt : array [B,T,H] or float
        The time step, after its softplus.
    A : array [B,T,H] or [H], or float
        Negative. dt A is the natural LOG of the decay.
    B, C : array [B,T,G,N], dtype of x
        Heads share them by groups: G divides H.
    trap : array [B,T,H] or float
        From 0 to 1, after its sigmoid. 1 is Euler's rule, as Mamba-2 has it.
    angles : array [B,T,H,R], optional
        By how much a unit of time turns the pairs (0, 1), (2, 3), ... of B and C, in radians; of
        R <= N / 2 pairs, the others stay. (The public layer passes tanh(.) pi.)
    D : array [H] or [H,P], or float, optional
        The factor of x that is added to y, before the gate.
    z : array [B,T,H,P], optional
        The gate: y is multiplied by silu(z).
    initial_states : Mamba3States, or (angle, ssm, k, v), optional
        [S,H,R], [S,H,P,N], [S,H,N], [S,H,P]; S is B, or the number of packed sequences. float32
        (float64 for float64 inputs) or bfloat16; the angles float64 or float32. Zeros by default.
    return_final_states : bool
        Return the state after the last tokens; else None is returned in its place.
    cu_seqlens : int array [S+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1]. The host
        reads the array.
    mode, chunk_size, allow_tf32 : see :func:`simple_gla`

    Returns
    -------
    y : array [B,T,H,P], dtype of x
    final_states : Mamba3States or None

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of x.
    ValueError
        Shapes, values or options do not fit.
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
    mamba3_step, mamba3_backward : One token; the gradients.
    linattn.reference.mamba3 : The same in NumPy, float64, token by token.

    References
    ----------
    Lahoti et al., 2026, *Mamba-3: Improved Sequence Modeling using State Space Principles*,
    arXiv:2603.15569.

    Examples
    --------
    With Euler's rule and without angles it is Mamba-2:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> x, dt = rng.standard_normal((1, 8, 2, 3)), rng.uniform(0.1, 1, (1, 8, 2))
    >>> B, C = rng.standard_normal((2, 1, 8, 1, 4))
    >>> y, _ = linattn.mamba3(x, dt, -1.0, B, C, trap=1.0)
    >>> np.allclose(y, linattn.ssd(x, dt, -1.0, B, C)[0])
    True
    """
    p = _Problem(x, dt, A, B, C, trap, angles, D, z)
    p.sequences(cu_seqlens)
    p.take_state("initial_states", initial_states, "S")
    p.compute()
    with called(_NAMES, x):
        o, S = simple_gla(
            **p.arguments(),
            output_final_state=return_final_states,
            cu_seqlens=cu_seqlens,
            mode=mode,
            chunk_size=chunk_size,
            allow_tf32=allow_tf32,
        )
    return p.finish(p.read_out(o)), None if S is None else p.final(S)


def mamba3_step(
    state: Mamba3States | tuple[AnyArray, ...],
    x: Array,
    dt: AnyArray | float,
    A: AnyArray | float,
    B: Array,
    C: Array,
    trap: AnyArray | float,
    angles: AnyArray | None = None,
    *,
    D: AnyArray | float | None = None,
    z: AnyArray | None = None,
    state_batch_indices: AnyArray | None = None,
) -> Array:
    """One token of :func:`mamba3`; the arrays of ``state`` are changed in place.

    Parameters
    ----------
    state : Mamba3States, or (angle, ssm, k, v)
        [B,H,R], [B,H,P,N], [B,H,N], [B,H,P]. float32 (float64 for float64 inputs) or bfloat16; the
        angles float64 or float32.
    x : array [B,H,P]
    dt : array [B,H] or float
    A : array [B,H] or [H], or float
        Negative. dt A is the natural LOG of the decay.
    B, C : array [B,G,N], dtype of x
    trap : array [B,H] or float
    angles : array [B,H,R], optional
    D : array [H] or [H,P], or float, optional
    z : array [B,H,P], optional
    state_batch_indices : int array [B], optional
        The arrays of ``state`` are then pools: row n has state ``state_batch_indices[n]``, and -1
        none (its y is zeros). No state twice.

    Returns
    -------
    y : array [B,H,P], dtype of x

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

    Warns
    -----
    RuntimeWarning
        On the CPU: dt A is above 0, so the state may grow without bound.

    Examples
    --------
    The state of a prompt is handed on to the steps:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> x, angles = rng.standard_normal((2, 1, 6, 2, 2))
    >>> B, C = rng.standard_normal((2, 1, 6, 1, 4))
    >>> y, _ = linattn.mamba3(x, 0.3, -1.0, B, C, 0.4, angles)
    >>> at = (slice(None), slice(0, 5))  # the first five tokens
    >>> _, state = linattn.mamba3(
    ...     x[at], 0.3, -1.0, B[at], C[at], 0.4, angles[at], return_final_states=True
    ... )
    >>> last = linattn.mamba3_step(
    ...     state, x[:, 5], 0.3, -1.0, B[:, 5], C[:, 5], 0.4, angles[:, 5]
    ... )
    >>> np.allclose(last, y[:, 5])
    True
    """
    p = _Problem(x, dt, A, B, C, trap, angles, D, z, tokens="", recorded=False)
    pooled = state_batch_indices is not None
    if pooled:
        p.call.integers("state_batch_indices", state_batch_indices, "B")
    p.take_state("state", state, "pool" if pooled else "B", written=True)
    p.read()
    angle, ssm, k, v = state
    xp, call = p.xp, p.call
    at: Any = ...
    if state_batch_indices is not None:
        at = xp.clip(state_batch_indices, 0, max(len(ssm) - 1, 0))
    theta = None
    if p.R:
        theta = p.rate() + cast(angle[at], call.double)
    p.turn(theta)
    half = call.short(p.other[..., None] * call.real_of(v[at]))
    own = call.short(p.own[..., None] * p.x)
    options: dict[str, Any] = {
        "state_indices": state_batch_indices,
        "scale": 1,
        "state_v_first": True,
    }
    with called(_NAMES, x):
        k_before = call.contiguous(call.short(call.real_of(k[at])))
        found = simple_gla_step(p.q, k_before, half, 0.0, state=ssm, **options)
        _, ssm = call.stepped(found, ssm)
        found = simple_gla_step(p.q, p.k, own, p.g, state=ssm, **options)
        o, ssm = call.stepped(found, ssm)
    y: Array = p.finish(call.real_of(o))
    if state_batch_indices is not None:
        there = (state_batch_indices >= 0) & (state_batch_indices < len(ssm))
        y = xp.where(there[:, None, None], y, xp.zeros_like(y))
    k = call.replaced(k, p.k, state_batch_indices)
    v = call.replaced(v, p.x, state_batch_indices)
    if p.R:
        angle = call.replaced(angle, p.within_a_turn(theta), state_batch_indices)
    done: Array = call.with_state(y, Mamba3States(angle, ssm, k, v))
    return done


def mamba3_backward(
    dy: Array,
    x: Array,
    dt: AnyArray | float,
    A: AnyArray | float,
    B: Array,
    C: Array,
    trap: AnyArray | float,
    angles: AnyArray | None = None,
    *,
    D: AnyArray | float | None = None,
    z: AnyArray | None = None,
    initial_states: Mamba3States | tuple[AnyArray, ...] | None = None,
    d_final_states: Mamba3States | tuple[AnyArray | None, ...] | None = None,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
) -> Mamba3Gradients:
    """The gradients of :func:`mamba3`.

    Parameters
    ----------
    dy : array [B,T,H,P], dtype of x
        The gradient of y.
    x : array [B,T,H,P]
    dt : array [B,T,H] or float
    A : array [B,T,H] or [H], or float
        Negative. dt A is the natural LOG of the decay.
    B, C : array [B,T,G,N], dtype of x
    trap : array [B,T,H] or float
    angles : array [B,T,H,R], optional
    D : array [H] or [H,P], or float, optional
    z : array [B,T,H,P], optional
        The outputs are then computed once more, for dz.
    d_final_states : Mamba3States, or (angle, ssm, k, v), optional
        The gradients of the final states; None for those that are zeros.
    initial_states, cu_seqlens, mode, chunk_size :
        As in the forward call.

    Returns
    -------
    Mamba3Gradients

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
    Turning all tokens alike changes nothing, so of one token the angle has no gradient:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> dy, x, angles = rng.standard_normal((3, 1, 1, 2, 2))
    >>> B, C = rng.standard_normal((2, 1, 1, 1, 4))
    >>> grads = linattn.mamba3_backward(dy, x, 0.3, -1.0, B, C, 0.4, angles)
    >>> np.allclose(grads.dangles, 0), grads.dx.shape
    (True, (1, 1, 2, 2))
    """
    p = _Problem(x, dt, A, B, C, trap, angles, D, z, recorded=False)
    p.call.array("dy", dy, "B T H P")
    p.sequences(cu_seqlens)
    p.take_state("initial_states", initial_states, "S")
    d_final = p.gradient_of_state(d_final_states)
    p.compute()
    call, xp, rows = p.call, p.xp, p.rows
    options: dict[str, Any] = p.arguments() | {
        "cu_seqlens": cu_seqlens,
        "mode": mode,
        "chunk_size": chunk_size,
    }
    do, dz = call.real_of(dy), None
    with called(_NAMES, x):
        if p.z is not None:  # was y = (o + D x) silu(z)
            o = p.read_out(simple_gla(**options)[0])
            o = o if p.D is None else o + p.D * p.x
            do, dz = do * silu(p.z), do * o * silu_slope(p.z)
        grads = simple_gla_backward(call.short(do), d_final_state=d_final.ssm, **options)
    q, k, dq, dk_before, dv = map(call.real_of, (p.q, p.k, grads.dq, grads.dk, grads.dv))
    # was o + score own x, score = q k
    of_own = (do * p.x).sum(-1)
    d_score = of_own * p.own
    dx = (p.score * p.own)[..., None] * do
    # was v = decay weight x_before, weight = own of the token before + other
    dx_before = (p.decay * p.weight)[..., None] * dv
    d_log = p.decay * (dv * p.x_before).sum(-1)
    d_other, dg = d_log, grads.dg + p.weight * d_log
    # was final ssm = S + own v k' of the last token
    own, k_last, v_last = p.last_write()
    read_k = (d_final.ssm * k_last[..., None, :]).sum(-1)
    dk_last = d_final.k + own[..., None] * (d_final.ssm * v_last[..., None]).sum(-2)
    dx_last = d_final.v + own[..., None] * read_k
    d_own = of_own * p.score + rows.later(d_other, (read_k * v_last).sum(-1))
    # were k_before and x_before = k and x one token later
    dk, dx = rows.later(dk_before, dk_last), dx + rows.later(dx_before, dx_last)
    d_initial = None
    if p.state is not None:
        dk0, dv0 = rows.first(dk_before, dk_last), rows.first(dx_before, dx_last)
        d_initial = (grads.d_initial_state, dk0, dv0)
    # was g = dt A, own = trap dt, other = (1 - trap) dt
    d_dt = dg * p.A + p.trap * d_own + (1 - p.trap) * d_other
    dA, d_trap = dg * p.dt, p.dt * (d_own - d_other)
    d_angles, d_angle0 = None, d_final.angle
    if p.R:  # was theta = sums of dt angles; a score of rows that turn alike has no part in it
        d_theta = cast(_d_angle(q, dq, p.R) + _d_angle(k, dk, p.R), call.double)
        at_last = rows.at(rows.is_last, d_final.angle, xp.zeros_like(p.angles))
        d_rate = cast(rows.sums(d_theta + cast(at_last, call.double), True), call.real)
        d_angles, d_angle0 = p.dt[..., None] * d_rate, rows.first(d_rate, d_final.angle)
        d_dt = d_dt + (p.angles * d_rate).sum(-1)
    dq, dk = dq + d_score[..., None] * k, dk + d_score[..., None] * q
    if p.R:
        dq, dk = (_turned(xp, rows_, p.cos, -p.sin) for rows_ in (dq, dk))
    dD = None
    if p.D is not None:  # was o + D x
        dx = dx + p.D * do
        dD = total(xp, do * p.x, (0, 1))
        if getattr(p.D_given, "ndim", 1) == 1:
            dD = dD.sum(-1)
    if getattr(p.A_given, "ndim", 3) == 1:
        dA = total(xp, dA, (0, 1))

    def of_groups(rows_: Any) -> Any:
        H, G = call.sizes["H"], call.sizes["G"]
        shape = (*rows_.shape[:2], G, H // G, rows_.shape[-1])
        return call.short(rows_.reshape(shape).sum(3))

    return Mamba3Gradients(
        dx=call.short(dx),
        ddt=call.as_given(d_dt, p.dt_given),
        dA=call.as_given(dA, p.A_given),
        dB=of_groups(dk),
        dC=of_groups(dq),
        dtrap=call.as_given(d_trap, p.trap_given),
        dangles=call.as_given(d_angles, p.angles_given),
        dD=call.as_given(dD, p.D_given),
        dz=call.as_given(dz, p.z_given),
        d_initial_states=None if d_initial is None else Mamba3States(d_angle0, *d_initial),
    )
