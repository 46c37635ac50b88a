"""The delta rule with a momentum: an error goes into the momentum, and that into the memory."""

from functools import partial

import numpy as np

from ._loops import OPS, Op, given_decay, per_head
from ._one_head import takes_one_head
from .chunks import solve_unit_lower

# ---------------------------------------------------------------------------------------------
# One head. The states, the memory M and its momentum Y, come in and go out; they are never changed
# in place.
# ---------------------------------------------------------------------------------------------


def titans_tokens(q, k, v, a, beta, eta, states, scale, batch=1):
    """Titans, Behrouz et al. 2025: steps down the gradient of the squared error, with momentum.

    The prediction is made from M before its decay: the M that the first of `batch` tokens found. a
    is 1 minus the paper's alpha.

    Examples
    --------
    Token 0 writes 4, and token 1 half of its error, 0; but half of the momentum goes on:

    >>> import numpy as np
    >>> from linattn import reference
    >>> k, v, zero = np.ones((2, 1)), np.full((2, 1), 4.0), np.zeros((1, 1))
    >>> a, beta, eta = np.ones(2), np.array([1.0, 0.5]), np.full(2, 0.5)
    >>> _, (M, Y) = reference.titans_tokens(k, k, v, a, beta, eta, (zero, zero), 1)
    >>> M.item(), Y.item()
    (6.0, 2.0)
    """
    M, Y = states
    o = np.empty_like(v)
    for t in range(len(q)):
        if t % batch == 0:
            M0 = M
        u = beta[t] * (v[t] - k[t] @ M0)
        Y = eta[t] * Y + np.outer(k[t], u)
        M = a[t] * M + Y
        o[t] = scale * (q[t] @ M)
    return o, (M, Y)


def titans_chunk(q, k, v, a, beta, eta, states, scale, batch=1):
    """The delta rule's system; G_ij is the part of write j in M after token i, and N_ij that in Y.

    N_ij = eta_i N_{i-1,j}, G_ij = a_i G_{i-1,j} + N_ij. Nothing is divided, and nothing cancels. A
    chunk has whole batches.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 6, 4))
    >>> (M, Y), k = rng.standard_normal((2, 4, 4)), reference.l2norm(k)
    >>> a, beta, eta = rng.uniform(0, 1, (3, 6))
    >>> o, _ = reference.titans_chunk(q, k, v, a, beta, eta, (M, Y), 1)
    >>> np.allclose(o, reference.titans_tokens(q, k, v, a, beta, eta, (M, Y), 1)[0])
    True
    """
    M, Y = states
    e, f, m, G, N = (x[..., None] for x in _shares(a, eta))
    seen = _seen(len(a), batch)
    L = beta[:, None] * G[seen, :, 0] * (k @ k.T)  # scores, of the memory before each batch
    P = G[1:, :, 0] * (q @ k.T)
    U = solve_unit_lower(L, beta[:, None] * (v - e[seen] * (k @ M) - f[seen] * (k @ Y)))  # solve
    o = scale * (e[1:] * (q @ M) + f[1:] * (q @ Y) + P @ U)  # read
    return o, (  # carry
        e[-1] * M + f[-1] * Y + (G[-1] * k).T @ U,
        m[-1] * Y + (N[-1] * k).T @ U,
    )


def _seen(C, batch):
    """For each token of a chunk, the tokens before its batch: a row of `_shares`."""
    i = np.arange(C)
    return i - i % batch


def _shares(a, eta):
    """Row i of each, i = 0 ... C: the part that M and Y after token i have of what was before.

    e of M in M, f of Y in M, m of Y in Y; G_j of write j in M, N_j of write j in Y.
    """
    C = len(a)
    e, f, m = (np.zeros(C + 1, a.dtype) for _ in range(3))
    G, N = np.zeros((C + 1, C), a.dtype), np.zeros((C + 1, C), a.dtype)
    e[0] = m[0] = 1
    for i in range(C):
        m[i + 1] = eta[i] * m[i]
        N[i + 1] = eta[i] * N[i]
        N[i + 1, i] = 1
        e[i + 1] = a[i] * e[i]
        f[i + 1] = a[i] * f[i] + m[i + 1]
        G[i + 1] = a[i] * G[i] + N[i + 1]
    return e, f, m, G, N


def _shares_adjoint(a, eta, shares, d_shares):
    """da and deta of `_shares`. d_shares are changed."""
    (e, f, m, G, N), (de, df, dm, dG, dN) = shares, d_shares
    da, deta = np.empty_like(a), np.empty_like(eta)
    for i in reversed(range(len(a))):
        # G <- a G + N, f <- a f + m, e <- a e
        da[i] = de[i + 1] * e[i] + df[i + 1] * f[i] + dG[i + 1] @ G[i]
        dN[i + 1] += dG[i + 1]
        dm[i + 1] += df[i + 1]
        de[i] += a[i] * de[i + 1]
        df[i] += a[i] * df[i + 1]
        dG[i] += a[i] * dG[i + 1]
        # N <- eta N, then N_ii = 1; m <- eta m
        dN[i + 1, i] = 0
        deta[i] = dm[i + 1] * m[i] + dN[i + 1] @ N[i]
        dm[i] += eta[i] * dm[i + 1]
        dN[i] += eta[i] * dN[i + 1]
    return da, deta


# ---------------------------------------------------------------------------------------------
# Its gradients.
# ---------------------------------------------------------------------------------------------


def titans_adjoint(q, k, v, a, beta, eta, states, scale, do, d_states, batch=1):
    """dq, dk, dv, da, dbeta, deta and the pair (dM0, dY0) of titans_tokens.

    Examples
    --------
    o and the last states are linear in v and in the first states, so that the products with the
    gradients have one sum:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v, do), (M, Y, dM) = rng.standard_normal((4, 5, 3)), rng.standard_normal((3, 3, 3))
    >>> dY = rng.standard_normal((3, 3))
    >>> a, beta, eta = rng.uniform(0, 1, (3, 5))
    >>> o, last = reference.titans_tokens(q, k, v, a, beta, eta, (M, Y), 1)
    >>> grads = reference.titans_adjoint(q, k, v, a, beta, eta, (M, Y), 1, do, (dM, dY))
    >>> _, _, dv, *_, first = grads
    >>> into = (dv * v).sum() + (first[0] * M).sum() + (first[1] * Y).sum()
    >>> np.allclose(into, (do * o).sum() + (dM * last[0]).sum() + (dY * last[1]).sum())
    True
    """
    kept = [states]
    for t in range(len(q)):
        (M, Y), (M0, _) = kept[t], kept[t - t % batch]
        Y = eta[t] * Y + np.outer(k[t], beta[t] * (v[t] - k[t] @ M0))
        kept.append((a[t] * M + Y, Y))
    dq, dk, dv, da, dbeta, deta = (np.empty_like(z) for z in (q, k, v, a, beta, eta))
    dM, dY = d_states
    dM0 = np.zeros_like(dM)
    for t in reversed(range(len(q))):
        (M, Y), (M0, _) = kept[t], kept[t - t % batch]
        error = v[t] - k[t] @ M0
        # o_t = scale q_t'M
        dq[t] = scale * (kept[t + 1][0] @ do[t])
        dM = dM + scale * np.outer(q[t], do[t])
        # M <- a_t M + Y
        dY = dY + dM
        da[t] = (M * dM).sum()
        dM = a[t] * dM
        # Y <- eta_t Y + k_t u'
        dk[t] = dY @ (beta[t] * error)
        du = k[t] @ dY
        deta[t] = (Y * dY).sum()
        dY = eta[t] * dY
        # u = b_t (v_t - p)
        dbeta[t] = du @ error
        dv[t] = beta[t] * du
        # p = k_t'M0
        dk[t] -= M0 @ dv[t]
        dM0 = dM0 - np.outer(k[t], dv[t])
        if t % batch == 0:  # M0 = M
            dM, dM0 = dM + dM0, np.zeros_like(dM0)
    return dq, dk, dv, da, dbeta, deta, (dM, dY)


def titans_chunk_adjoint(q, k, v, a, beta, eta, states, scale, do, d_states, C, batch=1):
    """The same of the chunk form, in chunks of C tokens; equal but for rounding.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v, do), (M, Y, dM) = rng.standard_normal((4, 5, 3)), rng.standard_normal((3, 3, 3))
    >>> dY = rng.standard_normal((3, 3))
    >>> call = q, k, v, *rng.uniform(0, 1, (3, 5)), (M, Y), 1, do, (dM, dY)
    >>> *by_chunk, (dM, dY) = reference.titans_chunk_adjoint(*call, 2)
    >>> *by_token, first = reference.titans_adjoint(*call)
    >>> all(np.allclose(*pair) for pair in zip((*by_chunk, dM, dY), (*by_token, *first)))
    True
    """
    dq, dk, dv, da, dbeta, deta = (np.empty_like(z) for z in (q, k, v, a, beta, eta))
    kept = []
    for t in range(0, len(q), C):
        rows = slice(t, t + C)
        kept.append((rows, states))
        gates = a[rows], beta[rows], eta[rows]
        _, states = titans_chunk(q[rows], k[rows], v[rows], *gates, states, scale, batch)
    dM, dY = d_states
    for rows, (M, Y) in reversed(kept):
        qc, kc, dO = q[rows], k[rows], scale * do[rows]
        shares = _shares(a[rows], eta[rows])
        e, f, m, G, N = (z[..., None] for z in shares)
        seen = _seen(len(qc), batch)
        G_before, G_after = G[seen, :, 0], G[1:, :, 0]
        qk, kk, kM, kY, qM, qY = qc @ kc.T, kc @ kc.T, kc @ M, kc @ Y, qc @ M, qc @ Y
        L, E = G_before * kk, v[rows] - e[seen] * kM - f[seen] * kY
        for i in range(len(E)):
            E[i] -= L[i, :i] @ (beta[rows][:i, None] * E[:i])
        U = beta[rows, None] * E
        # M' = e_C M + f_C Y + (G_C k)'U, Y' = m_C Y + (N_C k)'U;  O = e q M + f q Y + P U
        kdM, kdY = kc @ dM, kc @ dY
        dU = G[-1] * kdM + N[-1] * kdY + (G_after * qk).T @ dO
        dk_c = G[-1] * (U @ dM.T) + N[-1] * (U @ dY.T)
        dP = np.tril(dO @ U.T)
        de, df, dm, dG, dN = (np.zeros_like(z) for z in shares)
        de[-1], df[-1], dm[-1] = (M * dM).sum(), (Y * dM).sum(), (Y * dY).sum()
        dG[-1], dN[-1] = (U * kdM).sum(1), (U * kdY).sum(1)
        de[1:] += (dO * qM).sum(1)
        df[1:] += (dO * qY).sum(1)
        dq[rows] = e[1:] * (dO @ M.T) + f[1:] * (dO @ Y.T)
        # U = beta E, E = V - e_seen k M - f_seen k Y - L U
        dE = np.empty_like(dU)
        for i in reversed(range(len(dE))):
            dU[i] -= L[i + 1 :, i] @ dE[i + 1 :]
            dE[i] = beta[rows][i] * dU[i]
        dv[rows], dbeta[rows], dL = dE, (dU * E).sum(1), -np.tril(dE @ U.T, -1)
        np.subtract.at(de, seen, (dE * kM).sum(1))
        np.subtract.at(df, seen, (dE * kY).sum(1))
        dk_c -= e[seen] * (dE @ M.T) + f[seen] * (dE @ Y.T)
        dM, dY = (
            e[-1] * dM + (e[1:] * qc).T @ dO - (e[seen] * kc).T @ dE,
            f[-1] * dM + m[-1] * dY + (f[1:] * qc).T @ dO - (f[seen] * kc).T @ dE,
        )
        # P_ij = G_ij q_i.k_j, L_ij = G_seen,j k_i.k_j
        dqk, dkk = G_after * dP, G_before * dL
        dq[rows] += dqk @ kc
        dk[rows] = dk_c + dqk.T @ qc + (dkk + dkk.T) @ kc
        dG[1:] += dP * qk
        np.add.at(dG, seen, dL * kk)
        d_shares = de, df, dm, dG, dN
        da[rows], deta[rows] = _shares_adjoint(a[rows], eta[rows], shares, d_shares)
    return dq, dk, dv, da, dbeta, deta, (dM, dY)


def _head_adjoint(given, states, scale, do, d_states, C, batch=1):
    q, k, v, a, beta = (given[name] for name in ("q", "k", "v", "a", "beta"))
    a = a[:, 0]
    eta = given.get("eta", np.zeros_like(beta))
    call = q, k, v, a, beta, eta, states, scale, do, d_states
    *gradients, d_states = (
        titans_adjoint(*call, batch) if C is None else titans_chunk_adjoint(*call, C, batch)
    )
    named = dict(zip(("q", "k", "v", "a", "beta", "eta"), gradients, strict=True))
    return named | {"a": named["a"][:, None]}, d_states


# ---------------------------------------------------------------------------------------------
# The op: [B,T,H,K] in, [B,T,HV,V] and two states [N,HV,K,V] out.
# ---------------------------------------------------------------------------------------------


@takes_one_head
def titans(
    q,
    k,
    v,
    beta,
    eta=None,
    g=None,
    *,
    alpha=None,
    batch=1,
    chunk_size=64,
    dtype=np.float64,
    **common,
):
    """Titans' linear memory, as :func:`linattn.titans` has it.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    beta : array [B,T,HV] or float
        How much of the error is written into the momentum: the paper's theta.
    eta : array [B,T,HV] or float, optional
        How much of the momentum is kept; none by default.
    g : array [B,T,HV] or float, optional
        The natural log of the decay.
    alpha : array like g, or float, optional
        The decay itself, instead of g: 1 minus the paper's alpha.
    batch : int
        The tokens that predict from the memory before the first of them.
    chunk_size : int
        Of a chunk; rounded to whole batches.
    dtype : dtype
        Of the arithmetic.
    **common
        The keywords at the head of :mod:`linattn.reference`.

    Returns
    -------
    o : ndarray [B,T,HV,V]
    final_state : the pair (M, Y), each [N,HV,K,V]

    Examples
    --------
    Without momentum and without a decay it is the delta rule:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v), beta = rng.standard_normal((3, 10, 4)), rng.uniform(0, 1, 10)  # one head: [T,K]
    >>> k = reference.l2norm(k)
    >>> o, (M, Y) = reference.titans(q, k, v, beta, alpha=1)
    >>> np.allclose(o, reference.delta_rule(q, k, v, beta)[0])
    True
    """
    a = given_decay(g, alpha, dtype)
    eta = np.zeros(v.shape[:3]) if eta is None else eta
    op = in_batches(OPS["titans"], batch)
    common |= {"chunk_size": whole_batches(chunk_size, batch), "dtype": dtype}
    return per_head(op, q, k, v, a, beta, eta, **common)


def in_batches(op, batch):
    """The record of an op whose tokens predict in batches."""
    functions = {name: getattr(op, name) for name in ("tokens", "chunk", "adjoint")}
    return op._replace(**{name: partial(f, batch=batch) for name, f in functions.items()})


def whole_batches(chunk_size, batch):
    """The chunk of whole batches that is nearest below, one batch at least."""
    return max(chunk_size // batch, 1) * batch


OPS["titans"] = Op(titans_tokens, titans_chunk, decay="pair", adjoint=_head_adjoint)
