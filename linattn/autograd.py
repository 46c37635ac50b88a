"""PyTorch: the ops as operators of its own, so that gradients are recorded and graphs traced.

linattn/ops/_core.py imports it when the first tensor comes, so PyTorch is there already. Nothing
is compiled against it. Every op of the table is registered once, ``linattn::<op>`` and
``linattn::<op>_backward``, by one text. The core says what the arguments are, and what is right.

Tracers and transforms see the operators. Where there are none, autograd sees the core itself. A
call that is not recorded goes straight to the core: an operator costs many times what a small call
does.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from linattn import _by_pytorch, _flops, _linattn, _vmap
from linattn._by_pytorch import outline
from linattn.variants import ARRAYS, GATES, OPS, VARIANTS, ArrayLine

__all__ = [
    "FIT",
    "TENSORS",
    "Again",
    "Part",
    "Ways",
    "beside",
    "declared",
    "forward",
    "function",
    "gate_of",
    "has_tangents",
    "is_looked_into",
    "is_number",
    "number_letters",
    "or_nothing",
    "real",
    "register",
    "spread",
    "tell_dtensor",
    "tensor_of",
    "way",
]

if not hasattr(torch.library, "custom_op"):
    raise ImportError(f"linattn takes tensors of PyTorch 2.4 or later, got {torch.__version__}")

# The inputs of a forward pass, by the lines of arrays.def. The decay is one array here, and the
# option `gate` says under which keyword it was given. A state is two arrays, the second of which
# some ops and calls have: z, or a momentum. One line stands for both.
_INPUTS = tuple(
    line
    for line in ARRAYS
    if {"F", "B"} <= set(line.passes)
    and line.role != "OUTPUT"
    and (line.role != "STATE" or line.part_of != "PAIR")
)
_NAMES = tuple(
    f"{line.label}_second" if line.part_of == "NORMALISED" else line.label for line in _INPUTS
)
_SMOOTH = tuple(line for line in _INPUTS if line.gradient is not None)


def declared(name: str, line: ArrayLine) -> str:
    required = line.needed == "REQUIRED" and line.part_of == "ALWAYS"
    return f"Tensor {name}" if required else f"Tensor? {name}"


_ARRAYS = ", ".join(map(declared, _NAMES, _INPUTS))
_OPTIONS = (
    "str? gate, float? scale, str mode, SymInt? chunk_size, SymInt batch, bool predicts_before, "
    "bool qk_l2norm, bool state_v_first, bool? allow_tf32, float[]? features"
)
_OPTION_NAMES = tuple(declared.split()[-1] for declared in _OPTIONS.split(","))
_FORWARD = f"({_ARRAYS}, bool output_final_state, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
_BACKWARD = (
    f"(Tensor do, Tensor? d_final_state, Tensor? d_final_second, {_ARRAYS}, {_OPTIONS})"
    f" -> ({', '.join(['Tensor'] * len(_SMOOTH))})"
)


class _Unfit(Exception):
    """An argument that no operator of PyTorch's can have: its name, what was expected, itself."""


# ---- what an operator's signature has no place for ----


def _core_state(S: Tensor | None, second: Tensor | None) -> Any:
    return S if second is None else (S, second)


def _named(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> dict[str, Any]:
    """An operator's arguments by their names."""
    return {
        **dict(zip(_NAMES, arrays, strict=True)),
        **dict(zip(_OPTION_NAMES, options, strict=True)),
    }


def _for_core(arrays: tuple[Any, ...], options: tuple[Any, ...]) -> dict[str, Any]:
    """An operator's arguments by the core's keywords."""
    named = _named(arrays, options)
    gate, decay = named.pop("gate"), named.pop("g")
    if gate is not None:
        named[gate] = decay
    S, second = named.pop("initial_state"), named.pop("initial_state_second")
    return {**named, "initial_state": _core_state(S, second)}


def _has_pair(op: str, features: Any) -> bool:
    """Is a state of this call a pair?"""
    return VARIANTS[op].decay == "pair" or (features is not None and features[4] != 0)


def or_nothing(x: Tensor | None, q: Tensor) -> Tensor:
    """An operator gives as many tensors each time: one without elements for what is absent."""
    return q.new_empty(0) if x is None else x


# ---- the operators ----

# PyTorch has no public names for these. Without _modes every call takes the operator's way, which
# is right and slower.
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_trace: Callable[[], Any] = getattr(torch._C, "_get_tracing_state", lambda: None)
_transform: Callable[[], Any] = getattr(
    getattr(torch._C, "_functorch", None), "maybe_current_level", lambda: None
)


def real(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _sizes(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> dict[str, Any]:
    """What the letters of csrc/arrays.def are in a call; a tracer may have symbols for them."""
    heads = slice(None) if q.dim() == 4 else slice(1, None, 2)  # one head: neither B nor heads
    sizes = dict(zip("BTHK"[heads], q.shape, strict=False))
    sizes |= zip("BLhV"[heads], v.shape, strict=False)
    N = sizes.get("B") if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return sizes | {"N": N}


def _fake_forward(name: str, *arguments: Any) -> tuple[Tensor, ...]:
    """What the core says that it would make, for tensors without memory."""
    n = len(_NAMES)
    given = _named(arguments[:n], arguments[n + 1 :])
    q, v, cu_seqlens = given["q"], given["v"], given["cu_seqlens"]
    rows = _linattn.shapes(
        "forward",
        name,
        q=q.dim(),
        cu_seqlens=cu_seqlens,
        output_final_state=arguments[n],
        state_v_first=given["state_v_first"],
        features=given["features"],
    )
    sizes = _sizes(q, v, cu_seqlens)

    def fake(row: tuple[str, str] | None) -> Tensor:
        if row is None:
            return q.new_empty(0)
        letters, dtype = row
        shape = [sizes[x] for x in letters if x in sizes]  # the core refuses a wrong shape later
        return q.new_empty(shape, dtype=real(q) if dtype == "REAL" else q.dtype)

    o, S, *seconds = rows
    second = next((row for row in seconds if row is not None), None)
    return fake(o), fake(S), fake(second)


def _fake_backward(
    do: Tensor, d_final_state: Tensor | None, d_final_second: Tensor | None, *arguments: Any
) -> tuple[Tensor, ...]:
    q = arguments[0]
    fakes = []
    for line, x in zip(_INPUTS, arguments[: len(_INPUTS)], strict=True):
        if line.gradient is None:
            continue
        dtype = None if x is None or line.role != "STATE" else real(q)
        fakes.append(or_nothing(None if x is None else x.new_empty(x.shape, dtype=dtype), q))
    return tuple(fakes)


def _joins(op: str, arguments: Sequence[Any]) -> list[bool] | None:
    """The arrays of a forward pass whose first axis is that of rows or of states."""
    n = len(_NAMES)
    given = dict(zip(_NAMES, arguments, strict=False))
    if given["q"].dim() != 4 or given["cu_seqlens"] is not None:
        return None
    gates = _LETTERS[op, 4]
    letters = (gates.get(line.label, line.letters) for line in _INPUTS)
    return [*(x[0] in "BN" for x in letters), *[False] * (len(arguments) - n)]


def _joins_backward(op: str, arguments: Sequence[Any]) -> list[bool] | None:
    """Of do, the gradients of states, and a forward pass's arrays. The gradient of a number per
    head is a sum over rows."""
    joined = _joins(op, arguments[3:])
    given = zip(_INPUTS, arguments[3:], joined or (), strict=False)
    if joined is None or any(line.gradient and x is not None and not j for line, x, j in given):
        return None
    return [True, True, True, *joined]


def _axes_of(op: str, arguments: Sequence[Any]) -> tuple[list[str | None], str]:
    """The letters of a forward pass's arrays, and those of rows and states."""
    given = list(zip(_NAMES, _INPUTS, arguments, strict=False))
    first = next(x for name, _, x in given if name == "q")
    if len(first.shape) != 4:  # one head
        return [None if x is None else "" for _, _, x in given], ""
    gates = _LETTERS[op, 4]
    letters = [None if x is None else gates.get(line.label, line.letters) for _, line, x in given]
    packed = any(name == "cu_seqlens" and x is not None for name, _, x in given)
    return letters, "" if packed else "BN"


def _axes(op: str, arguments: Sequence[Any]) -> Any:
    from linattn._sharded import Letters

    n = len(_NAMES)
    inputs, rows = _axes_of(op, arguments)
    features = _named(tuple(arguments[:n]), tuple(arguments[n + 1 :]))["features"]
    second = (
        ("NhKV" if VARIANTS[op].decay == "pair" else "NhK") if _has_pair(op, features) else None
    )
    states = ["NhKV", second] if arguments[n] else [None, None]
    return Letters([*inputs, *[None] * (len(arguments) - n)], ["BThV", *states], False, rows)


def _axes_backward(op: str, arguments: Sequence[Any]) -> Any:
    from linattn._sharded import Letters

    n = len(_NAMES)
    inputs, rows = _axes_of(op, arguments[3:])
    given = zip(("BThV", "NhKV", "NhK"), arguments, strict=False)
    of_outputs = [None if x is None else letters for letters, x in given]
    gradients = [x for x, line in zip(inputs, _INPUTS, strict=True) if line.gradient is not None]
    rest = [None] * (len(arguments) - 3 - n)
    return Letters([*of_outputs, *inputs, *rest], gradients, True, rows)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    n = len(_NAMES)
    ctx.save_for_backward(*inputs[:n])
    ctx.options = inputs[n + 1 :]
    ctx.state_shapes = [x.shape for x in output[1:]] if inputs[n] else None
    ctx.set_materialize_grads(False)


def _derivative(op: str, run: Any) -> Any:
    """The forward's derivative, by a backward that PyTorch sees as one step: `run`."""

    def backward(ctx: Any, do: Any, dST: Any, d_second: Any) -> tuple[Any, ...]:
        arrays = ctx.saved_tensors
        given = _named(arrays, ctx.options)
        q, v, pair = given["q"], given["v"], _has_pair(op, given["features"])
        if do is None:
            n = q.dim() // 2  # o has the tokens of q and the heads of v
            do = v.new_zeros(q.shape[:n] + v.shape[n:])
        if ctx.state_shapes is None:
            dST = d_second = None
        elif pair and (dST is None) != (d_second is None):
            d_states = zip((dST, d_second), ctx.state_shapes, strict=True)
            dST, d_second = (q.new_zeros(s, dtype=real(q)) if x is None else x for x, s in d_states)
        elif not pair:
            d_second = None
        found = iter(run(do, dST, d_second, *arrays, *ctx.options))
        gradients: list[Any] = []
        for line, x in zip(_INPUTS, arrays, strict=True):
            dx: Any = next(found) if line.gradient is not None else None
            if x is None:
                dx = None
            elif line.role == "STATE":
                dx = dx.to(x.dtype)
            gradients.append(dx)
        return (*gradients, None, *[None] * len(_OPTION_NAMES))  # None: output_final_state

    return backward


def function(name: str, run: Any, derivative: Any, setup: Any) -> Any:
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


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.places = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.save_for_backward(*(inputs[i] for i in ctx.places))
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.set_materialize_grads(False)


class Ways(NamedTuple):
    """One function, for three audiences. All call the core in the end."""

    autograd: Any  # a Function over the core: for autograd alone
    operator: Any  # the operator: for tracers, modes and subclasses
    transformed: Any  # a Function over it: torch.func knows no derivatives of custom operators
    again: Any  # PyTorch's own functions: for forward-mode derivatives


class Part(NamedTuple):
    """A forward or a backward pass: the operator's schema, the core's call, and a fake of it. joins
    says of each argument whether an axis that vmap maps can join its first one (_vmap.py)."""

    schema: str
    run: Any
    fake: Any
    joins: Any
    letters: Any  # from its arguments to the letters of its arrays (_sharded.py)


_unknown_to_dtensor: list[tuple[Any, Any]] = []


def tell_dtensor() -> None:
    """Tell DTensor of the operators, where it has been imported: that takes half a second."""
    if _unknown_to_dtensor and "torch.distributed.tensor" in sys.modules:
        from linattn import _sharded

        while _unknown_to_dtensor:
            _sharded.know(*_unknown_to_dtensor.pop())


def beside(x: Tensor, q: Tensor) -> Tensor:
    """A tensor made from a number, or from an array of another library, to go with q."""
    if type(q) in TENSORS or "torch.distributed.tensor" not in sys.modules:
        return x
    from linattn import _sharded

    return _sharded.replicated(x, q)


class Again(NamedTuple):
    """A forward pass of PyTorch's own functions (_by_pytorch.py), for all other derivatives."""

    run: Any  # the outputs and the final states, of a forward's arguments without `final`
    check: Any  # of the same: the core's TypeError or ValueError, if they are not right
    final: int  # the place of output_final_state among a forward's arguments
    outputs: int
    smooth: tuple[int, ...]  # the places of the arguments that have gradients


def register(
    name: str, forward: Part, backward: Part, derivative: Any, setup: Any, again: Again
) -> Ways:
    """``linattn::<name>`` and ``linattn::<name>_backward``, and functions that PyTorch records.

    derivative(run) is the forward's derivative by a backward pass, and setup keeps what it needs.
    """

    def twice(ctx: Any, *weights: Any) -> tuple[Any, ...]:
        """Was a backward pass: the gradients of its arguments, those of outputs first."""
        inputs, n = list(ctx.others), again.outputs
        for place, x in zip(ctx.places, ctx.saved_tensors, strict=True):
            inputs[place] = x
        wanted, arguments = tuple(inputs[:n]), tuple(inputs[n:])
        there = [i for i in again.smooth if arguments[i] is not None]
        of_there = tuple(
            w for i, w in zip(again.smooth, weights, strict=True) if arguments[i] is not None
        )
        arrays = {i: arguments[i] for i in there}
        of_wanted, of_arrays = _by_pytorch.gradients_of_gradients(
            again.run, wanted, of_there, arrays, arguments
        )
        return (*of_wanted, *(of_arrays.get(i) for i in range(len(arguments))))

    def define(suffix: str, part: Part, derivative: Any, setup: Any) -> Any:
        full = f"linattn::{name}{suffix}"
        op = torch.library.custom_op(full, part.run, mutates_args=(), schema=part.schema)
        op.register_fake(part.fake)
        op.register_autograd(derivative, setup_context=setup)
        if hasattr(op, "register_vmap"):  # since PyTorch 2.5
            op.register_vmap(_vmap.rule(op, part.joins))
        made = getattr(torch.ops.linattn, name + suffix).default
        _unknown_to_dtensor.append((made, part.letters))
        return made

    def recorded(kind: Any, forward: Any, backward: Any) -> Any:
        behind = kind(f"{name}_backward", backward, twice, _keep_inputs)
        return kind(name, forward, derivative(behind), setup)

    backward_operator = define("_backward", backward, twice, _keep_inputs)
    operator = define("", forward, derivative(backward_operator), setup)

    def once_more(*arguments: Any) -> Any:
        given = (*arguments[: again.final], *arguments[again.final + 1 :])
        again.check(*given)
        return again.run(*given)

    return Ways(
        recorded(function, forward.run, backward.run),
        operator,
        recorded(_transformable, operator, backward_operator),
        once_more,
    )


def _register(name: str) -> Ways:
    n = len(_NAMES)

    def run_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        given = _for_core(arguments[:n], arguments[n + 1 :])
        o, state = _linattn.forward(name, output_final_state=arguments[n], **given)
        ST, second = state if isinstance(state, tuple) else (state, None)
        q = arguments[0]
        return o, or_nothing(ST, q), or_nothing(second, q)

    def run_backward(do: Tensor, dST: Any, d_second: Any, *arguments: Any) -> tuple[Tensor, ...]:
        given = _for_core(arguments[:n], arguments[n:])
        del given["allow_tf32"]  # a backward's products are never rounded so
        *gradients, d_state = _linattn.backward(
            name, do=do, d_final_state=_core_state(dST, d_second), warn=False, **given
        )
        dS, d_second = d_state if isinstance(d_state, tuple) else (d_state, None)
        return tuple(or_nothing(x, arguments[0]) for x in (*gradients, dS, d_second))

    def run_again(*arguments: Any) -> tuple[Tensor | None, ...]:
        return _by_pytorch.op(name, _named(arguments[:n], arguments[n:]))

    def check(*arguments: Any) -> None:
        given = _for_core(arguments[:n], arguments[n:])
        _linattn.outline("forward", name, **{key: outline(x) for key, x in given.items()})

    ways = register(
        name,
        Part(
            _FORWARD,
            run_forward,
            partial(_fake_forward, name),
            partial(_joins, name),
            partial(_axes, name),
        ),
        Part(
            _BACKWARD,
            run_backward,
            _fake_backward,
            partial(_joins_backward, name),
            partial(_axes_backward, name),
        ),
        partial(_derivative, name),
        _setup_context,
        Again(
            run_again,
            check,
            n,
            3,
            tuple(i for i, x in enumerate(_INPUTS) if x.gradient is not None),
        ),
    )
    forward = (*_NAMES, "output_final_state", *_OPTION_NAMES)
    backward = ("do", "d_final_state", "d_final_second", *_NAMES, *_OPTION_NAMES)
    _flops.count(ways.operator, name, forward)
    behind = getattr(torch.ops.linattn, f"{name}_backward").default
    _flops.count(behind, name, backward, passes="backward")
    return ways


_OPS = {name: _register(name) for name in OPS}
tell_dtensor()


# ---- the way of a call ----

TENSORS = frozenset((Tensor, torch.nn.Parameter))
_DEVICES = ("cpu", "cuda")
# The arguments after q, k and v that have the dtype of q.
_LIKE_Q = tuple(line.label for line in _SMOOTH if line.dtype == "OF_Q" and line.label not in "qkv")
# The arguments after q, k and v that may be tensors, without the state. A scale is one by mistake.
_LOOKED_AT = (
    *(line.label for line in _SMOOTH if line.role == "INPUT" and line.label not in "qkvg"),
    *GATES,
    "scale",
)


def is_looked_into() -> bool:
    """Does a transform, a mode or a tracer of PyTorch's look at each call?"""
    return _transform() is not None or bool(_modes()) or _trace() is not None


def way(ways: Ways, device: str, arrays: tuple[Any, ...]) -> Any:
    """The way of a call on these, if PyTorch has to know of it; else None."""
    if _transform() is not None:
        tell_dtensor()
        return ways.transformed
    if device not in _DEVICES or _modes() or _trace() is not None:
        tell_dtensor()
        return ways.operator
    found, recording = None, torch.is_grad_enabled()
    for x in arrays:
        if type(x) in TENSORS:
            if recording and x.requires_grad:
                found = ways.autograd
        elif x is not None and isinstance(x, Tensor):
            tell_dtensor()
            return ways.operator
    return found


def is_watched(op: str, arrays: tuple[Any, ...]) -> bool:
    """Is a call on these, q first, recorded, traced, transformed or cast?"""
    device = arrays[0].device.type
    return (
        torch.compiler.is_compiling()
        or forward_ad._current_level >= 0
        or (device in _DEVICES and torch.is_autocast_enabled(device))
        or way(_OPS[op], device, arrays) is not None
    )


def has_tangents(arrays: tuple[Any, ...]) -> bool:
    """Does forward mode ask for a derivative of a call on these? A transform may hide tangents."""
    if forward_ad._current_level < 0:
        return False
    return _transform() is not None or any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in arrays
    )


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """As autocast casts what a matrix product takes: float64 stays."""
    if isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(dtype)
    return x


# ---- arguments, as an operator takes them ----


def tensor_of(name: str, x: Any) -> Tensor | None:
    """Another library's array beside tensors: a copy, which stays as it is until the backward."""
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


def is_number(x: Any) -> bool:
    return isinstance(x, int | float | np.floating | np.integer) and not isinstance(x, bool)


def _number(name: str, x: Any) -> float | None:
    if x is None or type(x) is float:
        return x
    if is_number(x):
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


def _same(name: str, x: Any) -> Any:
    return x


def _flag_or_none(name: str, x: Any) -> bool | None:
    return None if x is None else _flag(name, x)


# How each option is made fit for an operator, and what it is where nothing is given.
FIT: dict[str, tuple[Any, Any]] = {
    "gate": (_same, None),
    "scale": (_number, None),
    "mode": (_word, "chunk"),
    "chunk_size": (_count, None),
    "batch": (_count, 1),
    "predicts_before": (_flag, False),
    "x_is_factor": (_flag, False),
    "qk_l2norm": (_flag, False),
    "state_v_first": (_flag, False),
    "allow_tf32": (_flag_or_none, None),
    "features": (_same, None),
}


def gate_of(given: dict[str, Any]) -> str | None:
    """The keyword that gives the decay; without a decay the first that is there."""
    there = [name for name in GATES if name in given]
    full = [name for name in there if given[name] is not None]
    if len(full) > 1:
        raise _Unfit(full[1], "None beside " + full[0], given[full[1]])
    return full[0] if full else there[0] if there else None


def _state_of(given: dict[str, Any]) -> tuple[Any, Any]:
    state = given.get("initial_state")
    if isinstance(state, tuple | list) and len(state) == 2:
        return state[0], state[1]
    return state, None


def _letters(op: str, dims: int) -> dict[str, str]:
    """The letters of the gates that an op has, by the names of arrays.def."""
    gates = {line.label: True for line in _GATE_LINES}
    rows = _linattn.shapes("backward", op, q=dims, **gates)
    found = zip((line.label for line in _SMOOTH), rows, strict=False)
    return {label: row[0] for label, row in found if label in gates and row is not None}


def number_letters(op: str, dims: int) -> dict[str, str]:
    """The letters of the arrays that a number may stand for, in a call whose q has these axes. A
    step's have no tokens."""
    step = dims % 2
    found = _LETTERS[op, dims + step]
    return {label: x.replace("T", "") if step else x for label, x in found.items()}


# The arrays that a number may stand for, and their letters by the op and the dimensions of q. A
# tracer cannot look into the core, so they are asked for here.
_GATE_LINES = tuple(line for line in _SMOOTH if line.dtype == "FLOAT")
_LETTERS = {(op, dims): _letters(op, dims) for op in OPS for dims in (2, 4)}


def spread(x: Any, letters: str, sizes: Mapping[str, Any], q: Tensor) -> Tensor:
    """A number as the array of these letters that it stands for."""
    one = beside(torch.full((), float(x), dtype=real(q), device=q.device), q)
    return one.expand([sizes[letter] for letter in letters])


def _spread(op: str, gate: str | None, given: dict[str, Any]) -> dict[str, Any]:
    """The numbers among the gates, as tensors of the shapes that they stand for."""
    q, found = given["q"], {}
    for label, letters in _LETTERS.get((op, q.dim()), {}).items():
        x: Any = given.get(gate if label == "g" and gate else label)
        if is_number(x):
            sizes = _sizes(q, given["v"], given.get("cu_seqlens"))
            found[label] = spread(x, letters, sizes, q)
    return found


def _fitted(op: str, given: dict[str, Any]) -> tuple[Any, ...]:
    """A call's arguments in the order of the operators' schema."""
    gate = gate_of(given)
    S, second = _state_of(given)
    values = {**given, "initial_state": S, "initial_state_second": second, "gate": gate}
    if gate is not None:
        values["g"] = given[gate]
    values |= _spread(op, gate, given)
    arrays = []
    for name, line in zip(_NAMES, _INPUTS, strict=True):
        x = tensor_of(gate if line.label == "g" and gate else line.label, values.get(name))
        arrays.append(x if x is None or x is values.get(name) else beside(x, given["q"]))
    final = _flag("output_final_state", given.get("output_final_state", False))
    options = [FIT[name][0](name, values.get(name, FIT[name][1])) for name in _OPTION_NAMES]
    return (*arrays, final, *options)


def forward(op: str, q: Tensor, k: Any, v: Any, **given: Any) -> tuple[Tensor, Any]:
    """``_linattn.forward`` of a q of PyTorch's, recorded and traced if anything asks for it."""
    out = given.get("out")
    device = q.device.type
    if out is None and device in _DEVICES and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        q, k, v = _cast(q, dtype), _cast(k, dtype), _cast(v, dtype)
        for name in _LIKE_Q:
            if given.get(name) is not None:
                given[name] = _cast(given[name], dtype)
    if torch.compiler.is_compiling():
        call = _OPS[op].operator
    else:
        state = given.get("initial_state")
        parts = state if isinstance(state, tuple | list) else (state,)
        arrays = (q, k, v, *map(given.get, _LOOKED_AT), *parts)
        dual = has_tangents(arrays)
        if dual and out is not None:
            raise ValueError("out: expected None where PyTorch takes derivatives of the call")
        if out is not None:
            return _linattn.forward(op, q, k, v, **given)  # the core refuses what is recorded
        call = _OPS[op].again if dual else way(_OPS[op], device, arrays)
        if call is None:
            given["unrecorded"] = True  # beside **given it would cost a second dict
            return _linattn.forward(op, q, k, v, **given)
    try:
        fitted = _fitted(op, {"q": q, "k": k, "v": v, **given})
    except _Unfit as unfit:
        name, expected, got = unfit.args
        with torch.no_grad():  # the core says what is wrong
            _linattn.forward(op, q, k, v, warn=False, **given)
        raise TypeError(
            f"{name}: expected {expected} where gradients are recorded, got {type(got)}"
        ) from None
    o, S, second = call(*fitted)
    if not given.get("output_final_state", False):
        return o, None
    return o, (S, second) if _has_pair(op, given.get("features")) else S
