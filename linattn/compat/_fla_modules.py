"""What the layers of flash-linear-attention call besides its ops, by PyTorch's own functions.

Each has the name, the parameters and the defaults of fla's function (fla-core 0.6.0). Norms and
activations are computed in float32 or better, and have the dtype of x.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import gates
from linattn.compat._fla_arrays import group_and_edges, refuse
from linattn.compat.transformers._convolution import causal_conv1d_update as update
from linattn.convolution import causal_conv1d as convolve

__all__ = ["ACTIVATIONS", "FUNCTIONS"]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


# ---- the short convolution ----


def _convolved(x: Tensor, weight: Tensor | None, residual: Tensor | None) -> tuple[Any, Any, Any]:
    """x, weight and residual with all channels in one axis, if they have several."""
    if weight is None:
        raise ValueError("weight: expected a tensor [D,W], got None")
    if x.shape[-1] != weight.shape[0]:
        x = x.flatten(2)
    return x, weight, None if residual is None else residual.reshape(x.shape)


def causal_conv1d(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """x [B,T,D] -> y [B,T,D], and the last W inputs [N,D,W] if asked for.

    Ranks share the tokens if there is a cp_context. As in fla, there is no final state then.
    """
    refuse(seq_idx=seq_idx)
    shape = x.shape
    x, weight, residual = _convolved(x, weight, residual)
    W = weight.shape[1]
    before = None if initial_state is None else initial_state[..., -(W - 1) :] if W > 1 else None
    inputs = (x, weight, bias)
    options: dict[str, Any] = {"activation": activation, "initial_state": before}
    if cp_context is not None:
        if output_final_state:
            raise ValueError("output_final_state: expected False beside cp_context, got True")
        options |= group_and_edges(cp_context, cu_seqlens)
        y, _ = sys.modules["linattn.distributed"].causal_conv1d(*inputs, **options)
    else:
        y, _ = convolve(*inputs, **options, cu_seqlens=cu_seqlens)
    last = None
    if output_final_state:
        if cu_seqlens is None:
            edges = [(n, 0, x.shape[1]) for n in range(x.shape[0])]
        else:
            edges = [(0, int(start), int(end)) for start, end in pairwise(cu_seqlens.tolist())]
        rows = []
        for n, (row, start, end) in enumerate(edges):
            zeros = x.new_zeros(x.shape[2], W)
            older = zeros if initial_state is None else initial_state[n].to(x.dtype)
            rows.append(torch.cat([older, x[row, start:end].mT], -1)[:, -W:])
        last = torch.stack(rows)
    y = y if residual is None else y + residual
    return y.reshape(shape), last


def causal_conv1d_update(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of each sequence, [N,1,D], [1,N,D] or [N,D]. The cache [N,D,W] changes in place."""
    shape = x.shape
    x, weight, residual = _convolved(x, weight, residual)
    token = x.reshape(-1, x.shape[-1], 1)
    y = update(token, cache, weight, bias, activation).reshape(x.shape)
    y = y if residual is None else y + residual
    return y.reshape(shape), cache


def token_shift(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cache: Tensor | None = None,
    output_cache: bool = False,
    chunk_indices: Tensor | None = None,
) -> Any:
    """The token before, minus the token: x [B,T,D]; cache [N,D] or [N,1,D] is before the first."""
    N = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    first = x.new_zeros(N, 1, x.shape[-1]) if cache is None else cache.reshape(N, 1, -1).to(x.dtype)
    if cu_seqlens is None:
        before, last = torch.cat([first, x[:, :-1]], 1), x[:, -1:]
    else:
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        filled = ends > starts
        before = x.roll(1, 1).index_copy(1, starts[filled], first[filled].transpose(0, 1))
        last = torch.where(filled[:, None, None], x[0, (ends - 1).clamp(0)][:, None], first)
    return (before - x, last) if output_cache else before - x


# ---- norms ----


def _norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    prenorm: bool,
    residual_in_fp32: bool,
    rms: bool,
    *,
    groups: int = 1,
    gate: Any = None,
) -> Any:
    """(x + residual) normed by groups of channels, times the gate; the sum too if prenorm."""
    total = _wide(x) if residual is None else _wide(x) + _wide(residual)
    y = total.unflatten(-1, (groups, -1))
    if not rms:
        y = y - y.mean(-1, keepdim=True)
    y = (y * (y.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(-2)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    if gate is not None:
        y = y * gate
    y = y.to(x.dtype)
    if not prenorm:
        return y
    if residual is not None:
        return y, total.to(residual.dtype)
    return y, total if residual_in_fp32 else x


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Any:
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)


def group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Any:
    return _norm(
        x,
        weight,
        bias,
        residual,
        eps,
        prenorm,
        residual_in_fp32,
        is_rms_norm,
        groups=num_groups,
    )


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


def _gate(g: Tensor, activation: str) -> Tensor:
    g = _wide(g)
    if activation in ("swish", "silu"):
        return F.silu(g)
    if activation == "sigmoid":
        return g.sigmoid()
    raise ValueError(f"activation: expected 'swish', 'silu' or 'sigmoid', got {activation!r}")


def layer_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Any:
    gate = _gate(g, activation).reshape(x.shape)
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, False, gate=gate)


def rms_norm_gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Any:
    gate = _gate(g, activation).reshape(x.shape)
    return _norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True, gate=gate)


def _then_linear(y: Any, weight: Tensor, bias: Tensor | None) -> Any:
    """The second half of a norm with a linear layer, whose first half may be a pair."""
    if isinstance(y, tuple):
        return _then_linear(y[0], weight, bias), y[1]
    return F.linear(y.to(weight.dtype), weight, bias)


def layer_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> Any:
    y = _norm(
        x,
        norm_weight,
        norm_bias,
        residual,
        eps,
        prenorm,
        residual_in_fp32,
        is_rms_norm,
        groups=num_groups,
    )
    return _then_linear(y, linear_weight, linear_bias)


def rms_norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> Any:
    y = _norm(x, norm_weight, norm_bias, residual, eps, prenorm, residual_in_fp32, True)
    return _then_linear(y, linear_weight, linear_bias)


def rms_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Any:
    y = rms_norm_gated(
        x, g, norm_weight, norm_bias, "swish", residual, prenorm, residual_in_fp32, eps
    )
    return _then_linear(y, linear_weight, linear_bias)


def layer_norm_swish_gate_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Any:
    y = layer_norm_gated(
        x, g, norm_weight, norm_bias, "swish", residual, prenorm, residual_in_fp32, eps
    )
    return _then_linear(y, linear_weight, linear_bias)


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """Mamba-2's norm, whose gate silu(z) comes behind it or before it."""
    groups = 1 if group_size is None else x.shape[-1] // group_size
    gate = None if z is None else F.silu(_wide(z))
    dtype = x.dtype
    if gate is not None and not norm_before_gate:
        x, gate = _wide(x) * gate, None
    y: Tensor = _norm(
        x, weight, bias, None, eps, False, False, is_rms_norm, groups=groups, gate=gate
    )
    return y.to(dtype)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    y = _wide(x)
    y = y * (y.square().sum(-1, keepdim=True) + eps).rsqrt()
    return y.to(x.dtype if output_dtype is None else output_dtype)


# ---- activations ----


def elu_p1(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def logsigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    return F.logsigmoid(x) / temperature


def sqrelu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def fast_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def bias_gelu(y: Tensor, bias: Tensor) -> Tensor:
    return fast_gelu(y + bias)


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def swiglu_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(swiglu(x, y), weight, bias)


# ---- positions ----


def rotary_embedding(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
) -> Tensor:
    """x [B,T,H,D] turned by the angles of its positions: cos, sin [TR,R/2]. Never in place."""
    B, T = x.shape[:2]
    R = 2 * cos.shape[-1]
    positions = torch.arange(T, device=x.device)[None].expand(B, T)
    offsets = torch.as_tensor(seqlen_offsets, device=x.device)
    if cu_seqlens is None:
        positions = positions + offsets.reshape(-1, 1)
    else:
        starts = cu_seqlens[:-1].long()
        number = torch.searchsorted(cu_seqlens[1:].long(), positions[0].contiguous(), right=True)
        positions = positions - starts[number]
        positions = positions + (offsets[number] if offsets.dim() else offsets)
    c, s = (_wide(table)[positions][:, :, None] for table in (cos, sin))
    turned, rest = _wide(x[..., :R]), x[..., R:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        y = torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        y = torch.cat([a * c - b * s, a * s + b * c], -1)
    return torch.cat([y.to(x.dtype), rest], -1)


# ---- RWKV-7's and KDA's ----


def fused_addcmul_rwkv7(
    hidden_states: Tensor,
    delta: Tensor,
    xr: Tensor,
    xw: Tensor,
    xk: Tensor,
    xv: Tensor,
    xa: Tensor,
    xg: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    return tuple(
        None if mix is None else hidden_states + delta * mix for mix in (xr, xw, xk, xv, xa, xg)
    )


def fused_k_rwkv7(
    k: Tensor, a: Tensor, ka: Tensor, cu_seqlens: Any = None, cu_seqlens_cpu: Any = None
) -> Tensor:
    return k + k * (a - 1) * ka


def gate_output_correction(
    o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor
) -> Tensor:
    seen = (r * k * r_k).sum(-1, keepdim=True) * v
    return (o + seen.reshape(o.shape)) * g


def fused_kda_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Any:
    """g [...,HV,K] as log decays; A_log has HV numbers, dt_bias HV * K."""
    if A_log is not None:
        A_log = A_log.reshape(-1, 1)
    if dt_bias is not None:
        dt_bias = dt_bias.reshape(g.shape[-2:])
    if lower_bound is None:
        return gates.softplus(g, A_log, dt_bias).to(output_dtype)
    return gates.bounded(g, A_log, dt_bias, lower_bound).to(output_dtype)


# The names of fla's functions; where a layer has the apply of an autograd function, its class's.
FUNCTIONS = {
    function.__name__: function
    for function in (
        causal_conv1d,
        causal_conv1d_update,
        elu_p1,
        fused_addcmul_rwkv7,
        fused_k_rwkv7,
        fused_kda_gate,
        gate_output_correction,
        group_norm,
        l2norm,
        layer_norm,
        layer_norm_gated,
        layer_norm_linear,
        layer_norm_swish_gate_linear,
        layernorm_fn,
        logsigmoid,
        rms_norm,
        rms_norm_gated,
        rms_norm_linear,
        rms_norm_swish_gate_linear,
        rmsnorm_fn,
        rotary_embedding,
        swiglu_linear,
        token_shift,
    )
} | {
    "FastGeLUFunction": fast_gelu,
    "GeLUFunction": bias_gelu,
    "SigmoidFunction": torch.sigmoid,
    "SquaredReLUFunction": sqrelu,
    "SwiGLUFunction": swiglu,
    "SwishFunction": F.silu,
}

# fla's dict ACT2FN.
ACTIVATIONS = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "logsigmoid": logsigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "sqrelu": sqrelu,
    "gelu": fast_gelu,
    "bias_gelu": bias_gelu,
}
