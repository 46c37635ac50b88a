"""flash-linear-attention's functions of states with normalised slots, and of decays of values.

They are a part of fla.py, which has the names and says what is taken.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from linattn import ops
from linattn.compat._fla_arrays import Result, forward, refuse, repeated, state_of
from linattn.features import cast, is_array, is_tensor, library_of, wide

__all__ = [
    "by_value",
    "chunk_abc",
    "chunk_gsa",
    "chunk_lightnet",
    "fused_recurrent_gsa",
    "fused_recurrent_lightnet",
]


def by_value(
    q: Any,
    k: Any,
    v: Any,
    gv: Any,
    *,
    initial_state: Any,
    state_v_first: bool = False,
    **options: Any,
) -> Result:
    """Additive attention with a decay for each component of v: gv [B,T,HV,V], a state [N,HV,K,V].

    The columns of the state do not mix. So each component is a value head of its own, with V = 1
    and a decay of its own. That takes V times the products of one decay a head.
    """
    B, T, HV, V = v.shape
    K = k.shape[3]
    if is_array(initial_state):
        columns = initial_state if state_v_first else initial_state.swapaxes(2, 3)
        initial_state = columns.reshape(-1, HV * V, K, 1)
    o, state = forward(
        ops.simple_gla,
        q,
        k,
        v.reshape(B, T, HV * V, 1),
        gv.reshape(B, T, HV * V),
        initial_state=initial_state,
        **options,
    )
    if state is not None:
        state = state.reshape(state.shape[0], HV, V, K)
        state = state if state_v_first else state.swapaxes(2, 3)
    return o.reshape(B, T, HV, V), state


# ---- keys and gates from scores ----


def _running_sums(x: Any) -> Any:
    """The log of the sums of exp(x) over axis 1, so far."""
    return x.logcumsumexp(1) if is_tensor(x) else np.logaddexp.accumulate(x, axis=1)


def _additive_gate(name: str, x: Any, before: Any, cu_seqlens: Any) -> tuple[Any, Any, Any]:
    """Scores x [B,T,H,K] as what is written, exp(x - z), and as log decays, z before minus z.

    z is the log of the sums of exp(x) so far, and `before` [N,1,H,K] that of the tokens before the
    first. So the weights of all tokens sum to one. The first decay is 1 without a `before`. The
    third result is the last z of each sequence.
    """
    if not (is_tensor(x) or isinstance(x, np.ndarray)):
        raise TypeError(f"{name}: expected an array of NumPy's or PyTorch's, got {type(x)}")
    xp, scores = library_of(x), wide(x)
    before = None if before is None else cast(before, scores.dtype)
    pieces = [(scores, before)]
    if cu_seqlens is not None:
        pieces = [
            (scores[:, start:end], None if before is None else before[n : n + 1])
            for n, (start, end) in enumerate(pairwise(int(edge) for edge in cu_seqlens))
        ]
    sums, decays, last = [], [], []
    for piece, first in pieces:
        if piece.shape[1] == 0:
            nothing = xp.zeros_like(piece.sum(1, keepdims=True)) - np.inf
            last.append(nothing if first is None else first)
            continue
        z = _running_sums(piece if first is None else xp.concatenate([first, piece], 1))
        z, earlier = (z, z[:, :1]) if first is None else (z[:, 1:], first)
        decays.append(xp.concatenate([earlier, z[:, :-1]], 1) - z)
        sums.append(z)
        last.append(z[:, -1:])
    if not sums:
        return x, scores, xp.concatenate(last, 0)
    z = xp.concatenate(sums, 1)
    written = cast(xp.exp(scores - z), x.dtype)
    return written, xp.concatenate(decays, 1), xp.concatenate(last, 0)


def _softmax(x: Any, like: Any) -> Any:
    xp, x = library_of(x), wide(x)
    if is_tensor(x):
        return cast(x.softmax(-1), like.dtype)
    weights = xp.exp(x - x.max(-1, keepdims=True))
    return cast(weights / weights.sum(-1, keepdims=True), like.dtype)


# ---- the functions ----


def _gsa(
    q: Any,
    k: Any,
    v: Any,
    s: Any,
    g: Any,
    scale: Any,
    initial_state: Any,
    **options: Any,
) -> tuple[Any, tuple[Any, Any]]:
    """Reads the keys of the slots, and their values by a softmax over the slots."""
    if g is None:
        s, g, _ = _additive_gate("s", s, None, options.get("cu_seqlens"))
    keys, values = (None, None) if initial_state is None else initial_state
    HQ, H = q.shape[2], k.shape[2]
    groups = HQ // H if H else 1
    if HQ != groups * H:
        raise ValueError(f"q: expected HQ, a multiple of H = {H}, heads, got {HQ}")
    if groups > 1:
        k, v, s, g = (repeated(x, groups, 2) for x in (k, v, s, g))
        keys, values = (None if x is None else repeated(x, groups, 1) for x in (keys, values))
    scores, keys = by_value(q, k, s, g, initial_state=state_of(q, keys), scale=scale, **options)
    o, values = forward(
        ops.gla,
        _softmax(scores, q),
        s,
        v,
        g,
        initial_state=state_of(q, values),
        scale=1.0,
        **options,
    )
    if keys is not None and groups > 1:
        keys, values = keys[:, ::groups], values[:, ::groups]
    return o, (keys, values)


def chunk_gsa(
    q: Any,
    k: Any,
    v: Any,
    s: Any,
    g: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    checkpoint_level: int = 2,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    *,
    chunk_size: int | None = None,
) -> tuple[Any, tuple[Any, Any]]:
    """Gated slot attention: two of our ops, with a softmax over the M slots between them.

    q : array [B,T,HQ,K], k : array [B,T,H,K], v : array [B,T,H,V], s, g : arrays [B,T,H,M]. g has
    the log decays of the slots; without it s has scores, which are divided by their sum so far. The
    state is the pair of arrays [N,H,K,M] and [N,H,M,V], or of None. The first op has a decay for
    each value: it takes M times the products of a decay a head.

    References
    ----------
    Zhang et al., 2024, *Gated Slot Attention for Efficient Linear-Time Sequence Modeling*,
    arXiv:2409.07146.

    Examples
    --------
    With one slot the softmax is 1, and the values are a running sum:

    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_gsa
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> s, g = np.ones((1, 8, 2, 1)), np.zeros((1, 8, 2, 1))
    >>> o, (keys, values) = chunk_gsa(q, k, v, s, g, output_final_state=True)
    >>> bool(np.allclose(o, v.cumsum(1))), keys.shape, values.shape
    (True, (1, 2, 4, 1), (1, 2, 1, 4))
    """
    return _gsa(
        q,
        k,
        v,
        s,
        g,
        scale,
        initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )


def fused_recurrent_gsa(
    q: Any,
    k: Any,
    v: Any,
    s: Any,
    g: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Any = None,
) -> tuple[Any, tuple[Any, Any]]:
    """:func:`chunk_gsa`, token by token.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_gsa, fused_recurrent_gsa
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v), s = rng.standard_normal((3, 1, 8, 2, 4)), rng.standard_normal((1, 8, 2, 3))
    >>> o, _ = fused_recurrent_gsa(q, k, v, s)
    >>> bool(np.allclose(o, chunk_gsa(q, k, v, s)[0]))
    True
    """
    refuse(reverse=reverse)
    return _gsa(
        q,
        k,
        v,
        s,
        g,
        scale,
        initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        mode="recurrent",
    )


def chunk_abc(
    q: Any,
    k: Any,
    v: Any,
    s: Any,
    initial_state: Any = None,
    output_final_state: bool = False,
) -> tuple[Any, Any]:
    """Attention with bounded memory: :func:`chunk_gsa` without g. A state not asked for is None.

    References
    ----------
    Peng et al., 2022, *ABC: Attention with Bounded-memory Control*, arXiv:2110.02488.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_abc, chunk_gsa
    >>> rng = np.random.default_rng(0)
    >>> (q, k, v), s = rng.standard_normal((3, 1, 8, 2, 4)), rng.standard_normal((1, 8, 2, 3))
    >>> o, state = chunk_abc(q, k, v, s)
    >>> bool(np.allclose(o, chunk_gsa(q, k, v, s)[0])), state
    (True, None)
    """
    o, state = _gsa(q, k, v, s, None, None, initial_state, output_final_state=output_final_state)
    return o, state if output_final_state else None


def chunk_lightnet(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
) -> tuple[Any, tuple[Any, Any]]:
    """LightNet: :func:`linattn.gla` of keys that are divided by their sum so far.

    k : array [B,T,H,K] of scores, whose exponentials are the keys. The state is the pair of S
    [N,H,K,V], None if it was not asked for, and the log of the sum of keys [N,1,H,K].

    References
    ----------
    Qin et al., 2024, *You Only Scan Once: Efficient Multi-dimension Sequential Modeling with
    LightNet*, arXiv:2405.21022.

    Examples
    --------
    Equal scores give the mean of the values so far, for each key:

    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_lightnet
    >>> v = np.arange(1.0, 5.0).reshape(1, 4, 1, 1)  # [B,T,H,V]
    >>> q, k = np.ones((2, 1, 4, 1, 1))
    >>> o, (S, z) = chunk_lightnet(q, k, v, scale=1.0)
    >>> o.ravel().round(6).tolist(), S
    ([1.0, 1.5, 2.0, 2.5], None)
    """
    return _lightnet(
        q,
        k,
        v,
        initial_state,
        scale=scale,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )


def fused_recurrent_lightnet(
    q: Any,
    k: Any,
    v: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Any = None,
) -> tuple[Any, tuple[Any, Any]]:
    """:func:`chunk_lightnet`, token by token.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn.compat.fla import chunk_lightnet, fused_recurrent_lightnet
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4))  # [B,T,H,K]
    >>> o, _ = fused_recurrent_lightnet(q, k, v)
    >>> bool(np.allclose(o, chunk_lightnet(q, k, v)[0]))
    True
    """
    return _lightnet(
        q,
        k,
        v,
        initial_state,
        scale=scale,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
        mode="recurrent",
    )


def _lightnet(
    q: Any, k: Any, v: Any, initial_state: Any, *, cu_seqlens: Any, **options: Any
) -> tuple[Any, tuple[Any, Any]]:
    state, before = (None, None) if initial_state is None else initial_state
    k, g, last = _additive_gate("k", k, before, cu_seqlens)
    o, state = forward(ops.gla, q, k, v, g, initial_state=state, cu_seqlens=cu_seqlens, **options)
    return o, (state, last)
