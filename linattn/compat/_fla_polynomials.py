"""flash-linear-attention's functions whose weights are polynomials of q'k.

They are a part of fla.py, which has the names and says what is taken.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from linattn import ops
from linattn.compat._fla_arrays import refuse
from linattn.features import cast, is_tensor, library_of, wide

__all__ = ["fused_chunk_based", "parallel_based", "parallel_rebased"]


def _pairs(x: Any, off_diagonal: float, diagonal: float) -> Any:
    """The products of two components, x_i x_j for i <= j, times one number or the other."""
    i, j = np.triu_indices(x.shape[-1])
    factors = np.where(i == j, diagonal, off_diagonal)
    if is_tensor(x):
        torch = library_of(x)
        i, j = torch.asarray(i, device=x.device), torch.asarray(j, device=x.device)
        return x[..., i] * x[..., j] * torch.asarray(factors, device=x.device, dtype=x.dtype)
    xp = library_of(x)
    return x[..., xp.asarray(i)] * x[..., xp.asarray(j)] * xp.asarray(factors, dtype=x.dtype)


def _taylor(x: Any) -> Any:
    """phi with phi(q)'phi(k) = 1 + q'k + (q'k)^2 / 2: 1, x, and the products of two components."""
    one = x[..., :1] * 0 + 1
    return library_of(x).concatenate([one, x, _pairs(x, 1.0, 0.5**0.5)], -1)


def _square(x: Any) -> Any:
    """phi with phi(q)'phi(k) = (q'k)^2."""
    return _pairs(x, 2.0**0.5, 1.0)


def _weighed(
    q: Any, k: Any, v: Any, phi: Any, *, scale: float, normalize: bool, eps: float, **options: Any
) -> Any:
    """Linear attention of phi(scale q) and phi(k), in float32 or better; o has q's dtype."""
    o, _ = ops.linear_attention(
        phi(scale * wide(q)),
        phi(wide(k)),
        wide(v),
        feature_map="identity",
        normalize="add" if normalize else False,
        eps=eps,
        scale=1.0,
        **options,
    )
    return cast(o, q.dtype)


def parallel_based(
    q: Any, k: Any, v: Any, scale: float | None = None, use_norm: bool = True
) -> Any:
    """:func:`linattn.linear_attention` with the weights 1 + s + s^2 / 2, s = scale * q'k.

    q, k : arrays [B,T,H,K], v : array [B,T,H,V] -> o [B,T,H,V] in q's dtype. The features of a key
    are 1 + K + K (K + 1) / 2. ``use_norm`` divides by the sum of the weights + 1e-6.

    References
    ----------
    Arora et al., 2024, *Simple linear attention language models balance the recall-throughput
    tradeoff*, arXiv:2402.18668.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import parallel_based
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> s = np.einsum("bthk,bshk->bhts", q, k) / 2
    >>> weights = np.tril(1 + s + s**2 / 2)
    >>> want = np.einsum("bhts,bshv->bthv", weights, v)
    >>> bool(np.allclose(parallel_based(q, k, v, use_norm=False), want))
    True
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _weighed(q, k, v, _taylor, scale=scale, normalize=use_norm, eps=1e-6)


def parallel_rebased(
    q: Any,
    k: Any,
    v: Any,
    eps: float = 1e-5,
    use_scale: bool = True,
    use_normalize: bool = True,
    return_both: bool = False,
) -> Any:
    """:func:`linattn.linear_attention` with the weights (scale * q'k)^2; scale is K**-0.5 or 1.

    q, k : arrays [B,T,H,K], v : array [B,T,H,V] -> o [B,T,H,V] in q's dtype. ``use_normalize``
    divides by the sum of the weights + eps.

    References
    ----------
    Aksenov et al., 2024, *Linear Transformers with Learnable Kernel Functions are Better In-Context
    Models*, arXiv:2402.10644.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import parallel_rebased
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> weights = np.tril(np.einsum("bthk,bshk->bhts", q, k) ** 2 / 4)
    >>> want = np.einsum("bhts,bshv->bthv", weights, v)
    >>> bool(np.allclose(parallel_rebased(q, k, v, use_normalize=False), want))
    True
    """
    refuse(return_both=return_both)
    scale = q.shape[-1] ** -0.5 if use_scale else 1.0
    return _weighed(q, k, v, _square, scale=scale, normalize=use_normalize, eps=eps)


# fla has it as a kernel of its own: the same results
fused_chunk_based = parallel_based
