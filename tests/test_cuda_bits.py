"""The same bits on a GPU: from call to call, whatever the neighbours, packed or not."""

import itertools

import pytest
from support.compare import assert_same_bits, leaves, over_arrays
from support.device import FEW_TOKENS
from support.gpu import (
    APART,
    DTYPES,
    KINDS,
    distance,
    dtypes,
    gpu_problem,
    gradients,
    kinds,
    needs_gpu,
    needs_keys,
    ops,
    run,
)
from support.problems import PER_HEAD, PER_TOKEN, gate_of
from support.tensors import to_numpy, torch
from support.variants import HEAD_DECAY

import linattn

pytestmark = needs_gpu


# ---- the same bits ----


@pytest.mark.parametrize("K", [64, 192, 320])
@dtypes
@gradients
def test_twenty_backwards_give_the_same_bits(op, dtype, K):
    needs_keys(op, K)
    x = gpu_problem(op, dtype=dtype, pass_="backward", T=1000, K=K)
    first = run(op, x, "backward")
    for _ in range(19):
        assert_same_bits(run(op, x, "backward"), first)


# A forward pass of every kind, a step of every dtype.
passes_and_kinds = pytest.mark.parametrize(
    "pass_, dtype", [*(("forward", kind) for kind in KINDS), *(("step", dtype) for dtype in DTYPES)]
)


@passes_and_kinds
@pytest.mark.parametrize("K", [64, 128, 256, 512])
@ops
def test_twenty_launches_give_the_same_bits(op, pass_, K, dtype):
    needs_keys(op, K)
    x = gpu_problem(op, dtype=dtype, pass_=pass_, T=1000, K=K)
    first = run(op, x, pass_)
    for _ in range(19):
        assert_same_bits(run(op, x, pass_), first)


@passes_and_kinds
@pytest.mark.parametrize("rows", [3, 40])
@ops
def test_bits_do_not_know_their_neighbours(op, rows, pass_, dtype):
    """One row alone gives the same bits, though few heads may take another path than many."""
    x = gpu_problem(op, dtype=dtype, pass_=pass_, B=rows, T=1000, H=1, HV=2, V=64)
    all_rows = run(op, x, pass_)
    for row in (0, rows - 1):
        alone = {
            name: a
            if name in (*PER_HEAD, "bonus")
            else over_arrays(lambda s, row=row: s[row : row + 1].clone(), a)
            for name, a in x.items()
        }
        assert_same_bits(run(op, alone, pass_), [a[row : row + 1] for a in all_rows])


@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize(
    "kind", ["bfloat16-float32", "bfloat16-bfloat16", "float32-float32", "float16-float32"]
)
@pytest.mark.parametrize(
    "K, V, options",
    [(128, 128, {}), (112, 84, {"qk_l2norm": True}), (64, 128, {})],
    ids=["128x128", "112x84", "64x128"],
)
@ops
def test_many_states_at_once_give_the_bits_of_few(op, K, V, options, kind, v_first):
    """Enough heads that states are copied through shared memory, and the same rows eight at a
    time."""
    dtype, state_dtype = kind.split("-")
    x = gpu_problem(op, dtype=dtype, pass_="step", B=88, H=2, HV=8, K=K, V=V) | options
    pool = leaves(x.pop("state"))
    if v_first:
        pool = [s.transpose(2, 3) if s.ndim == 4 else s for s in pool]
    pool = [s.to(getattr(torch, state_dtype)).contiguous() for s in pool]
    index = torch.randperm(88, generator=torch.Generator().manual_seed(K)).cuda()
    index[5] = index[40] = -1
    step = getattr(linattn, f"{op}_step")

    def rows(state, at):
        row = {name: a[at] if name in PER_TOKEN else a for name, a in x.items()}
        return step(
            **row,
            state=tuple(state) if len(state) > 1 else state[0],
            state_indices=index[at],
            state_v_first=v_first,
        )

    together, few = ([s.clone() for s in pool] for _ in range(2))
    o = rows(together, slice(None))
    want = torch.cat([rows(few, slice(i, i + 8)) for i in range(0, 88, 8)])
    assert not o[5].any() and not o[40].any() and o[6].any()
    assert_same_bits([o, *together], [want, *few])
    assert not torch.equal(together[0], pool[0])


@kinds
@pytest.mark.parametrize("K", [64, 128, 200])
@pytest.mark.parametrize(
    "cu", [[0, 0, 63, 64, 64, 300, 429, 429], [0, 1, 5, 5, 8]], ids=["chunks", "few tokens"]
)
@ops
def test_packed_sequences_on_the_device(op, cu, K, dtype):
    """cu_seqlens on the GPU, int32 and int64, empty sequences among them: as separate calls. A call
    of a few tokens goes token by token. So a sequence as short has the bits of a separate call only
    if the whole packed call is as short."""
    x = gpu_problem(op, dtype=dtype, B=1, T=cu[-1], K=K)
    state = x.pop("initial_state")
    states = over_arrays(lambda s: torch.cat([s * (n + 1) for n in range(len(cu) - 1)]), state)
    for integer in (torch.int32, torch.int64):
        o, *packed = run(
            op,
            x | {"initial_state": states},
            cu_seqlens=torch.tensor(cu, dtype=integer, device="cuda"),
        )
        for n, (start, end) in enumerate(itertools.pairwise(cu)):
            part = {name: a[:, start:end] if name in PER_TOKEN else a for name, a in x.items()}
            part["initial_state"] = over_arrays(lambda s, n=n: s[n : n + 1], states)
            o_n, *states_n = run(op, part)
            got, want = [o[:, start:end], *(s[n : n + 1] for s in packed)], [o_n, *states_n]
            if dtype != "float32" and 0 < end - start <= FEW_TOKENS < cu[-1]:
                assert all(distance(a, b) < APART[dtype] for a, b in zip(got, want, strict=True))
            else:
                assert_same_bits(got, want)


@ops
def test_a_gate_per_head_may_lie_on_the_host(op):
    if op not in HEAD_DECAY:
        pytest.skip(f"{op} has no gate per head")
    gate = gate_of(op)
    for HV in (4, 300):
        x = gpu_problem(op, T=70, H=1, HV=HV, V=16)
        want = run(op, x)
        assert_same_bits(run(op, x | {gate: to_numpy(x[gate])}), want)
