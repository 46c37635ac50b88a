"""Memory: nothing leaks, on no path; what cannot be had is a MemoryError; no call takes T x T."""

import os
import pathlib
import subprocess
import sys
import textwrap
import weakref

import numpy as np
import pytest

import linattn
from linattn import _linattn
from linattn.testing import make_inputs, make_output_gradients

OPS = linattn.OPS
HERE = pathlib.Path(__file__).parent
ROOT = pathlib.Path(linattn.__file__).parent.parent
MB = 2**20
# glibc otherwise learns to keep large blocks, and what was freed before hides what a call takes
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}


def python(code, *, timeout=100):
    """Run code in a fresh interpreter, after the imports below; its stdout."""
    head = """
import gc, resource, sys, warnings
import numpy as np, linattn
from linattn.testing import make_inputs, make_output_gradients
from test_memory import *
"""
    paths = os.pathsep.join([str(ROOT), str(HERE)])
    done = subprocess.run([sys.executable, "-c", head + textwrap.dedent(code)], text=True,
                          capture_output=True, timeout=timeout,
                          env=os.environ | {"PYTHONPATH": paths} | GIVE_BACK)
    assert done.returncode == 0, done.stderr
    return done.stdout


def problem(op, face, dtype=np.float32, **dims):
    """A legal call of one face as (function, arguments)."""
    dims = {"B": 2, "T": 9, "H": 1, "HV": 2, "K": 8, "V": 8} | dims
    inputs = make_inputs(op, np.random.default_rng(0), **dims, dtype=dtype, initial_state=True)
    if face == "backward":
        inputs |= make_output_gradients(op, np.random.default_rng(1), inputs)
    if face == "step":
        inputs["state"] = inputs.pop("initial_state")
        for name, x in inputs.items():
            if name not in ("gamma", "slopes", "state"):
                inputs[name] = np.ascontiguousarray(x[:, 0])
    return getattr(linattn, op if face == "forward" else f"{op}_{face}"), inputs


def arrays_in(x):
    if isinstance(x, np.ndarray):
        yield x
    elif isinstance(x, dict):
        yield from arrays_in(list(x.values()))
    elif isinstance(x, tuple | list):
        for one in x:
            yield from arrays_in(one)


# ---- leaks ----


def spoiled(op, face):
    """Calls that fail, one for every place where a call can: (function, arguments, errors)."""
    function, made = problem(op, face)
    state = "state" if face == "step" else "initial_state"
    strided = {name: x[..., ::2] if x.ndim else x for name, x in made.items()
               if isinstance(x, np.ndarray)}
    bad = [
        {"q": [1.0]}, {"k": made["k"].astype(int)}, {"v": made["v"].astype("c8")},
        {"v": made["v"][:1]}, {"q": made["q"][None, None]}, {"k": made["k"][..., :3]},
        {state: 3}, {state: (1, 2)}, {state: (made["v"],)}, {state: (made["v"], None)},
        {"scale": "x"}, {"scale": np.nan}, {"qk_l2norm": 1}, {"state_v_first": None},
        strided, {"nonsense": 1},
    ]
    if face != "step":
        bad += [{"mode": "x"}, {"mode": 3}, {"chunk_size": 0}, {"chunk_size": 2**70},
                {"chunk_size": 1.5}, {"cu_seqlens": np.array([0, 3])}, {"cu_seqlens": [0, 9]}]
    if face != "backward":
        bad += [{"out": 3}, {"out": np.zeros(3)}, {"out": made["v"]},
                {"out": made["v"].astype(np.float64)}, {"out": made["v"][..., ::-1]}]
    if face == "forward":
        bad += [{"output_final_state": "x"}]
    if op == "linear_attention":
        bad += [{"feature_map": "x"}, {"normalize": 3}, {"eps": -1.0}, {"feature_map": ()}]
    if "g" in made:
        bad += [{"alpha": made["g"]}, {"g": None}, {"g": -made["g"]}]  # the last one warns
    return [(function, made | one) for one in bad]


def blocks_of_legal_calls(op, face, batches=12, calls=100):
    """sys.getallocatedblocks after each batch."""
    import gc
    function, made = problem(op, face)
    f64, wide = problem(op, face, dtype=np.float64)
    swapped = {name: x.byteswap().view(x.dtype.newbyteorder()) if isinstance(x, np.ndarray) else x
               for name, x in made.items()}
    own = {"feature_map": np.exp} if op == "linear_attention" and face != "backward" else {}
    out = {} if face == "backward" else {"out": np.empty_like(made["v"])}
    counts = []
    for _ in range(batches):
        for _ in range(calls):
            function(**made)
            f64(**wide)
            function(**made, **out, **own)
            if face == "forward":
                function(**made, output_final_state=True)
            if face != "step":
                function(**swapped)
        gc.collect()
        counts.append(sys.getallocatedblocks())
    return counts


def blocks_of_wrong_calls(op, face, batches=12, calls=100):
    import gc
    import warnings
    cases = spoiled(op, face)
    legal, arguments = problem(op, face)
    counts = []
    warnings.simplefilter("error")
    for _ in range(batches):
        for _ in range(calls):
            for function, made in cases:
                try:
                    function(**made)
                except (TypeError, ValueError, RuntimeWarning):
                    pass
            _linattn._fail_allocation(1)
            try:
                legal(**arguments)
            except MemoryError:
                pass
        _linattn._fail_allocation(0)
        gc.collect()
        counts.append(sys.getallocatedblocks())
    return counts


@pytest.mark.parametrize("face", ["forward", "step", "backward"])
@pytest.mark.parametrize("kind", ["legal", "wrong"])
def test_allocated_blocks_stay_flat(face, kind):
    text = python(f"""
        for op in linattn.OPS:
            print(*blocks_of_{kind}_calls(op, {face!r}))
    """)
    for op, line in zip(OPS, text.splitlines(), strict=True):
        counts = [int(n) for n in line.split()]
        # A leak of one block a call adds 100 in every batch. The interpreter's own caches add up to
        # 200, but not forever; a settled batch adds the 1 that holds its count.
        assert min(np.diff(counts)) < 20, (op, counts)


def references(x):
    return [sys.getrefcount(one) for one in arrays_in(x)]


@pytest.mark.parametrize("face", ["forward", "step", "backward"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_references_to_arguments_do_not_change(op, face):
    function, made = problem(op, face)
    cases = [(function, made), *spoiled(op, face)]
    if face != "backward":
        cases.append((function, made | {"out": np.empty_like(made["v"])}))
    cu = np.array([0, 4, 9])
    if face != "step":
        _, packed = problem(op, face, B=1)
        cases.append((function, {name: x for name, x in packed.items() if "state" not in name}
                      | {"cu_seqlens": cu}))
    for call, arguments in cases:
        before = references(arguments)
        for _ in range(3):
            try:
                call(**arguments)
            except (TypeError, ValueError):
                pass
        assert references(arguments) == before


def test_dtypes_and_scalars_do_not_gain_references():
    """Immortal from Python 3.12 on, but a type's count shows a descriptor that was not released."""
    function, made = problem("kda", "step", B=1, HV=1)
    one = {name: x.reshape(x.shape[2:]) for name, x in made.items()}
    one["beta"] = 0.5
    _, whole = problem("kda", "forward")
    dtypes = [np.dtype(np.float32), np.dtype(np.float64)]
    before = [sys.getrefcount(d) for d in dtypes]
    for _ in range(200):
        function(**one)
        linattn.kda(**whole, output_final_state=True)
    after = [sys.getrefcount(d) for d in dtypes]
    assert all(abs(b - a) < 50 for a, b in zip(before, after, strict=True)), (before, after)


def test_results_die_with_their_last_reference():
    for face in ("forward", "step", "backward"):
        function, made = problem("kda", face)
        dead = [weakref.ref(x) for x in arrays_in(function(**made)) if x is not made.get("state")]
        assert dead and all(ref() is None for ref in dead)


def test_a_feature_map_is_not_kept_alive():
    """A cache of maps would hold what their closures hold."""
    q = np.ones((4, 2))

    class Map:
        def __call__(self, x):
            return x * x

    phi = Map()
    linattn.linear_attention(q, q, q, feature_map=phi)
    dead = weakref.ref(phi)
    del phi
    assert dead() is None


RSS = """
def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc here")
def test_resident_memory_stays_flat():
    text = python(RSS + """
for op in linattn.OPS:
    for face in ("forward", "step", "backward"):
        function, made = problem(op, face, T=64, K=32, V=32)
        for batch in range(2):
            for _ in range(150):
                function(**made)
            if batch == 0:
                before = resident()
        print(op, face, resident() - before)
""")
    for line in text.splitlines():
        op, face, grown = line.split()
        assert int(grown) < 2 * MB, (op, face, grown)  # 150 of the smallest scratch is 5 MB


# ---- no memory ----


def snapshot(made):
    return [x.tobytes() for x in arrays_in(made)]


@pytest.fixture
def failing():
    yield _linattn._fail_allocation
    _linattn._fail_allocation(0)


@pytest.mark.parametrize("face", ["forward", "step", "backward"])
@pytest.mark.parametrize("op", OPS)
def test_each_allocation_that_fails_is_a_memory_error(op, face, failing):
    function, made = problem(op, face)
    if face != "backward":
        made["out"] = np.full(made["v"].shape, 7, np.float32)
    copy = {name: tuple(y.copy() for y in x) if isinstance(x, tuple) else x.copy()
            for name, x in made.items()}
    want = snapshot([function(**copy)])
    before = snapshot(made)
    failing(1)
    with pytest.raises(MemoryError, match="memory"):
        function(**made)
    assert snapshot(made) == before, "something was written"
    assert snapshot([function(**made)]) == want  # the next call works


def test_the_nth_allocation_fails(failing):
    function, made = problem("kda", "forward")
    for n in range(1, 51):
        failing(n)
        for _ in range(n - 1):
            function(**made)  # a call takes one block
        with pytest.raises(MemoryError):
            function(**made)
        function(**made)


@pytest.mark.parametrize("options", [{"mode": "recurrent"}, {"mode": "parallel"},
                                     {"chunk_size": 1}, {"causal": False}], ids=str)
def test_every_way_through_says_so(options, failing):
    for face in ("forward", "backward"):
        function, made = problem("linear_attention", face)
        failing(1)
        with pytest.raises(MemoryError):
            function(**made, **options)


# ---- how much a call takes ----

PEAK = RSS + """
def peak_of(function, made):
    # the high-water mark is reset where the kernel allows it, else it only rises
    start = resident()
    try:
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
    except OSError:
        pass
    result = function(**made)
    with open("/proc/self/status") as f:
        for line in f:
            if line.startswith("VmHWM"):
                peak = int(line.split()[1]) * 1024
    return peak - start, sum(x.nbytes for x in arrays_in(list(result)))

def long_problem(op, face, T):
    function, made = problem(op, face, B=1, T=T, H=1, HV=1, K=64, V=64)
    small, few = problem(op, face, B=1, T=100, H=1, HV=1, K=64, V=64)
    small(**few)  # threads are started, code is loaded
    return function, made, sum(x.nbytes for x in arrays_in(made))
"""
HAS_PROC = os.path.exists("/proc/self/status")
needs_proc = pytest.mark.skipif(not HAS_PROC, reason="no /proc here")


@needs_proc
@pytest.mark.parametrize("op", ["linear_attention", "retention", "gated_delta_rule", "kda"])
def test_a_long_forward_takes_little_more_than_its_arrays(op):
    text = python(PEAK + f"""
linattn.set_num_threads(2)
function, made, given = long_problem({op!r}, "forward", 2**16)
print(given, *peak_of(function, made))
""")
    given, grown, returned = map(int, text.split())
    assert given + grown < 1.2 * (given + returned), (given / MB, grown / MB, returned / MB)


@needs_proc
@pytest.mark.parametrize("mode", ["chunk", "recurrent"])
@pytest.mark.parametrize("op", ["linear_attention", "gated_delta_rule", "kda"])
def test_backward_is_linear_in_t(op, mode):
    """Beside its arrays a backward may take a few times T d, never T d d (256 MB and 1 GB here)."""
    sizes = {}
    for T in (2**14, 2**16):
        text = python(PEAK + f"""
linattn.set_num_threads(1)
function, made, given = long_problem({op!r}, "backward", {T})
made["mode"] = {mode!r}
print(given, *peak_of(function, made))
""")
        given, grown, returned = map(int, text.split())
        sizes[T] = grown
        assert grown < 1.25 * (given + returned), (T, given / MB, grown / MB, returned / MB)
    assert sizes[2**16] < 4.5 * sizes[2**14] + 2 * MB, sizes


@needs_proc
def test_a_whole_sequence_is_read_without_t_by_t():
    text = python(PEAK + """
linattn.set_num_threads(2)
for face in ("forward", "backward"):
    function, made, given = long_problem("linear_attention", face, 2**15)
    made["causal"] = False
    print(given, *peak_of(function, made))
""")
    for line in text.splitlines():
        given, grown, returned = map(int, line.split())
        assert grown < 1.25 * (given + returned)
