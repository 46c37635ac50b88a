"""Bad input: every wrong argument raises the documented exception, whose message names it, and
leaves every array as it was. Odd but legal input (layouts, empty batches) gives the same bits."""

import functools
import os
import re
import signal
import traceback
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import device
from support.device import ops as linattn

from linattn.testing import GATES

OPS = linattn.OPS
FACES = ("forward", "step", "backward")
LETTERS = {"B": 3, "T": 5, "H": 2, "HV": 4, "K": 8, "V": 6}  # all different
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


# ---- legal calls to spoil ----


def function(op, face):
    return getattr(linattn, op if face == "forward" else f"{op}_{face}")


def gate_of(op):
    """The name of the op's gate, or None."""
    names = [name.split()[0] for name in GATES[op] if name != "beta"]
    return names[0] if names else None


def letters_of(op, face, name, *, one_head=False):
    """The contract's letters for one array."""
    letters = {
        "q": "B T H K", "k": "B T H K", "v": "B T HV V", "do": "B T HV V", "out": "B T HV V",
        "beta": "B T HV", "gamma": "HV", "slopes": "HV",
        "initial_state": "N HV K V", "state": "N HV K V", "d_final_state": "N HV K V",
        "g": "B T HV K" if "g per key" in GATES[op] else "B T HV",
    }
    letters["alpha"] = letters["g"]
    got = letters[name].split()
    if face == "step":
        got = [x for x in got if x != "T"]
    if one_head and name not in ("gamma", "slopes"):
        got = [x for x in got if x not in ("B", "N", "H", "HV")]
    return got


def sizes(letters, dims):
    return tuple(dims["B" if letter == "N" else letter] for letter in letters)


def array_names(op, face):
    """Every array of a call but out and cu_seqlens, in the order of the signature."""
    names = ["do"] if face == "backward" else []
    names += ["q", "k", "v", *(name.split()[0] for name in GATES[op])]
    names += ["state" if face == "step" else "initial_state"]
    return [*names, "d_final_state"] if face == "backward" else names


def values_for(rng, name, shape):
    if name in ("g", "slopes"):
        x = rng.uniform(0.1, 0.9, shape)
        return x if name == "slopes" else -x
    if name in ("alpha", "gamma", "beta"):
        return rng.uniform(0.1, 0.9, shape)
    return 0.5 * rng.standard_normal(shape)


def arguments(op, face, *, dtype=np.float32, one_head=False, seed=0, **dims):
    """A legal call, every optional array given; linear attention is not normalised (one state)."""
    dims = LETTERS | dims | ({"B": 1, "H": 1, "HV": 1} if one_head else {})
    rng = np.random.default_rng(seed)
    real = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    made = {}
    for name in array_names(op, face):
        shape = sizes(letters_of(op, face, name, one_head=one_head), dims)
        made[name] = np.asarray(values_for(rng, name, shape)).astype(
            real if "state" in name else dtype)
    return made | ({"normalize": False} if op == "linear_attention" else {})


def normalised(face):
    """As above with the pair (S, z)."""
    made = arguments("linear_attention", face)
    for name in ("state", "initial_state", "d_final_state"):
        if name in made:
            made[name] = (made[name], np.abs(made[name][..., 0]))
    return made | {"normalize": True}


def arrays_in(x):
    if isinstance(x, np.ndarray):
        yield x
    elif isinstance(x, dict):
        yield from arrays_in(list(x.values()))
    elif isinstance(x, tuple | list):
        for one in x:
            yield from arrays_in(one)


def snapshot(made):
    return [x.tobytes() for x in arrays_in(made) if not x.dtype.hasobject]


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


def shape_text(shape):
    return str(tuple(int(n) for n in shape))


def flat(result):
    return list(arrays_in(list(result) if isinstance(result, tuple) else [result]))


def assert_same_bits(got, want):
    got, want = flat(got), flat(want)
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.tobytes() == y.tobytes()


CALLS = [(op, face) for op in OPS for face in FACES]
SLOTS = [(op, face, name) for op, face in CALLS for name in array_names(op, face)]
calls = pytest.mark.parametrize(("op", "face"), CALLS)
slots = pytest.mark.parametrize(("op", "face", "name"), SLOTS)
WHOLE = ("forward", "backward")
whole = pytest.mark.parametrize("face", WHOLE)


@calls
def test_the_legal_call_is_legal(op, face):
    function(op, face)(**arguments(op, face))
    function(op, face)(**arguments(op, face, one_head=True))


# ---- wrong types ----

OPTIONAL = {"gamma", "initial_state", "d_final_state"}


@slots
@pytest.mark.parametrize("bad", [[[1.0]], "x", 1j, object(), {"a": 1}, b"12345678"],
                         ids=["list", "str", "complex", "object", "dict", "bytes"])
def test_not_an_array(op, face, name, bad):
    made = arguments(op, face) | {name: bad}
    refused(function(op, face), made, TypeError, f"{name}: expected an array, got ",
            type(bad).__name__)


class NoMemory:
    """What looks like an array, up to a point."""

    dtype = np.dtype(np.float32)

    @property
    def shape(self):
        raise RuntimeError("no shape")


class NoNumbers(NoMemory):
    shape = (3, 5, "HV", 8)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("bad", [[[1.0]], 3, 1.5, "x", (1, 2), object(), NoMemory(), NoNumbers(),
                                 np.float32(1)], ids=lambda bad: type(bad).__name__)
def test_q_is_named_when_nothing_is_an_array(op, face, bad):
    """With the gates that a call can do without left out, and whatever the ops look at before."""
    made = arguments(op, face)
    made |= dict.fromkeys(["q", "k", "v"], bad)
    made.pop("gamma", None)
    for options in ({}, {"feature_map": np.exp}, {"feature_map": np.exp, "qk_l2norm": True}):
        if options and (op != "linear_attention" or face == "backward"):
            break
        refused(function(op, face), made | options, TypeError, "q: expected an array, got ",
                type(bad).__name__)


def outcome_of(call):
    """The exception of a call in a child: a crash there must not end the tests. (A device is of no
    use to a child; the checks are the same.)"""
    if device.kind != "numpy":
        with pytest.raises(Exception) as caught:
            call()
        return f"{caught.type.__name__}: {caught.value}"
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on: forks beside threads
        child = os.fork()
    if child == 0:
        try:
            try:
                call()
                text = "nothing raised"
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(writing, text.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"died of {signal.Signals(os.WTERMSIG(status)).name}"
    return text


@pytest.mark.parametrize(("op", "face", "name"),
                         [slot for slot in SLOTS if slot[2] not in OPTIONAL])
def test_none_where_an_array_is_needed(op, face, name):
    made = arguments(op, face) | {name: None}
    text = outcome_of(lambda: function(op, face)(**made))
    assert re.match(rf"TypeError: {name}: expected .*got (None|<class 'NoneType'>)", text), text


@pytest.mark.parametrize(("op", "face", "name"), [s for s in SLOTS if s[2] in OPTIONAL])
def test_none_where_an_array_is_optional(op, face, name):
    function(op, face)(**arguments(op, face) | {name: None})


BAD_DTYPES = ["int8", "int32", "int64", "uint8", "uint64", "bool", "complex64", "complex128",
              "longdouble", "object", "U3", "S3", "V0", "datetime64[s]", "f4,f4"]  # V0: no bytes


@slots
@pytest.mark.parametrize("dtype", BAD_DTYPES)
def test_unsupported_dtype(op, face, name, dtype):
    made = arguments(op, face)
    bad = np.zeros(made[name].shape, dtype)
    refused(function(op, face), made | {name: bad}, TypeError, f"{name}: expected float", "got ")


@pytest.mark.parametrize("other", [np.float64, np.float16, BFLOAT16])
@pytest.mark.parametrize(("op", "face", "name"), [s for s in SLOTS if s[2] in ("k", "v", "do")])
def test_one_dtype_for_q_k_v_and_do(op, face, name, other):
    made = arguments(op, face)
    made[name] = made[name].astype(other)
    refused(function(op, face), made, TypeError,
            f"{name}: expected float32 (the dtype of q), got {np.dtype(other).name}")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16])
@calls
def test_a_state_has_the_dtype_of_the_sums(op, face, dtype):
    for wrong in (np.float16, np.float32 if dtype == np.float64 else np.float64):
        made = arguments(op, face, dtype=dtype)
        name = "state" if face == "step" else "initial_state"
        made[name] = made[name].astype(wrong)
        want = "float64" if dtype == np.float64 else "float32"
        refused(function(op, face), made, TypeError, f"{name}: expected {want}",
                f"got {np.dtype(wrong).name}")


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("gate", [np.float64, np.float32, np.float16, BFLOAT16])
def test_gates_have_any_dtype(dtype, gate):
    for op, face in (("kda", "forward"), ("gated_delta_rule", "step"), ("kda", "backward")):
        made = arguments(op, face, dtype=dtype)
        made |= {"g": made["g"].astype(gate), "beta": made["beta"].astype(gate)}
        if face not in FACES:
            continue
        result = function(op, face)(**made)
        if face == "backward":
            assert result.dg.dtype == gate and result.dbeta.dtype == gate
            assert result.dq.dtype == dtype and result.dv.dtype == dtype
        else:
            assert (result[0] if face == "forward" else result).dtype == dtype


@pytest.mark.parametrize("face", ["forward", "step"])
@pytest.mark.parametrize("bad", [[1.0], "x", True, np.float64, np.float16, np.int32, "complex64"],
                         ids=str)
def test_out_of_the_wrong_type(face, bad):
    shape = sizes(letters_of("kda", face, "out"), LETTERS)
    array = np.zeros(shape, bad) if bad in (np.float64, np.float16, np.int32, "complex64") else bad
    refused(function("kda", face), arguments("kda", face) | {"out": array}, TypeError,
            "out: expected ", "got ")


@whole
@pytest.mark.parametrize("dtype", ["float32", "float64", "uint32", "uint64", "int16", "bool",
                                   "object", "complex64"])
@pytest.mark.parametrize("op", ["linear_attention", "kda"])
def test_cu_seqlens_of_the_wrong_dtype(op, face, dtype):
    made = arguments(op, face, B=1) | {"cu_seqlens": np.array([0, 5]).astype(dtype)}
    refused(function(op, face), made, TypeError, "cu_seqlens: expected int32 or int64, got ")


@whole
@pytest.mark.parametrize("bad", [[0, 5], (0, 5), "x", 5, 5.0], ids=repr)
def test_cu_seqlens_is_no_array(face, bad):
    made = arguments("gla", face, B=1) | {"cu_seqlens": bad}
    refused(function("gla", face), made, TypeError, "cu_seqlens: expected ")


# ---- wrong shapes ----


def axes():
    for op, face, name in SLOTS:
        for axis, letter in enumerate(letters_of(op, face, name)):
            yield pytest.param(op, face, name, axis, id=f"{op}-{face}-{name}-{letter}")


def grown(x, axis):
    return np.concatenate([x, x.take([0], axis)], axis)


@pytest.mark.parametrize(("op", "face", "name", "axis"), list(axes()))
def test_each_letter_wrong(op, face, name, axis):
    made = arguments(op, face)
    letters = letters_of(op, face, name)
    want, made[name] = made[name].shape, grown(made[name], axis)
    call = function(op, face)
    if name == "q":  # q says what B, T, H and K are; the others are then wrong
        refused(call, made, ValueError, "k: expected [" if letters[axis] != "H" else "v: expected ",
                ", got ")
    elif name == "v" and letters[axis] == "HV":
        refused(call, made, ValueError, "v: expected HV to be a multiple of H = 2, got HV = 5")
    elif name == "v" and letters[axis] == "V":  # v says what V is
        refused(call, made, ValueError, "state: expected [", f", got {shape_text(want[:1])[:-2]}")
    else:
        refused(call, made, ValueError,
                f"{name}: expected [{','.join(letters)}] = {shape_text(want)}, got "
                f"{shape_text(made[name].shape)}")


@pytest.mark.parametrize(("op", "face", "name"),
                         [s for s in SLOTS if s[2] not in ("q", "v", "gamma", "slopes")])
def test_each_letter_wrong_for_one_head(op, face, name):
    letters = letters_of(op, face, name, one_head=True)
    for axis in range(len(letters)):
        made = arguments(op, face, one_head=True)
        want, made[name] = made[name].shape, grown(made[name], axis)
        refused(function(op, face), made, ValueError,
                f"{name}: expected [{','.join(letters)}] = {shape_text(want)}, got "
                f"{shape_text(made[name].shape)}")


@pytest.mark.parametrize("op", OPS)
@whole
def test_three_dimensions_are_refused_with_a_hint(op, face):
    made = arguments(op, face)
    refused(function(op, face), made | {"q": made["q"][0]}, ValueError,
            "q: expected 4-D [B,T,H,K], or 2-D [T,K] for one head; got (5, 2, 8)",
            "q[None]", "q[:, :, None]")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(), (8,), (1, 3, 5, 2, 8), (1,) * 8], ids=str)
@whole
def test_q_of_odd_dimensions(op, face, shape):
    refused(function(op, face), arguments(op, face) | {"q": np.zeros(shape, np.float32)},
            ValueError, "q: expected ", "[B,T,H,K]", f"got {shape_text(shape)}")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(), (2, 8), (3, 5, 2, 8), (1, 3, 5, 2, 8)], ids=str)
def test_q_of_odd_dimensions_in_a_step(op, shape):
    refused(function(op, "step"), arguments(op, "step") | {"q": np.zeros(shape, np.float32)},
            ValueError, "q: expected ", "[B,H,K]", f"got {shape_text(shape)}")


@slots
def test_a_dimension_too_many_or_too_few(op, face, name):
    made = arguments(op, face)
    for bad in (made[name][None], np.asarray(made[name][0])):
        if name == "q" or bad.ndim > 4:  # tests of their own
            continue
        refused(function(op, face), made | {name: bad}, ValueError, f"{name}: expected ",
                f"got {shape_text(bad.shape)}")


@pytest.mark.parametrize("name", ["k", "v", "g", "initial_state", "out"])
def test_five_dimensions(name):
    made = arguments("kda", "forward")
    x = made[name] if name in made else np.zeros_like(made["v"])
    refused(linattn.kda, made | {name: x[None]}, ValueError, f"{name}: expected ",
            f"got {shape_text(x[None].shape)}")


@calls
@pytest.mark.parametrize("letter", ["K", "V", "H", "HV"])
def test_sizes_that_may_not_be_zero(op, face, letter):
    dims = {letter: 0} | ({"HV": 0} if letter == "H" else {})
    names = {"K": "q: expected K >= 1, got K = 0", "V": "v: expected V >= 1, got V = 0",
             "H": "q: expected H >= 1, got H = 0", "HV": "v: expected HV"}
    refused(function(op, face), arguments(op, face, **dims), ValueError, names[letter])


@calls
@pytest.mark.parametrize("HV", [1, 3, 5])
def test_value_heads_are_a_multiple_of_heads(op, face, HV):
    refused(function(op, face), arguments(op, face, HV=HV), ValueError,
            f"v: expected HV to be a multiple of H = 2, got HV = {HV}")


CU_SEQLENS = [
    ([1, 5], "cu_seqlens: expected to start at 0, got 1"),
    ([-1, 5], "cu_seqlens: expected to start at 0, got -1"),
    ([0, 3, 2, 5], "cu_seqlens: expected never to fall, got 2 after 3 at index 2"),
    ([0, -1, 5], "cu_seqlens: expected never to fall, got -1 after 0 at index 1"),
    ([0, 6, 5], "cu_seqlens: expected never to fall, got 5 after 6 at index 2"),
    ([0, 4], "cu_seqlens: expected to end at T = 5, got 4"),
    ([0, 6], "cu_seqlens: expected to end at T = 5, got 6"),
    ([0, 2**31 - 1], "cu_seqlens: expected to end at T = 5, got 2147483647"),
    ([0], "cu_seqlens: expected to end at T = 5, got 0"),
    ([], "cu_seqlens: expected [N+1], got (0,)"),
    ([[0, 5]], "cu_seqlens: expected [N+1], got (1, 2)"),
    (5, "cu_seqlens: expected [N+1], got ()"),
]


@pytest.mark.parametrize(("cu", "text"), CU_SEQLENS, ids=[str(c) for c, _ in CU_SEQLENS])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@whole
def test_cu_seqlens(cu, text, dtype, face):
    if "[N+1]" not in text:
        device.needs_host("the values of cu_seqlens are not looked at")
    for op in ("retention", "kda"):
        made = arguments(op, face, B=1) | {"cu_seqlens": np.array(cu, dtype)}
        refused(function(op, face), made, ValueError, text)


@pytest.mark.parametrize("op", OPS)
@whole
@pytest.mark.parametrize("B", [0, 2])
def test_packed_sequences_have_one_row(op, face, B):
    made = arguments(op, face, B=B) | {"cu_seqlens": np.array([0, 5])}
    refused(function(op, face), made, ValueError,
            f"cu_seqlens: expected packed sequences to have B = 1, got B = {B}")


@pytest.mark.parametrize("op", OPS)
@whole
def test_states_of_packed_sequences_have_n_rows(op, face):
    made = arguments(op, face, B=1) | {"cu_seqlens": np.array([0, 2, 5])}
    refused(function(op, face), made, ValueError,
            "initial_state: expected [N,HV,K,V] = (2, 4, 8, 6), got (1, 4, 8, 6)")


@calls
def test_a_state_in_the_other_layout(op, face):
    name = "state" if face == "step" else "initial_state"
    refused(function(op, face), arguments(op, face) | {"state_v_first": True}, ValueError,
            f"{name}: expected [N,HV,V,K] = (3, 4, 6, 8), got (3, 4, 8, 6)")


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("spoil", "error", "text"), [
    (lambda S, z: S, TypeError, "expected the pair (S, z)"),
    (lambda S, z: (S,), ValueError, "expected the pair (S, z), got 1 items"),
    (lambda S, z: (S, z, z), ValueError, "expected the pair (S, z), got 3 items"),
    (lambda S, z: (S, None), TypeError, "[1]: expected an array, got None"),
    (lambda S, z: (None, z), TypeError, "[0]: expected an array, got None"),
    (lambda S, z: (S, z[:, :, :7].copy()), ValueError,
     "[1]: expected [N,HV,K] = (3, 4, 8), got (3, 4, 7)"),
    (lambda S, z: (S[:, :3].copy(), z), ValueError,
     "[0]: expected [N,HV,K,V] = (3, 4, 8, 6), got (3, 3, 8, 6)"),
    (lambda S, z: (z, S), ValueError, "[0]: expected [N,HV,K,V] = (3, 4, 8, 6), got (3, 4, 8)"),
    (lambda S, z: (S, z.astype(np.float64)), TypeError, "[1]: expected float32"),
    (lambda S, z: (S, "z"), TypeError, "[1]: expected an array, got <class 'str'>"),
    (lambda S, z: "Sz", TypeError, "expected the pair (S, z)"),
], ids=range(11))
def test_the_pair_of_a_normalised_op(face, spoil, error, text):
    for name in {"forward": ["initial_state"], "step": ["state"],
                 "backward": ["initial_state", "d_final_state"]}[face]:
        made = normalised(face)
        made[name] = spoil(*made[name])
        refused(function("linear_attention", face), made, error, name, text)


@pytest.mark.parametrize("face", FACES)
def test_a_pair_where_there_is_no_normaliser(face):
    refused(function("linear_attention", face), normalised(face) | {"normalize": False}, TypeError,
            "state: expected an array, got <class 'tuple'>")


@pytest.mark.parametrize("face", ["forward", "step"])
@pytest.mark.parametrize("axis", range(4))
def test_out_of_the_wrong_shape(face, axis):
    letters = letters_of("kda", face, "out")
    if axis == len(letters):
        pytest.skip("a step has no T")
    out = np.zeros(sizes(letters, LETTERS), np.float32)
    refused(function("kda", face), arguments("kda", face) | {"out": grown(out, axis)}, ValueError,
            f"out: expected [{','.join(letters)}] = {shape_text(out.shape)}, got "
            f"{shape_text(grown(out, axis).shape)}")


# ---- empty, but legal ----


@pytest.mark.parametrize("op", OPS)
def test_no_batch(op):
    for face in FACES:
        result = function(op, face)(**arguments(op, face, B=0))
        if face == "backward":
            assert result.dq.shape == (0, 5, 2, 8) and result.dv.shape == (0, 5, 4, 6)
            assert result.d_initial_state.shape == (0, 4, 8, 6)
            for name in ("dgamma", "dslopes"):  # sums over nothing
                if gate_of(op) == name[1:]:
                    assert not result.dg.any()
        else:
            o = result[0] if face == "forward" else result
            assert o.shape == ((0, 5, 4, 6) if face == "forward" else (0, 4, 6))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", ["chunk", "recurrent", "parallel"])
def test_no_tokens(op, mode):
    made = arguments(op, "forward", T=0)
    o, state = function(op, "forward")(**made, mode=mode, output_final_state=True)
    assert o.shape == (3, 0, 4, 6)
    assert state.tobytes() == made["initial_state"].tobytes()
    del made["initial_state"]
    _, state = function(op, "forward")(**made, mode=mode, output_final_state=True)
    assert state.shape == (3, 4, 8, 6) and not state.any()
    made = arguments(op, "backward", T=0)
    grads = function(op, "backward")(**made, mode=mode)
    assert grads.dq.shape == (3, 0, 2, 8)
    assert grads.d_initial_state.tobytes() == made["d_final_state"].tobytes()
    if gate_of(op) in ("gamma", "slopes"):
        assert not grads.dg.any()


@pytest.mark.parametrize("op", OPS)
def test_no_sequences_and_empty_sequences(op):
    made = arguments(op, "forward", B=1, T=0)
    del made["initial_state"]
    _, state = function(op, "forward")(
        **made, cu_seqlens=np.array([0]), output_final_state=True)
    assert state.shape == (0, 4, 8, 6)
    made = arguments(op, "forward", B=1) | {"cu_seqlens": np.array([0, 0, 5, 5])}
    made["initial_state"] = np.repeat(made["initial_state"], 3, 0)
    _, state = function(op, "forward")(**made, output_final_state=True)
    assert state[[0, 2]].tobytes() == made["initial_state"][[0, 2]].tobytes()
    assert state[1].tobytes() != made["initial_state"][1].tobytes()


def test_no_tokens_for_a_normalised_op_and_for_the_whole_sequence():
    for causal in (True, False):
        made = normalised("forward")
        for name in "qkv":
            made[name] = made[name][:, :0]
        o, (S, z) = linattn.linear_attention(**made, causal=causal, output_final_state=True)
        assert o.shape == (3, 0, 4, 6)
        assert_same_bits((S, z), made["initial_state"])


# ---- keywords ----


@calls
def test_an_unknown_keyword(op, face):
    refused(function(op, face), arguments(op, face) | {"chunks": 3}, TypeError, "'chunks'")


@calls
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_missing_array(op, face, name):
    made = arguments(op, face)
    del made[name]
    refused(function(op, face), made, TypeError, f"'{name}'")


@pytest.mark.parametrize(("op", "face"), [c for c in CALLS if gate_of(c[0]) == "g"])
def test_g_or_alpha(op, face):
    made = arguments(op, face)
    refused(function(op, face), made | {"alpha": np.exp(made["g"])}, ValueError,
            "g, alpha: expected one of the two", "got both")
    letters = ",".join(letters_of(op, face, "g"))
    refused(function(op, face), made | {"g": None}, TypeError,
            f"g: expected the log decay [{letters}] (or alpha=, the decay itself), got None")
    del made["g"]
    refused(function(op, face), made, TypeError, f"g: expected the log decay [{letters}]")
    function(op, face)(**made, alpha=np.exp(arguments(op, face)["g"]))


@pytest.mark.parametrize(("op", "face"), [c for c in CALLS if gate_of(c[0]) == "g"])
def test_messages_about_alpha_call_it_alpha(op, face):
    made = arguments(op, face)
    bad = np.exp(made.pop("g"))
    letters = ",".join(letters_of(op, face, "g"))
    refused(function(op, face), made | {"alpha": grown(bad, 0)}, ValueError,
            f"alpha: expected [{letters}] = {shape_text(bad.shape)}, got "
            f"{shape_text(grown(bad, 0).shape)}")
    refused(function(op, face), made | {"alpha": bad.astype(int)}, TypeError, "alpha: expected ")


@pytest.mark.parametrize(("op", "face"), [c for c in CALLS if "beta" in GATES[c[0]]])
def test_missing_beta(op, face):
    made = arguments(op, face)
    del made["beta"]
    refused(function(op, face), made, TypeError, "beta")


@pytest.mark.parametrize("op", OPS)
def test_missing_state(op):
    made = arguments(op, "step")
    del made["state"]
    refused(function(op, "step"), made, TypeError, "'state'")


OPTIONS = [
    ("scale", "x", TypeError), ("scale", [1.0], TypeError), ("scale", 1j, TypeError),
    ("scale", True, TypeError), ("scale", np.True_, TypeError),
    ("scale", np.array([1.0, 2.0]), TypeError), ("scale", 10**400, ValueError),
    ("scale", np.inf, ValueError), ("scale", -np.inf, ValueError), ("scale", np.nan, ValueError),
    ("mode", 3, TypeError), ("mode", None, TypeError), ("mode", b"chunk", TypeError),
    ("mode", True, TypeError), ("mode", "chunked", ValueError), ("mode", "", ValueError),
    ("mode", "Chunk", ValueError), ("mode", "chunk\0", ValueError),
    ("mode", "ch\udc80", ValueError),
    ("chunk_size", 0, ValueError), ("chunk_size", -1, ValueError),
    ("chunk_size", 2**70, ValueError), ("chunk_size", -2**70, ValueError),
    ("chunk_size", 1.5, TypeError),
    ("chunk_size", 16.0, TypeError), ("chunk_size", True, TypeError),
    ("chunk_size", "16", TypeError), ("chunk_size", [16], TypeError),
    ("chunk_size", np.float32(16), TypeError), ("chunk_size", np.array([16, 2]), TypeError),
    ("qk_l2norm", "False", TypeError), ("qk_l2norm", 0, TypeError), ("qk_l2norm", 1, TypeError),
    ("qk_l2norm", None, TypeError), ("qk_l2norm", 0.0, TypeError),
    ("qk_l2norm", np.array([True, False]), TypeError),
    ("state_v_first", "yes", TypeError), ("state_v_first", 1, TypeError),
    ("state_v_first", None, TypeError), ("state_v_first", [], TypeError),
    ("output_final_state", "True", TypeError), ("output_final_state", 1, TypeError),
    ("output_final_state", None, TypeError), ("output_final_state", 1.0, TypeError),
    ("allow_tf32", "tf32", TypeError), ("allow_tf32", 1, TypeError), ("allow_tf32", [], TypeError),
    ("features", "elu+1", TypeError),
]
ONLY = {"mode": WHOLE, "chunk_size": WHOLE, "output_final_state": ("forward",),
        "allow_tf32": ("forward",)}


def name_of(value):
    return value if isinstance(value, type) else repr(value)[:20]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("name", "bad", "error"), OPTIONS, ids=name_of)
def test_options(face, name, bad, error):
    if face not in ONLY.get(name, FACES):
        error = TypeError  # an unknown keyword there
    for op in ("linear_attention", "kda"):
        refused(function(op, face), arguments(op, face) | {name: bad}, error, name)


def test_options_that_are_legal():
    made = arguments("kda", "forward")
    want = linattn.kda(**made, scale=2.0, chunk_size=3, qk_l2norm=True, output_final_state=True)
    for scale in (2, np.float32(2), np.int64(2), np.float16(2)):
        for three in (3, np.int64(3), np.uint8(3)):
            got = linattn.kda(**made, scale=scale, chunk_size=three, qk_l2norm=np.True_,
                              output_final_state=np.True_)
            assert_same_bits(got, want)
    assert_same_bits(linattn.kda(**made, chunk_size=2**62), linattn.kda(**made, mode="parallel"))


LINEAR_OPTIONS = [
    ("feature_map", "softmax", ValueError), ("feature_map", "", ValueError),
    ("feature_map", 3, TypeError), ("feature_map", None, TypeError),
    ("feature_map", {}, TypeError), ("feature_map", {"elu+1"}, TypeError),
    ("feature_map", np.zeros(3), TypeError), ("feature_map", ("elu+1",), ValueError),
    ("feature_map", ("elu+1", "elu+1", "elu+1"), ValueError), ("feature_map", (), ValueError),
    ("feature_map", ("elu+1", 3), TypeError), ("feature_map", ["elu+1", "nope"], ValueError),
    ("feature_map", ("elu+1", ["elu+1"]), TypeError),
    ("normalize", "force", ValueError), ("normalize", "", ValueError), ("normalize", 1, TypeError),
    ("normalize", None, TypeError), ("normalize", 1.0, TypeError), ("normalize", [], TypeError),
    ("normalize", np.array([True]), TypeError),
    ("eps", -1e-6, ValueError), ("eps", np.nan, ValueError), ("eps", np.inf, ValueError),
    ("eps", -np.inf, ValueError), ("eps", "x", TypeError), ("eps", None, TypeError),
    ("eps", True, TypeError), ("eps", 1j, TypeError), ("eps", [1e-6], TypeError),
    ("eps", np.array(1e-6), TypeError), ("eps", 10**400, ValueError),
    ("causal", "yes", TypeError), ("causal", 0, TypeError), ("causal", None, TypeError),
    ("causal", [], TypeError),
]


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("name", "bad", "error"), LINEAR_OPTIONS, ids=name_of)
def test_options_of_linear_attention(face, name, bad, error):
    if name == "causal" and face == "step":
        error = TypeError
    refused(function("linear_attention", face), normalised(face) | {name: bad}, error, name)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("given", ["identity", ("identity", "elu+1"), ("elu+1", "identity"),
                                   linattn.FeatureMap("identity")], ids=str)
def test_identity_is_not_normalised_unless_one_insists(face, given):
    call = function("linear_attention", face)
    refused(call, normalised(face) | {"feature_map": given}, ValueError, "normalize: ",
            "identity", "got True")
    call(**normalised(face) | {"feature_map": given, "normalize": "clamp"})
    call(**arguments("linear_attention", face) | {"feature_map": given})


def test_the_builders_refuse_too():
    for bad in ({"H": 0}, {"H": -1}, {"H": 4, "layer": 1}, {"H": 4, "layer": -1},
                {"H": 4, "rule": "alibi"}, {"H": 4, "layers": 0}):
        with pytest.raises(ValueError, match="expected"):
            linattn.lightning_slopes(**bad)
    for bad in ({"H": 2.5}, {"H": "4"}, {"H": None}, {"H": 4, "layer": "0"}):
        with pytest.raises(TypeError, match="expected"):
            linattn.lightning_slopes(**bad)
    for H in (2**58, 2**62, 2**70):
        for rule in ("minimax", "transnormer"):
            with pytest.raises(MemoryError, match=f"^H: .* fit in memory, got {H}$"):
                linattn.lightning_slopes(H, rule=rule)
    want = linattn.lightning_slopes(6)
    assert np.array_equal(linattn.lightning_slopes(np.int64(6)), want)


@pytest.mark.parametrize(("bad", "error", "text"), [
    ({"op": "softmax"}, ValueError, "op: expected one of linear_attention"),
    ({"op": 3}, (TypeError, ValueError), "op: expected one of linear_attention"),
    ({"op": functools.partial(linattn.retention)}, (TypeError, ValueError), "op: expected"),
    ({"q": [[1.0]]}, TypeError, "q: expected a NumPy array"),
    ({"q": np.zeros((2, 3, 4))}, ValueError, "q: expected [B,T,H,K]"),
    ({"k": np.zeros((1, 5, 2, 3))}, ValueError, "k: expected [B,T,H,K] = (1, 5, 2, 8)"),
    ({"initial_state": np.zeros((1, 2, 8, 5))}, ValueError, "initial_state: "),
    ({"out": np.zeros((1, 2, 5, 5))}, ValueError, "out: "),
    ({"output_final_state": True}, ValueError, "output_final_state: "),
], ids=range(9))
def test_implicit_weights_refuses(bad, error, text):
    made = {"q": np.ones((1, 5, 2, 8)), "k": np.ones((1, 5, 2, 8))} | bad
    with pytest.raises(error) as caught:
        linattn.implicit_weights(**made)
    assert text in str(caught.value)


def test_implicit_weights_of_no_tokens():
    empty = np.ones((1, 0, 2, 8))
    assert linattn.implicit_weights(empty, empty).shape == (1, 2, 0, 0)


# ---- layouts ----


def fortran(x):
    return np.asfortranarray(x)


def transposed(x):
    """The last axis outermost in memory."""
    return np.ascontiguousarray(np.moveaxis(x, -1, 0)).transpose(*range(1, x.ndim), 0)


def heads_first(x):
    """[B,T,H,K] over memory [B,H,T,K]: rows stay contiguous."""
    if x.ndim < 3:
        return x.copy()
    return np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3)


def backwards(x):
    """Every stride negative."""
    everything = (slice(None, None, -1),) * x.ndim
    return x[everything].copy()[everything]


def outer_backwards(x):
    return x[::-1].copy()[::-1] if x.ndim > 1 else x.copy()


def every_other(x):
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), 7, x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def padded_rows(x):
    wide = np.full((*x.shape[:-1], x.shape[-1] + 3), 7, x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def misaligned(x):
    raw = bytearray(x.nbytes + 1)
    y = np.frombuffer(raw, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    y[...] = x
    assert not y.flags.aligned or x.dtype.itemsize == 1
    return y


def byte_swapped(x):
    return x.astype(x.dtype.newbyteorder())


def record_field(x):
    """Strides that are no multiple of the item size."""
    records = np.zeros(x.shape, np.dtype([("a", np.uint8), ("x", x.dtype)]))
    records["x"] = x
    return records["x"]


def read_only(x):
    y = x.copy()
    y.flags.writeable = False
    return y


class Subclass(np.ndarray):
    pass


def subclass(x):
    return x.view(Subclass)


ROWS_KEPT = [heads_first, outer_backwards, padded_rows, read_only, subclass]
ROWS_BROKEN = [transposed, backwards, every_other, misaligned, byte_swapped, record_field]


def laid_out(made, layout, names=None):
    def one(x):
        if isinstance(x, tuple):
            return tuple(map(one, x))
        return layout(x) if isinstance(x, np.ndarray) else x

    return {name: one(x) if names is None or name in names else x for name, x in made.items()}


@pytest.mark.parametrize("op", OPS)
@whole
@pytest.mark.parametrize("layout", [fortran, *ROWS_KEPT, *ROWS_BROKEN], ids=lambda f: f.__name__)
def test_any_layout_gives_the_same_bits(op, face, layout):
    call = function(op, face)
    for dtype in (np.float32, np.float64, np.float16):
        made = arguments(op, face, dtype=dtype)
        odd = laid_out(made, layout)
        before = snapshot(odd)
        assert_same_bits(call(**odd), call(**made))
        assert snapshot(odd) == before


@whole
@pytest.mark.parametrize("layout", [fortran, *ROWS_KEPT, *ROWS_BROKEN], ids=lambda f: f.__name__)
def test_any_layout_of_one_argument(face, layout):
    made = arguments("kda", face)
    want = function("kda", face)(**made)
    for name in array_names("kda", face):
        assert_same_bits(function("kda", face)(**laid_out(made, layout, [name])), want)
    made = normalised(face)
    assert_same_bits(function("linear_attention", face)(**laid_out(made, layout)),
                     function("linear_attention", face)(**made))


@whole
@pytest.mark.parametrize("layout", [fortran, *ROWS_KEPT, *ROWS_BROKEN], ids=lambda f: f.__name__)
def test_any_layout_for_one_head_and_v_first(face, layout):
    made = arguments("kda", face, one_head=True)
    assert_same_bits(function("kda", face)(**laid_out(made, layout)), function("kda", face)(**made))
    made = arguments("gla", face) | {"state_v_first": True}
    for name in ("initial_state", "d_final_state"):
        if name in made:
            made[name] = np.ascontiguousarray(made[name].swapaxes(-1, -2))
    assert_same_bits(function("gla", face)(**laid_out(made, layout)), function("gla", face)(**made))


@pytest.mark.parametrize("layout", [every_other, backwards, byte_swapped, misaligned, record_field],
                         ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_any_layout_of_cu_seqlens(layout, dtype):
    made = arguments("kda", "forward", B=1)
    del made["initial_state"]
    cu = np.array([0, 2, 2, 5], dtype)
    want = linattn.kda(**made, cu_seqlens=cu, output_final_state=True)
    assert_same_bits(linattn.kda(**made, cu_seqlens=layout(cu), output_final_state=True), want)


def test_broadcast_inputs():
    made = arguments("kda", "backward")
    for name in ("q", "k", "v", "g", "beta", "do", "initial_state"):
        made[name] = np.broadcast_to(made[name][:1], made[name].shape)
    copies = laid_out(made, np.ascontiguousarray)
    assert_same_bits(linattn.kda_backward(**made), linattn.kda_backward(**copies))
    made["v"] = np.broadcast_to(np.float32(0.25), made["v"].shape)
    copies = laid_out(made, np.ascontiguousarray)
    assert_same_bits(linattn.kda_backward(**made), linattn.kda_backward(**copies))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", [heads_first, outer_backwards, padded_rows],
                         ids=lambda f: f.__name__)
def test_a_step_takes_outer_strides(op, layout):
    made = arguments(op, "step")
    odd = laid_out(made, layout)
    out = layout(np.zeros((3, 4, 6), np.float32))
    o = function(op, "step")(**odd, out=out)
    assert o is out
    assert_same_bits(o, function(op, "step")(**made))
    assert_same_bits(odd["state"], made["state"])


def rows_of_a_step():
    for op in OPS:
        for name in [*array_names(op, "step"), "out"]:
            if name in ("q", "k", "v", "state", "out") or (name == "g" and op in ("gla", "kda")):
                yield op, name


@pytest.mark.parametrize(("op", "name"), list(rows_of_a_step()))
@pytest.mark.parametrize("layout", ROWS_BROKEN, ids=lambda f: f.__name__)
def test_a_step_refuses_rows_that_it_would_have_to_copy(op, name, layout):
    made = arguments(op, "step") | {"out": np.zeros((3, 4, 6), np.float32)}
    refused(function(op, "step"), laid_out(made, layout, [name]), ValueError, f"{name}: expected",
            "innermost axis is contiguous")


@pytest.mark.parametrize("layout", [every_other, backwards, transposed], ids=lambda f: f.__name__)
@pytest.mark.parametrize("op", ["gated_delta_rule", "retention", "lightning_attention"])
def test_a_step_takes_any_stride_of_a_gate_that_has_no_rows(op, layout):
    made = arguments(op, "step")
    odd = laid_out(made, layout, ["g", "beta", "gamma", "slopes"])
    odd["state"] = made["state"].copy()
    assert_same_bits(function(op, "step")(**odd), function(op, "step")(**made))


@pytest.mark.parametrize("op", OPS)
def test_read_only_inputs_are_fine_and_read_only_outputs_are_not(op):
    device.needs_numpy("there are no read-only arrays")
    for face in FACES:
        made = laid_out(arguments(op, face), read_only)
        if face == "step":
            refused(function(op, face), made, ValueError, "state: expected a writable array",
                    "read-only")
            made["state"] = made["state"].copy()
        function(op, face)(**made)
        if face != "backward":
            out = read_only(np.zeros(sizes(letters_of(op, face, "out"), LETTERS), np.float32))
            refused(function(op, face), made | {"out": out}, ValueError,
                    "out: expected a writable array", "read-only")


def test_a_read_only_part_of_a_pair():
    for i in range(2):
        made = normalised("step")
        made["state"][i].flags.writeable = False
        refused(linattn.linear_attention_step, made, ValueError,
                f"state[{i}]: expected a writable array")


@pytest.mark.parametrize("layout", ROWS_BROKEN, ids=lambda f: f.__name__)
def test_out_with_broken_rows_is_refused(layout):
    made = arguments("kda", "forward")
    refused(linattn.kda, made | {"out": layout(np.zeros_like(made["v"]))}, ValueError,
            "out: expected", "contiguous")


# ---- aliasing ----


def share(made, written, name, offset):
    """Put made[name] and made[written] into one buffer, `offset` elements of `name` apart."""
    x, y = made[name], made[written]
    buffer = np.zeros(x.nbytes + y.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 16
    a = buffer[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    start += offset * max(x.itemsize, y.itemsize)
    b = buffer[start : start + y.nbytes].view(y.dtype).reshape(y.shape)
    a[...] = x
    return made | {name: a, written: b}


def overlaps():
    for op in OPS:
        for face in ("forward", "step"):
            for name in array_names(op, face):
                yield op, face, "out", name
                if face == "step" and name != "state":
                    yield op, face, "state", name


@pytest.mark.parametrize(("op", "face", "written", "name"), list(overlaps()))
def test_memory_that_is_written_may_not_be_an_inputs(op, face, written, name):
    made = arguments(op, face)
    made |= {"out": np.zeros(sizes(letters_of(op, face, "out"), LETTERS), np.float32)}
    last = min(made[name].size - 1, 3)  # the outer ends just meet, or nearly
    for offset in (0, last):
        refused(function(op, face), share(made, written, name, offset), ValueError,
                "expected memory of its own, got memory shared with ", name, written)


@pytest.mark.parametrize("face", ["forward", "step"])
def test_out_over_q_k_or_v_itself(face):
    for name in "qkv":
        made = arguments("delta_rule", face, HV=2, V=8)
        refused(function("delta_rule", face), made | {"out": made[name]}, ValueError,
                f"out: expected memory of its own, got memory shared with {name}")


def test_out_over_cu_seqlens():
    made = arguments("gla", "forward", B=1, V=8)
    memory = np.zeros(made["v"].nbytes // 8, np.int64)
    memory[:2] = 0, 5
    made |= {"cu_seqlens": memory[:2], "out": memory.view(np.float32).reshape(made["v"].shape)}
    del made["initial_state"]
    refused(linattn.gla, made, ValueError, "out: expected memory", "cu_seqlens")


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("view", [lambda x: x[..., ::-1], lambda x: x.swapaxes(1, 3)],
                         ids=["reversed", "transposed"])
def test_out_over_an_input_that_is_copied(name, view):
    """The core reads a copy, but the caller's input would be written all the same."""
    made = arguments("delta_rule", "forward", T=8, H=2, HV=2, K=8, V=8)
    refused(linattn.delta_rule, made | {name: view(made[name]), "out": made[name]}, ValueError,
            f"out: expected memory of its own, got memory shared with {name}")


def test_out_over_an_input_that_python_maps():
    made = arguments("linear_attention", "forward", HV=2, V=8)
    refused(linattn.linear_attention, made | {"feature_map": np.exp, "out": made["q"]}, ValueError,
            "out: expected memory of its own, got memory shared with q")


def test_the_parts_of_a_state_may_not_overlap():
    made = normalised("step")
    S = made["state"][0]
    refused(linattn.linear_attention_step, made | {"state": (S, S[..., 0, :].reshape(3, 4, 6))},
            ValueError, "state[1]")  # wrong shape first: K = 8
    made = arguments("linear_attention", "step", V=8) | {"normalize": True}
    S = made["state"]
    refused(linattn.linear_attention_step, made | {"state": (S, S[:, :, 0])}, ValueError,
            "state[0]: expected memory of its own, got memory shared with state[1]")


def test_neighbours_in_one_buffer_are_allowed():
    made = arguments("kda", "forward")
    want = linattn.kda(**made)
    both = np.zeros((3, 5, 8, 6), np.float32)
    both[:, :, ::2] = made["v"]
    v, out = both[:, :, ::2], both[:, :, 1::2]
    o, _ = linattn.kda(**made | {"v": v, "out": out})
    assert o is out
    assert_same_bits(o, want[0])
    assert v.tobytes() == made["v"].tobytes()


def test_inputs_may_share_memory_with_each_other():
    made = arguments("delta_rule", "forward", HV=2, V=8)
    same = made | {"k": made["q"], "v": made["q"]}
    copies = made | {"k": made["q"].copy(), "v": made["q"].copy()}
    assert_same_bits(linattn.delta_rule(**same), linattn.delta_rule(**copies))


def test_out_is_what_comes_back():
    for op in OPS:
        made = arguments(op, "forward")
        out = np.full(made["v"].shape, np.nan, np.float32)
        o, _ = function(op, "forward")(**made, out=out)
        assert o is out
        assert_same_bits(o, function(op, "forward")(**made)[0])


# ---- gates outside [0, 1] ----

OUTSIDE = [
    *((op, "g", 0.5, "g: expected the log decay, g <= 0") for op in OPS if gate_of(op) == "g"),
    *((op, "g", np.inf, "g: expected the log decay, g <= 0") for op in OPS if gate_of(op) == "g"),
    *((op, "alpha", 1.5, "alpha: expected decays in [0, 1]") for op in OPS if gate_of(op) == "g"),
    *((op, "alpha", -0.5, "alpha: expected decays in [0, 1]") for op in OPS if gate_of(op) == "g"),
    ("retention", "gamma", 1.5, "gamma: expected decays in [0, 1]"),
    ("retention", "gamma", -0.5, "gamma: expected decays in [0, 1]"),
    ("lightning_attention", "slopes", -0.5, "slopes: expected slopes >= 0"),
]
INSIDE = [
    *((op, "g", g) for op in OPS if gate_of(op) == "g" for g in (0.0, -0.0, -np.inf, np.nan)),
    *((op, "alpha", a) for op in OPS if gate_of(op) == "g" for a in (0.0, 1.0, np.nan)),
    *(("retention", "gamma", a) for a in (0.0, 1.0, np.nan)),
    *(("lightning_attention", "slopes", s) for s in (0.0, np.inf, np.nan)),
]


def with_gate(op, face, name, value, dtype=np.float32, where=-1):
    made = arguments(op, face)
    gate = made.pop(gate_of(op)).astype(dtype)
    if name == "alpha":
        gate = np.exp(gate.astype(np.float64)).astype(dtype)
    gate.reshape(-1)[where] = value
    return made | {name: gate}


@pytest.mark.parametrize(("op", "name", "value", "text"), OUTSIDE)
@pytest.mark.parametrize("face", FACES)
def test_a_gate_outside_warns_once_per_call_site(op, face, name, value, text):
    device.needs_numpy("every call comes from one line of tests/device.py")
    made = with_gate(op, face, name, value)
    call = function(op, face)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            call(**made)
        assert len(seen) == 1
        call(**made)  # another line, another warning
    assert len(seen) == 2
    assert seen[0].category is RuntimeWarning
    assert str(seen[0].message).startswith(text)
    assert seen[0].filename == __file__
    assert seen[1].lineno > seen[0].lineno


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("op", "K"), [("gla", 7), ("gla", 70), ("simple_gla", None)])
def test_a_gate_outside_is_seen_wherever_it_lies(op, K, dtype):
    """In any token, head and key of a long gate, contiguous or not, by one thread or several."""
    device.needs_host("the values of gates are not looked at")
    T, H = 301, 9
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, T, H, n)).astype(np.float32) for n in (K or 4, K or 4, 3))
    shape = (1, T, H, K) if K else (1, T, H)
    whole = np.zeros((1, 2 * T, *shape[2:]), ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    threads = linattn.get_num_threads()
    try:
        for g in (whole[:, :T], whole[:, ::2]):
            for number in (1, 4):
                linattn.set_num_threads(number)
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    g[0, T // 2] = np.nan
                    getattr(linattn, op)(q, k, v, g)
                    g[...] = -0.5
                    getattr(linattn, op)(q, k, v, g)
                    for at in [(0,) * len(shape), tuple(n - 1 for n in shape),
                               *(tuple(int(rng.integers(n)) for n in shape) for _ in range(8))]:
                        g[at] = 1e-3
                        with pytest.raises(RuntimeWarning, match="g: expected the log decay"):
                            getattr(linattn, op)(q, k, v, g)
                        g[at] = -0.5
    finally:
        linattn.set_num_threads(threads)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("op", ["simple_gla", "gla"])
def test_a_gate_outside_is_seen_at_the_ends_of_every_block(op, threads):
    """The core looks at blocks of 64 tokens: at their first and last tokens, in each sequence."""
    device.needs_host("the values of gates are not looked at")
    B, T, H, K, block = 2, 64 * 3 + 1, 2, 4, 64
    x = np.ones((B, T, H, K), np.float32)
    g = np.full(x.shape if op == "gla" else x.shape[:3], -0.5, np.float32)
    ends = sorted({*range(0, T, block), *range(block - 1, T, block), T - 1})
    before = linattn.get_num_threads()
    linattn.set_num_threads(threads)
    try:
        for b in range(B):
            for t in ends:
                g[b, t] = 1e-3
                with pytest.warns(RuntimeWarning, match="g: expected the log decay"):
                    getattr(linattn, op)(x, x, x, g)
                g[b, t] = -0.5
    finally:
        linattn.set_num_threads(before)


@pytest.mark.parametrize(("op", "name", "value", "text"), OUTSIDE)
@pytest.mark.parametrize("face", FACES)
def test_as_an_error_it_leaves_everything_as_it_was(op, face, name, value, text):
    device.needs_host("the values of gates are not looked at")
    made = with_gate(op, face, name, value)
    if face != "backward":
        made["out"] = np.zeros(sizes(letters_of(op, face, "out"), LETTERS), np.float32)
    before = snapshot(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=re.escape(text)):
            function(op, face)(**made)
    assert snapshot(made) == before


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16],
                         ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize(("op", "name", "value"), INSIDE)
def test_a_gate_inside_does_not_warn(op, name, value, dtype):
    for face in FACES:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(op, face)(**with_gate(op, face, name, value, dtype))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16],
                         ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("where", [0, 7, 200, -1])
def test_one_positive_log_decay_is_found_wherever_it_is(dtype, where):
    device.needs_host("the values of gates are not looked at")
    layouts = [np.copy, padded_rows, *([backwards] if device.negative_strides() else [])]
    info = ml_dtypes.finfo(dtype)
    for value in (info.smallest_subnormal, info.eps, 1, info.max):
        made = with_gate("kda", "forward", "g", value, dtype, where)
        for layout in layouts:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                linattn.kda(**laid_out(made, layout, ["g"]))
            assert len(seen) == 1


def test_the_weights_function_warns_where_it_is_called():
    device.needs_numpy("the weights are NumPy's")
    q = np.ones((4, 2))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        linattn.implicit_weights(q, q, op="simple_gla", g=np.ones(4))
    assert [w.filename for w in seen] == [__file__]


# ---- numbers for a step of one head ----


@pytest.mark.parametrize("number", [float, np.float64, np.float32, np.float16, BFLOAT16.type,
                                    lambda x: np.array(x, np.float32)])
def test_one_head_takes_numbers_for_gates(number):
    made = arguments("gated_delta_rule", "step", one_head=True)
    made |= {"g": np.float32(-0.5), "beta": np.float32(0.5)}
    other = made | {"g": number(-0.5), "beta": number(0.5), "state": made["state"].copy()}
    assert_same_bits(linattn.gated_delta_rule_step(**other), linattn.gated_delta_rule_step(**made))
    assert_same_bits(other["state"], made["state"])


@pytest.mark.parametrize("name", ["g", "beta"])
def test_a_number_for_several_heads_is_refused(name):
    made = arguments("gated_delta_rule", "step") | {name: 0.0}
    refused(linattn.gated_delta_rule_step, made, ValueError,
            f"{name}: expected [B,HV] = (3, 4), got ()")


# ---- too much memory ----


@pytest.mark.parametrize("op", OPS)
def test_a_result_that_no_memory_holds(op):
    """2^45 tokens seen through strides of zero."""
    made = {}
    for name, x in arguments(op, "forward", B=1, T=1, H=1, HV=1, K=1, V=1).items():
        made[name] = x
        if name in ("q", "k", "v", "g", "beta"):
            made[name] = np.broadcast_to(x[:, :1], (1, 2**45, *x.shape[2:]))
    with pytest.raises(MemoryError):
        function(op, "forward")(**made, out=None)


def test_scratch_that_no_memory_holds():
    """Quadratic in 2^24 tokens: 2^50 bytes and more, which is past any address space."""
    device.needs_host("a kernel may need no scratch, and time quadratic in 2^24 tokens")
    x = np.broadcast_to(np.float16(1), (1, 2**24, 1, 1))
    for options in ({"mode": "parallel"}, {"chunk_size": 2**24}):
        with pytest.raises(MemoryError, match="scratch"):
            linattn.linear_attention(x, x, x, **options)


# ---- fuzz ----

DTYPES = [np.float64, np.float32, np.float16, BFLOAT16, np.int32, np.bool_, np.complex64, object]
JUNK = [None, True, 0, -1, 2**70, 0.5, float("nan"), float("inf"), 1j, "chunk", "elu+1", "x", b"x",
        [], [1.0], (), (1, 2), {}, ..., np.float32(1), np.array(1.0), np.zeros(3, np.int64)]


@st.composite
def random_arrays(draw):
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=5)))
    x = np.ones(shape, draw(st.sampled_from(DTYPES)))
    if x.ndim and draw(st.booleans()):
        x = x[..., ::-1]
    return x


@st.composite
def fuzzed_calls(draw):
    op, face = draw(st.sampled_from(CALLS))
    dims = {"B": draw(st.integers(0, 2)), "T": draw(st.integers(0, 3)),
            "H": draw(st.integers(1, 2)), "K": draw(st.integers(1, 3))}
    dims |= {"HV": dims["H"] * draw(st.integers(1, 2)), "V": draw(st.integers(1, 3))}
    made = arguments(op, face, one_head=draw(st.booleans()), **dims)
    junk = st.sampled_from(JUNK) | random_arrays()
    options = ["scale", "initial_state", "state", "d_final_state", "output_final_state",
               "cu_seqlens", "mode", "chunk_size", "qk_l2norm", "state_v_first", "out", "alpha",
               "state_indices", "allow_tf32",
               "feature_map", "normalize", "eps", "causal", "nonsense"]
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*made, *options]))
        made[name] = draw(junk)
        if name == "cu_seqlens" and not device.on_host():
            del made[name]  # values that are not looked at must be right
    return op, face, made


@pytest.fixture(scope="module")
def none_is_refused():
    """A crash in the fuzz would end the whole run: look whether None is survived first."""
    for op, face, name in (("delta_rule", "forward", "k"), ("delta_rule", "backward", "do")):
        made = arguments(op, face) | {name: None}
        text = outcome_of(lambda op=op, face=face, made=made: function(op, face)(**made))
        assert "died" not in text, f"{op} {face} with {name}=None {text}"


@settings(max_examples=1500, deadline=None)
@given(call=fuzzed_calls())
def test_fuzz(none_is_refused, call):
    op, face, made = call
    if face not in FACES:
        return
    before = snapshot({name: x for name, x in made.items() if name not in ("state", "out")})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with device.from_the_host():
                function(op, face)(**made)
    except (TypeError, ValueError, MemoryError) as error:
        message = str(error)
        names = [*made, "normalize", "q", "k", "v", "g", "beta", "gamma", "slopes", "state"]
        assert any(re.search(rf"\b{name}\b", message) for name in names), \
            "".join(traceback.format_exception(error))
    after = snapshot({name: x for name, x in made.items() if name not in ("state", "out")})
    assert before == after
