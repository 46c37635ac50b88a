"""Softmax attention, which linear attention replaces, and its gradients."""

from typing import Any, NamedTuple

import numpy as np

from ._loops import cast, read_scale, rounded
from ._one_head import takes_one_head


class SoftmaxGradients(NamedTuple):
    """The gradients of softmax attention.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import reference
    >>> x = np.ones((3, 2))  # one head: [T,K]
    >>> reference.softmax_attention_backward(x, x, x, x)._fields
    ('dq', 'dk', 'dv')
    """

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def softmax_weights(
    q: Any, k: Any, *, causal: bool = True, scale: Any = None, dtype: Any = np.float64
) -> np.ndarray:
    """A with rows that sum to 1: softmax(scale q k').

    Parameters
    ----------
    q : array [B,T,H,K], or [T,K] for one head
    k : array [B,L,H,K], or [L,K]
    causal : bool
        Token i reads tokens j <= i, and every other weight is 0. With causal=False, q may have
        another number of tokens than k.
    scale : float, optional
        The factor of q k'; K**-0.5 by default.
    dtype : dtype
        Of the arithmetic.

    Returns
    -------
    A : ndarray [B,H,T,L], or [T,L]

    Raises
    ------
    ValueError
        q and k have different numbers of tokens in a causal call.

    Examples
    --------
    Where all scores are equal, all weights are:

    >>> import numpy as np
    >>> from linattn import reference
    >>> reference.softmax_weights(np.zeros((2, 4)), np.zeros((2, 4)))  # one head: [T,K]
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    if np.ndim(q) == 2:
        q, k = (np.asarray(x)[None, :, None] for x in (q, k))
        return softmax_weights(q, k, causal=causal, scale=scale, dtype=dtype)[0, 0]
    q, k = cast(q, dtype), cast(k, dtype)
    scores = read_scale(scale, q) * np.einsum("bihk,bjhk->bhij", q, k)
    if causal:
        if q.shape[1] != k.shape[1]:
            raise ValueError(
                f"k: expected as many tokens as q has, {q.shape[1]}, got {k.shape[1]}: "
                "with causal=False they may differ"
            )
        scores[..., ~np.tri(q.shape[1], dtype=bool)] = -np.inf
    scores = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
    return rounded(scores / scores.sum(-1, keepdims=True), dtype)


@takes_one_head
def softmax_attention(q, k, v, *, causal=True, scale=None, dtype=np.float64):
    """o_i = sum_j A_ij v_j with A = softmax(scale q k'), scale = K**-0.5 by default.

    Every token reads the keys and values of all tokens that it sees: time grows with T squared, and
    a decoder keeps all of them. No sum over j can be taken before i is known, because exp does not
    split into a function of q_i and one of k_j.

    Parameters
    ----------
    q : array [B,T,H,K], or [T,K] for one head
    k : array [B,L,H,K], or [L,K]
    v : array [B,L,HV,V], or [L,V]
    causal : bool
        Token i reads tokens j <= i, and every other weight is 0. With causal=False, q may have
        another number of tokens than k.
    scale : float, optional
        The factor of q k'; K**-0.5 by default.
    dtype : dtype
        Of the arithmetic.

    Returns
    -------
    o : ndarray [B,T,HV,V], or [T,V]

    Raises
    ------
    ValueError
        q and k have different numbers of tokens in a causal call.

    References
    ----------
    Vaswani et al., 2017, *Attention Is All You Need*, arXiv:1706.03762.

    Examples
    --------
    Every output lies between the least and the largest value that is seen:

    >>> import numpy as np
    >>> from linattn import reference
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 6, 4))  # one head: [T,K]
    >>> o = reference.softmax_attention(q, k, v, causal=False)
    >>> bool((o > v.min(0)).all() and (o < v.max(0)).all())
    True
    >>> np.allclose(o, reference.softmax_weights(q, k, causal=False) @ v)
    True
    """
    A, v = softmax_weights(q, k, causal=causal, scale=scale, dtype=dtype), cast(v, dtype)
    A = A.repeat(v.shape[2] // A.shape[1], 1)
    return rounded(np.einsum("bhij,bjhv->bihv", A, v), dtype)


@takes_one_head
def softmax_attention_backward(do, q, k, v, *, causal=True, scale=None, dtype=np.float64):
    """dq, dk, dv of sum(do * o). A is computed again, from q and k.

    Parameters
    ----------
    do : array [B,T,HV,V], or [T,V] for one head
        The gradient of o.
    q, k, v, causal, scale, dtype
        As in :func:`softmax_attention`.

    Returns
    -------
    SoftmaxGradients

    Raises
    ------
    ValueError
        q and k have different numbers of tokens in a causal call.

    Examples
    --------
    The weights of row i sum to one, so the values together get all of do_i:

    >>> import numpy as np
    >>> from linattn import reference
    >>> do, q, k, v = np.random.default_rng(0).standard_normal((4, 6, 4))  # one head: [T,K]
    >>> grads = reference.softmax_attention_backward(do, q, k, v)
    >>> np.allclose(grads.dv.sum(0), do.sum(0))
    True
    """
    A = softmax_weights(q, k, causal=causal, scale=scale, dtype=dtype)
    do, q, k, v = (cast(x, dtype) for x in (do, q, k, v))
    scale, shared = read_scale(scale, q), v.shape[2] // q.shape[2]
    A_v = A.repeat(shared, 1)
    # o = A v
    dv = np.einsum("bhij,bihv->bjhv", A_v, do)
    dA = np.einsum("bihv,bjhv->bhij", do, v)
    dA = dA.reshape(*A.shape[:2], shared, *A.shape[2:]).sum(2)  # heads of values that share one A
    # A_i = softmax(s_i)
    ds = A * (dA - (A * dA).sum(-1, keepdims=True))
    # s = scale q k'
    dq, dk = (
        scale * np.einsum("bhij,bjhk->bihk", ds, k),
        scale * np.einsum("bhij,bihk->bjhk", ds, q),
    )
    return SoftmaxGradients(*(rounded(x, dtype) for x in (dq, dk, dv)))
