"""Options: keywords, numbers, flags and the values of gates. A wrong one is refused by name; a gate
that makes a state grow raises a warning. At the end a fuzzer gives any argument any value."""

import functools
import re
import traceback
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import device
from support.compare import assert_same_bits, snapshot
from support.device import ops as linattn
from support.layouts import backwards, laid_out, padded_rows
from support.problems import (
    CALLS,
    LETTERS,
    OPS,
    PASSES,
    WHOLE,
    arguments,
    calls,
    function,
    gate_of,
    grown,
    letters_of,
    normalised,
    refused,
    shape_text,
    sizes,
)
from support.processes import outcome_of

from linattn.testing import GATES

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


# ---- keywords ----


@calls
def test_an_unknown_keyword(op, pass_):
    refused(function(op, pass_), arguments(op, pass_) | {"chunks": 3}, TypeError, "'chunks'")


@calls
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_missing_array(op, pass_, name):
    made = arguments(op, pass_)
    del made[name]
    refused(function(op, pass_), made, TypeError, f"'{name}'")


@pytest.mark.parametrize(("op", "pass_"), [c for c in CALLS if gate_of(c[0]) == "g"])
def test_g_or_alpha(op, pass_):
    made = arguments(op, pass_)
    refused(
        function(op, pass_),
        made | {"alpha": np.exp(made["g"])},
        ValueError,
        "g, alpha: expected one of the two",
        "got both",
    )
    letters = ",".join(letters_of(op, pass_, "g"))
    refused(
        function(op, pass_),
        made | {"g": None},
        TypeError,
        f"g: expected the log decay [{letters}] (or alpha=, the decay itself), got None",
    )
    del made["g"]
    refused(function(op, pass_), made, TypeError, f"g: expected the log decay [{letters}]")
    function(op, pass_)(**made, alpha=np.exp(arguments(op, pass_)["g"]))


@pytest.mark.parametrize(("op", "pass_"), [c for c in CALLS if gate_of(c[0]) == "g"])
def test_messages_about_alpha_call_it_alpha(op, pass_):
    made = arguments(op, pass_)
    bad = np.exp(made.pop("g"))
    letters = ",".join(letters_of(op, pass_, "g"))
    refused(
        function(op, pass_),
        made | {"alpha": grown(bad, 0)},
        ValueError,
        f"alpha: expected [{letters}] = {shape_text(bad.shape)}, got "
        f"{shape_text(grown(bad, 0).shape)}",
    )
    refused(function(op, pass_), made | {"alpha": bad.astype(int)}, TypeError, "alpha: expected ")


@pytest.mark.parametrize(("op", "pass_"), [c for c in CALLS if "beta" in GATES[c[0]]])
def test_missing_beta(op, pass_):
    made = arguments(op, pass_)
    del made["beta"]
    refused(function(op, pass_), made, TypeError, "beta")


@pytest.mark.parametrize("op", OPS)
def test_missing_state(op):
    made = arguments(op, "step")
    del made["state"]
    refused(function(op, "step"), made, TypeError, "'state'")


OPTIONS = [
    ("scale", "x", TypeError),
    ("scale", [1.0], TypeError),
    ("scale", 1j, TypeError),
    ("scale", True, TypeError),
    ("scale", np.True_, TypeError),
    ("scale", np.array([1.0, 2.0]), TypeError),
    ("scale", 10**400, ValueError),
    ("scale", np.inf, ValueError),
    ("scale", -np.inf, ValueError),
    ("scale", np.nan, ValueError),
    ("mode", 3, TypeError),
    ("mode", None, TypeError),
    ("mode", b"chunk", TypeError),
    ("mode", True, TypeError),
    ("mode", "chunked", ValueError),
    ("mode", "", ValueError),
    ("mode", "Chunk", ValueError),
    ("mode", "chunk\0", ValueError),
    ("mode", "ch\udc80", ValueError),
    ("chunk_size", 0, ValueError),
    ("chunk_size", -1, ValueError),
    ("chunk_size", 2**70, ValueError),
    ("chunk_size", -(2**70), ValueError),
    ("chunk_size", 1.5, TypeError),
    ("chunk_size", 16.0, TypeError),
    ("chunk_size", True, TypeError),
    ("chunk_size", "16", TypeError),
    ("chunk_size", [16], TypeError),
    ("chunk_size", np.float32(16), TypeError),
    ("chunk_size", np.array([16, 2]), TypeError),
    ("qk_l2norm", "False", TypeError),
    ("qk_l2norm", 0, TypeError),
    ("qk_l2norm", 1, TypeError),
    ("qk_l2norm", None, TypeError),
    ("qk_l2norm", 0.0, TypeError),
    ("qk_l2norm", np.array([True, False]), TypeError),
    ("state_v_first", "yes", TypeError),
    ("state_v_first", 1, TypeError),
    ("state_v_first", None, TypeError),
    ("state_v_first", [], TypeError),
    ("output_final_state", "True", TypeError),
    ("output_final_state", 1, TypeError),
    ("output_final_state", None, TypeError),
    ("output_final_state", 1.0, TypeError),
    ("allow_tf32", "tf32", TypeError),
    ("allow_tf32", 1, TypeError),
    ("allow_tf32", [], TypeError),
    ("features", "elu+1", TypeError),
]
ONLY = {
    "mode": WHOLE,
    "chunk_size": WHOLE,
    "output_final_state": ("forward",),
    "allow_tf32": ("forward",),
}


def name_of(value):
    return value if isinstance(value, type) else repr(value)[:20]


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(("name", "bad", "error"), OPTIONS, ids=name_of)
def test_options(pass_, name, bad, error):
    if pass_ not in ONLY.get(name, PASSES):
        error = TypeError  # an unknown keyword there
    for op in ("linear_attention", "kda"):
        refused(function(op, pass_), arguments(op, pass_) | {name: bad}, error, name)


def test_options_that_are_legal():
    made = arguments("kda", "forward")
    want = linattn.kda(**made, scale=2.0, chunk_size=3, qk_l2norm=True, output_final_state=True)
    for scale in (2, np.float32(2), np.int64(2), np.float16(2)):
        for three in (3, np.int64(3), np.uint8(3)):
            got = linattn.kda(
                **made,
                scale=scale,
                chunk_size=three,
                qk_l2norm=np.True_,
                output_final_state=np.True_,
            )
            assert_same_bits(got, want)
    assert_same_bits(linattn.kda(**made, chunk_size=2**62), linattn.kda(**made, mode="parallel"))


LINEAR_OPTIONS = [
    ("feature_map", "softmax", ValueError),
    ("feature_map", "", ValueError),
    ("feature_map", 3, TypeError),
    ("feature_map", None, TypeError),
    ("feature_map", {}, TypeError),
    ("feature_map", {"elu+1"}, TypeError),
    ("feature_map", np.zeros(3), TypeError),
    ("feature_map", ("elu+1",), ValueError),
    ("feature_map", ("elu+1", "elu+1", "elu+1"), ValueError),
    ("feature_map", (), ValueError),
    ("feature_map", ("elu+1", 3), TypeError),
    ("feature_map", ["elu+1", "nope"], ValueError),
    ("feature_map", ("elu+1", ["elu+1"]), TypeError),
    ("normalize", "force", ValueError),
    ("normalize", "", ValueError),
    ("normalize", 1, TypeError),
    ("normalize", None, TypeError),
    ("normalize", 1.0, TypeError),
    ("normalize", [], TypeError),
    ("normalize", np.array([True]), TypeError),
    ("eps", -1e-6, ValueError),
    ("eps", np.nan, ValueError),
    ("eps", np.inf, ValueError),
    ("eps", -np.inf, ValueError),
    ("eps", "x", TypeError),
    ("eps", None, TypeError),
    ("eps", True, TypeError),
    ("eps", 1j, TypeError),
    ("eps", [1e-6], TypeError),
    ("eps", np.array(1e-6), TypeError),
    ("eps", 10**400, ValueError),
    ("causal", "yes", TypeError),
    ("causal", 0, TypeError),
    ("causal", None, TypeError),
    ("causal", [], TypeError),
]


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(("name", "bad", "error"), LINEAR_OPTIONS, ids=name_of)
def test_options_of_linear_attention(pass_, name, bad, error):
    if name == "causal" and pass_ == "step":
        error = TypeError
    refused(function("linear_attention", pass_), normalised(pass_) | {name: bad}, error, name)


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(
    "given",
    ["identity", ("identity", "elu+1"), ("elu+1", "identity"), linattn.FeatureMap("identity")],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:normalize. expected denominators")  # test_features.py has it
def test_identity_is_not_normalised_unless_one_insists(pass_, given):
    call = function("linear_attention", pass_)
    refused(
        call,
        normalised(pass_) | {"feature_map": given},
        ValueError,
        "normalize: ",
        "identity",
        "got True",
    )
    call(**normalised(pass_) | {"feature_map": given, "normalize": "clamp"})
    call(**arguments("linear_attention", pass_) | {"feature_map": given})


def test_the_builders_refuse_too():
    for bad in (
        {"H": 0},
        {"H": -1},
        {"H": 4, "layer": 1},
        {"H": 4, "layer": -1},
        {"H": 4, "rule": "alibi"},
        {"H": 4, "layers": 0},
    ):
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


@pytest.mark.parametrize(
    ("bad", "error", "text"),
    [
        ({"op": "softmax"}, ValueError, "op: expected one of linear_attention"),
        ({"op": 3}, (TypeError, ValueError), "op: expected one of linear_attention"),
        ({"op": functools.partial(linattn.retention)}, (TypeError, ValueError), "op: expected"),
        ({"q": [[1.0]]}, TypeError, "q: expected an array of NumPy's or"),
        ({"q": np.zeros((2, 3, 4))}, ValueError, "q: expected [B,T,H,K]"),
        ({"k": np.zeros((1, 5, 2, 3))}, ValueError, "k: expected [B,T,H,K] = (1, 5, 2, 8)"),
        ({"initial_state": np.zeros((1, 2, 8, 5))}, ValueError, "initial_state: "),
        ({"out": np.zeros((1, 2, 5, 5))}, ValueError, "out: "),
        ({"output_final_state": True}, ValueError, "output_final_state: "),
    ],
    ids=range(9),
)
def test_implicit_weights_refuses(bad, error, text):
    made = {"q": np.ones((1, 5, 2, 8)), "k": np.ones((1, 5, 2, 8))} | bad
    with pytest.raises(error) as caught:
        linattn.implicit_weights(**made)
    assert text in str(caught.value)


def test_implicit_weights_of_no_tokens():
    empty = np.ones((1, 0, 2, 8))
    assert linattn.implicit_weights(empty, empty).shape == (1, 2, 0, 0)


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


def with_gate(op, pass_, name, value, dtype=np.float32, where=-1):
    made = arguments(op, pass_)
    gate = made.pop(gate_of(op)).astype(dtype)
    if name == "alpha":
        gate = np.exp(gate.astype(np.float64)).astype(dtype)
    gate.reshape(-1)[where] = value
    return made | {name: gate}


@pytest.mark.parametrize(("op", "name", "value", "text"), OUTSIDE)
@pytest.mark.parametrize("pass_", PASSES)
def test_a_gate_outside_warns_once_per_call_site(op, pass_, name, value, text):
    device.needs_numpy("every call comes from one line of support/device.py")
    made = with_gate(op, pass_, name, value)
    call = function(op, pass_)
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
                    for at in [
                        (0,) * len(shape),
                        tuple(n - 1 for n in shape),
                        *(tuple(int(rng.integers(n)) for n in shape) for _ in range(8)),
                    ]:
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
@pytest.mark.parametrize("pass_", PASSES)
def test_as_an_error_it_leaves_everything_as_it_was(op, pass_, name, value, text):
    device.needs_host("the values of gates are not looked at")
    made = with_gate(op, pass_, name, value)
    if pass_ != "backward":
        made["out"] = np.zeros(sizes(letters_of(op, pass_, "out"), LETTERS), np.float32)
    before = snapshot(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match=re.escape(text)):
            function(op, pass_)(**made)
    assert snapshot(made) == before


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, np.float16, BFLOAT16], ids=lambda d: np.dtype(d).name
)
@pytest.mark.parametrize(("op", "name", "value"), INSIDE)
def test_a_gate_inside_does_not_warn(op, name, value, dtype):
    for pass_ in PASSES:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(op, pass_)(**with_gate(op, pass_, name, value, dtype))


@pytest.mark.parametrize(
    "dtype", [np.float64, np.float32, np.float16, BFLOAT16], ids=lambda d: np.dtype(d).name
)
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


# ---- fuzz ----

DTYPES = [np.float64, np.float32, np.float16, BFLOAT16, np.int32, np.bool_, np.complex64, object]
JUNK = [
    None,
    True,
    0,
    -1,
    2**70,
    0.5,
    float("nan"),
    float("inf"),
    1j,
    "chunk",
    "elu+1",
    "x",
    b"x",
    [],
    [1.0],
    (),
    (1, 2),
    {},
    ...,
    np.float32(1),
    np.array(1.0),
    np.zeros(3, np.int64),
]


@st.composite
def random_arrays(draw):
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=5)))
    x = np.ones(shape, draw(st.sampled_from(DTYPES)))
    if x.ndim and draw(st.booleans()):
        x = x[..., ::-1]
    return x


@st.composite
def fuzzed_calls(draw):
    op, pass_ = draw(st.sampled_from(CALLS))
    dims = {
        "B": draw(st.integers(0, 2)),
        "T": draw(st.integers(0, 3)),
        "H": draw(st.integers(1, 2)),
        "K": draw(st.integers(1, 3)),
    }
    dims |= {"HV": dims["H"] * draw(st.integers(1, 2)), "V": draw(st.integers(1, 3))}
    made = arguments(op, pass_, one_head=draw(st.booleans()), **dims)
    junk = st.sampled_from(JUNK) | random_arrays()
    options = [
        "scale",
        "initial_state",
        "state",
        "d_final_state",
        "output_final_state",
        "cu_seqlens",
        "mode",
        "chunk_size",
        "qk_l2norm",
        "state_v_first",
        "out",
        "alpha",
        "state_indices",
        "allow_tf32",
        "feature_map",
        "normalize",
        "eps",
        "causal",
        "nonsense",
    ]
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*made, *options]))
        made[name] = draw(junk)
        if name == "cu_seqlens" and not device.on_host():
            del made[name]  # a device's values are not read, and must be right
    return op, pass_, made


@pytest.fixture(scope="module")
def none_is_refused():
    """A crash in the fuzz would end the whole run: look whether None is survived first."""
    for op, pass_, name in (("delta_rule", "forward", "k"), ("delta_rule", "backward", "do")):
        made = arguments(op, pass_) | {name: None}
        text = outcome_of(lambda op=op, pass_=pass_, made=made: function(op, pass_)(**made))
        assert "died" not in text, f"{op} {pass_} with {name}=None {text}"


@settings(max_examples=1500, deadline=None)
@given(call=fuzzed_calls())
def test_fuzz(none_is_refused, call):
    op, pass_, made = call
    if pass_ not in PASSES:
        return
    before = snapshot({name: x for name, x in made.items() if name not in ("state", "out")})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with device.from_the_host():
                function(op, pass_)(**made)
    except (TypeError, ValueError, MemoryError) as error:
        message = str(error)
        names = [*made, "normalize", "q", "k", "v", "g", "beta", "gamma", "slopes", "state"]
        assert any(re.search(rf"\b{name}\b", message) for name in names), "".join(
            traceback.format_exception(error)
        )
    after = snapshot({name: x for name, x in made.items() if name not in ("state", "out")})
    assert before == after


# ---- errors that teach ----


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("use_qk_l2norm_in_kernel", "(write qk_l2norm=True)"),
        (
            "head_first",
            "(arrays are [B,T,H,K]; x.transpose(1, 2) is a view of [B,H,T,K] that fits)",
        ),
        ("no_such_thing", ""),
    ],
)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
@pytest.mark.parametrize("op", linattn.OPS)
def test_keywords_of_other_libraries(op, pass_, name, hint):
    call = function(op, pass_)
    text = f"{call.__name__}() got an unexpected keyword argument {name!r} {hint}".rstrip()
    with pytest.raises(TypeError) as caught:
        call(**arguments(op, pass_), **{name: True})
    assert str(caught.value).startswith(text)


def test_objects_that_become_arrays():
    device.needs_host("a list is no array of a device")
    made = arguments("delta_rule", "forward")

    class Frame:
        def to_numpy(self):
            raise AssertionError("the message names it, and nothing calls it")

    for name, x, hint in (
        ("q", [[1.0]], " (np.asarray(q, float) makes one)"),
        ("beta", (0.5,), " (np.asarray(beta, float) makes one)"),
        ("v", Frame(), " (v.to_numpy() makes one)"),
        ("k", {}, ""),
    ):
        with pytest.raises(TypeError) as caught:
            linattn.delta_rule(**made | {name: x})
        assert str(caught.value) == f"{name}: expected an array, got {type(x)}{hint}"


def test_integers_are_told_how_to_be_floats():
    made = arguments("delta_rule", "forward")
    made["q"] = made["q"].astype(np.int64)
    with pytest.raises(TypeError, match=r"got int64 \(q.astype\(float\), or q.float\(\) of a t"):
        linattn.delta_rule(**made)


def test_tokens_and_heads_that_have_changed_places():
    made = arguments("gla", "forward")
    for name in ("g", "k"):
        turned = made | {name: np.ascontiguousarray(made[name].swapaxes(1, 2))}
        with pytest.raises(ValueError, match=r"\): tokens come before heads; transpose\(1, 2\)"):
            linattn.gla(**turned)
    made["g"] = made["g"][:, :-1]
    with pytest.raises(ValueError, match=r"got \(3, 4, 4, 8\)$"):
        linattn.gla(**made)


def test_v_of_one_head_that_is_missing():
    q = np.ones((5, 3), np.float32)
    with pytest.raises(TypeError, match=r"^v: expected \[T,V\], got None$"):
        linattn.linear_attention(q, q, None)
