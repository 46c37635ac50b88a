"""flash-linear-attention's functions of the delta rules.

They are a part of fla.py, which has the names and says what is taken.
"""

from __future__ import annotations

from typing import Any

from linattn import composed, ops
from linattn.compat._fla_arrays import (
    Result,
    forward,
    ones_if_none,
    refuse,
    repeated,
    v_first_of,
)
from linattn.compat._gates import activated_beta, activated_gate

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn2",
    "chunk_kda",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn2",
    "fused_recurrent_kda",
]


def chunk_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    *,
    chunk_size: int | None = None,
) -> Result:
    """:func:`linattn.delta_rule`; float32 too.

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import chunk_delta_rule
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> beta = np.full((1, 8, 2), 0.5)
    >>> o, _ = chunk_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True)
    >>> np.allclose(o, linattn.delta_rule(q, k, v, beta, qk_l2norm=True)[0])
    True
    """
    return forward(
        ops.delta_rule,
        q,
        k,
        v,
        beta,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )


def fused_recurrent_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    beta: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Any = None,
) -> Result:
    """:func:`chunk_delta_rule`, token by token; beta is 1 by default.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_delta_rule, fused_recurrent_delta_rule
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> o, _ = fused_recurrent_delta_rule(q, k, v, use_qk_l2norm_in_kernel=True)
    >>> ones = np.ones((1, 8, 2))
    >>> np.allclose(o, chunk_delta_rule(q, k, v, ones, use_qk_l2norm_in_kernel=True)[0])
    True
    """
    return forward(
        ops.delta_rule,
        q,
        k,
        v,
        ones_if_none(beta, v),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode="recurrent",
        qk_l2norm=use_qk_l2norm_in_kernel,
    )


def chunk_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    chunk_indices: Any = None,
    cp_context: Any = None,
    *,
    chunk_size: int | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`linattn.gated_delta_rule` with the log decays g [B,T,HV].

    Its other name is ``chunk_gdn``. With ``use_gate_in_kernel`` the log decays are those of
    :func:`linattn.gates.softplus`, from g, ``A_log`` [HV] and ``dt_bias`` [HV]. With
    ``use_beta_sigmoid_in_kernel`` beta is that of :func:`linattn.gates.beta`.

    Examples
    --------
    A state with its value axis first:

    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_gated_delta_rule
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g, beta = np.full((1, 8, 2), -0.1), np.full((1, 8, 2), 0.5)
    >>> options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    >>> _, S = chunk_gated_delta_rule(q, k, v, g, beta, **options)
    >>> _, transposed = chunk_gated_delta_rule(q, k, v, g, beta, state_v_first=True, **options)
    >>> np.allclose(S, transposed.swapaxes(2, 3))
    True
    """
    state_v_first = v_first_of(state_v_first, transpose_state_layout)
    return forward(
        ops.gated_delta_rule,
        q,
        k,
        v,
        activated_gate(g, use_gate_in_kernel, A_log, dt_bias),
        activated_beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        cp_context=cp_context,
        chunk_size=chunk_size,
        qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
    )


def fused_recurrent_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    gk: Any = None,
    gv: Any = None,
    beta: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Any = None,
    dt_bias: Any = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """The gated delta rule, token by token, with decays of heads (g), of keys (gk), both or none.

    g : array [B,T,HV], gk : array [B,T,HV,K], beta : array [B,T,HV], 1 by default. Its other name
    is ``fused_recurrent_gdn``. ``use_gate_in_kernel`` is for g alone, not for gk.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_kda, fused_recurrent_gated_delta_rule
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g, gk, beta = np.full((1, 8, 2), -0.1), -np.abs(k), np.full((1, 8, 2), 0.1)
    >>> o, _ = fused_recurrent_gated_delta_rule(q, k, v, g=g, gk=gk, beta=beta)
    >>> np.allclose(o, chunk_kda(q, k, v, g[..., None] + gk, beta)[0])
    True
    """
    state_v_first = v_first_of(state_v_first, transpose_state_layout)
    refuse(gv=gv)
    g = activated_gate(g, use_gate_in_kernel, A_log, dt_bias)
    beta = activated_beta(ones_if_none(beta, v), use_beta_sigmoid_in_kernel, allow_neg_eigval)
    options = {
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "cu_seqlens": cu_seqlens,
        "mode": "recurrent",
        "o_dtype": getattr(v, "dtype", None),
        "qk_l2norm": use_qk_l2norm_in_kernel,
        "state_v_first": state_v_first,
    }
    if gk is not None:
        gk = gk if g is None else g[..., None] + gk
        return forward(ops.kda, q, k, v, gk, beta, **options)
    if g is not None:
        return forward(ops.gated_delta_rule, q, k, v, g, beta, **options)
    return forward(ops.delta_rule, q, k, v, beta, **options)


def chunk_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    chunk_size: int | None = None,
    A_log: Any = None,
    dt_bias: Any = None,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`linattn.kda` with the log decays g [B,T,HV,K], bounded or not.

    With ``use_gate_in_kernel`` the log decays are those of :func:`linattn.gates.softplus`, from g,
    ``A_log`` [HV] and ``dt_bias`` [HV*K]. With a ``lower_bound`` too they are those of
    :func:`linattn.gates.bounded`. Any bound below 0 will do, and ``A_log`` may be None then.

    Examples
    --------
    Two packed sequences have a state each:

    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_kda
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g, beta = -np.abs(k), np.full((1, 8, 2), 0.1)
    >>> edges = np.array([0, 5, 8])
    >>> _, state = chunk_kda(q, k, v, g, beta, cu_seqlens=edges, output_final_state=True)
    >>> state.shape
    (2, 2, 4, 4)

    Gates and betas from a model's projections:

    >>> from linattn import gates
    >>> A_log, dt_bias = np.zeros(2), np.zeros(8)  # [HV], [HV*K]
    >>> raw = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    >>> o, _ = chunk_kda(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, **raw)
    >>> g, beta = gates.softplus(g, A_log[:, None]), gates.beta(beta)
    >>> np.allclose(o, chunk_kda(q, k, v, g, beta)[0])
    True
    """
    state_v_first = v_first_of(state_v_first, transpose_state_layout)
    refuse(return_intermediate_states=return_intermediate_states)
    return forward(
        ops.kda,
        q,
        k,
        v,
        activated_gate(
            g, use_gate_in_kernel, A_log, dt_bias, lower_bound=lower_bound, per_key=True
        ),
        activated_beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        cp_context=cp_context,
        chunk_size=chunk_size,
        qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
    )


def fused_recurrent_kda(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`chunk_kda`, token by token.

    Examples
    --------
    q, k and v may differ in dtype. o has that of v:

    >>> import numpy as np
    >>> from linattn.compat.fla import fused_recurrent_kda
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g, beta = -np.abs(k), np.full((1, 8, 2), 0.1)
    >>> o, _ = fused_recurrent_kda(q.astype("float32"), k, v.astype("float16"), g, beta)
    >>> o.dtype.name
    'float16'
    """
    state_v_first = v_first_of(state_v_first, transpose_state_layout)
    return forward(
        ops.kda,
        q,
        k,
        v,
        activated_gate(
            g, use_gate_in_kernel, A_log, dt_bias, lower_bound=lower_bound, per_key=True
        ),
        activated_beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode="recurrent",
        o_dtype=getattr(v, "dtype", None),
        qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
    )


def chunk_gdn2(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    b: Any,
    w: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: Any = None,
    *,
    chunk_size: int | None = None,
    A_log: Any = None,
    dt_bias: Any = None,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`linattn.gdn2` with the log decays g and the gates b [B,T,H,K] and w [B,T,H,V].

    The gate's activation is that of :func:`chunk_kda`.

    Examples
    --------
    One number for both gates is :func:`chunk_kda`:

    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_gdn2, chunk_kda
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g, half = -np.abs(k), np.full_like(k, 0.5)
    >>> o, _ = chunk_gdn2(q, k, v, g, half, half, use_qk_l2norm_in_kernel=True)
    >>> want, _ = chunk_kda(q, k, v, g, half[..., 0], use_qk_l2norm_in_kernel=True)
    >>> bool(np.allclose(o, want))
    True
    """
    state_v_first = v_first_of(state_v_first, transpose_state_layout)
    refuse(return_intermediate_states=return_intermediate_states)
    return _gdn2(
        q,
        k,
        v,
        b,
        w,
        activated_gate(
            g, use_gate_in_kernel, A_log, dt_bias, lower_bound=lower_bound, per_key=True
        ),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        cp_context=cp_context,
        chunk_size=chunk_size,
        qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
    )


def fused_recurrent_gdn2(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    b: Any,
    w: Any,
    A_log: Any = None,
    dt_bias: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`chunk_gdn2`, token by token. q and k are repeated if v has more heads.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_gdn2, fused_recurrent_gdn2
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4)) / 2  # [B,T,H,K]
    >>> g, half = -np.abs(k), np.full_like(k, 0.5)
    >>> o, _ = fused_recurrent_gdn2(q, k, v, g, half, half)
    >>> bool(np.allclose(o, chunk_gdn2(q, k, v, g, half, half)[0]))
    True
    """
    state_v_first = v_first_of(state_v_first, transpose_state_layout)
    return _gdn2(
        q,
        k,
        v,
        b,
        w,
        activated_gate(
            g, use_gate_in_kernel, A_log, dt_bias, lower_bound=lower_bound, per_key=True
        ),
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode="recurrent",
        qk_l2norm=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
    )


def _gdn2(q: Any, k: Any, v: Any, b: Any, w: Any, g: Any, **options: Any) -> Result:
    """fla's b is of the value heads, and ours of the heads of q and k."""
    groups = v.shape[2] // q.shape[2] if q.shape[2] else 1
    if groups > 1:
        q, k = repeated(q, groups, 2), repeated(k, groups, 2)
    return forward(composed.gdn2, q, k, v, b, w, g, **options)
