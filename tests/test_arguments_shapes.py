"""Shapes: every wrong one raises the documented exception, whose message names the array and gives
its letters, and leaves every array as it was. Empty batches and sequences are legal."""

import ml_dtypes
import numpy as np
import pytest
from support import device
from support.compare import assert_same_bits, leaves, over_arrays
from support.device import ops as linattn
from support.problems import (
    LETTERS,
    OPS,
    PASSES,
    PER_TOKEN,
    SLOTS,
    arguments,
    call,
    calls,
    function,
    gate_of,
    grown,
    letters_of,
    normalised,
    poisoned,
    refused,
    shape_text,
    sizes,
    slots,
    state_label,
    state_names,
    whole,
)
from support.variants import PAIR_DECAY

from linattn.testing import GATES

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@calls
def test_the_legal_call_is_legal(op, pass_):
    function(op, pass_)(**arguments(op, pass_))
    function(op, pass_)(**arguments(op, pass_, one_head=True))


# ---- wrong shapes ----


def axes():
    for op, pass_, name in SLOTS:
        for axis, letter in enumerate(letters_of(op, pass_, name)):
            yield pytest.param(op, pass_, name, axis, id=f"{op}-{pass_}-{name}-{letter}")


@pytest.mark.parametrize(("op", "pass_", "name", "axis"), list(axes()))
def test_each_letter_wrong(op, pass_, name, axis):
    made = arguments(op, pass_)
    letters = letters_of(op, pass_, name)
    want, made[name] = made[name].shape, grown(made[name], axis)
    call = function(op, pass_)
    if name == "q":  # q says what B, T, H and K are; the others are then wrong
        refused(
            call,
            made,
            ValueError,
            "k: expected [" if letters[axis] != "H" else "v: expected ",
            ", got ",
        )
    elif name == "v" and letters[axis] == "HV":
        refused(call, made, ValueError, "v: expected HV to be a multiple of H = 2, got HV = 5")
    elif name == "v" and letters[axis] == "V":  # v says what V is
        label = state_label(op, "state")
        refused(
            call, made, ValueError, f"{label}: expected [", f", got {shape_text(want[:1])[:-2]}"
        )
    else:
        refused(
            call,
            made,
            ValueError,
            f"{name}: expected [{','.join(letters)}] = {shape_text(want)}, got "
            f"{shape_text(made[name].shape)}",
        )


@pytest.mark.parametrize(
    ("op", "pass_", "name"), [s for s in SLOTS if s[2] not in ("q", "v", "gamma", "slopes")]
)
def test_each_letter_wrong_for_one_head(op, pass_, name):
    letters = letters_of(op, pass_, name, one_head=True)
    for axis in range(len(letters)):
        made = arguments(op, pass_, one_head=True)
        want, made[name] = made[name].shape, grown(made[name], axis)
        refused(
            function(op, pass_),
            made,
            ValueError,
            f"{name}: expected [{','.join(letters)}] = {shape_text(want)}, got "
            f"{shape_text(made[name].shape)}",
        )


@pytest.mark.parametrize("op", OPS)
@whole
def test_three_dimensions_are_refused_with_a_hint(op, pass_):
    made = arguments(op, pass_)
    refused(
        function(op, pass_),
        made | {"q": made["q"][0]},
        ValueError,
        "q: expected 4-D [B,T,H,K], or 2-D [T,K] for one head; got (5, 2, 8)",
        "q[None]",
        "q[:, :, None]",
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(), (8,), (1, 3, 5, 2, 8), (1,) * 8], ids=str)
@whole
def test_q_of_odd_dimensions(op, pass_, shape):
    refused(
        function(op, pass_),
        arguments(op, pass_) | {"q": np.zeros(shape, np.float32)},
        ValueError,
        "q: expected ",
        "[B,T,H,K]",
        f"got {shape_text(shape)}",
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(), (2, 8), (3, 5, 2, 8), (1, 3, 5, 2, 8)], ids=str)
def test_q_of_odd_dimensions_in_a_step(op, shape):
    refused(
        function(op, "step"),
        arguments(op, "step") | {"q": np.zeros(shape, np.float32)},
        ValueError,
        "q: expected ",
        "[B,H,K]",
        f"got {shape_text(shape)}",
    )


@slots
def test_a_dimension_too_many_or_too_few(op, pass_, name):
    made = arguments(op, pass_)
    for bad in (made[name][None], np.asarray(made[name][0])):
        if name == "q" or bad.ndim > 4:  # tests of their own
            continue
        refused(
            function(op, pass_),
            made | {name: bad},
            ValueError,
            f"{name}: expected ",
            f"got {shape_text(bad.shape)}",
        )


@pytest.mark.parametrize("name", ["k", "v", "g", "initial_state", "out"])
def test_five_dimensions(name):
    made = arguments("kda", "forward")
    x = made[name] if name in made else np.zeros_like(made["v"])
    refused(
        linattn.kda,
        made | {name: x[None]},
        ValueError,
        f"{name}: expected ",
        f"got {shape_text(x[None].shape)}",
    )


@calls
@pytest.mark.parametrize("letter", ["K", "V", "H", "HV"])
def test_sizes_that_may_not_be_zero(op, pass_, letter):
    dims = {letter: 0} | ({"HV": 0} if letter == "H" else {})
    names = {
        "K": "q: expected K >= 1, got K = 0",
        "V": "v: expected V >= 1, got V = 0",
        "H": "q: expected H >= 1, got H = 0",
        "HV": "v: expected HV",
    }
    refused(function(op, pass_), arguments(op, pass_, **dims), ValueError, names[letter])


@calls
@pytest.mark.parametrize("HV", [1, 3, 5])
def test_value_heads_are_a_multiple_of_heads(op, pass_, HV):
    refused(
        function(op, pass_),
        arguments(op, pass_, HV=HV),
        ValueError,
        f"v: expected HV to be a multiple of H = 2, got HV = {HV}",
    )


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
def test_cu_seqlens(cu, text, dtype, pass_):
    if "[N+1]" not in text:
        device.needs_host("the values of cu_seqlens are not looked at")
    for op in ("retention", "kda"):
        made = arguments(op, pass_, B=1) | {"cu_seqlens": np.array(cu, dtype)}
        refused(function(op, pass_), made, ValueError, text)


@pytest.mark.parametrize("op", OPS)
@whole
@pytest.mark.parametrize("B", [0, 2])
def test_packed_sequences_have_one_row(op, pass_, B):
    made = arguments(op, pass_, B=B) | {"cu_seqlens": np.array([0, 5])}
    refused(
        function(op, pass_),
        made,
        ValueError,
        f"cu_seqlens: expected packed sequences to have B = 1, got B = {B}",
    )


@pytest.mark.parametrize("op", OPS)
@whole
def test_states_of_packed_sequences_have_n_rows(op, pass_):
    made = arguments(op, pass_, B=1) | {"cu_seqlens": np.array([0, 2, 5])}
    refused(
        function(op, pass_),
        made,
        ValueError,
        f"{state_label(op, 'initial_state')}: expected [N,HV,K,V] = (2, 4, 8, 6), got (1, 4, 8, 6)",
    )


@calls
def test_a_state_in_the_other_layout(op, pass_):
    name = "state" if pass_ == "step" else "initial_state"
    refused(
        function(op, pass_),
        arguments(op, pass_) | {"state_v_first": True},
        ValueError,
        f"{state_label(op, name)}: expected [N,HV,V,K] = (3, 4, 6, 8), got (3, 4, 8, 6)",
    )


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (lambda S, z: S, TypeError, "expected the pair (S, z)"),
        (lambda S, z: (S,), ValueError, "expected the pair (S, z), got 1 items"),
        (lambda S, z: (S, z, z), ValueError, "expected the pair (S, z), got 3 items"),
        (lambda S, z: (S, None), TypeError, "[1]: expected an array, got None"),
        (lambda S, z: (None, z), TypeError, "[0]: expected an array, got None"),
        (
            lambda S, z: (S, z[:, :, :7].copy()),
            ValueError,
            "[1]: expected [N,HV,K] = (3, 4, 8), got (3, 4, 7)",
        ),
        (
            lambda S, z: (S[:, :3].copy(), z),
            ValueError,
            "[0]: expected [N,HV,K,V] = (3, 4, 8, 6), got (3, 3, 8, 6)",
        ),
        (lambda S, z: (z, S), ValueError, "[0]: expected [N,HV,K,V] = (3, 4, 8, 6), got (3, 4, 8)"),
        (lambda S, z: (S, z.astype(np.float64)), TypeError, "[1]: expected float32"),
        (lambda S, z: (S, "z"), TypeError, "[1]: expected an array, got <class 'str'>"),
        (lambda S, z: "Sz", TypeError, "expected the pair (S, z)"),
    ],
    ids=range(11),
)
def test_the_pair_of_a_normalised_op(pass_, spoil, error, text):
    for name in state_names(pass_):
        made = normalised(pass_)
        made[name] = spoil(*made[name])
        refused(function("linear_attention", pass_), made, error, name, text)


@pytest.mark.parametrize(("op", "pass_"), [(op, pass_) for op in PAIR_DECAY for pass_ in PASSES])
@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (lambda M, Y: M, TypeError, "expected the pair (M, Y)"),
        (lambda M, Y: (M,), ValueError, "expected the pair (M, Y), got 1 items"),
        (lambda M, Y: (M, None), TypeError, "[1]: expected an array, got None"),
        (
            lambda M, Y: (M, Y[..., :5].copy()),
            ValueError,
            "[1]: expected [N,HV,K,V] = (3, 4, 8, 6), got (3, 4, 8, 5)",
        ),
        (
            lambda M, Y: (M[:, :3].copy(), Y),
            ValueError,
            "[0]: expected [N,HV,K,V] = (3, 4, 8, 6), got (3, 3, 8, 6)",
        ),
        (lambda M, Y: (M, Y.astype(np.float64)), TypeError, "[1]: expected float32"),
    ],
    ids=range(6),
)
def test_the_pair_of_a_memory_with_momentum(op, pass_, spoil, error, text):
    for name in state_names(pass_):
        made = arguments(op, pass_)
        made[name] = spoil(*made[name])
        refused(function(op, pass_), made, error, name, text)


@pytest.mark.parametrize("pass_", PASSES)
def test_a_pair_where_there_is_no_normaliser(pass_):
    refused(
        function("linear_attention", pass_),
        normalised(pass_) | {"normalize": False},
        TypeError,
        "state: expected an array, got <class 'tuple'>",
    )


@pytest.mark.parametrize("pass_", ["forward", "step"])
@pytest.mark.parametrize("axis", range(4))
def test_out_of_the_wrong_shape(pass_, axis):
    letters = letters_of("kda", pass_, "out")
    if axis == len(letters):
        pytest.skip("a step has no T")
    out = np.zeros(sizes(letters, LETTERS), np.float32)
    refused(
        function("kda", pass_),
        arguments("kda", pass_) | {"out": grown(out, axis)},
        ValueError,
        f"out: expected [{','.join(letters)}] = {shape_text(out.shape)}, got "
        f"{shape_text(grown(out, axis).shape)}",
    )


# ---- empty, but legal ----


def sums_over_tokens(op, grads):
    """The gradients of what all tokens share. Without a token they are 0."""
    sums = [grads.dbonus] if "bonus" in GATES[op] else []
    return [*sums, grads.dg] if gate_of(op) in ("gamma", "slopes") else sums


def leave_garbage():
    """NumPy takes small arrays from memory that was freed just before. It is now full of NaN."""
    shapes = (4,), (2, 8)  # of a decay per head, and of a bonus
    blocks = [poisoned(shape, np.float32) for shape in shapes for _ in range(8)]
    blocks.clear()


@pytest.mark.parametrize("op", OPS)
def test_no_batch(op):
    for pass_ in PASSES:
        made = arguments(op, pass_, B=0)
        leave_garbage()
        result = function(op, pass_)(**made)
        if pass_ == "backward":
            assert result.dq.shape == (0, 5, 2, 8) and result.dv.shape == (0, 5, 4, 6)
            assert all(x.shape == (0, 4, 8, 6) for x in leaves(result.d_initial_state))
            assert not any(x.any() for x in sums_over_tokens(op, result))
        else:
            o = result[0] if pass_ == "forward" else result
            assert o.shape == ((0, 5, 4, 6) if pass_ == "forward" else (0, 4, 6))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("mode", ["chunk", "recurrent", "parallel"])
def test_no_tokens(op, mode):
    made = arguments(op, "forward", T=0)
    o, state = function(op, "forward")(**made, mode=mode, output_final_state=True)
    assert o.shape == (3, 0, 4, 6)
    assert_same_bits(state, made["initial_state"])
    del made["initial_state"]
    _, state = function(op, "forward")(**made, mode=mode, output_final_state=True)
    assert all(x.shape == (3, 4, 8, 6) and not x.any() for x in leaves(state))
    made = arguments(op, "backward", T=0)
    grads = function(op, "backward")(**made, mode=mode)
    assert grads.dq.shape == (3, 0, 2, 8)
    assert_same_bits(grads.d_initial_state, made["d_final_state"])
    assert not any(x.any() for x in sums_over_tokens(op, grads))
    without = {name: x for name, x in made.items() if "state" not in name}
    leave_garbage()
    grads = function(op, "backward")(**without, mode=mode)
    assert not any(x.any() for x in sums_over_tokens(op, grads))


@pytest.mark.parametrize("op", OPS)
def test_no_sequences_and_empty_sequences(op):
    made = arguments(op, "forward", B=1, T=0)
    del made["initial_state"]
    _, state = function(op, "forward")(**made, cu_seqlens=np.array([0]), output_final_state=True)
    assert all(x.shape == (0, 4, 8, 6) for x in leaves(state))
    made = arguments(op, "forward", B=1) | {"cu_seqlens": np.array([0, 0, 5, 5])}
    made["initial_state"] = over_arrays(lambda S: np.repeat(S, 3, 0), made["initial_state"])
    _, state = function(op, "forward")(**made, output_final_state=True)
    for after, before in zip(leaves(state), leaves(made["initial_state"]), strict=True):
        assert after[[0, 2]].tobytes() == before[[0, 2]].tobytes()
        assert after[1].tobytes() != before[1].tobytes()


def test_no_tokens_for_a_normalised_op_and_for_the_whole_sequence():
    for causal in (True, False):
        made = normalised("forward")
        for name in "qkv":
            made[name] = made[name][:, :0]
        o, (S, z) = linattn.linear_attention(**made, causal=causal, output_final_state=True)
        assert o.shape == (3, 0, 4, 6)
        assert_same_bits((S, z), made["initial_state"])


# ---- numbers for gates ----


@pytest.mark.parametrize(
    "number",
    [float, np.float64, np.float32, np.float16, BFLOAT16.type, lambda x: np.array(x, np.float32)],
)
def test_one_head_takes_numbers_for_gates(number):
    made = arguments("gated_delta_rule", "step", one_head=True)
    made |= {"g": np.float32(-0.5), "beta": np.float32(0.5)}
    other = made | {"g": number(-0.5), "beta": number(0.5), "state": made["state"].copy()}
    assert_same_bits(linattn.gated_delta_rule_step(**other), linattn.gated_delta_rule_step(**made))
    assert_same_bits(other["state"], made["state"])


def gate_names(op):
    """Each way to give the op's decay, and the other arrays that a number may stand for: lists."""
    decay = [[gate_of(op)], ["alpha"]] if gate_of(op) == "g" else [[gate_of(op)]]
    others = [name for name in GATES[op] if name in ("beta", "bonus", "eta")]
    return [[*filter(None, names), *others] for names in decay]


GATED = [
    pytest.param(op, pass_, names, id=f"{op}-{pass_}-{'-'.join(names)}")
    for op in OPS
    for pass_ in PASSES
    for names in gate_names(op)
    if names
]


@pytest.mark.parametrize("one_head", [False, True], ids=["heads", "one head"])
@pytest.mark.parametrize(("op", "pass_", "names"), GATED)
def test_a_number_is_the_array_that_is_full_of_it(op, pass_, names, one_head):
    """Numbers that float32 holds: the arrays and the numbers are then equal."""
    numbers = {"g": -0.5, "alpha": 0.5, "gamma": 0.75, "slopes": 0.5}
    numbers |= {"beta": 1, "bonus": 0.25, "eta": 0.5}
    made = arguments(op, pass_, one_head=one_head)
    made = {name: x for name, x in made.items() if name not in numbers}
    full = {
        name: np.full(
            sizes(
                letters_of(op, pass_, name, one_head=one_head),
                LETTERS | ({"B": 1, "H": 1, "HV": 1} if one_head else {}),
            ),
            numbers[name],
            np.float32,
        )
        for name in names
    }
    other = made | {n: over_arrays(np.copy, x) for n, x in made.items() if n == "state"}
    got = call(op, pass_, made | {name: numbers[name] for name in names})
    want = call(op, pass_, other | full)
    if pass_ != "backward":
        assert_same_bits(got, want)
        assert_same_bits(made.get("state"), other.get("state"))
        return
    for field, x, y in zip(want._fields, got, want, strict=True):
        if field in ("dg", "dbeta", "dbonus", "deta") and y is not None:
            assert type(x) is float
            assert x == pytest.approx(y.sum(dtype=np.float64), rel=1e-12)
        else:
            assert_same_bits(x, y)


@pytest.mark.parametrize("number", [np.float32, np.float16, BFLOAT16.type, np.int64], ids=str)
def test_numbers_of_numpy_are_numbers(number):
    made = arguments("kda", "backward") | {"beta": 1.0, "g": -1.0}
    other = made | {"beta": number(1), "g": number(-1)}
    got, want = call("kda", "backward", other), call("kda", "backward", made)
    assert (got.dg, got.dbeta) == (want.dg, want.dbeta)
    assert_same_bits(got.dq, want.dq)


@pytest.mark.parametrize("number", [True, np.True_, 1j, np.complex64(1), "1", None, 2**70])
def test_what_is_no_number_for_beta(number):
    made = arguments("delta_rule", "forward")
    refused(linattn.delta_rule, made | {"beta": number}, TypeError, "beta: expected ")


@pytest.mark.parametrize("op", OPS)
def test_a_number_for_q_is_refused(op):
    made = arguments(op, "forward") | {"q": 0.5}
    refused(function(op, "forward"), made, TypeError, "q: expected an array, got <class 'float'>")


# ---- too much memory ----


@pytest.mark.parametrize("op", OPS)
def test_a_result_that_no_memory_holds(op):
    """2^45 tokens seen through strides of zero."""
    device.needs_host("a device refuses 2^31 tokens by their number")
    made = {}
    for name, x in arguments(op, "forward", B=1, T=1, H=1, HV=1, K=1, V=1).items():
        made[name] = x
        if name in PER_TOKEN:
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
