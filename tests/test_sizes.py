"""Arrays whose sizes no memory holds: the answer comes at once, or a MemoryError that names one.

Each call runs in a process of its own, since a wrong size once was a wild address."""

import re

import numpy as np
import pytest
from support.processes import python

import linattn

MODES = ("chunk", "recurrent", "parallel")
BEFORE = """
import numpy as np, linattn
from linattn import testing
def gates(op, shape, K):
    # its arrays beside q, k and v, for as many heads of keys as of values
    sizes = dict(zip("BThV" if len(shape) == 4 else "TV", shape), K=K)
    sizes |= {letter: sizes[of] for letter, of in zip("HL", "hT") if of in sizes}
    made = {}
    for name in testing.GATES[op]:
        letters = [x for x in testing._LETTERS[op][name] if x in sizes]
        made[name] = np.zeros([sizes[x] for x in letters] or 1, "f")
    made.pop("gamma", None)  # it has a default
    return made
"""


@pytest.mark.parametrize("op", linattn.OPS)
@pytest.mark.parametrize(
    ("q", "v"),
    [
        ("(0, 2**20)", "(0, 2**42)"),
        ("(2**40, 0, 1, 1)", "(2**40, 0, 1, 1)"),
        ("(0, 2**40, 1, 2**20)", "(0, 2**40, 1, 2**20)"),
    ],
    ids=["T=0", "T=0,B=2^40", "B=0,T=2^40"],
)
def test_arrays_of_nothing_return_at_once(op, q, v):
    """With K V of 2^62 numbers, or 2^40 sequences without a token."""
    code = f"""{BEFORE}
q, v = np.empty({q}, "f"), np.empty({v}, "f")
more = gates("{op}", v.shape, q.shape[-1])
for mode in {MODES}:
    o, _ = linattn.{op}(q, q, v, **more, mode=mode)
    d = linattn.{op}_backward(v, q, q, v, **more, mode=mode)
    assert o.shape == v.shape and d.dq.shape == q.shape and d.dv.shape == v.shape, mode
    if d.dg is not None and "g" not in more:
        assert not np.asarray(d.dg).any(), mode
"""
    python(code, timeout=20)


@pytest.mark.parametrize("op", linattn.OPS)
def test_final_states_of_an_empty_batch(op):
    """No sequence, so no state either, however large each would be."""
    python(
        f"""{BEFORE}
q = np.empty((0, 2**40, 1, 2**20), "f")
_, state = linattn.{op}(q, q, q, **gates("{op}", q.shape, 2**20), output_final_state=True)
assert (state[0] if isinstance(state, tuple) else state).shape == (0, 1, 2**20, 2**20)
""",
        timeout=20,
    )


@pytest.mark.parametrize(
    "call",
    [
        "lightning_attention(q, q, v, gate)",
        "retention(q, q, v, gamma=gate)",
        "lightning_attention_step(q[:, 0], q[:, 0], v[:, 0], gate, state=S)",
    ],
)
def test_a_gate_of_many_heads_and_no_token(call):
    """2^36 heads have no number that anything depends on, so none is looked at."""
    python(
        f"""
import numpy as np, linattn
B = 0 if "step" in {call!r} else 1
T = 1 if "step" in {call!r} else 0
q, v = np.empty((B, T, 1, 1), "f"), np.empty((B, T, 2**36, 1), "f")
S = np.empty((0, 2**36, 1, 1), "f")
gate = np.broadcast_to(np.float32(0.5), 2**36)
linattn.{call}
""",
        timeout=20,
    )


def test_default_decays_of_too_many_heads():
    done = python(
        """
import numpy as np, linattn
q, v = np.empty((1, 0, 1, 1), "f"), np.empty((1, 0, 2**60, 1), "f")
try:
    linattn.retention(q, q, v)
except MemoryError as error:
    print(error)
""",
        timeout=20,
    )
    assert done.startswith(f"v: expected as many heads as fit in memory, got [HV] = ({2**60},)")


@pytest.mark.parametrize("torch", [False, True])
def test_a_final_state_that_cannot_be_had(torch):
    if torch:
        pytest.importorskip("torch")
    done = python(
        f"""
import numpy as np, linattn
q, v = np.empty((0, 2**20), "f"), np.empty((0, 2**42), "f")
if {torch}:
    import torch
    q, v = torch.from_numpy(q), torch.from_numpy(v)
try:
    linattn.retention(q, q, v, output_final_state=True)
except MemoryError as error:
    print(error, "|", type(error.__cause__).__name__)
""",
        timeout=60,
    )
    assert done.startswith(
        "final_state: expected memory for [K,V] = (1048576, 4398046511104), got none |"
    )
    assert not done.strip().endswith("NoneType")


def test_an_output_that_cannot_be_had():
    done = python(
        """
import numpy as np, linattn
x = np.broadcast_to(np.zeros((1, 1), "f"), (2**46, 1))
for call in (linattn.retention, lambda *x: linattn.retention_backward(x[0], *x)):
    try:
        call(x, x, x)
    except MemoryError as error:
        print(error)
""",
        timeout=20,
    )
    o, dq = done.splitlines()
    assert re.match(r"o: expected memory for \[T,V\] = \(70368744177664, 1\), got none", o)
    assert re.match(r"dq: expected memory for \[T,K\] = \(70368744177664, 1\), got none", dq)


@pytest.mark.parametrize(
    "call",
    [
        "(x, x, x)",
        "(x, x, x, mode='parallel')",
        "_backward(x, x, x, x)",
        "_backward(x, x, x, x, mode='parallel')",
        "_step(x[0], x[0], x[0], state=S)",
    ],
)
def test_a_state_that_cannot_be_had(call):
    """K V = 2^44 numbers. (Token by token a pass keeps a strip of the state alone.)

    Some machines promise any amount of memory: the process may have 256 GiB."""
    done = python(
        f"""
import numpy as np, linattn, resource
resource.setrlimit(resource.RLIMIT_AS, (2**38, 2**38))
x = np.zeros((2, 2**22), "f")
S = np.broadcast_to(np.zeros(1, "f"), (2**22, 2**22))
try:
    linattn.retention{call}
except (MemoryError, ValueError) as error:
    print(type(error).__name__, error)
""",
        timeout=60,
    )
    if "state" in call:
        assert done.startswith("ValueError state: expected a writable array")
    else:
        assert done.startswith("MemoryError not enough memory for the call's scratch"), done


def test_sizes_below_zero_and_beyond_any_memory():
    """As an exporter may give them; no NumPy array has such sizes."""

    class Header:
        def __init__(self, shape, **more):
            self.__cuda_array_interface__ = {
                "shape": shape,
                "typestr": "<f4",
                "data": (4096, False),
                "version": 3,
                **more,
            }

    for shape, more, text in (
        ((-5, 2), {}, "expected sizes >= 0, got shape (-5, 2)"),
        ((-1, 3, 1, 2), {"strides": (4, 4, 4, 4)}, "expected sizes >= 0, got shape (-1, 3,"),
        ((2**62, 2**62), {}, "expected an array within 2^61 bytes, got shape"),
        ((3, 3), {"strides": (2**62, 4)}, "expected an array within 2^61 bytes, got shape"),
        ((3, 3), {"strides": (-(2**63), 4)}, "expected an array within 2^61 bytes, got shape"),
        ((3, 3), {"strides": (10, 4)}, "expected strides of whole elements, got strides (10"),
    ):
        with pytest.raises(ValueError, match="^q: " + re.escape(text)):
            linattn.linear_attention(Header(shape, **more), np.ones((2, 2)), np.ones((2, 2)))
