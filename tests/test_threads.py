"""Threads, forks and signals: any number of threads gives the same bits, and nothing ever hangs."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from support.compare import arrays_in, leaves, over_arrays
from support.grid import taking_turns, v_first
from support.problems import at_token
from support.processes import environment, python
from support.variants import FEW

import linattn
from linattn.testing import make_inputs, make_output_gradients

OPS = linattn.OPS
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def threads_as_they_were():
    before = linattn.get_num_threads()
    yield
    linattn.set_num_threads(before)


def bits(result):
    return b"".join(x.tobytes() for x in arrays_in(result))


def forward(op, inputs, **options):
    return bits(getattr(linattn, op)(**inputs, output_final_state=True, **options))


def backward(op, inputs, **options):
    given = make_output_gradients(op, np.random.default_rng(5), inputs)
    return bits(getattr(linattn, f"{op}_backward")(**given, **inputs, **options))


def step(op, inputs):
    """The first token; the state is copied, stepped and returned too."""
    inputs = dict(inputs)
    state = inputs.pop("initial_state")
    state = tuple(x.copy() for x in state) if isinstance(state, tuple) else state.copy()
    o = getattr(linattn, f"{op}_step")(**at_token(inputs, 0), state=state)
    return bits([o, state])


def small_calls():
    """48 calls of a few tens of microseconds, some just large enough to be shared out."""
    calls = []
    for i, op in enumerate(OPS):
        rng = np.random.default_rng(i)
        small = make_inputs(
            op, rng, B=2, T=9, H=1, HV=2, K=8, V=8, dtype=np.float32, initial_state=True
        )
        large = make_inputs(
            op, rng, B=2, T=40, H=2, HV=4, K=16, V=24, dtype=np.float32, initial_state=True
        )
        for inputs in (small, large):
            for run in (forward, backward, step):
                calls.append(lambda run=run, op=op, inputs=inputs: run(op, inputs))
    return calls


# ---- the number of threads ----

SHAPES = {
    "many heads": {"B": 3, "T": 70, "H": 2, "HV": 4, "K": 16, "V": 24},
    "one head, wide": {"B": 1, "T": 160, "H": 1, "HV": 1, "K": 64, "V": 256},
    "odd": {"B": 1, "T": 333, "H": 1, "HV": 3, "K": 33, "V": 67},
}


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("op", OPS)
def test_results_do_not_depend_on_the_number_of_threads(op, shape):
    rng = np.random.default_rng(0)
    inputs = make_inputs(op, rng, **SHAPES[shape], dtype=np.float32, initial_state=True)
    for mode in ("chunk", "recurrent"):
        linattn.set_num_threads(1)
        o, grads = forward(op, inputs, mode=mode), backward(op, inputs, mode=mode)
        for n in range(2, 9):
            linattn.set_num_threads(n)
            assert forward(op, inputs, mode=mode) == o, n
            assert backward(op, inputs, mode=mode) == grads, n


def of_columns(inputs, first, last):
    """The same problem with some of the value columns: they never mix."""

    def columns(x):
        return np.ascontiguousarray(x[..., first:last]) if x.ndim == 4 else x  # not those of z

    return {
        **inputs,
        "v": columns(inputs["v"]),
        "initial_state": over_arrays(columns, inputs["initial_state"]),
    }


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_results_do_not_depend_on_where_a_column_lies(op, dtype):
    rng = np.random.default_rng(0)
    inputs = make_inputs(
        op, rng, B=1, T=61, H=2, HV=2, K=72, V=208, dtype=dtype, initial_state=True
    )

    def stepped(inputs):
        x = at_token(inputs, 0)
        state = x.pop("initial_state")
        state = tuple(a.copy() for a in state) if isinstance(state, tuple) else state.copy()
        return getattr(linattn, f"{op}_step")(**x, state=state), state

    def whole(inputs):
        return getattr(linattn, op)(**inputs, output_final_state=True)

    for call in (whole, stepped):
        o, state = call(inputs)
        for first, last in ((0, 16), (16, 32), (16, 64), (48, 176), (32, 144), (1, 17)):
            o_there, state_there = call(of_columns(inputs, first, last))
            np.testing.assert_array_equal(o_there, o[..., first:last])
            for S_there, S in zip(leaves(state_there), leaves(state), strict=True):
                if S.ndim == 4:  # z has no columns
                    S = S[..., first:last]
                np.testing.assert_array_equal(S_there, S)


@pytest.mark.parametrize("op", OPS)
def test_steps_do_not_depend_on_the_number_of_threads(op):
    inputs = make_inputs(
        op,
        np.random.default_rng(0),
        B=4,
        T=1,
        H=4,
        HV=8,
        K=64,
        V=64,
        dtype=np.float32,
        initial_state=True,
    )
    linattn.set_num_threads(1)
    want = step(op, inputs)
    for n in range(2, 9):
        linattn.set_num_threads(n)
        assert step(op, inputs) == want, n


@pytest.mark.parametrize("op", FEW)
def test_packed_sequences_and_whole_sequences_do_not_either(op):
    rng = np.random.default_rng(0)
    cu = np.array([0, 1, 1, 130, 200, 333])
    calls = [
        (
            make_inputs(
                op,
                rng,
                T=333,
                H=2,
                HV=4,
                K=32,
                V=80,
                dtype=np.float32,
                initial_state=True,
                cu_seqlens=cu,
            ),
            {},
        )
    ]
    if op == "linear_attention":
        calls.append(
            (
                make_inputs(
                    op, rng, T=333, H=2, HV=4, K=32, V=256, dtype=np.float32, initial_state=True
                ),
                {"causal": False},
            )
        )
    for inputs, options in calls:
        linattn.set_num_threads(1)
        o, grads = forward(op, inputs, **options), backward(op, inputs, **options)
        for n in (2, 3, 5, 8):
            linattn.set_num_threads(n)
            assert forward(op, inputs, **options) == o
            assert backward(op, inputs, **options) == grads


# ---- threads that share a head ----

# Work enough for eight threads and more. A head's columns are divided among threads, 16 or more to
# each, and then its tokens: a thread with the second part of a sequence runs over the first part
# without reads.
SHARED = {
    "V=128": {"T": 600, "K": 64, "V": 128},
    "V=64": {"T": 800, "K": 64, "V": 64},
    "V=32": {"T": 1100, "K": 64, "V": 32},
    "V=20": {"T": 1700, "K": 64, "V": 20},
    "3 heads": {"T": 700, "HV": 3, "K": 33, "V": 67},
    "5 heads": {"T": 270, "H": 5, "K": 48, "V": 80},
    "two sequences": {"B": 2, "T": 290, "K": 64, "V": 96},
    "many keys": {"T": 600, "H": 3, "K": 256, "V": 48},
    "one chunk and its rest": {"T": 17, "K": 256, "V": 512},
}
SEQUENCES = {
    "empty and short ones": [0, 0, 1, 400, 403, 403, 690, 706, 706],
    "one long one": [0, 7, 900, 900, 917],
    "four": [0, 304, 912, 929, 1234],
}


def assert_no_number_of_threads_matters(op, inputs, **options):
    linattn.set_num_threads(1)
    want = forward(op, inputs, **options)
    for n in (*range(2, 9), 12):
        linattn.set_num_threads(n)
        assert forward(op, inputs, **options) == want, n


@pytest.mark.parametrize(
    ("op", "shape", "dtype"),
    taking_turns(OPS, SHARED, turns=(np.float32, np.float64, ml_dtypes.bfloat16)),
)
def test_few_heads_give_the_same_bits(op, dtype, shape):
    rng = np.random.default_rng(0)
    for given in (True, False):
        inputs = make_inputs(op, rng, **SHARED[shape], dtype=dtype, initial_state=given)
        assert_no_number_of_threads_matters(op, inputs)


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size": 1},
        {"chunk_size": 23},
        {"chunk_size": 100},
        {"chunk_size": 250},
        {"chunk_size": 64, "qk_l2norm": True},
        {"mode": "parallel"},
        {"state_v_first": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("op", OPS)
def test_few_heads_do_with_options_too(op, options):
    rng = np.random.default_rng(0)
    for dims in ({"T": 533, "K": 48, "V": 130}, {"T": 100, "H": 3, "K": 128, "V": 64}):
        inputs = make_inputs(op, rng, **dims, dtype=np.float32, initial_state=True)
        if options.get("state_v_first"):
            inputs["initial_state"] = v_first(inputs["initial_state"])
        assert_no_number_of_threads_matters(op, inputs, **options)


@pytest.mark.parametrize("sequences", list(SEQUENCES))
@pytest.mark.parametrize("op", OPS)
def test_few_heads_of_packed_sequences_do(op, sequences):
    rng, cu = np.random.default_rng(0), SEQUENCES[sequences]
    for HV, V in ((1, 128), (1, 32), (3, 40)):
        inputs = make_inputs(
            op,
            rng,
            T=cu[-1],
            H=1,
            HV=HV,
            K=48,
            V=V,
            dtype=np.float32,
            initial_state=True,
            cu_seqlens=cu,
        )
        assert_no_number_of_threads_matters(op, inputs)
        if op == "linear_attention":
            inputs = make_inputs(
                op,
                rng,
                T=cu[-1],
                H=1,
                HV=HV,
                K=48,
                V=V,
                dtype=np.float32,
                initial_state=True,
                cu_seqlens=cu,
                normalize=False,
            )
            assert_no_number_of_threads_matters(op, inputs)


def test_the_same_call_250_times():
    inputs = make_inputs(
        "kda",
        np.random.default_rng(0),
        T=100,
        H=1,
        HV=4,
        K=16,
        V=24,
        dtype=np.float32,
        initial_state=True,
    )
    linattn.set_num_threads(4)
    assert len({forward("kda", inputs) for _ in range(250)}) == 1
    assert len({backward("kda", inputs) for _ in range(100)}) == 1


def test_set_num_threads():
    for n in (1, 2, 256, np.int64(3), np.uint8(4)):
        linattn.set_num_threads(n)
        assert linattn.get_num_threads() == n


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (257, ValueError),
        (2**31, ValueError),
        (2**70, ValueError),
        (-(2**70), ValueError),
        (1.0, TypeError),
        ("2", TypeError),
        (None, TypeError),
        (True, TypeError),
        ([2], TypeError),
        (np.float32(2), TypeError),
    ],
    ids=repr,
)
def test_set_num_threads_refuses(bad, error):
    linattn.set_num_threads(2)
    with pytest.raises(error, match=r"^n: expected "):
        linattn.set_num_threads(bad)
    assert linattn.get_num_threads() == 2


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({"LINATTN_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"LINATTN_NUM_THREADS": "3", "OMP_NUM_THREADS": "2"}, 3),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": " 2 "}, 2),
        ({"OMP_NUM_THREADS": "512"}, 256),
        ({"LINATTN_NUM_THREADS": "3", "OMP_NUM_THREADS": "many"}, 3),
        ({"LINATTN_NUM_THREADS": ""}, None),
        ({}, None),
    ],
    ids=str,
)
def test_threads_from_the_environment(environment, want):
    done = with_environment(environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == (want or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("text", ["0", "-1", "many", "2 threads", "1.5", "99999999999999", "3,2"])
@pytest.mark.parametrize("name", ["LINATTN_NUM_THREADS", "OMP_NUM_THREADS"])
def test_an_environment_that_holds_no_number_of_threads(name, text):
    """OpenMP's variable may be a list, and may ask for more threads than there can be."""
    if name[0] == "O" and text[0] in "93":
        pytest.skip(f"{name}={text} is a number of threads")
    done = with_environment({name: text})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {name}: expected 1 to 256 threads, got {text}"
    )


def with_environment(variables):
    clean = {name: x for name, x in environment().items() if not name.endswith("_NUM_THREADS")}
    return subprocess.run(
        [sys.executable, "-c", "import linattn; print(linattn.get_num_threads())"],
        env=clean | variables,
        capture_output=True,
        text=True,
        timeout=30,
    )


# ---- the caller's floating-point mode ----


@pytest.mark.parametrize("pass_", ["forward", "backward", "step"])
def test_flush_to_zero_holds_on_every_thread(pass_):
    """Numbers about 1e-20 have products below 2^-126, which a thread of another mode would keep."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    shape = (64, 8, 32) if pass_ == "step" else (1, 256, 8, 32)
    q, k, v = ((rng.standard_normal(shape) * 1e-20).astype(np.float32) for _ in range(3))
    g = -rng.random(shape[:-1]).astype(np.float32)

    def call():
        if pass_ == "step":
            state = np.zeros((64, 8, 32, 32), np.float32)
            linattn.simple_gla_step(q, k, v, g, state=state)
            return state.tobytes()
        if pass_ == "backward":
            return linattn.simple_gla_backward(v * 1e20, q * 1e20, k, v, g).dg.tobytes()
        return linattn.simple_gla(q, k, v, g, output_final_state=True)[1].tobytes()

    def seen():
        answers = set()
        for i in range(30):
            linattn.set_num_threads(1 + i % 3)
            answers.add(call())
        return answers

    kept = seen()
    torch.set_flush_denormal(True)
    try:
        flushed = seen()
    finally:
        torch.set_flush_denormal(False)
    assert len(kept) == len(flushed) == 1
    assert kept != flushed
    assert seen() == kept


# ---- several callers at once ----


def test_8_threads_of_1000_mixed_calls_equal_serial():
    linattn.set_num_threads(4)
    calls = small_calls()
    want = [call() for call in calls]
    wrong = []
    start = threading.Barrier(8)

    def work(seed):
        order = np.random.default_rng(seed).integers(len(calls), size=1000)
        start.wait()
        try:
            for i in order:
                if calls[i]() != want[i]:
                    wrong.append(int(i))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    assert not wrong


def test_threads_that_also_change_the_number_of_threads():
    calls = small_calls()[:24]
    want = [call() for call in calls]

    def work(seed):
        rng = np.random.default_rng(seed)
        for i in rng.integers(len(calls), size=100):
            linattn.set_num_threads(int(rng.integers(1, 9)))
            assert calls[i]() == want[i]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_nested_use_from_executors():
    """Tasks that call, and tasks that start executors whose tasks call."""
    calls = small_calls()
    want = [call() for call in calls]

    def outer(i):
        with ThreadPoolExecutor(2) as inner:
            return [calls[i](), *inner.map(lambda j: calls[j](), [i, (i + 1) % len(calls)])]

    with ThreadPoolExecutor(3) as pool:
        for i, got in enumerate(pool.map(outer, range(len(calls)))):
            assert got == [want[i], want[i], want[(i + 1) % len(calls)]]


def ticks_during(call):
    """How often another Python thread ran in the middle half of a call; at its ends Python switches
    threads by itself."""
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    began = time.perf_counter()
    call()
    ended = time.perf_counter()
    stop.set()
    thread.join(10)
    quarter = (ended - began) / 4
    return sum(began + quarter < t < ended - quarter for t in ticks)


def test_the_gil_is_released():
    inputs = make_inputs(
        "gated_delta_rule", np.random.default_rng(0), T=512, H=1, K=128, V=128, dtype=np.float32
    )
    inputs = {name: np.broadcast_to(x, (200, *x.shape[1:])) for name, x in inputs.items()}
    linattn.set_num_threads(1)
    assert ticks_during(lambda: linattn.gated_delta_rule(**inputs)) >= 3


def test_the_gil_is_released_while_a_gate_is_read():
    """The warning is an error here, so the call ends after the pass over the gate."""
    T, K = 2**19, 256  # 512 MiB of gate: some 50 ms
    q, x = (np.broadcast_to(np.zeros(n, np.float32), (1, T, 1, n)) for n in (K, 1))
    g = np.full((1, T, 1, K), -0.1, np.float32)
    g[0, -1] = 1
    linattn.set_num_threads(1)

    def call():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(RuntimeWarning):
                linattn.gla(q, q, x, g)

    assert max(ticks_during(call) for _ in range(3)) >= 3


# ---- fork ----


def fork(run, timeout=20):
    """run() in a child; its exit status, or an assertion if it has not ended in time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on: forks beside threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            status = run()
        finally:
            os._exit(status)
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


def test_fork_200_times_after_use():
    linattn.set_num_threads(4)
    inputs = make_inputs(
        "kda",
        np.random.default_rng(0),
        B=2,
        T=64,
        H=2,
        HV=4,
        K=16,
        V=24,
        dtype=np.float32,
        initial_state=True,
    )
    o, grads = forward("kda", inputs), backward("kda", inputs)

    def child():
        right = forward("kda", inputs) == o and backward("kda", inputs) == grads
        return 0 if right else 2

    for i in range(200):
        assert fork(child) == 0, i
        assert forward("kda", inputs) == o  # the parent's workers still work


def test_a_child_of_a_child():
    linattn.set_num_threads(4)
    call = small_calls()[7]
    want = call()

    def grandchild():
        return 0 if call() == want else 2

    def child():
        if call() != want:
            return 3
        return fork(grandchild, 10)

    for _ in range(5):
        assert fork(child) == 0


def test_fork_while_other_threads_are_in_calls():
    linattn.set_num_threads(4)
    inputs = make_inputs(
        "gated_delta_rule",
        np.random.default_rng(0),
        B=2,
        T=400,
        H=2,
        HV=4,
        K=32,
        V=32,
        dtype=np.float32,
    )
    want = forward("gated_delta_rule", inputs)
    stop, wrong = threading.Event(), []

    def busy():
        while not stop.is_set():
            if forward("gated_delta_rule", inputs) != want:
                wrong.append(1)

    threads = [threading.Thread(target=busy, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for i in range(40):
            status = fork(lambda: 0 if forward("gated_delta_rule", inputs) == want else 2)
            assert status == 0, i
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert not wrong


def test_the_first_call_may_be_in_a_child():
    code = """
import os, warnings, numpy as np, linattn
warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on: forks beside threads
x = np.ones((1, 64, 8, 32), np.float32)
linattn.set_num_threads(4)
child = os.fork()
o, _ = linattn.retention(x, x, x)
if child == 0:
    os._exit(0 if np.isfinite(o).all() else 2)
print(os.waitpid(child, 0)[1])
"""
    assert python(code, timeout=30).strip() == "0"


# ---- signals, and the end ----

LOOP = """
import signal, sys, numpy as np, linattn
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
linattn.set_num_threads(4)
x = np.random.default_rng(0).standard_normal((1, 256, 8, 32)).astype(np.float32)
print("ready", flush=True)
try:
    while True:
        linattn.retention(x, x, x)
except KeyboardInterrupt:
    o, _ = linattn.retention(x, x, x)
    print("interrupted", bool(np.isfinite(o).all()), flush=True)
    sys.exit(7)
"""


def test_ctrl_c_ends_a_loop_of_calls():
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", LOOP], stdout=subprocess.PIPE, text=True, env=environment()
        )
        try:
            assert process.stdout.readline().strip() == "ready"
            time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            text, _ = process.communicate(timeout=20)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        assert process.returncode == 7
        assert text.strip() == "interrupted True"


LONG_CALL = """
import os, signal, sys, threading, time, numpy as np, linattn
signal.signal(signal.SIGINT, signal.default_int_handler)
linattn.set_num_threads({threads})
row = np.random.default_rng(0).standard_normal((3, 1, 1, 2, {K}), np.float32) / 16
q, k, v = (np.broadcast_to(x, (1, {T}, 2, {K})) for x in row)  # of no memory to speak of
v = v[..., :32]
beta, S = np.broadcast_to(np.float32(.5), v.shape[:3]), np.ones((1, 2, {K}, 32), np.float32)
given, sent = (row.copy(), S.copy()), []
def send():
    time.sleep(.1)
    sent.append(time.{clock}())
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=send, daemon=True).start()
try:
    linattn.{call}
except KeyboardInterrupt:
    took = time.{clock}() - sent[0]
    assert np.array_equal(given[0], row) and np.array_equal(given[1], S)
    small = np.ones((4, 2), np.float32)
    assert np.isfinite(linattn.retention(small, small, small)[0]).all()
    print(took)
else:
    print("inf: the call came to its end")
"""


@pytest.mark.parametrize(
    ("call", "T", "K", "threads"),
    [
        ("delta_rule(q, k, v, beta, initial_state=S)", 2**20, 256, 2),
        ("delta_rule(q[:, :, :1], k[:, :, :1], v[:, :, :1], beta[:, :, :1])", 2**21, 256, 1),
        ("delta_rule(q, k, v, beta, initial_state=S, mode='recurrent')", 2**21, 256, 2),
        ("linear_attention(q, k, v, causal=False)", 2**20, 256, 1),
        ("linear_attention_backward(v, q, k, v, causal=False)", 2**17, 256, 1),
        ("delta_rule_backward(v, q, k, v, beta, initial_state=S)", 2**18, 256, 2),
        ("delta_rule_backward(v, q, k, v, beta, mode='recurrent')", 2**17, 256, 2),
    ],
    ids=[
        "forward",
        "one unit of work",
        "recurrent",
        "noncausal",
        "noncausal, backward",
        "backward",
        "recurrent, backward",
    ],
)
def test_ctrl_c_ends_a_long_call(call, T, K, threads):
    """The calling thread checks about every tenth of a second; a busy machine takes longer."""
    code = LONG_CALL.format(call=call, T=T, K=K, threads=threads, clock="perf_counter")
    assert float(python(code, timeout=50).split(":")[0]) < 0.5


# Two units of work. Either thread may take the short one, and the other has the long one.
PACKED = "delta_rule(q[:, :, :1], k[:, :, :1], v[:, :, :1], beta[:, :, :1], mode='recurrent', "


@pytest.mark.parametrize(
    ("call", "T", "K"),
    [
        ("delta_rule(q, k, v, beta, initial_state=S, mode='parallel')", 2**13, 1024),
        ("delta_rule_backward(v, q, k, v, beta, initial_state=S, mode='parallel')", 2**12, 2048),
        ("linear_attention_backward(v, q, k, v, mode='parallel')", 2**13, 512),
        ("kda(q, k, v, q * 0, beta, initial_state=S, mode='parallel')", 2**13, 1024),
        ("kda_backward(v, q, k, v, q * 0, beta, initial_state=S, mode='parallel')", 2**13, 1024),
        ("delta_rule(q, k, v, beta, initial_state=S, chunk_size=2**13)", 2**14, 1024),
        (PACKED + "cu_seqlens=np.array([0, 2**14, 2**22]))", 2**22, 256),
        (PACKED + "cu_seqlens=np.array([0, 2**22 - 2**14, 2**22]))", 2**22, 256),
    ],
    ids=[
        "parallel",
        "parallel, backward",
        "normalised, backward",
        "a gate per key",
        "a gate per key, backward",
        "a long chunk",
        "a short sequence first",
        "a short sequence last",
    ],
)
def test_ctrl_c_ends_a_long_chunk_and_a_long_wait(call, T, K):
    """Within a chunk of thousands of tokens, and where the calling thread has no work left. The
    processor time of both threads is judged: it is the same on a busy machine. It includes the time
    in which the call gives hundreds of megabytes back."""
    code = LONG_CALL.format(call=call, T=T, K=K, threads=2, clock="process_time")
    assert float(python(code, timeout=50).split(":")[0]) < 1


def test_a_call_of_another_thread_is_not_interrupted():
    code = """
import os, signal, threading, time, numpy as np, linattn
x = np.random.default_rng(0).standard_normal((1, 2**15, 8, 64)).astype(np.float32)
beta = np.full(x.shape[:3], .5, np.float32)
want, answers = linattn.delta_rule(x, x, x, beta * 0)[0], []
thread = threading.Thread(target=lambda: answers.append(linattn.delta_rule(x, x, x, beta * 0)[0]))
signal.signal(signal.SIGINT, signal.default_int_handler)
thread.start()
try:
    time.sleep(.05)
    os.kill(os.getpid(), signal.SIGINT)
    thread.join()
except KeyboardInterrupt:
    print("interrupted")
thread.join()
print(np.array_equal(answers[0], want))
"""
    done = python(code, timeout=50, check=False)
    assert done.stdout.split() == ["interrupted", "True"], done.stderr


def test_a_process_ends_while_workers_wait_and_threads_call():
    code = """
import threading, numpy as np, linattn
linattn.set_num_threads(8)
x = np.ones((1, 512, 8, 32), np.float32)
def forever():
    while True:
        linattn.retention(x, x, x)
threading.Thread(target=forever, daemon=True).start()
for _ in range(20):
    linattn.retention(x, x, x)
print("done")
"""
    for _ in range(3):
        assert python(code, timeout=30).strip() == "done"
