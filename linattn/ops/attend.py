"""Linear attention in its plainest form, as one word: (Q K' . M) V."""

from __future__ import annotations

from linattn.ops._core import Array
from linattn.ops.linear_attention import linear_attention

__all__ = ["attend"]


def attend(q: Array, k: Array, v: Array, *, causal: bool = True, scale: float = 1.0) -> Array:
    """Attention without softmax, a feature map or a normaliser: O = scale (Q K' . M) V.

    M keeps the tokens up to each token itself. With ``causal=False`` it keeps all. This is
    :func:`linear_attention` with ``feature_map="identity"``, ``normalize=False`` and ``scale=1``,
    without a state. Use that function for states, packed sequences, steps and the gradients of
    NumPy arrays. PyTorch records this one too.

    Parameters
    ----------
    q, k : array [B,T,H,K], or [T,K] for one head
    v : array [B,T,HV,V], or [T,V]
    causal : bool
        False: every token reads the whole sequence. k and v may then have another number of
        tokens than q.
    scale : float
        Of the reads. Other ops have K**-0.5 as the default.

    Returns
    -------
    o : array [B,T,HV,V], or [T,V], dtype of v

    Raises
    ------
    TypeError, ValueError, MemoryError
        As in :func:`linear_attention`.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> q, k, v = np.array([[1.0], [2.0]]), np.array([[3.0], [1.0]]), np.array([[1.0], [10.0]])
    >>> linattn.attend(q, k, v)
    array([[ 3.],
           [26.]])
    >>> np.array_equal(linattn.attend(q, k, v), np.tril(q @ k.T) @ v)
    True
    """
    o, _ = linear_attention(
        q, k, v, feature_map="identity", normalize=False, causal=causal, scale=scale
    )
    return o
