"""The ops of the additive rule: every token writes its value, u = v."""

import numpy as np

from ._loops import (
    OPS,
    WITH_Z,
    Op,
    by_form,
    cast,
    given_decay,
    heads,
    per_head,
    read_scale,
    rounded,
    state_arrays,
)
from ._one_head import takes_one_head
from .chunks import decay_matrix, faded_scores
from .elements import divisor, feature_pair, l2norm, retnet_gamma

# ---------------------------------------------------------------------------------------------
# One head. S comes in and goes out; it is never changed in place.
# ---------------------------------------------------------------------------------------------


def linear_attention_tokens(q, k, v, state, scale):
    """Katharopoulos et al. 2020, "Transformers are RNNs"; q and k after the feature map.

    z [K] is the sum of the keys: the state of a value that is always 1.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> q = k = np.ones((3, 1))
    >>> v = np.array([[1.0], [3.0], [8.0]])
    >>> num, den, _ = reference.linear_attention_tokens(q, k, v, (np.zeros((1, 1)), np.zeros(1)), 1)
    >>> (num[:, 0] / den).tolist()  # running means
    [1.0, 2.0, 4.0]
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
    """(Q K' . M) V, where M keeps j <= i; the tokens before the chunk are read through S and z.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.uniform(0, 1, (3, 6, 4))
    >>> state = rng.uniform(0, 1, (4, 4)), rng.uniform(0, 1, 4)  # of the tokens before the chunk
    >>> num, den, _ = reference.linear_attention_chunk(q, k, v, state, 1)
    >>> by_token = reference.linear_attention_tokens(q, k, v, state, 1)
    >>> np.allclose(num, by_token[0]), np.allclose(den, by_token[1])
    (True, True)
    """
    S, z = state
    A = scale * np.tril(q @ k.T)  # scores [C,C]
    num = scale * (q @ S) + A @ v  # read: the past, and the chunk itself
    den = scale * (q @ z) + A.sum(1)
    return num, den, (S + k.T @ v, z + k.sum(0))  # carry


def linear_attention_noncausal(q, k, v, state, scale):
    """Every token reads the state of the whole sequence: phi(Q) (phi(K)' V), without a mask.

    Examples
    --------
    The last token of a causal call reads the same state:

    >>> import numpy as np
    >>> from linattn import reference
    >>> q, k, v = np.random.default_rng(0).uniform(0, 1, (3, 6, 4))
    >>> state = np.zeros((4, 4)), np.zeros(4)
    >>> num, _, _ = reference.linear_attention_noncausal(q, k, v, state, 1)
    >>> causal, _, _ = reference.linear_attention_tokens(q, k, v, state, 1)
    >>> np.allclose(num[-1], causal[-1]), np.allclose(num[0], causal[0])
    (True, False)
    """
    S, z = state
    S, z = S + k.T @ v, z + k.sum(0)
    return scale * (q @ S), scale * (q @ z), (S, z)


def retention_tokens(q, k, v, gamma, S, scale):
    """RetNet, Sun et al. 2023: S_n = gamma S_{n-1} + k_n v_n', one gamma per head.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> x = np.ones((3, 1))
    >>> o, S = reference.retention_tokens(x, x, x, 0.5, np.zeros((1, 1)), 1)
    >>> o.ravel().tolist()
    [1.0, 1.5, 1.75]
    """
    o = np.empty_like(v)
    for n in range(len(q)):
        S = gamma * S + np.outer(k[n], v[n])
        o[n] = scale * (q[n] @ S)
    return o, S


def retention_chunk(q, k, v, gamma, S, scale):
    """(Q K' . D) V with D_nm = gamma^(n-m), plus the read of the state, which fades by token.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v), S = rng.standard_normal((3, 6, 4)), rng.standard_normal((4, 4))
    >>> by_chunk = reference.retention_chunk(q, k, v, 0.9, S, 1)
    >>> by_token = reference.retention_tokens(q, k, v, 0.9, S, 1)
    >>> [np.allclose(x, y) for x, y in zip(by_chunk, by_token)]  # o and S
    [True, True]
    """
    n = np.arange(len(q), dtype=q.dtype)
    D = np.tril(gamma ** np.maximum(n[:, None] - n, 0))
    xi = gamma ** (n + 1)  # from the state before the chunk to token n
    zeta = gamma ** (len(q) - 1 - n)  # from token n to the end of the chunk
    o = scale * xi[:, None] * (q @ S) + scale * (q @ k.T * D) @ v
    S = gamma ** len(q) * S + k.T @ (zeta[:, None] * v)
    return o, S


def lightning_attention_tokens(q, k, v, slope, S, scale):
    """Lightning Attention-2, Qin et al. 2024; MiniMax-01: kv <- lambda kv + k v', lambda = e^-s.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> x, S = np.ones((3, 1)), np.zeros((1, 1))
    >>> o, _ = reference.lightning_attention_tokens(x, x, x, 0.7, S, 1)
    >>> np.allclose(o, reference.retention_tokens(x, x, x, np.exp(-0.7), S, 1)[0])
    True
    """
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

    Examples
    --------
    Two chunks of three tokens, and one of six:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v), S = rng.standard_normal((3, 6, 4)), rng.standard_normal((4, 4))
    >>> o, S6 = reference.lightning_attention_chunk(q, k, v, 0.7, S, 1)
    >>> first, S3 = reference.lightning_attention_chunk(q[:3], k[:3], v[:3], 0.7, S, 1)
    >>> then, S33 = reference.lightning_attention_chunk(q[3:], k[3:], v[3:], 0.7, S3, 1)
    >>> np.allclose(o, np.concatenate([first, then])), np.allclose(S6, S33)
    (True, True)
    """
    C = len(q)
    lam = np.exp(-slope)
    i = np.arange(1, C + 1, dtype=q.dtype)
    M = np.tril(lam ** np.maximum(i[:, None] - i, 0))
    intra = (scale * (q @ k.T) * M) @ v
    inter = scale * ((lam**i)[:, None] * q) @ S
    return intra + inter, lam**C * S + ((lam ** (C - i))[:, None] * k).T @ v


def simple_gla_tokens(q, k, v, a, S, scale):
    """A scalar decay a_t = exp(g_t) per token and head; Mamba-2's SSD (Dao and Gu 2024).

    Examples
    --------
    Token 1 forgets half, and token 2 everything:

    >>> import numpy as np
    >>> from linattn import reference
    >>> x, a = np.ones((3, 1)), np.array([1.0, 0.5, 0.0])
    >>> o, _ = reference.simple_gla_tokens(x, x, x, a, np.zeros((1, 1)), 1)
    >>> o.ravel().tolist()
    [1.0, 1.5, 1.0]
    """
    o = np.empty_like(v)
    for t in range(len(q)):
        S = a[t] * S + np.outer(k[t], v[t])
        o[t] = scale * (q[t] @ S)
    return o, S


def simple_gla_chunk(q, k, v, a, S, scale):
    """(Q K' . G) V, where G_ij = a_i ... a_{j+1} is the part of write j that is left at token i.

    Examples
    --------
    With the same decay for every token it is retention:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v), S = rng.standard_normal((3, 6, 4)), rng.standard_normal((4, 4))
    >>> o, _ = reference.simple_gla_chunk(q, k, v, np.full(6, 0.9), S, 1)
    >>> np.allclose(o, reference.retention_chunk(q, k, v, 0.9, S, 1)[0])
    True
    """
    G = decay_matrix(a)
    from_start = np.cumprod(a)
    o = scale * from_start[:, None] * (q @ S) + (scale * (q @ k.T) * G) @ v
    S = from_start[-1] * S + k.T @ (G[-1][:, None] * v)
    return o, S


def gla_tokens(q, k, v, a, S, scale):
    """Gated Linear Attention, Yang et al. 2024: every key channel has its own decay, a [T,K].

    Examples
    --------
    Key 0 keeps everything, and key 1 forgets half with every token:

    >>> import numpy as np
    >>> from linattn import reference
    >>> k, a = np.ones((3, 2)), np.array([[1.0, 0.5]] * 3)
    >>> _, S = reference.gla_tokens(k, k, np.ones((3, 1)), a, np.zeros((2, 1)), 1)
    >>> S.ravel().tolist()
    [3.0, 1.75]
    """
    o = np.empty_like(v)
    for t in range(len(q)):
        S = a[t][:, None] * S + np.outer(k[t], v[t])
        o[t] = scale * (q[t] @ S)
    return o, S


def gla_chunk(q, k, v, a, S, scale):
    """A_ij = q_i' diag(a_i ... a_{j+1}) k_j: the keys fade, channel by channel, as i moves on.

    Examples
    --------
    With the same decay for every key it is the form of ``simple_gla``:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v), S = rng.standard_normal((3, 6, 4)), rng.standard_normal((4, 4))
    >>> a = rng.uniform(0, 1, 6)
    >>> o, _ = reference.gla_chunk(q, k, v, a[:, None].repeat(4, 1), S, 1)
    >>> np.allclose(o, reference.simple_gla_chunk(q, k, v, a, S, 1)[0])
    True
    """
    A, faded = faded_scores(q, k, a)
    from_start = np.cumprod(a, axis=0)
    o = scale * (q * from_start) @ S + scale * A @ v
    S = from_start[-1][:, None] * S + faded.T @ v
    return o, S


# ---------------------------------------------------------------------------------------------
# The ops: [B,T,H,K] in, [B,T,HV,V] and [N,HV,K,V] out.
# ---------------------------------------------------------------------------------------------


@takes_one_head
def linear_attention(
    q,
    k,
    v,
    *,
    feature_map="elu+1",
    normalize=True,
    causal=True,
    eps=1e-6,
    scale=None,
    initial_state=None,
    cu_seqlens=None,
    qk_l2norm=False,
    form="recurrent",
    chunk_size=64,
    dtype=np.float64,
):
    """o_i = num_i / max(den_i, eps), num = scale phi(q)'S, den = scale phi(q)'z.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    feature_map : str, callable or a pair
        A name in FEATURE_MAPS, a callable on the last axis, or a pair of them (q's, k's).
    normalize : bool, "clamp" or "add"
        True or "clamp" as above; "add" divides by den + eps; False returns num alone.
    causal : bool
        False: every token reads the state of its whole sequence. k and v may then have L tokens
        where q has T.
    eps : float
        Of the divisor.
    scale, initial_state, cu_seqlens, qk_l2norm, form, chunk_size, dtype
        The keywords at the head of :mod:`linattn.reference`.

    Returns
    -------
    o : ndarray [B,T,HV,V]
    final_state : the pair (S [N,HV,K,V], z [N,HV,K]) when normalised, else S

    Examples
    --------
    The three forms agree:

    >>> import numpy as np
    >>> from linattn import reference
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 10, 4))  # one head: [T,K]
    >>> o, (S, z) = reference.linear_attention(q, k, v)
    >>> np.allclose(o, reference.linear_attention(q, k, v, form="chunk", chunk_size=3)[0])
    True
    >>> np.allclose(o, reference.linear_attention(q, k, v, form="parallel")[0])
    True
    """
    q, k, v = cast(q, dtype), cast(k, dtype), cast(v, dtype)
    scale = read_scale(scale, q)
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    phi_q, phi_k = feature_pair(feature_map)
    q, k = phi_q(q), phi_k(k)
    one_head = by_form(OPS["linear_attention"], form, chunk_size)
    num = np.empty((*q.shape[:2], *v.shape[2:]), v.dtype)
    den = np.empty_like(num[..., 0])
    S, z = state_arrays(initial_state, WITH_Z, q, v, cu_seqlens)
    with np.errstate(all="ignore"):  # NaN and inf are data here
        for n, h, of_qk, of_v in heads(q, v, cu_seqlens):
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
                    q_h, k_h, v_h, state, scale
                )
            S[n, h], z[n, h] = state
        o = num if normalize is False else num / divisor(den, normalize, eps)[..., None]
    return rounded(o, dtype), (S if normalize is False else (S, z))


OPS["linear_attention"] = Op(
    linear_attention_tokens,
    linear_attention_chunk,
    decay="none",
    has_normaliser=True,
    noncausal=linear_attention_noncausal,
)


@takes_one_head
def retention(q, k, v, *, gamma=None, **common):
    """RetNet's retention, as :func:`linattn.retention` has it.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    gamma : array [HV] or float, optional
        The decay itself; RetNet's 1 - 2^(-5-h) by default.
    **common
        The keywords at the head of :mod:`linattn.reference`.

    Returns
    -------
    o : ndarray [B,T,HV,V]
    final_state : ndarray [N,HV,K,V]

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn import reference
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 10, 3, 4))  # [B,T,H,K]
    >>> o, S = reference.retention(q, k, v)
    >>> S.shape
    (2, 3, 4, 4)
    >>> np.allclose(o, linattn.retention(q, k, v)[0])
    True
    """
    gamma = retnet_gamma(v) if gamma is None else gamma
    return per_head(OPS["retention"], q, k, v, gamma, **common)


OPS["retention"] = Op(retention_tokens, retention_chunk, decay="head", default_decay=retnet_gamma)


@takes_one_head
def lightning_attention(q, k, v, slopes, **common):
    """Lightning Attention, as :func:`linattn.lightning_attention` has it.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    slopes : array [HV] or float
        Minus the natural log of the decay, >= 0.
    **common
        The keywords at the head of :mod:`linattn.reference`.

    Returns
    -------
    o : ndarray [B,T,HV,V]
    final_state : ndarray [N,HV,K,V]

    Examples
    --------
    The naive twin computes in float32, and is off by roundings:

    >>> import numpy as np, linattn
    >>> from linattn import reference
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 10, 4, 8))  # [B,T,H,K]
    >>> slopes = linattn.lightning_slopes(4)
    >>> o, _ = reference.lightning_attention(q, k, v, slopes)
    >>> twin, _ = reference.lightning_attention(q, k, v, slopes, dtype=np.float32)
    >>> twin.dtype.name, np.array_equal(o, twin), np.allclose(o, twin, atol=1e-4)
    ('float32', False, True)
    """
    return per_head(OPS["lightning_attention"], q, k, v, slopes, **common)


OPS["lightning_attention"] = Op(lightning_attention_tokens, lightning_attention_chunk, decay="head")


@takes_one_head
def simple_gla(q, k, v, g=None, *, alpha=None, dtype=np.float64, **common):
    """Linear attention with a decay per token, as :func:`linattn.simple_gla` has it.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    g : array [B,T,HV] or float, optional
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
    Two sequences, packed into one row and apart:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 10, 2, 4))  # [B,T,H,K]
    >>> g = -rng.uniform(0, 1, (1, 10, 2))  # [B,T,HV]
    >>> o, S = reference.simple_gla(q, k, v, g, cu_seqlens=[0, 4, 10])
    >>> last, S_last = reference.simple_gla(q[:, 4:], k[:, 4:], v[:, 4:], g[:, 4:])
    >>> np.allclose(o[:, 4:], last), np.allclose(S[1], S_last[0])
    (True, True)
    """
    a = given_decay(g, alpha, dtype)
    return per_head(OPS["simple_gla"], q, k, v, a, dtype=dtype, **common)


OPS["simple_gla"] = Op(simple_gla_tokens, simple_gla_chunk, decay="token")


@takes_one_head
def gla(q, k, v, g=None, *, alpha=None, dtype=np.float64, **common):
    """Gated linear attention, as :func:`linattn.gla` has it.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
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
    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, g = rng.standard_normal((4, 10, 4))  # one head: [T,K]
    >>> g = -np.abs(g)
    >>> o, S = reference.gla(q, k, v, g)
    >>> np.allclose(o, reference.gla(q, k, v, alpha=np.exp(g))[0])
    True
    """
    a = given_decay(g, alpha, dtype)
    return per_head(OPS["gla"], q, k, v, a, dtype=dtype, **common)


OPS["gla"] = Op(gla_tokens, gla_chunk, decay="key")
