"""HGRN2, Qin et al. 2024."""

import numpy as np

from .._loops import cast, rounded
from ._arrays import gate, given, sequences, state_of
from ._memory import memory, memory_adjoint


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
        The keywords at the head of ``linattn.reference.composed``.

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
        The keywords at the head of ``linattn.reference.composed``.

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
