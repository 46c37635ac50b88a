"""The rule of a bonus: a token reads before the decay and its write, and its own write counts u."""

import numpy as np

from ._loops import OPS, Op, given_decay, per_head
from ._one_head import takes_one_head
from .chunks import (
    faded_scores,
    products,
    products_adjoint,
    products_before,
    products_before_adjoint,
    scores,
    scores_adjoint,
)

# ---------------------------------------------------------------------------------------------
# One head. S comes in and goes out; it is never changed in place.
# ---------------------------------------------------------------------------------------------


def rwkv6_tokens(q, k, v, a, S, scale, bonus):
    """RWKV-6, Peng et al. 2024: o = (S + diag(u) k v')'q, and then S <- diag(a) S + k v'.

    bonus [K] is the paper's u.

    Examples
    --------
    Token 0 reads twice its own value. Token 1 reads that of token 0 before it decays:

    >>> import numpy as np
    >>> from linattn import reference
    >>> k, v, a = np.ones((2, 1)), np.array([[3.0], [1.0]]), np.full((2, 1), 0.5)
    >>> o, S = reference.rwkv6_tokens(k, k, v, a, np.zeros((1, 1)), 1, np.array([2.0]))
    >>> o.ravel().tolist(), S.item()
    ([6.0, 5.0], 2.5)
    """
    o = np.empty_like(v)
    for t in range(len(q)):
        o[t] = scale * (q[t] @ S + q[t] @ (bonus * k[t]) * v[t])
        S = a[t][:, None] * S + np.outer(k[t], v[t])
    return o, S


def rwkv6_chunk(q, k, v, a, S, scale, bonus):
    """gla's form with scores before the reader's own decay, and with a diagonal of its own.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v), S = rng.standard_normal((3, 6, 4)), rng.standard_normal((4, 4))
    >>> a, bonus = rng.uniform(0, 1, (6, 4)), rng.standard_normal(4)
    >>> o, _ = reference.rwkv6_chunk(q, k, v, a, S, 1, bonus)
    >>> np.allclose(o, reference.rwkv6_tokens(q, k, v, a, S, 1, bonus)[0])
    True
    """
    from_start = np.cumprod(a, axis=0)
    before = np.ones_like(a)
    before[1:] = from_start[:-1]
    A, faded = faded_scores(q, k, a, before=True)
    own = (q * bonus * k).sum(1)
    o = scale * ((q * before) @ S + A @ v + own[:, None] * v)
    return o, from_start[-1][:, None] * S + faded.T @ v


# ---------------------------------------------------------------------------------------------
# Its gradients.
# ---------------------------------------------------------------------------------------------


def rwkv6_adjoint(q, k, v, a, S, scale, do, dS, bonus):
    """dq, dk, dv, da, dbonus, dS0 of rwkv6_tokens.

    Examples
    --------
    o is linear in bonus and in S, so that the products with the gradients have one sum:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v, do), S = rng.standard_normal((4, 5, 3)), rng.standard_normal((3, 3))
    >>> a, bonus = rng.uniform(0, 1, (5, 3)), rng.standard_normal(3)
    >>> o, _ = reference.rwkv6_tokens(q, k, v, a, S, 1, bonus)
    >>> written = reference.rwkv6_tokens(q, k, v, a, 0 * S, 1, 0 * bonus)[0]
    >>> *_, dbonus, dS = reference.rwkv6_adjoint(q, k, v, a, S, 1, do, 0 * S, bonus)
    >>> np.allclose((dbonus * bonus).sum() + (dS * S).sum(), (do * (o - written)).sum())
    True
    """
    states = [S]
    for t in range(len(q)):
        states.append(a[t][:, None] * states[t] + np.outer(k[t], v[t]))
    dq, dk, dv, da = (np.empty_like(z) for z in (q, k, v, a))
    dbonus = np.zeros_like(bonus)
    for t in reversed(range(len(q))):
        S, dnum = states[t], scale * do[t]
        # S <- S + k_t v_t'
        dk[t] = dS @ v[t]
        dv[t] = k[t] @ dS
        # S <- diag(a_t) S
        da[t] = (dS * S).sum(1)
        dS = a[t][:, None] * dS
        # o_t = scale (q_t'S + own v_t)
        dq[t] = S @ dnum
        dS = dS + np.outer(q[t], dnum)
        dv[t] += q[t] @ (bonus * k[t]) * dnum
        down = v[t] @ dnum
        # own = q_t . (bonus * k_t)
        dq[t] += down * bonus * k[t]
        dk[t] += down * bonus * q[t]
        dbonus += down * q[t] * k[t]
    return dq, dk, dv, da, dbonus, dS


def rwkv6_chunk_adjoint(q, k, v, a, S, scale, do, dS, bonus, C):
    """The same of the chunk form, in chunks of C tokens; equal but for rounding.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v, do), (S, dS) = rng.standard_normal((4, 5, 3)), rng.standard_normal((2, 3, 3))
    >>> a, bonus = rng.uniform(0, 1, (5, 3)), rng.standard_normal(3)
    >>> by_chunk = reference.rwkv6_chunk_adjoint(q, k, v, a, S, 1, do, dS, bonus, 2)
    >>> by_token = reference.rwkv6_adjoint(q, k, v, a, S, 1, do, dS, bonus)
    >>> all(np.allclose(one, other) for one, other in zip(by_chunk, by_token))
    True
    """
    dq, dk, dv, da = (np.empty_like(z) for z in (q, k, v, a))
    dbonus = np.zeros_like(bonus)
    kept = []
    for t in range(0, len(q), C):
        rows = slice(t, t + C)
        kept.append((rows, S))
        e, G = products(a[rows])
        S = e[-1][:, None] * S + (G[-1] * k[rows]).T @ v[rows]
    for rows, S in reversed(kept):
        qc, kc, vc, dO = q[rows], k[rows], v[rows], scale * do[rows]
        e, G = products(a[rows])
        e_before, G_before = products_before(e, G)
        # S' = diag(e_C) S + k~'V;  O = (e_before q) S + P V + own V, P_ij = q_i'G_{i-1,j} k_j
        own, down = (qc * bonus * kc).sum(1), (vc * dO).sum(1)[:, None]
        dv[rows] = (G[-1] * kc) @ dS + scores(qc, kc, G_before).T @ dO + own[:, None] * dO
        dk_tilde, dq_hat = vc @ dS.T, dO @ S.T
        de, dG = np.zeros_like(qc), np.zeros_like(G)
        de[-1] = (S * dS).sum(1)
        dS = e[-1][:, None] * dS + (e_before * qc).T @ dO
        dq_P, dk_P, dG_P = scores_adjoint(np.tril(dO @ vc.T, -1), qc, kc, G_before)
        dq[rows] = e_before * dq_hat + dq_P + down * bonus * kc
        dk[rows] = G[-1] * dk_tilde + dk_P + down * bonus * qc
        dbonus += (down * qc * kc).sum(0)
        dG[-1] = dk_tilde * kc
        products_before_adjoint(qc * dq_hat, dG_P, de, dG)
        da[rows] = products_adjoint(dG, de, a[rows], e, G)
    return dq, dk, dv, da, dbonus, dS


def _head_adjoint(given, S, scale, do, dS, C):
    q, k, v, a, bonus = (given[name] for name in ("q", "k", "v", "a", "bonus"))
    if C is None:
        found = rwkv6_adjoint(q, k, v, a, S, scale, do, dS, bonus)
    else:
        found = rwkv6_chunk_adjoint(q, k, v, a, S, scale, do, dS, bonus, C)
    *gradients, dS = found
    return dict(zip(("q", "k", "v", "a", "bonus"), gradients, strict=True)), dS


# ---------------------------------------------------------------------------------------------
# The op: [B,T,H,K] in, [B,T,HV,V] and [N,HV,K,V] out.
# ---------------------------------------------------------------------------------------------


@takes_one_head
def rwkv6(q, k, v, bonus, g=None, *, alpha=None, scale=1.0, dtype=np.float64, **common):
    """RWKV-6, as :func:`linattn.rwkv6` has it.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    bonus : array [H,K] or float
        How much a token's own write counts in its read; [K] for one head.
    g : array [B,T,HV,K] or float, optional
        The natural log of the decay.
    alpha : array like g, or float, optional
        The decay itself, instead of g.
    scale : float, optional
        The factor of the read, 1 by default; None is K**-0.5.
    dtype : dtype
        Of the arithmetic.
    **common
        The other keywords at the head of :mod:`linattn.reference`.

    Returns
    -------
    o : ndarray [B,T,HV,V]
    final_state : ndarray [N,HV,K,V]

    Examples
    --------
    Without a decay a bonus of 1 is an ordinary read:

    >>> import numpy as np
    >>> from linattn import reference
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 10, 4))  # one head: [T,K]
    >>> o, S = reference.rwkv6(q, k, v, np.ones(4), alpha=1)
    >>> np.allclose(o, reference.gla(q, k, v, alpha=1, scale=1)[0])
    True
    """
    a = given_decay(g, alpha, dtype)
    return per_head(OPS["rwkv6"], q, k, v, a, bonus=bonus, scale=scale, dtype=dtype, **common)


OPS["rwkv6"] = Op(rwkv6_tokens, rwkv6_chunk, decay="key", default_scale=1.0, adjoint=_head_adjoint)
