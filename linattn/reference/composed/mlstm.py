"""The mLSTM of xLSTM, Beck et al. 2024. C [H,K,V], n [H,K], m [H]."""

import numpy as np

from .._loops import cast, rounded
from ._arrays import for_heads, gate, given, of_groups, sequences, sigmoid, state_of


def mlstm_tokens(q, k, v, i, log_f, C, n, m, scale, eps):
    """h [T,H,V], and for every token what its adjoint needs: m, C and n before and after it."""
    h, kept = np.empty_like(v), []
    for t in range(len(q)):
        before = C, n
        by_decay = log_f[t] + m > i[t]
        m_new = np.maximum(log_f[t] + m, i[t])
        forget, put = np.exp(log_f[t] + m - m_new), np.exp(i[t] - m_new)
        write = put[:, None] * v[t]
        C = forget[:, None, None] * C + k[t][..., None] * write[:, None]
        n = forget[:, None] * n + k[t] * put[:, None]
        m = m_new
        num = scale * (C * q[t][..., None]).sum(1)
        den = scale * (n * q[t]).sum(1)
        divisor = np.maximum(abs(den), np.exp(-m)) + eps
        h[t] = num / divisor[:, None]
        reads = abs(den) > np.exp(-m)
        kept.append((before, (C, n), forget, put, write, den, divisor, reads, by_decay))
    return h, (C, n, m), kept


def mlstm_tokens_adjoint(q, k, v, h, kept, scale, eps, dh, dC, dn):
    """dq, dk, dv, di, d log f, dC and dn before the first token. The first and the last m are held.

    h has a part of m by way of eps alone: times exp(m), its divisor is what has no m, and eps
    exp(m).
    """
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    di, d_log_f = np.empty_like(v[..., 0]), np.empty_like(v[..., 0])
    dm = np.zeros(v.shape[1], v.dtype)
    for t in reversed(range(len(q))):
        (C_before, n_before), (C, n), forget, put, write, den, divisor, reads, by_decay = kept[t]
        # was h = num / (max(|den|, exp(-m)) + eps)
        d_num = dh[t] / divisor[:, None]
        d_divisor = -(dh[t] * h[t]).sum(-1) / divisor
        d_den = np.where(reads, d_divisor * np.sign(den), 0)
        dm = dm + d_divisor * eps
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
        # was m = max(log f + m, i)
        di[t] += np.where(by_decay, 0, dm)
        dm = np.where(by_decay, dm, 0)
        d_log_f[t] += dm
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
    eps=0.0,
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
    eps : float
        Added to the divisor.
    initial_state : the triple (C [S,HV,K,V], n [S,HV,K], m [S,HV]), optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn.reference.composed``. Rows of float16 and bfloat16
        are float32 in between.

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
    p = _MLSTM(q, k, v, i, f, scale, eps, initial_state, cu_seqlens, dtype)
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
    eps=0.0,
    initial_state=None,
    d_final_state=None,
    cu_seqlens=None,
    dtype=np.float64,
):
    """The gradients of :func:`mlstm`, with the initial and the final m held.

    Parameters
    ----------
    dh : array [B,T,HV,V]
        The gradient of h.
    q, k, v, i, f, scale, eps, initial_state
        As in :func:`mlstm`.
    d_final_state : the pair (dC, dn), optional
    cu_seqlens, dtype
        The keywords at the head of ``linattn.reference.composed``.

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
    p = _MLSTM(q, k, v, i, f, scale, eps, initial_state, cu_seqlens, dtype)
    dC, dn = (None, None) if d_final_state is None else d_final_state
    dC, dn = state_of(dC, p.C.shape, dtype), state_of(dn, p.n.shape, dtype)
    dh, (h, _, kept) = cast(dh, dtype), p.run()
    dq, dk, dv = np.empty_like(p.q), np.empty_like(p.k), np.empty_like(p.v)
    di, d_log_f = np.empty(p.i.shape, p.C.dtype), np.empty(p.i.shape, p.C.dtype)
    for s, at in enumerate(p.tokens):
        dq[at], dk[at], dv[at], di[at], d_log_f[at], dC[s], dn[s] = mlstm_tokens_adjoint(
            p.q[at], p.k[at], p.v[at], h[at], kept[s], p.scale, p.eps, dh[at], dC[s], dn[s]
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

    def __init__(self, q, k, v, i, f, scale, eps, initial_state, cu_seqlens, dtype):
        (B, T, _, K), (HV, V) = q.shape, v.shape[2:]
        self.q, self.k = (for_heads(cast(x, dtype), HV) for x in (q, k))
        self.v = cast(v, dtype)
        self.i, self.f = (gate(x, (B, T, HV), dtype) for x in (i, f))
        self.scale = self.q.dtype.type(K**-0.5 if scale is None else scale)
        self.eps = self.q.dtype.type(eps)
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
                self.eps,
            )
            kept.append(more)
        return h, (C, n, m), kept
