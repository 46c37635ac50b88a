"""The layers of a model that have such functions, and what takes their place."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from linattn.compat._replace import Replacement, Table
from linattn.compat.transformers import _layers
from linattn.compat.transformers._convolution import causal_conv1d_fn, causal_conv1d_update
from linattn.compat.transformers._decode import decoding
from linattn.compat.transformers._delta import (
    chunk_gated_delta_rule,
    chunk_kda,
    recurrent_gated_delta_rule,
    recurrent_kda,
)
from linattn.compat.transformers._mamba import (
    mamba2_chunk_scan,
    mamba2_selective_state_update,
    mamba_selective_scan,
    mamba_selective_state_update,
    no_shortcut,
)
from linattn.compat.transformers._rwkv import rwkv_linear_attention

__all__ = ["Replacement", "use_linattn"]

# ---- which functions a layer has ----

_DELTA = ("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
_SCAN = ("dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state")
_CHUNKS = ("dt", "A", "B", "C", "D", "dt_bias", "initial_states", "dt_softplus", "dt_limit")
_CONVOLVE = ("weight", "bias", "activation")
_UPDATE = ("hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z")


class _Ours(NamedTuple):
    function: Callable[..., Any]
    first: tuple[str, ...]  # parameters that come by position, under any names
    parameters: tuple[str, ...]


_QKV = ("query", "key", "value")
_WKV = ("time_decay", "time_first", "key", "value")
_OURS = {
    "chunk_gated_delta_rule": _Ours(chunk_gated_delta_rule, _QKV, _DELTA),
    "recurrent_gated_delta_rule": _Ours(recurrent_gated_delta_rule, _QKV, _DELTA),
    "chunk_kda": _Ours(chunk_kda, _QKV, _DELTA),
    "recurrent_kda": _Ours(recurrent_kda, _QKV, _DELTA),
    "chunk_kimi_delta_attention": _Ours(chunk_kda, _QKV, _DELTA),
    "recurrent_kimi_delta_attention": _Ours(recurrent_kda, _QKV, _DELTA),
    "mamba_selective_scan": _Ours(mamba_selective_scan, ("hidden_states",), _SCAN),
    "mamba_selective_state_update": _Ours(mamba_selective_state_update, ("state",), _UPDATE),
    "mamba_inner_fn": _Ours(no_shortcut, ("xz",), ("conv1d_weight", "conv1d_bias")),
    "mamba2_chunk_scan": _Ours(mamba2_chunk_scan, ("hidden_states",), _CHUNKS),
    "mamba2_selective_state_update": _Ours(mamba2_selective_state_update, ("state",), _UPDATE),
    "mamba2_split_conv1d_scan_combined": _Ours(
        no_shortcut, ("zxbcdt",), ("conv1d_weight", "conv1d_bias")
    ),
    "rwkv_linear_attention": _Ours(rwkv_linear_attention, _WKV, ("state", "return_state")),
    "causal_conv1d_fn": _Ours(causal_conv1d_fn, ("hidden_states",), _CONVOLVE),
    "causal_conv1d_update": _Ours(causal_conv1d_update, ("hidden_states", "conv_state"), _CONVOLVE),
}
_NAME = re.compile(f"(?:.*_)?({'|'.join(_OURS)})")


def _replacement(name: str, function: Any) -> Callable[..., Any] | None:
    """Ours for what a layer calls by this name; None if it is something else.

    Raises ValueError if only the name is right.
    """
    words = _NAME.fullmatch(name)
    if words is None or not callable(function):
        return None
    ours = _OURS[words.group(1)]
    given = inspect.signature(getattr(function, "forward", function)).parameters  # a module's
    missing = [p for p in ours.parameters if p not in given]
    if missing or len(given) < len(ours.first) + len(ours.parameters):
        raise ValueError(
            f"{name}: expected a function ({', '.join((*ours.first, *ours.parameters))}), "
            f"got ({', '.join(given)})"
        )
    return _with_their_names(ours.function, list(given)[: len(ours.first)])


def _with_their_names(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """The function, whose first parameters have these names for callers that give them by name."""
    ours = dict(zip(names, inspect.signature(function).parameters, strict=False))
    if all(their == our for their, our in ours.items()):
        return function

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return function(*args, **{ours.get(name, name): x for name, x in keywords.items()})

    return call


# ---- which layers have their recurrence in a method ----


class _Layer(NamedTuple):
    """A layer is known by the end of its class's name, and must have these attributes."""

    forward: Callable[..., Any]
    attributes: tuple[str, ...]


_LAYERS = {
    "LightningAttention": _Layer(
        _layers.lightning_attention,
        (
            "qkv_proj",
            "act_fn",
            "norm",
            "output_gate",
            "out_proj",
            "slope_rate",
            "num_attention_heads",
            "head_dim",
            "layer_idx",
        ),
    ),
    "LSTMBackend": _Layer(_layers.matrix_lstm, ("config",)),
    "Rglru": _Layer(
        _layers.real_gated_lru,
        (
            "recurrent_param",
            "recurrent_gate_weight",
            "recurrent_gate_bias",
            "input_gate_weight",
            "input_gate_bias",
            "recurrent_states",
        ),
    ),
}


# transformers has renamed a parameter: the new name, and the old one. A layer has one of the two.
_CALLED_BEFORE = {"cache": "past_key_values"}


def _forward_of(layer: nn.Module) -> Callable[..., Any] | None:
    """Ours for a layer with its recurrence in its forward; None if it is another layer.

    Raises ValueError if only the name is right.
    """
    kind = type(layer).__name__
    ours = next((x for end, x in _LAYERS.items() if kind.endswith(end)), None)
    if ours is None:
        return None
    missing = [name for name in ours.attributes if not hasattr(layer, name)]
    names = [
        name
        for name in list(inspect.signature(ours.forward).parameters)[1:]
        if name not in _CALLED_BEFORE.values()
    ]
    given = inspect.signature(layer.forward).parameters
    unknown = [
        name
        for name in names
        if name not in given and _CALLED_BEFORE.get(name) not in given and name != "others"
    ]
    if missing or unknown:
        raise ValueError(
            f"{kind}: expected a layer with {', '.join(ours.attributes)} and forward("
            f"{', '.join(names)}), which lacks {', '.join(missing + unknown)}"
        )
    return ours.forward


def _is_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def _expected(model: nn.Module) -> str:
    return (
        f"model: expected layers with functions {', '.join(_OURS)} (attributes of a layer, "
        "or globals that its methods call), or layers called "
        f"{', '.join('*' + end for end in _LAYERS)}; {type(model).__name__} has none"
    )


_TABLE = Table(_is_name, _replacement, _forward_of, _expected, decoding)


def use_linattn(model: nn.Module) -> Replacement:
    """Make a loaded model compute its recurrences and short convolutions with linattn.

    From now on, until the ``with`` block ends or :meth:`Replacement.restore` is called. Gradients,
    caches, padded batches, bfloat16 and torch.compile work as before.

    Parameters
    ----------
    model : torch.nn.Module

    Returns
    -------
    Replacement

    Raises
    ------
    TypeError
        ``model`` is not a module of PyTorch's.
    ValueError
        The model has no such layer, or one whose function has other parameters.

    Examples
    --------
    A model with one layer, which has the function as an attribute:

    >>> import torch
    >>> from linattn.compat.transformers import use_linattn
    >>> def chunk_gated_delta_rule(
    ...     q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel
    ... ):
    ...     raise NotImplementedError("the model's own")
    >>> model = torch.nn.ModuleDict({"layer": torch.nn.Identity()})
    >>> model.layer.chunk_gated_delta_rule = chunk_gated_delta_rule
    >>> q = k = v = torch.ones(1, 10, 2, 4)
    >>> with use_linattn(model):
    ...     o, _ = model.layer.chunk_gated_delta_rule(q, k, v, -q[..., 0], 0.1 * q[..., 0])
    >>> tuple(o.shape)
    (1, 10, 2, 4)
    """
    return Replacement(model, _TABLE)
