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


def faded_scores(q, k, a):
    """A [C,C] with A_ij = q_i' (a_i ... a_{j+1} k_j) for j <= i, and k faded to the last token.

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
    """
    A = np.zeros((len(q), len(q)), q.dtype)
    faded = np.zeros_like(k)
    for i in range(len(q)):
        faded[:i] *= a[i]
        faded[i] = k[i]
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
