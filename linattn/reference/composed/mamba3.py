"""Mamba-3 with one input and one output, Lahoti et al. 2026. h [H,P,N], as in Mamba-2."""

import numpy as np

from .._loops import cast, rounded, working
from ._arrays import for_heads, gate, given, of_groups, sequences, sigmoid, state_of


def mamba3_tokens(q, k, x, a, own, other, h, k_before, x_before, dtype):
    """Rows q and k [T,H,N] after the turn, x [T,H,P], the weights of two writes [T,H]."""
    o, kept = np.empty_like(x), []
    for t in range(len(x)):
        write_before = cast(other[t][:, None] * x_before, dtype)
        decaying = h + write_before[..., None] * k_before[:, None]
        write = cast(own[t][:, None] * x[t], dtype)
        h = a[t][:, None, None] * decaying + write[..., None] * k[t][:, None]
        o[t] = (h * q[t][:, None]).sum(-1)
        kept.append((decaying, h, k_before, x_before))
        k_before, x_before = k[t], x[t]
    return o, (h, k_before, x_before), kept


def mamba3_tokens_adjoint(q, k, x, a, own, other, kept, do, dh, dk_last, dx_last, dtype):
    """dq, dk, dx, da, d_own, d_other, and the gradients of h, k and x before the first token."""
    dq, dk, dx = np.empty_like(q), np.empty_like(k), np.empty_like(x)
    da, d_own, d_other = np.empty_like(a), np.empty_like(a), np.empty_like(a)
    for t in reversed(range(len(x))):
        decaying, h, k_before, x_before = kept[t]
        # was o = h q
        dq[t] = (h * do[t][..., None]).sum(1)
        dh = dh + do[t][..., None] * q[t][:, None]
        # was h <- a decaying + own x k'
        of_k = cast((dh * k[t][:, None]).sum(-1), dtype)
        d_own[t] = (of_k * x[t]).sum(-1)
        dx[t] = dx_last + own[t][:, None] * of_k
        dk[t] = dk_last + own[t][:, None] * (dh * x[t][..., None]).sum(1)
        da[t] = (dh * decaying).sum((1, 2))
        dh = a[t][:, None, None] * dh
        # was decaying = h + other x_before k_before'
        of_k = cast((dh * k_before[:, None]).sum(-1), dtype)
        d_other[t] = (of_k * x_before).sum(-1)
        dx_last = other[t][:, None] * of_k
        dk_last = other[t][:, None] * (dh * x_before[..., None]).sum(1)
    return dq, dk, dx, da, d_own, d_other, dh, dk_last, dx_last


def mamba3(
    x,
    dt,
    A,
    B,
    C,
    trap,
    angles=None,
    *,
    D=None,
    z=None,
    initial_states=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """Mamba-3 with one input and one output, token by token.

    Parameters
    ----------
    x : array [B,T,H,P]
    dt, trap : array [B,T,H] or float
    A : array [B,T,H] or [H], or float
    B, C : array [B,T,G,N]
    angles : array [B,T,H,R], optional
    D : array [H] or [H,P], or float, optional
    z : array [B,T,H,P], optional
    initial_states : the four arrays angle [S,H,R], ssm [S,H,P,N], k [S,H,N], v [S,H,P], optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn.reference.composed``.

    Returns
    -------
    y : ndarray [B,T,H,P]
    states : the same four arrays

    References
    ----------
    Lahoti et al., 2026, *Mamba-3*, arXiv:2603.15569.

    Examples
    --------
    Half of each write waits for the next token:

    >>> import numpy as np
    >>> from linattn import reference
    >>> one = np.ones((1, 3, 1, 1))
    >>> y, _ = reference.mamba3(one, 1.0, 0.0, one, one, 0.5)
    >>> y.ravel().tolist()
    [0.5, 1.5, 2.5]
    """
    p = _Mamba3(x, dt, A, B, C, trap, angles, D, z, initial_states, cu_seqlens, dtype)
    y, states, _ = p.run()
    y = y + p.D * p.x
    return rounded(y if z is None else y * p.z * sigmoid(p.z), dtype), states


def mamba3_backward(
    dy,
    x,
    dt,
    A,
    B,
    C,
    trap,
    angles=None,
    *,
    D=None,
    z=None,
    initial_states=None,
    d_final_states=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """The gradients of :func:`mamba3`.

    Parameters
    ----------
    dy : array [B,T,H,P]
        The gradient of y.
    x, dt, A, B, C, trap, angles, D, z, initial_states
        As in :func:`mamba3`.
    d_final_states : four arrays, optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn.reference.composed``.

    Returns
    -------
    dict
        By the names of the arguments, None where one was not given; angle, ssm, k and v for those
        of the initial states.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> one = np.ones((1, 3, 1, 1))
    >>> grads = reference.mamba3_backward(one, one, 1.0, 0.0, one, one, 0.5)
    >>> grads["x"].ravel().tolist()
    [2.5, 1.5, 0.5]
    """
    p = _Mamba3(x, dt, A, B, C, trap, angles, D, z, initial_states, cu_seqlens, dtype)
    dy, (y, _, kept) = cast(dy, dtype), p.run()
    s = sigmoid(p.z)
    do, dz = dy, None
    if z is not None:  # was y = (o + D x) silu(z)
        do, dz = dy * p.z * s, dy * (y + p.D * p.x) * s * (1 + p.z * (1 - s))
    do_row = cast(do, dtype)
    d_final = (None,) * 4 if d_final_states is None else d_final_states
    d_angle, dh, dk0, dx0 = (
        state_of(given_d, own.shape, dtype) for given_d, own in zip(d_final, p.states, strict=True)
    )
    dq, dk, dx = np.empty_like(p.q), np.empty_like(p.k), p.D * do
    da, d_own, d_other = (np.empty(p.dt.shape, p.x.dtype) for _ in range(3))
    d_rate = np.zeros(p.rate.shape, p.x.dtype)
    for n, at in enumerate(p.tokens):
        dq[at], dk[at], dx_n, da[at], d_own[at], d_other[at], dh[n], dk0[n], dx0[n] = (
            mamba3_tokens_adjoint(
                p.q[at],
                p.k[at],
                p.x[at],
                p.a[at],
                p.own[at],
                p.other[at],
                kept[n],
                do_row[at],
                dh[n],
                dk0[n],
                dx0[n],
                dtype,
            )
        )
        dx[at] += dx_n
        dq[at], dk[at] = cast(dq[at], dtype), cast(dk[at], dtype)
        # was q = C turned, k = B turned, by the sum of the rates so far
        for t in reversed(range(len(dx_n))):
            token = (at[0], at[1].start + t)
            of_rows = zip((dq[token], dk[token]), (p.q[token], p.k[token]), strict=True)
            d_angle[n] += sum(p.d_turn(*pair) for pair in of_rows)
            d_rate[token] = d_angle[n]
    dC, dB = (cast(p.turned(rows, -p.theta), dtype) for rows in (dq, dk))
    # was own = trap dt, other = (1 - trap) dt, a = exp(dt A), rate = dt angles
    d_log = p.a * da
    d_dt = p.trap * d_own + (1 - p.trap) * d_other + p.A * d_log + (p.angles * d_rate).sum(-1)
    dA = p.dt * d_log
    dD = (do * p.x).sum((0, 1))
    G = B.shape[2]
    grads = {
        "x": rounded(dx, dtype),
        "dt": given(d_dt, dt, dtype),
        "A": given(dA.sum((0, 1)) if np.ndim(A) == 1 else dA, A, dtype),
        "B": rounded(of_groups(dB, G), dtype),
        "C": rounded(of_groups(dC, G), dtype),
        "trap": given(p.dt * (d_own - d_other), trap, dtype),
        "angles": given(p.dt[..., None] * d_rate, angles, dtype),
        "D": given(dD.sum(-1) if np.ndim(D) == 1 else dD, D, dtype),
        "z": given(dz, z, dtype),
    }
    states = (d_angle, dh, dk0, dx0)
    named = dict(zip(("angle", "ssm", "k", "v"), states, strict=True))
    return grads if initial_states is None else grads | named


class _Mamba3:
    """The arguments of a call in the dtype of the sums, rows for every head."""

    def __init__(self, x, dt, A, B, C, trap, angles, D, z, initial_states, cu_seqlens, dtype):
        batch, T, H, P = x.shape
        N, real = B.shape[3], working(dtype)
        self.dtype, self.x = dtype, cast(x, dtype)
        self.dt, self.A, self.trap = (gate(g, (batch, T, H), dtype) for g in (dt, A, trap))
        self.own, self.other = self.trap * self.dt, (1 - self.trap) * self.dt
        self.a = np.exp(self.dt * self.A)
        angles = np.zeros((batch, T, H, 0)) if angles is None else angles
        self.angles = cast(angles, real)
        self.rate = self.dt[..., None] * self.angles
        self.tokens = sequences(batch, T, cu_seqlens)
        S, R = len(self.tokens), angles.shape[3]
        shapes = ((S, H, R), (S, H, P, N), (S, H, N), (S, H, P))
        states = (None,) * 4 if initial_states is None else initial_states
        self.states = tuple(
            state_of(one, shape, dtype) for one, shape in zip(states, shapes, strict=True)
        )
        self.theta = np.empty_like(self.rate)
        for n, (b, tokens) in enumerate(self.tokens):
            angle = self.states[0][n]
            for t in range(tokens.start, tokens.stop):
                angle = angle + self.rate[b, t]
                self.theta[b, t] = angle
        self.q, self.k = (
            cast(self.turned(for_heads(cast(rows, dtype), H), self.theta), dtype) for rows in (C, B)
        )
        D = np.zeros((), real) if D is None else cast(D, real)
        self.D = np.broadcast_to(D[:, None] if D.ndim == 1 else D, (H, P))
        self.z = np.zeros_like(self.x) if z is None else gate(z, x.shape, dtype)

    def turned(self, rows, theta):
        """Pairs of components as complex numbers, times exp(i theta)."""
        R, out = theta.shape[-1], rows.copy()
        turn = np.cos(theta) + 1j * np.sin(theta)
        pairs = (rows[..., 0 : 2 * R : 2] + 1j * rows[..., 1 : 2 * R : 2]) * turn
        out[..., 0 : 2 * R : 2], out[..., 1 : 2 * R : 2] = pairs.real, pairs.imag
        return out

    def d_turn(self, d_rows, rows):
        """The gradient of the angles by which the rows [H,N] were turned."""
        R = self.theta.shape[-1]
        real, imaginary = rows[:, 0 : 2 * R : 2], rows[:, 1 : 2 * R : 2]
        return d_rows[:, 1 : 2 * R : 2] * real - d_rows[:, 0 : 2 * R : 2] * imaginary

    def run(self):
        """The outputs before D and z, the last states, and what the adjoint needs."""
        o, kept = np.empty_like(self.x), []
        angle, h, k, v = (one.copy() for one in self.states)
        for n, at in enumerate(self.tokens):
            o[at], (h[n], k[n], v[n]), more = mamba3_tokens(
                self.q[at],
                self.k[at],
                self.x[at],
                self.a[at],
                self.own[at],
                self.other[at],
                *(one[n] for one in self.states[1:]),
                self.dtype,
            )
            kept.append(more)
            if len(more):
                last = self.theta[at][-1]
                angle[n] = last - 2 * np.pi * np.floor(last / (2 * np.pi))
        return cast(o, self.dtype), (angle, h, k, v), kept
