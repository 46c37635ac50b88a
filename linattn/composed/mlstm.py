"""The mLSTM of xLSTM: an exponential input gate and a normaliser. Forward, step, backward."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

from linattn._elementwise import logsigmoid, sigmoid
from linattn.composed._arrays import Arrays, Sequences, detached
from linattn.composed._names import called
from linattn.features import cast, finite_eps
from linattn.ops._core import AnyArray, Array, Mode, step_for
from linattn.ops.simple_gla import simple_gla, simple_gla_backward, simple_gla_step

__all__ = ["MLSTMGradients", "mlstm", "mlstm_backward", "mlstm_step"]

_NAMES = {"g": "f", "do": "dh", "initial_state": "initial_state: C", "state": "state: C"}


class MLSTMGradients(NamedTuple):
    """The gradients of :func:`mlstm`, each with the shape and dtype of its input.

    Attributes
    ----------
    dq, dk : array [B,T,H,K]
    dv : array [B,T,HV,V]
    di, df : array [B,T,HV] or float
        Of the gates as they were given, before exp and the sigmoid.
    d_initial_state : the pair (dC [N,HV,K,V], dn [N,HV,K]), or None
        float32 (float64 for float64 inputs). m has no gradient: it is the unit of C and n.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> x = np.ones((1, 3, 2, 4))
    >>> grads = linattn.mlstm_backward(x, x, x, x, np.zeros((1, 3, 2)), 2.0)
    >>> grads.di.shape, isinstance(grads.df, float), grads.d_initial_state is None
    ((1, 3, 2), True, True)
    """

    dq: Any
    dk: Any
    dv: Any
    di: Any
    df: Any
    d_initial_state: tuple[Any, Any] | None


def _running_maximum(xp: Any, log_f: Any, i: Any) -> Any:
    """m_t = max(log_f_t + m_{t-1}, i_t) for all t, from m = -inf, along axis 1.

    A token maps m to max(a + m, b), and so do several tokens together: they are put together in
    pairs, fours, ... . A sum of all log_f so far, and a maximum of i less that sum, would be the
    same on paper and lose the digits of small m after long sequences.
    """
    a, b, width = log_f, i, 1
    while width < a.shape[1]:
        b = xp.concatenate(
            [b[:, :width], xp.maximum(b[:, :-width] + a[:, width:], b[:, width:])], 1
        )
        a = xp.concatenate([a[:, :width], a[:, :-width] + a[:, width:]], 1)
        width *= 2
    return b


def _sums_to_the_last(xp: Any, x: Any, goes_on: Any) -> Any:
    """y_t = x_t + goes_on_t y_{t+1} for all t along axis 1, put together as above."""
    width = 1
    while width < x.shape[1]:
        x = xp.concatenate([x[:, :-width] + goes_on[:, :-width] * x[:, width:], x[:, -width:]], 1)
        goes_on = xp.concatenate([goes_on[:, :-width] * goes_on[:, width:], goes_on[:, -width:]], 1)
        width *= 2
    return x


class _Problem:
    """The arguments of a call, checked, and what simple_gla is called with.

    The values have one column more, of ones, whose part of the state is n.
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        i: Any,
        f: Any,
        tokens: str = "T ",
        recorded: bool = True,
        eps: float = 0.0,
    ) -> None:
        call = Arrays("q", q, f"B {tokens}H K", recorded=recorded)
        call.array("k", k, f"B {tokens}H K")
        call.array("v", v, f"B {tokens}HV V")
        call.multiple("v", "HV", "H")
        for gate, given in (("i", i), ("f", f)):
            if given is None:
                raise TypeError(f"{gate}: expected an array or a number, got None")
        self.i_given = call.wide("i", i, f"B {tokens}HV")
        self.f_given = call.wide("f", f, f"B {tokens}HV")
        self.call, self.xp, self.eps = call, call.xp, finite_eps(eps)
        self.added: Any = self.eps
        self.q, self.k, self.v = q, k, v
        self.C, self.n, self.m = None, None, None

    @classmethod
    def of_step(cls, q: Any, k: Any, v: Any, i: Any, f: Any, eps: float) -> _Problem:
        """That of a token whose arrays were checked."""
        p = cls.__new__(cls)
        p.call = Arrays.checked(q)
        p.xp, p.eps, p.added = p.call.xp, eps, eps
        p.q, p.k, p.v, p.i_given, p.f_given = q, k, v, i, f
        return p

    def sequences(self, cu_seqlens: Any) -> None:
        self.rows = Sequences(self.call, self.call.packed("cu_seqlens", cu_seqlens), "N")

    def state(self, name: str, state: Any, letters: str, written: bool = False) -> None:
        """C, n and m."""
        if state is None and not written:
            return
        if not isinstance(state, tuple | list):
            raise TypeError(f"{name}: expected (C, n, m), got {type(state)}")
        if len(state) != 3:
            raise ValueError(f"{name}: expected (C, n, m), got {len(state)} items")
        axes = (f"{letters} HV K V", f"{letters} HV K", f"{letters} HV")
        self.C, self.n, self.m = (
            self.call.state(f"{name}: {part}", x, its, short=part != "m", written=written)
            for part, x, its in zip("Cnm", state, axes, strict=True)
        )

    def read_gates(self) -> None:
        """The gates in float64. In float32 the rounding of m, token after token, would be seen."""
        i, f = self.call.real_of(self.i_given), self.call.real_of(self.f_given)
        self.i, self.f = cast(i, self.call.double), cast(f, self.call.double)
        self.log_f = logsigmoid(self.f)

    def first_m(self) -> Any:
        """m before the first token of each sequence; 0 where no state was given."""
        if self.m is not None:
            return cast(detached(self.m), self.call.double)
        return cast(
            self.call.full([self.call.sizes["N"], self.call.sizes["HV"]], 0.0), self.call.double
        )

    def maxima(self, first: Any) -> Any:
        """m of all tokens, from m before the first one of each sequence.

        Without eps h is the same for every m, which therefore has no gradient.
        """
        xp, rows, i, log_f = self.xp, self.rows, self.i, self.log_f
        if not self.eps:
            i, log_f = detached(i), detached(log_f)
        # the first token of a sequence maps every m to one that its own state gives
        of_first = xp.maximum(log_f + rows.own(first), i)
        a = xp.where(rows.is_first[:, None], xp.full_like(log_f, -math.inf), log_f)
        return _running_maximum(xp, a, xp.where(rows.is_first[:, None], of_first, i))

    def compute(self, first: Any = None) -> None:
        """m, then the decay and the values of simple_gla.

        exp(-m) is a factor of C, of n, and of the 1 that the denominator is compared with. first: m
        before the first token of each sequence, if it is not that of the given state.
        """
        self.read_gates()
        xp, rows = self.xp, self.rows
        first = self.first_m() if first is None else first
        recorded = self.maxima(first)
        first, m = detached(first), detached(recorded)
        if self.eps:  # the factor is 1, and has the gradient that m has
            self.added = cast(self.eps * xp.exp(recorded - m), self.call.real)
        before, last = rows.earlier(m, first), rows.last(m, first)
        # where m is not that of the token before: it is i, or the sequence begins
        self.from_i = detached(self.i) >= detached(self.log_f) + before
        self.weigh(before, m)
        # C and n are in units of exp(m): of the m that is returned, which is rounded
        self.last_m = cast(last, self.call.real)
        self.unit = cast(xp.exp(last - cast(self.last_m, self.call.double)), self.call.real)

    def arguments(self) -> dict[str, Any]:
        """Those of simple_gla that are not the caller's own."""
        real = self.call.real_of
        return {
            "q": real(self.q),
            "k": real(self.k),
            "v": self.values(),
            "g": self.g,
            "initial_state": self.initial_state(),
        }

    def results(self, o: Any, S: Any) -> tuple[Any, tuple[Any, Any, Any] | None]:
        """h and the final state, from those of simple_gla."""
        call, V = self.call, self.v.shape[-1]
        o = call.real_of(o)
        h = call.short(self.divide(o[..., :V], o[..., V])[0])
        if S is None:
            return h, None
        S = S * self.unit[..., None, None]
        return h, (call.contiguous(S[..., :V]), call.contiguous(S[..., V]), self.last_m)

    def weigh(self, before: Any, m: Any) -> None:
        """The decay's logarithm, the values, and the least divisor, from m before and after."""
        xp, real = self.xp, self.call.real
        log_f = detached(self.log_f)
        # log f + (before - m) is above 0 by rounding alone. It is log f and a constant to PyTorch.
        constant = xp.clip(log_f + (before - m), None, 0) - xp.where(log_f > -math.inf, log_f, 0)
        self.g = cast(xp.where(log_f > -math.inf, self.log_f, 0) + constant, real)
        self.weight = cast(xp.exp(self.i - m), real)
        self.floor = self.least_divisor(m)

    def least_divisor(self, m: Any) -> Any:
        """exp(-m), as a normal number."""
        most = 700.0 if self.call.real == self.xp.float64 else 87.0
        return cast(self.xp.exp(self.xp.clip(-m, -most, most)), self.call.real)

    def values(self) -> Any:
        """v and a column of ones, times exp(i - m)."""
        weight = self.weight[..., None]
        return self.xp.concatenate([weight * self.call.real_of(self.v), weight], -1)

    def initial_state(self) -> Any:
        if self.C is None or self.n is None:
            return None
        C, n = self.call.real_of(self.C), self.call.real_of(self.n)
        return self.xp.concatenate([C, n[..., None]], -1)

    def divide(self, num: Any, den: Any) -> tuple[Any, Any]:
        """h, and the divisor."""
        divisor = self.xp.maximum(abs(den), self.floor)
        if self.eps:
            divisor = divisor + self.added
        divisor = divisor[..., None]
        return num / divisor, divisor

    def gradients_of_m(self, d_divisor: Any) -> tuple[Any, Any]:
        """di and d log f by way of eps, from the gradient of the divisor."""
        xp, zero = self.xp, cast(self.xp.zeros_like(d_divisor), self.call.double)
        # was divisor = .. + eps exp(m - m held)
        dm = self.eps * cast(d_divisor, self.call.double)
        # was m_t = max(log f_t + m_{t-1}, i_t)
        by_decay = cast(xp.where(self.from_i, zero, xp.ones_like(zero)), self.call.double)
        ends = cast(
            self.call.full([self.call.sizes["N"], self.call.sizes["HV"]], 0.0), self.call.double
        )
        dm = _sums_to_the_last(xp, dm, self.rows.later(by_decay, ends))
        return (
            cast(xp.where(self.from_i, dm, zero), self.call.real),
            cast(xp.where(self.from_i, zero, dm), self.call.real),
        )


def mlstm(
    q: Array,
    k: Array,
    v: Array,
    i: AnyArray | float,
    f: AnyArray | float,
    *,
    scale: float | None = None,
    eps: float = 0.0,
    initial_state: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    output_final_state: bool = False,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
    allow_tf32: bool | None = None,
) -> tuple[Array, tuple[AnyArray, AnyArray, AnyArray] | None]:
    """The matrix LSTM of xLSTM, stabilised: its gates may be of any size.

    ::

        m' = max(log sigmoid(f) + m, i)
        C <- exp(log sigmoid(f) + m - m') C + exp(i - m') k v'
        n <- exp(log sigmoid(f) + m - m') n + exp(i - m') k,   m <- m'
        h  = scale C' q / (max(|scale n' q|, exp(-m)) + eps)

    It is :func:`simple_gla` with a column of ones beside v, whose part of the state is n. m is the
    unit in which C and n are given: their numbers times exp(m) do not depend on it, and without eps
    neither does h. The layer's projections, norms and output gate are not in it.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    i, f : array [B,T,HV] or float
        The input gate before exp, and the forget gate before the sigmoid.
    scale : float, optional
        K**-0.5 by default, which the paper has as a factor of k.
    eps : float
        Added to the divisor, in the unit in which C and n are held. The code of the authors has
        1e-6 there.
    initial_state : the triple (C [N,HV,K,V], n [N,HV,K], m [N,HV]), optional
        float32 (float64 for float64 inputs); C and n may be bfloat16. Zeros by default.
    output_final_state : bool
        Return that triple after the last token; else None is returned in its place.
    cu_seqlens : int array [N+1], optional
        Packed sequences: B is 1 and sequence n is tokens cu_seqlens[n] to cu_seqlens[n+1]. The host
        reads the array.
    mode, chunk_size, allow_tf32 : see :func:`simple_gla`

    Returns
    -------
    h : array [B,T,HV,V], dtype of v
    final_state : the triple (C, n, m), or None

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of q.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the results, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    See Also
    --------
    mlstm_step, mlstm_backward : One token; the gradients.
    linattn.reference.mlstm : The same in NumPy, float64, token by token.

    Notes
    -----
    PyTorch records no gradient of the final m, and none of the initial one. So the gradient of a
    loss that reads C or n of the final state is that with m held. A loss that does not depend on
    the unit, such as one of the h of a later call with that state without eps, has no other part.
    With eps h depends on the m of its own call, and that is recorded. With float16 and bfloat16
    arrays the op computes in float32: the gradient of a quotient is a difference, which short rows
    would not carry.

    References
    ----------
    Beck et al., 2024, *xLSTM: Extended Long Short-Term Memory*, arXiv:2405.04517.

    Examples
    --------
    Gates of hundreds do no harm:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 9, 2, 4))
    >>> i, f = rng.uniform(-300, 300, (2, 1, 9, 2))
    >>> h, (C, n, m) = linattn.mlstm(q, k, v, i, f, output_final_state=True)
    >>> bool(np.isfinite(h).all()), C.shape, n.shape, m.shape
    (True, (1, 2, 4, 4), (1, 2, 4), (1, 2))
    """
    p = _Problem(q, k, v, i, f, eps=eps)
    p.sequences(cu_seqlens)
    p.state("initial_state", initial_state, "N")
    p.compute()
    with called(_NAMES, q):
        o, S = simple_gla(
            **p.arguments(),
            scale=scale,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            mode=mode,
            chunk_size=chunk_size,
            allow_tf32=allow_tf32,
        )
    return p.results(o, S)


def mlstm_step(
    q: Array,
    k: Array,
    v: Array,
    i: AnyArray | float,
    f: AnyArray | float,
    *,
    state: tuple[AnyArray, AnyArray, AnyArray],
    state_indices: AnyArray | None = None,
    scale: float | None = None,
    eps: float = 0.0,
) -> Array:
    """One token of :func:`mlstm`; the arrays of ``state`` are changed in place.

    Parameters
    ----------
    q, k : array [B,H,K]
    v : array [B,HV,V]
    i, f : array [B,HV] or float
        The input gate before exp, and the forget gate before the sigmoid.
    state : the triple (C [B,HV,K,V], n [B,HV,K], m [B,HV])
        float32 (float64 for float64 inputs); C and n may be bfloat16.
    state_indices : int array [B], optional
        The three are then pools of P states: row n has state ``state_indices[n]``, and -1 none (its
        h is zeros). No state twice.
    scale : float, optional
        K**-0.5 by default.
    eps : float
        Added to the divisor.

    Returns
    -------
    h : array [B,HV,V], dtype of v

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of q.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the results, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Examples
    --------
    A value is read back with its key as it was written, if nothing else was:

    >>> import numpy as np, linattn
    >>> q, v = np.ones((1, 1, 4)), np.array([[[3.0, -7.0]]])
    >>> C, n = linattn.zeros_state(1, 1, 4, 2, dtype=np.float64, normalized=True)
    >>> m = np.zeros((1, 1))
    >>> h = linattn.mlstm_step(q, q, v, 5.0, 0.0, state=(C, n, m))
    >>> np.allclose(h, v), m.item()
    (True, 5.0)
    """
    p = _Problem(q, k, v, i, f, tokens="", recorded=False, eps=eps)
    if state_indices is not None:
        p.call.integers("state_indices", state_indices, "B")
    p.state("state", state, "B" if state_indices is None else "P", written=True)
    with called(_NAMES, q):
        done: Array = _step_of(p, state, state_indices, scale)
    return done


def checked_step(q: Any, k: Any, v: Any, i: Any, f: Any, *, state: Any, eps: float) -> Any:
    """:func:`mlstm_step` of arrays that were checked: an adapter's, in its shapes."""
    return _step_of(_Problem.of_step(q, k, v, i, f, eps), state, None, None)


def _step_of(p: _Problem, state: Any, state_indices: Any, scale: float | None) -> Any:
    """A token of a checked call. The state changes; for JAX there is a new one."""
    C, n, m = state
    xp, call = p.xp, p.call
    i, f = call.real_of(p.i_given), call.real_of(p.f_given)
    own = m if state_indices is None else m[xp.clip(state_indices, 0, max(len(m) - 1, 0))]
    # a sum with a float64 number is one
    before = logsigmoid(cast(f, call.double)) + own
    exact = after = xp.maximum(before, i)
    if m.dtype != call.double:
        # rounded up, so that the decay is at most one; the decay is that of the m which is stored
        after = cast(exact, m.dtype)
        above = xp.nextafter(after, xp.full_like(after, math.inf))
        after = xp.where(after < exact, above, after)
    p.g = cast(xp.clip(before - after, None, 0), call.real)
    p.weight = xp.exp(i - after)
    p.floor = p.least_divisor(after)
    q, k, v = (call.real_of(x) for x in (p.q, p.k, p.v))
    weight = p.weight[..., None]
    options: dict[str, Any] = {"state_indices": state_indices, "scale": scale}
    if call.by_jax:
        step, v, of_v = simple_gla_step, weight * v, {}
    else:  # the core multiplies v by the weight
        step, of_v = partial(step_for(q), "simple_gla"), {"weight": p.weight}
    num, C = call.stepped(step(q, k, v, g=p.g, **of_v, state=C, **options), C)
    den, n = call.stepped(step(q, k, weight, g=p.g, state=n[..., None], **options), n[..., None])
    m = call.replaced(m, after, state_indices)
    h, _ = p.divide(call.real_of(num), call.real_of(den)[..., 0])
    return call.with_state(call.short(h), (C, n[..., 0], m))


def mlstm_backward(
    dh: Array,
    q: Array,
    k: Array,
    v: Array,
    i: AnyArray | float,
    f: AnyArray | float,
    *,
    d_final_state: tuple[AnyArray, AnyArray] | None = None,
    scale: float | None = None,
    eps: float = 0.0,
    initial_state: tuple[AnyArray, AnyArray, AnyArray] | None = None,
    cu_seqlens: AnyArray | None = None,
    mode: Mode = "chunk",
    chunk_size: int | None = None,
) -> MLSTMGradients:
    """The gradients of :func:`mlstm`.

    Parameters
    ----------
    dh : array [B,T,HV,V], dtype of v
        The gradient of h.
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    i, f : array [B,T,HV] or float
        The input gate before exp, and the forget gate before the sigmoid.
    d_final_state : the pair (dC [N,HV,K,V], dn [N,HV,K]), optional
        The gradients of C and n of the final state with m held, float32 (float64 for float64
        inputs): those that a later call with that state has as its d_initial_state.
    scale, eps, initial_state, cu_seqlens, mode, chunk_size :
        As in the forward call. The outputs are computed once more.

    Returns
    -------
    MLSTMGradients

    Raises
    ------
    TypeError
        An argument is not an array of a supported dtype and of the library of q.
    ValueError
        Shapes, values or options do not fit.
    MemoryError
        The memory does not hold the results, or what the call needs meanwhile.
    RuntimeError
        On a GPU: CUDA refuses, or this build has no CUDA part.

    Examples
    --------
    An input gate that is higher for all tokens alike changes nothing but the 1 in the denominator:

    >>> import numpy as np, linattn
    >>> rng = np.random.default_rng(0)
    >>> dh, q, k, v = rng.standard_normal((4, 1, 9, 2, 4))
    >>> i, f = rng.standard_normal((2, 1, 9, 2))
    >>> bool(abs(linattn.mlstm_backward(dh, q, k, v, i + 50, f).di.sum()) < 1e-9)
    True
    """
    p = _Problem(q, k, v, i, f, recorded=False, eps=eps)
    p.call.array("dh", dh, "B T HV V")
    p.sequences(cu_seqlens)
    p.state("initial_state", initial_state, "N")
    dS = None
    if d_final_state is not None:
        if not isinstance(d_final_state, tuple | list) or len(d_final_state) != 2:
            raise TypeError(f"d_final_state: expected the pair (dC, dn), got {d_final_state!r}")
        dC = p.call.wide("d_final_state: dC", d_final_state[0], "N HV K V", number=False)
        dn = p.call.wide("d_final_state: dn", d_final_state[1], "N HV K", number=False)
    p.compute()
    xp, call, V = p.xp, p.call, v.shape[-1]  # type: ignore[attr-defined]
    if d_final_state is not None:
        dS = xp.concatenate([call.real_of(dC), call.real_of(dn)[..., None]], -1)
        dS = dS * p.unit[..., None, None]
    options: dict[str, Any] = p.arguments() | {
        "scale": scale,
        "cu_seqlens": cu_seqlens,
        "mode": mode,
        "chunk_size": chunk_size,
    }
    with called(_NAMES, q):
        o, _ = simple_gla(**options)
        o = call.real_of(o)
        den = o[..., V]
        # was h = num / (max(|den|, floor) + eps)
        h, divisor = p.divide(o[..., :V], den)
        dh_wide = call.real_of(dh)
        d_divisor = -(dh_wide * h).sum(-1) / divisor[..., 0]
        dden = xp.where(abs(den) > p.floor, d_divisor * xp.sign(den), xp.zeros_like(den))
        do = xp.concatenate([dh_wide / divisor, dden[..., None]], -1)
        grads = simple_gla_backward(do, d_final_state=dS, **options)
    # was values = weight (v, 1), weight = exp(i - m)
    d_values = call.real_of(grads.dv)
    dv = p.weight[..., None] * d_values[..., :V]
    di = p.weight * ((d_values[..., :V] * call.real_of(v)).sum(-1) + d_values[..., V])
    # was g = log sigmoid(f) and a constant
    d_log_f = grads.dg
    if p.eps:
        by_i, by_f = p.gradients_of_m(d_divisor)
        di, d_log_f = di + by_i, d_log_f + by_f
    df = d_log_f * cast(sigmoid(-p.f), call.real)
    d_initial = grads.d_initial_state
    return MLSTMGradients(
        dq=call.short(grads.dq),
        dk=call.short(grads.dk),
        dv=call.short(dv),
        di=call.as_given(di, p.i_given),
        df=call.as_given(df, p.f_given),
        d_initial_state=None
        if d_initial is None
        else (call.contiguous(d_initial[..., :V]), call.contiguous(d_initial[..., V])),
    )
