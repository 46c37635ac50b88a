"""One token of a layer of the gated delta rule, KDA or Mamba-2, in one call of linattn.layer_step.

The layers have forward methods of their own, with functions of ours in them. For one token with a
cache all between the first matrices of a layer and its last is one call. Any other call, and each
that PyTorch records or compiles, goes through the layer's own method.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linattn.compat.transformers._shared import FOR_OTHERS
from linattn.layers import layer_step

__all__ = ["decoding"]


class _Projected(NamedTuple):
    """The projections of a token [B,...], and the arguments of layer_step for its gates."""

    qkv: tuple[Tensor, Tensor, Tensor]
    output_gate: Tensor
    arguments: dict[str, Any]


class _Kind(NamedTuple):
    """A kind of layer: its op, its projections, and the names of its norm and its last matrix."""

    op: str
    project: Callable[[Any, Tensor], _Projected]
    norm: str
    last: str
    attributes: tuple[str, ...]  # besides conv1d and these two
    channels: str = "qkv"  # the order in which the convolution has them


# ---- the delta rules ----


def _softplus(layer: Any, a: Tensor, b: Tensor) -> dict[str, Any]:
    return {
        "qk_l2norm": True,
        "g": a,
        "decay": "softplus",
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "beta": b,
        "sigmoid_beta": True,
        "allow_neg_eigval": bool(getattr(layer, "allow_neg_eigval", False)),
    }


def _qwen3_next(layer: Any, x: Tensor) -> _Projected:
    both = layer.in_proj_qkvz(x[:, None]), layer.in_proj_ba(x[:, None])
    q, k, v, z, b, a = (y[:, 0].flatten(1) for y in layer.fix_query_key_value_ordering(*both))
    return _Projected((q, k, v), z, _softplus(layer, a, b))


def _qwen3_5(layer: Any, x: Tensor) -> _Projected:
    sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
    q, k, v = layer.in_proj_qkv(x).split(sizes, -1)
    gates = _softplus(layer, layer.in_proj_a(x), layer.in_proj_b(x))
    return _Projected((q, k, v), layer.in_proj_z(x), gates)


def _olmo_hybrid(layer: Any, x: Tensor) -> _Projected:
    gates = _softplus(layer, layer.a_proj(x), layer.b_proj(x))
    return _Projected((layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)), layer.g_proj(x), gates)


def _kimi_linear(layer: Any, x: Tensor) -> _Projected:
    arguments = {
        "qk_l2norm": True,
        "g": layer.forget_gate(x[:, None])[:, 0].flatten(1),
        "beta": layer.b_proj(x),
        "sigmoid_beta": True,
    }
    qkv = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    return _Projected(qkv, layer.g_b_proj(layer.g_a_proj(x)), arguments)


# ---- Mamba-2 ----


def _mamba2(layer: Any, x: Tensor) -> _Projected:
    """C, B and x of a head are q, k and v, and the step dt makes the decay and weighs x."""
    mup = getattr(layer, "mup_vector", None)  # of Falcon-H1
    y = layer.in_proj(x if mup is None else x * layer.ssm_in_multiplier)
    y = y if mup is None else y * mup.flatten()
    groups = layer.n_groups * layer.ssm_state_size
    sizes = [layer.intermediate_size, layer.intermediate_size, groups, groups, layer.num_heads]
    gate, v, k, q, dt = y.split(sizes, -1)
    arguments = {
        "scale": 1.0,
        "state_v_first": True,
        "g": dt,
        "decay": "softplus",
        "weigh": True,
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "skip": layer.D,
    }
    return _Projected((q, k, v), gate, arguments)


_GATES = ("A_log", "dt_bias", "layer_idx", "activation")
_QWEN3_5 = _Kind(
    "gated_delta_rule",
    _qwen3_5,
    "norm",
    "out_proj",
    (*_GATES, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "key_dim", "value_dim"),
)
_SIZES = ("n_groups", "ssm_state_size", "intermediate_size", "num_heads")
_MAMBA2 = _Kind(
    "simple_gla", _mamba2, "norm", "out_proj", (*_GATES, *_SIZES, "in_proj", "D"), channels="vkq"
)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "b_proj")
_KINDS = {
    "Qwen3NextGatedDeltaNet": _Kind(
        "gated_delta_rule",
        _qwen3_next,
        "norm",
        "out_proj",
        (*_GATES, "in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering"),
    ),
    "Qwen3_5GatedDeltaNet": _QWEN3_5,
    "Qwen3_5MoeGatedDeltaNet": _QWEN3_5,
    "OlmoHybridGatedDeltaNet": _Kind(
        "gated_delta_rule",
        _olmo_hybrid,
        "o_norm",
        "o_proj",
        (*_GATES, *_PROJECTIONS, "a_proj", "g_proj", "allow_neg_eigval"),
    ),
    "KimiLinearDeltaAttention": _Kind(
        "kda",
        _kimi_linear,
        "o_norm",
        "o_proj",
        ("layer_idx", "activation", *_PROJECTIONS, "forget_gate", "g_a_proj", "g_b_proj"),
    ),
    "Mamba2Mixer": _MAMBA2,
    "BambaMixer": _MAMBA2,
    "FalconH1Mixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
    "Zamba2MambaMixer": _MAMBA2,
}
_PARAMETERS = ("hidden_states", "cache", "attention_mask")


def _kind_of(layer: nn.Module) -> _Kind | None:
    """None for a layer that another version of transformers has made otherwise, too."""
    kind = _KINDS.get(type(layer).__name__)
    if kind is None or not type(layer).__module__.startswith("transformers.models."):
        return None
    there = all(hasattr(layer, name) for name in ("conv1d", kind.last, *kind.attributes))
    return kind if there and _norm_arguments(layer, kind) is not None else None


def _norm_arguments(layer: Any, kind: _Kind) -> dict[str, Any] | None:
    """The arguments of layer_step for the norm; None for a norm that is another."""
    if not getattr(layer, "mamba_rms_norm", True):  # Falcon-H1 may have none
        return {}
    norm: Any = getattr(layer, kind.norm, None)
    if not all(hasattr(norm, name) for name in ("weight", "variance_epsilon")):
        return None
    arguments = {"norm_weight": norm.weight, "norm_eps": norm.variance_epsilon}
    if hasattr(norm, "activation"):
        return arguments | {"output_activation": norm.activation}
    if hasattr(norm, "group_size"):
        groups = norm.weight.shape[0] // norm.group_size
        return arguments | {"norm_groups": groups, "gate_first": True}
    if hasattr(norm, "n_groups") and hasattr(norm, "norm_before_gate"):
        return arguments | {"norm_groups": norm.n_groups, "gate_first": not norm.norm_before_gate}
    return None


class _States(NamedTuple):
    conv: Tensor  # [B,D,W-1], the last inputs, or older ones too
    recurrent: Tensor


def _has_hooks(module: nn.Module) -> bool:
    """Does a call of this module run more than its forward method?"""
    return bool(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"))


def _states_of(layer: Any, kind: _Kind, x: Tensor, cache: Any) -> _States | None:
    """The states that a step can write in place; None if the layer's own method has to."""
    if _has_hooks(layer.conv1d) or _has_hooks(getattr(layer, kind.norm)):
        return None
    recording = getattr(cache, "is_recording_past", None)
    if recording is not None and recording(layer.layer_idx):
        return None
    conv = cache.get_conv_state(layer.layer_idx, state_idx=0)
    recurrent = cache.get_recurrent_state(layer.layer_idx, state_idx=0)
    if conv is None or recurrent is None:
        return None
    real = torch.float64 if x.dtype == torch.float64 else torch.float32
    fits = (
        conv.shape[2] >= layer.conv1d.kernel_size[0] - 1
        and conv.dtype in (x.dtype, real)
        and recurrent.dtype == real
        and recurrent.stride(-1) == 1
        and conv.device == recurrent.device == x.device
    )
    return _States(conv, recurrent) if fits else None


def _decoded(layer: Any, kind: _Kind, x: Tensor, states: _States) -> Tensor:
    """x [B,D] -> y [B,D]. The states move on."""
    projected = kind.project(layer, x)
    rows = dict(zip("qkv", projected.qkv, strict=True))
    sizes = [rows[name].shape[1] for name in kind.channels]
    weights = layer.conv1d.weight.split(sizes)
    bias = layer.conv1d.bias
    biases = (None,) * 3 if bias is None else bias.split(sizes)
    parts = zip(kind.channels, weights, biases, states.conv.split(sizes, 1), strict=True)
    convolutions: dict[str, Any] = {f"{name}_conv": tuple(arrays) for name, *arrays in parts}
    y = layer_step(
        kind.op,
        **rows,
        state=states.recurrent,
        **convolutions,
        output_gate=projected.output_gate,
        **(_norm_arguments(layer, kind) or {}),
        **projected.arguments,
    )
    return getattr(layer, kind.last)(y)


def _is_plain(layer: Any, kind: _Kind) -> bool:
    """Are the activations those that linattn has?"""
    norm = _norm_arguments(layer, kind) or {}
    return layer.activation in ("silu", "swish") and norm.get("output_activation", "silu") in (
        "silu",
        "sigmoid",
    )


def decoding(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function of the layer's forward method, where one token is one call.

    None for a layer that has no such call. `forward` is that function with ours in it.
    """
    kind = _kind_of(layer)
    if kind is None or not _is_plain(layer, kind):
        return None

    @functools.wraps(forward)
    def call(self: Any, *args: Any, **keywords: Any) -> Any:
        given = dict(zip(_PARAMETERS, args, strict=False)) | keywords
        x, cache, mask = (given.pop(name, None) for name in _PARAMETERS)
        if (
            x is not None
            and x.shape[1] == 1
            and cache is not None
            and mask is None
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and all(value is None or name in FOR_OTHERS for name, value in given.items())
        ):
            states = _states_of(self, kind, x, cache)
            if states is not None:
                return _decoded(self, kind, x[:, 0], states)[:, None]
        return forward(self, *args, **keywords)

    return call
