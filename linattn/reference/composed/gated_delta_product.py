"""DeltaProduct, Siems et al. 2025. S [H,K,V]."""

import numpy as np

from .._loops import cast, rounded
from ._arrays import for_heads, gate, given, of_groups, sequences, state_of


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
        The keywords at the head of ``linattn.reference.composed``.

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
        The keywords at the head of ``linattn.reference.composed``.

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
