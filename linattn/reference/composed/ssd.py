"""Mamba-2, Dao and Gu 2024."""

import numpy as np

from .._loops import cast, rounded, working
from ._arrays import for_heads, gate, given, of_groups, sequences, sigmoid, softplus, state_of
from ._memory import memory, memory_adjoint


def ssd(
    x,
    dt,
    A,
    B,
    C,
    *,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    dt_limit=(0, np.inf),
    initial_states=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """h <- exp(dt A) h + dt x B', y = (h C + D x) silu(z), token by token.

    Parameters
    ----------
    x : array [B,T,H,P]
    dt : array [B,T,H] or float
    A : array [H] or float
    B, C : array [B,T,G,N]
    D : array [H] or [H,P], or float, optional
    z : array [B,T,H,P], optional
    dt_bias : array [H] or float, optional
    dt_softplus, dt_limit : see :func:`linattn.ssd`
    initial_states : array [S,H,P,N], optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn.reference.composed``.

    Returns
    -------
    y : ndarray [B,T,H,P]
    states : ndarray [S,H,P,N]

    References
    ----------
    Dao and Gu, 2024, *Transformers are SSMs*, arXiv:2405.21060.

    Examples
    --------
    A time step of 0 writes nothing and forgets nothing:

    >>> import numpy as np
    >>> from linattn import reference
    >>> x, BC, h = np.ones((1, 3, 1, 2)), np.ones((1, 3, 1, 4)), np.full((1, 1, 2, 4), 2.0)
    >>> y, states = reference.ssd(x, 0.0, -1.0, BC, BC, initial_states=h)
    >>> np.array_equal(states, h), y[0, 0, 0].tolist()
    (True, [8.0, 8.0])
    """
    p = _SSD(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, dtype)
    y, states = p.outputs(initial_states, cu_seqlens)
    y = y + p.D * p.x
    return rounded(y if z is None else y * p.z * sigmoid(p.z), dtype), states


def ssd_backward(
    dy,
    x,
    dt,
    A,
    B,
    C,
    *,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    dt_limit=(0, np.inf),
    initial_states=None,
    d_final_states=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """The gradients of :func:`ssd`.

    Parameters
    ----------
    dy : array [B,T,H,P]
        The gradient of y.
    x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, initial_states
        As in :func:`ssd`.
    d_final_states : array [S,H,P,N], optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn.reference.composed``.

    Returns
    -------
    dict
        By the names of the arguments, None where one was not given.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> x, BC = np.ones((1, 3, 1, 2)), np.ones((1, 3, 1, 4))
    >>> grads = reference.ssd_backward(x, x, 0.5, -1.0, BC, BC, D=2.0)
    >>> grads["D"], grads["B"].shape, grads["z"]
    (6.0, (1, 3, 1, 4), None)
    """
    p = _SSD(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, dtype)
    dy = cast(dy, dtype)
    y, _ = p.outputs(initial_states, cu_seqlens)
    s = sigmoid(p.z)
    do, dz = dy, None
    if z is not None:  # was y = (o + D x) silu(z)
        do, dz = dy * p.z * s, dy * (y + p.D * p.x) * s * (1 + p.z * (1 - s))
    do_row = cast(do, dtype)
    dv, da = np.empty_like(p.x), np.empty_like(p.x[..., :1])
    dB, dC = np.empty_like(p.B), np.empty_like(p.C)
    h, dh = p.states(initial_states, cu_seqlens), p.states(d_final_states, cu_seqlens)
    for n, at in enumerate(sequences(*x.shape[:2], cu_seqlens)):
        dC[at], dB[at], dv[at], da_n, dh[n] = memory_adjoint(
            p.C[at], p.B[at], p.v[at], p.a[at], h[n], do_row[at], dh[n]
        )
        da[at] = da_n.sum(-1, keepdims=True)
    # was v = dt x, a = exp(dt A)
    dv, d_log = cast(dv, dtype), (p.a * da)[..., 0]
    dx = p.dt[..., None] * dv + p.D * do
    d_dt, dA = (dv * p.x).sum(-1) + d_log * p.A, (d_log * p.dt).sum((0, 1))
    # was dt <- clip(softplus(dt + bias))
    soft = softplus(p.raw) if dt_softplus else p.raw
    d_raw = d_dt * ((soft >= dt_limit[0]) & (soft <= dt_limit[1]))
    if dt_softplus:
        d_raw = d_raw * np.where(p.raw > 20, 1, sigmoid(p.raw))
    dD = (do * p.x).sum((0, 1))
    G = B.shape[2]
    return {
        "x": rounded(dx, dtype),
        "dt": given(d_raw, dt, dtype),
        "A": given(dA, A, dtype),
        "B": rounded(of_groups(dB, G), dtype),
        "C": rounded(of_groups(dC, G), dtype),
        "D": given(dD.sum(-1) if np.ndim(D) == 1 else dD, D, dtype),
        "z": given(dz, z, dtype),
        "dt_bias": given(d_raw.sum((0, 1)), dt_bias, dtype),
        "initial_states": None if initial_states is None else dh,
    }


class _SSD:
    """The arguments of a call in the dtype of the sums."""

    def __init__(self, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, dtype):
        batch, T, H, P = x.shape
        self.dtype, self.x = dtype, cast(x, dtype)
        self.B, self.C = (for_heads(cast(rows, dtype), H) for rows in (B, C))
        self.A = gate(A, (H,), dtype)
        self.raw = gate(dt, (batch, T, H), dtype)
        if dt_bias is not None:
            self.raw = self.raw + gate(dt_bias, (H,), dtype)
        self.dt = np.clip(softplus(self.raw) if dt_softplus else self.raw, *dt_limit)
        self.v = cast(self.dt[..., None] * self.x, dtype)
        self.a = np.exp(self.dt * self.A)[..., None]
        D = np.zeros((), working(dtype)) if D is None else cast(D, working(dtype))
        self.D = np.broadcast_to(D[:, None] if D.ndim == 1 else D, (H, P))
        self.z = np.zeros_like(self.x) if z is None else gate(z, x.shape, dtype)

    def states(self, given_states, cu_seqlens):
        (B, T, H, P), N = self.x.shape, self.B.shape[3]
        return state_of(given_states, (len(sequences(B, T, cu_seqlens)), H, P, N), self.dtype)

    def outputs(self, initial_states, cu_seqlens):
        """h C before D and z, and the last states."""
        y, h = np.empty_like(self.x), self.states(initial_states, cu_seqlens)
        for n, at in enumerate(sequences(*self.x.shape[:2], cu_seqlens)):
            y[at], h[n] = memory(self.C[at], self.B[at], self.v[at], self.a[at], h[n])
        return cast(y, self.dtype), h
