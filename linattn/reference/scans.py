"""Diagonal scans, each from its own paper, token by token: Mamba, S4D, RG-LRU, HGRN.

Nothing of the ops is used. A forward function returns the outputs and the state after the last
token of each sequence. A backward function returns a dict: the gradients of sum(dy * y) +
sum(d_final_state * state), by the names of the arguments. Keywords of all::

    initial_state=None  zeros
    cu_seqlens=None     [S+1], the starts of S sequences packed into one row (B = 1), and T last
    dtype=np.float64    of the arithmetic. With float16 and bfloat16 every row is rounded to it:
                        those that are given and written, and their gradients. Parameters, states
                        and sums are float32

Complex arithmetic is that of complex numbers. The gradient of a complex array has the derivative by
its real part as its real part, and that by its imaginary part as its imaginary part.
"""

import numpy as np

from ._loops import cast, rounded, rounded_like, working
from .composed._arrays import sequences, sigmoid

__all__ = [
    "hgrn",
    "hgrn_backward",
    "rg_lru",
    "rg_lru_backward",
    "s4d",
    "s4d_backward",
    "selective_scan",
    "selective_scan_backward",
]


def _softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-abs(x)))


def _complex(dtype):
    """The complex numbers of which both parts are of this dtype."""
    return np.result_type(dtype, np.complex64)


def _parameter(x, dtype):
    """An array of parameters in the dtype of the sums."""
    if np.iscomplexobj(x):
        return np.asarray(x).astype(_complex(working(dtype)))
    return cast(x, working(dtype))


def _state(x, shape, dtype, complex_):
    real = working(dtype)
    if x is None:
        return np.zeros(shape, _complex(real) if complex_ else real)
    return _parameter(x, dtype).copy()


def _given(dx, x, dtype):
    """A gradient as its array was given; None for an array that was not."""
    if x is None:
        return None
    if np.iscomplexobj(x):
        return dx.astype(_complex(working(dtype)))
    return rounded_like(dx, x, working(dtype))


# ---------------------------------------------------------------------------------------------
# h <- a h + b for one sequence. a and b are functions of a token's number.
# ---------------------------------------------------------------------------------------------


def _walk(T, a, b, h):
    """The states before and after every token, [T+1,...]."""
    states = [h]
    for t in range(T):
        states.append(a(t) * states[-1] + b(t))
    return states


def _walk_back(T, a, states, d_read, dh, visit):
    """Backwards: dh of the state after token t, which `visit` gets with the gradient of a."""
    for t in reversed(range(T)):
        dh = dh + d_read(t)
        visit(t, dh, dh * np.conj(states[t]))
        dh = np.conj(a(t)) * dh
    return dh


# ---------------------------------------------------------------------------------------------
# Mamba, Gu and Dao 2023.
# ---------------------------------------------------------------------------------------------


class _Selective:
    """The arguments of a call in the dtype of the sums."""

    def __init__(self, u, delta, A, B, C, D, z, delta_bias, delta_softplus, dtype):
        self.dtype, self.shape = dtype, u.shape
        self.u = cast(u, dtype)
        self.raw = cast(delta, dtype)
        if delta_bias is not None:
            self.raw = self.raw + cast(delta_bias, working(dtype))
        self.soft = delta_softplus
        self.delta = _softplus(self.raw) if delta_softplus else self.raw
        self.A = _parameter(A, dtype)
        self.pairs = np.iscomplexobj(A)
        many = u.shape[-1] // B.shape[2]
        rows = (
            x.astype(_complex(working(dtype))) if self.pairs else cast(x, dtype) for x in (B, C)
        )
        self.B, self.C = (x.repeat(many, 2) for x in rows)
        self.D = np.zeros(u.shape[-1:], working(dtype)) if D is None else cast(D, working(dtype))
        self.z = None if z is None else cast(z, dtype)

    def a(self, b, t):
        return np.exp(self.delta[b, t][:, None] * self.A)

    def write(self, b, t):
        return (self.delta[b, t] * self.u[b, t])[:, None] * self.B[b, t]

    def read(self, b, t, h):
        y = (self.C[b, t] * h).sum(-1)
        return 2 * y.real if self.pairs else y

    def states(self, b, at, h):
        tokens = range(at.start, at.stop)
        return _walk(
            len(tokens), lambda i: self.a(b, tokens[i]), lambda i: self.write(b, tokens[i]), h
        )


def selective_scan(
    u,
    delta,
    A,
    B,
    C,
    *,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    initial_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """h <- exp(delta A) h + delta u B, y = (C h + D u) silu(z), token by token.

    Parameters
    ----------
    u, delta : array [B,T,D]
    A : array [D,N]
    B, C : array [B,T,G,N]
    D, delta_bias : array [D], optional
    z : array [B,T,D], optional
    delta_softplus : bool
    initial_state : array [S,D,N], optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn/reference/scans.py``.

    Returns
    -------
    y : ndarray [B,T,D]
    states : ndarray [S,D,N]

    References
    ----------
    Gu and Dao, 2023, *Mamba*, arXiv:2312.00752.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> u, BC = np.ones((1, 2, 1)), np.ones((1, 2, 1, 2))
    >>> y, h = reference.selective_scan(u, u, np.zeros((1, 2)), BC, BC)
    >>> y[0, :, 0].tolist(), h.tolist()
    ([2.0, 4.0], [[[2.0, 2.0]]])
    """
    p = _Selective(u, delta, A, B, C, D, z, delta_bias, delta_softplus, dtype)
    batch, T = u.shape[:2]
    y = np.empty(u.shape, working(dtype))
    spans = sequences(batch, T, cu_seqlens)
    h = _state(initial_state, (len(spans), *A.shape), dtype, p.pairs)
    for n, (b, at) in enumerate(spans):
        states = p.states(b, at, h[n])
        for t, after in zip(range(at.start, at.stop), states[1:], strict=True):
            y[b, t] = p.read(b, t, after) + p.D * p.u[b, t]
        h[n] = states[-1]
    return rounded(y if z is None else y * p.z * sigmoid(p.z), dtype), h


def selective_scan_backward(
    dy,
    u,
    delta,
    A,
    B,
    C,
    *,
    D=None,
    z=None,
    delta_bias=None,
    delta_softplus=False,
    initial_state=None,
    d_final_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """The gradients of :func:`selective_scan`.

    Parameters
    ----------
    dy : array [B,T,D]
        The gradient of y.
    u, delta, A, B, C, D, z, delta_bias, delta_softplus, initial_state
        As in :func:`selective_scan`.
    d_final_state : array [S,D,N], optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn/reference/scans.py``.

    Returns
    -------
    dict
        By the names of the arguments, None where one was not given.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> u, BC = np.ones((1, 2, 1)), np.ones((1, 2, 1, 2))
    >>> grads = reference.selective_scan_backward(u, u, u, np.zeros((1, 2)), BC, BC)
    >>> grads["u"][0, :, 0].tolist(), grads["D"]
    ([4.0, 2.0], None)
    """
    p = _Selective(u, delta, A, B, C, D, z, delta_bias, delta_softplus, dtype)
    real, (batch, T, channels), G = working(dtype), u.shape, B.shape[2]
    dy, spans = cast(dy, dtype), sequences(batch, T, cu_seqlens)
    h = _state(initial_state, (len(spans), *A.shape), dtype, p.pairs)
    dh = _state(d_final_state, h.shape, dtype, p.pairs)
    du, d_delta, dz = (np.zeros(u.shape, real) for _ in range(3))
    dB, dC, dA = np.zeros_like(p.B), np.zeros_like(p.C), np.zeros_like(p.A)
    dD = np.zeros(channels, real)
    twice = 2 if p.pairs else 1
    for n, (b, at) in enumerate(spans):
        states, start = p.states(b, at, h[n]), at.start
        do = dy[b, at].astype(real)
        if z is not None:  # was y (y + D u) silu(z)
            y = np.array([p.read(b, start + i, x) for i, x in enumerate(states[1:])])
            y = y.reshape(-1, channels) + p.D * p.u[b, at]
            gate, s = p.z[b, at], sigmoid(p.z[b, at])
            dz[b, at] = do * y * s * (1 + gate * (1 - s))
            do = do * gate * s
        du[b, at] = do * p.D
        dD += (do * p.u[b, at]).sum(0)

        def d_read(i, do=do, b=b, start=start):
            return twice * do[i][:, None] * np.conj(p.C[b, start + i])

        def visit(i, dh, da, do=do, b=b, start=start, states=states):
            nonlocal dA
            t = start + i
            dC[b, t] = twice * do[i][:, None] * np.conj(states[i + 1])
            dw = (dh * np.conj(p.B[b, t])).real.sum(-1)  # was b = w B, w = delta u
            dB[b, t] = dh * (p.delta[b, t] * p.u[b, t])[:, None]
            d_log = da * np.conj(p.a(b, t))  # was a = exp(delta A)
            dA = dA + d_log * p.delta[b, t][:, None]
            d_delta[b, t] = (d_log * np.conj(p.A)).real.sum(-1) + dw * p.u[b, t]
            du[b, t] += dw * p.delta[b, t]

        dh[n] = _walk_back(
            len(states) - 1,
            lambda i, b=b, start=start: p.a(b, start + i),
            states,
            d_read,
            dh[n],
            visit,
        )
    if delta_softplus:
        d_delta = d_delta * sigmoid(p.raw)
    dB, dC = (x.reshape(batch, T, G, channels // G, -1).sum(3) for x in (dB, dC))
    short = (lambda x: x) if p.pairs else (lambda x: rounded(x, dtype))
    return {
        "u": rounded(du, dtype),
        "delta": rounded(d_delta, dtype),
        "A": _given(dA, A, dtype),
        "B": short(dB),
        "C": short(dC),
        "D": _given(dD, D, dtype),
        "z": None if z is None else rounded(dz, dtype),
        "delta_bias": _given(d_delta.sum((0, 1)), delta_bias, dtype),
        "initial_state": None if initial_state is None else dh,
    }


# ---------------------------------------------------------------------------------------------
# S4D, Gu et al. 2022.
# ---------------------------------------------------------------------------------------------


def _expm1(x):
    """exp(x) - 1 of complex numbers too."""
    if not np.iscomplexobj(x):
        return np.expm1(x)
    half = np.sin(x.imag / 2)
    re = np.expm1(x.real) * np.cos(x.imag) - 2 * half * half
    return re + 1j * (np.exp(x.real) * np.sin(x.imag))


def _phi(L):
    """(exp(L) - 1) / L and its derivative. Near 0 the quotients would lose their digits."""
    near = abs(L) < 1
    small, large = np.where(near, L, 0), np.where(near, 1, L)
    phi, slope, factorial, power = 0, 0, 1.0, 1.0 + 0 * L  # power: small^n
    for n in range(25):
        factorial *= n + 1
        phi = phi + power / factorial
        slope = slope + (n + 1) * power / (factorial * (n + 2))
        power = power * small
    far = _expm1(large) / large
    return np.where(near, phi, far), np.where(near, slope, (np.exp(large) - far) / large)


def _discretized(dt, A, B, discretization):
    """a and b of h <- a h + b u."""
    L = dt[:, None] * A
    if discretization == "bilinear":
        return (1 + L / 2) / (1 - L / 2), dt[:, None] / (1 - L / 2) * B
    return np.exp(L), dt[:, None] * _phi(L)[0] * B


def s4d(
    u,
    dt,
    A,
    B,
    C,
    *,
    D=None,
    discretization="zoh",
    initial_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """h <- a h + b u, y = 2 Re (C h) + D u for a and b of A, B and dt; real A: y = C h + D u.

    Parameters
    ----------
    u : array [B,T,D]
    dt : array [D]
    A, B, C : array [D,N]
        One of each conjugate pair, or real.
    D : array [D], optional
    discretization : "zoh" or "bilinear"
    initial_state : array [S,D,N], optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn/reference/scans.py``.

    Returns
    -------
    y : ndarray [B,T,D]
    states : ndarray [S,D,N]

    References
    ----------
    Gu, Gupta, Goel and Re, 2022, *On the Parameterization and Initialization of Diagonal State
    Space Models*, arXiv:2206.11893.

    Examples
    --------
    A rate of 0 adds up:

    >>> import numpy as np
    >>> from linattn import reference
    >>> one = np.ones((1, 1))
    >>> reference.s4d(np.ones((1, 3, 1)), np.ones(1), 0 * one, one, one)[0].ravel().tolist()
    [1.0, 2.0, 3.0]
    """
    real, (batch, T, _) = working(dtype), u.shape
    pairs = np.iscomplexobj(A)
    x = cast(u, dtype)
    dt, A, B, C = (_parameter(p, dtype) for p in (dt, A, B, C))
    a, b = _discretized(dt, A, B, discretization)
    skip = 0 if D is None else cast(D, real)
    spans, y = sequences(batch, T, cu_seqlens), np.empty(u.shape, real)
    h = _state(initial_state, (len(spans), *A.shape), dtype, pairs)
    for n, (row, at) in enumerate(spans):
        rows = x[row, at]
        states = _walk(len(rows), lambda i: a, lambda i, rows=rows: b * rows[i][:, None], h[n])
        for i, after in enumerate(states[1:]):
            read = (C * after).sum(-1)
            y[row, at.start + i] = (2 * read.real if pairs else read) + skip * rows[i]
        h[n] = states[-1]
    return rounded(y, dtype), h


def s4d_backward(
    dy,
    u,
    dt,
    A,
    B,
    C,
    *,
    D=None,
    discretization="zoh",
    initial_state=None,
    d_final_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """The gradients of :func:`s4d`.

    Parameters
    ----------
    dy : array [B,T,D]
        The gradient of y.
    u, dt, A, B, C, D, discretization, initial_state
        As in :func:`s4d`.
    d_final_state : array [S,D,N], optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn/reference/scans.py``.

    Returns
    -------
    dict
        By the names of the arguments, None where one was not given.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> u, one = np.ones((1, 3, 1)), np.ones((1, 1))
    >>> reference.s4d_backward(u, u, np.ones(1), -one, one, one)["u"].shape
    (1, 3, 1)
    """
    given = {"dt": dt, "A": A, "B": B, "C": C, "D": D}
    real, (batch, T, _) = working(dtype), u.shape
    pairs = np.iscomplexobj(A)
    x, dy = cast(u, dtype), cast(dy, dtype).astype(real)
    dt, A, B, C = (_parameter(p, dtype) for p in (dt, A, B, C))
    a, b = _discretized(dt, A, B, discretization)
    twice = 2 if pairs else 1
    spans, du = sequences(batch, T, cu_seqlens), np.zeros(u.shape, real)
    h = _state(initial_state, (len(spans), *A.shape), dtype, pairs)
    dh = _state(d_final_state, h.shape, dtype, pairs)
    da, db, dC = (np.zeros_like(A) for _ in range(3))
    for n, (row, at) in enumerate(spans):
        rows, do = x[row, at], dy[row, at]
        states = _walk(len(rows), lambda i: a, lambda i, rows=rows: b * rows[i][:, None], h[n])

        def visit(i, dh, da_i, rows=rows, do=do, states=states, row=row, start=at.start):
            nonlocal da, db, dC
            da = da + da_i
            db = db + dh * rows[i][:, None]
            dC = dC + twice * do[i][:, None] * np.conj(states[i + 1])
            du[row, start + i] = (dh * np.conj(b)).real.sum(-1)

        dh[n] = _walk_back(
            len(rows),
            lambda i: a,
            states,
            lambda i, do=do: twice * do[i][:, None] * np.conj(C),
            dh[n],
            visit,
        )
    # was L = dt A, and a and b as in _discretized
    L, wide = dt[:, None] * A, dt[:, None]
    if discretization == "bilinear":
        over = 1 / (1 - L / 2)
        phi, slope, a_slope = over, over * over / 2, over * over
    else:
        phi, slope = _phi(L)
        a_slope = np.exp(L)
    dL = np.conj(a_slope) * da + np.conj(wide * slope * B) * db
    d_dt = np.real(np.conj(A) * dL + np.conj(phi * B) * db).sum(-1)
    dD = 0
    if D is not None:
        dD = (dy * x).sum((0, 1))
        du = du + dy * cast(D, real)
    found = {"dt": d_dt, "A": wide * dL, "B": np.conj(wide * phi) * db, "C": dC, "D": dD}
    return {
        "u": rounded(du, dtype),
        **{name: _given(dx, given[name], dtype) for name, dx in found.items()},
        "initial_state": None if initial_state is None else dh,
    }


# ---------------------------------------------------------------------------------------------
# Griffin, De et al. 2024, and HGRN, Qin et al. 2023.
# ---------------------------------------------------------------------------------------------


def _gated(log_a, write, spans, initial_state, dtype):
    """h of h <- a h + write, and the last states."""
    y = np.empty(write.shape, working(dtype))
    h = _state(initial_state, (len(spans), write.shape[-1]), dtype, False)
    for n, (b, at) in enumerate(spans):
        a, w = np.exp(log_a[b, at]), write[b, at]
        states = _walk(len(w), lambda i, a=a: a[i], lambda i, w=w: w[i], h[n])
        y[b, at] = np.reshape(states[1:], w.shape)
        h[n] = states[-1]
    return y, h


def _gated_backward(dy, log_a, write, spans, initial_state, d_final_state, dtype):
    """The gradients of log a, of the write, and of the first states."""
    d_log, d_write = np.zeros(write.shape, working(dtype)), np.zeros(write.shape, working(dtype))
    h = _state(initial_state, (len(spans), write.shape[-1]), dtype, False)
    dh = _state(d_final_state, h.shape, dtype, False)
    for n, (b, at) in enumerate(spans):
        a, w, do = np.exp(log_a[b, at]), write[b, at], dy[b, at]
        states = _walk(len(w), lambda i, a=a: a[i], lambda i, w=w: w[i], h[n])

        def visit(i, dh, da, b=b, start=at.start, a=a):
            d_write[b, start + i] = dh
            d_log[b, start + i] = da * a[i]

        dh[n] = _walk_back(
            len(w), lambda i, a=a: a[i], states, lambda i, do=do: do[i], dh[n], visit
        )
    return d_log, d_write, dh


def hgrn(x, g, *, initial_state=None, cu_seqlens=None, dtype=np.float64):
    """h <- f h + (1 - f) x with f = exp(g), y = h, token by token.

    Parameters
    ----------
    x, g : array [B,T,D]
    initial_state : array [S,D], optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn/reference/scans.py``.

    Returns
    -------
    y : ndarray [B,T,D]
    states : ndarray [S,D]

    References
    ----------
    Qin, Yang and Zhong, 2023, *Hierarchically Gated Recurrent Neural Network for Sequence
    Modeling*, arXiv:2311.04823.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> x = np.ones((1, 2, 1))
    >>> reference.hgrn(x, np.log(0.5) * x)[0].ravel().round(6).tolist()
    [0.5, 0.75]
    """
    g, spans = cast(g, working(dtype)), sequences(*x.shape[:2], cu_seqlens)
    y, h = _gated(g, -np.expm1(g) * cast(x, dtype), spans, initial_state, dtype)
    return rounded(y, dtype), h


def hgrn_backward(
    dy, x, g, *, initial_state=None, d_final_state=None, cu_seqlens=None, dtype=np.float64
):
    """The gradients of :func:`hgrn`.

    Parameters
    ----------
    dy : array [B,T,D]
        The gradient of y.
    x, g, initial_state
        As in :func:`hgrn`.
    d_final_state : array [S,D], optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn/reference/scans.py``.

    Returns
    -------
    dict
        By the names of the arguments, None where one was not given.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> x = np.ones((1, 2, 1))
    >>> abs(reference.hgrn_backward(x, x, 0 * x)["x"]).ravel().tolist()
    [0.0, 0.0]
    """
    log, spans = cast(g, working(dtype)), sequences(*x.shape[:2], cu_seqlens)
    wide = cast(x, dtype)
    d_log, d_write, dh = _gated_backward(
        cast(dy, dtype), log, -np.expm1(log) * wide, spans, initial_state, d_final_state, dtype
    )
    # was write = (1 - exp(g)) x
    return {
        "x": rounded(-np.expm1(log) * d_write, dtype),
        "g": _given(d_log - np.exp(log) * wide * d_write, g, dtype),
        "initial_state": None if initial_state is None else dh,
    }


def _rg_lru(x, r, i, Lambda, c, reset, dtype):
    """log a, the scale of the write, 1 - a^2, and at which tokens the state is forgotten."""
    log = -c * _softplus(cast(Lambda, working(dtype))) * cast(r, dtype)
    square = -np.expm1(2 * log)
    first = np.zeros((*x.shape[:2], 1), bool) if reset is None else reset[..., None]
    scale = np.where(first, 1, np.sqrt(square))
    return np.where(first, -np.inf, log), scale, square, first


def rg_lru(
    x,
    r,
    i,
    Lambda,
    *,
    c=8.0,
    reset=None,
    initial_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """log a = -c softplus(Lambda) r, h <- a h + sqrt(1 - a^2) i x, y = h, token by token.

    Parameters
    ----------
    x, r, i : array [B,T,D]
    Lambda : array [D]
    c : float
    reset : bool array [B,T], optional
        At these tokens the state is forgotten, and i x is written unscaled.
    initial_state : array [S,D], optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn/reference/scans.py``.

    Returns
    -------
    y : ndarray [B,T,D]
    states : ndarray [S,D]

    References
    ----------
    De et al., 2024, *Griffin*, arXiv:2402.19427.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> x = np.ones((1, 2, 1))
    >>> first = np.array([[True, False]])
    >>> reference.rg_lru(x, 0 * x, x, np.ones(1), reset=first)[0].ravel().tolist()
    [1.0, 1.0]
    """
    spans = sequences(*x.shape[:2], cu_seqlens)
    log, scale, _, _ = _rg_lru(x, r, i, Lambda, c, reset, dtype)
    y, h = _gated(log, scale * cast(i, dtype) * cast(x, dtype), spans, initial_state, dtype)
    return rounded(y, dtype), h


def rg_lru_backward(
    dy,
    x,
    r,
    i,
    Lambda,
    *,
    c=8.0,
    reset=None,
    gradient_limit=1000.0,
    initial_state=None,
    d_final_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """The gradients of :func:`rg_lru`.

    Parameters
    ----------
    dy : array [B,T,D]
        The gradient of y.
    x, r, i, Lambda, c, reset, initial_state
        As in :func:`rg_lru`.
    gradient_limit : float
        The derivative of the square root is at most this.
    d_final_state : array [S,D], optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn/reference/scans.py``.

    Returns
    -------
    dict
        By the names of the arguments, None where one was not given.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> x = np.ones((1, 2, 1))
    >>> reference.rg_lru_backward(x, x, x, x, np.ones(1))["Lambda"].shape
    (1,)
    """
    spans = sequences(*x.shape[:2], cu_seqlens)
    log, scale, square, first = _rg_lru(x, r, i, Lambda, c, reset, dtype)
    wide_x, wide_i, wide_r = cast(x, dtype), cast(i, dtype), cast(r, dtype)
    d_log, d_write, dh = _gated_backward(
        cast(dy, dtype), log, scale * wide_i * wide_x, spans, initial_state, d_final_state, dtype
    )
    # was scale = sqrt(q), q = 1 - exp(2 log a)
    with np.errstate(divide="ignore"):
        slope = np.minimum(0.5 / np.sqrt(square), gradient_limit)
    d_scale = d_write * wide_i * wide_x
    d_log = np.where(first, 0, d_log - 2 * np.exp(2 * log) * slope * d_scale)
    wide = cast(Lambda, working(dtype))
    return {
        "x": rounded(d_write * scale * wide_i, dtype),
        "r": rounded(d_log * -c * _softplus(wide), dtype),
        "i": rounded(d_write * scale * wide_x, dtype),
        "Lambda": _given((d_log * wide_r).sum((0, 1)) * -c * sigmoid(wide), Lambda, dtype),
        "initial_state": None if initial_state is None else dh,
    }
