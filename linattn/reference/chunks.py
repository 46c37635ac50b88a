"""The products that chunk forms share.

Decays are multiplied, never divided and never subtracted as logarithms: so a = 0 (g = -inf) is an
ordinary number, and a small decay next to a huge one keeps its digits.
"""

import numpy as np


def decay_matrix(a: np.ndarray) -> np.ndarray:
    """G [C,C] with G_ij = a_i a_{i-1} ... a_{j+1} for j <= i, else 0. a [C].

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> reference.decay_matrix(np.array([0.1, 0.5, 0.25]))
    array([[1.   , 0.   , 0.   ],
           [0.5  , 1.   , 0.   ],
           [0.125, 0.25 , 1.   ]])
    """
    G = np.eye(len(a), dtype=a.dtype)
    for i in range(1, len(a)):
        G[i, :i] = a[i] * G[i - 1, :i]
    return G


def faded_scores(q, k, a, before=False):
    """A [C,C] with A_ij = q_i' (a_i ... a_{j+1} k_j) for j <= i, and k faded to the last token.

    With before=True a token reads before its own decay and write: A_ij = q_i' (a_{i-1} ... a_{j+1}
    k_j) for j < i.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> q, k = np.random.default_rng(0).standard_normal((2, 5, 4))
    >>> A, faded = reference.faded_scores(q, k, np.full((5, 4), 0.5))
    >>> np.allclose(A[3, 1], q[3] @ k[1] * 0.5**2)  # tokens 2 and 3 decay
    True
    >>> np.allclose(faded[1], k[1] * 0.5**3)
    True
    >>> A, _ = reference.faded_scores(q, k, np.full((5, 4), 0.5), before=True)
    >>> np.allclose(A[3, 1], q[3] @ k[1] * 0.5)  # token 2 alone
    True
    """
    A = np.zeros((len(q), len(q)), q.dtype)
    faded = np.zeros_like(k)
    for i in range(len(q)):
        if before:
            A[i, :i] = faded[:i] @ q[i]
        faded[:i] *= a[i]
        faded[i] = k[i]
        if not before:
            A[i, : i + 1] = faded[: i + 1] @ q[i]
    return A, faded


def solve_unit_lower(L, R):
    """U with (I + L) U = R, for a strictly lower triangular L, by forward substitution.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> rng = np.random.default_rng(0)
    >>> L, R = np.tril(rng.standard_normal((5, 5)), -1), rng.standard_normal((5, 3))
    >>> np.allclose((np.eye(5) + L) @ reference.solve_unit_lower(L, R), R)
    True
    """
    U = np.empty_like(R)
    for i in range(len(R)):
        U[i] = R[i] - L[i, :i] @ U[:i]
    return U


# ---------------------------------------------------------------------------------------------
# The same for adjoints: a is [C,K], or [C,1] for one decay for all keys.
# ---------------------------------------------------------------------------------------------


def products(a):
    """e [C,K], e_i = a_i ... a_1, and G [C,C,K], G_ij = a_i ... a_{j+1} for j <= i, else 0."""
    G = np.zeros((len(a), *a.shape), a.dtype)
    for i in range(len(a)):
        G[i, :i] = a[i] * G[i - 1, :i]
        G[i, i] = 1
    return np.cumprod(a, 0), G


def products_before(e, G):
    """The same as a token meets them before its own decay: e_{i-1} and G_{i-1,j}, for j < i."""
    e_before, G_before = np.ones_like(e), np.zeros_like(G)
    e_before[1:], G_before[1:] = e[:-1], G[:-1]
    return e_before, G_before


def products_before_adjoint(de_before, dG_before, de, dG):
    """Adds to de and dG."""
    de[:-1] += de_before[1:]
    dG[:-1] += dG_before[1:]


def products_adjoint(dG, de, a, e, G):
    """da of `products`. dG and de are changed."""
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


def scores(x, y, G):
    """A_ij = x_i' G_ij y_j."""
    has_one_decay = G.shape[-1] == 1
    if has_one_decay:
        return (x @ y.T) * G[..., 0]
    return np.einsum("ik,jk,ijk->ij", x, y, G)


def scores_adjoint(dA, x, y, G):
    """dx, dy and dG of `scores`; dG [C,C,K] for one decay too."""
    faded = dA[..., None] * G
    dG = dA[..., None] * x[:, None] * y
    return (faded * y).sum(1), (faded * x[:, None]).sum(0), dG
