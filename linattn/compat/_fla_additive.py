"""flash-linear-attention's functions of the rules that add to the state.

They are a part of fla.py, which has the names and says what is taken.
"""

from __future__ import annotations

from typing import Any

from linattn import ops
from linattn.compat._fla_arrays import Result, common_dtype, forward, refuse, v_first_of
from linattn.compat._fla_slots import by_value
from linattn.features import is_array

__all__ = [
    "chunk_gla",
    "chunk_lightning_attn",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_simple_gla",
    "fused_chunk_simple_gla",
    "fused_recurrent_gla",
    "fused_recurrent_lightning_attn",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_simple_gla",
    "parallel_retention",
    "parallel_simple_gla",
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


def parallel_retention(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Any = None,
) -> Result:
    """:func:`chunk_retention` in one chunk: time and memory are quadratic in T. No weights come.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_retention, parallel_retention
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> o, weights = parallel_retention(q, k, v)
    >>> bool(np.allclose(o, chunk_retention(q, k, v)[0])), weights
    (True, None)
    """
    refuse(output_attentions=output_attentions)
    return forward(
        ops.retention,
        q,
        k,
        v,
        scale=scale,
        initial_state=None,
        cu_seqlens=cu_seqlens,
        mode="parallel",
    )


def parallel_simple_gla(
    q: Any,
    k: Any,
    v: Any,
    g: Any = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
) -> Result:
    """:func:`chunk_simple_gla` in one chunk: time and memory are quadratic in T. No weights come.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_simple_gla, parallel_simple_gla
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> g = np.full((1, 8, 2), -0.1)
    >>> bool(np.allclose(parallel_simple_gla(q, k, v, g)[0], chunk_simple_gla(q, k, v, g)[0]))
    True
    """
    refuse(output_attentions=output_attentions)
    return _simple_gla(
        "parallel", q, k, v, g, None, scale=scale, initial_state=None, cu_seqlens=cu_seqlens
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
    """:func:`chunk_gla`, token by token: gk [B,T,H,K], gv [B,T,H,V], or no decay.

    A decay of the values takes V times the products of one decay a head. gk and gv together are
    refused.

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
    refuse(reverse=reverse)
    options = {
        "scale": scale,
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "cu_seqlens": cu_seqlens,
        "state_v_first": state_v_first,
    }
    if gv is not None and gk is not None:
        raise ValueError("gv: not supported by linattn.compat.fla beside gk, got an array")
    if gv is not None:
        return by_value(q, k, v, gv, mode="recurrent", **options)
    if gk is None:
        return _simple_gla("recurrent", q, k, v, None, None, **options)
    return forward(ops.gla, q, k, v, gk, mode="recurrent", **options)
