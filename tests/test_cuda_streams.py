"""Graphs, streams and threads on a GPU: a call runs on the caller's stream, does not wait, and can
be captured."""

import threading
import time

import numpy as np
import pytest
from support.compare import assert_same_bits, leaves, over_arrays
from support.gpu import (
    Dlpack,
    Interface,
    busy,
    dtypes,
    gpu_problem,
    gradients,
    kinds,
    needs_gpu,
    ops,
    passes,
    run,
)
from support.problems import PER_TOKEN
from support.processes import python
from support.tensors import to_numpy, torch
from support.variants import EVERY_DECAY, NORMALISED, PAIR_DECAY

import linattn

pytestmark = needs_gpu


# ---- graphs, streams ----


@pytest.mark.parametrize("final_state", [False, True], ids=["o", "o and state"])
@kinds
@ops
def test_a_graph_of_a_forward(op, dtype, final_state):
    """A call that waited for the device, or took memory outside the stream's order, could not be
    captured. The graph reads the inputs again in each replay."""
    x = gpu_problem(op, dtype=dtype)
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
        other = gpu_problem(op, seed, dtype=dtype)
        over = zip(leaves(tuple(x.values())), leaves(tuple(other.values())), strict=True)
        for old, new in over:
            if hasattr(old, "copy_"):
                old.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        want = run(op, other)
        assert_same_bits(leaves((o, state)), want if final_state else want[:1])


@dtypes
@gradients
def test_a_graph_of_a_backward(op, dtype):
    x = gpu_problem(op, dtype=dtype, pass_="backward")
    run(op, x, "backward")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(op, x, "backward")
    for seed in (1, 2, 3):
        other = gpu_problem(op, seed, dtype=dtype, pass_="backward")
        for name, a in x.items():
            if name != "normalize":
                for old, new in zip(leaves(a), leaves(other[name]), strict=True):
                    old.copy_(new)
        for a in made:
            a.fill_(torch.nan)
        graph.replay()
        assert_same_bits(made, run(op, other, "backward"))


@dtypes
@ops
def test_a_graph_of_a_step(op, dtype):
    x = gpu_problem(op, dtype=dtype, pass_="step")
    out = torch.empty_like(x["v"])
    state = over_arrays(torch.clone, x["state"])
    step = getattr(linattn, f"{op}_step")
    step(**x | {"state": state}, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(**x | {"state": state}, out=out)
    for s, fresh in zip(leaves(state), leaves(x["state"]), strict=True):
        s.copy_(fresh)
    by_hand = over_arrays(torch.clone, x["state"])
    for token in range(3):
        other = gpu_problem(op, token, dtype=dtype, pass_="step")
        for name in PER_TOKEN:
            if name in x:
                x[name].copy_(other[name])
        graph.replay()
        want = step(**x | {"state": by_hand})
        assert_same_bits([out, *leaves(state)], [want, *leaves(by_hand)])


@dtypes
@ops
def test_a_graph_of_a_bound_step(op, dtype):
    """With its states in a pool. The indices of the states may change from replay to replay."""
    x = gpu_problem(op, dtype=dtype, pass_="step", B=5)
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
    for s, fresh in zip(leaves(pool), leaves(start), strict=True):
        s.copy_(fresh)
    for token, indices in enumerate([[4, 2], [-1, 4], [0, 3]]):
        other = gpu_problem(op, token, dtype=dtype, pass_="step")
        for name in PER_TOKEN:
            if name in x:
                x[name].copy_(other[name])
        x["state_indices"].copy_(torch.tensor(indices))
        graph.replay()
        want = step(**x, state=start)
        assert_same_bits([out, *leaves(pool)], [want, *leaves(start)])


@ops
def test_a_bound_step_goes_where_the_caller_is(op):
    """On the stream that is current when it is called, not when it was bound."""
    x = gpu_problem(op, pass_="step")
    step = getattr(linattn, f"{op}_step")
    out = torch.empty_like(x["v"])
    bound = linattn.bind(step, **x, out=out)
    real = gpu_problem(op, 5, pass_="step")
    want = run(op, real, "step")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy()
        for name, a in x.items():
            for old, new in zip(leaves(a), leaves(real[name]), strict=True):
                old.copy_(new)
        start = time.perf_counter()
        assert bound() is out
        took = time.perf_counter() - start
        got = [a.clone() for a in (out, *leaves(x["state"]))]
    assert not stream.query(), "the kernel before it was over: nothing was shown"
    assert took < 0.1, "the host waited"
    stream.synchronize()
    assert_same_bits(got, want)


@dtypes
@ops
def test_indices_outside_the_pool_are_padding(op, dtype):
    for v_first in (False, True):
        x = gpu_problem(op, dtype=dtype, pass_="step", B=8, K=64, V=64)
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
            for s, old in zip(leaves(state), leaves(before), strict=True):
                assert_same_bits([s[1:7]], [old[1:7]])
                assert not torch.equal(s[7], old[7]) and not torch.equal(s[0], old[0])


def test_state_indices_on_the_host_are_refused_beside_a_device():
    x = gpu_problem("gla", pass_="step")
    for host in (np.array([0, 1]), torch.tensor([0, 1])):
        with pytest.raises(ValueError, match="state_indices: expected an array on cuda:0 like q"):
            linattn.gla_step(**x, state_indices=host)


def test_a_bound_step_reads_a_gate_on_the_host_in_every_call():
    x = gpu_problem("retention", pass_="step", dtype="float32")
    gamma = to_numpy(x.pop("gamma"))
    state = x["state"].clone()
    bound = linattn.bind(linattn.retention_step, **x, gamma=gamma)
    for value in (0.5, 0.75):
        gamma[...] = value
        want = linattn.retention_step(**x | {"state": state}, gamma=gamma.copy())
        assert_same_bits([bound(), x["state"]], [want, state])


def test_a_bound_step_refuses_streams_that_it_cannot_know():
    x = gpu_problem("kda", pass_="step", dtype="float32")
    out = torch.full_like(x["v"], torch.nan)
    for kind in (Interface, Dlpack):
        for name in ("q", "v", "state", "out"):
            odd = x | {"out": out} | {name: kind((x | {"out": out})[name])}
            kinds = "PyTorch or CuPy" if name == "q" else "q's library"
            with pytest.raises(ValueError, match=f"^{name}: expected an array of {kinds}, got "):
                linattn.bind(linattn.kda_step, **odd)
    assert torch.isnan(out).all()


@passes
@ops
def test_the_callers_stream(op, pass_):
    """The inputs are computed after a long kernel, on a stream that is not the default one. The
    call is queued behind it, and the host does not wait."""
    x = gpu_problem(op, pass_=pass_)
    run(op, x, pass_)  # the first call may load code
    real = gpu_problem(op, 5, pass_=pass_)
    want = run(op, real, pass_)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        busy()
        for name, a in x.items():
            for old, new in zip(leaves(a), leaves(real[name]), strict=True):
                old.copy_(new, non_blocking=True)
        got = run(op, x, pass_)
        behind = torch.cuda.Event()
        behind.record()
        waited = behind.query()
    assert not waited, "the call waited for the device"
    stream.synchronize()
    assert_same_bits(got, want)


def test_threads_with_streams_of_their_own():
    problems = [(op, gpu_problem(op, seed)) for seed, op in enumerate(linattn.OPS)]
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


# ---- first calls, and calls at once ----


COLD = """
import warnings
warnings.simplefilter("ignore")
import numpy as np, torch, linattn
from linattn.testing import make_inputs, make_output_gradients
op, pass_, dtype = {op!r}, {pass_!r}, {dtype!r}
rng = np.random.default_rng(0)
x = make_inputs(op, rng, B=2, T=200, H=2, HV=2, K=64, V=64, dtype=np.float32)
if pass_ == "backward":
    x |= {{"do": make_output_gradients(op, rng, x)["do"]}}
if pass_ == "step":
    x = {{name: a[:, 0] if name in {per_token!r} else a for name, a in x.items()}}
x = {{name: torch.from_numpy(np.ascontiguousarray(a)).cuda() for name, a in x.items()}}
x = {{name: a if name in ("gamma", "slopes") else a.to(getattr(torch, dtype))
     for name, a in x.items()}}
def call():
    if pass_ == "step":
        state = [torch.zeros(2, 2, 64, 64, device="cuda")]
        if {pair!r}:
            state.append(torch.zeros({pair!r}, device="cuda"))
        state = tuple(state) if len(state) > 1 else state[0]
        return getattr(linattn, op + "_step")(**x, state=state)
    if pass_ == "backward":
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
@passes
@pytest.mark.parametrize("op", EVERY_DECAY)
def test_a_cold_first_call_inside_a_capture(op, pass_, dtype):
    """In a process that has made no call yet, so the pool and the kernels are not loaded."""
    pair = (2, 2, 64) if op in NORMALISED else (2, 2, 64, 64) if op in PAIR_DECAY else ()
    script = COLD.format(op=op, pass_=pass_, dtype=dtype, per_token=PER_TOKEN, pair=pair)
    printed = python(script, timeout=120)
    assert printed.split()[-1] == "True"


def test_two_threads_and_two_shapes_of_one_kernel():
    """10,000 calls of 8 and of 96 heads. Every launch used to set its kernel's limit of shared
    memory, and two threads reset each other's."""
    problems = [
        gpu_problem("gated_delta_rule", B=1, T=128, H=H, HV=H, K=128, V=128) for H in (8, 96)
    ]
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

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(problems, wants, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def test_a_call_on_one_device_opens_no_context_on_another():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU: a context on another is not possible")
    python("""
import ctypes, torch, linattn
cuda = ctypes.CDLL("libcuda.so.1")
def is_active(device):
    flags, active = ctypes.c_uint(), ctypes.c_int()
    assert cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
    return bool(active.value)
q = torch.ones(1, 64, 1, 64, device="cuda:1", dtype=torch.bfloat16)
linattn.retention(q, q, q)
linattn.retention_backward(q, q, q, q)
torch.cuda.synchronize(1)
assert is_active(1) and not is_active(0)
""")
