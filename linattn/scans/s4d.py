"""S4D: a diagonal state space that is the same for all tokens. Forward, step, backward."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from linattn import _rooms
from linattn.features import cast, held, library_of, shape_of
from linattn.ops._core import AnyArray, Array
from linattn.scans._pairs import as_complex, as_pairs, dtype_name, is_complex, with_state

__all__ = ["S4DGradients", "s4d", "s4d_backward", "s4d_step"]

Discretization = Literal["zoh", "bilinear"]

# Below it phi(L) and its derivative are series of this many terms: the first one that is left out
# is 0.05^10 / 11! = 2e-21. Above it the quotients lose log10(1 / 0.05) of float64's digits, twice.
_SMALL, _TERMS = 0.05, 9


class S4DGradients(NamedTuple):
    """The gradients of :func:`s4d`, each with the shape and dtype of its input.

    That of a complex array is complex: its real part belongs to the real part of the array, and its
    imaginary part to the imaginary one.

    Attributes
    ----------
    du : array [B,T,D]
    ddt : array [D]
    dA, dB, dC : array [D,N]
    dD : array [D] or None
    d_initial_state : array [S,D,N] or None

    Examples
    --------
    >>> import numpy as np, linattn
    >>> u, A = np.ones((1, 3, 2)), -np.ones((2, 4)) + 1j
    >>> grads = linattn.s4d_backward(u, u, np.ones(2), A, A, A)
    >>> grads.dA.shape, grads.dA.dtype.name, grads.dD is None
    ((2, 4), 'complex128', True)
    """

    du: Any
    ddt: Any
    dA: Any
    dB: Any
    dC: Any
    dD: Any | None
    d_initial_state: Any | None


def s4d(
    u: Array,
    dt: AnyArray,
    A: AnyArray,
    B: AnyArray,
    C: AnyArray,
    *,
    D: AnyArray | None = None,
    discretization: Discretization = "zoh",
    initial_state: AnyArray | None = None,
    output_final_state: bool = False,
    cu_seqlens: AnyArray | None = None,
    out: Array | None = None,
) -> tuple[Array, Any]:
    """A diagonal state space, S4's successor, as a recurrence.

    With h' = A h + B u held for a time step dt, each channel d has::

        h[n] <- a[n] h[n] + b[n] u,   y = 2 Re (sum over n of C[n] h[n]) + D u
        zoh       a = exp(dt A),                    b = (exp(dt A) - 1) / A B
        bilinear  a = (1 + dt A/2) / (1 - dt A/2),  b = dt / (1 - dt A/2) B

    Parameters
    ----------
    u : array [B,T,D]
    dt : array [D]
        The time step, of each channel.
    A, B, C : array [D,N]
        Complex: one of each conjugate pair, Re A < 0. Or real, all three: then y is the sum itself,
        without the 2. dt A is the natural LOG of the decay.
    D : array [D], optional
        The part of u in y.
    discretization : "zoh" or "bilinear"
    initial_state : array [S,D,N], optional
        Zeros where it is absent. Complex as A is; float32 parts (float64 for float64 u).
    output_final_state : bool
    cu_seqlens : int array [S+1], optional
        B is 1, and S sequences lie behind one another. They begin at these tokens; T is last.
    out : array [B,T,D], dtype of u, optional
        Where y is to go.

    Returns
    -------
    y : array [B,T,D], dtype of u
    final_state : array [S,D,N] or None

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of u.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold y, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    See Also
    --------
    linattn.selective_scan : Where the time step, B and C are made of the token.

    Notes
    -----
    y is also a convolution of u, with K[l] = 2 Re (sum over n of C[n] a[n]^l b[n]). S4 itself, with
    its low-rank part, is this after its matrix was diagonalised once.

    References
    ----------
    Gu, Goel and Re, 2021, *Efficiently Modeling Long Sequences with Structured State Spaces*,
    arXiv:2111.00396; Gu, Gupta, Goel and Re, 2022, *On the Parameterization and Initialization of
    Diagonal State Space Models*, arXiv:2206.11893.

    Examples
    --------
    A real state that halves with every token:

    >>> import numpy as np, linattn
    >>> u = np.array([1.0, 0.0, 0.0])[None, :, None]
    >>> A, one = -np.log([[2.0]]), np.ones((1, 1))
    >>> y, _ = linattn.s4d(u, np.ones(1), A, A, one)
    >>> (y[0, :, 0] / y[0, 0, 0]).round(6).tolist()
    [1.0, 0.5, 0.25]
    """
    p = _Problem(u, dt, A, B, C, discretization)
    arrays = {
        **p.constants(u, C, D),
        "cu_seqlens": cu_seqlens,
        "initial_state": p.inward("initial_state", initial_state),
    }
    y, state = _rooms.forward(
        "scan", "fixed", arrays, out=out, complex=p.pairs, output_final_state=output_final_state
    )
    return y, p.outward(state)


def s4d_step(
    state: AnyArray,
    u: Array,
    dt: AnyArray,
    A: AnyArray,
    B: AnyArray,
    C: AnyArray,
    *,
    D: AnyArray | None = None,
    discretization: Discretization = "zoh",
    state_indices: AnyArray | None = None,
    out: Array | None = None,
) -> Array:
    """One token of :func:`s4d`; ``state`` is changed in place.

    Parameters
    ----------
    state : array [B,D,N]
        Complex as A is; its rows contiguous.
    u : array [B,D]
    dt : array [D]
    A, B, C : array [D,N]
        dt A is the natural LOG of the decay.
    D : array [D], optional
    discretization : "zoh" or "bilinear"
    state_indices : int array [B], optional
        ``state`` is then a pool [P,D,N]: row n has state ``state_indices[n]``, and -1 none (its y
        is zeros). No state twice.
    out : array [B,D], optional

    Returns
    -------
    y : array [B,D], dtype of u

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of u.
    ValueError
        Shapes, values or options do not fit, or the state is not contiguous.
    MemoryError
        The memory does not hold y.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> u, A = np.ones((1, 3, 2)), -np.ones((2, 4)) + 1j
    >>> state = np.zeros((1, 2, 4), complex)
    >>> y = [linattn.s4d_step(state, u[:, t], np.ones(2), A, A, A) for t in range(3)]
    >>> np.allclose(np.stack(y, 1), linattn.s4d(u, np.ones(2), A, A, A)[0])
    True
    """
    p = _Problem(u, dt, A, B, C, discretization)
    arrays = {
        **p.constants(u, C, D),
        "state_indices": state_indices,
        "state": p.inward("state", state, in_place=True),
    }
    found = _rooms.step("scan", "fixed", arrays, out=out, complex=p.pairs)
    y: Array = with_state(found, state, arrays["state"]) if p.pairs else found
    return y


def s4d_backward(
    dy: Array,
    u: Array,
    dt: AnyArray,
    A: AnyArray,
    B: AnyArray,
    C: AnyArray,
    *,
    D: AnyArray | None = None,
    discretization: Discretization = "zoh",
    initial_state: AnyArray | None = None,
    d_final_state: AnyArray | None = None,
    cu_seqlens: AnyArray | None = None,
) -> S4DGradients:
    """The gradients of :func:`s4d`.

    Parameters
    ----------
    dy : array [B,T,D], dtype of u
        The gradient of y.
    d_final_state : array [S,D,N], optional
        The gradient of the final state, complex as A is.
    u, dt, A, B, C, D, discretization, initial_state, cu_seqlens :
        As in the forward call. dt A is the natural LOG of the decay.

    Returns
    -------
    S4DGradients

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of u.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the gradients, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> u, A = np.ones((1, 3, 1)), -np.ones((1, 1))
    >>> grads = linattn.s4d_backward(u, u, np.ones(1), A, -A, -A, D=np.ones(1))
    >>> grads.dD.tolist(), grads.ddt.shape
    ([3.0], (1,))
    """
    p = _Problem(u, dt, A, B, C, discretization)
    arrays = {
        "dy": dy,
        **p.constants(u, C, D),
        "cu_seqlens": cu_seqlens,
        "initial_state": p.inward("initial_state", initial_state),
        "d_final_state": p.inward("d_final_state", d_final_state),
    }
    found = _rooms.backward("scan", "fixed", arrays, complex=p.pairs)
    ddt, dA, dB = p.adjoint(p.outward(found["dA"]), p.outward(found["dB"]))
    return S4DGradients(
        du=found["du"],
        ddt=ddt,
        dA=dA,
        dB=dB,
        dC=p.like(p.outward(found["dC"]), C),
        dD=found["dD"],
        d_initial_state=p.outward(found["d_initial_state"]),
    )


class _Problem:
    """The constants a and b of a call, in float64 whatever A is, and their adjoint."""

    def __init__(
        self, u: Any, dt: Any, A: Any, B: Any, C: Any, discretization: Discretization
    ) -> None:
        if discretization not in ("zoh", "bilinear"):
            raise ValueError(
                f'discretization: expected "zoh" or "bilinear", got {discretization!r}'
            )
        self.pairs = is_complex(A)
        shape = shape_of(A)
        for name, x, axes in (("dt", dt, 1), ("A", A, 2), ("B", B, 2), ("C", C, 2)):
            if shape_of(x) is None:
                raise TypeError(f"{name}: expected an array, got {type(x).__name__}")
            if name in "BC" and is_complex(x) is not self.pairs:
                kind = "complex" if self.pairs else "real"
                raise TypeError(
                    f"{name}: expected {kind} numbers, as A has them, got {dtype_name(x)}"
                )
            letters = "[D]" if axes == 1 else "[D,N]"
            got = shape_of(x) or ()
            want = (shape or ())[:axes]
            if len(got) != axes or tuple(got) != tuple(want):
                known = f" = {tuple(want)}" if len(want) == axes and name != "A" else ""
                raise ValueError(f"{name}: expected {letters}{known}, got {tuple(got)}")
        self.xp = xp = library_of(u)
        double = held(xp.float64, u)
        self.wide = held(xp.complex128, u) if self.pairs else double
        self.real = xp.float64 if str(u.dtype).endswith("float64") else xp.float32
        self.zoh = discretization == "zoh"
        self.given = dt, A, B
        self.dt = cast(dt, double)[:, None]
        self.A, self.B = cast(A, self.wide), cast(B, self.wide)
        L = self.dt * self.A
        if self.zoh:
            self.phi, self.slope = _phi(xp, L)
            self.a, self.b = xp.exp(L), self.dt * self.phi * self.B
        else:
            self.divisor = 1 - L / 2
            self.a, self.b = (1 + L / 2) / self.divisor, self.dt / self.divisor * self.B

    def constants(self, u: Any, C: Any, D: Any) -> dict[str, Any]:
        C = cast(C, self.wide)
        shared = (("A", self.a), ("B", self.b), ("C", C))
        arrays = {name: self.inward(name, self.narrow(x)) for name, x in shared}
        return {"u": u, **arrays, "D": D}

    def narrow(self, x: Any) -> Any:
        """In the dtype of the sums."""
        if not self.pairs:
            return cast(x, self.real)
        single = self.real == self.xp.float32
        return cast(x, self.xp.complex64 if single else self.xp.complex128)

    def inward(self, name: str, x: Any, *, in_place: bool = False) -> Any:
        if x is None or not self.pairs:
            return x
        return as_pairs(name, x, in_place=in_place)

    def outward(self, x: Any) -> Any:
        return as_complex(x) if self.pairs else x

    def like(self, dx: Any, x: Any) -> Any:
        return cast(dx, x.dtype)

    def adjoint(self, da: Any, db: Any) -> tuple[Any, Any, Any]:
        """The gradients of dt, A and B. The gradient of a product takes the other factor's
        conjugate."""
        xp, conj = self.xp, self.xp.conj
        dt, A, B = self.given
        da, db = cast(da, self.wide), cast(db, self.wide)
        if self.zoh:  # was a = exp(L), b = dt phi(L) B
            dL = conj(self.a) * da + conj(self.dt * self.slope * self.B) * db
            dB = conj(self.dt * self.phi) * db
            d_direct = conj(self.phi * self.B) * db
        else:  # was a = (1 + L/2) / d, b = dt / d B, d = 1 - L/2
            over = 1 / self.divisor
            dL = conj(over * over) * da + conj(self.dt * self.B * over * over / 2) * db
            dB = conj(self.dt * over) * db
            d_direct = conj(over * self.B) * db
        ddt = conj(self.A) * dL + d_direct  # was L = dt A
        ddt = (xp.real(ddt) if self.pairs else ddt).sum(-1)
        return cast(ddt, dt.dtype), cast(self.dt * dL, A.dtype), cast(dB, B.dtype)


def _phi(xp: Any, L: Any) -> tuple[Any, Any]:
    """(exp(L) - 1) / L and its derivative, which are 1 and 1/2 at 0."""
    small = abs(L) < _SMALL
    one = xp.ones_like(L)
    apart = xp.where(small, one, L)
    power = xp.exp(apart)
    phi = (power - 1) / apart
    slope = (power - phi) / apart
    near = xp.where(small, L, 0 * one)
    series, d_series, term, factorial = one, 0 * one, one, 1.0
    for n in range(1, _TERMS + 1):  # phi = sum of L^n / (n+1)!
        factorial *= n + 1
        d_series = d_series + n * term / factorial
        term = term * near
        series = series + term / factorial
    return xp.where(small, series, phi), xp.where(small, d_series, slope)
