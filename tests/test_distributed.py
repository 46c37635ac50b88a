"""linattn.distributed: rows of tokens that processes share, against one process.

The processes are started once, and serve groups of two, three and four ranks.
"""

from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from support.compare import over_arrays
from support.ranks import Failure
from support.shared_rows import (
    LAYOUTS,
    PACKED,
    agree,
    assembled,
    check,
    drawn,
    maker_of,
    on_rank,
    one_process,
    pair_of,
    problem,
    through,
)
from support.variants import DELTA, GATED, NORMALISED, PAIR_DECAY, PREDICTS

import linattn
import linattn.distributed as lad
from linattn import reference, scans
from linattn.testing import GATES, RMS_BOUND, assert_accurate

OPS = linattn.OPS
SCANS = [name for name in lad.FUNCTIONS if name in scans.__all__]
SYSTEMS = [name for name in lad.FUNCTIONS if name not in OPS and name not in SCANS]
layouts = pytest.mark.parametrize("layout", LAYOUTS)


# ---- results and gradients, in float64 ----


@layouts
@pytest.mark.parametrize("op", OPS)
def test_ops(op, layout, ranks, rng):
    check(ranks, op, *drawn(op, rng, layout))


@layouts
@pytest.mark.parametrize("op", [*SCANS, "causal_conv1d"])
def test_scans_and_the_convolution(op, layout, ranks, rng):
    check(ranks, op, *drawn(op, rng, layout))


def some_layout(rng):
    """The tokens of two to four ranks, one of them without any perhaps, and edges perhaps."""
    T, size = int(rng.integers(0, 60)), int(rng.integers(2, 5))
    ends = np.sort(rng.integers(0, T + 1, size - 1))
    lengths = np.diff([0, *ends, T]).tolist()
    if rng.random() < 0.3:
        return lengths, None
    inner = np.sort(rng.integers(0, T + 1, rng.integers(0, 8)))
    return lengths, [0, *inner.tolist(), T]


@pytest.mark.parametrize("seed", range(60))
def test_layouts_by_chance(seed, ranks):
    rng = np.random.default_rng(seed)
    op = lad.FUNCTIONS[seed % len(lad.FUNCTIONS)]
    lengths, edges = some_layout(rng)
    x, d = maker_of(op)(op, rng, sum(lengths), edges=edges)
    check(ranks, op, x, d, lengths, edges)


@pytest.mark.parametrize(
    "layout", ["unequal", "nothing between", "nothing last", "short between", *PACKED]
)
@pytest.mark.parametrize("op", SYSTEMS)
def test_systems(op, layout, ranks, rng):
    check(ranks, op, *drawn(op, rng, layout))


@pytest.mark.parametrize("layout", ["short between", "across"])
@pytest.mark.parametrize("op", ["selective_scan", "s4d"])
def test_complex_scans(op, layout, ranks, rng):
    check(ranks, op, *drawn(op, rng, layout, pairs=True))


def strong(x):
    """Decays that underflow, and tokens that forget everything, one of them at a cut."""
    g = np.array(x["g"]) * 8
    g[:, ::7], g[:, 20] = -1e4, -np.inf
    return x | {"g": g}


def by_alpha(x):
    return {name: y for name, y in x.items() if name != "g"} | {"alpha": np.exp(x["g"])}


def by_numbers(x):
    numbers = {"g": -0.1, "beta": 0.5, "gamma": 0.9, "slopes": 0.1, "bonus": 0.5, "eta": 0.5}
    return {name: numbers.get(name, y) for name, y in x.items()}


# A change to a problem, its options, and the ops that have it.
SETTINGS = {
    "strong decays": (strong, {}, GATED),
    "alpha": (by_alpha, {}, GATED),
    "numbers": (by_numbers, {}, [op for op in OPS if GATES[op]]),
    "normed keys": (dict, {"qk_l2norm": True, "scale": 0.3}, DELTA),
    "x": (dict, {"x": True}, PREDICTS),
    "state_v_first": (dict, {"state_v_first": True}, OPS),
    "token by token": (dict, {"mode": "recurrent"}, OPS),
    "one head": (dict, {"H": 1, "HV": 1, "K": 3}, OPS),
    "not normalised": (dict, {"normalize": False}, NORMALISED),
    "another map": (dict, {"feature_map": "relu2", "normalize": "add", "eps": 0.1}, NORMALISED),
}
SETTING_LAYOUTS = ("nothing between", "short between", "across")


@pytest.mark.parametrize(
    ("setting", "op"), [(name, op) for name, (_, _, ops) in SETTINGS.items() for op in ops]
)
def test_settings(setting, op, ranks, rng):
    change, options, _ = SETTINGS[setting]
    layout = SETTING_LAYOUTS[OPS.index(op) % len(SETTING_LAYOUTS)]
    x, d, *cut = drawn(op, rng, layout, **options)
    if options.get("state_v_first"):
        x = x | {"initial_state": v_first(x["initial_state"])}
        d = d | {"d_final_state": v_first(d["d_final_state"])}
    check(ranks, op, change(x), d, *cut)


def v_first(S):
    parts = [np.ascontiguousarray(y.swapaxes(-1, -2)) if y.ndim == 4 else y for y in pair_of(S)]
    return tuple(parts) if isinstance(S, tuple) else parts[0]


def adding(group, devices, *call, backend=None):
    """on_rank, and how often this rank added to gradients that it had made."""
    from linattn.distributed import _later, _ways

    counts = []

    def counted(*arguments):
        counts.append(1)
        _later.add_later(*arguments)

    small = {"SHORT": devices, "TOKENS": 7}
    with mock.patch.multiple(_later, **small), mock.patch.object(_ways, "add_later", counted):
        return on_rank(group, *call, backend), len(counts)


@pytest.mark.parametrize("feature_map", linattn.features.FEATURE_MAPS)
@pytest.mark.parametrize("layout", ["short between", "across"])
def test_the_gradient_of_a_final_state_is_added(layout, feature_map, ranks, rng):
    """To those that a rank in the middle has already made."""
    op = NORMALISED[0]
    options = {"feature_map": feature_map, "normalize": "add", "eps": 9.0}
    x, d, lengths, edges = drawn(op, rng, layout, **options)
    answers = ranks.run(len(lengths), adding, (), op, x, d, lengths, edges)
    agree(assembled([a for a, _ in answers], edges), one_process(op, x, d, lengths, edges))
    counts = [count for _, count in answers]
    assert counts[0] == counts[-1] == 0 and 1 in counts


@pytest.mark.parametrize("options", [{}, {"qk_l2norm": True, "scale": 0.3}], ids=str)
@pytest.mark.parametrize("feature_map", linattn.features.FEATURE_MAPS)
@pytest.mark.parametrize("normalize", ["add", "clamp"])
@pytest.mark.parametrize("layout", ["short between", "across"])
def test_gradients_through_divisors(layout, normalize, feature_map, options, ranks, rng):
    """Of which "clamp" takes some for eps, and some as they are."""
    options = options | {"feature_map": feature_map, "normalize": normalize, "eps": 9.0}
    x, d, *cut = drawn(NORMALISED[0], rng, layout, **options)
    if feature_map == "identity":
        x |= {name: np.abs(x[name]) for name in "qk"}
    check(ranks, NORMALISED[0], x, d, *cut)


@pytest.mark.parametrize("devices", [(), ("cpu",)], ids=["float32", "bfloat16"])
def test_a_small_sum_of_large_gradients(devices, ranks, rng):
    """dS v and dz are of either sign: v is far from zero."""
    op, lengths, dtype = NORMALISED[0], [40, 50, 40], ml_dtypes.bfloat16
    x, d = problem(op, rng, sum(lengths), dtype=dtype, K=16, V=16)
    x["v"] = (x["v"].astype(np.float32) + 10).astype(dtype)
    d["do"] = rng.standard_normal(x["v"].shape).astype(dtype)
    answers = ranks.run(len(lengths), adding, devices, op, x, d, lengths, None)
    assert [count for _, count in answers] == [0, 1, 0]
    _, _, gradients = assembled([a for a, _ in answers], None)
    _, _, wanted = one_process(op, x, d, lengths, None)
    for name in ("k", "v"):
        for a, b in zip(gradients[name], wanted[name], strict=True):
            b = b.detach().double().numpy()
            apart = np.sqrt(((a.real - b) ** 2).mean() / (b**2).mean())
            assert apart <= 2 * RMS_BOUND["bfloat16"], name


@pytest.mark.parametrize("options", [{}, {"normalize": False}, {"mode": "recurrent"}], ids=str)
@layouts
@pytest.mark.parametrize("op", NORMALISED)
def test_tokens_that_read_all_tokens(op, layout, options, ranks, rng):
    """causal=False. The initial state counts once, and a final state is that of all tokens."""
    x, d, lengths, edges = drawn(op, rng, layout, **options)
    x["causal"] = False
    # each rank would have its own
    d["d_final_state"] = over_arrays(lambda y: 0 * y, d["d_final_state"])
    got = through(ranks, op, x, d, lengths, edges)
    agree(got, one_process(op, x, d, [sum(lengths)], edges))


@pytest.mark.parametrize("layout", ["a chunk each", "batches"])
@pytest.mark.parametrize("op", PAIR_DECAY)
def test_batches(op, layout, ranks, rng, monkeypatch):
    monkeypatch.setitem(LAYOUTS, "batches", ([12, 9, 16], [0, 4, 29, 37]))
    x, d, lengths, edges = drawn(op, rng, layout)
    if layout == "batches":  # ranks that end within a batch are refused, each of them
        x["batch"] = 4
        for one in ranks.answers(len(lengths), on_rank, op, x, d, lengths, edges):
            assert isinstance(one, Failure) and one.kind == "ValueError"
            assert "batch: expected whole batches of 4" in one.message
        return
    x["batch"] = 4
    check(ranks, op, x, d, lengths, edges)


# ---- other dtypes, by the acceptance rule ----


@pytest.mark.parametrize("op", NORMALISED)
def test_a_clamped_divisor_in_float16(op, ranks, rng):
    """do / eps is no float16 number."""
    lengths = [20, 1, 30, 16]
    x, d = problem(op, rng, sum(lengths), dtype=np.float16, K=16, V=12, feature_map="relu2")
    x["q"][:, 40] = -1
    answers = ranks.run(len(lengths), on_rank, op, x, d, lengths, None)
    o, states, gradients = assembled(answers, None)
    _, _, wanted = one_process(op, x, d, lengths, None)
    assert all(np.isfinite(y).all() for y in (o, *states))
    for name, found in gradients.items():
        for a, b in zip(found, wanted[name], strict=True):
            b = b.detach().double().numpy()
            assert np.abs(a.real - b).max() <= 1e-2 * np.abs(b).max(), name


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda x: np.dtype(x).name
)
@pytest.mark.parametrize("op", OPS)
def test_accuracy(op, dtype, ranks, rng):
    lengths = [50, 1, 40, 37]
    x, d = problem(op, rng, sum(lengths), dtype=dtype, K=16, V=12)
    if op in DELTA:
        x["qk_l2norm"] = True
    o, states, found = assembled(ranks.run(4, given_from_the_left, op, x, d, lengths), None)
    exact, naive = (by_reference(op, x, d, t) for t in (np.float64, np.dtype(dtype)))
    for name, out in ({"o": (o,), "S": states} | found).items():
        for a, b, c in zip(out, exact[name], naive[name], strict=True):
            gradient = name not in ("o", "S")
            # Those of a gate per token have 1024 numbers. Their largest errors are in the last 128,
            # where the final state's gradient counts: a comparison of these would be one of
            # accidents.
            if a.size < 2000:
                error = np.sqrt(((a - b) ** 2).mean() / (b**2).mean())
                assert error < (1 + gradient) * RMS_BOUND[np.dtype(dtype).name], name
            else:
                assert_accurate(a, b, c, dtype=dtype, gradient=gradient, name=name)


def given_from_the_left(group, op, x, d, lengths):
    """on_rank, where the last state alone has a gradient, as in one call."""
    if group.rank() + 1 < group.size():
        d = d | {"d_final_state": zeros_like(d["d_final_state"])}
    else:
        d = d | {"d_final_state": divided(d["d_final_state"], group.size())}
    return on_rank(group, op, x, d, lengths, None)


def zeros_like(S):
    return tuple(map(np.zeros_like, S)) if isinstance(S, tuple) else np.zeros_like(S)


def divided(S, n):
    return tuple(y / y.dtype.type(n) for y in S) if isinstance(S, tuple) else S / S.dtype.type(n)


def by_reference(op, x, d, dtype):
    form = {} if dtype == np.float64 else {"form": "chunk"}
    o, S = getattr(reference, op)(**x, dtype=dtype, **form)
    found = reference.backward(op, **x, **d, dtype=dtype, **form)
    names = {"gamma": "dg", "slopes": "dg", "initial_state": "d_initial_state"}
    found = {
        name: pair_of(getattr(found, names.get(name, f"d{name}")))
        for name, y in x.items()
        if isinstance(y, np.ndarray | tuple)
    }
    return {"o": (o,), "S": pair_of(S)} | found
