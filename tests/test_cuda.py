"""What only a GPU has: streams, graphs, memory that is not the host's, other libraries' arrays.

`--device cuda` runs the rest of the suite there. These run wherever PyTorch and a GPU are, and are
skipped by name elsewhere.
"""

import itertools
import os
import statistics
import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from support.device import FEW_TOKENS, imported

import linattn
from linattn import reference, testing
from linattn.testing import make_inputs

torch = imported("torch")
pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or not linattn.cuda.is_available(),
        reason=f"no GPU: {linattn.cuda.why_not() or 'PyTorch sees none'}"),
    # what other libraries warn of is not ours to mend
    *(pytest.mark.filterwarnings(f"default::{kind}")
      for kind in ("DeprecationWarning", "FutureWarning", "UserWarning")),
]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ops = pytest.mark.parametrize("op", linattn.OPS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)
KINDS = (*DTYPES, "tf32")  # of forward passes: float32 arrays too, with allow_tf32
kinds = pytest.mark.parametrize("dtype", KINDS)
faces = pytest.mark.parametrize("face", ["forward", "step", "backward"])
PLAIN = "linear_attention, not normalised"
gradients = pytest.mark.parametrize("op", [*linattn.OPS, PLAIN])
PER_TOKEN = ("q", "k", "v", "g", "beta", "do")


def to_gpu(x, device="cuda"):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).to(device).view(torch.bfloat16)
    return torch.from_numpy(x).to(device)


def to_host(x):
    x = x.detach().cpu().contiguous()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def over_arrays(function, x):
    if isinstance(x, dict):
        return {name: over_arrays(function, value) for name, value in x.items()}
    if isinstance(x, tuple):
        return tuple(over_arrays(function, value) for value in x)
    return function(x) if hasattr(x, "shape") else x


def problem(op, seed=0, *, dtype="bfloat16", face="forward", **shape):
    """A legal call on the GPU: B 2, T 200, HV 2 H, K 64, V 128 unless told otherwise. tf32: float32
    arrays, and leave to round as tf32 does."""
    tf32 = dtype == "tf32"
    dtype = "float32" if tf32 else dtype
    shape = {"B": 2, "T": 200, "H": 2, "HV": 4, "K": 64, "V": 128} | shape
    if face == "step":
        shape["T"] = 1
    rng = np.random.default_rng(seed)
    op, plain = op.split(",")[0], op == PLAIN
    x = make_inputs(op, rng, dtype=np.dtype(dtype), initial_state=True, **shape)
    if plain:
        x |= {"initial_state": x["initial_state"][0], "normalize": False}
    if face == "backward":
        x |= testing.make_output_gradients(op, rng, x)
    if face == "step":
        x = {name: a[:, 0] if name in PER_TOKEN else a for name, a in x.items()}
        x["state"] = x.pop("initial_state")
    x = over_arrays(lambda a: to_gpu(np.ascontiguousarray(a)), x)
    return x | {"allow_tf32": True} if tf32 else x


def flat(x):
    """The arrays of a result, in order."""
    if isinstance(x, tuple):
        return [y for one in x for y in flat(one)]
    return [] if x is None else [x]


def run(op, x, face="forward", **options):
    """The arrays that a call makes or changes."""
    op = op.split(",")[0]
    if face == "backward":
        return flat(tuple(getattr(linattn, f"{op}_backward")(**x, **options)))
    if face == "step":
        state = over_arrays(torch.clone, x["state"])
        o = getattr(linattn, f"{op}_step")(**x | {"state": state}, **options)
        return [o, *flat(state)]
    return flat(getattr(linattn, op)(**x, output_final_state=True, **options))


def bits(x):
    return x.contiguous().view(torch.uint8)


def assert_same_bits(got, want):
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        assert torch.equal(bits(x), bits(y)), (x.float() - y.float()).abs().max()


# Two results that are each within the rule of the truth are no further apart than twice that.
APART = {dtype: 2 * bound for dtype, bound in testing.RMS_BOUND.items()}
APART["tf32"] = 2 * testing.RMS_BOUND_TF32


def distance(got, want):
    """The root mean square error where both are finite, relative to the wanted numbers'."""
    there = torch.isfinite(got) & torch.isfinite(want)
    got, want = got[there].double(), want[there].double()
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


# ---- the reference, on the device: hours of NumPy in seconds ----


def reference64(op, x, dtype=None, C=64):
    """o [B,T,HV,V] and S [B,HV,K,V], in float64 (or `dtype`), C tokens at a time.

    With b_i the sum of the log decays up to token i of the chunk, per key or for all keys at once,
        P_ij = (q_i e^b_i)'(k_j e^-b_j), L_ij = beta_i (k_i e^b_i)'(k_j e^-b_j) below the diagonal,
        u = v, or (I + L)^-1 beta (v - (k e^b) S) under the delta rule,
        o = scale ((q e^b) S + P u),  S <- e^b_C S + (k e^(b_C - b))' u.
    b is at least -3 C (make_inputs), so e^-b is an ordinary number.
    """
    dtype = dtype or torch.float64
    q, k, v = (x[name].to(dtype).transpose(1, 2) for name in ("q", "k", "v"))  # [B,H,T,.]
    group = v.shape[1] // q.shape[1]
    q, k = (a.repeat_interleave(group, 1) for a in (q, k))
    (B, HV, T, V), K = v.shape, q.shape[3]
    normalised = op == "linear_attention"
    if normalised:  # the denominator is one more column of v
        q, k = (torch.where(a > 0, a + 1, a.clamp(max=0).exp()) for a in (q, k))
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    if "g" in x:
        g = x["g"].to(dtype).transpose(1, 2).reshape(B, HV, T, -1)
    else:
        g = torch.zeros(HV, device=v.device, dtype=dtype)
        if op == "retention":
            g = x["gamma"].to(dtype).log()
        elif op == "lightning_attention":
            g = -x["slopes"].to(dtype)
        g = g[None, :, None, None].expand(B, HV, T, 1)
    beta = x["beta"].to(dtype).transpose(1, 2)[..., None] if "beta" in x else None

    S = torch.zeros(B, HV, K, v.shape[3], device=v.device, dtype=dtype)
    if "initial_state" in x:
        S = torch.cat([s.to(dtype).reshape(B, HV, K, -1) for s in flat(x["initial_state"])], -1)
    o = torch.empty_like(v)
    for start in range(0, T, C):
        at = slice(start, min(start + C, T))
        b = g[:, :, at].cumsum(2)
        last = b[:, :, -1:]
        q_c, k_c, u = q[:, :, at] * b.exp(), k[:, :, at] * b.exp(), v[:, :, at]
        k_back = (k[:, :, at] * (-b).exp()).transpose(2, 3)
        if beta is not None:
            L = (beta[:, :, at] * (k_c @ k_back)).tril(-1)
            u = torch.linalg.solve_triangular(
                L, beta[:, :, at] * (u - k_c @ S), upper=False, unitriangular=True)
        o[:, :, at] = K**-0.5 * (q_c @ S + (q_c @ k_back).tril() @ u)
        S = last.exp().transpose(2, 3) * S
        S = S + (k[:, :, at] * (last - b).exp()).transpose(2, 3) @ u
    if normalised:
        o = o[..., :V] / o[..., V:].clamp(min=1e-6)
        S = S[..., :V]
    return o.transpose(1, 2), S


def judge(op, x, o, name=""):
    """o by the acceptance rule. The naive twin is the reference in float32, o rounded last."""
    ref, _ = reference64(op, x)
    naive, _ = reference64(op, x, torch.float32)
    testing.assert_accurate(to_host(o), to_host(ref), to_host(naive.to(o.dtype)),
                            dtype=to_host(o[:0]).dtype, name=f"{op} {name}",
                            tf32=x.get("allow_tf32", False))


@ops
def test_the_reference_of_these_tests_is_the_reference(op):
    x = make_inputs(op, np.random.default_rng(0), B=2, T=150, H=1, HV=2, K=16, V=24,
                    initial_state=True)
    want, _ = getattr(reference, op)(**x)
    got, _ = reference64(op, over_arrays(to_gpu, x))
    np.testing.assert_allclose(to_host(got), want, rtol=1e-9, atol=1e-11)


# ---- the same bits ----


@dtypes
@gradients
def test_twenty_backwards_give_the_same_bits(op, dtype):
    x = problem(op, dtype=dtype, face="backward", T=1000)
    first = run(op, x, "backward")
    for _ in range(19):
        assert_same_bits(run(op, x, "backward"), first)


# A forward pass of every kind, a step of every dtype.
faces_and_kinds = pytest.mark.parametrize("face, dtype", [
    *(("forward", kind) for kind in KINDS), *(("step", dtype) for dtype in DTYPES)])


@faces_and_kinds
@pytest.mark.parametrize("K", [64, 128, 256])
@ops
def test_twenty_launches_give_the_same_bits(op, face, K, dtype):
    x = problem(op, dtype=dtype, face=face, T=1000, K=K)
    first = run(op, x, face)
    for _ in range(19):
        assert_same_bits(run(op, x, face), first)


@faces_and_kinds
@pytest.mark.parametrize("rows", [3, 40])
@ops
def test_bits_do_not_know_their_neighbours(op, rows, face, dtype):
    """One row alone, though few heads may be worked on in another way than many."""
    x = problem(op, dtype=dtype, face=face, B=rows, T=1000, H=1, HV=2, V=64)
    all_rows = run(op, x, face)
    for row in (0, rows - 1):
        alone = {name: a if name in ("gamma", "slopes") else
                 over_arrays(lambda s, row=row: s[row:row + 1].clone(), a)
                 for name, a in x.items()}
        assert_same_bits(run(op, alone, face), [a[row:row + 1] for a in all_rows])


@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("kind", ["bfloat16-float32", "bfloat16-bfloat16", "float32-float32",
                                  "float16-float32"])
@pytest.mark.parametrize("K, V, options", [(128, 128, {}), (112, 84, {"qk_l2norm": True}),
                                           (64, 128, {})], ids=["128x128", "112x84", "64x128"])
@ops
def test_many_states_at_once_give_the_bits_of_few(op, K, V, options, kind, v_first):
    """Enough heads for states to stream through shared memory, and the same rows eight by eight."""
    dtype, state_dtype = kind.split("-")
    x = problem(op, dtype=dtype, face="step", B=88, H=2, HV=8, K=K, V=V) | options
    pool = flat(x.pop("state"))
    if v_first:
        pool[0] = pool[0].transpose(2, 3)
    pool = [s.to(getattr(torch, state_dtype)).contiguous() for s in pool]
    index = torch.randperm(88, generator=torch.Generator().manual_seed(K)).cuda()
    index[5] = index[40] = -1
    step = getattr(linattn, f"{op}_step")

    def rows(state, at):
        row = {name: a[at] if name in PER_TOKEN else a for name, a in x.items()}
        return step(**row, state=tuple(state) if len(state) > 1 else state[0],
                    state_indices=index[at], state_v_first=v_first)

    together, few = ([s.clone() for s in pool] for _ in range(2))
    o = rows(together, slice(None))
    want = torch.cat([rows(few, slice(i, i + 8)) for i in range(0, 88, 8)])
    assert not o[5].any() and not o[40].any() and o[6].any()
    assert_same_bits([o, *together], [want, *few])
    assert not torch.equal(together[0], pool[0])


@kinds
@pytest.mark.parametrize("K", [64, 128, 200])
@pytest.mark.parametrize("cu", [[0, 0, 63, 64, 64, 300, 429, 429], [0, 1, 5, 5, 8]],
                         ids=["chunks", "few tokens"])
@ops
def test_packed_sequences_on_the_device(op, cu, K, dtype):
    """cu_seqlens on the GPU, int32 and int64, empty sequences among them: as separate calls. A
    call of a few tokens goes token by token, so that a sequence as short has its bits only where
    all are together."""
    x = problem(op, dtype=dtype, B=1, T=cu[-1], K=K)
    state = x.pop("initial_state")
    states = over_arrays(
        lambda s: torch.cat([s * (n + 1) for n in range(len(cu) - 1)]), state)
    for integer in (torch.int32, torch.int64):
        o, *packed = run(op, x | {"initial_state": states}, cu_seqlens=torch.tensor(
            cu, dtype=integer, device="cuda"))
        for n, (start, end) in enumerate(itertools.pairwise(cu)):
            part = {name: a[:, start:end] if name in PER_TOKEN else a for name, a in x.items()}
            part["initial_state"] = over_arrays(lambda s, n=n: s[n:n + 1], states)
            o_n, *states_n = run(op, part)
            got, want = [o[:, start:end], *(s[n:n + 1] for s in packed)], [o_n, *states_n]
            if dtype != "float32" and 0 < end - start <= FEW_TOKENS < cu[-1]:
                assert all(distance(a, b) < APART[dtype] for a, b in zip(got, want, strict=True))
            else:
                assert_same_bits(got, want)


@ops
def test_a_gate_per_head_may_lie_on_the_host(op):
    gate = {"retention": "gamma", "lightning_attention": "slopes"}.get(op)
    if gate is None:
        pytest.skip(f"{op} has no gate per head")
    for HV in (4, 300):
        x = problem(op, T=70, H=1, HV=HV, V=16)
        want = run(op, x)
        assert_same_bits(run(op, x | {gate: to_host(x[gate])}), want)


# ---- graphs, streams ----


@pytest.mark.parametrize("final_state", [False, True], ids=["o", "o and state"])
@kinds
@ops
def test_a_graph_of_a_forward(op, dtype, final_state):
    """A call that waited for the device, or took memory in a way that is not a stream's, could not
    be captured. The graph reads the inputs anew each time."""
    x = problem(op, dtype=dtype)
    out = torch.full_like(x["v"], torch.nan)

    def call():
        return getattr(linattn, op)(**x, out=out, output_final_state=final_state)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = call()
    assert o is out
    for seed in (1, 2, 3):
        other = problem(op, seed, dtype=dtype)
        over = zip(flat(tuple(x.values())), flat(tuple(other.values())), strict=True)
        for old, new in over:
            if hasattr(old, "copy_"):
                old.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        want = run(op, other)
        assert_same_bits(flat((o, state)), want if final_state else want[:1])


@dtypes
@gradients
def test_a_graph_of_a_backward(op, dtype):
    x = problem(op, dtype=dtype, face="backward")
    run(op, x, "backward")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(op, x, "backward")
    for seed in (1, 2, 3):
        other = problem(op, seed, dtype=dtype, face="backward")
        for name, a in x.items():
            if name != "normalize":
                for old, new in zip(flat(a), flat(other[name]), strict=True):
                    old.copy_(new)
        for a in made:
            a.fill_(torch.nan)
        graph.replay()
        assert_same_bits(made, run(op, other, "backward"))


@dtypes
@ops
def test_a_graph_of_a_step(op, dtype):
    x = problem(op, dtype=dtype, face="step")
    out = torch.empty_like(x["v"])
    state = over_arrays(torch.clone, x["state"])
    step = getattr(linattn, f"{op}_step")
    step(**x | {"state": state}, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(**x | {"state": state}, out=out)
    for s, fresh in zip(flat(state), flat(x["state"]), strict=True):
        s.copy_(fresh)
    by_hand = over_arrays(torch.clone, x["state"])
    for token in range(3):
        other = problem(op, token, dtype=dtype, face="step")
        for name in PER_TOKEN:
            if name in x:
                x[name].copy_(other[name])
        graph.replay()
        want = step(**x | {"state": by_hand})
        assert_same_bits([out, *flat(state)], [want, *flat(by_hand)])


@dtypes
@ops
def test_a_graph_of_a_bound_step(op, dtype):
    """With its states in a pool: which ones, too, may be others in each replay."""
    x = problem(op, dtype=dtype, face="step", B=5)
    pool = x.pop("state")
    x = {name: a[:2].clone() if name in PER_TOKEN else a for name, a in x.items()}
    x["state_indices"] = torch.zeros(2, dtype=torch.int64, device="cuda")
    start = over_arrays(torch.clone, pool)
    step = getattr(linattn, f"{op}_step")
    bound = linattn.bind(step, **x, state=pool)
    x["state_indices"].copy_(torch.tensor([0, 1]))
    out = bound()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert bound() is out
    for s, fresh in zip(flat(pool), flat(start), strict=True):
        s.copy_(fresh)
    for token, indices in enumerate([[4, 2], [-1, 4], [0, 3]]):
        other = problem(op, token, dtype=dtype, face="step")
        for name in PER_TOKEN:
            if name in x:
                x[name].copy_(other[name])
        x["state_indices"].copy_(torch.tensor(indices))
        graph.replay()
        want = step(**x, state=start)
        assert_same_bits([out, *flat(pool)], [want, *flat(start)])


@ops
def test_a_bound_step_goes_where_the_caller_is(op):
    """On the stream that is current when it is called, not when it was bound."""
    x = problem(op, face="step")
    step = getattr(linattn, f"{op}_step")
    out = torch.empty_like(x["v"])
    bound = linattn.bind(step, **x, out=out)
    real = problem(op, 5, face="step")
    want = run(op, real, "step")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy()
        for name, a in x.items():
            for old, new in zip(flat(a), flat(real[name]), strict=True):
                old.copy_(new)
        start = time.perf_counter()
        assert bound() is out
        took = time.perf_counter() - start
        got = [a.clone() for a in (out, *flat(x["state"]))]
    assert not stream.query(), "the kernel before it was over: nothing was shown"
    assert took < 0.1, "the host waited"
    stream.synchronize()
    assert_same_bits(got, want)


@dtypes
@ops
def test_indices_outside_the_pool_are_padding(op, dtype):
    for v_first in (False, True):
        x = problem(op, dtype=dtype, face="step", B=8, K=64, V=64)
        pool = x.pop("state")
        before = over_arrays(torch.clone, pool)
        indices = torch.tensor([7, 8, -1, -2, 2**31 - 1, -(2**31), 0, 1000], device="cuda")
        wide = indices.clone()
        wide[1], wide[3] = 2**40, -(2**40)  # whose lower halves are 0
        step = getattr(linattn, f"{op}_step")
        for index in (indices, indices.to(torch.int32), wide):
            state = over_arrays(torch.clone, before)
            o = step(**x, state=state, state_indices=index, state_v_first=v_first)
            assert not o[1:6].any() and not o[7].any() and o[0].any() and o[6].any()
            for s, old in zip(flat(state), flat(before), strict=True):
                assert_same_bits([s[1:7]], [old[1:7]])
                assert not torch.equal(s[7], old[7]) and not torch.equal(s[0], old[0])


def test_state_indices_on_the_host_are_refused_beside_a_device():
    x = problem("gla", face="step")
    for host in (np.array([0, 1]), torch.tensor([0, 1])):
        with pytest.raises(ValueError, match="state_indices: expected an array on cuda:0 like q"):
            linattn.gla_step(**x, state_indices=host)


def test_a_bound_step_reads_a_gate_on_the_host_in_every_call():
    x = problem("retention", face="step", dtype="float32")
    gamma = to_host(x.pop("gamma"))
    state = x["state"].clone()
    bound = linattn.bind(linattn.retention_step, **x, gamma=gamma)
    for value in (0.5, 0.75):
        gamma[...] = value
        want = linattn.retention_step(**x | {"state": state}, gamma=gamma.copy())
        assert_same_bits([bound(), x["state"]], [want, state])


def test_a_bound_step_refuses_streams_that_it_cannot_know():
    x = problem("kda", face="step", dtype="float32")
    out = torch.full_like(x["v"], torch.nan)
    for kind in (Interface, Dlpack):
        for name in ("q", "v", "state", "out"):
            odd = x | {"out": out} | {name: kind((x | {"out": out})[name])}
            kinds = "PyTorch or CuPy" if name == "q" else "q's library"
            with pytest.raises(ValueError, match=f"^{name}: expected an array of {kinds}, got "):
                linattn.bind(linattn.kda_step, **odd)
    assert torch.isnan(out).all()


def busy(seconds=0.3):
    """Something long on the current stream."""
    torch.cuda._sleep(int(seconds * 1.7e9))


@faces
@ops
def test_the_callers_stream(op, face):
    """Inputs that are still to be computed, behind a long kernel on a stream that is not the
    default one: the call waits its turn there, and the host does not wait at all."""
    x = problem(op, face=face)
    run(op, x, face)  # the first call may load code
    real = problem(op, 5, face=face)
    want = run(op, real, face)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy()
        for name, a in x.items():
            for old, new in zip(flat(a), flat(real[name]), strict=True):
                old.copy_(new, non_blocking=True)
        got = run(op, x, face)
        behind = torch.cuda.Event()
        behind.record()
        waited = behind.query()
    assert not waited, "the call waited for the device"
    stream.synchronize()
    assert_same_bits(got, want)


def test_threads_with_streams_of_their_own():
    problems = [(op, problem(op, seed)) for seed, op in enumerate(linattn.OPS)]
    want = [run(op, x) for op, x in problems]
    torch.cuda.synchronize()
    failures = []

    def work(offset):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(40):
                    j = (i + offset) % len(problems)
                    assert_same_bits(run(*problems[j]), want[j])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


# ---- memory ----


@faces
@ops
def test_outputs_in_memory_full_of_nan(op, face):
    """What the caching allocator hands out is what others left there; scratch may be likewise."""
    x = problem(op, face=face, T=131, K=100, V=72, dtype="float32")
    want = run(op, x, face)
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        blocks = [torch.full((1 << size,), torch.nan, device="cuda")
                  for size in range(8, 26) for _ in range(3)]
        blocks += [torch.full_like(a, torch.nan) for a in want for _ in range(8)]
        del blocks
        got = run(op, x, face)
        assert all(torch.isfinite(a).all() for a in got)
        assert_same_bits(got, want)


def test_outputs_outlive_their_inputs():
    x = problem("gated_delta_rule")
    want = run("gated_delta_rule", x)
    got = run("gated_delta_rule", over_arrays(torch.clone, x))
    junk = [torch.full_like(a, torch.nan) for a in want for _ in range(50)]
    assert_same_bits(got, want)
    del junk


@pytest.mark.parametrize("face", ["forward", "backward"])
def test_calls_do_not_pile_up_memory(face):
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other processes use the GPU's memory: run this one alone")
    x = problem("kda", B=1, T=4096, face=face)
    for _ in range(5):
        run("kda", x, face)
    torch.cuda.synchronize()
    before, _ = torch.cuda.mem_get_info()
    for _ in range(200):
        run("kda", x, face)
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    assert before - after <= 2 << 20  # CUDA's own unit


def test_out_of_memory_leaves_the_context_usable():
    x = problem("gla", B=1, T=4, H=1, HV=1, K=8, V=8)
    want = run("gla", x)
    huge = {name: a[:, :1].expand(1, 2**40, *a.shape[2:]) if name in PER_TOKEN else a
            for name, a in x.items()}
    with pytest.raises((MemoryError, torch.cuda.OutOfMemoryError)):
        linattn.gla(**huge)
    assert_same_bits(run("gla", x), want)


# ---- layouts ----

LAYOUTS = {
    "heads first": lambda a: a.transpose(1, 2).contiguous().transpose(1, 2),
    "padded rows": lambda a: torch.nn.functional.pad(a, (3, 5))[..., 3:-5],
    "every second": lambda a: a.repeat_interleave(2, -1)[..., ::2],
    "last axis first": lambda a: a.movedim(-1, 0).contiguous().movedim(0, -1),
    "every second row": lambda a: a.repeat_interleave(2, 0)[::2],
    "off by one element": lambda a: torch.cat([a.flatten()[:1], a.flatten()])[1:].view(a.shape),
}


@kinds
@pytest.mark.parametrize("layout", LAYOUTS)
@ops
def test_any_layout_gives_the_same_bits(op, layout, dtype):
    x = problem(op, dtype=dtype)
    odd = {name: LAYOUTS[layout](a) if name in PER_TOKEN else a for name, a in x.items()}
    assert_same_bits(run(op, odd), run(op, x))
    room = LAYOUTS[layout](torch.zeros_like(x["v"]))
    if room.stride(-1) == 1:
        o, _ = getattr(linattn, op)(**x, out=room)
        assert o is room
        assert_same_bits([o], run(op, x)[:1])


def test_broadcast_inputs():
    x = problem("gated_delta_rule")
    wide = {name: a[:1].expand(a.shape) if name in PER_TOKEN else a for name, a in x.items()}
    plain = {name: a.contiguous() if name in PER_TOKEN else a for name, a in wide.items()}
    assert_same_bits(run("gated_delta_rule", wide), run("gated_delta_rule", plain))


@pytest.mark.parametrize("name", ["q", "k", "v", "state"])
def test_a_step_refuses_rows_that_it_would_have_to_copy(name):
    x = problem("gated_delta_rule", face="step")
    before = over_arrays(torch.clone, x)
    odd = x | {name: x[name].repeat_interleave(2, -1)[..., ::2]}
    with pytest.raises(ValueError, match=f"{name}: expected .*innermost axis is contiguous"):
        linattn.gated_delta_rule_step(**odd)
    assert_same_bits(flat(tuple(x.values())), flat(tuple(before.values())))


# ---- what is refused ----


@pytest.mark.parametrize("face", ["forward", "step"])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "state", "out"])
def test_host_and_device_do_not_mix(face, name):
    op, name = "kda", "initial_state" if (face, name) == ("forward", "state") else name
    x = problem(op, face=face, dtype="float32")
    x["out"] = torch.zeros_like(x["v"])
    call = getattr(linattn, op if face == "forward" else f"{op}_step")
    for host in (x[name].cpu(), x[name].cpu().numpy()):
        with pytest.raises(ValueError) as error:
            call(**x | {name: host})
        where = "the CPU like q, got one on cuda:0" if name == "q" else \
            "cuda:0 like q, got one on the CPU"
        wrong = r"k" if name == "q" else name
        assert str(error.value) == f"{wrong}: expected an array on {where}"
    assert not x["out"].any()


def test_cu_seqlens_on_the_host_are_refused_beside_a_device():
    x = problem("gla", B=1)
    with pytest.raises(ValueError, match="cu_seqlens: expected an array on cuda:0 like q"):
        linattn.gla(**x, cu_seqlens=np.array([0, 200]))


def test_another_device_is_refused_by_name():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x = problem("kda")
    with pytest.raises(ValueError, match=r"^v: expected an array on cuda:0 like q, got "
                                         r"one on cuda:1$"):
        linattn.kda(**x | {"v": x["v"].to("cuda:1")})


@ops
def test_the_second_device_is_used(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x = problem(op)
    there = over_arrays(lambda a: a.to("cuda:1"), x)
    for face in ("forward", "step"):
        x = problem(op, face=face)
        there = over_arrays(lambda a: a.to("cuda:1"), x)
        got = run(op, there, face)  # the current device is still the first
        assert torch.cuda.current_device() == 0 and {a.device.index for a in got} == {1}
        assert_same_bits([a.to("cuda:0") for a in got], run(op, x, face))


@pytest.mark.parametrize("face", ["forward", "step"])
@ops
def test_more_than_256_keys_or_values_are_refused(op, face):
    call = getattr(linattn, op if face == "forward" else f"{op}_step")
    for letter, name in (("K", "q"), ("V", "v")):
        x = problem(op, face=face, **{letter: 257})
        with pytest.raises(ValueError, match=f"^{name}: expected {letter} <= 256 .* = 257$"):
            call(**x)
        call(**problem(op, face=face, **{letter: 256}))


# ---- other libraries' arrays ----


def arrays_of(op, face, dtype="float32"):
    return problem(op, dtype=dtype, face=face)


class Interface:
    """Nothing but __cuda_array_interface__."""

    def __init__(self, x):
        self.x = x
        self.__cuda_array_interface__ = x.__cuda_array_interface__


class Dlpack:
    """Nothing but DLPack's two methods."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("kind", [Interface, Dlpack])
@pytest.mark.parametrize("face", ["forward", "step"])
@ops
def test_bare_protocols(op, face, kind):
    """With `out`, since nobody knows how to make one of these."""
    x = arrays_of(op, face)
    want = run(op, x, face)[0]
    out = kind(torch.full_like(x["v"], torch.nan))
    call = getattr(linattn, op if face == "forward" else f"{op}_step")
    o = call(**over_arrays(lambda a: kind(a.clone()), x), out=out)
    o = o[0] if face == "forward" else o
    assert o is out
    torch.cuda.synchronize()
    assert_same_bits([out.x], [want])


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@ops
def test_cupy(op, dtype):
    cupy = imported("cupy")
    if dtype == "bfloat16":
        try:
            cupy.zeros(1, ml_dtypes.bfloat16)
        except (TypeError, ValueError):
            pytest.skip("this CuPy has no bfloat16")
    for face in ("forward", "step"):
        x = arrays_of(op, face, dtype)
        want = run(op, x, face)
        torch.cuda.synchronize()
        theirs = over_arrays(lambda a: cupy.asarray(to_host(a)), x)
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            if face == "forward":
                got = flat(getattr(linattn, op)(**theirs, output_final_state=True))
            else:
                got = [getattr(linattn, f"{op}_step")(**theirs), *flat(theirs["state"])]
        stream.synchronize()
        assert all(isinstance(a, cupy.ndarray) for a in got)
        for a, b in zip(got, want, strict=True):
            assert a.get().tobytes() == to_host(b).tobytes()


@dtypes
@ops
def test_jax(op, dtype):
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others need the memory too
    jax = imported("jax")
    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("this JAX has no GPU")
    x = arrays_of(op, "forward", dtype)
    want = run(op, x)
    theirs = over_arrays(lambda a: jax.device_put(to_host(a), gpu), x)
    got = flat(getattr(linattn, op)(**theirs, output_final_state=True))
    for a, b in zip(got, want, strict=True):
        assert isinstance(a, jax.Array) and a.devices() == {gpu}
        assert np.asarray(a).tobytes() == to_host(b).tobytes()
    again = flat(getattr(linattn, op)(**theirs, output_final_state=True))
    assert all(np.asarray(a).tobytes() == to_host(b).tobytes()
               for a, b in zip(again, want, strict=True))


# ---- long and large ----


@kinds
@ops
def test_a_long_sequence(op, dtype):
    """2^17 tokens against the reference of this file."""
    x = problem(op, dtype=dtype, B=1, T=2**17, H=1, HV=1, K=64, V=32)
    del x["initial_state"]
    o, _ = getattr(linattn, op)(**x)
    judge(op, x, o, "2^17 tokens")


@pytest.mark.parametrize("K, dtype", [(128, "bfloat16"), (256, "bfloat16"), (128, "float16"),
                                      (256, "float16"), (128, "tf32")])
@ops
def test_tensor_cores_at_32768_tokens(op, K, dtype):
    x = problem(op, dtype=dtype, B=1, T=32768, H=1, HV=1, K=K, V=128)
    del x["initial_state"]
    o, _ = getattr(linattn, op)(**x)
    judge(op, x, o, "32768 tokens")


def large_scores(x):
    """q'k up to 1e6 from token 70 on, v small enough that o is an ordinary number."""
    x["q"][:, 70:] *= 500
    x["k"][:, 70:] *= 500
    x["v"][:, 70:] /= 1e4


def large_state(x):
    """A state of about 1e7, which q brings back."""
    x["initial_state"] = over_arrays(lambda s: s * 1e7, x["initial_state"])
    x["q"] /= 1e4


def large_growth(x):
    """A decay above one, by which the state grows past 65504 within a chunk and shrinks again."""
    x["g"][:, 100:116] = 1
    x["g"][:, 116:132] = -1
    x["q"] /= 1e4


@pytest.mark.parametrize("large", [large_scores, large_state, large_growth])
@pytest.mark.parametrize("K", [128, 256])
@pytest.mark.parametrize("op", [PLAIN, *linattn.OPS])
def test_float16_numbers_between_that_float16_has_not(op, K, large):
    """What products leave on the way is float32; where an operand of the next would not fit into
    float16's range, the tokens go one by one. Equal to the recurrence but for rounding."""
    x = problem(op, dtype="float16", T=300, K=K)
    if op == PLAIN:
        x["feature_map"] = "identity"
    if large is large_growth and "g" not in x:
        pytest.skip(f"{op} has no gate that may grow")
    if large is large_scores and "beta" in x:
        pytest.skip(f"{op} with keys of length 500 is no contraction: its state has no bound")
    large(x)
    op = op.split(",")[0]
    want, _ = getattr(linattn, op)(**x, mode="recurrent")
    got, _ = getattr(linattn, op)(**x)
    assert torch.isfinite(want).all()
    assert torch.isfinite(got).all(), "an infinity that float32 does not have"
    assert distance(got, want) < APART["float16"]


@pytest.mark.parametrize("K", [128, 256])
@pytest.mark.parametrize("op", [PLAIN, "simple_gla", "gla"])
def test_float16_state_that_float16_has_not_beside_a_nan(op, K):
    """Too large in a few of its keys, in the chunk that also has a NaN."""
    x = problem(op, dtype="float16", T=130, K=K)
    if op == PLAIN:
        x["feature_map"] = "identity"
    large_state(x)
    x["initial_state"][..., 8:, :] /= 1e7
    x["k"][:, 20, :, 3] = torch.nan
    op = op.split(",")[0]
    want, _ = getattr(linattn, op)(**x, mode="recurrent")
    got, _ = getattr(linattn, op)(**x)
    assert torch.equal(torch.isfinite(got), torch.isfinite(want))
    assert torch.isfinite(want[:, :20]).all() and not torch.isfinite(want[:, 20:]).any()
    assert distance(got, want) < APART["float16"]


@ops
def test_tf32_has_the_range_of_float32(op):
    """Powers of two go through unrounded: 2^100 times the v, or 2^-60, gives such an o."""
    x = problem(op, dtype="tf32", T=300, K=100, V=72)
    del x["initial_state"]
    o, _ = getattr(linattn, op)(**x)
    for by in (2.0**100, 2.0**-60):
        scaled, _ = getattr(linattn, op)(**x | {"v": x["v"] * by})
        assert_same_bits([scaled], [o * by])


@ops
def test_tf32_only_where_it_is_allowed(op):
    """By the call or by the setting, the call first. Nothing else rounds float32, and what may be
    rounded is: within tf32's bound, and not to the bits of the recurrence."""
    x = problem(op, dtype="float32", T=300, K=128)
    forward = getattr(linattn, op)
    plain, plain_state = forward(**x, output_final_state=True)
    assert_same_bits([plain], [forward(**x, mode="recurrent")[0]])
    allowed, state = forward(**x, allow_tf32=True, output_final_state=True)
    if torch.cuda.get_device_capability() != (9, 0):
        assert_same_bits([allowed], [plain])
        pytest.skip("no Hopper: float32 goes token by token here, whatever is allowed")
    for a, b in zip([allowed, *flat(state)], [plain, *flat(plain_state)], strict=True):
        assert distance(a, b) < 3e-4  # one operand without its second plane would be 1.7e-3 off
    assert distance(allowed, plain) > 0
    recorded, _ = forward(**x | {"v": x["v"].clone().requires_grad_()}, allow_tf32=True)
    assert_same_bits([recorded.detach()], [allowed])
    assert_same_bits([forward(**x, allow_tf32=True, mode="recurrent")[0]], [plain])
    linattn.set_float32_precision("tf32")
    try:
        assert_same_bits([forward(**x)[0], forward(**x, allow_tf32=False)[0]], [allowed, plain])
    finally:
        linattn.set_float32_precision("ieee")
    assert_same_bits([forward(**x)[0]], [plain])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("K, dtype", [(100, "bfloat16"), (100, "float16"), (100, "tf32"),
                                      (200, "bfloat16"), (200, "float16")])
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "initial_state"])
@pytest.mark.parametrize("op", [PLAIN, *linattn.OPS])
def test_not_finite_in_one_number_of_a_chunk(op, name, K, dtype, value):
    """The chunk's past keeps its bits, the rest is the recurrence's: finite where that is."""
    x = problem(op, dtype=dtype, T=150, K=K, V=72)
    plain = op == PLAIN
    op = op.split(",")[0]
    if name not in x:
        pytest.skip(f"{op} has no {name}")
    x |= {"feature_map": "identity"} if plain else {}
    clean, _ = getattr(linattn, op)(**x)
    if name == "initial_state":
        flat(x[name])[0][0, 1, K - 3, 5] = value
    elif name == "g":
        x[name][0, 80, 1] = torch.nan  # a gate of infinity is refused
    else:
        x[name][(0, 80, 0, 7) if x[name].ndim == 4 else (0, 80, 0)] = value
    want, want_state = getattr(linattn, op)(**x, mode="recurrent", output_final_state=True)
    got, state = getattr(linattn, op)(**x, output_final_state=True)
    assert not torch.isfinite(want).all()
    for a, b in zip([got, *flat(state)], [want, *flat(want_state)], strict=True):
        assert torch.equal(torch.isfinite(a), torch.isfinite(b))
        assert distance(a, b) < APART[dtype]
        if dtype == "tf32" and "beta" not in x:
            # IEEE's infinities too, not NaN in their place; where the delta rule takes one from
            # another, it is the order that decides
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a == torch.inf, b == torch.inf)
    if name != "initial_state":
        assert_same_bits([got[:, :80]], [clean[:, :80]])
    assert_same_bits([got[1]], [clean[1]])


@pytest.mark.parametrize("K", [128, 256])
@pytest.mark.parametrize("op", [PLAIN, "linear_attention"])
def test_float16_sums_of_all_tokens(op, K):
    """Not causal: every token reads the sum of 8192 values of 300 or so."""
    x = problem(op, dtype="float16", T=8192, K=K)
    del x["initial_state"]
    if op == PLAIN:
        x |= {"feature_map": "identity", "k": abs(x["k"])}
    x["v"] = x["v"] * 10 + 300
    x["q"] /= 1000
    op = op.split(",")[0]
    want, want_state = getattr(linattn, op)(**x, causal=False, mode="recurrent",
                                            output_final_state=True)
    got, state = getattr(linattn, op)(**x, causal=False, output_final_state=True)
    assert max(abs(s).max() for s in flat(want_state)) > 65504
    assert torch.isfinite(want).all()
    for a, b in zip([got, *flat(state)], [want, *flat(want_state)], strict=True):
        assert distance(a, b) < APART["float16"]


@ops
def test_a_long_sequence_token_by_token(op):
    x = problem(op, dtype="float32", B=1, T=2**14, H=1, HV=1, K=64, V=32)
    del x["initial_state"]
    o, _ = getattr(linattn, op)(**x, mode="recurrent")
    judge(op, x, o, "token by token")


@pytest.mark.parametrize("gate", ["equal", "random"])
@pytest.mark.parametrize("op", ["retention", "simple_gla", "gated_delta_rule"])
def test_65536_tokens_one_by_one(op, gate):
    """The state's own roundings, one a token and each up to 2^-24, are a random walk. Those of
    decays may go to one side, by up to 2^-25 of each: README says what comes of it."""
    T, K = 2**16, 64
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal((1, T, 1, K)) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    x = {"q": q, "k": k, "v": v}
    if op == "retention":
        x["gamma"] = np.array([1 - 2.0**-17])
    else:
        x["g"] = np.full((1, T, 1), -1e-5) if gate == "equal" else rng.uniform(-2e-5, 0, (1, T, 1))
    if "delta" in op:
        x["beta"] = rng.uniform(0, 1, (1, T, 1))
    x = {name: a.astype(np.float32) for name, a in x.items()}
    exact, final = getattr(linattn, op)(**{name: a.astype(np.float64) for name, a in x.items()},
                                        output_final_state=True)
    o, state = getattr(linattn, op)(**over_arrays(to_gpu, x), output_final_state=True)
    most = T * 2**-25 if op == "simple_gla" else np.sqrt(T / 3) * 2**-24
    for got, want in ((o, exact), (state, final)):
        error = to_host(got).astype(np.float64) - want
        assert np.sqrt(np.mean(error**2) / np.mean(want**2)) < most


COLD = """
import warnings
warnings.simplefilter("ignore")
import numpy as np, torch, linattn
from linattn.testing import make_inputs, make_output_gradients
op, face, dtype = {op!r}, {face!r}, {dtype!r}
rng = np.random.default_rng(0)
x = make_inputs(op, rng, B=2, T=200, H=2, HV=2, K=64, V=64, dtype=np.float32)
if face == "backward":
    x |= {{"do": make_output_gradients(op, rng, x)["do"]}}
if face == "step":
    names = ("q", "k", "v", "g", "beta")
    x = {{name: a[:, 0] if name in names else a for name, a in x.items()}}
x = {{name: torch.from_numpy(np.ascontiguousarray(a)).cuda() for name, a in x.items()}}
x = {{name: a if name in ("gamma", "slopes") else a.to(getattr(torch, dtype))
     for name, a in x.items()}}
def call():
    if face == "step":
        S = torch.zeros(2, 2, 64, 64, device="cuda")
        state = (S, torch.zeros(2, 2, 64, device="cuda")) if op == "linear_attention" else S
        return getattr(linattn, op + "_step")(**x, state=state)
    if face == "backward":
        return getattr(linattn, op + "_backward")(**x).dv
    return getattr(linattn, op)(**x)[0]
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = call()
graph.replay()
torch.cuda.synchronize()
warm = call()
print(torch.equal(captured, warm))
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@faces
@pytest.mark.parametrize("op", ["linear_attention", "retention", "gated_delta_rule", "kda"])
def test_a_cold_first_call_inside_a_capture(op, face, dtype):
    """In a process where nothing of ours has run: the pool and the kernels are not there yet."""
    done = subprocess.run([sys.executable, "-c", COLD.format(op=op, face=face, dtype=dtype)],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "True"


def test_two_threads_and_two_shapes_of_one_kernel():
    """A launch's shared memory was once allowed for each launch, and two threads took it from one
    another: 10,000 calls of 8 and of 96 heads."""
    problems = [problem("gated_delta_rule", B=1, T=128, H=H, HV=H, K=128, V=128) for H in (8, 96)]
    wants = [run("gated_delta_rule", x) for x in problems]
    wrong = []

    def work(x, want):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(5000):
                    got = linattn.gated_delta_rule(**x)[0]
                    if i % 500 == 0:
                        torch.cuda.current_stream().synchronize()
                        assert_same_bits([got], want[:1])
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=pair)
               for pair in zip(problems, wants, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


@pytest.mark.parametrize("op", ["simple_gla", "gated_delta_rule"])
def test_more_than_65535_heads(op):
    """A launch has at most 65,535 blocks along its second and third axis."""
    for face in ("forward", "step"):
        x = problem(op, face=face, B=70_000, T=3, H=1, HV=1, K=8, V=8, dtype="float32")
        rows = run(op, x, face)
        last = over_arrays(lambda a: a[-1:].clone(), x)
        assert_same_bits([a[-1:] for a in rows], run(op, last, face))


@pytest.mark.parametrize("op", ["simple_gla", "gated_delta_rule"])
def test_more_than_65535_chunks(op):
    x = problem(op, B=1, T=65_540, H=1, HV=1, K=16, V=16, dtype="float32")
    del x["initial_state"]
    x = {name: torch.cat([a] * 64, 1) for name, a in x.items()}
    o, _ = getattr(linattn, op)(**x)
    # The gates forget: 512 tokens on, what came before is gone.
    tail = {name: a[:, -4096:].contiguous() for name, a in x.items()}
    want, _ = reference64(op, tail)
    naive, _ = reference64(op, tail, torch.float32)
    testing.assert_accurate(to_host(o[:, -3584:]), to_host(want[:, -3584:]),
                            to_host(naive[:, -3584:]), dtype=np.float32)


@pytest.mark.parametrize("op", ["simple_gla", "gated_delta_rule"])
def test_more_elements_than_an_int_counts(op):
    """v and o have 2^31 + 2^24 elements; the last head is the one alone."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("less than 24 GiB of the GPU's memory are free")
    HV, T, V = 129, 2**17, 128
    small = problem(op, B=1, T=T, H=1, HV=1, K=64, V=V)
    del small["initial_state"]
    x = {name: a if name in ("q", "k") else a.repeat_interleave(HV, 2)
         for name, a in small.items()}
    assert x["v"].numel() > 2**31
    o, _ = getattr(linattn, op)(**x)
    want, _ = getattr(linattn, op)(**small)
    for head in (0, 127, 128):
        assert_same_bits([o[:, :, head:head + 1]], [want])


def heads_of(x, count):
    """One head's problem for `count` heads, all alike."""
    shared = ("initial_state", "d_final_state")
    return {name: a if name in ("gamma", "slopes") else
            over_arrays(lambda s: s.repeat_interleave(count, 1), a) if name in shared else
            a.repeat_interleave(count, 2) for name, a in x.items()}


@pytest.mark.parametrize("op", ["simple_gla", "gated_delta_rule", "gla", "kda"])
def test_gradients_in_turns(op):
    """Scratch of more than 4 GiB is not taken: heads are worked on in turns, to the same bits."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("less than 24 GiB of the GPU's memory are free")
    heads, T = 50, 2**16
    small = problem(op, face="backward", B=1, T=T, H=1, HV=1, K=128, V=128)
    x = heads_of(small, heads)
    want = run(op, small, "backward")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    free, _ = torch.cuda.mem_get_info()
    ours = torch.cuda.memory_reserved()
    got = run(op, x, "backward")
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - ours)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # nobody else uses the GPU's memory
        assert taken <= (4 << 30) + (64 << 20)
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        axis = 2 if a.shape[1] == T else 1
        for head in (0, 24, 25, heads - 1):
            assert_same_bits([a.narrow(axis, head, 1)], [b])
    linattn.cuda.empty_cache()


@pytest.mark.parametrize("op", ["simple_gla", "gated_delta_rule", "gla", "kda"])
def test_a_forward_pass_in_turns(op):
    """Scratch of more than 4 GiB is not taken by a forward pass either: KDA of 32 heads and a
    million tokens took 34 GiB."""
    if torch.cuda.mem_get_info()[0] < 48 << 30:
        pytest.skip("less than 48 GiB of the GPU's memory are free")
    heads, T = 16, 2**19
    small = problem(op, B=1, T=T, H=1, HV=1, K=128, V=128)
    del small["initial_state"]
    x = heads_of(small, heads)
    want = run(op, small)
    torch.cuda.synchronize()
    linattn.cuda.empty_cache()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ours = torch.cuda.memory_reserved()
    got = run(op, x)
    torch.cuda.synchronize()
    taken = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - ours)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        assert taken <= (4 << 30) + (256 << 20)
    for a, b in zip(got, want, strict=True):
        axis = 2 if a.shape[1] == T else 1
        for head in (0, 7, heads - 1):
            distant = distance(a.narrow(axis, head, 1), b)  # few heads go in other segments
            assert distant < APART["bfloat16"]
    linattn.cuda.empty_cache()


def test_gradients_of_more_elements_than_an_int_counts():
    """v, do and dv have 2^31 + 2^24 elements, and one q/k head has all value heads."""
    op = "gated_delta_rule"
    if torch.cuda.mem_get_info()[0] < 72 << 30:
        pytest.skip("less than 72 GiB of the GPU's memory are free")
    HV, T = 129, 2**17
    small = problem(op, face="backward", B=1, T=T, H=1, HV=1, K=64, V=128)
    x = heads_of(small, HV) | {name: small[name] for name in ("q", "k")}
    assert x["v"].numel() > 2**31
    got = getattr(linattn, f"{op}_backward")(**x)
    want = getattr(linattn, f"{op}_backward")(**small)
    for name in ("dv", "dg", "dbeta"):
        if getattr(want, name) is not None:
            for head in (0, 127, 128):
                assert_same_bits([getattr(got, name)[:, :, head:head + 1]], [getattr(want, name)])
    for name in ("dq", "dk"):  # a sum over heads, each rounded once more: two bf16 roundings
        sums, each = getattr(got, name).float(), getattr(want, name).float()
        assert ((sums - HV * each).abs() <= 2**-7 * (HV * each).abs()).all()


def test_what_calls_keep_can_be_given_back():
    """Beside other processes too: what comes back is more than they take meanwhile."""
    x = problem("gated_delta_rule", face="backward", B=1, T=2**15, H=32, HV=32, K=128, V=128)
    run("gated_delta_rule", x, "backward")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    linattn.cuda.empty_cache()
    after, _ = torch.cuda.mem_get_info()
    assert after - before > 1 << 30
    run("gated_delta_rule", x, "backward")
    torch.cuda.synchronize()
    linattn.cuda.empty_cache()


# ---- a step from Python, for the log ----


@ops
def test_time_of_a_step(op):
    """Printed (pytest -rP), not judged: the median of 1000 calls, none of which waits."""
    x = problem(op, B=1, H=32, HV=32, K=128, V=128, face="step")
    out = torch.empty_like(x["v"])
    step = getattr(linattn, f"{op}_step")
    times = []
    for i in range(1100):
        if i % 50 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step(**x, out=out)
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    print(f"{op}_step from Python, B 1, H 32, K V 128, bfloat16: "
          f"median {statistics.median(times[100:]) * 1e6:.1f} us")
    bound, times = linattn.bind(step, **x, out=out), []
    for i in range(1100):
        if i % 50 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter()
        bound()
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    print(f"  bound: median {statistics.median(times[100:]) * 1e6:.1f} us")
    assert torch.isfinite(out).all()
