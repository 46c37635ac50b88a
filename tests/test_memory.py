"""Memory: nothing leaks on any path, an allocation that fails is a MemoryError, and no call takes
T x T."""

import os
import sys
import textwrap
import weakref

import numpy as np
import pytest
from support.compare import arrays_in, snapshot
from support.leaks import legal_call, spoiled
from support.processes import python
from support.variants import EVERY_DECAY, FEW

import linattn
from linattn import _linattn

OPS = linattn.OPS
MB = 2**20
# otherwise glibc learns to keep large blocks, and freed ones hide what a call takes
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}
IMPORTS = "import linattn; from support.leaks import *\n"


def in_a_child(code):
    """Run code in a fresh interpreter that measures itself by support.leaks: its stdout."""
    return python(IMPORTS + textwrap.dedent(code), timeout=100, **GIVE_BACK)


# ---- leaks ----


@pytest.mark.parametrize("pass_", ["forward", "step", "backward"])
@pytest.mark.parametrize("kind", ["legal", "wrong"])
def test_allocated_blocks_stay_flat(pass_, kind):
    text = in_a_child(f"""
        for op in linattn.OPS:
            print(*blocks_of_{kind}_calls(op, {pass_!r}))
    """)
    for op, line in zip(OPS, text.splitlines(), strict=True):
        counts = [int(n) for n in line.split()]
        # A leak of one block a call adds 100 in every batch. The interpreter's own caches add up to
        # 200, but not forever; a settled batch adds the 1 that holds its count.
        assert min(np.diff(counts)) < 20, (op, counts)


def references(x):
    return [sys.getrefcount(one) for one in arrays_in(x)]


@pytest.mark.parametrize("pass_", ["forward", "step", "backward"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_references_to_arguments_do_not_change(op, pass_):
    function, made = legal_call(op, pass_)
    cases = [(function, made), *spoiled(op, pass_)]
    if pass_ != "backward":
        cases.append((function, made | {"out": np.empty_like(made["v"])}))
    cu = np.array([0, 4, 9])
    if pass_ != "step":
        _, packed = legal_call(op, pass_, B=1)
        cases.append(
            (
                function,
                {name: x for name, x in packed.items() if "state" not in name} | {"cu_seqlens": cu},
            )
        )
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
    function, made = legal_call("kda", "step", B=1, HV=1)
    one = {name: x.reshape(x.shape[2:]) for name, x in made.items()}
    one["beta"] = 0.5
    _, whole = legal_call("kda", "forward")
    dtypes = [np.dtype(np.float32), np.dtype(np.float64)]
    before = [sys.getrefcount(d) for d in dtypes]
    for _ in range(200):
        function(**one)
        linattn.kda(**whole, output_final_state=True)
    after = [sys.getrefcount(d) for d in dtypes]
    assert all(abs(b - a) < 50 for a, b in zip(before, after, strict=True)), (before, after)


def test_results_die_with_their_last_reference():
    for pass_ in ("forward", "step", "backward"):
        function, made = legal_call("kda", pass_)
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


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc here")
def test_resident_memory_stays_flat():
    text = in_a_child("""
for op in linattn.OPS:
    for pass_ in ("forward", "step", "backward"):
        function, made = legal_call(op, pass_, T=64, K=32, V=32)
        for batch in range(2):
            for _ in range(150):
                function(**made)
            if batch == 0:
                before = resident()
        print(op, pass_, resident() - before)
""")
    for line in text.splitlines():
        op, pass_, grown = line.split()
        assert int(grown) < 2 * MB, (op, pass_, grown)  # 150 of the smallest scratch is 5 MB


# ---- no memory ----


@pytest.fixture
def failing():
    yield _linattn._fail_allocation
    _linattn._fail_allocation(0)


@pytest.mark.parametrize("pass_", ["forward", "step", "backward"])
@pytest.mark.parametrize("op", OPS)
def test_each_allocation_that_fails_is_a_memory_error(op, pass_, failing):
    function, made = legal_call(op, pass_)
    if pass_ != "backward":
        made["out"] = np.full(made["v"].shape, 7, np.float32)
    copy = {
        name: tuple(y.copy() for y in x) if isinstance(x, tuple) else x.copy()
        for name, x in made.items()
    }
    want = snapshot([function(**copy)])
    before = snapshot(made)
    failing(1)
    with pytest.raises(MemoryError, match="memory"):
        function(**made)
    assert snapshot(made) == before, "something was written"
    assert snapshot([function(**made)]) == want  # the next call works


def test_the_nth_allocation_fails(failing):
    function, made = legal_call("kda", "forward")
    for n in range(1, 51):
        failing(n)
        for _ in range(n - 1):
            function(**made)  # a call takes one block
        with pytest.raises(MemoryError):
            function(**made)
        function(**made)


@pytest.mark.parametrize(
    "options",
    [{"mode": "recurrent"}, {"mode": "parallel"}, {"chunk_size": 1}, {"causal": False}],
    ids=str,
)
def test_every_way_through_says_so(options, failing):
    for pass_ in ("forward", "backward"):
        function, made = legal_call("linear_attention", pass_)
        failing(1)
        with pytest.raises(MemoryError):
            function(**made, **options)


# ---- how much a call takes ----

HAS_PROC = os.path.exists("/proc/self/status")
needs_proc = pytest.mark.skipif(not HAS_PROC, reason="no /proc here")


@needs_proc
@pytest.mark.parametrize("op", EVERY_DECAY)
def test_a_long_forward_takes_little_more_than_its_arrays(op):
    text = in_a_child(f"""
linattn.set_num_threads(2)
function, made, given = long_call({op!r}, "forward", 2**16)
print(given, *peak_of(function, made))
""")
    given, grown, returned = map(int, text.split())
    assert given + grown < 1.2 * (given + returned), (given / MB, grown / MB, returned / MB)


@needs_proc
@pytest.mark.parametrize("mode", ["chunk", "recurrent"])
@pytest.mark.parametrize("op", FEW)
def test_backward_is_linear_in_t(op, mode):
    """Beside its arrays a backward may take a few times T d, never T d d (256 MB and 1 GB here)."""
    sizes = {}
    for T in (2**14, 2**16):
        text = in_a_child(f"""
linattn.set_num_threads(1)
function, made, given = long_call({op!r}, "backward", {T})
made["mode"] = {mode!r}
print(given, *peak_of(function, made))
""")
        given, grown, returned = map(int, text.split())
        sizes[T] = grown
        assert grown < 1.25 * (given + returned), (T, given / MB, grown / MB, returned / MB)
    assert sizes[2**16] < 4.5 * sizes[2**14] + 2 * MB, sizes


@needs_proc
def test_a_whole_sequence_is_read_without_t_by_t():
    text = in_a_child("""
linattn.set_num_threads(2)
for pass_ in ("forward", "backward"):
    function, made, given = long_call("linear_attention", pass_, 2**15)
    made["causal"] = False
    print(given, *peak_of(function, made))
""")
    for line in text.splitlines():
        given, grown, returned = map(int, line.split())
        assert grown < 1.25 * (given + returned)
