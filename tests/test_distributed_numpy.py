"""NumPy's arrays on tokens that ranks share: the results of tensors, as arrays."""

import ml_dtypes
import numpy as np
import pytest
from support.compare import assert_same_bits, leaves, over_arrays
from support.ranks import Failure
from support.shared_rows import maker_of, states_of, tokens_of
from support.tensors import to_numpy, to_tensor, torch
from support.variants import NORMALISED, PAIR_DECAY

import linattn.distributed as lad

LENGTHS = [7, 0, 12, 5]
SOME = ["kda", NORMALISED[0], PAIR_DECAY[0], "ssd", "mlstm", "hgrn", "causal_conv1d"]


def results(group, op, x, edges, by_arrays):
    """By NumPy's arrays, or the same by tensors and brought back."""
    cp = lad.context(group, lengths=LENGTHS, cu_seqlens=edges)
    length, T = LENGTHS[cp.rank], sum(LENGTHS)

    def local(name, y):
        if "state" in name:
            return over_arrays(lambda a: a[cp.sequences], y)
        return tokens_of(name, y, cp.start, length, T)

    mine = {name: local(name, y) for name, y in x.items()}
    if not by_arrays:
        mine = over_arrays(lambda a: to_tensor(a.copy()), mine)
    with torch.no_grad():
        found = getattr(lad, op)(**mine, **{states_of(x)[1]: True}, group=cp)
    if by_arrays:
        assert all(type(y) is np.ndarray for y in leaves(found))
        return leaves(found)
    return [y.numpy() if y.is_complex() else to_numpy(y) for y in leaves(found)]


def check(ranks, op, x, edges=None):
    many = len(LENGTHS)
    arrays = ranks.run(many, results, op, x, edges, True)
    for found, want in zip(arrays, ranks.run(many, results, op, x, edges, False), strict=True):
        assert [y.dtype for y in found] == [y.dtype for y in want]
        assert_same_bits(found, want)


@pytest.mark.parametrize("op", SOME)
def test_results_are_those_of_tensors(op, ranks, rng):
    T = sum(LENGTHS)
    x, _ = maker_of(op)(op, rng, T)
    check(ranks, op, x)
    x, _ = maker_of(op)(op, rng, T, edges=[0, 9, T])
    check(ranks, op, x, [0, 9, T])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_short_numbers(dtype, ranks, rng):
    x, _ = maker_of("kda")("kda", rng, sum(LENGTHS), dtype=np.dtype(dtype))
    check(ranks, "kda", x)


def test_complex_numbers(ranks, rng):
    x, _ = maker_of("selective_scan")("selective_scan", rng, sum(LENGTHS), pairs=True)
    check(ranks, "selective_scan", x)


def turned(group):
    """Rows against the order of memory, and memory that may not be written."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 6, 2, 4))
    k.flags.writeable = False
    o, S = lad.retention(q[:, ::-1], k, v, group=group, output_final_state=True)
    p = lad.attend(q, k, v, group=group)
    return o, S, p, lad.retention(q[:, ::-1].copy(), k.copy(), v, group=group)[0]


def test_memory_of_any_kind(ranks):
    for o, S, p, want in ranks.run(2, turned):
        assert_same_bits(o, want)
        assert S.shape == (1, 2, 4, 4) and p.shape == o.shape


def in_any_order(group):
    """The first parameter of a function says which arrays are given, wherever it stands."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 6, 2, 4)).astype(ml_dtypes.bfloat16)
    g, edges = -rng.random((1, 6, 2), np.float32), np.array([0, 4, 12])
    cp = lad.context(group, lengths=6)
    found = lad.simple_gla(g=g, q=q, k=k, v=v, group=cp)[0]
    x = {"cu_seqlens": edges, "q": to_tensor(q).requires_grad_(), "k": to_tensor(k)}
    o, _ = lad.retention(**x, v=to_tensor(v), group=group)
    packed = lad.retention(cu_seqlens=edges, v=v, q=q, k=k, group=group)[0]
    return found, lad.simple_gla(q, k, v, g, group=cp)[0], o.requires_grad, packed.dtype == v.dtype


def test_arguments_in_any_order(ranks):
    for found, want, is_recorded, is_short in ranks.run(2, in_any_order):
        assert_same_bits(found, want)
        assert is_recorded and is_short


def unfit(group, which):
    q = np.ones((1, 6, 2, 4))
    arrays = {
        "a mask": (np.ma.masked_array(q, q > 2), q, q),
        "a mask behind": (q, np.ma.masked_array(q, q > 2), q),
        "long doubles": (q, q.astype(np.longdouble), q),
        "a gradient": (q, to_tensor(q.copy()).requires_grad_(), q),
    }
    lad.retention(*(arrays[which] if group.rank() else (q, q, q)), group=group)


@pytest.mark.parametrize("which", ["a mask", "a mask behind", "long doubles", "a gradient"])
def test_all_ranks_refuse_what_one_cannot_take(which, ranks):
    first, second = ranks.answers(2, unfit, which)
    assert isinstance(first, Failure) and isinstance(second, Failure)
    assert second.kind in ("TypeError", "ValueError") and first.kind == "ValueError"


def memory(group):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 6, 2, 4))
    apart = np.zeros(8 * q.size + 1, np.uint8)[1:].view(q.dtype).reshape(q.shape)
    apart[...] = q
    return lad.retention(apart, k.astype(">f8"), v, group=group)[0], lad.retention(
        q, k, v, group=group
    )[0]


def test_memory_that_no_tensor_has(ranks):
    for found, want in ranks.run(2, memory):
        assert_same_bits(found, want)
