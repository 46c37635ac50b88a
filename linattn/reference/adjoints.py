"""The gradients of one head, one adjoint per rule; `backward` runs them over the heads.

An adjoint by tokens runs the recurrence again, then undoes every line of it in reverse: a comment
says what the forward line was. `chunk_adjoint` does the same with the chunk form. A gradient is d
and a name; do and dS, of the output and of the state after the last token, come in. a is [T,K], or
[T,1] for one decay for all keys; the adjoints by tokens give da [T,K] for both, and the gradient of
the one decay is the sum over K.
"""

import numpy as np

from .chunks import products, products_adjoint, scores, scores_adjoint
from .elements import divide_adjoint

# ---------------------------------------------------------------------------------------------
# One head, token by token.
# ---------------------------------------------------------------------------------------------


def linear_attention_adjoint(q, k, v, S, z, scale, dnum, dden, dS, dz):
    """dq, dk, dv, dS0, dz0 of linear_attention_tokens.

    Examples
    --------
    num is linear in v and S. If only num has a gradient, the products with the gradients have one
    sum:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dnum = rng.uniform(0, 1, (4, 6, 3))
    >>> S, z, none = rng.uniform(0, 1, (3, 3)), np.ones(3), (np.zeros((3, 3)), np.zeros(3))
    >>> grads = reference.linear_attention_adjoint(q, k, v, S, z, 1, dnum, np.zeros(6), *none)
    >>> _, _, dv, dS, _ = grads
    >>> num, _, _ = reference.linear_attention_tokens(q, k, v, (S, z), 1)
    >>> np.allclose((dv * v).sum() + (dS * S).sum(), (dnum * num).sum())
    True
    """
    states = [(S, z)]
    for t in range(len(q)):
        S, z = S + np.outer(k[t], v[t]), z + k[t]
        states.append((S, z))
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    for t in reversed(range(len(q))):
        S, z = states[t + 1]
        # den_t = scale q_t'z
        dq[t] = scale * dden[t] * z
        dz = dz + scale * dden[t] * q[t]
        # num_t = scale q_t'S
        dq[t] += scale * (S @ dnum[t])
        dS = dS + scale * np.outer(q[t], dnum[t])
        # z <- z + k_t
        dk[t] = dz
        # S <- S + k_t v_t'
        dk[t] += dS @ v[t]
        dv[t] = k[t] @ dS
    return dq, dk, dv, dS, dz


def linear_attention_noncausal_adjoint(q, k, v, S, z, scale, dnum, dden, dS, dz):
    """The same when every token reads the last state: all reads are undone before any write.

    Examples
    --------
    Every token reads every value, so all of them have one gradient if their keys are equal:

    >>> import numpy as np
    >>> from linattn import reference
    >>> q, dnum = np.random.default_rng(0).uniform(0, 1, (2, 6, 3))
    >>> k = v = np.ones((6, 3))
    >>> S, z = np.zeros((3, 3)), np.zeros(3)
    >>> last = (np.zeros(6), S, z)  # dden, dS, dz
    >>> grads = reference.linear_attention_noncausal_adjoint(q, k, v, S, z, 1, dnum, *last)
    >>> np.allclose(grads[2], grads[2][0])  # dv
    True
    """
    S, z = S + k.T @ v, z + k.sum(0)
    # den = scale q z
    dq = scale * np.outer(dden, z)
    dz = dz + scale * (dden @ q)
    # num = scale q S
    dq += scale * (dnum @ S.T)
    dS = dS + scale * (q.T @ dnum)
    # z = z0 + sum_t k_t
    dk = np.tile(dz, (len(k), 1))
    # S = S0 + k'v
    dk += v @ dS.T
    dv = k @ dS
    return dq, dk, dv, dS, dz


def additive_adjoint(q, k, v, a, S, scale, do, dS):
    """dq, dk, dv, da, dS0 of gla_tokens, and of every op that is gla with a simpler decay.

    Examples
    --------
    o and the last state are linear in v and S, so that the products with the gradients have one
    sum:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v, do), (S, dS) = rng.standard_normal((4, 6, 3)), rng.standard_normal((2, 3, 3))
    >>> a = rng.uniform(0, 1, (6, 3))
    >>> o, S_last = reference.gla_tokens(q, k, v, a, S, 1)
    >>> _, _, dv, _, dS_first = reference.additive_adjoint(q, k, v, a, S, 1, do, dS)
    >>> np.allclose((dv * v).sum() + (dS_first * S).sum(), (do * o).sum() + (dS * S_last).sum())
    True
    """
    states = [S]
    for t in range(len(q)):
        states.append(a[t][:, None] * states[t] + np.outer(k[t], v[t]))
    dq, dk, dv, da = np.empty_like(q), np.empty_like(k), np.empty_like(v), np.empty_like(q)
    for t in reversed(range(len(q))):
        # o_t = scale q_t'S
        dq[t] = scale * (states[t + 1] @ do[t])
        dS = dS + scale * np.outer(q[t], do[t])
        # S <- S + k_t v_t'
        dk[t] = dS @ v[t]
        dv[t] = k[t] @ dS
        # S <- diag(a_t) S
        da[t] = (dS * states[t]).sum(1)
        dS = a[t][:, None] * dS
    return dq, dk, dv, da, dS


def delta_adjoint(q, k, v, a, beta, S, scale, do, dS, x=None):
    """dq, dk, dv, da, dbeta, dx, dS0 of kda_tokens, and of the two simpler delta rules.

    Without x the key k predicts: its gradient is in dk, and dx is None.

    Examples
    --------
    dbeta beside a difference quotient:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v, do), (S, dS) = rng.standard_normal((4, 6, 3)), rng.standard_normal((2, 3, 3))
    >>> a, (beta, e) = rng.uniform(0, 1, (6, 3)), (rng.uniform(0, 1, 6), 1e-6 * np.eye(6)[2])
    >>> dbeta = reference.delta_adjoint(q, k, v, a, beta, S, 1, do, 0 * S)[4]
    >>> more, less = (reference.kda_tokens(q, k, v, a, b, S, 1)[0] for b in (beta + e, beta - e))
    >>> np.allclose(dbeta[2], (do * (more - less)).sum() / 2e-6)
    True
    """
    has_x, x = x is not None, k if x is None else x
    states = [S]
    for t in range(len(q)):
        D = a[t][:, None] * states[t]
        states.append(D + np.outer(k[t], beta[t] * (v[t] - x[t] @ D)))
    dq, dk, dv, da = np.empty_like(q), np.empty_like(k), np.empty_like(v), np.empty_like(q)
    dbeta, dx = np.empty_like(beta), np.empty_like(x)
    for t in reversed(range(len(q))):
        D = a[t][:, None] * states[t]
        e = v[t] - x[t] @ D
        # o_t = scale q_t'S
        dq[t] = scale * (states[t + 1] @ do[t])
        dS = dS + scale * np.outer(q[t], do[t])
        # S = D + k_t u'
        dk[t] = dS @ (beta[t] * e)
        du = k[t] @ dS
        # u = b_t e
        dbeta[t] = du @ e
        de = beta[t] * du
        # e = v_t - p
        dv[t] = de
        dp = -de
        # p = x_t'D
        dx[t] = D @ dp
        dD = dS + np.outer(x[t], dp)
        # D = diag(a_t) S
        da[t] = (dD * states[t]).sum(1)
        dS = a[t][:, None] * dD
    return (dq, dk, dv, da, dbeta, dx, dS) if has_x else (dq, dk + dx, dv, da, dbeta, None, dS)


# ---------------------------------------------------------------------------------------------
# One head, in chunks of C.
# ---------------------------------------------------------------------------------------------


def chunk_adjoint(q, k, v, a, beta, S, scale, do, dS, C, x=None):
    """dq, dk, dv, da, dbeta, dx, dS0 of a chunk form; beta None is the additive rule.

    The results equal those of the adjoints above but for rounding. They are the yardstick for
    kernels that compute the gradients in chunks. da has the shape of a. dx is None if x is.

    Examples
    --------
    In chunks of four tokens, and token by token:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v, do), (S, dS) = rng.standard_normal((4, 6, 3)), rng.standard_normal((2, 3, 3))
    >>> a, beta, x = rng.uniform(0, 1, (6, 3)), rng.uniform(0, 1, 6), rng.standard_normal((6, 3))
    >>> by_chunk = reference.chunk_adjoint(q, k, v, a, beta, S, 1, do, dS, 4, x)
    >>> by_token = reference.delta_adjoint(q, k, v, a, beta, S, 1, do, dS, x)
    >>> all(np.allclose(one, other) for one, other in zip(by_chunk, by_token))
    True
    """
    has_x, x = x is not None, k if x is None else x
    dq, dk, dv, da = np.empty_like(q), np.empty_like(k), np.empty_like(v), np.empty_like(a)
    dbeta, dx = None if beta is None else np.empty_like(beta), np.zeros_like(x)
    kept = []
    for t in range(0, len(q), C):
        rows = slice(t, t + C)
        kept.append((rows, S))
        E, e, G = _chunk_errors(k[rows], v[rows], a[rows], beta, x, rows, S)
        S = e[-1][:, None] * S + (G[-1] * k[rows]).T @ (E if beta is None else beta[rows, None] * E)
    for rows, S in reversed(kept):
        qc, kc, xc, dO = q[rows], k[rows], x[rows], scale * do[rows]
        E, e, G = _chunk_errors(kc, v[rows], a[rows], beta, x, rows, S)
        U = E if beta is None else beta[rows, None] * E
        # S' = diag(e_C) S + k~'U, k~_j = G_Cj k_j;  O = (e q) S + P U, P_ij = q_i' G_ij k_j
        dU = (G[-1] * kc) @ dS + scores(qc, kc, G).T @ dO
        dP, d_tilde, dq_hat = np.tril(dO @ U.T), U @ dS.T, dO @ S.T
        de, dG = np.zeros_like(qc), np.zeros_like(G, shape=(*G.shape[:2], kc.shape[1]))
        de[-1], dS = (S * dS).sum(1), e[-1][:, None] * dS + (e * qc).T @ dO
        if beta is not None:
            # U = beta E, E = V - (e x) S - L U, L_ij = x_i' G_ij k_j
            L, dE = np.tril(scores(xc, kc, G), -1), np.empty_like(dU)
            for i in reversed(range(len(dU))):
                dU[i] -= L[i + 1 :, i] @ dE[i + 1 :]
                dE[i] = beta[rows][i] * dU[i]
            dbeta[rows] = (dU * E).sum(1)
            dL, dx_hat, dS = -np.tril(dE @ U.T, -1), -dE @ S.T, dS - (e * xc).T @ dE
            dU = dE
            dx[rows], dk[rows], dG = scores_adjoint(dL, xc, kc, G)
            dx[rows] += e * dx_hat
            de += xc * dx_hat
        else:
            dk[rows] = 0
        dv[rows] = dU
        dq_P, dk_P, dG_P = scores_adjoint(dP, qc, kc, G)
        dq[rows] = e * dq_hat + dq_P
        dk[rows] += dk_P + G[-1] * d_tilde
        dG += dG_P
        dG[-1] += d_tilde * kc
        de += qc * dq_hat
        da[rows] = products_adjoint(dG, de, a[rows], e, G)
    if not has_x:
        dk, dx = dk + dx, None
    return dq, dk, dv, da, dbeta, dx, dS


def _chunk_errors(k, v, a, beta, x, rows, S):
    """E, the rows that a chunk writes, before beta; and its products of decays, e and G."""
    e, G = products(a)
    if beta is None:
        return v, e, G
    x = x[rows]
    L = np.tril(scores(x, k, G), -1)
    E = v - (e * x) @ S
    for i in range(len(k)):
        E[i] -= L[i, :i] @ (beta[rows][:i, None] * E[:i])
    return E, e, G


# ---------------------------------------------------------------------------------------------
# One head of an op, from and to arrays by name. C is the length of a chunk, None token by token.
# ---------------------------------------------------------------------------------------------


def head_adjoint(given, S, scale, do, dS, C):
    """The gradients of the additive rule, or with beta of the delta rule, and of the state."""
    q, k, v, a = (given[name] for name in "qkva")
    beta, x = given.get("beta"), given.get("x")
    dx = None
    if C is not None:
        dq, dk, dv, da, dbeta, dx, dS = chunk_adjoint(q, k, v, a, beta, S, scale, do, dS, C, x)
    elif beta is not None:
        dq, dk, dv, da, dbeta, dx, dS = delta_adjoint(q, k, v, a, beta, S, scale, do, dS, x)
    else:
        dq, dk, dv, da, dS = additive_adjoint(q, k, v, a, S, scale, do, dS)
        dbeta = None
    return {"q": dq, "k": dk, "v": dv, "a": da, "beta": dbeta, "x": dx}, dS


def normalised_head_adjoint(op, q, k, v, state, scale, do, d_state, C, causal, normalize, eps):
    """dq, dk, dv, dS0, dz0 of linear_attention: the division first, then num and den."""
    (S, z), (dS, dz) = state, d_state
    run = op.tokens if causal else op.noncausal
    num, den, _ = run(q, k, v, state, scale)
    dnum, dden = divide_adjoint(do, num, den, normalize, eps)
    if not causal:
        return linear_attention_noncausal_adjoint(q, k, v, S, z, scale, dnum, dden, dS, dz)
    if C is None:
        return linear_attention_adjoint(q, k, v, S, z, scale, dnum, dden, dS, dz)
    # z is the state of one more column of values, which is 1 for every token
    dq, dk, dv, *_, dS = chunk_adjoint(
        q,
        k,
        _with_column(v, np.ones_like(den)),
        np.ones((len(v), 1), v.dtype),
        None,
        _with_column(S, z),
        scale,
        _with_column(dnum, dden),
        _with_column(dS, dz),
        C,
    )
    return dq, dk, dv[:, :-1], dS[:, :-1], dS[:, -1]


def _with_column(x, y):
    """x with one more column, y."""
    return np.concatenate([x, y[:, None]], 1)
