"""Systems that linattn computes by its ops, here each from its own paper, token by token.

Nothing of the ops is used. A loop over the tokens of one sequence, for all of its heads, and its
adjoint stand first; the public functions take the arrays of a call, [B,T,...]. Keywords of all::

    initial_state=None  zeros; under the name that the system has for it
    cu_seqlens=None     [S+1], the starts of S sequences packed into one row (B = 1), and T last
    dtype=np.float64    of the arithmetic, as in the ops. With float16 and bfloat16 every row is
                        rounded to it: those that are given, written and read, and their gradients.
                        Gates, states and sums are float32

A forward function returns the outputs and the state after the last token of each sequence. A
backward function returns a dict: the gradients of sum(d_output * output) + sum(d_state * state), by
the names of the arguments.
"""

from itertools import pairwise

import numpy as np

from ._loops import cast, rounded, rounded_like, working


def sequences(B, T, cu_seqlens):
    """(batch, tokens) of every sequence."""
    if cu_seqlens is None:
        return [(b, slice(0, T)) for b in range(B)]
    return [(0, slice(start, end)) for start, end in pairwise(int(end) for end in cu_seqlens)]


def gate(x, shape, dtype):
    """A gate as an array of this shape, in the dtype of the sums. A number stands for an array."""
    return np.broadcast_to(cast(x, working(dtype)), shape)


def given(dx, x, dtype):
    """The gradient of a gate as it was given: of a number, a number."""
    if x is None:
        return None
    return float(dx.sum()) if np.ndim(x) == 0 else rounded_like(dx, x, working(dtype))


def state_of(x, shape, dtype):
    """A state as a new array; zeros where none was given."""
    return np.zeros(shape, working(dtype)) if x is None else cast(x, working(dtype)).copy()


def for_heads(x, H):
    """Rows [B,T,G,N] of groups as rows of the H heads that share them."""
    return x.repeat(H // x.shape[2], 2)


def of_groups(dx, G):
    """The gradient of rows that heads shared: the sum over the heads of each group."""
    B, T, H, N = dx.shape
    return dx.reshape(B, T, G, H // G, N).sum(3)


def sigmoid(x):
    return np.where(x >= 0, 1, np.exp(-abs(x))) / (1 + np.exp(-abs(x)))


def softplus(x):
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


# ---------------------------------------------------------------------------------------------
# A memory that forgets and is added to. S [H,V,K]: a row per value.
# ---------------------------------------------------------------------------------------------


def memory(q, k, v, a, S):
    """S <- S diag(a) + v k', o = S q. q, k [T,H,K], v [T,H,V], the decay a [T,H,K] or [T,H,1]."""
    o, S = np.empty_like(v), S.copy()
    for t in range(len(q)):
        S = S * a[t, :, None] + v[t, :, :, None] * k[t, :, None]
        o[t] = (S * q[t, :, None]).sum(-1)
    return o, S


def memory_adjoint(q, k, v, a, S, do, dS):
    """dq, dk, dv, da [T,H,K], and the gradient of the state before the first token."""
    states = [S]
    for t in range(len(q)):
        states.append(states[-1] * a[t, :, None] + v[t, :, :, None] * k[t, :, None])
    dq, dk, dv, da = np.empty_like(q), np.empty_like(k), np.empty_like(v), np.empty_like(k)
    dS = dS.copy()
    for t in reversed(range(len(q))):
        # was o = S q
        dq[t] = (states[t + 1] * do[t, :, :, None]).sum(1)
        dS = dS + do[t, :, :, None] * q[t, :, None]
        # was S <- S diag(a) + v k'
        dv[t], dk[t] = (dS * k[t, :, None]).sum(-1), (dS * v[t, :, :, None]).sum(1)
        da[t] = (dS * states[t]).sum(1)
        dS = dS * a[t, :, None]
    return dq, dk, dv, da, dS


# ---------------------------------------------------------------------------------------------
# Mamba-2, Dao and Gu 2024.
# ---------------------------------------------------------------------------------------------


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
        The keywords at the head of this file.

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
        The keywords at the head of this file.

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


# ---------------------------------------------------------------------------------------------
# HGRN2, Qin et al. 2024.
# ---------------------------------------------------------------------------------------------


def hgrn2(q, g, v, *, scale=1.0, initial_state=None, cu_seqlens=None, dtype=np.float64):
    """S <- diag(f) S + (1 - f) v' with f = exp(g), o = scale * S' q, token by token.

    Parameters
    ----------
    q : array [B,T,H,K]
    g : array [B,T,H,K] or float
        The log of the forget gate.
    v : array [B,T,H,V]
    scale : float
    initial_state : array [S,H,K,V], optional
    cu_seqlens, dtype
        The keywords at the head of this file.

    Returns
    -------
    o : ndarray [B,T,H,V]
    states : ndarray [S,H,K,V]

    References
    ----------
    Qin et al., 2024, *HGRN2: Gated Linear RNNs with State Expansion*, arXiv:2404.07904.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> o, _ = reference.hgrn2(np.ones((1, 1, 1, 2)), np.log(0.25), np.full((1, 1, 1, 1), 8.0))
    >>> o.ravel().tolist()
    [12.0]
    """
    q, k, v, a, S = _hgrn2(q, g, v, scale, initial_state, cu_seqlens, dtype)
    o = np.empty_like(v)
    for n, at in enumerate(sequences(*v.shape[:2], cu_seqlens)):
        o[at], S[n] = memory(q[at], k[at], v[at], a[at], S[n])
    return rounded(o, dtype), S.swapaxes(2, 3)


def hgrn2_backward(
    do,
    q,
    g,
    v,
    *,
    scale=1.0,
    initial_state=None,
    d_final_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """The gradients of :func:`hgrn2`.

    Parameters
    ----------
    do : array [B,T,H,V]
        The gradient of o.
    q, g, v, scale, initial_state
        As in :func:`hgrn2`.
    d_final_state : array [S,H,K,V], optional
    cu_seqlens, dtype
        The keywords at the head of this file.

    Returns
    -------
    dict
        By the names of the arguments, None where one was not given.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> one = np.ones((1, 1, 1, 1))
    >>> grads = reference.hgrn2_backward(one, one, np.log(0.25) * one, 8 * one)
    >>> grads["q"].item(), grads["g"].item()
    (6.0, -2.0)
    """
    given_g, given_S = g, initial_state
    q, k, v, a, S = _hgrn2(q, g, v, scale, initial_state, cu_seqlens, dtype)
    do, dS = cast(do, dtype), state_of(d_final_state, S.swapaxes(2, 3).shape, dtype)
    dS = dS.swapaxes(2, 3)
    dq, dk, dv, da = np.empty_like(q), np.empty_like(q), np.empty_like(v), np.empty_like(q)
    d_initial = np.empty_like(S)
    for n, at in enumerate(sequences(*v.shape[:2], cu_seqlens)):
        dq[at], dk[at], dv[at], da[at], d_initial[n] = memory_adjoint(
            q[at], k[at], v[at], a[at], S[n], do[at], dS[n]
        )
    return {
        "q": rounded(dq.dtype.type(scale) * dq, dtype),
        "g": given(a * da - a * cast(dk, dtype), given_g, dtype),  # was a = exp(g), k = 1 - a
        "v": rounded(dv, dtype),
        "initial_state": None if given_S is None else d_initial.swapaxes(2, 3),
    }


def _hgrn2(q, g, v, scale, initial_state, cu_seqlens, dtype):
    """q times the scale, the key, v, the decay, and the state with a row per value."""
    q, v = cast(q, dtype), cast(v, dtype)
    g = gate(g, q.shape, dtype)
    (B, T, H, K), V = q.shape, v.shape[3]
    S = state_of(initial_state, (len(sequences(B, T, cu_seqlens)), H, K, V), dtype)
    k = cast(-np.expm1(g), dtype)
    return q.dtype.type(scale) * q, k, v, np.exp(g), S.swapaxes(2, 3).copy()


# ---------------------------------------------------------------------------------------------
# DeltaProduct, Siems et al. 2025. S [H,K,V].
# ---------------------------------------------------------------------------------------------


def product_tokens(q, k, v, a, beta, S):
    """q [T,H,K], k [T,R,H,K], v [T,R,H,V], the decay a [T,H], beta [T,R,H], S [H,K,V]."""
    o, S = np.empty_like(v[:, 0]), S.copy()
    for t in range(len(q)):
        S = a[t, :, None, None] * S
        for r in range(k.shape[1]):
            error = v[t, r] - (S * k[t, r][..., None]).sum(1)
            S = S + k[t, r][..., None] * (beta[t, r][:, None] * error)[:, None]
        o[t] = (S * q[t][..., None]).sum(1)
    return o, S


def product_tokens_adjoint(q, k, v, a, beta, S, do, dS):
    """dq, dk, dv, da, dbeta, and the gradient of the state before the first token."""
    before = []  # of each write, the state that it predicts from; of each token, the undecayed one
    for t in range(len(q)):
        states = [S, a[t, :, None, None] * S]
        for r in range(k.shape[1]):
            error = v[t, r] - (states[-1] * k[t, r][..., None]).sum(1)
            write = (beta[t, r][:, None] * error)[:, None]
            states.append(states[-1] + k[t, r][..., None] * write)
        before.append(states)
        S = states[-1]
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    da, dbeta, dS = np.empty_like(a), np.empty_like(beta), dS.copy()
    for t in reversed(range(len(q))):
        # was o = S' q
        dq[t] = (before[t][-1] * do[t][:, None]).sum(-1)
        dS = dS + q[t][..., None] * do[t][:, None]
        for r in reversed(range(k.shape[1])):
            S_r, k_r, beta_r = before[t][r + 1], k[t, r], beta[t, r][:, None]
            error = v[t, r] - (S_r * k_r[..., None]).sum(1)
            # was S <- S + k (beta error)'
            d_write = (dS * k_r[..., None]).sum(1)
            dbeta[t, r] = (d_write * error).sum(-1)
            # was error = v - S' k
            dv[t, r] = beta_r * d_write
            dk[t, r] = (dS * (beta_r * error)[:, None]).sum(-1) - (S_r * dv[t, r][:, None]).sum(-1)
            dS = dS - k_r[..., None] * dv[t, r][:, None]
        # was S <- a S
        da[t] = (dS * before[t][0]).sum((1, 2))
        dS = a[t, :, None, None] * dS
    return dq, dk, dv, da, dbeta, dS


def gated_delta_product(
    q,
    k,
    v,
    g=None,
    beta=1.0,
    *,
    num_householder,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """S <- exp(g) S, then R times S <- S + beta k (v - S' k)', o = scale * S' q, token by token.

    Parameters
    ----------
    q : array [B,T,H,K]
    k : array [B,TR,H,K]
    v : array [B,TR,HV,V]
    g : array [B,T,HV] or float, optional
        The log of the decay; 0 by default.
    beta : array [B,TR,HV] or float
    num_householder : int
        R.
    scale : float, optional
        K**-0.5 by default.
    initial_state : array [S,HV,K,V], optional
    cu_seqlens, dtype
        The keywords at the head of this file.

    Returns
    -------
    o : ndarray [B,T,HV,V]
    states : ndarray [S,HV,K,V]

    References
    ----------
    Siems et al., 2025, *DeltaProduct*, arXiv:2502.10297.

    Examples
    --------
    The second write of a token replaces the first where both have one key:

    >>> import numpy as np
    >>> from linattn import reference
    >>> q, k, v = np.ones((1, 1, 1, 1)), np.ones((1, 2, 1, 1)), np.array([3.0, 5.0])
    >>> o, _ = reference.gated_delta_product(q, k, v.reshape(1, 2, 1, 1), num_householder=2)
    >>> o.item()
    5.0
    """
    p = _Product(q, k, v, g, beta, num_householder, scale, initial_state, cu_seqlens, dtype)
    o = np.empty_like(p.v[:, :, 0])
    for n, at in enumerate(p.tokens):
        o[at], p.S[n] = product_tokens(p.q[at], p.k[at], p.v[at], p.a[at], p.beta[at], p.S[n])
    return rounded(p.scale * o, dtype), p.S


def gated_delta_product_backward(
    do,
    q,
    k,
    v,
    g=None,
    beta=1.0,
    *,
    num_householder,
    scale=None,
    initial_state=None,
    d_final_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """The gradients of :func:`gated_delta_product`.

    Parameters
    ----------
    do : array [B,T,HV,V]
        The gradient of o.
    q, k, v, g, beta, num_householder, scale, initial_state
        As in :func:`gated_delta_product`.
    d_final_state : array [S,HV,K,V], optional
    cu_seqlens, dtype
        The keywords at the head of this file.

    Returns
    -------
    dict
        By the names of the arguments, None where one was not given.

    Examples
    --------
    A value that the next write of its token replaces has no gradient:

    >>> import numpy as np
    >>> from linattn import reference
    >>> q, k = np.ones((1, 1, 1, 1)), np.ones((1, 2, 1, 1))
    >>> grads = reference.gated_delta_product_backward(q, q, k, k, num_householder=2)
    >>> grads["v"].ravel().tolist()
    [0.0, 1.0]
    """
    p = _Product(q, k, v, g, beta, num_householder, scale, initial_state, cu_seqlens, dtype)
    do, dS = p.scale * cast(do, dtype), state_of(d_final_state, p.S.shape, dtype)
    dq, dk, dv = np.empty_like(p.q), np.empty_like(p.k), np.empty_like(p.v)
    da, dbeta = np.empty(p.a.shape, p.S.dtype), np.empty(p.beta.shape, p.S.dtype)
    for n, at in enumerate(p.tokens):
        dq[at], dk[at], dv[at], da[at], dbeta[at], dS[n] = product_tokens_adjoint(
            p.q[at], p.k[at], p.v[at], p.a[at], p.beta[at], p.S[n], do[at], dS[n]
        )
    H = q.shape[2]
    dk, dv, dbeta = (x.reshape(len(q), -1, *x.shape[3:]) for x in (dk, dv, dbeta))
    return {
        "q": rounded(of_groups(dq, H), dtype),
        "k": rounded(of_groups(dk, H), dtype),
        "v": rounded(dv, dtype),
        "g": given(p.a * da, g, dtype),
        "beta": given(dbeta, beta, dtype),
        "initial_state": None if initial_state is None else dS,
    }


class _Product:
    """The arguments of a call: writes on an axis of their own, rows for every value head."""

    def __init__(self, q, k, v, g, beta, R, scale, initial_state, cu_seqlens, dtype):
        (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
        self.q = for_heads(cast(q, dtype), HV)
        self.k = for_heads(cast(k, dtype), HV).reshape(B, T, R, HV, K)
        self.v = cast(v, dtype).reshape(B, T, R, HV, V)
        self.a = np.exp(gate(0.0 if g is None else g, (B, T, HV), dtype))
        self.beta = gate(beta, (B, T * R, HV), dtype).reshape(B, T, R, HV)
        self.scale = self.q.dtype.type(K**-0.5 if scale is None else scale)
        self.tokens = sequences(B, T, cu_seqlens)
        self.S = state_of(initial_state, (len(self.tokens), HV, K, V), dtype)


# ---------------------------------------------------------------------------------------------
# The mLSTM of xLSTM, Beck et al. 2024. C [H,K,V], n [H,K], m [H].
# ---------------------------------------------------------------------------------------------


def mlstm_tokens(q, k, v, i, log_f, C, n, m, scale):
    """h [T,H,V], and for every token what its adjoint needs: m, C and n before and after it."""
    h, kept = np.empty_like(v), []
    for t in range(len(q)):
        before = C, n
        m_new = np.maximum(log_f[t] + m, i[t])
        forget, put = np.exp(log_f[t] + m - m_new), np.exp(i[t] - m_new)
        write = put[:, None] * v[t]
        C = forget[:, None, None] * C + k[t][..., None] * write[:, None]
        n = forget[:, None] * n + k[t] * put[:, None]
        m = m_new
        num = scale * (C * q[t][..., None]).sum(1)
        den = scale * (n * q[t]).sum(1)
        divisor = np.maximum(abs(den), np.exp(-m))
        h[t] = num / divisor[:, None]
        kept.append((before, (C, n), forget, put, write, den, divisor))
    return h, (C, n, m), kept


def mlstm_tokens_adjoint(q, k, v, h, kept, scale, dh, dC, dn):
    """dq, dk, dv, di, d log f, dC and dn before the first token. m is held: h is without it."""
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    di, d_log_f = np.empty_like(v[..., 0]), np.empty_like(v[..., 0])
    for t in reversed(range(len(q))):
        (C_before, n_before), (C, n), forget, put, write, den, divisor = kept[t]
        # was h = num / max(|den|, exp(-m))
        d_num = dh[t] / divisor[:, None]
        d_divisor = -(dh[t] * h[t]).sum(-1) / divisor
        d_den = np.where(abs(den) < divisor, 0, d_divisor * np.sign(den))
        # was num = scale C' q, den = scale n' q
        dq[t] = scale * ((C * d_num[:, None]).sum(-1) + n * d_den[:, None])
        dC = dC + scale * q[t][..., None] * d_num[:, None]
        dn = dn + scale * q[t] * d_den[:, None]
        # was C <- forget C + k (put v)', n <- forget n + k put
        dk[t] = (dC * write[:, None]).sum(-1) + dn * put[:, None]
        d_write = (dC * k[t][..., None]).sum(1)
        d_one = (dn * k[t]).sum(1)
        dv[t] = put[:, None] * d_write
        di[t] = put * ((d_write * v[t]).sum(-1) + d_one)
        d_forget = (dC * C_before).sum((1, 2)) + (dn * n_before).sum(1)
        d_log_f[t] = forget * d_forget
        dC, dn = forget[:, None, None] * dC, forget[:, None] * dn
    return dq, dk, dv, di, d_log_f, dC, dn


def mlstm(
    q,
    k,
    v,
    i,
    f,
    *,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """The stabilised mLSTM, token by token.

    Parameters
    ----------
    q, k : array [B,T,H,K]
    v : array [B,T,HV,V]
    i, f : array [B,T,HV] or float
        Before exp, and before the sigmoid.
    scale : float, optional
        K**-0.5 by default.
    initial_state : the triple (C [S,HV,K,V], n [S,HV,K], m [S,HV]), optional
    cu_seqlens, dtype
        The keywords at the head of this file. Rows of float16 and bfloat16 are float32 in between.

    Returns
    -------
    h : ndarray [B,T,HV,V]
    state : the triple (C, n, m)

    References
    ----------
    Beck et al., 2024, *xLSTM: Extended Long Short-Term Memory*, arXiv:2405.04517.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> one = np.ones((1, 1, 1, 1))
    >>> h, (C, n, m) = reference.mlstm(one, one, 3 * one, 2.0, 0.0)
    >>> h.item(), C.item(), n.item(), m.item()
    (3.0, 3.0, 1.0, 2.0)
    """
    p = _MLSTM(q, k, v, i, f, scale, initial_state, cu_seqlens, dtype)
    h, state, _ = p.run()
    return rounded(h, dtype), state


def mlstm_backward(
    dh,
    q,
    k,
    v,
    i,
    f,
    *,
    scale=None,
    initial_state=None,
    d_final_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """The gradients of :func:`mlstm`, with m held.

    Parameters
    ----------
    dh : array [B,T,HV,V]
        The gradient of h.
    q, k, v, i, f, scale, initial_state
        As in :func:`mlstm`.
    d_final_state : the pair (dC, dn), optional
    cu_seqlens, dtype
        The keywords at the head of this file.

    Returns
    -------
    dict
        By the names of the arguments; C and n for those of the initial state, if it was given.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> one = np.ones((1, 1, 1, 1))
    >>> grads = reference.mlstm_backward(one, one, one, 3 * one, 2.0, 0.0)
    >>> grads["v"].item(), grads["q"].item()  # h = v, whatever q is
    (1.0, 0.0)
    """
    p = _MLSTM(q, k, v, i, f, scale, initial_state, cu_seqlens, dtype)
    dC, dn = (None, None) if d_final_state is None else d_final_state
    dC, dn = state_of(dC, p.C.shape, dtype), state_of(dn, p.n.shape, dtype)
    dh, (h, _, kept) = cast(dh, dtype), p.run()
    dq, dk, dv = np.empty_like(p.q), np.empty_like(p.k), np.empty_like(p.v)
    di, d_log_f = np.empty(p.i.shape, p.C.dtype), np.empty(p.i.shape, p.C.dtype)
    for s, at in enumerate(p.tokens):
        dq[at], dk[at], dv[at], di[at], d_log_f[at], dC[s], dn[s] = mlstm_tokens_adjoint(
            p.q[at], p.k[at], p.v[at], h[at], kept[s], p.scale, dh[at], dC[s], dn[s]
        )
    H = q.shape[2]
    grads = {
        "q": rounded(of_groups(dq, H), dtype),
        "k": rounded(of_groups(dk, H), dtype),
        "v": rounded(dv, dtype),
        "i": given(di, i, dtype),
        "f": given(d_log_f * sigmoid(-p.f), f, dtype),  # was log f = log sigmoid(f)
    }
    return grads if initial_state is None else grads | {"C": dC, "n": dn}


class _MLSTM:
    """The arguments of a call in the dtype of the sums, rows for every value head."""

    def __init__(self, q, k, v, i, f, scale, initial_state, cu_seqlens, dtype):
        (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
        self.q, self.k = (for_heads(cast(x, dtype), HV) for x in (q, k))
        self.v = cast(v, dtype)
        self.i, self.f = (gate(x, (B, T, HV), dtype) for x in (i, f))
        self.scale = self.q.dtype.type(K**-0.5 if scale is None else scale)
        self.tokens = sequences(B, T, cu_seqlens)
        S = len(self.tokens)
        shapes = ((S, HV, K, V), (S, HV, K), (S, HV))
        state = (None, None, None) if initial_state is None else initial_state
        self.C, self.n, self.m = (
            state_of(x, shape, dtype) for x, shape in zip(state, shapes, strict=True)
        )

    def run(self):
        h, kept = np.empty_like(self.v), []
        C, n, m = self.C.copy(), self.n.copy(), self.m.copy()
        log_f = np.minimum(self.f, 0) - np.log1p(np.exp(-abs(self.f)))
        for s, at in enumerate(self.tokens):
            h[at], (C[s], n[s], m[s]), more = mlstm_tokens(
                self.q[at],
                self.k[at],
                self.v[at],
                self.i[at],
                log_f[at],
                self.C[s],
                self.n[s],
                self.m[s],
                self.scale,
            )
            kept.append(more)
        return h, (C, n, m), kept


# ---------------------------------------------------------------------------------------------
# Mamba-3 with one input and one output, Lahoti et al. 2026. h [H,P,N], as in Mamba-2.
# ---------------------------------------------------------------------------------------------


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
        The keywords at the head of this file.

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
        The keywords at the head of this file.

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
