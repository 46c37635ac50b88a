"""The ops of the delta rule: a token writes what the state does not answer, u = b (v - p).

p is the answer to the key k, or to x, a key that predicts and is not written: p = x'S. Every x is
k where none is given.
"""

import numpy as np

from ._loops import OPS, Op, given_decay, per_head
from ._one_head import takes_one_head
from .chunks import decay_matrix, faded_scores, solve_unit_lower

# ---------------------------------------------------------------------------------------------
# One head. S comes in and goes out; it is never changed in place.
# ---------------------------------------------------------------------------------------------


def delta_rule_tokens(q, k, v, beta, S, scale, x=None):
    """DeltaNet, Schlag et al. 2021: write only what the state does not yet answer.

    S + b k (v - k'S)' is the other spelling, (I - b k k') S + b k v', with fewer multiplications.

    Examples
    --------
    Token 1 has the key of token 0, and replaces its value:

    >>> import numpy as np
    >>> from linattn import reference
    >>> k, v = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[2.0], [5.0]])
    >>> _, S = reference.delta_rule_tokens(k, k, v, np.ones(2), np.zeros((2, 1)), 1)
    >>> S.ravel().tolist()
    [5.0, 0.0]
    """
    x = k if x is None else x
    o = np.empty_like(v)
    for t in range(len(q)):
        p = x[t] @ S
        u = beta[t] * (v[t] - p)
        S = S + np.outer(k[t], u)
        o[t] = scale * (q[t] @ S)
    return o, S


def delta_rule_chunk(q, k, v, beta, S, scale, x=None):
    """Yang et al. 2024, "Parallelizing linear transformers with the delta rule".

    A prediction needs the writes before it: u_i = b_i (v_i - x_i'S - sum_{j<i} x_i.k_j u_j),
    a triangular system for U [C,V]. The rest is linear attention with U in the place of V.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v), S = rng.standard_normal((3, 6, 4)), rng.standard_normal((4, 4))
    >>> k, beta = reference.l2norm(k), rng.uniform(0, 1, 6)
    >>> o, _ = reference.delta_rule_chunk(q, k, v, beta, S, 1)
    >>> np.allclose(o, reference.delta_rule_tokens(q, k, v, beta, S, 1)[0])
    True
    """
    x = k if x is None else x
    L = beta[:, None] * np.tril(x @ k.T, -1)  # scores
    P = np.tril(q @ k.T)
    U = solve_unit_lower(L, beta[:, None] * (v - x @ S))  # solve
    o = scale * (q @ S) + scale * P @ U  # read
    return o, S + k.T @ U  # carry


def gated_delta_rule_tokens(q, k, v, a, beta, S, scale, x=None):
    """Gated DeltaNet, Yang et al. 2024: S <- (I - b k k') a S + b k v', so decay comes first.

    The prediction is made from the decayed state. Predicting from the undecayed one is the usual
    mistake; the worked example in docs/math.md has the numbers that it gives.

    Examples
    --------
    The state after token 0 is 4, and decays to 2. Half of the error, 2, is written:

    >>> import numpy as np
    >>> from linattn import reference
    >>> k, v = np.ones((2, 1)), np.full((2, 1), 4.0)
    >>> a, beta = np.array([1.0, 0.5]), np.array([1.0, 0.5])
    >>> _, S = reference.gated_delta_rule_tokens(k, k, v, a, beta, np.zeros((1, 1)), 1)
    >>> S.item()
    3.0
    """
    x = k if x is None else x
    o = np.empty_like(v)
    for t in range(len(q)):
        S = a[t] * S
        u = beta[t] * (v[t] - x[t] @ S)
        S = S + np.outer(k[t], u)
        o[t] = scale * (q[t] @ S)
    return o, S


def gated_delta_rule_chunk(q, k, v, a, beta, S, scale, x=None):
    """The delta rule's system, each pair (i, j) faded by G_ij and the state by a_1 ... a_i.

    Examples
    --------
    Without a decay it is the delta rule:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v), S = rng.standard_normal((3, 6, 4)), rng.standard_normal((4, 4))
    >>> k, beta = reference.l2norm(k), rng.uniform(0, 1, 6)
    >>> o, _ = reference.gated_delta_rule_chunk(q, k, v, np.ones(6), beta, S, 1)
    >>> np.allclose(o, reference.delta_rule_chunk(q, k, v, beta, S, 1)[0])
    True
    """
    x = k if x is None else x
    G = decay_matrix(a)
    from_start = np.cumprod(a)[:, None]
    L = beta[:, None] * np.tril(x @ k.T, -1) * G  # scores
    P = q @ k.T * G
    U = solve_unit_lower(L, beta[:, None] * (v - from_start * (x @ S)))  # solve
    o = scale * from_start * (q @ S) + scale * P @ U  # read
    return o, from_start[-1] * S + k.T @ (G[-1][:, None] * U)  # carry


def kda_tokens(q, k, v, a, beta, S, scale, x=None):
    """Kimi Delta Attention, Kimi Linear 2025: S <- (I - b k k') diag(a) S + b k v', a [T,K].

    Examples
    --------
    Key 1 forgets at once, so that it predicts 0 for token 1:

    >>> import numpy as np
    >>> from linattn import reference
    >>> k, v = np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([[2.0], [2.0]])
    >>> a, beta = np.array([[1.0, 0.0]] * 2), np.array([1.0, 0.5])
    >>> _, S = reference.kda_tokens(k, k, v, a, beta, np.zeros((2, 1)), 1)
    >>> S.ravel().tolist()
    [0.0, 1.0]
    """
    x = k if x is None else x
    o = np.empty_like(v)
    for t in range(len(q)):
        S = a[t][:, None] * S
        u = beta[t] * (v[t] - x[t] @ S)
        S = S + np.outer(k[t], u)
        o[t] = scale * (q[t] @ S)
    return o, S


def kda_chunk(q, k, v, a, beta, S, scale, x=None):
    """The delta rule's system with GLA's scores: the decay cannot be pulled out of x_i . k_j.

    Examples
    --------
    With the same decay for every key it is the gated delta rule:

    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v), S = rng.standard_normal((3, 6, 4)), rng.standard_normal((4, 4))
    >>> (a, beta), k = rng.uniform(0, 1, (2, 6)), reference.l2norm(k)
    >>> o, _ = reference.kda_chunk(q, k, v, a[:, None].repeat(4, 1), beta, S, 1)
    >>> np.allclose(o, reference.gated_delta_rule_chunk(q, k, v, a, beta, S, 1)[0])
    True
    """
    x = k if x is None else x
    from_start = np.cumprod(a, axis=0)
    L = beta[:, None] * np.tril(faded_scores(x, k, a)[0], -1)  # scores
    P, faded = faded_scores(q, k, a)
    U = solve_unit_lower(L, beta[:, None] * (v - (x * from_start) @ S))  # solve
    o = scale * (q * from_start) @ S + scale * P @ U  # read
    return o, from_start[-1][:, None] * S + faded.T @ U  # carry


# ---------------------------------------------------------------------------------------------
# The ops: [B,T,H,K] in, [B,T,HV,V] and [N,HV,K,V] out.
# ---------------------------------------------------------------------------------------------


@takes_one_head
def delta_rule(q, k, v, beta, *, x=None, **common):
    """The delta rule, as :func:`linattn.delta_rule` has it.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    beta : array [B,T,HV] or float
        How much of the error is written.
    x : array [B,T,H,K], optional
        The key that predicts, where it is not the key that is written; qk_l2norm leaves it.
    **common
        The keywords at the head of :mod:`linattn.reference`.

    Returns
    -------
    o : ndarray [B,T,HV,V]
    final_state : ndarray [N,HV,K,V]

    Examples
    --------
    With beta = 1 and orthogonal keys of norm 1, the state answers every key with its value:

    >>> import numpy as np
    >>> from linattn import reference
    >>> k, v = np.eye(4), np.random.default_rng(0).standard_normal((4, 3))  # one head: [T,K]
    >>> _, S = reference.delta_rule(k, k, v, beta=1)
    >>> np.allclose(k @ S, v)
    True
    """
    return per_head(OPS["delta_rule"], q, k, v, beta, x=x, **common)


OPS["delta_rule"] = Op(delta_rule_tokens, delta_rule_chunk, decay="none")


@takes_one_head
def gated_delta_rule(q, k, v, g=None, beta=None, *, alpha=None, x=None, dtype=np.float64, **common):
    """The gated delta rule, as :func:`linattn.gated_delta_rule` has it.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    g : array [B,T,HV] or float, optional
        The natural log of the decay.
    beta : array [B,T,HV] or float
        How much of the error is written.
    alpha : array like g, or float, optional
        The decay itself, instead of g.
    x : array [B,T,H,K], optional
        The key that predicts, where it is not the key that is written; qk_l2norm leaves it.
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
    A call may go on from the state of another:

    >>> import numpy as np
    >>> from linattn import reference
    >>> from linattn.testing import make_inputs
    >>> x = make_inputs("gated_delta_rule", np.random.default_rng(0), T=8)  # q, k, v, g, beta
    >>> first, then = ({n: y[:, part] for n, y in x.items()} for part in (slice(5), slice(5, 8)))
    >>> _, S = reference.gated_delta_rule(**first)
    >>> o, _ = reference.gated_delta_rule(**then, initial_state=S)
    >>> np.allclose(o, reference.gated_delta_rule(**x)[0][:, 5:])
    True
    """
    a = given_decay(g, alpha, dtype)
    return per_head(OPS["gated_delta_rule"], q, k, v, a, beta, x=x, dtype=dtype, **common)


OPS["gated_delta_rule"] = Op(gated_delta_rule_tokens, gated_delta_rule_chunk, decay="token")


@takes_one_head
def kda(q, k, v, g=None, beta=None, *, alpha=None, x=None, dtype=np.float64, **common):
    """Kimi Delta Attention, as :func:`linattn.kda` has it.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    g : array [B,T,HV,K] or float, optional
        The natural log of the decay.
    beta : array [B,T,HV] or float
        How much of the error is written.
    alpha : array like g, or float, optional
        The decay itself, instead of g.
    x : array [B,T,H,K], optional
        The key that predicts, where it is not the key that is written; qk_l2norm leaves it.
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
    Four value heads read two query and key heads, two of them each:

    >>> import numpy as np
    >>> from linattn import reference
    >>> from linattn.testing import make_inputs
    >>> x = make_inputs("kda", np.random.default_rng(0), T=6, H=2, HV=4)  # q, k, v, g, beta
    >>> o, S = reference.kda(**x)
    >>> o.shape, S.shape
    ((1, 6, 4, 4), (1, 4, 4, 4))
    >>> each = {name: y.repeat(2, 2) if name in "qk" else y for name, y in x.items()}
    >>> np.allclose(o, reference.kda(**each)[0])
    True
    """
    a = given_decay(g, alpha, dtype)
    return per_head(OPS["kda"], q, k, v, a, beta, x=x, dtype=dtype, **common)


OPS["kda"] = Op(kda_tokens, kda_chunk, decay="key")
