"""flash-linear-attention's functions of the rules that look before the decay, or read before it.

They are a part of fla.py, which has the names and says what is taken.
"""

from __future__ import annotations

from typing import Any

from linattn import composed, ops
from linattn.compat._fla_arrays import Result, forward, ones_if_none, refuse
from linattn.features import l2norm

__all__ = [
    "chunk_comba",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_iplr_delta_rule",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_comba",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_iplr_delta_rule",
    "fused_recurrent_rwkv6",
    "fused_recurrent_rwkv7",
]


def chunk_rwkv6(
    r: Any,
    k: Any,
    v: Any,
    w: Any,
    u: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    *,
    chunk_size: int | None = None,
) -> Result:
    """:func:`linattn.rwkv6` with r = q, the log decays w [B,T,H,K] and the bonus u [H,K].

    The default scale is K**-0.5, as it is fla's.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import chunk_rwkv6
    >>> r, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> w, u = -np.abs(k), np.ones((2, 4))
    >>> o, _ = chunk_rwkv6(r, k, v, w, u, scale=1.0)
    >>> np.allclose(o, linattn.rwkv6(r, k, v, u, w)[0])
    True
    """
    return forward(
        ops.rwkv6,
        r,
        k,
        v,
        u,
        w,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )


def fused_recurrent_rwkv6(
    r: Any,
    k: Any,
    v: Any,
    w: Any,
    u: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Any = None,
) -> Result:
    """:func:`chunk_rwkv6`, token by token.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_rwkv6, fused_recurrent_rwkv6
    >>> r, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> w, u = -np.abs(k), np.ones((2, 4))
    >>> o, _ = fused_recurrent_rwkv6(r, k, v, w, u)
    >>> np.allclose(o, chunk_rwkv6(r, k, v, w, u)[0])
    True
    """
    refuse(reverse=reverse)
    return forward(
        ops.rwkv6,
        r,
        k,
        v,
        u,
        w,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode="recurrent",
    )


def chunk_rwkv7(
    r: Any,
    w: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    scale: float | None = 1.0,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
) -> Result:
    """:func:`linattn.rwkv7` with a, minus the key that is looked up, and b.

    `lower_bound` promises that no log decay is below it. Here any decay will do: it has no effect.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import chunk_rwkv7
    >>> r, k, v, kk = np.random.default_rng(0).standard_normal((4, 1, 8, 2, 4))  # [B,T,H,K]
    >>> kk /= np.linalg.norm(kk, axis=-1, keepdims=True)
    >>> w, a = -np.abs(k), np.full(k.shape, 0.5)
    >>> o, _ = chunk_rwkv7(r, w, k, v, -kk, kk * a)
    >>> np.allclose(o, linattn.rwkv7(r, w, k, v, a, kk=kk)[0])
    True
    """
    _expect_bound(lower_bound)
    return _dplr(
        r,
        k,
        v,
        a,
        b,
        w,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        cp_context=cp_context,
        chunk_size=chunk_size,
    )


def fused_recurrent_rwkv7(
    r: Any,
    w: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = True,
    cu_seqlens: Any = None,
) -> Result:
    """:func:`chunk_rwkv7`, token by token. The default scale is K**-0.5, and the state comes back.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_rwkv7, fused_recurrent_rwkv7
    >>> r, k, v, b = np.random.default_rng(0).standard_normal((4, 1, 8, 2, 4)) / 2  # [B,T,H,K]
    >>> w = -np.abs(k)
    >>> o, state = fused_recurrent_rwkv7(r, w, k, v, -b, b)
    >>> np.allclose(o, chunk_rwkv7(r, w, k, v, -b, b, scale=0.5)[0]), state.shape
    (True, (1, 2, 4, 4))
    """
    return _dplr(
        r,
        k,
        v,
        a,
        b,
        w,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode="recurrent",
    )


def fused_mul_recurrent_rwkv7(
    r: Any,
    w: Any,
    k: Any,
    v: Any,
    kk: Any,
    a: Any,
    scale: float | None = 1.0,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Any = None,
) -> Result:
    """:func:`fused_recurrent_rwkv7` in the other spelling: kk is looked up, and kk * a taken off.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import fused_mul_recurrent_rwkv7
    >>> r, k, v, kk = np.random.default_rng(0).standard_normal((4, 1, 8, 2, 4))  # [B,T,H,K]
    >>> kk /= np.linalg.norm(kk, axis=-1, keepdims=True)
    >>> w, a = -np.abs(k), np.full(k.shape, 0.5)
    >>> o, _ = fused_mul_recurrent_rwkv7(r, w, k, v, kk, a)
    >>> np.allclose(o, linattn.rwkv7(r, w, k, v, a, kk=kk)[0])
    True
    """
    refuse(reverse=reverse)
    return _dplr(
        r,
        k,
        v,
        -kk,
        kk * a,
        w,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode="recurrent",
    )


def chunk_dplr_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    gk: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    safe_gate: bool = False,
    chunk_size: int | None = None,
    disable_recompute: bool = False,
    cp_context: Any = None,
    lower_bound: float | None = None,
) -> Result:
    """:func:`linattn.dplr_delta_rule` with x = -a, y = b and the log decays gk [B,T,H,K].

    `lower_bound` promises that no log decay is below it. Here any decay will do: it has no effect.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import chunk_dplr_delta_rule
    >>> q, k, v, b = np.random.default_rng(0).standard_normal((4, 1, 8, 2, 4)) / 2  # [B,T,H,K]
    >>> gk = -np.abs(k)
    >>> o, _ = chunk_dplr_delta_rule(q, k, v, -b, b, gk)
    >>> np.allclose(o, linattn.dplr_delta_rule(q, k, v, b, b, gk)[0])
    True
    """
    _expect_bound(lower_bound)
    return _dplr(
        q,
        k,
        v,
        a,
        b,
        gk,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        cp_context=cp_context,
        chunk_size=chunk_size,
    )


def fused_recurrent_dplr_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    gk: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Any = None,
) -> Result:
    """:func:`chunk_dplr_delta_rule`, token by token.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_dplr_delta_rule, fused_recurrent_dplr_delta_rule
    >>> q, k, v, b = np.random.default_rng(0).standard_normal((4, 1, 8, 2, 4)) / 2  # [B,T,H,K]
    >>> gk = -np.abs(k)
    >>> o, _ = fused_recurrent_dplr_delta_rule(q, k, v, -b, b, gk)
    >>> np.allclose(o, chunk_dplr_delta_rule(q, k, v, -b, b, gk)[0])
    True
    """
    refuse(reverse=reverse)
    return _dplr(
        q,
        k,
        v,
        a,
        b,
        gk,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode="recurrent",
    )


def chunk_iplr_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    *,
    chunk_size: int | None = None,
) -> Result:
    """:func:`linattn.iplr_delta_rule`: a is looked up, and the look is added along b.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import chunk_iplr_delta_rule
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> k /= np.linalg.norm(k, axis=-1, keepdims=True)
    >>> o, _ = chunk_iplr_delta_rule(q, k, v, -k, k)
    >>> np.allclose(o, linattn.delta_rule(q, k, v, beta=1.0)[0])
    True
    """
    return _dplr(
        q,
        k,
        v,
        a,
        b,
        0.0,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )


def fused_recurrent_iplr_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    a: Any,
    b: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
) -> Result:
    """:func:`chunk_iplr_delta_rule`, token by token.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_iplr_delta_rule, fused_recurrent_iplr_delta_rule
    >>> q, k, v, b = np.random.default_rng(0).standard_normal((4, 1, 8, 2, 4)) / 2  # [B,T,H,K]
    >>> o, _ = fused_recurrent_iplr_delta_rule(q, k, v, -b, b)
    >>> np.allclose(o, chunk_iplr_delta_rule(q, k, v, -b, b)[0])
    True
    """
    return _dplr(
        q,
        k,
        v,
        a,
        b,
        0.0,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode="recurrent",
    )


def chunk_comba(
    q: Any,
    k: Any,
    v: Any,
    p: Any,
    g: Any,
    beta: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
) -> Result:
    """:func:`linattn.comba` with x = p, which is normed as q and k are; beta is 1 by default.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import chunk_comba
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> k /= np.linalg.norm(k, axis=-1, keepdims=True)
    >>> g, beta = np.full((1, 8, 2), -0.1), np.full((1, 8, 2), 0.5)
    >>> o, _ = chunk_comba(q, k, v, 0.5 * k, g, beta)
    >>> np.allclose(o, linattn.comba(q, k, v, 0.5 * k, g, beta)[0])
    True
    """
    return _comba(
        q,
        k,
        v,
        p,
        g,
        beta,
        use_qk_l2norm_in_kernel,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


def fused_recurrent_comba(
    q: Any,
    k: Any,
    p: Any,
    v: Any,
    g: Any,
    beta: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
) -> Result:
    """:func:`chunk_comba`, token by token. p comes before v, and is k if it is None.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_comba, fused_recurrent_comba
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g, beta = np.full((1, 8, 2), -0.1), np.full((1, 8, 2), 0.5)
    >>> o, _ = fused_recurrent_comba(q, k, None, v, g, beta, use_qk_l2norm_in_kernel=True)
    >>> np.allclose(o, chunk_comba(q, k, v, k, g, beta, use_qk_l2norm_in_kernel=True)[0])
    True
    """
    return _comba(
        q,
        k,
        v,
        k if p is None else p,
        g,
        beta,
        use_qk_l2norm_in_kernel,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode="recurrent",
    )


def chunk_gated_delta_product(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    num_householder: int,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: Any = None,
) -> Result:
    """:func:`linattn.gated_delta_product`; float32 too. g may be None: nothing decays then.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import chunk_gated_delta_product
    >>> rng = np.random.default_rng(0)
    >>> q, (k, v) = rng.standard_normal((1, 4, 2, 4)), rng.standard_normal((2, 1, 8, 2, 4))
    >>> beta = np.full((1, 8, 2), 0.5)
    >>> o, _ = chunk_gated_delta_product(q, k, v, None, beta, 2, use_qk_l2norm_in_kernel=True)
    >>> how = {"beta": beta, "num_householder": 2, "qk_l2norm": True}
    >>> np.allclose(o, linattn.gated_delta_product(q, k, v, **how)[0])
    True
    """
    return forward(
        composed.gated_delta_product,
        q,
        k,
        v,
        g,
        beta,
        num_householder=num_householder,
        qk_l2norm=use_qk_l2norm_in_kernel,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        cp_context=cp_context,
    )


def _expect_bound(lower_bound: Any) -> None:
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound: expected a number < 0, got {lower_bound!r}")


def _dplr(q: Any, k: Any, v: Any, a: Any, b: Any, g: Any, **options: Any) -> Result:
    """fla's a is added where x is taken off."""
    return forward(ops.dplr_delta_rule, q, k, v, g, keys=(-a, b), **options)


def _comba(q: Any, k: Any, v: Any, p: Any, g: Any, beta: Any, l2: bool, **options: Any) -> Result:
    p = l2norm(p) if l2 else p
    beta = ones_if_none(beta, v)
    return forward(composed.comba, q, k, v, g, beta, keys=(p,), qk_l2norm=l2, **options)
