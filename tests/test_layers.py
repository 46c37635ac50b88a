"""linattn.layer_step: a layer's step in one call, beside the functions that it puts together."""

import copy
import warnings

import numpy as np
import pytest
from support.compare import arrays_in, assert_same_bits, snapshot
from support.layers import (
    BAD_STAGES,
    OPS,
    bad_arguments,
    by_functions,
    layer_arguments,
    mamba2_arguments,
)

import linattn
from linattn import _linattn
from linattn.testing import RMS_BOUND

ops = pytest.mark.parametrize("op", OPS)
STATES = ("state", "q_conv", "k_conv", "v_conv")


def arguments(op, *left_out, **options):
    x = layer_arguments(op, **options)
    return {name: value for name, value in x.items() if name not in left_out}


def agree(op, x, **bounds):
    """layer_step and the functions, from the same states, which are the same after.

    With weights of what is written, the functions round dt v, and the core dt k v.
    """
    y = copy.deepcopy(x)
    got, want = linattn.layer_step(op, **x), by_functions(op, y)
    np.testing.assert_allclose(got, want, **({"rtol": 1e-12, "atol": 1e-13} | bounds))
    if x.get("weigh"):
        np.testing.assert_allclose(x["state"], y.pop("state"), rtol=1e-12, atol=1e-13)
    for name in STATES:
        if name in y:
            assert_same_bits(x[name], y[name], name)
    return got


@ops
def test_all_stages(op):
    x = arguments(op)
    for _ in range(3):  # the states go on
        agree(op, x)


@pytest.mark.parametrize(
    "left_out",
    [
        ("q_conv", "k_conv", "v_conv"),
        ("q_conv", "v_conv"),
        ("norm_weight",),
        ("output_gate",),
        ("norm_weight", "output_gate"),
        ("dt_bias",),
    ],
    ids="no ".join,
)
@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_without_a_stage(op, left_out):
    agree(op, arguments(op, *left_out))


@pytest.mark.parametrize(
    "options",
    [
        {"conv_activation": None},
        {"output_activation": "sigmoid", "norm_eps": 0.1},
        {"output_activation": None},
        {"decay": "bounded"},
        {"decay": "bounded", "lower_bound": -0.5, "dt_bias": None},
        {"decay": "rwkv7", "A_log": None, "dt_bias": None},
        {"allow_neg_eigval": True},
        {"scale": 0.3, "qk_l2norm": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_options(op, options):
    agree(op, arguments(op) | options)


def test_states_of_convolutions_with_older_inputs():
    """As caches of transformers have them."""
    x = arguments("gated_delta_rule")
    for name in ("q_conv", "k_conv", "v_conv"):
        weight, bias, state = x[name]
        x[name] = weight, bias, np.concatenate([np.ones((*state.shape[:2], 2)), state], 2)
    for _ in range(3):
        agree("gated_delta_rule", x)


# ---- Mamba-2 ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm_groups": 1},
        {"norm_groups": 4},  # the heads
        {"norm_groups": 6},  # no whole heads
        {"norm_groups": None},
        {"norm_groups": None, "norm_weight": np.arange(12.0)},
        {"gate_first": False},
        {"norm_weight": None},
        {"output_gate": None},
        {"norm_weight": None, "output_gate": None},
        {"skip": None},
        {"weigh": False},
        {"dt_bias": None},
    ],
    ids=str,
)
def test_the_stages_of_mamba2(options):
    x = mamba2_arguments() | options
    for _ in range(3):
        agree("simple_gla", x)


@pytest.mark.parametrize("V", [1, 300])
def test_rows_of_any_length(V):
    """A norm goes through a row in pieces."""
    agree("simple_gla", mamba2_arguments(V=V, groups=1))


def test_mamba2_is_ssd_and_its_norm():
    """By the names of ssd_step."""
    x = mamba2_arguments()
    del x["q_conv"], x["k_conv"], x["v_conv"]
    N, HV, V, K = x["state"].shape
    state = x["state"].copy()
    o = linattn.ssd_step(
        state,
        x["v"].reshape(N, HV, V),
        x["g"],
        -np.exp(x["A_log"]),
        x["k"].reshape(N, -1, K),
        x["q"].reshape(N, -1, K),
        D=x["skip"],
        z=x["output_gate"].reshape(N, HV, V),
        dt_bias=x["dt_bias"],
        dt_softplus=True,
    ).reshape(N, 2, -1)
    want = o / np.sqrt((o * o).mean(-1, keepdims=True) + 1e-5)
    got = linattn.layer_step("simple_gla", **x, scale=1.0)
    np.testing.assert_allclose(got, want.reshape(N, -1) * x["norm_weight"], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(x["state"], state, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("op, options, error, text", BAD_STAGES)
def test_no_stages_of_mamba2(op, options, error, text):
    x = bad_arguments(op, options)
    before = snapshot(x)
    with pytest.raises(error, match=text):
        linattn.layer_step(op, **x)
    assert snapshot(x) == before


@pytest.mark.parametrize("lie", ["apart", "backwards", "one for all"])
@pytest.mark.parametrize("op", ["gated_delta_rule", "kda"])
def test_gates_that_lie_anywhere(op, lie):
    """Those of a token and a head, as views of a joint projection have them."""

    def laid(x):
        if lie == "apart":
            return np.repeat(x, 2, axis=1)[:, ::2]
        if lie == "backwards":
            return x[:, ::-1].copy()[:, ::-1]
        return np.broadcast_to(x[:1, :1], x.shape)

    x = arguments(op)
    for name in ("beta", "g") if op == "gated_delta_rule" else ("beta",):
        x[name] = laid(x[name])
    agree(op, x)
    agree(
        op,
        {name: value for name, value in x.items() if name not in ("A_log", "dt_bias", "decay")}
        | {"g": -abs(x["g"])},
    )


def test_gates_as_the_op_takes_them():
    x = arguments("gated_delta_rule", "decay", "A_log", "dt_bias", "sigmoid_beta")
    agree("gated_delta_rule", x | {"g": -abs(x["g"]), "beta": abs(x["beta"])})


@pytest.mark.parametrize("V", [1, 7, 300, 1100])
@pytest.mark.parametrize("HV", [1, 40])
def test_sizes(V, HV):
    agree("gated_delta_rule", arguments("gated_delta_rule", N=2, H=1, HV=HV, K=5, V=V, W=2))


def test_states_by_their_places():
    x = arguments("gated_delta_rule", N=5)
    for name in ("q", "k", "v", "g", "beta", "output_gate"):
        x[name] = x[name][:3]
    agree("gated_delta_rule", x | {"state_indices": np.array([4, -1, 0])})


def test_a_state_with_v_first_and_strides_of_all_kinds():
    x = arguments("kda")
    x["state"] = np.ascontiguousarray(x["state"].swapaxes(2, 3))
    y = arguments("kda")
    for name in ("q", "k", "v"):  # the last inputs of a layer of linattn.nn are [N,W-1,D]
        weight, bias, before = x[f"{name}_conv"]
        x[f"{name}_conv"] = (
            weight,
            bias,
            np.ascontiguousarray(before.swapaxes(1, 2)).swapaxes(1, 2),
        )
    x["output_gate"] = np.asfortranarray(x["output_gate"])
    got = linattn.layer_step("kda", **x, state_v_first=True)
    np.testing.assert_allclose(got, by_functions("kda", y), rtol=1e-12)
    np.testing.assert_allclose(x["state"].swapaxes(2, 3), y["state"], rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@ops
def test_dtypes(op, dtype):
    """y is within the rule, beside a norm and a gate in float64 of the same o."""
    x = arguments(op, dtype=np.dtype(dtype), K=64, V=60)
    y = copy.deepcopy(x)
    got, want = linattn.layer_step(op, **x), by_functions(op, y)
    assert got.dtype == np.dtype(dtype)
    error = np.sqrt(((got.astype(np.float64) - want) ** 2).mean() / (want**2).mean())
    assert error <= RMS_BOUND[dtype]
    for name in STATES:
        assert_same_bits(x[name], y[name], name)


def test_no_thread_changes_a_bit():
    x = arguments("gated_delta_rule", N=20, H=4, HV=16, K=32, V=64)
    y, threads = copy.deepcopy(x), linattn.get_num_threads()
    try:
        linattn.set_num_threads(1)
        want = linattn.layer_step("gated_delta_rule", **x)
        linattn.set_num_threads(3)
        assert_same_bits(linattn.layer_step("gated_delta_rule", **y), want)
    finally:
        linattn.set_num_threads(threads)
    assert_same_bits(arrays_in(y), arrays_in(x))


def test_no_memory_and_no_state_has_changed():
    """Each allocation of scratch fails once, until none is left to fail."""
    x = arguments("gated_delta_rule")
    before = snapshot(x)
    failed = 0
    while True:
        _linattn._fail_allocation(failed + 1)
        try:
            linattn.layer_step("gated_delta_rule", **x)
            break
        except MemoryError as error:
            assert "scratch" in str(error)
            assert snapshot(x) == before
            failed += 1
        finally:
            _linattn._fail_allocation(0)
    assert failed >= 5  # three convolutions, the step, what lies between the stages
    assert snapshot(x) != before


def _wrong(name, value):
    return lambda x: x | {name: value}


def _conv(i, value):
    def changed(x):
        parts = list(x["k_conv"])
        parts[i] = value
        return x | {"k_conv": tuple(parts)}

    return changed


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            _wrong("q", np.ones((3, 17))),
            ValueError,
            r"q: expected \[N,H\*K\] with K = 8, got 17 columns",
        ),
        (
            _wrong("v", np.ones((3, 4, 12))),
            ValueError,
            r"v: expected \[N,HV\*V\] with 4 heads of 12",
        ),
        (_wrong("k", np.ones((2, 16))), ValueError, r"state_indices|k: expected|k_conv"),
        (_wrong("state", None), TypeError, "state: expected an array, got None"),
        (
            _wrong("state", np.ones((3, 4, 8))),
            ValueError,
            r"state: expected \[N,HV,K,V\], got \(3, 4, 8\)",
        ),
        (
            _wrong("k_conv", np.ones(3)),
            TypeError,
            r"k_conv: expected \(weight, bias or None, state\)",
        ),
        (_conv(0, np.ones((15, 4))), ValueError, r"k_conv\[0\]: expected \[D,W\]"),
        (_conv(1, np.ones(3)), ValueError, r"k_conv\[1\]: expected \[D\] = \(16,\), got \(3,\)"),
        (_conv(2, np.ones((3, 16, 2))), ValueError, r"k_conv\[2\]: expected \[S,D,W-1\]"),
        (_conv(2, None), TypeError, r"k_conv\[2\]: expected an array, got None"),
        (
            _wrong("conv_activation", "relu"),
            ValueError,
            "conv_activation: expected None or 'silu', got 'relu'",
        ),
        (
            _wrong("decay", "exp"),
            ValueError,
            "decay: expected softplus, rwkv7, bounded or None, got 'exp'",
        ),
        (_wrong("decay", None), ValueError, "A_log, dt_bias: expected decay= beside them"),
        (_wrong("A_log", np.ones(3)), ValueError, r"A_log: expected \[HV\], got \(3,\)"),
        (_wrong("dt_bias", np.ones(3)), ValueError, r"dt_bias: expected \[HV\], got \(3,\)"),
        (_wrong("A_log", np.ones(4, int)), TypeError, "A_log: expected .*, got int64"),
        (_wrong("g", None), TypeError, "g: expected an array, got None"),
        (_wrong("beta", None), TypeError, "beta: expected an array, got None"),
        (_wrong("beta", np.ones((3, 5))), ValueError, "beta: expected"),
        (
            lambda x: x | {"decay": "bounded", "lower_bound": 1},
            ValueError,
            "lower_bound: expected a finite number < 0, got 1",
        ),
        (
            _wrong("norm_weight", np.ones(4)),
            ValueError,
            r"norm_weight: expected \[V\] or \[HV\*V\], got \(4,\)",
        ),
        (_wrong("norm_weight", "w"), TypeError, "norm_weight: expected an array"),
        (_wrong("norm_eps", "w"), TypeError, "norm_eps: expected a number, got"),
        (
            _wrong("output_gate", np.ones((3, 4))),
            ValueError,
            r"output_gate: expected \[N,HV\*V\] with 4 heads of 12",
        ),
        (
            _wrong("output_gate", np.ones((3, 48), int)),
            TypeError,
            "output_gate: expected .*, got int64",
        ),
        (
            _wrong("output_activation", "tanh"),
            ValueError,
            "output_activation: expected None, 'silu' or 'sigmoid'",
        ),
        (
            _wrong("output_activation", 3),
            TypeError,
            "output_activation: expected None, 'silu' or 'sigmoid'",
        ),
        (_wrong("out", np.ones((3, 48))), TypeError, "out: expected None"),
        (_wrong("alpha", np.ones((3, 4))), ValueError, "alpha: expected g in its place"),
        (_wrong("norm_eps", -1.0), ValueError, "norm_eps: expected a finite number >= 0, got -1"),
        (_wrong("norm_eps", 10**400), ValueError, "norm_eps: expected a finite number"),
        (_wrong("decay", ["softplus"]), TypeError, "decay: expected a str or None, got list"),
        (_wrong("g", np.ones((3, 4, 8))), ValueError, r"g: expected \[N,HV\], got \(3, 4, 8\)"),
        (_wrong("eta", np.ones((3, 4))), TypeError, "no argument of its step is called 'eta'"),
        (_wrong("colour", 3), TypeError, "no argument of this pass is called 'colour'"),
    ],
)
def test_refused_before_a_number_is_written(change, error, text):
    x = change(arguments("gated_delta_rule"))
    before = snapshot(x)
    with pytest.raises(error, match=text):
        linattn.layer_step("gated_delta_rule", **x)
    assert snapshot(x) == before


def test_no_op():
    with pytest.raises(ValueError, match=r"op: expected one of simple_gla, .*, got 'attention'"):
        linattn.layer_step("attention", **arguments("delta_rule"))


def test_states_that_share_memory():
    """Parts of one array may lie between one another, as those of a joined convolution do."""
    x = arguments("gated_delta_rule")
    weight, bias, _ = x["k_conv"]
    with pytest.raises(
        ValueError, match=r"k_conv\[2\]: expected memory of its own, got some of q_conv\[2\]"
    ):
        linattn.layer_step("gated_delta_rule", **x | {"k_conv": (weight, bias, x["q_conv"][2])})
    joined = np.concatenate([x[f"{name}_conv"][2] for name in "qkv"], 1)
    parts = np.split(joined, np.cumsum([x[f"{name}_conv"][2].shape[1] for name in "qk"]), 1)
    for name in "qkv":
        weight, bias, state = x[f"{name}_conv"]
        x[f"{name}_conv"] = (weight, bias, state.copy())
    y = copy.deepcopy(x)
    for name, part in zip("qkv", parts, strict=True):
        weight, bias, _ = y[f"{name}_conv"]
        y[f"{name}_conv"] = (weight, bias, part)
    assert_same_bits(
        linattn.layer_step("gated_delta_rule", **y), linattn.layer_step("gated_delta_rule", **x)
    )
    assert_same_bits(
        [y[f"{name}_conv"][2] for name in "qkv"], [x[f"{name}_conv"][2] for name in "qkv"]
    )


@pytest.mark.parametrize("name", ["output_gate", "q", "norm_weight"])
def test_a_state_that_lies_in_an_input(name):
    x = arguments("gated_delta_rule")
    _weight, _bias, state = x["v_conv"]
    x[name] = state.reshape(-1)[: x[name].size].reshape(x[name].shape)
    with pytest.raises(
        ValueError, match=rf"v_conv\[2\]: expected memory of its own, got some of {name}"
    ):
        linattn.layer_step("gated_delta_rule", **x)


def test_an_argument_that_the_op_has_not():
    x = arguments("simple_gla")
    with pytest.raises(TypeError, match="simple_gla: no argument of its step is called 'beta'"):
        linattn.layer_step("simple_gla", **x, beta=np.ones((3, 4)))
    x = arguments("delta_rule")
    with pytest.raises(TypeError, match="delta_rule: no argument of its step is called 'g'"):
        linattn.layer_step("delta_rule", **x, g=-np.ones((3, 4)))


class Shrinks:
    """A number that takes an array's memory away when it is read."""

    def __init__(self, array):
        self.array = array

    def __float__(self):
        self.array.resize((0,), refcheck=False)
        return 1e-5


def test_an_array_that_moves_while_a_number_is_read():
    x = arguments("gated_delta_rule")
    weight, bias, state = x["q_conv"]
    x["q_conv"] = (own := np.array(weight), bias, state)
    with pytest.raises(ValueError, match=r"q_conv\[0\]: expected \[D,W\]"):
        linattn.layer_step("gated_delta_rule", **x, norm_eps=Shrinks(own))


def test_an_array_that_moves_while_a_warning_is_shown(monkeypatch):
    x = arguments("simple_gla", "decay", "A_log", "dt_bias")
    weight, bias, state = x["q_conv"]
    x["q_conv"] = (own := np.array(weight), bias, state)
    x["g"] = abs(x["g"])

    def show(*_, **__):
        own.resize((0,), refcheck=False)

    monkeypatch.setattr(warnings, "showwarning", show)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        with pytest.raises(ValueError, match=r"q_conv\[0\]: expected its memory to stay"):
            linattn.layer_step("simple_gla", **x)


def test_pools_of_different_sizes():
    x = arguments("gated_delta_rule") | {"state_indices": np.arange(3)}
    weight, bias, state = x["k_conv"]
    x["k_conv"] = (weight, bias, np.concatenate([state, state]))
    with pytest.raises(
        ValueError, match=r"k_conv\[2\]: expected P = 3 states, as state has, got 6"
    ):
        linattn.layer_step("gated_delta_rule", **x)
