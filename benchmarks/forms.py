"""The recurrence as users of NumPy and PyTorch write it, from the mathematics of docs/math.md; and
softmax attention as users of NumPy write it.

The chunked form is matrix products over chunks of 64, as the fallback of transformers for the gated
delta rule; the other form is a loop over the tokens. `xp` is numpy or torch.
"""

import numpy as np

from .base import CHUNK

ROWS = 128  # of scores, at a time: 4 MB at T = 8192


def chunked(xp, q, k, v, g, beta, solve="rows", C=CHUNK):
    """Chunks of C tokens as matrix products; g [B,T,H] or None, beta [B,T,H] or None.

    q, k, v [B,T,H,D], T a multiple of C. With beta, the errors u of a chunk solve the unit lower
    triangular system (I + L) u = beta (v - decayed k' S), L = strictly lower (beta k k' * decay):
    row after row as transformers does ("rows"), or by the library's own solver ("library").
    """
    B, T, H, D = q.shape
    V, scale = v.shape[-1], D**-0.5

    def heads_first(x):
        x = x.reshape(B, T // C, C, H, *x.shape[3:])
        axes = (0, 3, 1, 2, 4)[: x.ndim]
        return x.permute(*axes).contiguous() if hasattr(x, "permute") else x.transpose(axes).copy()

    q, k, v = heads_first(q) * scale, heads_first(k), heads_first(v)  # [B,H,N,C,D]
    k_t = k.swapaxes(-1, -2)
    if g is None:
        grown = faded = decay = last = None
    else:
        G = xp.cumsum(heads_first(g), -1)
        # above the diagonal the exponent may be large: cut before exp as well as after
        decay = xp.tril(xp.exp(xp.tril(G[..., :, None] - G[..., None, :])))
        grown, last = xp.exp(G)[..., None], xp.exp(G[..., -1])[..., None, None]
        faded = xp.exp(G[..., -1:] - G)[..., None]
    scores = q @ k_t
    scores = xp.tril(scores) if g is None else scores * decay
    if beta is not None:
        beta = heads_first(beta)[..., None]
        k_beta = k * beta
        L = k_beta @ k_t
        L = xp.tril(L if g is None else L * decay, -1)
        right = xp.concatenate([v * beta, k_beta if g is None else k_beta * grown], -1)
        if solve == "library":
            right = xp.linalg.solve_triangular(L, right, upper=False, unitriangular=True)
        else:
            right = inverse_by_rows(xp, L) @ right
        v, w = right[..., :V], right[..., V:]
    q = q if g is None else q * grown
    k_t = k_t if g is None else (k * faded).swapaxes(-1, -2)
    S, rows = xp.zeros((B, H, D, V), dtype=v.dtype), []
    for n in range(T // C):
        u = v[:, :, n] if beta is None else v[:, :, n] - w[:, :, n] @ S
        rows.append(q[:, :, n] @ S + scores[:, :, n] @ u)
        S = (S if g is None else S * last[:, :, n]) + k_t[:, :, n] @ u
    return xp.stack(rows, 2).reshape(B, H, T, V).swapaxes(1, 2)


def ssd_sums(torch, x, dt, A, B, C, Q=CHUNK):
    """Mamba-2 by its authors' block decomposition: Dao and Gu 2024, arXiv:2405.21060, section 6.

    x [B,T,H,P], dt [B,T,H], A [H], B and C [B,T,G,N], T a multiple of Q. y = M (dt x), where M[i,j]
    is C_i B_j' times the decay from j to i. M is cut into blocks of Q tokens. A block on the
    diagonal is computed as it is. A block below it has rank N: its columns make a state of their
    chunk, states decay from chunk to chunk, and its rows read the state before their own chunk.

    Each of these is one sum over indices, and every head has a B and C of its own, as in the
    paper's listing. Chunks are c and z, tokens of a chunk i and j.
    """
    batch, _, H, P = x.shape
    u = (dt[..., None] * x).reshape(batch, -1, Q, H, P)
    B, C = (a.repeat_interleave(H // a.shape[2], 2).unflatten(1, (-1, Q)) for a in (B, C))
    g = (dt * A).reshape(batch, -1, Q, H).permute(0, 3, 1, 2)  # [B,H,c,Q]
    to = g.cumsum(-1)
    inside = torch.einsum("bcihn,bcjhn,bhcij,bcjhp->bcihp", C, B, decays(torch, g), u)
    states = torch.einsum("bcjhn,bhcj,bcjhp->bchnp", B, (to[..., -1:] - to).exp(), u)
    # row z: of the states after chunks 0 to z, how much is there before chunk z + 1
    between = decays(torch, to[..., -1])
    before = torch.einsum("bhzc,bchnp->bzhnp", between, states).roll(1, 1)
    before[:, 0] = 0
    return (inside + torch.einsum("bcihn,bchnp,bhci->bcihp", C, before, to.exp())).reshape(x.shape)


def decays(torch, g):
    """exp(g[j+1] + ... + g[i]) for j <= i, else 0: [...,i,j]."""
    G = g.cumsum(-1)
    return (G[..., :, None] - G[..., None, :]).tril().exp().tril()


def ssd_products(torch, x, dt, A, B, C, Q=CHUNK):
    """The same as few large matrix products: heads that share B and C have one product C B', and
    are columns of one state."""
    batch, T, H, P = x.shape
    (G, N), n = B.shape[2:], T // Q
    R = H // G  # heads of a group

    def by_chunk(a, last):
        """[B,T,G,...] as [B,n,G,Q,last]."""
        return a.reshape(batch, n, Q, G, last).transpose(2, 3)

    u = (dt[..., None] * x).reshape(batch, n, Q, G, R, P).permute(0, 1, 3, 4, 2, 5)
    B, C = by_chunk(B, N), by_chunk(C, N)
    g = by_chunk(dt * A, R).mT
    to = g.cumsum(-1)[..., None]  # [B,n,G,R,Q,1], and u is [B,n,G,R,Q,P]
    y = ((C @ B.mT)[:, :, :, None] * decays(torch, g)) @ u
    faded = ((to[..., -1:, :] - to).exp() * u).transpose(3, 4)
    states = B.mT @ faded.reshape(batch, n, G, Q, R * P)  # [B,n,G,N,R P]
    decay = to[..., -1, :].exp().expand(-1, -1, -1, -1, P).reshape(batch, n, G, 1, R * P)
    before = torch.zeros_like(states)
    for i in range(1, n):
        before[:, i] = decay[:, i - 1] * before[:, i - 1] + states[:, i - 1]
    read = (C @ before).reshape(batch, n, G, Q, R, P).transpose(3, 4)
    y = y + to.exp() * read
    return y.permute(0, 1, 4, 2, 3, 5).reshape(x.shape)


def inverse_by_rows(xp, L):
    """(I + L)^-1, one row of every chunk at a time: row i is -L[i] times the rows above it."""
    copy = L.clone if hasattr(L, "clone") else L.copy
    X, C = -copy(), L.shape[-1]
    for i in range(1, C):
        row, above = X[..., i : i + 1, :i], X[..., :i, :i]
        if hasattr(L, "clone"):  # autograd keeps them, and X changes
            row, above = row.clone(), above.clone()
        X[..., i : i + 1, :i] = row + row @ above
    return X + xp.eye(C, dtype=L.dtype)


def recurrent(xp, q, k, v, g, beta, S=None, x=None, y=None, bonus=None, eta=None):
    """A loop over the tokens; g [B,T,H] or [B,T,H,K] or None. Returns o and the state.

    x and y [B,T,H,K], bonus [H,K] and eta [B,T,H] are those of the rules that have them; with eta
    the state is a memory and its momentum.
    """
    B, T, H, D = q.shape
    first = xp.zeros((B, H, D, v.shape[-1]), dtype=v.dtype)
    S = S if S is not None else first if eta is None else (first, first)
    S, Y = (S, None) if eta is None else S
    a, rows = None if g is None else xp.exp(g), []

    def found(keys, S):
        return (keys[:, t, :, None] @ S)[..., 0, :]

    for t in range(T):
        before, u = S, v[:, t]
        if a is not None:
            S = S * (a[:, t, ..., None] if a.ndim == 4 else a[:, t, ..., None, None])
        if beta is not None:
            u = (u - found(k, S if eta is None else before)) * beta[:, t, :, None]
        write = k[:, t, :, :, None] * u[..., None, :]
        if y is not None:
            write = write - y[:, t, :, :, None] * found(x, before)[..., None, :]
        if eta is not None:
            write = Y = eta[:, t, :, None, None] * Y + write
        S = S + write
        if bonus is None:
            rows.append(D**-0.5 * found(q, S))
        else:
            own = (q[:, t] * bonus * k[:, t]).sum(-1)[..., None]
            rows.append(D**-0.5 * (found(q, before) + own * u))
    return xp.stack(rows, 1), S if eta is None else (S, Y)


def softmax(q, k, v):
    """Causal softmax attention in NumPy, ROWS tokens of a head at a time: memory grows with T, not
    with its square."""
    B, T, H, D = q.shape
    o = np.empty_like(v)
    future = np.triu(np.full((ROWS, ROWS), -np.inf, q.dtype), 1)
    for b, h in np.ndindex(B, H):
        for t in range(0, T, ROWS):
            n = min(ROWS, T - t)
            weights = (q[b, t : t + n, h] * D**-0.5) @ k[b, : t + n, h].T
            weights[:, t:] += future[:n, :n]
            weights -= weights.max(-1, keepdims=True)
            np.exp(weights, out=weights)
            o[b, t : t + n, h] = weights @ v[b, : t + n, h] / weights.sum(-1, keepdims=True)
    return o
