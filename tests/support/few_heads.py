"""Few heads on a GPU: what holds whichever kernels walk their sequences."""

import numpy as np
import pytest

from support.compare import assert_same_bits, leaves
from support.gpu import APART, distance, gpu_problem, kernels_of, on_hopper, run
from support.tensors import torch


def assert_kernels(op, x, names, pass_="forward"):
    """On Hopper these kernels take the call."""
    if not on_hopper():
        pytest.skip("only on Hopper")
    found = kernels_of(lambda: run(op, x, pass_))
    assert [name for name in names if name not in found] == []


def token_by_token(op, x):
    return run(op, x, mode="recurrent")


def assert_near(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())
        assert distance(a, b) <= APART["bfloat16"]


def assert_packed_alone(op, x, edges, spoiled):
    """The results are those token by token. A sequence, from token `spoiled` on, does not read
    beyond its ends, nor do its neighbours."""
    got, *states = run(op, x)
    assert_near((got, *states), token_by_token(op, x))
    n = edges.index(spoiled)
    end = edges[n + 1]
    for name in ("k", "v"):
        x[name][:, spoiled:end] = torch.nan
    again, *states_again = run(op, x)
    for part in (slice(0, spoiled), slice(end, None)):
        assert_same_bits(again[:, part], got[:, part])
    there = [m for m in range(len(edges) - 1) if m != n]
    assert_same_bits([S[there] for S in states_again], [S[there] for S in states])


def assert_number_stays_behind(op, x, name, number):
    """One number of an array may be a NaN, an infinity or huge. Then the same results are finite as
    token by token. The other batch row and earlier tokens keep their bits."""
    if name not in x:
        pytest.skip(f"{op} has no {name}")
    clean, *_ = run(op, x)
    if name == "initial_state":
        leaves(x[name])[0][1, 1, 5, 7] = number
        first = 0
    else:
        first = 517
        at = (1, first, x[name].shape[2] - 1) + ((3,) if name in "qkv" else ())
        x[name][at] = -abs(number) if name == "g" else number
    got, *_ = found = run(op, x)
    for a, b in zip(found, token_by_token(op, x), strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())
        if number != 1e30:  # there the rest is as small as the error
            assert distance(a, b) <= APART["bfloat16"]
    assert_same_bits(got[0], clean[0])
    assert_same_bits(got[1, :first], clean[1, :first])


def assert_graph_repeats(op, x):
    want = run(op, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(op, x)
    for _ in range(3):
        for a in got:
            a.fill_(torch.nan)
        graph.replay()
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)


# ---- gradients ----


def assert_gradients(op, x):
    """They are those token by token, and have the same bits again."""
    got = run(op, x, "backward")
    assert_near(got, run(op, x, "backward", mode="recurrent"))
    assert_same_bits(got, run(op, x, "backward"))


def assert_packed_gradients(op, HV, V):
    """Of an empty sequence, one of one token, lengths on both sides of a chunk, and short and long
    ones."""
    edges = [0, 0, 1, 3000, 3064, 3129, 9500]
    sizes = {"B": 1, "T": edges[-1], "K": 128, "V": V, "H": 1, "HV": HV}
    edges = np.array(edges, np.int32)
    assert_gradients(op, gpu_problem(op, pass_="backward", **sizes, cu_seqlens=edges))


def assert_nan_stays_with_its_token(op, x, name):
    """The gradients of the other batch row keep their bits. So do those of tokens that neither read
    the token of the NaN nor are read by it."""
    if name not in x:
        pytest.skip(f"{op} has no {name}")
    names = ("dq", "dk", "dv")
    clean = dict(zip(names, run(op, x, "backward"), strict=False))
    x[name][(1, 517, -1, *([3] if name in ("k", "v", "do") else []))] = torch.nan
    got = dict(zip(names, run(op, x, "backward"), strict=False))
    for y in names:
        assert_same_bits(got[y][0], clean[y][0])
    if name == "do":  # its token reads the tokens before, and no later one
        for y in names:
            assert_same_bits(got[y][1, 576:], clean[y][1, 576:])
    else:
        assert_same_bits(got["dq"][1, :448], clean["dq"][1, :448])
