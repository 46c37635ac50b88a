"""The eight ops in plain NumPy, float64: read this first, and compare everything with it.

Every op keeps one matrix per head, the state S [K,V], and does the same four things for a token t:

    decay    S <- diag(a_t) S           forget a little (a_t = exp(g_t), in [0, 1])
    predict  p  = k_t' S                what the state already answers to this key (delta rule only)
    write    S <- S + k_t u_t'          u_t = v_t, or b_t (v_t - p) under the delta rule
    read     o_t = scale q_t' S         after the write: a token sees itself

Each op is spelled twice, for one head, q and k [T,K], v [T,V]:

    *_tokens   the recurrence, token by token; this is the definition
    *_chunk    C tokens at once: scores, (solve,) read, carry; C = T is the parallel form,
               o = (q k' . mask) v, and C = 1 is the recurrence again

The public functions below them loop over the batch, the packed sequences and the heads. Their
letters: q, k [B,T,H,K]; v, o [B,T,HV,V]; g [B,T,HV] or [B,T,HV,K], the natural log of the decay;
beta [B,T,HV]; state [N,HV,K,V]. Value head h reads the query and key head h // (HV/H).
Keywords that all of them take, in `common`:

    scale=None          the factor of the read; None is K**-0.5
    initial_state=None  [N,HV,K,V]; None is zeros
    cu_seqlens=None     [N+1], the starts of N sequences packed into one row (B = 1), then T
    qk_l2norm=False     q and k <- x / sqrt(sum x^2 + 1e-6) first
    form="recurrent"    or "chunk", or "parallel" (one chunk); chunk_size=64
    dtype=np.float64    the dtype of the arithmetic, see below

They return (o, final_state), always both. `backward` has the gradients, one adjoint per rule.

With dtype=np.float32 the same text is the "naive twin" of linattn.testing.assert_accurate: the
whole calculation in float32. With float16 or bfloat16, q, k and v are rounded to it, the state and
the sums are float32, and o is rounded at the end. With np.longdouble it is the reference for a
float64 kernel. Nothing is checked here, and nothing is imported from the rest of the package.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

# ---------------------------------------------------------------------------------------------
# One head. S comes in and goes out; it is never changed in place.
# ---------------------------------------------------------------------------------------------


def linear_attention_tokens(q, k, v, state, scale):
    """Katharopoulos et al. 2020, "Transformers are RNNs"; q and k after the feature map.

    z [K] is the sum of the keys: the state of a value that is always 1.
    """
    S, z = state
    num, den = np.empty_like(v), np.empty_like(v[:, 0])
    for t in range(len(q)):
        S = S + np.outer(k[t], v[t])
        z = z + k[t]
        num[t] = scale * (q[t] @ S)
        den[t] = scale * (q[t] @ z)
    return num, den, (S, z)


def linear_attention_chunk(q, k, v, state, scale):
    """(Q K' . M) V, where M keeps j <= i; what came before the chunk is read through S and z."""
    S, z = state
    A = scale * np.tril(q @ k.T)  # scores [C,C]
    num = scale * (q @ S) + A @ v  # read: the past, and the chunk itself
    den = scale * (q @ z) + A.sum(1)
    return num, den, (S + k.T @ v, z + k.sum(0))  # carry


def linear_attention_noncausal(q, k, v, state, scale):
    """Every token reads the state of the whole sequence: phi(Q) (phi(K)' V), without a mask."""
    S, z = state
    S, z = S + k.T @ v, z + k.sum(0)
    return scale * (q @ S), scale * (q @ z), (S, z)


def retention_tokens(q, k, v, gamma, S, scale):
    """RetNet, Sun et al. 2023: S_n = gamma S_{n-1} + k_n v_n', one gamma per head."""
    o = np.empty_like(v)
    for n in range(len(q)):
        S = gamma * S + np.outer(k[n], v[n])
        o[n] = scale * (q[n] @ S)
    return o, S


def retention_chunk(q, k, v, gamma, S, scale):
    """(Q K' . D) V with D_nm = gamma^(n-m), plus the state, faded once per token."""
    n = np.arange(len(q), dtype=q.dtype)
    D = np.tril(gamma ** np.maximum(n[:, None] - n, 0))
    xi = gamma ** (n + 1)  # from before the chunk to token n
    zeta = gamma ** (len(q) - 1 - n)  # from token n to the end of the chunk
    o = scale * xi[:, None] * (q @ S) + scale * (q @ k.T * D) @ v
    S = gamma ** len(q) * S + k.T @ (zeta[:, None] * v)
    return o, S


def lightning_attention_tokens(q, k, v, slope, S, scale):
    """Lightning Attention-2, Qin et al. 2024; MiniMax-01: kv <- lambda kv + k v', lambda = e^-s."""
    lam = np.exp(-slope)
    kv = S
    o = np.empty_like(v)
    for t in range(len(q)):
        kv = lam * kv + np.outer(k[t], v[t])
        o[t] = scale * (q[t] @ kv)
    return o, kv


def lightning_attention_chunk(q, k, v, slope, S, scale):
    """Intra block (Q K' . M) V; inter block Lambda Q KV; KV <- lambda^C KV + (lambda^C/Lambda K)'V.

    Lambda = diag(lambda^1 .. lambda^C). The quotient is written lambda^(C-i): it never overflows.
    """
    C = len(q)
    lam = np.exp(-slope)
    i = np.arange(1, C + 1, dtype=q.dtype)
    M = np.tril(lam ** np.maximum(i[:, None] - i, 0))
    intra = (scale * (q @ k.T) * M) @ v
    inter = scale * ((lam**i)[:, None] * q) @ S
    return intra + inter, lam**C * S + ((lam ** (C - i))[:, None] * k).T @ v


def simple_gla_tokens(q, k, v, a, S, scale):
    """A scalar decay a_t = exp(g_t) per token and head; Mamba-2's SSD (Dao and Gu 2024)."""
    o = np.empty_like(v)
    for t in range(len(q)):
        S = a[t] * S + np.outer(k[t], v[t])
        o[t] = scale * (q[t] @ S)
    return o, S


def simple_gla_chunk(q, k, v, a, S, scale):
    """(Q K' . G) V, where G_ij = a_i ... a_{j+1} is what is left at token i of a write at j."""
    G = decay_matrix(a)
    from_start = np.cumprod(a)
    o = scale * from_start[:, None] * (q @ S) + (scale * (q @ k.T) * G) @ v
    S = from_start[-1] * S + k.T @ (G[-1][:, None] * v)
    return o, S


def gla_tokens(q, k, v, a, S, scale):
    """Gated Linear Attention, Yang et al. 2024: every key channel has its own decay, a [T,K]."""
    o = np.empty_like(v)
    for t in range(len(q)):
        S = a[t][:, None] * S + np.outer(k[t], v[t])
        o[t] = scale * (q[t] @ S)
    return o, S


def gla_chunk(q, k, v, a, S, scale):
    """A_ij = q_i' diag(a_i ... a_{j+1}) k_j: the keys fade, channel by channel, as i moves on."""
    A, faded = faded_scores(q, k, a)
    from_start = np.cumprod(a, axis=0)
    o = scale * (q * from_start) @ S + scale * A @ v
    S = from_start[-1][:, None] * S + faded.T @ v
    return o, S


def delta_rule_tokens(q, k, v, beta, S, scale):
    """DeltaNet, Schlag et al. 2021: write only what the state does not yet answer.

    S + b k (v - k'S)' is the other spelling, (I - b k k') S + b k v', with fewer multiplications.
    """
    o = np.empty_like(v)
    for t in range(len(q)):
        p = k[t] @ S
        u = beta[t] * (v[t] - p)
        S = S + np.outer(k[t], u)
        o[t] = scale * (q[t] @ S)
    return o, S


def delta_rule_chunk(q, k, v, beta, S, scale):
    """Yang et al. 2024, "Parallelizing linear transformers with the delta rule".

    A prediction needs the writes before it: u_i = b_i (v_i - k_i'S - sum_{j<i} k_i.k_j u_j),
    a triangular system for U [C,V]. The rest is linear attention with U in the place of V.
    """
    L = beta[:, None] * np.tril(k @ k.T, -1)  # scores
    P = np.tril(q @ k.T)
    U = solve_unit_lower(L, beta[:, None] * (v - k @ S))  # solve
    o = scale * (q @ S) + scale * P @ U  # read
    return o, S + k.T @ U  # carry


def gated_delta_rule_tokens(q, k, v, a, beta, S, scale):
    """Gated DeltaNet, Yang et al. 2024: S <- (I - b k k') a S + b k v', so decay comes first.

    The prediction is made from the decayed state. Predicting from the undecayed one is the usual
    mistake; the worked example in docs/math.md has the numbers that it gives.
    """
    o = np.empty_like(v)
    for t in range(len(q)):
        S = a[t] * S
        u = beta[t] * (v[t] - k[t] @ S)
        S = S + np.outer(k[t], u)
        o[t] = scale * (q[t] @ S)
    return o, S


def gated_delta_rule_chunk(q, k, v, a, beta, S, scale):
    """The delta rule's system, each pair (i, j) faded by G_ij and the state by a_1 ... a_i."""
    G = decay_matrix(a)
    from_start = np.cumprod(a)[:, None]
    L = beta[:, None] * np.tril(k @ k.T, -1) * G  # scores
    P = q @ k.T * G
    U = solve_unit_lower(L, beta[:, None] * (v - from_start * (k @ S)))  # solve
    o = scale * from_start * (q @ S) + scale * P @ U  # read
    return o, from_start[-1] * S + k.T @ (G[-1][:, None] * U)  # carry


def kda_tokens(q, k, v, a, beta, S, scale):
    """Kimi Delta Attention, Kimi Linear 2025: S <- (I - b k k') diag(a) S + b k v', a [T,K]."""
    o = np.empty_like(v)
    for t in range(len(q)):
        S = a[t][:, None] * S
        u = beta[t] * (v[t] - k[t] @ S)
        S = S + np.outer(k[t], u)
        o[t] = scale * (q[t] @ S)
    return o, S


def kda_chunk(q, k, v, a, beta, S, scale):
    """The delta rule's system with GLA's scores: the decay cannot be pulled out of k_i . k_j."""
    from_start = np.cumprod(a, axis=0)
    L = beta[:, None] * np.tril(faded_scores(k, k, a)[0], -1)  # scores
    P, faded = faded_scores(q, k, a)
    U = solve_unit_lower(L, beta[:, None] * (v - (k * from_start) @ S))  # solve
    o = scale * (q * from_start) @ S + scale * P @ U  # read
    return o, from_start[-1][:, None] * S + faded.T @ U  # carry


# What the chunk forms share. Decays are multiplied, never divided and never subtracted as logs, so
# that a = 0 (g = -inf) is an ordinary number and a small decay next to a huge one keeps its digits.


def decay_matrix(a):
    """G [C,C] with G_ij = a_i a_{i-1} ... a_{j+1} for j <= i, else 0. a [C]."""
    G = np.eye(len(a), dtype=a.dtype)
    for i in range(1, len(a)):
        G[i, :i] = a[i] * G[i - 1, :i]
    return G


def faded_scores(q, k, a):
    """A [C,C] with A_ij = q_i' (a_i ... a_{j+1} k_j) for j <= i, and k faded to the last token."""
    A = np.zeros((len(q), len(q)), q.dtype)
    faded = np.zeros_like(k)
    for i in range(len(q)):
        faded[:i] *= a[i]
        faded[i] = k[i]
        A[i, : i + 1] = faded[: i + 1] @ q[i]
    return A, faded


def solve_unit_lower(L, R):
    """U with (I + L) U = R, for a strictly lower triangular L, by forward substitution."""
    U = np.empty_like(R)
    for i in range(len(R)):
        U[i] = R[i] - L[i, :i] @ U[:i]
    return U


# ---------------------------------------------------------------------------------------------
# The ops: [B,T,H,K] in, [B,T,HV,V] and [N,HV,K,V] out.
# ---------------------------------------------------------------------------------------------


def linear_attention(q, k, v, *, feature_map="elu+1", normalize=True, causal=True, eps=1e-6,
                     scale=None, initial_state=None, cu_seqlens=None, qk_l2norm=False,
                     form="recurrent", chunk_size=64, dtype=np.float64):
    """o_i = num_i / max(den_i, eps), num = scale phi(q)'S, den = scale phi(q)'z.

    normalize: True or "clamp" as above; "add" divides by den + eps; False returns num.
    feature_map: a name in FEATURE_MAPS, a callable on the last axis, or a pair of them (q's, k's).
    The state is the pair (S [N,HV,K,V], z [N,HV,K]) when normalised, else S alone.
    causal=False: every token reads the state of its whole sequence.
    """
    q, k, v = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
    scale = _scale(scale, q)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    phi_q, phi_k = _feature_pair(feature_map)
    q, k = phi_q(q), phi_k(k)
    one_head = _by_form(linear_attention_tokens, linear_attention_chunk, form, chunk_size)
    num, den = np.empty_like(v), np.empty_like(v[..., 0])
    S, z = _states(initial_state, normalize, q, v, cu_seqlens)
    with np.errstate(all="ignore"):  # NaN and inf are data here
        for n, h, of_qk, of_v in _heads(q, v, cu_seqlens):
            q_h, k_h, v_h, state = q[of_qk], k[of_qk], v[of_v], (S[n, h], z[n, h])
            if causal:
                num[of_v], den[of_v], state = one_head(q_h, k_h, v_h, state, scale)
            elif form == "parallel":
                A = scale * q_h @ k_h.T
                num[of_v] = A @ v_h + scale * q_h @ state[0]
                den[of_v] = A.sum(1) + scale * q_h @ state[1]
                *_, state = one_head(q_h, k_h, v_h, state, scale)
            else:
                num[of_v], den[of_v], state = linear_attention_noncausal(
                    q_h, k_h, v_h, state, scale)
            S[n, h], z[n, h] = state
        o = num if normalize is False else num / _divisor(den, normalize, eps)[..., None]
    return _round(o, dtype), (S if normalize is False else (S, z))


def retention(q, k, v, *, gamma=None, dtype=np.float64, **common):
    """gamma [HV], the decay itself; None is RetNet's 1 - 2^(-5-h)."""
    gamma = _retnet_gamma(v) if gamma is None else gamma
    gates = (_cast(gamma, _working(dtype)),)
    return _per_head(retention_tokens, retention_chunk, q, k, v, gates, dtype=dtype, **common)


def lightning_attention(q, k, v, slopes, *, dtype=np.float64, **common):
    """slopes [HV] >= 0; the decay is exp(-slope)."""
    gates = (_cast(slopes, _working(dtype)),)
    return _per_head(lightning_attention_tokens, lightning_attention_chunk, q, k, v, gates,
                     dtype=dtype, **common)


def simple_gla(q, k, v, g=None, *, alpha=None, dtype=np.float64, **common):
    """g [B,T,HV], log decay; or alpha, the decay itself."""
    gates = (_decay(g, alpha, dtype),)
    return _per_head(simple_gla_tokens, simple_gla_chunk, q, k, v, gates, dtype=dtype, **common)


def gla(q, k, v, g=None, *, alpha=None, dtype=np.float64, **common):
    """g [B,T,HV,K], log decay; or alpha, the decay itself."""
    gates = (_decay(g, alpha, dtype),)
    return _per_head(gla_tokens, gla_chunk, q, k, v, gates, dtype=dtype, **common)


def delta_rule(q, k, v, beta, *, dtype=np.float64, **common):
    """beta [B,T,HV], how much of the error is written."""
    gates = (_cast(beta, _working(dtype)),)
    return _per_head(delta_rule_tokens, delta_rule_chunk, q, k, v, gates, dtype=dtype, **common)


def gated_delta_rule(q, k, v, g=None, beta=None, *, alpha=None, dtype=np.float64, **common):
    """g [B,T,HV], log decay, or alpha, the decay itself; beta [B,T,HV]."""
    gates = (_decay(g, alpha, dtype), _cast(beta, _working(dtype)))
    return _per_head(gated_delta_rule_tokens, gated_delta_rule_chunk, q, k, v, gates,
                     dtype=dtype, **common)


def kda(q, k, v, g=None, beta=None, *, alpha=None, dtype=np.float64, **common):
    """g [B,T,HV,K], log decay, or alpha, the decay itself; beta [B,T,HV]."""
    gates = (_decay(g, alpha, dtype), _cast(beta, _working(dtype)))
    return _per_head(kda_tokens, kda_chunk, q, k, v, gates, dtype=dtype, **common)


def implicit_weights(name, q, k, **arguments):
    """A [B,HV,T,T] with o = A v: the op, run on the values e_1 .. e_T. arguments: the op's own."""
    B, T = q.shape[:2]
    per_value_head = [x for x in map(arguments.get, ("g", "alpha", "beta")) if x is not None]
    per_head = [x for x in map(arguments.get, ("gamma", "slopes")) if x is not None]
    HV = (np.shape(per_value_head[0])[2] if per_value_head
          else len(per_head[0]) if per_head else q.shape[2])
    v = np.broadcast_to(np.eye(T)[None, :, None, :], (B, T, HV, T))
    return globals()[name](q, k, v, **arguments)[0].transpose(0, 2, 1, 3)


def l2norm(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(1e-6))


# name -> phi, and phi' written with x and y = phi(x). exp is only ever given what it can hold:
# elu+1 is exp(x) below 0, not expm1(x) + 1, which is exactly 0 in float32 from about -17.5 on.
FEATURE_MAPS = {
    "elu+1": (lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
              lambda x, y: np.where(x > 0, np.ones_like(y), y)),
    "relu+eps": (lambda x: np.maximum(x, 0) + x.dtype.type(1e-3),
                 lambda x, y: (x > 0).astype(x.dtype)),
    "relu2": (lambda x: np.maximum(x, 0) ** 2, lambda x, y: 2 * np.maximum(x, 0)),
    "exp": (np.exp, lambda x, y: y),
    "identity": (lambda x: x, lambda x, y: np.ones_like(x)),
}


# ---------------------------------------------------------------------------------------------
# Gradients, for one head: the recurrence again, then every line of it undone in reverse.
# a [T,K]: a scalar decay is given K times, and its gradient is the sum over K.
# ---------------------------------------------------------------------------------------------


def linear_attention_adjoint(q, k, v, S, z, scale, dnum, dden, dS, dz):
    """dq, dk, dv, dS0, dz0 of linear_attention_tokens."""
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
    """The same when every token reads the last state: all reads are undone before any write."""
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
    """dq, dk, dv, da, dS0 of gla_tokens, and of every op that is gla with a plainer decay."""
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
    """dq, dk, dv, da, dbeta, dS0 of kda_tokens, and of the two plainer delta rules."""
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


def chunk_adjoint(q, k, v, a, beta, S, scale, do, dS, C):
    """dq, dk, dv, da, dbeta, dS0 of any op's chunk form, in chunks of C; beta None: additive.

    The same numbers as the two adjoints above by another road, which rounds differently: the
    yardstick for kernels that take this road. a [T,K], or [T,1] for a scalar decay.
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
        # the pairs (i, j), and how each of their decays came about: row i of G is a_i times row i-1
        pq, pk = dP[..., None] * G, dL[..., None] * G
        dq[rows] = e * dq_hat + (pq * kc).sum(1)
        dk[rows] = e * dk_hat + G[-1] * d_tilde + (pk * kc).sum(1)
        dk[rows] += (pq * qc[:, None] + pk * kc[:, None]).sum(0)
        dG = (dP[..., None] * qc[:, None] + dL[..., None] * kc[:, None]) * kc
        dG[-1] += d_tilde * kc
        de = qc * dq_hat + kc * dk_hat
        de[-1] += de_last
        if a.shape[1] == 1:
            dG, de = dG.sum(-1, keepdims=True), de.sum(-1, keepdims=True)
        for i in reversed(range(n)):
            before = G[i - 1, :i] if i else G[:0, 0]
            da[rows][i] = (dG[i, :i] * before).sum(0) + de[i] * (e[i - 1] if i else 1)
            if i:
                dG[i - 1, :i] += a[rows][i] * dG[i, :i]
                de[i - 1] += a[rows][i] * de[i]
    return dq, dk, dv, da, dbeta, dS


def _faded(x, y, G):
    """A_ij = x_i' G_ij y_j; G [C,C,K], or [C,C,1] for a scalar decay."""
    if G.shape[-1] == 1:
        return (x @ y.T) * G[..., 0]
    return np.einsum("ik,jk,ijk->ij", x, y, G)


def _chunk_errors(k, v, a, beta, rows, S):
    """What is written (before beta) by each token of a chunk, e_i = a_i ... a_1, and G."""
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


class Gradients(NamedTuple):
    """dg is the gradient of the gate as it was given: g, alpha, gamma or slopes."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dg: np.ndarray | None
    dbeta: np.ndarray | None
    d_initial_state: np.ndarray | tuple | None


def backward(name, do, q, k, v, *, g=None, alpha=None, gamma=None, slopes=None, beta=None,
             feature_map="elu+1", normalize=True, causal=True, eps=1e-6, scale=None,
             initial_state=None, d_final_state=None, cu_seqlens=None, qk_l2norm=False,
             form="recurrent", chunk_size=64, dtype=np.float64):
    """The gradients of sum(do * o) + sum(d_final_state * final_state) for the op called `name`.

    What was not given has the gradient None. A normalised op's states come as pairs (S, z).
    """
    normalize = normalize if name == "linear_attention" else False
    work = _working(dtype)
    do, v = _cast(do, dtype), _cast(v, dtype)
    q_given, k_given = _cast(q, dtype), _cast(k, dtype)
    scale = _scale(scale, q_given)
    q_normed, k_normed = (l2norm(q_given), l2norm(k_given)) if qk_l2norm else (q_given, k_given)
    phi_q, phi_k = _feature_pair(feature_map if name == "linear_attention" else "identity")
    q, k = phi_q(q_normed), phi_k(k_normed)

    # the decay, as [B,T,HV,K] whatever it was given as
    (B, T, HV), K = v.shape[:3], q.shape[3]
    if name == "retention":
        a = _cast(_retnet_gamma(v) if gamma is None else gamma, work)[:, None]
    elif name == "lightning_attention":
        a = np.exp(-_cast(slopes, work))[:, None]
    elif name in ("simple_gla", "gated_delta_rule"):
        a = _decay(g, alpha, dtype)[..., None]
    elif name in ("gla", "kda"):
        a = _decay(g, alpha, dtype)
    else:
        a = np.ones((), work)
    decay = np.broadcast_to(a, (B, T, HV, K))
    b = None if beta is None else _cast(beta, work)

    # dq and dk are summed over the value heads that share a query and key head
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.empty_like(v)
    da, dbeta = np.empty((B, T, HV, K), work), np.empty((B, T, HV), work)
    S, z = _states(initial_state, normalize, q, v, cu_seqlens)
    dS, dz = _states(d_final_state, normalize, q, v, cu_seqlens)
    with np.errstate(all="ignore"):
        for n, h, i, j in _heads(q, v, cu_seqlens):
            C = len(v[j]) if form == "parallel" else chunk_size
            if name == "linear_attention":
                state, d_state = (S[n, h], z[n, h]), (dS[n, h], dz[n, h])
                run = linear_attention_tokens if causal else linear_attention_noncausal
                num, den, _ = run(q[i], k[i], v[j], state, scale)
                d_read = _divide_adjoint(do[j], num, den, normalize, eps)
                if causal and form != "recurrent":
                    # z is the state of one more column of values, which is 1 for every token
                    dq_h, dk_h, dv_h, _, _, dS_h = chunk_adjoint(
                        q[i], k[i], _column(v[j], np.ones_like(den)), decay[j][:, :1], None,
                        _column(*state), scale, _column(*d_read), _column(*d_state), C or 1)
                    dv[j], dS[n, h], dz[n, h] = dv_h[:, :-1], dS_h[:, :-1], dS_h[:, -1]
                else:
                    undo = (linear_attention_adjoint if causal
                            else linear_attention_noncausal_adjoint)
                    dq_h, dk_h, dv[j], dS[n, h], dz[n, h] = undo(
                        q[i], k[i], v[j], *state, scale, *d_read, *d_state)
            elif form != "recurrent":
                one = a.ndim < 4 or a.shape[-1] == 1  # a scalar decay
                dq_h, dk_h, dv[j], da_h, dbeta_h, dS[n, h] = chunk_adjoint(
                    q[i], k[i], v[j], decay[j][:, :1] if one else decay[j],
                    None if b is None else b[j], S[n, h], scale, do[j], dS[n, h], C or 1)
                da[j] = 0
                da[j][:, : da_h.shape[1]] = da_h
                if b is not None:
                    dbeta[j] = dbeta_h
            elif b is None:
                dq_h, dk_h, dv[j], da[j], dS[n, h] = additive_adjoint(
                    q[i], k[i], v[j], decay[j], S[n, h], scale, do[j], dS[n, h])
            else:
                dq_h, dk_h, dv[j], da[j], dbeta[j], dS[n, h] = delta_adjoint(
                    q[i], k[i], v[j], decay[j], b[j], S[n, h], scale, do[j], dS[n, h])
            dq[i] += dq_h
            dk[i] += dk_h
        dq = _feature_adjoint(phi_q, q_normed, q, dq)
        dk = _feature_adjoint(phi_k, k_normed, k, dk)
        if qk_l2norm:
            dq, dk = _l2norm_adjoint(q_given, dq), _l2norm_adjoint(k_given, dk)

        # a = gamma | exp(-slope) | alpha | exp(g); a = 0 makes dg = 0 and not NaN
        gate = next((x for x in (gamma, slopes, alpha, g) if x is not None), None)
        if a.ndim == 2:
            dg = da.sum((0, 1, 3))
        elif a.ndim == 4:
            dg = da.sum(-1) if np.ndim(gate) == 3 else da
        if slopes is not None:
            dg = -a[:, 0] * dg
        elif g is not None:
            dg = a.reshape(dg.shape) * dg
    return Gradients(
        _round(dq, dtype), _round(dk, dtype), _round(dv, dtype),
        None if gate is None else _round_like(dg, gate, work),
        None if beta is None else _round_like(dbeta, beta, work),
        None if initial_state is None else dS if normalize is False else (dS, dz),
    )


def _column(x, y):
    """x with one more column, y."""
    return np.concatenate([x, y[:, None]], 1)


def _divide_adjoint(do, num, den, normalize, eps):
    """o = num / m, m = max(den, eps) or den + eps: dnum and dden. A clamped row has no dden."""
    if normalize is False:
        return do, np.zeros_like(den)
    m = _divisor(den, normalize, eps)
    dden = -(do * num).sum(-1) / (m * m)
    return do / m[:, None], dden if normalize == "add" else np.where(den > eps, dden, 0)


def _l2norm_adjoint(x, dy):
    """y = r x, r = (sum x^2 + 1e-6)^(-1/2); dr/dx = -r^2 y."""
    r = 1 / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(1e-6))
    y = r * x
    return r * (dy - y * (y * dy).sum(-1, keepdims=True))


def _feature_adjoint(phi, x, y, dy):
    """dx from y = phi(x). A callable without a known derivative is differentiated numerically."""
    for known, derivative in FEATURE_MAPS.values():
        if phi is known:
            return derivative(x, y) * dy
    dx = np.empty_like(x)
    step = 1e-6
    for c in range(x.shape[-1]):
        up, down = x.astype(np.float64), x.astype(np.float64)
        up[..., c] += step
        down[..., c] -= step
        dx[..., c] = (dy * (phi(up) - phi(down)) / (2 * step)).sum(-1)
    return dx


# ---------------------------------------------------------------------------------------------
# Loops and casts.
# ---------------------------------------------------------------------------------------------


def _per_head(tokens, chunk, q, k, v, gates, *, scale=None, initial_state=None, cu_seqlens=None,
              qk_l2norm=False, form="recurrent", chunk_size=64, dtype=np.float64):
    """Run a one-head function over the sequences and heads. A 1-D gate is one number per head."""
    q, k, v = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
    scale = _scale(scale, q)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    one_head = _by_form(tokens, chunk, form, chunk_size)
    o = np.empty_like(v)
    S, _ = _states(initial_state, False, q, v, cu_seqlens)
    with np.errstate(all="ignore"):  # NaN and inf are data here
        for n, h, of_qk, of_v in _heads(q, v, cu_seqlens):
            gates_h = [gate[h] if gate.ndim == 1 else gate[of_v] for gate in gates]
            o[of_v], S[n, h] = one_head(q[of_qk], k[of_qk], v[of_v], *gates_h, S[n, h], scale)
    return _round(o, dtype), S


def _by_form(tokens, chunk, form, chunk_size):
    """The one-head function for a form; the chunk form hands the state from chunk to chunk."""
    if form == "recurrent":
        return tokens
    if form not in ("parallel", "chunk"):
        raise ValueError(f'form: expected "recurrent", "parallel" or "chunk", got {form!r}')

    def chunk_by_chunk(q, k, v, *gates_state_scale):
        *gates, state, scale = gates_state_scale
        T = len(q)
        if T == 0:
            return tokens(q, k, v, *gates_state_scale)
        outputs = []
        C = T if form == "parallel" else chunk_size
        for i in range(0, T, C):
            rows = slice(i, i + C)
            gates_i = [gate if np.ndim(gate) == 0 else gate[rows] for gate in gates]
            *output, state = chunk(q[rows], k[rows], v[rows], *gates_i, state, scale)
            outputs.append(output)
        return *map(np.concatenate, zip(*outputs, strict=True)), state

    return chunk_by_chunk


def _heads(q, v, cu_seqlens):
    """For every sequence n and value head h: n, h, where its q and k are, where its v and o are."""
    B, T, HV = v.shape[:3]
    group = HV // q.shape[2] if q.shape[2] else 1
    if cu_seqlens is None:
        sequences = [(b, slice(0, T)) for b in range(B)]
    else:
        ends = [int(end) for end in cu_seqlens]
        sequences = [(0, slice(start, end)) for start, end in pairwise(ends)]
    for n, (b, tokens) in enumerate(sequences):
        for h in range(HV):
            yield n, h, (b, tokens, h // group), (b, tokens, h)


def _states(given, normalize, q, v, cu_seqlens):
    """S [N,HV,K,V] and z [N,HV,K], new arrays; zeros for what was not given."""
    N = len(v) if cu_seqlens is None else len(cu_seqlens) - 1
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    S, z = np.zeros((N, HV, K, V), q.dtype), np.zeros((N, HV, K), q.dtype)
    if given is not None:
        given_S, given_z = (given, 0) if normalize is False else given
        S[...] = given_S
        z[...] = given_z
    return S, z


def _divisor(den, normalize, eps):
    eps = den.dtype.type(eps)
    return den + eps if normalize == "add" else np.maximum(den, eps)


def _decay(g, alpha, dtype):
    if alpha is not None:
        return _cast(alpha, _working(dtype))
    return np.exp(_cast(g, _working(dtype)))


def _retnet_gamma(v):
    return 1 - 2.0 ** (-5 - np.arange(v.shape[2]))


def _feature_pair(feature_map):
    pair = feature_map if isinstance(feature_map, (tuple, list)) else (feature_map, feature_map)
    return tuple(FEATURE_MAPS[phi][0] if isinstance(phi, str) else phi for phi in pair)


def _scale(scale, q):
    return q.dtype.type(q.shape[-1] ** -0.5 if scale is None else scale)


def _working(dtype):
    """The dtype of the state and the sums: float32 for the two halves, else dtype itself."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype


def _cast(x, dtype):
    """x as dtype would hold it, in the dtype of the sums."""
    return _round(np.asarray(x), dtype).astype(_working(dtype))


def _round(x, dtype):
    with np.errstate(all="ignore"):
        return x.astype(dtype)


def _round_like(x, given, work):
    """The naive twin rounds a gate's gradient to the gate's dtype where that is the shorter one."""
    shorter = np.asarray(given).dtype
    twin = np.dtype(work) == np.float32
    return _round(x, shorter) if twin and shorter.itemsize < x.dtype.itemsize else x
