"""flash-linear-attention's delta rules whose keys are written times a preconditioner.

They are a part of fla.py, which has the names and says what is taken.
"""

from __future__ import annotations

import math
from typing import Any

from linattn import _rooms, composed, ops
from linattn.compat._fla_arrays import forward, ones_if_none, refuse, state_of
from linattn.compat._gates import activated_gate
from linattn.composed._names import called
from linattn.features import cast, is_array, l2norm, library_of, wide

__all__ = [
    "chunk_precond_gated_delta_rule",
    "chunk_precond_kda",
    "fused_recurrent_precond_gated_delta_rule",
    "fused_recurrent_precond_kda",
]

Results = tuple[Any, Any, Any]
CENTER = -0.2  # fla's, of log_atk_scale


def _preconditioner(
    k: Any,
    g_atk: Any,
    beta_atk: Any,
    initial_A_state: Any,
    output_final_state: bool,
    cu_seqlens: Any,
    x: float,
    eps: float,
    log_atk_scale: Any,
) -> tuple[Any, Any]:
    """m [B,T,H,K] between 1 / x and x, and the last A [N,H,K] or None.

    A <- exp(g_atk) A + beta_atk k * k is a running sum of the keys' squares. With r = log(A + eps)
    minus log_atk_scale, m is x to the power -r / (1 + |r|).
    """
    for name, given in (("g_atk", g_atk), ("beta_atk", beta_atk)):
        if not is_array(given):
            raise TypeError(f"{name}: expected an array [B,T,H], got {type(given)}")
        if tuple(given.shape) != tuple(k.shape[:3]):
            raise ValueError(
                f"{name}: expected [B,T,H] = {tuple(k.shape[:3])}, got {tuple(given.shape)}"
            )
    B, T, H, K = k.shape
    xp, k = library_of(k), wide(k)
    squares = wide(beta_atk)[..., None] * k * k
    decays = wide(g_atk)[..., None] + 0 * k
    before = initial_A_state
    if is_array(before):
        before = state_of(k, before.reshape(before.shape[0], H * K))
    arrays = {
        "u": squares.reshape(B, T, H * K),
        "g": decays.reshape(B, T, H * K),
        "cu_seqlens": cu_seqlens,
        "initial_state": before,
    }
    names = {"u": "beta_atk * k * k", "g": "g_atk", "initial_state": "initial_A_state"}
    with called(names, k):
        A, last = _rooms.forward("scan", "gated", arrays, output_final_state=output_final_state)
    center: Any = CENTER
    if log_atk_scale is not None:
        center = wide(log_atk_scale).reshape(H, 1) if is_array(log_atk_scale) else log_atk_scale
    r = xp.log(A.reshape(B, T, H, K) + eps) - center
    m = xp.exp(-math.log(x) * r / (1 + abs(r)))
    return m, None if last is None else last.reshape(last.shape[0], H, K)


def _precond(
    rule: str,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    g_atk: Any,
    beta_atk: Any,
    *,
    initial_A_state: Any,
    l2: bool,
    x: float,
    eps: float,
    log_atk_scale: Any,
    output_final_state: bool,
    cu_seqlens: Any,
    **options: Any,
) -> Results:
    if l2:
        q, k = l2norm(q), l2norm(k)
    m, last = _preconditioner(
        k,
        g_atk,
        beta_atk,
        initial_A_state,
        output_final_state,
        cu_seqlens,
        x,
        eps,
        log_atk_scale,
    )
    options |= {"output_final_state": output_final_state, "cu_seqlens": cu_seqlens}
    if rule == "heads":
        o, state = forward(composed.precond_gated_delta_rule, q, k, v, m, g, beta, **options)
    else:
        written = cast(m * wide(k), k.dtype)
        o, state = forward(ops.kda, q, written, v, g, beta, x=k, **options)
    return o, state, last


def chunk_precond_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g_atk: Any,
    g: Any,
    beta_atk: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    initial_A_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: Any = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Any = None,
) -> Results:
    """:func:`linattn.precond_gated_delta_rule`, with a preconditioner of the keys so far.

    g, beta : arrays [B,T,HV], g_atk, beta_atk : arrays [B,T,H] -> o, the state S [N,HV,K,V] and A
    [N,H,K], the running sum A <- exp(g_atk) A + beta_atk k * k. A key is written times x to the
    power -r / (1 + abs(r)), r = log(A + eps) - log_atk_scale, which is -0.2 if it is not given.

    References
    ----------
    Tumma, Loo and Rus, 2026, *Preconditioned DeltaNet: Curvature-aware Sequence Modeling for Linear
    Recurrences*, arXiv:2604.21100.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import chunk_precond_gated_delta_rule
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g, beta = np.full((1, 8, 2), -0.1), np.full((1, 8, 2), 0.5)
    >>> call = {"x": 1.0, "output_final_state": True}
    >>> o, S, A = chunk_precond_gated_delta_rule(q, k, v, g, g, beta, beta, **call)
    >>> want, _ = linattn.gated_delta_rule(q, k, v, g, beta, qk_l2norm=True)  # x = 1: all are 1
    >>> bool(np.allclose(o, want)), A.shape
    (True, (1, 2, 4))
    """
    refuse(cp_context=cp_context)
    return _precond(
        "heads",
        q,
        k,
        v,
        g,
        beta,
        g_atk,
        beta_atk,
        scale=scale,
        initial_state=initial_state,
        initial_A_state=initial_A_state,
        output_final_state=output_final_state,
        l2=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        x=x,
        eps=eps,
        log_atk_scale=log_atk_scale,
        state_v_first=transpose_state_layout,
    )


def fused_recurrent_precond_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    gk: Any = None,
    gv: Any = None,
    beta: Any = None,
    g_atk: Any = None,
    beta_atk: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    initial_A_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Any = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Any = None,
) -> Results:
    """:func:`chunk_precond_gated_delta_rule`, token by token, with decays of heads (g) or none.

    With decays of keys (gk [B,T,HV,K]) it is :func:`fused_recurrent_precond_kda`, whose gate is the
    sum of both. beta is 1 by default.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import fused_recurrent_precond_gated_delta_rule
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g, beta = np.full((1, 8, 2), -0.1), np.full((1, 8, 2), 0.5)
    >>> from linattn.compat.fla import chunk_precond_gated_delta_rule
    >>> o, _, _ = fused_recurrent_precond_gated_delta_rule(
    ...     q, k, v, g, beta=beta, g_atk=g, beta_atk=beta
    ... )
    >>> bool(np.allclose(o, chunk_precond_gated_delta_rule(q, k, v, g, g, beta, beta)[0]))
    True
    """
    refuse(gv=gv)
    beta = ones_if_none(beta, v)
    if g is None and gk is None:
        g = 0.0
    if gk is not None:
        gk = gk if g is None else g[..., None] + gk
    rule = "heads" if gk is None else "keys"
    return _precond(
        rule,
        q,
        k,
        v,
        g if gk is None else gk,
        beta,
        g_atk,
        beta_atk,
        scale=scale,
        initial_state=initial_state,
        initial_A_state=initial_A_state,
        output_final_state=output_final_state,
        l2=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        x=x,
        eps=eps,
        log_atk_scale=log_atk_scale,
        state_v_first=transpose_state_layout,
        mode="recurrent",
    )


def chunk_precond_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    g_atk: Any,
    beta_atk: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    initial_A_state: Any = None,
    output_final_state: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    chunk_indices: Any = None,
    cp_context: Any = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Any = None,
    solve_tril_precision: str | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    *,
    A_log: Any = None,
    dt_bias: Any = None,
    use_qk_l2norm_in_kernel: bool = True,
) -> Results:
    """:func:`linattn.kda` with the preconditioner of :func:`chunk_precond_gated_delta_rule`.

    g : array [B,T,HV,K], beta : array [B,T,HV], g_atk, beta_atk : arrays [B,T,H] -> o, S [N,HV,K,V]
    and A [N,H,K]. q and k are always divided by their norms, as in fla, which does not look at
    ``use_qk_l2norm_in_kernel``. False is refused.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import chunk_precond_kda
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g, beta = np.full((1, 8, 2, 4), -0.1), np.full((1, 8, 2), 0.5)
    >>> atk = np.full((1, 8, 2), -0.1), beta
    >>> o, S, A = chunk_precond_kda(q, k, v, g, *atk, beta, x=1.0, output_final_state=True)
    >>> want, _ = linattn.kda(q, k, v, g, beta, qk_l2norm=True)  # x = 1: all are 1
    >>> bool(np.allclose(o, want)), A.shape
    (True, (1, 2, 4))
    """
    refuse(
        cp_context=cp_context,
        return_intermediate_states=return_intermediate_states,
        solve_tril_precision=solve_tril_precision,
    )
    if use_qk_l2norm_in_kernel is not True:
        raise ValueError(
            "use_qk_l2norm_in_kernel: expected True, as fla has it whatever is given, got "
            f"{use_qk_l2norm_in_kernel!r}"
        )
    g = activated_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound=lower_bound, per_key=True)
    return _precond(
        "keys",
        q,
        k,
        v,
        g,
        beta,
        g_atk,
        beta_atk,
        scale=scale,
        initial_state=initial_state,
        initial_A_state=initial_A_state,
        output_final_state=output_final_state,
        l2=True,
        cu_seqlens=cu_seqlens,
        x=x,
        eps=eps,
        log_atk_scale=log_atk_scale,
        state_v_first=transpose_state_layout,
    )


def fused_recurrent_precond_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    g_atk: Any,
    beta_atk: Any,
    beta: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    initial_A_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = True,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    cu_seqlens: Any = None,
    transpose_state_layout: bool = False,
    x: float = 1.5,
    eps: float = 1e-6,
    log_atk_scale: Any = None,
) -> Results:
    """:func:`chunk_precond_kda`, token by token.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import fused_recurrent_precond_kda
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g, beta = np.full((1, 8, 2, 4), -0.1), np.full((1, 8, 2), 0.5)
    >>> atk = np.full((1, 8, 2), -0.1), beta
    >>> from linattn.compat.fla import chunk_precond_kda
    >>> o, _, _ = fused_recurrent_precond_kda(q, k, v, g, *atk, beta)
    >>> bool(np.allclose(o, chunk_precond_kda(q, k, v, g, *atk, beta)[0]))
    True
    """
    g = activated_gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound=lower_bound, per_key=True)
    return _precond(
        "keys",
        q,
        k,
        v,
        g,
        beta,
        g_atk,
        beta_atk,
        scale=scale,
        initial_state=initial_state,
        initial_A_state=initial_A_state,
        output_final_state=output_final_state,
        l2=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        x=x,
        eps=eps,
        log_atk_scale=log_atk_scale,
        state_v_first=transpose_state_layout,
        mode="recurrent",
    )
