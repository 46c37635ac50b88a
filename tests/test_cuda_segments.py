"""Maps of segments and gradients of first states alone, on a GPU: by kernels of their own.

The additive rule sums parts of a sequence side by side (csrc/cuda/segment_sums.cuh). Other rules
walk to the ends of segments, and the adjoint goes backwards without what it would keep."""

import numpy as np
import pytest
from support.compare import assert_same_bits, leaves, over_arrays
from support.gpu import (
    APART,
    DTYPES,
    distance,
    gpu_problem,
    kernels_of,
    needs_gpu,
    needs_keys,
    ops,
    run,
)
from support.shared_rows import system_problem
from support.tensors import to_tensor, torch
from support.variants import GATED, PAIR_DECAY, PREDICTS, ops_with

import linattn
from linattn.distributed._systems import SYSTEMS as TABLE
from linattn.segments import core_call, initial_gradient

pytestmark = needs_gpu

MATRIX = [*PREDICTS, *ops_with(rule="dplr")]
SYSTEMS = {name: row for name, row in TABLE.items() if not row.is_carried}
dtypes = pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
# whole tiles; more keys than one tile; few, odd numbers; shared heads; few heads and many tokens;
# packed sequences of 0, 1, 63 and 64 tokens
SHAPES = {
    "whole": {"T": 512, "K": 128, "V": 128, "H": 4, "HV": 4},
    "256 keys": {"T": 300, "K": 192, "V": 72, "H": 2, "HV": 2},
    "odd": {"T": 201, "K": 34, "V": 40, "H": 2, "HV": 2},
    "no pieces": {"T": 130, "K": 33, "V": 37, "H": 1, "HV": 2},
    "shared": {"T": 700, "K": 64, "V": 200, "H": 1, "HV": 3},
    "few tokens": {"T": 7, "K": 64, "V": 64},
    "one token": {"T": 1, "K": 64, "V": 64},
    "no tokens": {"T": 0, "K": 64, "V": 64},
    "72 keys": {"T": 400, "K": 72, "V": 104, "H": 2, "HV": 4},
    "long": {"T": 9001, "K": 128, "V": 128, "H": 1, "HV": 2, "B": 1},
}
shapes = pytest.mark.parametrize("shape", SHAPES)
EDGES = [0, 0, 1, 64, 192, 255, 255, 700, 1200]


def problem(op, shape, dtype="bfloat16", **more):
    """The arrays of a call without a state, do, a state and its gradient."""
    sizes = SHAPES[shape] | more
    needs_keys(op, sizes["K"])
    if op in PAIR_DECAY and sizes["K"] > 128 and dtype == "bfloat16":
        sizes["K"] = 128
    options = {"normalize": False} if "linear" in op else {}
    x = gpu_problem(op, pass_="backward", dtype=dtype, **options, **sizes)
    do, S, G = x.pop("do"), x.pop("initial_state"), x.pop("d_final_state")
    return x | options, do, S, G


def packed(op, dtype="bfloat16", **more):
    sizes = {"B": 1, "T": EDGES[-1], "H": 2, "HV": 2, "K": 64, "V": 64} | more
    options = {"normalize": False} if "linear" in op else {}
    x = gpu_problem(
        op, pass_="backward", dtype=dtype, **options, **sizes, cu_seqlens=np.array(EDGES)
    )
    do, S, G = x.pop("do"), x.pop("initial_state"), x.pop("d_final_state")
    return x | options, do, S, G


def stacked(S):
    return torch.cat(leaves(S), -2).double()


def times(M, S):
    """M S, whatever M is."""
    if M is None:
        return S
    if M.dim() == 4:
        return M.double() @ S
    return M.double().reshape(*M.shape, *[1] * (4 - M.dim())) * S


def near(got, want, dtype):
    assert torch.equal(torch.isfinite(got), torch.isfinite(want))
    if not want.any():  # nothing to be relative to
        assert not got.any()
        return
    bound = 1e-11 if dtype == "float64" else APART[dtype]
    assert distance(got, want) <= bound


def check_map(op, x, S, dtype):
    _, want = getattr(linattn, op)(**x, initial_state=S, output_final_state=True, mode="recurrent")
    X, M = linattn.segment_map(op, **x)
    near(times(M, stacked(S)) + stacked(X), stacked(want), dtype)
    _, alone = getattr(linattn, op)(**x, output_final_state=True, mode="recurrent")
    near(stacked(X), stacked(alone), dtype)


def check_gradient(op, x, do, S, G, dtype):
    back = getattr(linattn, f"{op}_backward")
    for final in (G, None):
        want = back(do, **x, initial_state=S, d_final_state=final, mode="recurrent")
        got = linattn.segment_map_backward(op, do, **x, d_final_state=final)
        near(stacked(got), stacked(want.d_initial_state), dtype)


@dtypes
@shapes
@ops
def test_a_segment_maps_the_state_before_it(op, shape, dtype):
    x, _, S, _ = problem(op, shape, dtype)
    check_map(op, x, S, dtype)


@dtypes
@shapes
@ops
def test_the_gradient_of_the_first_state(op, shape, dtype):
    x, do, S, G = problem(op, shape, dtype)
    check_gradient(op, x, do, S, G, dtype)


@dtypes
@ops
def test_packed_sequences(op, dtype):
    x, do, S, G = packed(op, dtype)
    check_map(op, x, S, dtype)
    check_gradient(op, x, do, S, G, dtype)


@ops
def test_neighbours_of_a_packed_sequence_do_not_see_it(op):
    """A chunk's boxes reach into the next sequence, which may have a NaN."""
    x, do, _, G = packed(op, K=128, V=128)
    clean = linattn.segment_map(op, **x)
    dS = linattn.segment_map_backward(op, do, **x, d_final_state=G)
    part, n = slice(255, 700), 6
    spoiled = x | {name: x[name].clone() for name in ("q", "k", "v")}
    for name in ("q", "k", "v"):
        spoiled[name][:, part] = torch.nan
    others = [m for m in range(len(EDGES) - 1) if m != n]
    got = linattn.segment_map_backward(op, do, **spoiled, d_final_state=G)
    for a, b in zip(leaves(got), leaves(dS), strict=True):
        assert_same_bits(a[others], b[others])
    got = linattn.segment_map(op, **spoiled)
    for a, b in zip(leaves(tuple(got)), leaves(tuple(clean)), strict=True):
        if b is not None:
            assert_same_bits(a[others], b[others])
    of_do = do.clone()
    of_do[:, part] = torch.nan
    got = linattn.segment_map_backward(op, of_do, **x, d_final_state=G)
    for a, b in zip(leaves(got), leaves(dS), strict=True):
        assert_same_bits(a[others], b[others])
        assert torch.isnan(a[n]).any()


@pytest.mark.parametrize("shape", ["whole", "shared", "long"])
@ops
def test_the_same_bits_twice_and_in_a_graph(op, shape):
    x, do, _, G = problem(op, shape)

    def results():
        found = linattn.segment_map(op, **x)
        dS = linattn.segment_map_backward(op, do, **x, d_final_state=G)
        return [y for y in (*leaves(tuple(found)), *leaves(dS)) if y is not None]

    want = results()
    for _ in range(5):
        assert_same_bits(results(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results()
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(captured, want)


@pytest.mark.parametrize("shape", ["whole", "long"])
@pytest.mark.parametrize("log_decay", [-3.0, -0.1, -1e-3, 0.0])
@pytest.mark.parametrize("op", GATED)
def test_decays_of_all_sizes(op, log_decay, shape):
    x, do, S, G = problem(op, shape)
    x["g"] = torch.full_like(x["g"], log_decay)
    check_map(op, x, S, "bfloat16")
    check_gradient(op, x, do, S, G, "bfloat16")


@ops
def test_rows_that_are_normed(op):
    x, do, S, G = problem(op, "shared")
    x["qk_l2norm"] = True
    check_map(op, x, S, "bfloat16")
    check_gradient(op, x, do, S, G, "bfloat16")


@pytest.mark.parametrize("op", PREDICTS)
def test_keys_that_predict_by_themselves(op):
    x, do, S, G = problem(op, "shared")
    x["x"] = x["k"].roll(1, 1)
    check_map(op, x, S, "bfloat16")
    check_gradient(op, x, do, S, G, "bfloat16")


@pytest.mark.parametrize("T", [130, 700])
@pytest.mark.parametrize("system", SYSTEMS)
def test_systems(system, T):
    """A system's states alone are those of the op under it, and they go in chunks."""
    given, d = system_problem(system, np.random.default_rng(T), T, dtype=np.float32, K=64, V=64)
    row, rule = SYSTEMS[system], linattn.VARIANTS[SYSTEMS[system].op].rule
    wide = {row.initial, "g", "dt", "A", "D", "dt_bias"} | ({"w"} if system == "rwkv7" else set())

    def there(name, y):
        if not hasattr(y, "ndim"):
            return y
        return to_tensor(y).to("cuda", torch.float32 if name in wide else torch.bfloat16)

    x = {name: there(name, y) for name, y in given.items()}
    do, G = there("do", d["do"]), there(row.initial, d["d_final_state"])
    S = x.pop(row.initial)
    function, back = getattr(linattn, system), getattr(linattn, f"{system}_backward")
    last = row.initial.replace("initial", "d_final")
    _, want = function(**x, **{row.initial: S, row.final: True}, mode="recurrent")
    call = core_call(function, **x, **{row.final: True})
    _, X, *M = call.states_alone(segment_map=rule != "additive")
    assert linattn._linattn.taken()[0] == "chunks"
    if M:
        near(M[0].double() @ S.double() + X.double(), want.double(), "bfloat16")
    _, alone = function(**x, **{row.final: True}, mode="recurrent")
    near(X.double(), alone.double(), "bfloat16")
    found = initial_gradient(core_call(back, do, **x, **{last: G}))
    assert linattn._linattn.taken()[0] == "chunks"
    want = back(do, **x, **{row.initial: S, last: G}, mode="recurrent")
    near(found.double(), want._asdict()[f"d_{row.initial}"].double(), "bfloat16")


@pytest.mark.parametrize("op", MATRIX)
def test_m_of_a_call_that_repeats_a_column(op):
    """M times a column is the end of that column, where nothing is written."""
    x, _, S, _ = problem(op, "whole", T=60)
    M = linattn.segment_map(op, **x).M
    none = x | {"v": torch.zeros_like(x["v"])}
    _, want = getattr(linattn, op)(**none, initial_state=S, output_final_state=True)
    near(M.double() @ S.double(), want.double(), "bfloat16")


@ops
def test_states_in_the_other_layout(op):
    x, do, _, G = problem(op, "shared")

    def turned(state):
        return over_arrays(lambda s: s.transpose(-1, -2).contiguous(), state)

    X, M = linattn.segment_map(op, **x)
    got = linattn.segment_map(op, **x, state_v_first=True)
    assert_same_bits(turned(got.X), X)
    if M is not None:
        assert_same_bits(got.M, M)
    dS = linattn.segment_map_backward(op, do, **x, d_final_state=G)
    got = linattn.segment_map_backward(op, do, **x, d_final_state=turned(G), state_v_first=True)
    assert_same_bits(turned(got), dS)


@ops
def test_the_kernels_that_take_these_calls(op):
    x, do, _, G = problem(op, "whole")
    row = linattn.VARIANTS[op]
    forward = kernels_of(lambda: linattn.segment_map(op, **x))
    assert linattn._linattn.taken()[0] == "chunks"
    back = kernels_of(lambda: linattn.segment_map_backward(op, do, **x, d_final_state=G))
    assert linattn._linattn.taken()[0] == "chunks"
    assert "intra_chunk" not in back
    if row.rule in ("additive", "bonus"):
        assert "sum_part" in forward and "sum_part" in back
    elif row.decay in ("none", "token") and torch.cuda.get_device_capability() == (9, 0):
        assert "delta_ends" in forward and "delta_starts" in back


@pytest.mark.parametrize("op", [op for op in PREDICTS if linattn.VARIANTS[op].decay != "key"])
def test_keys_that_make_a_state_longer(op):
    """Their inverses are too large for float16, so their chunks go token by token."""
    x, do, _, _ = problem(op, "whole", T=100)
    x["k"] = 3 * x["k"] / x["k"].float().norm(dim=-1, keepdim=True).to(x["k"].dtype)
    x["beta"] = torch.ones_like(x["beta"])
    x["k"][:, 40:] *= 1e-3
    got = linattn.segment_map_backward(op, do, **x)
    want = linattn.segment_map_backward(op, do, **x, mode="recurrent")
    near(stacked(got), stacked(want), "bfloat16")


@dtypes
@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("feature_map", ["elu+1", "relu2"])
def test_sums_of_keys(feature_map, l2norm, packs, dtype):
    """Of a normalised call, without its o."""
    op = "linear_attention"
    edges = np.array([0, 0, 1, 700, 9000], np.int32)
    sizes = {"B": 1 if packs else 2, "T": int(edges[-1]), "H": 1, "HV": 2, "K": 72, "V": 40}
    x = gpu_problem(op, dtype=dtype, **sizes, **({"cu_seqlens": edges} if packs else {}))
    del x["initial_state"]
    x |= {"feature_map": feature_map, "qk_l2norm": l2norm}
    (S, z), M = linattn.segment_map(op, **x)
    assert M is None
    want = run(op, x, mode="recurrent")[1:]
    for a, b in zip((S, z), want, strict=True):
        near(a.double(), b.double(), dtype)


@pytest.mark.parametrize("op", ops_with(rule="additive"))
def test_float16_keys_that_are_mapped(op):
    """A mapped number is too large for float16, and its token is not."""
    if "linear" not in op:
        pytest.skip("no feature maps")
    x, _, S, _ = problem(op, "whole", "float16")
    x |= {"feature_map": "exp", "k": 4 * x["k"]}
    check_map(op, x, S, "float16")
