"""The layers of a model that have such functions, and what takes their place."""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from linattn.compat.transformers import _layers
from linattn.compat.transformers._convolution import causal_conv1d_fn, causal_conv1d_update
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
# Layers of transformers that have a recurrence, and why it is none of ours.
_NOT_OURS = {
    "RwkvSelfAttention": "RWKV-4 divides by a sum of exponentials, which it keeps with the largest "
    "exponent so far; linattn has RWKV-6 and 7",
    "mLSTMBackend": "xLSTM adds eps to its denominators in the unit of the state, and "
    "linattn.mlstm does not",
}


def _forward_of(layer: nn.Module) -> Callable[..., Any] | None:
    """Ours for a layer with its recurrence in its forward; None if it is another layer.

    Raises ValueError if only the name is right.
    """
    kind = type(layer).__name__
    ours = next((x for end, x in _LAYERS.items() if kind.endswith(end)), None)
    if ours is None:
        return None
    missing = [name for name in ours.attributes if not hasattr(layer, name)]
    names = list(inspect.signature(ours.forward).parameters)[1:]
    given = inspect.signature(layer.forward).parameters
    unknown = [name for name in names if name not in given and name != "others"]
    if missing or unknown:
        raise ValueError(
            f"{kind}: expected a layer with {', '.join(ours.attributes)} and forward("
            f"{', '.join(names)}), which lacks {', '.join(missing + unknown)}"
        )
    return ours.forward


def _globals_of(code: CodeType) -> set[str]:
    """The global names like a delta rule's that a function reads, or a function within it."""
    inner = (_globals_of(c) for c in code.co_consts if isinstance(c, CodeType))
    names: set[str] = set().union(*inner)
    if any(map(_NAME.fullmatch, code.co_names)):  # attributes' names too
        read = (i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL")
        names |= {name for name in read if _NAME.fullmatch(name)}
    return names


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty as yet
        return None


class _Remaker:
    """Functions made anew, in which the names of a delta rule mean ours."""

    def __init__(self) -> None:
        self.made: dict[Any, tuple[Any, tuple[str, ...]]] = {}

    def __call__(self, function: Any) -> tuple[Any, tuple[str, ...]]:
        """What to put in its place and the names that changed; (None, ()) if there are none.

        A function that calls another through its closure (a decorator), a method and a partial are
        looked into.
        """
        if isinstance(function, MethodType):
            inner, names = self(function.__func__)
            return (MethodType(inner, function.__self__) if names else None), names
        if isinstance(function, functools.partial):
            inner, names = self(function.func)
            if not names:
                return None, ()
            partial = functools.partial(inner, *function.args, **function.keywords)
            vars(partial).update(vars(function))
            return partial, names
        if not isinstance(function, FunctionType):
            return None, ()
        if function not in self.made:
            self.made[function] = None, ()  # if it is in its own closure
            self.made[function] = self.remade(function)
        return self.made[function]

    def remade(self, function: FunctionType) -> tuple[Any, tuple[str, ...]]:
        seen = function.__globals__
        ours = {}
        for name in sorted(_globals_of(function.__code__)):
            mine = _replacement(name, seen.get(name))
            if mine is not None:
                ours[name] = mine
        names, cells = list(ours), []
        for cell in function.__closure__ or ():
            inner, within = self(_contents(cell))
            cells.append(CellType(inner) if within else cell)
            names.extend(within)
        if not names:
            return None, ()
        if ours:
            # Without __name__: torch.compile looks for a function's globals in the module of that
            # name, and here they are these.
            seen = {name: x for name, x in (seen | ours).items() if name != "__name__"}
        made = FunctionType(
            function.__code__.replace(),  # of its own: torch.compile keeps what it made by the code
            seen,
            function.__name__,
            function.__defaults__,
            tuple(cells) if function.__closure__ else None,
        )
        functools.update_wrapper(made, function)
        made.__kwdefaults__ = function.__kwdefaults__
        return made, tuple(dict.fromkeys(names))


def _changes(layer: nn.Module, remade: _Remaker) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """What to set in a layer, and which functions are ours then, by attribute."""
    found: dict[str, tuple[Any, tuple[str, ...]]] = {}
    own = vars(layer)
    forward = _forward_of(layer)
    if forward is not None:
        found["forward"] = MethodType(forward, layer), (forward.__name__,)
    for name, value in own.items():
        ours = _replacement(name, value)
        if ours is not None:
            found[name] = ours, (name,)
        elif isinstance(value, MethodType | functools.partial | FunctionType):  # a hook's, say
            made, names = remade(value)
            if names:
                found[name] = made, names
    for kind in type(layer).__mro__:
        for name, value in vars(kind).items():
            if name in own or name in found or name.startswith("__"):
                continue
            if isinstance(value, FunctionType) and getattr(type(layer), name, None) is value:
                made, names = remade(value)
                if names:
                    found[name] = MethodType(made, layer), names
    return found


# ---- the way in, and back ----

_NOTHING = object()


class Replacement:
    """The result of :func:`use_linattn`: a context manager, which :meth:`.restore` ends.

    Attributes
    ----------
    layers : dict
        By the names of the layers that were changed: the names of the functions that are ours.

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
    >>> ours = use_linattn(model)
    >>> print(ours)
    linattn, in 1 layers of ModuleDict
      layer: chunk_gated_delta_rule
    >>> ours.restore()
    >>> model.layer.chunk_gated_delta_rule is chunk_gated_delta_rule
    True
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model)}")
        self._model = model
        self._entered = 0
        self._before: list[tuple[nn.Module, str, Any, Any]] = []
        self._apply()

    def _apply(self) -> None:
        remade = _Remaker()
        planned = {}
        for name, layer in self._model.named_modules():
            try:
                planned[name] = layer, _changes(layer, remade)
            except ValueError as error:
                raise ValueError(f"model: {name}: {error}") from None
        planned = {name: plan for name, plan in planned.items() if plan[1]}
        if not planned:
            kinds = {type(layer).__name__ for layer in self._model.modules()}
            why = "".join(f". {kind}: {said}" for kind, said in _NOT_OURS.items() if kind in kinds)
            raise ValueError(
                f"model: expected layers with functions {', '.join(_OURS)} (attributes of a layer, "
                "or globals that its methods call), or layers called "
                f"{', '.join('*' + end for end in _LAYERS)}; {type(self._model).__name__} has "
                f"none{why}"
            )
        self.layers: dict[str, tuple[str, ...]] = {}
        for name, (layer, changes) in planned.items():
            for attribute, (ours, _) in changes.items():
                before = vars(layer).get(attribute, _NOTHING)
                self._before.append((layer, attribute, before, ours))
                setattr(layer, attribute, ours)
            used = (function for _, names in changes.values() for function in names)
            self.layers[name] = tuple(dict.fromkeys(used))

    def restore(self) -> None:
        """Put back the functions that were there before. A second call does nothing.

        Raises
        ------
        RuntimeError
            Ours were replaced meanwhile. Nothing is changed: the last replacement has to be undone
            first.
        """
        for layer, attribute, _, ours in self._before:
            if vars(layer).get(attribute) is not ours:
                raise RuntimeError(
                    f"{type(layer).__name__}.{attribute} was replaced after use_linattn: "
                    "that has to be undone first"
                )
        for layer, attribute, before, _ in self._before:
            if before is _NOTHING:
                delattr(layer, attribute)
            else:
                setattr(layer, attribute, before)
        self._before.clear()

    def __enter__(self) -> Replacement:
        if not self._before:
            self._apply()
        self._entered += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if not self._entered:
            self.restore()

    def __repr__(self) -> str:
        state = "in" if self._before else "no longer in"
        kind = type(self._model).__name__
        lines = (f"  {name}: {', '.join(used)}" for name, used in self.layers.items())
        return "\n".join((f"linattn, {state} {len(self.layers)} layers of {kind}", *lines))


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
    return Replacement(model)
