"""Arrays of one head: q [T,K] in the place of [B,T,H,K], and everything else in the same form."""

import functools
import inspect

import numpy as np

_BY_TOKEN = ("do", "q", "k", "v", "g", "alpha", "beta")  # [T,...]: batch and head are axes 0 and 2
_BY_HEAD = ("gamma", "slopes")  # [1], or a number
_STATES = ("initial_state", "d_final_state")  # [K,V], [N,K,V] with cu_seqlens; or a pair with z


def takes_one_head(function):
    """Let a function of [B,T,H,K] arrays take those of one head too, as linattn's ops do."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*positional, **keywords):
        given = signature.bind(*positional, **keywords).arguments
        rest = next((x.name for x in signature.parameters.values() if x.kind is x.VAR_KEYWORD), "")
        given.update(given.pop(rest, {}))
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


def _each(function, state):
    """The function of S, or of S and of z."""
    return tuple(map(function, state)) if isinstance(state, tuple) else function(state)


def _gradient(name, x, axes):
    """A field of a tuple of gradients, as its input was given."""
    if name == "d_initial_state" and x is not None:
        return _each(lambda S: S.squeeze(axes), x)
    return x if x is None or x.ndim == 1 else x[0, :, 0]  # [HV] is a gate per head
