"""The ops for JAX: under jit, grad, vmap, scan, checkpoint, and on meshes of devices.

Every op of ``linattn.VARIANTS`` is here, ``linattn.jax.<op>`` and ``linattn.jax.<op>_step``, with
the arguments of ``linattn.<op>`` and ``linattn.<op>_step``. So are ``selective_scan``, ``s4d``,
``rg_lru``, ``hgrn`` and ``causal_conv1d`` with their steps, and the systems of
``linattn.composed``. XLA calls the C core on the CPU, and the CUDA kernels on a GPU.
Differences from the functions of ``linattn``:

- A step is a function: it returns ``(o, state)`` and changes nothing. Where the old state is not
  used again, XLA lets the new one take its place.
- There is no ``out``, no ``mask``, and no ``<op>_backward``: ``jax.grad`` calls the backward pass,
  which needs the inputs alone. There are no gradients of gradients and no forward-mode derivatives.
- A decay above one raises no warning.

A wrong argument raises TypeError or ValueError while JAX traces the call, as from ``linattn``. Only
the numbers in ``cu_seqlens`` and ``state_indices`` are not known then: XLA reports them when the
call runs on a CPU.

Examples
--------
The gradient of a compiled loss:

>>> import jax, jax.numpy as jnp, linattn.jax
>>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 16, 2, 4))  # [B,T,H,K]
>>> g, beta = -jnp.ones((1, 16, 2)), 0.5  # [B,T,HV], the LOG of the decay; a number
>>> def loss(q):
...     o, _ = linattn.jax.gated_delta_rule(q, k, v, g, beta)
...     return (o * o).sum()
>>> jax.jit(jax.grad(loss))(q).shape
(1, 16, 2, 4)

Tokens one after another, in a scan:

>>> def token(state, x):
...     q, k, v, g = x
...     o, state = linattn.jax.gated_delta_rule_step(q, k, v, g, beta, state=state)
...     return state, o
>>> tokens = jax.tree.map(lambda x: x.swapaxes(0, 1), (q, k, v, g))  # [T,B,...]
>>> state, o = jax.lax.scan(token, jnp.zeros((1, 2, 4, 4)), tokens)
>>> whole, _ = linattn.jax.gated_delta_rule(q, k, v, g, beta)
>>> bool(jnp.allclose(o.swapaxes(0, 1), whole, atol=1e-5))
True
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import linattn
from linattn import composed
from linattn.jax import _gradients, _rooms
from linattn.ops._core import WAYS, Ways
from linattn.variants import OPS

_WITHOUT_A_TABLE = ("selective_scan", "s4d", "rg_lru", "hgrn", "causal_conv1d")
SYSTEMS = tuple(name for name in composed.__all__ if f"{name}_step" in composed.__all__)

__all__: list[str] = [
    f"{name}{x}" for name in (*OPS, *_WITHOUT_A_TABLE, *SYSTEMS) for x in ("", "_step")
]

_WAYS = Ways(_gradients.forward, _gradients.step, _rooms.forward, _rooms.step)

_DOC = """{summary}

As :func:`linattn.{name}`, for arrays of JAX, traced or not. {how}

Parameters
----------
{parameters}
    As in :func:`linattn.{name}`.

Returns
-------
{output}
{state}

Raises
------
TypeError, ValueError
    As from :func:`linattn.{name}`, while the call is traced.

See Also
--------
linattn.{name} : The shapes and dtypes, the paper, an example.
"""


def _array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def _output(name: str) -> str:
    step, whole = name.endswith("_step"), name.removesuffix("_step")
    if whole in SYSTEMS:
        return f"output : array\n    As of :func:`linattn.{name}`."
    if whole in OPS:
        return f"o : array {'[B,HV,V]' if step else '[B,T,HV,V]'}, dtype of v"
    return f"y : {'[B,D]' if step else '[B,T,D]'}"


def _documentation(name: str, parameters: list[str], summary: str) -> str:
    step = name.endswith("_step")
    return _DOC.format(
        summary=summary.replace("; ``state`` is changed in place", ""),
        name=name,
        parameters=", ".join(parameters) + " :",
        how="The state is not changed, but returned." if step else "JAX differentiates it.",
        output=_output(name),
        state="state : the state after the token, of the dtype and shape of the one before"
        if step
        else "final_state : the state after the last token, or None",
    )


# Keywords of linattn's functions that these have not, and why.
_LEFT_OUT = {
    "out": "no array of JAX is written",
    "mask": "its tokens cannot be counted while JAX traces",
}


def _of_jax(name: str) -> Callable[..., Any]:
    """linattn's function of this name, whose way to the core is XLA's."""
    inner = getattr(linattn, name)
    given = inspect.signature(inner).parameters.values()
    parameters = [x for x in given if x.name not in (*_LEFT_OUT, "_unknown")]
    seen = {"cu_seqlens", "seq_idx"} if name in SYSTEMS else set()

    def function(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for x in _LEFT_OUT.keys() & kwargs.keys():
            raise TypeError(f"{name}() got an unexpected keyword argument {x!r} ({_LEFT_OUT[x]})")
        # a system looks at the numbers of these, which JAX would hide
        known = {x: kwargs.pop(x) for x in seen & kwargs.keys()}
        args, kwargs = jax.tree.map(_array, (args, kwargs))
        kwargs |= known
        token = WAYS.set(_WAYS)
        try:
            found: tuple[Any, Any] = inner(*args, **kwargs)
            return found
        finally:
            WAYS.reset(token)

    function.__name__ = function.__qualname__ = name
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    summary = (inspect.getdoc(inner) or "").partition("\n")[0]
    function.__doc__ = _documentation(name, [x.name for x in parameters], summary)
    return function


globals().update((name, _of_jax(name)) for name in __all__)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Any]: ...
