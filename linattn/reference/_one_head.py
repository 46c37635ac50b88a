"""Shorter forms of a call: q [T,K] of one head in the place of [B,T,H,K], and every other array
likewise; a number in the place of a gate's array."""

import functools
import inspect

import numpy as np

from ._loops import OPS

# [T,...]: batch and head are axes 0 and 2
_BY_TOKEN = ("do", "q", "k", "v", "g", "alpha", "beta", "x", "y", "eta")
_BY_HEAD = ("gamma", "slopes")  # [1]
_OF_HEADS = ("bonus",)  # [K]
# arrays, or a number for all of their elements
_GATES = ("g", "alpha", "beta", "eta", "gamma", "slopes", "bonus")
_STATES = ("initial_state", "d_final_state")  # [K,V], [N,K,V] with cu_seqlens; or a pair


def takes_one_head(function):
    """Let a function of [B,T,H,K] arrays take those of one head, and numbers as gates, as linattn's
    ops do."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*positional, **keywords):
        given = signature.bind(*positional, **keywords).arguments
        rest = next((x.name for x in signature.parameters.values() if x.kind is x.VAR_KEYWORD), "")
        given.update(given.pop(rest, {}))
        op = OPS.get(given.get("name", function.__name__))
        numbers = [x for x in _GATES if given.get(x) is not None and np.ndim(given[x]) == 0]
        for name in numbers:
            given[name] = np.full(_gate_shape(name, op, given["q"], given["v"]), given[name])
        return _with_numbers(whole(given), numbers)

    def whole(given):
        if np.ndim(given["q"]) != 2:
            return function(**given)
        axes = 1 if given.get("cu_seqlens") is not None else (0, 1)  # of a state: [N,HV,...]
        for name, x in given.items():
            if x is None:
                continue
            if name in _BY_TOKEN:
                given[name] = np.expand_dims(x, (0, 2))
            elif name in _BY_HEAD:
                given[name] = np.reshape(x, 1)
            elif name in _OF_HEADS:
                given[name] = np.expand_dims(x, 0)
            elif name in _STATES:
                given[name] = _each(lambda S: np.expand_dims(S, axes), x)
        result = function(**given)
        if isinstance(result, np.ndarray):  # softmax attention has no state
            return result[0, :, 0]
        if not hasattr(result, "_fields"):
            o, state = result
            return o[0, :, 0], _each(lambda S: S.squeeze(axes), state)
        return type(result)(*(_gradient(*field, axes) for field in result._asdict().items()))

    return call


def _gate_shape(name, op, q, v):
    """The shape of a gate's array: [HV], [B,T,HV] or [B,T,HV,K], without B and HV for one head; or
    that of bonus, [H,K]."""
    if name in _BY_HEAD:
        return np.shape(v)[2:3] or (1,)
    if name in _OF_HEADS:
        return np.shape(q)[2:] or np.shape(q)[1:]
    by_key = op.decay == "key" and name in ("g", "alpha")
    return np.shape(v)[:-1] + np.shape(q)[-1:] * by_key


def _with_numbers(result, numbers):
    """Gradients of numbers are numbers: the gate's is the field dg."""
    if not hasattr(result, "dg"):
        return result
    sums = {f"d{name}" if name in ("beta", "eta", "bonus") else "dg" for name in numbers}
    return result._replace(**{name: float(getattr(result, name).sum()) for name in sums})


def _each(function, state):
    """The function of S, or of both arrays of a pair."""
    return tuple(map(function, state)) if isinstance(state, tuple) else function(state)


def _gradient(name, x, axes):
    """A field of a tuple of gradients, as its input was given."""
    if name == "d_initial_state" and x is not None:
        return _each(lambda S: S.squeeze(axes), x)
    if x is None or x.ndim == 1:  # [HV] is a gate per head
        return x
    return x[0] if x.ndim == 2 else x[0, :, 0]  # [H,K] is bonus
