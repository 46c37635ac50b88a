"""Types, dtypes and memory. An argument that is no array, or has a wrong dtype, is refused by name.
Odd but legal layouts give the same bits. Outputs may not share memory with inputs."""

import re

import ml_dtypes
import numpy as np
import pytest
from support import device
from support.compare import assert_same_bits, over_arrays, snapshot
from support.device import ops as linattn
from support.layouts import (
    ROWS_BROKEN,
    ROWS_KEPT,
    backwards,
    byte_swapped,
    every_other,
    fortran,
    heads_first,
    laid_out,
    misaligned,
    outer_backwards,
    padded_rows,
    read_only,
    record_field,
    transposed,
)
from support.problems import (
    LETTERS,
    OPS,
    PASSES,
    SLOTS,
    arguments,
    array_names,
    calls,
    function,
    letters_of,
    normalised,
    refused,
    sizes,
    slots,
    state_label,
    whole,
)
from support.processes import outcome_of
from support.variants import HEAD_DECAY, KEY_DECAY, PAIR_DECAY

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


# ---- wrong types ----

OPTIONAL = {"gamma", "eta", "initial_state", "d_final_state"}


@slots
def test_not_an_array(op, pass_, name):
    made, call = arguments(op, pass_), function(op, pass_)
    for bad in ([[1.0]], "x", 1j, object(), {"a": 1}, b"12345678"):
        fragments = f"{name}: expected an array, got ", type(bad).__name__
        refused(call, made | {name: bad}, TypeError, *fragments)


class NoMemory:
    """An object that looks like an array, up to a point."""

    dtype = np.dtype(np.float32)

    @property
    def shape(self):
        raise RuntimeError("no shape")


class NoNumbers(NoMemory):
    shape = (3, 5, "HV", 8)


@calls
def test_q_is_named_when_nothing_is_an_array(op, pass_):
    """Optional gates are left out. Options that the ops read before q do not change the message."""
    made, call = arguments(op, pass_), function(op, pass_)
    made.pop("gamma", None)
    bads = ([[1.0]], 3, 1.5, "x", (1, 2), object(), NoMemory(), NoNumbers(), np.float32(1))
    for bad in bads:
        made |= dict.fromkeys(["q", "k", "v"], bad)
        for options in ({}, {"feature_map": np.exp}, {"feature_map": np.exp, "qk_l2norm": True}):
            if options and (op != "linear_attention" or pass_ == "backward"):
                break
            fragments = "q: expected an array, got ", type(bad).__name__
            refused(call, made | options, TypeError, *fragments)


@pytest.mark.parametrize(
    ("op", "pass_", "name"), [slot for slot in SLOTS if slot[2] not in OPTIONAL]
)
def test_none_where_an_array_is_needed(op, pass_, name):
    made = arguments(op, pass_) | {name: None}
    text = outcome_of(lambda: function(op, pass_)(**made))
    assert re.match(rf"TypeError: {name}: expected .*got (None|<class 'NoneType'>)", text), text


@pytest.mark.parametrize(("op", "pass_", "name"), [s for s in SLOTS if s[2] in OPTIONAL])
def test_none_where_an_array_is_optional(op, pass_, name):
    function(op, pass_)(**arguments(op, pass_) | {name: None})


BAD_DTYPES = [
    "int8",
    "int32",
    "int64",
    "uint8",
    "uint64",
    "bool",
    "complex64",
    "complex128",
    "longdouble",
    "object",
    "U3",
    "S3",
    "V0",
    "datetime64[s]",
    "f4,f4",
]  # V0: no bytes


@slots
def test_unsupported_dtype(op, pass_, name):
    made, call = arguments(op, pass_), function(op, pass_)
    for dtype in BAD_DTYPES:
        bad = np.zeros(made[name].shape, dtype)
        with device.part():
            refused(call, made | {name: bad}, TypeError, f"{name}: expected float", "got ")


@pytest.mark.parametrize(("op", "pass_", "name"), [s for s in SLOTS if s[2] in ("k", "v", "do")])
def test_one_dtype_for_q_k_v_and_do(op, pass_, name):
    made = arguments(op, pass_)
    for other in (np.float64, np.float16, BFLOAT16):
        refused(
            function(op, pass_),
            made | {name: made[name].astype(other)},
            TypeError,
            f"{name}: expected float32 (the dtype of q), got {np.dtype(other).name}",
        )


@calls
def test_a_state_has_the_dtype_of_the_sums(op, pass_):
    name = "state" if pass_ == "step" else "initial_state"
    for dtype in (np.float64, np.float32, np.float16, BFLOAT16):
        made = arguments(op, pass_, dtype=dtype)
        want = "float64" if dtype == np.float64 else "float32"
        for wrong in (np.float16, np.float32 if dtype == np.float64 else np.float64):
            state = over_arrays(lambda S, wrong=wrong: S.astype(wrong), made[name])
            refused(
                function(op, pass_),
                made | {name: state},
                TypeError,
                f"{state_label(op, name)}: expected {want}",
                f"got {np.dtype(wrong).name}",
            )


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("gate", [np.float64, np.float32, np.float16, BFLOAT16])
def test_gates_have_any_dtype(dtype, gate):
    for op, pass_ in (("kda", "forward"), ("gated_delta_rule", "step"), ("kda", "backward")):
        made = arguments(op, pass_, dtype=dtype)
        made |= {"g": made["g"].astype(gate), "beta": made["beta"].astype(gate)}
        if pass_ not in PASSES:
            continue
        result = function(op, pass_)(**made)
        if pass_ == "backward":
            assert result.dg.dtype == gate and result.dbeta.dtype == gate
            assert result.dq.dtype == dtype and result.dv.dtype == dtype
        else:
            assert (result[0] if pass_ == "forward" else result).dtype == dtype


@pytest.mark.parametrize("pass_", ["forward", "step"])
@pytest.mark.parametrize(
    "bad", [[1.0], "x", True, np.float64, np.float16, np.int32, "complex64"], ids=str
)
def test_out_of_the_wrong_type(pass_, bad):
    shape = sizes(letters_of("kda", pass_, "out"), LETTERS)
    array = np.zeros(shape, bad) if bad in (np.float64, np.float16, np.int32, "complex64") else bad
    refused(
        function("kda", pass_),
        arguments("kda", pass_) | {"out": array},
        TypeError,
        "out: expected ",
        "got ",
    )


@whole
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "uint32", "uint64", "int16", "bool", "object", "complex64"]
)
@pytest.mark.parametrize("op", ["linear_attention", "kda"])
def test_cu_seqlens_of_the_wrong_dtype(op, pass_, dtype):
    made = arguments(op, pass_, B=1) | {"cu_seqlens": np.array([0, 5]).astype(dtype)}
    refused(function(op, pass_), made, TypeError, "cu_seqlens: expected int32 or int64, got ")


@whole
@pytest.mark.parametrize("bad", [[0, 5], (0, 5), "x", 5, 5.0], ids=repr)
def test_cu_seqlens_is_no_array(pass_, bad):
    made = arguments("gla", pass_, B=1) | {"cu_seqlens": bad}
    refused(function("gla", pass_), made, TypeError, "cu_seqlens: expected ")


# ---- layouts ----


@pytest.mark.parametrize("op", OPS)
@whole
@pytest.mark.parametrize("layout", [fortran, *ROWS_KEPT, *ROWS_BROKEN], ids=lambda f: f.__name__)
def test_any_layout_gives_the_same_bits(op, pass_, layout):
    call = function(op, pass_)
    for dtype in (np.float32, np.float64, np.float16):
        made = arguments(op, pass_, dtype=dtype)
        odd = laid_out(made, layout)
        before = snapshot(odd)
        assert_same_bits(call(**odd), call(**made))
        assert snapshot(odd) == before


@whole
@pytest.mark.parametrize("layout", [fortran, *ROWS_KEPT, *ROWS_BROKEN], ids=lambda f: f.__name__)
def test_any_layout_of_one_argument(pass_, layout):
    made = arguments("kda", pass_)
    want = function("kda", pass_)(**made)
    for name in array_names("kda", pass_):
        assert_same_bits(function("kda", pass_)(**laid_out(made, layout, [name])), want)
    made = normalised(pass_)
    assert_same_bits(
        function("linear_attention", pass_)(**laid_out(made, layout)),
        function("linear_attention", pass_)(**made),
    )


@whole
@pytest.mark.parametrize("layout", [fortran, *ROWS_KEPT, *ROWS_BROKEN], ids=lambda f: f.__name__)
def test_any_layout_for_one_head_and_v_first(pass_, layout):
    made = arguments("kda", pass_, one_head=True)
    assert_same_bits(
        function("kda", pass_)(**laid_out(made, layout)), function("kda", pass_)(**made)
    )
    made = arguments("gla", pass_) | {"state_v_first": True}
    for name in ("initial_state", "d_final_state"):
        if name in made:
            made[name] = np.ascontiguousarray(made[name].swapaxes(-1, -2))
    assert_same_bits(
        function("gla", pass_)(**laid_out(made, layout)), function("gla", pass_)(**made)
    )


@pytest.mark.parametrize(
    "layout",
    [every_other, backwards, byte_swapped, misaligned, record_field],
    ids=lambda f: f.__name__,
)
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
@pytest.mark.parametrize(
    "layout", [heads_first, outer_backwards, padded_rows], ids=lambda f: f.__name__
)
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
            if name in ("q", "k", "v", "state", "out") or (name == "g" and op in KEY_DECAY):
                yield op, name


@pytest.mark.parametrize(("op", "name"), list(rows_of_a_step()))
def test_a_step_refuses_rows_that_it_would_have_to_copy(op, name):
    made = arguments(op, "step") | {"out": np.zeros((3, 4, 6), np.float32)}
    for layout in ROWS_BROKEN:
        with device.part():
            refused(
                function(op, "step"),
                laid_out(made, layout, [name]),
                ValueError,
                f"{name}: expected",
                "innermost axis is contiguous",
            )


@pytest.mark.parametrize("layout", [every_other, backwards, transposed], ids=lambda f: f.__name__)
@pytest.mark.parametrize("op", ["gated_delta_rule", *HEAD_DECAY])
def test_a_step_takes_any_stride_of_a_gate_that_has_no_rows(op, layout):
    made = arguments(op, "step")
    odd = laid_out(made, layout, ["g", "beta", "gamma", "slopes"])
    odd["state"] = made["state"].copy()
    assert_same_bits(function(op, "step")(**odd), function(op, "step")(**made))


@pytest.mark.parametrize("op", OPS)
def test_read_only_inputs_are_fine_and_read_only_outputs_are_not(op):
    device.needs_numpy("there are no read-only arrays")
    for pass_ in PASSES:
        made = laid_out(arguments(op, pass_), read_only)
        if pass_ == "step":
            refused(
                function(op, pass_),
                made,
                ValueError,
                f"{state_label(op, 'state')}: expected a writable array",
                "read-only",
            )
            made["state"] = over_arrays(np.copy, made["state"])
        function(op, pass_)(**made)
        if pass_ != "backward":
            out = read_only(np.zeros(sizes(letters_of(op, pass_, "out"), LETTERS), np.float32))
            refused(
                function(op, pass_),
                made | {"out": out},
                ValueError,
                "out: expected a writable array",
                "read-only",
            )


def test_a_read_only_part_of_a_pair():
    for i in range(2):
        made = normalised("step")
        made["state"][i].flags.writeable = False
        refused(
            linattn.linear_attention_step,
            made,
            ValueError,
            f"state[{i}]: expected a writable array",
        )


@pytest.mark.parametrize("layout", ROWS_BROKEN, ids=lambda f: f.__name__)
def test_out_with_broken_rows_is_refused(layout):
    made = arguments("kda", "forward")
    refused(
        linattn.kda,
        made | {"out": layout(np.zeros_like(made["v"]))},
        ValueError,
        "out: expected",
        "contiguous",
    )


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
        for pass_ in ("forward", "step"):
            for name in array_names(op, pass_):
                yield op, pass_, "out", name
                if pass_ == "step" and name != "state" and op not in PAIR_DECAY:
                    yield op, pass_, "state", name


@pytest.mark.parametrize(("op", "pass_", "written", "name"), list(overlaps()))
def test_memory_that_is_written_may_not_be_an_inputs(op, pass_, written, name):
    made = arguments(op, pass_)
    made |= {"out": np.zeros(sizes(letters_of(op, pass_, "out"), LETTERS), np.float32)}
    last = min(made[name].size - 1, 3)  # the outer ends just meet, or nearly
    for offset in (0, last):
        refused(
            function(op, pass_),
            share(made, written, name, offset),
            ValueError,
            "expected memory of its own, got memory shared with ",
            name,
            written,
        )


@pytest.mark.parametrize("pass_", ["forward", "step"])
def test_out_over_q_k_or_v_itself(pass_):
    for name in "qkv":
        made = arguments("delta_rule", pass_, HV=2, V=8)
        refused(
            function("delta_rule", pass_),
            made | {"out": made[name]},
            ValueError,
            f"out: expected memory of its own, got memory shared with {name}",
        )


def test_out_over_cu_seqlens():
    made = arguments("gla", "forward", B=1, V=8)
    memory = np.zeros(made["v"].nbytes // 8, np.int64)
    memory[:2] = 0, 5
    made |= {"cu_seqlens": memory[:2], "out": memory.view(np.float32).reshape(made["v"].shape)}
    del made["initial_state"]
    refused(linattn.gla, made, ValueError, "out: expected memory", "cu_seqlens")


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(
    "view", [lambda x: x[..., ::-1], lambda x: x.swapaxes(1, 3)], ids=["reversed", "transposed"]
)
def test_out_over_an_input_that_is_copied(name, view):
    """The core reads a copy, but the caller's input would be written all the same."""
    made = arguments("delta_rule", "forward", T=8, H=2, HV=2, K=8, V=8)
    refused(
        linattn.delta_rule,
        made | {name: view(made[name]), "out": made[name]},
        ValueError,
        f"out: expected memory of its own, got memory shared with {name}",
    )


def test_out_over_an_input_that_python_maps():
    made = arguments("linear_attention", "forward", HV=2, V=8)
    refused(
        linattn.linear_attention,
        made | {"feature_map": np.exp, "out": made["q"]},
        ValueError,
        "out: expected memory of its own, got memory shared with q",
    )


def test_the_parts_of_a_state_may_not_overlap():
    made = normalised("step")
    S = made["state"][0]
    refused(
        linattn.linear_attention_step,
        made | {"state": (S, S[..., 0, :].reshape(3, 4, 6))},
        ValueError,
        "state[1]",
    )  # wrong shape first: K = 8
    made = arguments("linear_attention", "step", V=8) | {"normalize": True}
    S = made["state"]
    refused(
        linattn.linear_attention_step,
        made | {"state": (S, S[:, :, 0])},
        ValueError,
        "state[0]: expected memory of its own, got memory shared with state[1]",
    )


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
