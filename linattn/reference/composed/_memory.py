"""A memory that forgets and is added to. S [H,V,K]: a row per value."""

import numpy as np


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
