"""PyTorch: the ops as operators of its own, so that gradients are recorded and graphs traced.

Imported by linattn/ops.py when the first tensor comes, so that PyTorch is there already; nothing is
compiled against it. Every op of the table is registered once, ``linattn::<op>`` and
``linattn::<op>_backward``, by one text: what the arguments are, and what is right, the core says.

Tracers and transforms see the operators. Where there are none, autograd sees the core itself, and
what nobody records goes straight to it: an operator costs many times what a small call does.
"""

from __future__ import annotations

import operator
import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from linattn import _linattn

__all__ = ["forward"]

if not hasattr(torch.library, "custom_op"):
    raise ImportError(f"linattn takes tensors of PyTorch 2.4 or later, got {torch.__version__}")

# As the core's forward takes them, a state in two, and what a backward has no use for apart.
_ARRAYS = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? alpha, Tensor? beta, "
    "Tensor? initial_state, Tensor? initial_z, Tensor? cu_seqlens"
)
_OPTIONS = (
    "float? scale, str mode, SymInt? chunk_size, bool qk_l2norm, bool state_v_first, "
    "bool? allow_tf32, float[]? features"
)
_FORWARD = f"({_ARRAYS}, bool output_final_state, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    f"(Tensor do, Tensor? d_final_state, Tensor? d_final_z, {_ARRAYS}, {_OPTIONS})"
    f" -> ({', '.join(['Tensor'] * 7)})"
)
_N_ARRAYS, _N_OPTIONS = (text.count(",") + 1 for text in (_ARRAYS, _OPTIONS))


class _Unfit(Exception):
    """An argument that no operator of PyTorch's can have: its name, what was expected, itself."""


# ---- what an operator's signature has no place for ----


def _core_state(S: Tensor | None, z: Tensor | None) -> Any:
    return S if z is None else (S, z)


def _core_features(features: list[float] | None) -> Any:
    if features is None:
        return None
    map_q, eps_q, map_k, eps_k, normaliser, eps, causal = features
    return int(map_q), eps_q, int(map_k), eps_k, int(normaliser), eps, bool(causal)


def _is_normalised(features: Any) -> bool:
    return features is not None and features[4] != 0


def _or_nothing(x: Tensor | None, q: Tensor) -> Tensor:
    """An operator gives as many tensors each time: one without elements for what is absent."""
    return q.new_empty(0) if x is None else x


def _call_site() -> int:
    """How many frames above my caller is the caller of the public function? 1 if there is none."""
    frame, level = sys._getframe(2), 1
    while frame.f_globals.get("__name__") != "linattn.ops":
        if frame.f_back is None:
            return 1
        frame, level = frame.f_back, level + 1
    return level + 2


# ---- the operators ----

try:  # PyTorch has no public word for them
    from torch._C import _get_tracing_state as _trace
    from torch._C import _len_torch_dispatch_stack as _modes
    from torch._C._functorch import maybe_current_level as _transform
except ImportError:

    def _modes() -> int:
        return 1  # then every call takes the operator's way, which is right and slower

    def _trace() -> Any:
        return None

    def _transform() -> int | None:
        return None


def _real(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    alpha: Tensor | None,
    beta: Tensor | None,
    S: Tensor | None,
    z: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    scale: float | None,
    mode: str,
    chunk_size: int | None,
    qk_l2norm: bool,
    state_v_first: bool,
    allow_tf32: bool | None,
    features: list[float] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes and dtypes of the core's la_shape_of, for tensors without memory."""
    o = v.new_empty(v.shape)
    if not output_final_state:
        return o, q.new_empty(0), q.new_empty(0)
    heads = list(v.shape[2:3]) if q.dim() == 4 else []
    if cu_seqlens is not None:
        N = [cu_seqlens.shape[0] - 1]
    else:
        N = list(q.shape[:1]) if q.dim() == 4 else []
    K, V = q.shape[-1], v.shape[-1]
    S_shape = [*N, *heads, V, K] if state_v_first else [*N, *heads, K, V]
    z_shape = [*N, *heads, K] if _is_normalised(features) else None
    real = _real(q)
    return (
        o,
        q.new_empty(S_shape, dtype=real),
        q.new_empty(0) if z_shape is None else q.new_empty(z_shape, dtype=real),
    )


def _fake_backward(
    do: Tensor, d_final_state: Tensor | None, d_final_z: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    q, k, v, g, alpha, beta, S, z = arguments[: _N_ARRAYS - 1]
    gate = g if alpha is None else alpha
    given = [None if x is None else x.new_empty(x.shape) for x in (q, k, v, gate, beta)]
    states = [None if x is None else x.new_empty(x.shape, dtype=_real(q)) for x in (S, z)]
    return tuple(_or_nothing(x, q) for x in (*given, *states))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_N_ARRAYS])
    ctx.options = inputs[_N_ARRAYS + 1 :]
    ctx.state_shapes = [x.shape for x in output[1:]] if inputs[_N_ARRAYS] else None
    ctx.set_materialize_grads(False)


def _derivative(run: Any) -> Any:
    """The forward's derivative, by a backward that PyTorch sees as one step: `run`."""

    def backward(ctx: Any, do: Any, dST: Any, dzT: Any) -> tuple[Any, ...]:
        arrays = ctx.saved_tensors
        q, _, v, g, alpha, beta, S, z, _ = arrays
        *_, features = ctx.options
        if do is None:
            do = v.new_zeros(v.shape)
        if ctx.state_shapes is None:
            dST = dzT = None
        elif _is_normalised(features) and (dST is None) != (dzT is None):
            d_states = zip((dST, dzT), ctx.state_shapes, strict=True)
            dST, dzT = (q.new_zeros(s, dtype=_real(q)) if x is None else x for x, s in d_states)
        elif not _is_normalised(features):
            dzT = None
        dq, dk, dv, dg, dbeta, dS, dz = run(do, dST, dzT, *arrays, *ctx.options)
        return (
            dq,
            dk,
            dv,
            None if g is None else dg,
            None if alpha is None else dg,
            None if beta is None else dbeta,
            None if S is None else dS.to(S.dtype),
            None if z is None else dz.to(z.dtype),
            *[None] * (2 + _N_OPTIONS),  # cu_seqlens, output_final_state
        )

    return backward


def _function(name: str, run: Any, derivative: Any, setup: Any) -> Any:
    """`run`, recorded by an autograd.Function: the old kind, which is called in half the time."""

    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        output = run(*arguments)
        setup(ctx, arguments, output)
        return output

    members = {"forward": staticmethod(forward), "backward": staticmethod(derivative)}
    made: Any = type(name, (torch.autograd.Function,), members)
    return made.apply


def _transformable(name: str, run: Any, derivative: Any, setup: Any) -> Any:
    """The new kind, which torch.func asks for."""
    members = {
        "generate_vmap_rule": True,
        "forward": staticmethod(lambda *arguments: run(*arguments)),
        "setup_context": staticmethod(setup),
        "backward": staticmethod(derivative),
    }
    made: Any = type(name, (torch.autograd.Function,), members)
    return made.apply


def _no_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


class _Ways(NamedTuple):
    """One op, for three audiences. All call the core in the end."""

    autograd: Any  # a Function over the core: for autograd alone
    operator: Any  # the operator: for whoever traces or looks on
    transformed: Any  # a Function over it: torch.func knows no derivatives of custom operators


def _register(number: int, name: str) -> _Ways:
    def run_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, g, alpha, beta, S, z, cu_seqlens, final, *options = arguments
        scale, mode, chunk_size, qk_l2norm, state_v_first, allow_tf32, features = options
        o, state = _linattn.forward(
            number,
            q,
            k,
            v,
            g,
            alpha,
            beta,
            _core_state(S, z),
            cu_seqlens,
            None,
            final,
            scale,
            mode,
            chunk_size,
            qk_l2norm,
            state_v_first,
            allow_tf32,
            _core_features(features),
            _call_site(),
        )
        ST, zT = state if isinstance(state, tuple) else (state, None)
        return o, _or_nothing(ST, q), _or_nothing(zT, q)

    def run_backward(do: Tensor, dST: Any, dzT: Any, *arguments: Any) -> tuple[Tensor, ...]:
        q, k, v, g, alpha, beta, S, z, cu_seqlens, *options = arguments
        scale, mode, chunk_size, qk_l2norm, state_v_first, _, features = options
        *gradients, d_state = _linattn.backward(
            number,
            do,
            q,
            k,
            v,
            g,
            alpha,
            beta,
            _core_state(S, z),
            _core_state(dST, dzT),
            cu_seqlens,
            scale,
            mode,
            chunk_size,
            qk_l2norm,
            state_v_first,
            _core_features(features),
            0,
        )
        dS, dz = d_state if isinstance(d_state, tuple) else (d_state, None)
        return tuple(_or_nothing(x, q) for x in (*gradients, dS, dz))

    def twice(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"the gradients of linattn.{name} are not differentiable themselves: there is no "
            "double backward"
        )

    def define(suffix: str, schema: str, run: Any, fake: Any, derivative: Any, setup: Any) -> Any:
        full = f"linattn::{name}{suffix}"
        op = torch.library.custom_op(full, run, mutates_args=(), schema=schema)
        op.register_fake(fake)
        op.register_autograd(derivative, setup_context=setup)
        return getattr(torch.ops.linattn, name + suffix).default

    def recorded(kind: Any, forward: Any, backward: Any) -> Any:
        again = kind(f"{name}_backward", backward, twice, _no_context)
        return kind(name, forward, _derivative(again), _setup_context)

    backward = define("_backward", _BACKWARD, run_backward, _fake_backward, twice, None)
    forward = define(
        "", _FORWARD, run_forward, _fake_forward, _derivative(backward), _setup_context
    )
    return _Ways(
        recorded(_function, run_forward, run_backward),
        forward,
        recorded(_transformable, forward, backward),
    )


_OPS = tuple(_register(number, name) for number, name in enumerate(_linattn.OPS))


# ---- who goes there ----

_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_DEVICES = ("cpu", "cuda")


def _way(op: int, device: str, arrays: tuple[Any, ...]) -> Any:
    """Who has to know of a call on these; None if nobody has."""
    if _transform() is not None:
        return _OPS[op].transformed
    if device not in _DEVICES or _modes() or _trace() is not None:
        return _OPS[op].operator
    way, recording = None, torch.is_grad_enabled()
    for x in arrays:
        if type(x) in _TENSORS:
            if recording and x.requires_grad:
                way = _OPS[op].autograd
        elif x is not None and isinstance(x, Tensor):
            return _OPS[op].operator
    return way


def is_watched(op: str, arrays: tuple[Any, ...]) -> bool:
    """Does anybody record, trace, transform or cast a call on these, whose first is q?"""
    device = arrays[0].device.type
    return (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or (device in _DEVICES and torch.is_autocast_enabled(device))
        or _way(_linattn.OPS.index(op), device, arrays) is not None
    )


def _refuse_tangents(arrays: tuple[Any, ...]) -> None:
    for x in arrays:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                "linattn's ops have gradients, but no forward-mode derivatives; got a dual tensor"
            )


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """As autocast casts what a matrix product takes: float64 stays."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(dtype)
    return x


# ---- arguments, as an operator takes them ----


def _tensor(name: str, x: Any) -> Tensor | None:
    """Another library's array beside tensors: a copy, which nobody writes before the backward."""
    if x is None or isinstance(x, Tensor):
        return x
    if isinstance(x, np.ndarray) and torch.compiler.is_compiling():
        return torch.as_tensor(x)  # a graph's input, whose memory is not read yet
    if isinstance(x, np.ndarray) and x.dtype.name == "bfloat16":
        return torch.tensor(x.view(np.int16)).view(torch.bfloat16)
    if isinstance(x, np.ndarray) and x.dtype.kind in "biuf":
        return torch.tensor(x)
    if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray | np.generic):
        return torch.from_dlpack(x).clone()
    raise _Unfit(name, "an array with __dlpack__", x)


def _number(name: str, x: Any) -> float | None:
    if x is None or type(x) is float:
        return x
    if isinstance(x, int | float | np.floating | np.integer) and not isinstance(x, bool):
        try:
            return float(x)
        except OverflowError:
            pass
    raise _Unfit(name, "a number", x)


def _count(name: str, x: Any) -> int | None:
    if isinstance(x, bool) or not (x is None or hasattr(x, "__index__")):
        raise _Unfit(name, "an int", x)
    n = None if x is None else operator.index(x)
    if n is not None and not -(2**63) <= n < 2**63:
        raise _Unfit(name, "1 to 2^63-1", x)
    return n


def _flag(name: str, x: Any) -> bool:
    if isinstance(x, bool | np.bool_):
        return bool(x)
    raise _Unfit(name, "True or False", x)


def _word(name: str, x: Any) -> str:
    if isinstance(x, str):
        return x
    raise _Unfit(name, "a word", x)


def _fitted(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    (
        q,
        k,
        v,
        g,
        alpha,
        beta,
        S,
        z,
        cu_seqlens,
        output_final_state,
        scale,
        mode,
        chunk_size,
        qk_l2norm,
        state_v_first,
        allow_tf32,
        features,
    ) = arguments
    return (
        q,
        _tensor("k", k),
        _tensor("v", v),
        _tensor("g", g),
        _tensor("alpha", alpha),
        _tensor("beta", beta),
        _tensor("initial_state", S),
        _tensor("initial_state", z),
        _tensor("cu_seqlens", cu_seqlens),
        _flag("output_final_state", output_final_state),
        _number("scale", scale),
        _word("mode", mode),
        _count("chunk_size", chunk_size),
        _flag("qk_l2norm", qk_l2norm),
        _flag("state_v_first", state_v_first),
        None if allow_tf32 is None else _flag("allow_tf32", allow_tf32),
        features,
    )


def forward(
    op: int,
    q: Tensor,
    k: Any,
    v: Any,
    g: Any,
    alpha: Any,
    beta: Any,
    initial_state: Any,
    cu_seqlens: Any,
    out: Any,
    output_final_state: bool,
    scale: Any,
    mode: str,
    chunk_size: Any,
    qk_l2norm: bool,
    state_v_first: bool,
    allow_tf32: bool | None,
    features: Any,
) -> tuple[Tensor, Any]:
    """``_linattn.forward`` of a q of PyTorch's, recorded and traced if anybody asks for it."""
    device = q.device.type
    if out is None and device in _DEVICES and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
    S, z = initial_state, None
    if isinstance(initial_state, tuple | list) and len(initial_state) == 2:
        S, z = initial_state
    options = (scale, mode, chunk_size, qk_l2norm, state_v_first, allow_tf32, features)
    rest = (output_final_state, *options)
    if torch.compiler.is_compiling():
        way = _OPS[op].operator
    else:
        arrays = (q, k, v, g, alpha, beta, S, z, scale)
        if forward_ad._current_level >= 0:
            _refuse_tangents(arrays)
        way = None if out is not None else _way(op, device, arrays)
        if way is None:
            return _linattn.forward(
                op, q, k, v, g, alpha, beta, initial_state, cu_seqlens, out, *rest, 3
            )
    try:
        fitted = _fitted((q, k, v, g, alpha, beta, S, z, cu_seqlens, *rest))
    except _Unfit as unfit:
        name, expected, got = unfit.args
        with torch.no_grad():  # the core says what is wrong
            _linattn.forward(op, q, k, v, g, alpha, beta, initial_state, cu_seqlens, out, *rest, 0)
        raise TypeError(
            f"{name}: expected {expected} where gradients are recorded, got {type(got)}"
        ) from None
    o, S, z = way(*fitted)
    if not output_final_state:
        return o, None
    return o, (S, z) if _is_normalised(features) else S
