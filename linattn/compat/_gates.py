"""fla's gates and betas before their activation, as the ops take them."""

from __future__ import annotations

import math
from typing import Any

from linattn import gates
from linattn.features import is_array

__all__ = ["activated_beta", "activated_gate"]


def activated_gate(
    g: Any,
    use_gate_in_kernel: Any,
    A_log: Any,
    dt_bias: Any,
    *,
    lower_bound: Any = None,
    per_key: bool = False,
) -> Any:
    """g [B,T,HV], or [B,T,HV,K] per key, as log decays.

    A_log has HV numbers, and dt_bias as many as a token of g, in any shape. With a lower bound
    A_log may be None.
    """
    if not use_gate_in_kernel:
        for name, value in (
            ("A_log", A_log),
            ("dt_bias", dt_bias),
            ("lower_bound", lower_bound),
        ):
            if value is not None:
                raise ValueError(
                    f"{name}: expected None without use_gate_in_kernel=True, got {_shown(value)}"
                )
        return g
    letters = "[B,T,HV,K]" if per_key else "[B,T,HV]"
    if not is_array(g):
        raise TypeError(
            f"g: expected an array {letters} with use_gate_in_kernel=True, got {_shown(g)}"
        )
    if len(g.shape) != letters.count(",") + 1:
        raise ValueError(f"g: expected {letters}, got {tuple(g.shape)}")
    if A_log is None and lower_bound is None:
        unless = " and without lower_bound" if per_key else ""
        raise ValueError(
            f"A_log: expected an array [HV] with use_gate_in_kernel=True{unless}, got None"
        )
    shape = tuple(g.shape[2:])
    if A_log is not None:
        A_log = _shaped("A_log", A_log, (shape[0], 1)[: len(shape)], "[HV]")
    if dt_bias is not None:
        dt_bias = _shaped("dt_bias", dt_bias, shape, "[HV*K]" if per_key else "[HV]")
    if lower_bound is None:
        return gates.softplus(g, A_log, dt_bias)
    return gates.bounded(g, A_log, dt_bias, lower_bound)


def activated_beta(beta: Any, use_beta_sigmoid_in_kernel: Any, allow_neg_eigval: Any) -> Any:
    """beta [B,T,HV] as the ops take it."""
    if not use_beta_sigmoid_in_kernel:
        if allow_neg_eigval:
            raise ValueError(
                "allow_neg_eigval: expected use_beta_sigmoid_in_kernel=True beside it, got "
                f"{use_beta_sigmoid_in_kernel!r}"
            )
        return beta
    if not is_array(beta):
        raise TypeError(
            "beta: expected an array [B,T,HV] with use_beta_sigmoid_in_kernel=True, got "
            f"{_shown(beta)}"
        )
    return gates.beta(beta, bool(allow_neg_eigval))


def _shaped(name: str, x: Any, shape: tuple[int, ...], letters: str) -> Any:
    """x in this shape, if it has as many numbers."""
    if not is_array(x):
        raise TypeError(f"{name}: expected an array {letters}, got {_shown(x)}")
    size = math.prod(shape)
    if math.prod(x.shape) != size:
        raise ValueError(f"{name}: expected {letters} = ({size},), got {tuple(x.shape)}")
    return x.reshape(shape)


def _shown(x: Any) -> str:
    if x is None or isinstance(x, bool | int | float | str):
        return repr(x)
    return "an array" if is_array(x) else type(x).__name__
