"""Models of transformers, their delta rules and selective scans computed by linattn.

::

    from linattn.compat.transformers import use_linattn

    model = AutoModelForCausalLM.from_pretrained(...)  # a Qwen3-Next, Kimi Linear, Jamba, ...
    with use_linattn(model):
        model.generate(**tokens)                       # afterwards the model is as it was

    ours = use_linattn(model)                          # or until told otherwise
    ...
    ours.restore()

Which models are meant is not listed anywhere: a layer is one if it keeps a chunked or recurrent
gated delta rule (or Kimi delta attention) as an attribute, or if its methods call one by a global
name, and if that function has the parameters that ours has. So it is with Mamba's selective scan
and its step. The layer then gets functions, or
methods that see functions, of its own; nothing is written into its class, its module or
transformers, so that other models of the process, of the same class too, stay as they are.
"""

from __future__ import annotations

import dis
import functools
import inspect
import re
from collections.abc import Callable
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from linattn import autograd, ops
from linattn.features import cast, is_recorded
from linattn.scans import selective_scan, selective_scan_step

__all__ = [
    "Replacement",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "mamba_selective_scan",
    "mamba_selective_state_update",
    "recurrent_gated_delta_rule",
    "recurrent_kda",
    "use_linattn",
]

Result: TypeAlias = "tuple[Tensor, Tensor | None]"

# ---- the functions, as the layers of transformers call them ----

# Arguments that a model hands to all its parts, and that a delta rule does not use.
_FOR_OTHERS = frozenset(
    (
        "cu_seq_lens_k",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "use_cache",
    )
)


def _refuse_others(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if value is not None and name not in _FOR_OTHERS:
            got = repr(value) if isinstance(value, bool | int | float | str) else type(value)
            raise ValueError(f"{name}: not supported by linattn.compat.transformers, got {got}")


def _sequences(cu_seqlens: Any, others: dict[str, Any]) -> Any:
    """The edges of packed sequences, or None, once every other argument is known to be harmless."""
    packed = others.pop("cu_seq_lens_q", None)  # what becomes cu_seqlens in some layers
    seq_idx = others.pop("seq_idx", None)
    if others.get("is_causal") is True:
        del others["is_causal"]
    _refuse_others(others)
    edges = packed if cu_seqlens is None else cu_seqlens
    # The convolution before this knows them apart by seq_idx, or refuses: by that alone.
    if edges is not None and seq_idx is None:
        raise ValueError(
            "cu_seqlens: expected seq_idx beside it, without which the layer's convolution mixes "
            "packed sequences"
        )
    if edges is None and seq_idx is not None:
        raise ValueError("seq_idx: expected cu_seqlens beside it, got None")
    return edges


def _state_of(query: Tensor, state: Tensor | None, copy: bool = False) -> Any:
    """A state as the ops take it: float32, or float64 beside float64."""
    if state is None:
        return None
    real = torch.float64 if query.dtype == torch.float64 else torch.float32
    kept = torch.contiguous_format if copy else torch.preserve_format
    return state.to(device=query.device, dtype=real, copy=copy, memory_format=kept)


def chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    chunk_size: int | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> Result:
    """:func:`linattn.gated_delta_rule`, chunk by chunk.

    query, key [B,T,H,K], value [B,T,HV,V], log decays g and beta [B,T,HV]; states [B,HV,K,V],
    float32 (float64 for float64 inputs). Of `others` those that are about other parts of a model
    (``num_items_in_batch``, ``position_ids``, ...) make no difference; any other raises ValueError.

    Examples
    --------
    Arguments for other parts of a model make no difference:

    >>> import torch
    >>> from linattn.compat.transformers import chunk_gated_delta_rule
    >>> q, k, v = torch.randn(3, 1, 10, 2, 4, dtype=torch.float64)  # [B,T,H,K]
    >>> g, beta = -torch.rand(1, 10, 2), torch.rand(1, 10, 2)  # [B,T,HV]
    >>> at = torch.arange(10)[None]
    >>> o, state = chunk_gated_delta_rule(q, k, v, g, beta, position_ids=at, use_cache=True)
    >>> tuple(o.shape), state is None
    ((1, 10, 2, 4), True)
    """
    return ops.gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        scale=scale,
        initial_state=_state_of(query, initial_state),
        output_final_state=output_final_state,
        cu_seqlens=_sequences(cu_seqlens, others),
        chunk_size=chunk_size,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> Result:
    """:func:`chunk_gated_delta_rule`, token by token.

    Examples
    --------
    >>> import torch
    >>> from linattn.compat.transformers import chunk_gated_delta_rule, recurrent_gated_delta_rule
    >>> q, k, v = torch.randn(3, 1, 10, 2, 4, dtype=torch.float64)  # [B,T,H,K]
    >>> g, beta = -torch.rand(1, 10, 2), torch.rand(1, 10, 2)  # [B,T,HV]
    >>> options = {"use_qk_l2norm_in_kernel": True}
    >>> o, _ = recurrent_gated_delta_rule(q, k, v, g, beta, **options)
    >>> torch.allclose(o, chunk_gated_delta_rule(q, k, v, g, beta, **options)[0])
    True
    """
    return _recurrent(
        "gated_delta_rule",
        query,
        key,
        value,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        _sequences(cu_seqlens, others),
    )


def chunk_kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    chunk_size: int | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> Result:
    """:func:`linattn.kda`: :func:`chunk_gated_delta_rule` with log decays g [B,T,HV,K].

    Examples
    --------
    >>> import torch
    >>> from linattn.compat.transformers import chunk_kda
    >>> q, k, v = torch.randn(3, 1, 10, 2, 4, dtype=torch.float64)  # [B,T,H,K]
    >>> g, beta = -torch.rand(1, 10, 2, 4), torch.rand(1, 10, 2)  # [B,T,HV,K] and [B,T,HV]
    >>> o, state = chunk_kda(q, k, v, g, beta, output_final_state=True)
    >>> tuple(state.shape), state.dtype
    ((1, 2, 4, 4), torch.float64)
    """
    return ops.kda(
        query,
        key,
        value,
        g,
        beta,
        scale=scale,
        initial_state=_state_of(query, initial_state),
        output_final_state=output_final_state,
        cu_seqlens=_sequences(cu_seqlens, others),
        chunk_size=chunk_size,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )


def recurrent_kda(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **others: Any,
) -> Result:
    """:func:`chunk_kda`, token by token.

    Examples
    --------
    The next token after a prompt. The state that is given stays as it is:

    >>> import torch
    >>> from linattn.compat.transformers import recurrent_kda
    >>> q, k, v = torch.randn(3, 1, 10, 2, 4, dtype=torch.float64)  # [B,T,H,K]
    >>> g, beta = -torch.rand(1, 10, 2, 4), torch.rand(1, 10, 2)  # [B,T,HV,K] and [B,T,HV]
    >>> first, last = ([x[:, t] for x in (q, k, v, g, beta)] for t in (slice(9), slice(9, 10)))
    >>> _, state = recurrent_kda(*first, output_final_state=True, use_qk_l2norm_in_kernel=True)
    >>> o, _ = recurrent_kda(*last, initial_state=state, use_qk_l2norm_in_kernel=True)
    >>> torch.allclose(o, recurrent_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0][:, 9:])
    True
    """
    return _recurrent(
        "kda",
        query,
        key,
        value,
        g,
        beta,
        scale,
        initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
        _sequences(cu_seqlens, others),
    )


def _recurrent(
    op: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    qk_l2norm: bool,
    cu_seqlens: Tensor | None,
) -> Result:
    """A token at a time. One token without gradients is a step, in half the time."""
    if (
        initial_state is None
        or query.shape[1] != 1
        or not output_final_state
        or cu_seqlens is not None
        or autograd.is_watched(op, (query, key, value, g, beta, initial_state))
    ):
        return getattr(ops, op)(
            query,
            key,
            value,
            g,
            beta,
            scale=scale,
            initial_state=_state_of(query, initial_state),
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            mode="recurrent",
            qk_l2norm=qk_l2norm,
        )
    q, k, v, g, beta = (  # a step copies nothing
        x[:, 0] if x.stride(-1) == 1 else x[:, 0].contiguous() for x in (query, key, value, g, beta)
    )
    state = _state_of(query, initial_state, copy=True)  # a step writes it
    step = getattr(ops, f"{op}_step")
    o = step(q, k, v, g, beta, state=state, scale=scale, qk_l2norm=qk_l2norm)
    return o[:, None], state


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
    _refuse_others(others)
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
    _refuse_others(others)
    dtype = hidden_states.dtype
    u, dt, B, C = hidden_states, cast(dt, dtype), cast(B, dtype), cast(C, dtype)
    z = None if z is None else cast(z, dtype)
    options: dict[str, Any] = {"D": D, "delta_bias": dt_bias, "delta_softplus": dt_softplus}
    real = torch.float64 if dtype == torch.float64 else torch.float32
    recorded = any(x is not None and is_recorded(x) for x in (u, dt, A, B, C, D, z, dt_bias))
    if recorded or torch.compiler.is_compiling() or state.dtype not in (real, torch.bfloat16):
        y, after = selective_scan(
            u[:, None],
            dt[:, None],
            A,
            B[:, None],
            C[:, None],
            z=None if z is None else z[:, None],
            initial_state=state.to(real),
            output_final_state=True,
            **options,
        )
        with torch.no_grad():
            state.copy_(after)
        return y[:, 0]
    with torch.no_grad():
        y = selective_scan_step(state, u, dt, A, B, C, z=z, **options)
    return y


# ---- which functions a layer has ----

_DELTA = ("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
_SCAN = ("dt", "A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state")
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
    return ours.function


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
            raise ValueError(
                f"model: expected layers with functions {', '.join(_OURS)} (attributes of a layer, "
                f"or globals that its methods call); {type(self._model).__name__} has none"
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
    """Make a loaded model compute its gated delta rules, or selective scans, with linattn.

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
