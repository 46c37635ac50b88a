"""PyTorch: the gates of linattn/gates.py as an operator of its own, recorded and traced.

gates.py imports it when the first tensor comes. What is recorded keeps x and the parameters alone:
the backward pass makes u and A again. Transforms, modes, subclasses, forward-mode derivatives and
devices that the core does not have get the formula, which PyTorch can look into.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from linattn import _linattn, autograd, gates

__all__ = ["way"]

_PARAMETERS = "str gate, float factor, Tensor x, Tensor? A_log, Tensor? dt_bias"
# PyTorch before 2.9 lends a tensor that asks for gradients to no other library.
_LENDS = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
_DEVICES = ("cpu", "cuda") if _linattn.CUDA_ARCHS else ("cpu",)


def _run(gate: str, factor: float, x: Tensor, A_log: Any, dt_bias: Any) -> Tensor:
    made: Tensor = _linattn.gate(gate, factor, x, A_log, dt_bias)
    return made


def _run_backward(
    gate: str, factor: float, x: Tensor, A_log: Any, dt_bias: Any, d: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dx, dA_log, ddt_bias = _linattn.gate(gate, factor, x, A_log, dt_bias, d)
    return dx, autograd.or_nothing(dA_log, x), autograd.or_nothing(ddt_bias, x)


def _fake(gate: str, factor: float, x: Tensor, A_log: Any, dt_bias: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=autograd.real(x))


def _fake_backward(
    gate: str, factor: float, x: Tensor, A_log: Any, dt_bias: Any, d: Tensor
) -> tuple[Tensor, ...]:
    like = (x, A_log, dt_bias)
    return tuple(autograd.or_nothing(None if a is None else a.new_empty(a.shape), x) for a in like)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.gate, ctx.factor, *arrays = inputs
    ctx.save_for_backward(*arrays)


def _derivative(run: Any) -> Any:
    """The forward's derivative. Where it is recorded itself, by the formula."""

    def backward(ctx: Any, d: Tensor) -> tuple[Any, ...]:
        x, A_log, dt_bias = ctx.saved_tensors
        by = gates.gradients_by_formula if torch.is_grad_enabled() else run
        dx, dA_log, ddt_bias = by(ctx.gate, ctx.factor, x, A_log, dt_bias, d)
        return (
            None,
            None,
            dx,
            None if A_log is None else dA_log,
            None if dt_bias is None else ddt_bias,
        )

    return backward


def _define(name: str, schema: str, run: Any, fake: Any) -> Any:
    op = torch.library.custom_op(f"linattn::{name}", run, mutates_args=(), schema=schema)
    op.register_fake(fake)
    return op


_backward = _define(
    "gate_backward",
    f"({_PARAMETERS}, Tensor d) -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
_forward = _define("gate", f"({_PARAMETERS}) -> Tensor", _run, _fake)
_forward.register_autograd(
    _derivative(torch.ops.linattn.gate_backward.default), setup_context=_setup_context
)
_operator = torch.ops.linattn.gate.default
_function = autograd.function("gate", _run, _derivative(_run_backward), _setup_context)


def way(x: Tensor, *others: Tensor | None) -> Any:
    """The function that makes a gate of these: the core's own where nothing is recorded."""
    if x.device.type not in _DEVICES or not _LENDS:
        return None
    if torch.compiler.is_compiling():
        return _operator
    if forward_ad._current_level >= 0 or autograd.is_looked_into():
        return None
    recorded, recording = False, torch.is_grad_enabled()
    for a in (x, *others):
        if a is None:
            continue
        if type(a) not in autograd.TENSORS or a.layout is not torch.strided:
            return None
        recorded = recorded or (recording and a.requires_grad)
    return _function if recorded else _linattn.gate
