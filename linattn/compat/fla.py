"""flash-linear-attention's functions, computed by linattn.

The ops under the names of ``fla.ops`` (fla-core 0.6.0): the same arguments in the same order
with the same defaults, arrays [B,T,H,K] and [B,T,HV,V], log decays, states [N,HV,K,V]::

    from linattn.compat.fla import chunk_gated_delta_rule

    o, state = chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=True)

``chunk_*`` work chunk by chunk, ``fused_recurrent_*`` token by token. Arguments that change how fla
computes but not what (``cu_seqlens_cpu``, ``chunk_indices``, ``safe_gate``, ``disable_recompute``,
``use_graph``, ``max_num_seqs``) are taken and not needed. Whatever else differs from its default
and is not supported raises a ValueError; nothing is ignored in silence. A state that was not asked
for is None. ``transpose_state_layout``, fla's old name of ``state_v_first``, is taken with a
DeprecationWarning.

Gates and betas before their activation (``use_gate_in_kernel``, ``use_beta_sigmoid_in_kernel``) go
through :mod:`linattn.gates` first, in float32 (float64 for float64 g). ``A_log``, ``dt_bias`` or
``lower_bound`` without ``use_gate_in_kernel=True``, which fla does not look at, raise a ValueError.

An initial state may be float64, float32, float16 or bfloat16, whatever the dtype of q; fla's
``chunk_gla`` and ``chunk_kda`` insist on float32. A final state is float32, and float64 if q is.
In ``fused_recurrent_*`` q, k and v may differ in dtype; one that is float64 is enough for a float64
state then. o has the dtype of v in the gated delta rule and in ``kda``, and that of q elsewhere.
"""

from __future__ import annotations

from typing import Any

from linattn import ops
from linattn.compat._fla_arrays import (
    Result,
    common_dtype,
    forward,
    ones_if_none,
    refuse,
    v_first_of,
)
from linattn.compat._fla_rules import (
    chunk_comba,
    chunk_dplr_delta_rule,
    chunk_gated_delta_product,
    chunk_iplr_delta_rule,
    chunk_rwkv6,
    chunk_rwkv7,
    fused_mul_recurrent_rwkv7,
    fused_recurrent_comba,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_iplr_delta_rule,
    fused_recurrent_rwkv6,
    fused_recurrent_rwkv7,
)
from linattn.compat._fla_scans import chunk_hgrn, fused_recurrent_hgrn
from linattn.compat._gates import activated_beta, activated_gate
from linattn.features import is_array

__all__ = [
    "chunk_comba",
    "chunk_delta_rule",
    "chunk_dplr_delta_rule",
    "chunk_gated_delta_product",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_hgrn",
    "chunk_iplr_delta_rule",
    "chunk_kda",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_rwkv6",
    "chunk_rwkv7",
    "chunk_simple_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_mul_recurrent_rwkv7",
    "fused_recurrent_comba",
    "fused_recurrent_delta_rule",
    "fused_recurrent_dplr_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gla",
    "fused_recurrent_hgrn",
    "fused_recurrent_iplr_delta_rule",
    "fused_recurrent_kda",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_rwkv6",
    "fused_recurrent_rwkv7",
    "fused_recurrent_simple_gla",
]


def chunk_linear_attn(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Any = None,
) -> Result:
    """:func:`linattn.linear_attention` of q and k as they are.

    `normalize` divides by scale * z' q + 1e-10; the state is then the pair (S [N,H,K,V], z
    [N,1,H,K]).

    Examples
    --------
    A feature map is the caller's to apply:

    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import chunk_linear_attn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> q, k = linattn.apply_feature_map(q), linattn.apply_feature_map(k)
    >>> o, (S, z) = chunk_linear_attn(q, k, v, output_final_state=True)
    >>> S.shape, z.shape
    ((1, 2, 4, 4), (1, 1, 2, 4))
    """
    return _linear(
        "chunk", q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens
    )


def fused_recurrent_linear_attn(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Any = None,
) -> Result:
    """:func:`chunk_linear_attn`, token by token and, by default, not normalised.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_linear_attn, fused_recurrent_linear_attn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> o, state = fused_recurrent_linear_attn(q, k, v)
    >>> np.allclose(o, chunk_linear_attn(q, k, v, normalize=False)[0]), state is None
    (True, True)
    """
    refuse(reverse=reverse)
    return _linear(
        "recurrent", q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens
    )


def _pair(state: Any) -> Any:
    """(S, z) as linattn takes it, z [N,H,K]; fla's z is [N,1,H,K]."""
    if not isinstance(state, tuple) or len(state) != 2:
        got = f"a tuple of {len(state)}" if isinstance(state, tuple) else str(type(state))
        raise ValueError(
            f"initial_state: expected the pair (S, z) of a normalised state, got {got}"
        )
    S, z = state
    if not is_array(z):
        raise TypeError(f"initial_state[1]: expected an array, got {type(z)}")
    if len(z.shape) != 4 or z.shape[1] != 1:
        raise ValueError(f"initial_state[1]: expected [N,1,H,K], got {tuple(z.shape)}")
    return S, z.reshape(z.shape[0], *z.shape[2:])


def _linear(
    mode: str,
    q: Any,
    k: Any,
    v: Any,
    scale: float | None,
    initial_state: Any,
    output_final_state: bool,
    normalize: bool,
    cu_seqlens: Any,
) -> Result:
    if normalize and initial_state is not None:
        initial_state = _pair(initial_state)
    o, state = forward(
        ops.linear_attention,
        q,
        k,
        v,
        feature_map="identity",
        normalize="add" if normalize else False,
        eps=1e-10,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode=mode,
        o_dtype=common_dtype(q, k) if normalize else None,  # fla's o has it from the division
    )
    if normalize and state is not None:
        S, z = state
        state = S, z.reshape(z.shape[0], 1, *z.shape[1:])
    return o, state


def chunk_retention(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    *,
    chunk_size: int | None = None,
) -> Result:
    """:func:`linattn.retention` with RetNet's decays, 1 - 2**(-5 - h).

    Examples
    --------
    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import chunk_retention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> o, state = chunk_retention(q, k, v, output_final_state=True)
    >>> np.allclose(o, linattn.retention(q, k, v)[0]), state.shape
    (True, (1, 2, 4, 4))
    """
    return forward(
        ops.retention,
        q,
        k,
        v,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )


def fused_recurrent_retention(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`chunk_retention`, token by token.

    Examples
    --------
    A prompt in chunks, and the next token:

    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_retention, fused_recurrent_retention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> _, state = chunk_retention(q[:, :7], k[:, :7], v[:, :7], output_final_state=True)
    >>> last = q[:, 7:], k[:, 7:], v[:, 7:]
    >>> o, _ = fused_recurrent_retention(*last, initial_state=state)
    >>> np.allclose(o, chunk_retention(q, k, v)[0][:, 7:])
    True
    """
    state_v_first = v_first_of(state_v_first, transpose_state_layout)
    refuse(reverse=reverse)
    return forward(
        ops.retention,
        q,
        k,
        v,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode="recurrent",
        state_v_first=state_v_first,
    )


def chunk_lightning_attn(
    q: Any,
    k: Any,
    v: Any,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    *,
    chunk_size: int | None = None,
) -> Result:
    """:func:`linattn.lightning_attention`, slopes 8 h / H * (1 - layer_idx / num_layers).

    Examples
    --------
    The slopes are those of TransNormerLLM:

    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import chunk_lightning_attn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> o, _ = chunk_lightning_attn(q, k, v, layer_idx=1, num_layers=4)
    >>> slopes = linattn.lightning_slopes(2, layer=1, layers=4, rule="transnormer")
    >>> np.allclose(o, linattn.lightning_attention(q, k, v, slopes)[0])
    True
    """
    slopes = ops.lightning_slopes(
        q.shape[2], layer=layer_idx, layers=num_layers, rule="transnormer"
    )
    return forward(
        ops.lightning_attention,
        q,
        k,
        v,
        slopes,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )


def fused_recurrent_lightning_attn(
    q: Any,
    k: Any,
    v: Any,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Any = None,
) -> Result:
    """:func:`chunk_lightning_attn`, token by token.

    Examples
    --------
    Head 0 has slope 0 in every layer and forgets nothing:

    >>> import numpy as np
    >>> from linattn.compat.fla import fused_recurrent_lightning_attn, fused_recurrent_linear_attn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> o, _ = fused_recurrent_lightning_attn(q, k, v, layer_idx=1, num_layers=4)
    >>> without, _ = fused_recurrent_linear_attn(q, k, v)
    >>> np.allclose(o[:, :, 0], without[:, :, 0]), np.allclose(o[:, :, 1], without[:, :, 1])
    (True, False)
    """
    refuse(reverse=reverse)
    slopes = ops.lightning_slopes(
        q.shape[2], layer=layer_idx, layers=num_layers, rule="transnormer"
    )
    return forward(
        ops.lightning_attention,
        q,
        k,
        v,
        slopes,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode="recurrent",
    )


def chunk_simple_gla(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    g_gamma: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    *,
    chunk_size: int | None = None,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`linattn.simple_gla` with the log decays g [B,T,H], g_gamma [H], their sum, or none.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_simple_gla
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g, g_gamma = -rng.uniform(0, 1, (1, 8, 2)), np.array([-0.1, -0.2])
    >>> o, _ = chunk_simple_gla(q, k, v, g, g_gamma)
    >>> np.allclose(o, chunk_simple_gla(q, k, v, g + g_gamma)[0])
    True
    """
    state_v_first = v_first_of(state_v_first, transpose_state_layout)
    return _simple_gla(
        "chunk",
        q,
        k,
        v,
        g,
        g_gamma,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        state_v_first=state_v_first,
    )


def fused_chunk_simple_gla(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    g_gamma: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
) -> Result:
    """:func:`chunk_simple_gla`, with the fewer arguments that fla's has.

    Examples
    --------
    Without a gate it is linear attention without a feature map and a normaliser:

    >>> import numpy as np, linattn
    >>> from linattn.compat.fla import fused_chunk_simple_gla
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> o, _ = fused_chunk_simple_gla(q, k, v, scale=1)
    >>> np.allclose(o, linattn.attend(q, k, v))
    True
    """
    return _simple_gla(
        "chunk",
        q,
        k,
        v,
        g,
        g_gamma,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )


def fused_recurrent_simple_gla(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    g_gamma: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`chunk_simple_gla`, token by token.

    Examples
    --------
    An argument that is not supported is refused:

    >>> import numpy as np
    >>> from linattn.compat.fla import fused_recurrent_simple_gla
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> fused_recurrent_simple_gla(q, k, v, reverse=True)
    Traceback (most recent call last):
        ...
    ValueError: reverse: not supported by linattn.compat.fla, got True
    """
    state_v_first = v_first_of(state_v_first, transpose_state_layout)
    refuse(reverse=reverse)
    return _simple_gla(
        "recurrent",
        q,
        k,
        v,
        g,
        g_gamma,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
    )


def _simple_gla(mode: str, q: Any, k: Any, v: Any, g: Any, g_gamma: Any, **options: Any) -> Result:
    if g is not None:
        g = g if g_gamma is None else g + g_gamma
        return forward(ops.simple_gla, q, k, v, g, mode=mode, **options)
    if g_gamma is not None:
        return forward(ops.lightning_attention, q, k, v, -g_gamma, mode=mode, **options)
    return forward(
        ops.linear_attention, q, k, v, feature_map="identity", normalize=False, mode=mode, **options
    )


def chunk_gla(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`linattn.gla` with the log decays g [B,T,H,K].

    Examples
    --------
    A state of float16, as fla takes it. The final state is float32:

    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_gla
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> q, k, v, g = (x.astype("float32") for x in (q, k, v, -np.abs(k)))
    >>> o, state = chunk_gla(
    ...     q, k, v, g, initial_state=np.ones((1, 2, 4, 4), "float16"), output_final_state=True
    ... )
    >>> o.dtype.name, state.dtype.name
    ('float32', 'float32')
    """
    state_v_first = v_first_of(state_v_first, transpose_state_layout)
    return forward(
        ops.gla,
        q,
        k,
        v,
        g,
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        state_v_first=state_v_first,
    )


def fused_recurrent_gla(
    q: Any,
    k: Any,
    v: Any,
    gk: Any = None,
    gv: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
    *,
    transpose_state_layout: bool | None = None,
) -> Result:
    """:func:`chunk_gla`, token by token: gk [B,T,H,K], or no decay.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_gla, fused_recurrent_gla
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g = -np.abs(k)
    >>> np.allclose(fused_recurrent_gla(q, k, v, g)[0], chunk_gla(q, k, v, g)[0])
    True
    >>> np.allclose(fused_recurrent_gla(q, k, v)[0], chunk_gla(q, k, v, 0 * g)[0])
    True
    """
    state_v_first = v_first_of(state_v_first, transpose_state_layout)
    refuse(gv=gv, reverse=reverse)
    options = {
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "cu_seqlens": cu_seqlens,
        "state_v_first": state_v_first,
    }
    if gk is None:
        return _simple_gla("recurrent", q, k, v, None, None, **options)
    return forward(ops.gla, q, k, v, gk, mode="recurrent", **options)


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
    refuse(cp_context=cp_context)
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
    refuse(return_intermediate_states=return_intermediate_states, cp_context=cp_context)
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


# fla has these as kernels of their own: the same results
fused_chunk_linear_attn = chunk_linear_attn
fused_chunk_retention = chunk_retention
chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
