"""The gradients of one head, one adjoint per rule; `backward` runs them over the heads.

An adjoint by tokens runs the recurrence again, then undoes every line of it in reverse: a comment
says what the forward line was. `chunk_adjoint` does the same with the chunk form. A gradient is d
and a name; do and dS, of the output and of the state after the last token, come in. a is [T,K], or
[T,1] for one decay for all keys; the adjoints by tokens give da [T,K] for both, and the gradient of
the one decay is the sum over K.
"""

import numpy as np

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


def delta_adjoint(q, k, v, a, beta, S, scale, do, dS):
    """dq, dk, dv, da, dbeta, dS0 of kda_tokens, and of the two simpler delta rules.

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
    states = [S]
    for t in range(len(q)):
        D = a[t][:, None] * states[t]
        states.append(D + np.outer(k[t], beta[t] * (v[t] - k[t] @ D)))
    dq, dk, dv, da = np.empty_like(q), np.empty_like(k), np.empty_like(v), np.empty_like(q)
    dbeta = np.empty_like(beta)
    for t in reversed(range(len(q))):
        D = a[t][:, None] * states[t]
        e = v[t] - k[t] @ D
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
        # p = k_t'D
        dk[t] += D @ dp
        dD = dS + np.outer(k[t], dp)
        # D = diag(a_t) S
        da[t] = (dD * states[t]).sum(1)
        dS = a[t][:, None] * dD
    return dq, dk, dv, da, dbeta, dS


# ---------------------------------------------------------------------------------------------
# One head, in chunks of C.
# ---------------------------------------------------------------------------------------------


def chunk_adjoint(q, k, v, a, beta, S, scale, do, dS, C):
    """dq, dk, dv, da, dbeta, dS0 of any op's chunk form; beta None is the additive rule.

    The results equal those of the adjoints above but for rounding. They are the yardstick for
    kernels that compute the gradients in chunks. da has the shape of a.

    Examples
    --------
    In chunks of four tokens, and token by token:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v, do), (S, dS) = rng.standard_normal((4, 6, 3)), rng.standard_normal((2, 3, 3))
    >>> a, beta = rng.uniform(0, 1, (6, 3)), rng.uniform(0, 1, 6)
    >>> by_chunk = reference.chunk_adjoint(q, k, v, a, beta, S, 1, do, dS, 4)
    >>> by_token = reference.delta_adjoint(q, k, v, a, beta, S, 1, do, dS)
    >>> all(np.allclose(x, y) for x, y in zip(by_chunk, by_token))
    True
    """
    dq, dk, dv, da = np.empty_like(q), np.empty_like(k), np.empty_like(v), np.empty_like(a)
    dbeta = None if beta is None else np.empty_like(beta)
    kept = []
    for t in range(0, len(q), C):
        rows = slice(t, t + C)
        kept.append((rows, S))
        E, e, G = _chunk_errors(k[rows], v[rows], a[rows], beta, rows, S)
        S = e[-1][:, None] * S + (G[-1] * k[rows]).T @ (E if beta is None else beta[rows, None] * E)
    for rows, S in reversed(kept):
        qc, kc, dO, n = q[rows], k[rows], scale * do[rows], len(q[rows])
        E, e, G = _chunk_errors(kc, v[rows], a[rows], beta, rows, S)
        U = E if beta is None else beta[rows, None] * E
        # S' = diag(e_C) S + k~'U, k~_j = G_Cj k_j;  O = (e q) S + P U, P_ij = q_i' G_ij k_j
        dU = (G[-1] * kc) @ dS + np.tril(_faded(qc, kc, G)).T @ dO
        dP, dL = np.tril(dO @ U.T), np.zeros_like(G[..., 0])
        d_tilde, dq_hat, dk_hat = U @ dS.T, dO @ S.T, np.zeros_like(kc)
        de_last, dS = (S * dS).sum(1), e[-1][:, None] * dS + (e * qc).T @ dO
        if beta is not None:
            # U = beta E, E = V - (e k) S - L U, L_ij = k_i' G_ij k_j
            L, dE = np.tril(_faded(kc, kc, G), -1), np.empty_like(dU)
            for i in reversed(range(n)):
                dU[i] -= L[i + 1 :, i] @ dE[i + 1 :]
                dE[i] = beta[rows][i] * dU[i]
            dbeta[rows] = (dU * E).sum(1)
            dL, dk_hat, dS = -np.tril(dE @ U.T, -1), -dE @ S.T, dS - (e * kc).T @ dE
            dU = dE
        dv[rows] = dU
        # P and L, the scores of the pairs (i, j)
        pq, pk = dP[..., None] * G, dL[..., None] * G
        dq[rows] = e * dq_hat + (pq * kc).sum(1)
        dk[rows] = e * dk_hat + G[-1] * d_tilde + (pk * kc).sum(1)
        dk[rows] += (pq * qc[:, None] + pk * kc[:, None]).sum(0)
        dG = (dP[..., None] * qc[:, None] + dL[..., None] * kc[:, None]) * kc
        dG[-1] += d_tilde * kc
        de = qc * dq_hat + kc * dk_hat
        de[-1] += de_last
        da[rows] = _decay_products_adjoint(dG, de, a[rows], e, G)
    return dq, dk, dv, da, dbeta, dS


def _decay_products_adjoint(dG, de, a, e, G):
    """da of a chunk's products of decays. dG and de are changed."""
    da = np.empty_like(a)
    has_one_decay = a.shape[1] == 1
    if has_one_decay:
        dG, de = dG.sum(-1, keepdims=True), de.sum(-1, keepdims=True)
    for i in reversed(range(len(a))):
        # G_i = a_i G_{i-1} and e_i = a_i e_{i-1}, row by row; e_{-1} = 1
        before = G[i - 1, :i] if i else G[:0, 0]
        da[i] = (dG[i, :i] * before).sum(0) + de[i] * (e[i - 1] if i else 1)
        if i:
            dG[i - 1, :i] += a[i] * dG[i, :i]
            de[i - 1] += a[i] * de[i]
    return da


def _faded(x, y, G):
    """A_ij = x_i' G_ij y_j; G [C,C,K], or [C,C,1] for one decay for all keys."""
    has_one_decay = G.shape[-1] == 1
    if has_one_decay:
        return (x @ y.T) * G[..., 0]
    return np.einsum("ik,jk,ijk->ij", x, y, G)


def _chunk_errors(k, v, a, beta, rows, S):
    """E, the rows that a chunk writes, before beta; e_i = a_i ... a_1; G_ij = a_i ... a_{j+1}."""
    G = np.zeros((len(k), *a.shape), a.dtype)
    for i in range(len(k)):
        G[i, :i] = a[i] * G[i - 1, :i]
        G[i, i] = 1
    e = np.cumprod(a, 0)
    if beta is None:
        return v, e, G
    L = np.tril(_faded(k, k, G), -1)
    E = v - (e * k) @ S
    for i in range(len(k)):
        E[i] -= L[i, :i] @ (beta[rows][:i, None] * E[:i])
    return E, e, G


# ---------------------------------------------------------------------------------------------
# One head of an op. C is the length of a chunk, None token by token.
# ---------------------------------------------------------------------------------------------


def head_adjoint(q, k, v, a, beta, S, scale, do, dS, C):
    """dq, dk, dv, da, dbeta, dS0; beta None is the additive rule, and dbeta then is None."""
    if C is not None:
        return chunk_adjoint(q, k, v, a, beta, S, scale, do, dS, C)
    if beta is not None:
        return delta_adjoint(q, k, v, a, beta, S, scale, do, dS)
    dq, dk, dv, da, dS = additive_adjoint(q, k, v, a, S, scale, do, dS)
    return dq, dk, dv, da, None, dS


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
    dq, dk, dv, _, _, dS = chunk_adjoint(
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
