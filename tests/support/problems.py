"""Legal calls of every op and pass: their arrays by the contract's letters, and ways to spoil them.

`arguments` gives every optional array, with sizes that all differ: for tests of errors. `problem`
gives the inputs of linattn.testing: for tests of results.
"""

import inspect

import numpy as np
import pytest

from linattn.testing import GATES, make_inputs, make_output_gradients
from linattn.variants import ARRAYS
from support.compare import snapshot
from support.device import ops as linattn
from support.variants import KEY_DECAY, PAIR_DECAY

OPS = linattn.OPS
PASSES = ("forward", "step", "backward")
WHOLE = ("forward", "backward")  # of whole sequences
LETTERS = {"B": 3, "T": 5, "H": 2, "HV": 4, "K": 8, "V": 6}  # all different
INPUTS = [line for line in ARRAYS if line.role == "INPUT" and line.gradient]
# [B,T,...]
PER_TOKEN = (*(x.label for x in INPUTS if "T" in x.letters or "L" in x.letters), "alpha", "do")
PER_HEAD = ("gamma", "slopes")  # [HV]
KEY_HEADS = {
    x.label: x.letters.index("H") for x in INPUTS if "H" in x.letters
}  # by label: the axis


def function(op, pass_):
    return getattr(linattn, op if pass_ == "forward" else f"{op}_{pass_}")


def call(op, pass_, made):
    """All that a call gives: a forward pass's final state too."""
    return function(op, pass_)(
        **made | ({"output_final_state": True} if pass_ == "forward" else {})
    )


# ---- calls with random inputs ----


def problem(op, pass_="forward", *, dtype=np.float32, seed=0, **sizes):
    """The arguments of a legal call, with an initial state, and a step's without a token axis."""
    rng = np.random.default_rng(seed)
    x = make_inputs(op, rng, **sizes, dtype=dtype, initial_state=True)
    if pass_ == "backward":
        x |= make_output_gradients(op, rng, x)
    if pass_ == "step":
        x = at_token(x, 0)
        x["state"] = x.pop("initial_state")
    return x


def at_token(x, t, rows=slice(None)):
    """The arguments of one step, or of some of its rows: arrays with a token axis are taken at
    token t."""
    return {
        name: np.ascontiguousarray(a[rows, t]) if name in PER_TOKEN else a for name, a in x.items()
    }


def poisoned(shape, dtype):
    """An output buffer full of NaN, so that elements that a call leaves out show."""
    return np.full(shape, np.nan).astype(dtype)


# ---- calls with every array, by letters ----


def gate_of(op):
    """The name of the op's gate, or None."""
    names = ("g", "gamma", "slopes")
    return next((name for name in names if name in GATES[op]), None)


def letters_of(op, pass_, name, *, one_head=False):
    """The contract's letters for one array."""
    by_table = {"L": "T", "h": "HV"}  # the names of axes in messages
    letters = {
        x.label: " ".join(by_table.get(letter, letter) for letter in x.letters) for x in INPUTS
    }
    letters |= {
        "do": "B T HV V",
        "out": "B T HV V",
        "gamma": "HV",
        "slopes": "HV",
        "initial_state": "N HV K V",
        "state": "N HV K V",
        "d_final_state": "N HV K V",
        "g": "B T HV K" if op in KEY_DECAY else "B T HV",
    }
    letters["alpha"] = letters["g"]
    got = letters[name].split()
    if pass_ == "step":
        got = [x for x in got if x != "T"]
    if one_head and name not in PER_HEAD:
        got = [x for x in got if x not in ("B", "N", "H", "HV")]
    return got


def sizes(letters, dims):
    return tuple(dims["B" if letter == "N" else letter] for letter in letters)


def shape_text(shape):
    return str(tuple(int(n) for n in shape))


def array_names(op, pass_):
    """Every array of a call but out and cu_seqlens, in the order of the signature; not the pairs of
    arrays that the states of some ops are."""
    names = ["do"] if pass_ == "backward" else []
    gates = [x for x in inspect.signature(function(op, "forward")).parameters if x in GATES[op]]
    names += ["q", "k", "v", *gates]
    return names if op in PAIR_DECAY else [*names, *state_names(pass_)]


def state_label(op, name):
    """The name of a state's first array in messages."""
    return f"{name}[0]" if op in PAIR_DECAY else name


def state_names(pass_):
    return {"forward": ["initial_state"], "step": ["state"]}.get(
        pass_, ["initial_state", "d_final_state"]
    )


def values_for(rng, name, shape):
    if name in ("g", "slopes"):
        x = rng.uniform(0.1, 0.9, shape)
        return x if name == "slopes" else -x
    if name in ("alpha", "gamma", "beta", "eta"):
        return rng.uniform(0.1, 0.9, shape)
    return 0.5 * rng.standard_normal(shape)


def arguments(op, pass_, *, dtype=np.float32, one_head=False, seed=0, **dims):
    """A legal call, every optional array given; linear attention is not normalised (one state)."""
    dims = LETTERS | dims | ({"B": 1, "H": 1, "HV": 1} if one_head else {})
    rng = np.random.default_rng(seed)
    real = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    made = {}

    def array(name):
        shape = sizes(letters_of(op, pass_, name, one_head=one_head), dims)
        return np.asarray(values_for(rng, name, shape)).astype(real if "state" in name else dtype)

    made |= {name: array(name) for name in array_names(op, pass_)}
    if op in PAIR_DECAY:
        made |= {name: (array(name), array(name)) for name in state_names(pass_)}
    return made | ({"normalize": False} if op == "linear_attention" else {})


def normalised(pass_):
    """As above with the pair (S, z)."""
    made = arguments("linear_attention", pass_)
    for name in ("state", "initial_state", "d_final_state"):
        if name in made:
            made[name] = (made[name], np.abs(made[name][..., 0]))
    return made | {"normalize": True}


def grown(x, axis):
    """One element more along an axis."""
    return np.concatenate([x, x.take([0], axis)], axis)


def refused(call, made, error, *fragments):
    """The call raises exactly this error, says all of these, and writes nothing."""
    before = snapshot(made)
    with pytest.raises((TypeError, ValueError, MemoryError)) as caught:
        call(**made)
    message = str(caught.value)
    assert caught.type is error, f"{caught.type.__name__}: {message}"
    for fragment in fragments:
        assert fragment in message, message
    assert snapshot(made) == before, "an array was written"


CALLS = [(op, pass_) for op in OPS for pass_ in PASSES]
SLOTS = [(op, pass_, name) for op, pass_ in CALLS for name in array_names(op, pass_)]
calls = pytest.mark.parametrize(("op", "pass_"), CALLS)
slots = pytest.mark.parametrize(("op", "pass_", "name"), SLOTS)
whole = pytest.mark.parametrize("pass_", WHOLE)
