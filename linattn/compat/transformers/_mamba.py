"""Mamba's selective scan and Mamba-2's recurrence, as the layers of transformers call them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from linattn.compat.transformers._shared import either, is_step, refuse_others, state_of
from linattn.composed.ssd import ssd, ssd_step
from linattn.features import cast
from linattn.scans import selective_scan, selective_scan_step

__all__ = [
    "mamba2_chunk_scan",
    "mamba2_selective_state_update",
    "mamba_selective_scan",
    "mamba_selective_state_update",
]


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **others: Any,
) -> Any:
    """:func:`linattn.selective_scan` of arrays [B,D,T], which is not copied for that.

    hidden_states, dt, z [B,D,T], A [D,N], B, C [B,N,T], D, delta_bias [D]. Returns y [B,D,T], or
    (y, state [B,D,N]), the state float32 (float64 for float64 inputs). How transformers would
    compute it makes no difference.

    Examples
    --------
    >>> import torch
    >>> from linattn.compat.transformers import mamba_selective_scan
    >>> x, B = torch.rand(1, 6, 10, dtype=torch.float64), torch.rand(1, 4, 10, dtype=torch.float64)
    >>> A = -torch.rand(6, 4, dtype=torch.float64)
    >>> y, state = mamba_selective_scan(x, x, A, B, B, return_last_state=True)
    >>> tuple(y.shape), tuple(state.shape)
    ((1, 6, 10), (1, 6, 4))
    """
    edges = either(None, others)
    dtype = hidden_states.dtype
    y, state = selective_scan(
        hidden_states.mT,
        cast(dt, dtype).mT,
        A,
        cast(B, dtype).mT,
        cast(C, dtype).mT,
        D=D,
        z=None if z is None else cast(z, dtype).mT,
        delta_bias=delta_bias,
        delta_softplus=delta_softplus,
        output_final_state=return_last_state,
        cu_seqlens=edges,
    )
    return (y.mT, state) if return_last_state else y.mT


def mamba_selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """:func:`linattn.selective_scan_step`: one token, the state changes in place.

    state [B,D,N], hidden_states, dt, z [B,D], A [D,N], B, C [B,N], D, dt_bias [D].

    Examples
    --------
    >>> import torch
    >>> from linattn.compat.transformers import mamba_selective_state_update
    >>> x, B = torch.rand(1, 6), torch.rand(1, 4)
    >>> state = torch.zeros(1, 6, 4)
    >>> y = mamba_selective_state_update(state, x, x, -torch.rand(6, 4), B, B)
    >>> tuple(y.shape), bool(state.any())
    ((1, 6), True)
    """
    refuse_others(others)
    dtype = hidden_states.dtype
    u, dt, B, C = hidden_states, cast(dt, dtype), cast(B, dtype), cast(C, dtype)
    z = None if z is None else cast(z, dtype)
    options: dict[str, Any] = {"D": D, "delta_bias": dt_bias, "delta_softplus": dt_softplus}
    if not is_step(state, u, dt, A, B, C, D, z, dt_bias):
        y, after = selective_scan(
            u[:, None],
            dt[:, None],
            A,
            B[:, None],
            C[:, None],
            z=None if z is None else z[:, None],
            initial_state=state_of(u, state),
            output_final_state=True,
            **options,
        )
        with torch.no_grad():
            state.copy_(after)
        return y[:, 0]
    with torch.no_grad():
        y = selective_scan_step(state, u, dt, A, B, C, z=z, **options)
    return y


def no_shortcut(*_: Any, **__: Any) -> None:
    """None: no kernel does all of a layer at once, and the layer goes on part by part."""


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **others: Any,
) -> Any:
    """:func:`linattn.ssd`, chunk by chunk.

    hidden_states, z [B,T,H,P], dt [B,T,H], A, D, dt_bias [H], B, C [B,T,G,N]. Returns y [B,T,H,P],
    or (y, states [B,H,P,N]), the states float32 (float64 for float64 inputs). chunk_size makes no
    difference: linattn's chunks are its own.

    Examples
    --------
    >>> import torch
    >>> from linattn.compat.transformers import mamba2_chunk_scan
    >>> x, B = torch.rand(1, 10, 4, 3), torch.rand(1, 10, 2, 5)
    >>> y, state = mamba2_chunk_scan(
    ...     x, torch.rand(1, 10, 4), -torch.ones(4), B, B, 256, return_final_states=True
    ... )
    >>> tuple(y.shape), tuple(state.shape)
    ((1, 10, 4, 3), (1, 4, 3, 5))
    """
    dtype = hidden_states.dtype
    y, states = ssd(
        hidden_states,
        dt,
        A,
        cast(B, dtype),
        cast(C, dtype),
        D=D,
        z=None if z is None else cast(z, dtype),
        dt_bias=dt_bias,
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_states=state_of(hidden_states, initial_states),
        return_final_states=return_final_states,
        cu_seqlens=either(None, others),
    )
    return (y, states) if return_final_states else y


def _of_heads(x: Tensor | None, axes: int) -> Tensor | None:
    """x without its last axes, along which its numbers are the same; None if they may differ."""
    if x is None or x.stride()[-axes:] != (0,) * axes:
        return None
    return x[(..., *[0] * axes)]


def mamba2_selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **others: Any,
) -> Tensor:
    """:func:`linattn.ssd_step`: one token, the state changes in place.

    state [B,H,P,N], hidden_states, dt, z [B,H,P], A [H,P,N], B, C [B,G,N], D, dt_bias [H,P]. Where
    a head has one dt, A, D and dt_bias (expanded arrays, as Mamba-2's layers pass them), the state
    is a matrix of Mamba-2; else each channel of it has a selective scan.

    Examples
    --------
    >>> import torch
    >>> from linattn.compat.transformers import mamba2_selective_state_update
    >>> x, B, state = torch.rand(1, 4, 3), torch.rand(1, 2, 5), torch.zeros(1, 4, 3, 5)
    >>> dt, A = torch.rand(1, 4, 1).expand(1, 4, 3), -torch.ones(4, 1, 1).expand(4, 3, 5)
    >>> y = mamba2_selective_state_update(state, x, dt, A, B, B)
    >>> tuple(y.shape), bool(state.any())
    ((1, 4, 3), True)
    """
    dtype = hidden_states.dtype
    head_dt, head_A = _of_heads(dt, 1), _of_heads(A, 2)
    head_D, head_bias = _of_heads(D, 1), _of_heads(dt_bias, 1)
    apart = (head_D is None) != (D is None) or (head_bias is None) != (dt_bias is None)
    if head_dt is None or head_A is None or apart:
        flat = state.flatten(1, 2)
        y = mamba_selective_state_update(
            flat,
            hidden_states.flatten(1),
            dt.flatten(1),
            A.flatten(0, 1),
            B,
            C,
            None if D is None else D.flatten(),
            None if dt_bias is None else dt_bias.flatten(),
            dt_softplus,
            None if z is None else z.flatten(1),
            **others,
        )
        with torch.no_grad():
            state.copy_(flat.view_as(state))
        return y.view_as(hidden_states)
    refuse_others(others)
    B, C, z = cast(B, dtype), cast(C, dtype), None if z is None else cast(z, dtype)
    options: dict[str, Any] = {"D": head_D, "dt_bias": head_bias, "dt_softplus": dt_softplus}
    arrays = (head_dt, head_A, B, C, head_D, head_bias, z)
    if state[0, 0].is_contiguous() and is_step(state, hidden_states, *arrays):
        with torch.no_grad():
            return ssd_step(state, hidden_states, head_dt, head_A, B, C, z=z, **options)
    y, after = ssd(
        hidden_states[:, None],
        head_dt[:, None],
        head_A,
        B[:, None],
        C[:, None],
        z=None if z is None else z[:, None],
        initial_states=state_of(hidden_states, state),
        return_final_states=True,
        **options,
    )
    with torch.no_grad():
        state.copy_(after)
    return y[:, 0]
