"""The rule of a diagonal plus a low rank: a token looks up x before the decay, and takes y p' off.

S <- (diag(a) - y x') S + k v'
"""

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
    solve_unit_lower,
)

# ---------------------------------------------------------------------------------------------
# One head. S comes in and goes out; it is never changed in place.
# ---------------------------------------------------------------------------------------------


def dplr_delta_rule_tokens(q, k, v, a, S, scale, x, y):
    """RWKV-7, Peng et al. 2025: p = x'S before the decay, and then S <- diag(a) S + k v' - y p'.

    Examples
    --------
    Token 1 looks up the value of token 0 and takes it off, though the decay has forgotten it:

    >>> import numpy as np
    >>> from linattn import reference
    >>> k = x = y = np.ones((2, 1))
    >>> v, a = np.array([[4.0], [1.0]]), np.array([[1.0], [0.0]])
    >>> _, S = reference.dplr_delta_rule_tokens(k, k, v, a, np.zeros((1, 1)), 1, x, y)
    >>> S.item()
    -3.0
    """
    o = np.empty_like(v)
    for t in range(len(q)):
        p = x[t] @ S
        S = a[t][:, None] * S + np.outer(k[t], v[t]) - np.outer(y[t], p)
        o[t] = scale * (q[t] @ S)
    return o, S


def dplr_delta_rule_chunk(q, k, v, a, S, scale, x, y):
    """Two rows are written for each token, k v' and -y p', so that there are two of each score.

    p_i = x_i'(e_{i-1} S) + sum_{j<i} x_i'G_{i-1,j} (k_j v_j' - y_j p_j'), from the first row down.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v), S = rng.standard_normal((3, 6, 4)), rng.standard_normal((4, 4))
    >>> x = reference.l2norm(rng.standard_normal((6, 4)))
    >>> y, a = x * rng.uniform(0, 1, (6, 4)), rng.uniform(0, 1, (6, 4))
    >>> o, _ = reference.dplr_delta_rule_chunk(q, k, v, a, S, 1, x, y)
    >>> np.allclose(o, reference.dplr_delta_rule_tokens(q, k, v, a, S, 1, x, y)[0])
    True
    """
    from_start = np.cumprod(a, axis=0)
    before = np.ones_like(a)
    before[1:] = from_start[:-1]
    (Lk, _), (Ly, _) = (faded_scores(x, row, a, before=True) for row in (k, y))  # scores
    (Pk, faded_k), (Py, faded_y) = (faded_scores(q, row, a) for row in (k, y))
    p = solve_unit_lower(Ly, (x * before) @ S + Lk @ v)  # solve
    o = scale * (q * from_start) @ S + scale * (Pk @ v - Py @ p)  # read
    return o, from_start[-1][:, None] * S + faded_k.T @ v - faded_y.T @ p  # carry


# ---------------------------------------------------------------------------------------------
# Its gradients.
# ---------------------------------------------------------------------------------------------


def dplr_adjoint(q, k, v, a, S, scale, do, dS, x, y):
    """dq, dk, dv, da, dx, dy, dS0 of dplr_delta_rule_tokens.

    Examples
    --------
    o and the last state are linear in v and S, so that the products with the gradients have one
    sum:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, x, y, do = rng.standard_normal((6, 5, 3))
    >>> S, dS = rng.standard_normal((2, 3, 3))
    >>> a = rng.uniform(0, 1, (5, 3))
    >>> o, last = reference.dplr_delta_rule_tokens(q, k, v, a, S, 1, x, y)
    >>> _, _, dv, *_, first = reference.dplr_adjoint(q, k, v, a, S, 1, do, dS, x, y)
    >>> np.allclose((dv * v).sum() + (first * S).sum(), (do * o).sum() + (dS * last).sum())
    True
    """
    states = [S]
    for t in range(len(q)):
        S = states[t]
        p = x[t] @ S
        states.append(a[t][:, None] * S + np.outer(k[t], v[t]) - np.outer(y[t], p))
    dq, dk, dv, da, dx, dy = (np.empty_like(z) for z in (q, k, v, a, x, y))
    for t in reversed(range(len(q))):
        S = states[t]
        # o_t = scale q_t'S
        dq[t] = scale * (states[t + 1] @ do[t])
        dS = dS + scale * np.outer(q[t], do[t])
        # S <- S + k_t v_t' - y_t p'
        dk[t] = dS @ v[t]
        dv[t] = k[t] @ dS
        dy[t] = -(dS @ (x[t] @ S))
        dp = -(y[t] @ dS)
        # S <- diag(a_t) S
        da[t] = (dS * S).sum(1)
        dS = a[t][:, None] * dS
        # p = x_t'S
        dx[t] = S @ dp
        dS = dS + np.outer(x[t], dp)
    return dq, dk, dv, da, dx, dy, dS


def dplr_chunk_adjoint(q, k, v, a, S, scale, do, dS, x, y, C):
    """The same of the chunk form, in chunks of C tokens; equal but for rounding.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, x, y, do = rng.standard_normal((6, 5, 3))
    >>> S, dS = rng.standard_normal((2, 3, 3))
    >>> a = rng.uniform(0, 1, (5, 3))
    >>> by_chunk = reference.dplr_chunk_adjoint(q, k, v, a, S, 1, do, dS, x, y, 2)
    >>> by_token = reference.dplr_adjoint(q, k, v, a, S, 1, do, dS, x, y)
    >>> all(np.allclose(one, other) for one, other in zip(by_chunk, by_token))
    True
    """
    dq, dk, dv, da, dx, dy = (np.empty_like(z) for z in (q, k, v, a, x, y))
    kept = []
    for t in range(0, len(q), C):
        rows = slice(t, t + C)
        kept.append((rows, S))
        p, _, (e, G), _ = _chunk_look(k[rows], v[rows], a[rows], S, x[rows], y[rows])
        S = e[-1][:, None] * S + (G[-1] * k[rows]).T @ v[rows] - (G[-1] * y[rows]).T @ p
    for rows, S in reversed(kept):
        qc, kc, vc, xc, yc, dO = q[rows], k[rows], v[rows], x[rows], y[rows], scale * do[rows]
        p, (Lk, Ly), (e, G), (e_before, G_before) = _chunk_look(kc, vc, a[rows], S, xc, yc)
        # S' = diag(e_C) S + k~'V - y~'p;  O = (e q) S + Pk V - Py p
        dV = (G[-1] * kc) @ dS + scores(qc, kc, G).T @ dO
        dp = -((G[-1] * yc) @ dS + scores(qc, yc, G).T @ dO)
        # (I + Ly) p = (e_before x) S + Lk V
        for i in reversed(range(len(dp))):
            dp[i] -= Ly[i + 1 :, i] @ dp[i + 1 :]
        dv[rows] = dV + Lk.T @ dp
        dk_tilde, dy_tilde, dq_hat, dx_hat = vc @ dS.T, -p @ dS.T, dO @ S.T, dp @ S.T
        de = qc * dq_hat
        de[-1] += (S * dS).sum(1)
        dS = e[-1][:, None] * dS + (e * qc).T @ dO + (e_before * xc).T @ dp
        # the scores of the pairs (i, j)
        dq_k, dk_q, dG_qk = scores_adjoint(np.tril(dO @ vc.T), qc, kc, G)
        dq_y, dy_q, dG_qy = scores_adjoint(-np.tril(dO @ p.T), qc, yc, G)
        dx_k, dk_x, dG_xk = scores_adjoint(np.tril(dp @ vc.T, -1), xc, kc, G_before)
        dx_y, dy_x, dG_xy = scores_adjoint(-np.tril(dp @ p.T, -1), xc, yc, G_before)
        dq[rows] = e * dq_hat + dq_k + dq_y
        dx[rows] = e_before * dx_hat + dx_k + dx_y
        dk[rows] = G[-1] * dk_tilde + dk_q + dk_x
        dy[rows] = G[-1] * dy_tilde + dy_q + dy_x
        dG = dG_qk + dG_qy
        dG[-1] += dk_tilde * kc + dy_tilde * yc
        products_before_adjoint(xc * dx_hat, dG_xk + dG_xy, de, dG)
        da[rows] = products_adjoint(dG, de, a[rows], e, G)
    return dq, dk, dv, da, dx, dy, dS


def _chunk_look(k, v, a, S, x, y):
    """p, the rows that a chunk looks up; Lk and Ly; its products of decays, after and before."""
    e, G = products(a)
    e_before, G_before = products_before(e, G)
    Lk, Ly = scores(x, k, G_before), scores(x, y, G_before)
    p = solve_unit_lower(Ly, (e_before * x) @ S + Lk @ v)
    return p, (Lk, Ly), (e, G), (e_before, G_before)


def _head_adjoint(given, S, scale, do, dS, C):
    q, k, v, a, x, y = (given[name] for name in "qkvaxy")
    if C is None:
        found = dplr_adjoint(q, k, v, a, S, scale, do, dS, x, y)
    else:
        found = dplr_chunk_adjoint(q, k, v, a, S, scale, do, dS, x, y, C)
    *gradients, dS = found
    return dict(zip("qkvaxy", gradients, strict=True)), dS


# ---------------------------------------------------------------------------------------------
# The op: [B,T,H,K] in, [B,T,HV,V] and [N,HV,K,V] out.
# ---------------------------------------------------------------------------------------------


@takes_one_head
def dplr_delta_rule(q, k, v, x, y, g=None, *, alpha=None, dtype=np.float64, **common):
    """The delta rule of a diagonal plus a low rank, as :func:`linattn.dplr_delta_rule` has it.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    x : array [B,T,H,K]
        The key that looks up p = x'S, before the decay. qk_l2norm leaves x and y.
    y : array [B,T,H,K]
        The key from which p is taken off.
    g : array [B,T,HV,K] or float, optional
        The natural log of the decay.
    alpha : array like g, or float, optional
        The decay itself, instead of g.
    dtype : dtype
        Of the arithmetic.
    **common
        The keywords at the head of :mod:`linattn.reference`.

    Returns
    -------
    o : ndarray [B,T,HV,V]
    final_state : ndarray [N,HV,K,V]

    Examples
    --------
    Without a look it is gated linear attention:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, y, g = rng.standard_normal((5, 10, 4))  # one head: [T,K]
    >>> o, S = reference.dplr_delta_rule(q, k, v, 0 * y, y, -np.abs(g))
    >>> np.allclose(o, reference.gla(q, k, v, -np.abs(g))[0])
    True
    """
    a = given_decay(g, alpha, dtype)
    return per_head(OPS["dplr_delta_rule"], q, k, v, a, x=x, y=y, dtype=dtype, **common)


OPS["dplr_delta_rule"] = Op(
    dplr_delta_rule_tokens, dplr_delta_rule_chunk, decay="key", adjoint=_head_adjoint
)
