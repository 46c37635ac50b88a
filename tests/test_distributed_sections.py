"""A rank cuts its own tokens into sections on a GPU. Here it does so on the host, of few tokens."""

import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from support.compare import assert_same_bits
from support.shared_rows import ROWS, agree, assembled, maker_of, on_rank, one_process
from support.variants import FEW, GATED, KEY_DECAY, NORMALISED

import linattn.distributed as lad
from linattn import scans
from linattn.distributed._systems import SYSTEMS as TABLE
from linattn.testing import GATES
from linattn.variants import VARIANTS

LAYOUTS = ("equal", "unequal", "nothing between", "short between", "a chunk each")
SCANS = [name for name in lad.FUNCTIONS if name in scans.__all__]
OPS = [name for name in lad.FUNCTIONS if name in VARIANTS]
SYSTEMS = [name for name in lad.FUNCTIONS if name not in VARIANTS and name not in SCANS]


def in_sections(group, work, *call, backend=None):
    """on_rank, and into how many sections this rank cut its tokens."""
    from linattn.distributed import _sections, _ways

    counts = []

    def counted(call):
        found = lengths_of(call)
        counts.append(len(found))
        return found

    lengths_of = _sections.lengths_of
    small = {"DEVICES": ("cpu",), "CHUNK": 2, "MOST": 8, "WORK": work}
    with mock.patch.multiple(_sections, **small), mock.patch.object(_ways, "lengths_of", counted):
        return on_rank(group, *call, backend), max(counts)


def check(ranks, op, x, d, lengths, work=0, batch=2):
    answers = ranks.run(len(lengths), in_sections, work, op, x, d, lengths, None)
    agree(assembled([a for a, _ in answers], None), one_process(op, x, d, lengths, None))
    assert [count for _, count in answers] == [sections_of(n, work, batch) for n in lengths]


def sections_of(tokens, work, batch):
    """At most eight, of whole batches."""
    if 4 * tokens < work or tokens <= batch:  # four heads
        return 1
    return math.ceil(tokens / (batch * math.ceil(tokens / (batch * 8))))


def problem(op, rng, layout):
    """One row, which the ranks share."""
    options = {"normalize": False} if op in NORMALISED else {}
    lengths, _ = ROWS[layout]
    T = sum(lengths)
    return *maker_of(op)(op, rng, T, edges=[0, T], **options), lengths


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", lad.FUNCTIONS)
def test_functions(op, layout, ranks, rng):
    check(ranks, op, *problem(op, rng, layout))


@pytest.mark.parametrize("op", ["selective_scan", "s4d"])
def test_complex_scans(op, ranks, rng):
    lengths, _ = ROWS["unequal"]
    T = sum(lengths)
    check(ranks, op, *maker_of(op)(op, rng, T, edges=[0, T], pairs=True), lengths)


def by_alpha(x):
    return {name: y for name, y in x.items() if name != "g"} | {"alpha": np.exp(x["g"])}


def by_numbers(x):
    numbers = {"g": -0.1, "beta": 0.5, "gamma": 0.9, "slopes": 0.1, "bonus": 0.5, "eta": 0.5}
    return {name: numbers.get(name, y) for name, y in x.items()}


@pytest.mark.parametrize(
    ("op", "change"),
    [
        *((op, by_alpha) for op in GATED if op in OPS),
        *((op, by_numbers) for op in OPS if GATES[op]),
    ],
)
def test_other_gates(op, change, ranks, rng):
    x, d, lengths = problem(op, rng, "a chunk each")
    check(ranks, op, change(x), d, lengths)


def test_nothing_is_cut_for_few_tokens(ranks, rng):
    check(ranks, "gla", *problem("gla", rng, "short between"), work=80)


def test_batches_are_whole(ranks, rng):
    x, d, lengths = problem("titans", rng, "a chunk each")
    check(ranks, "titans", x | {"batch": 4}, d, lengths, batch=4)


KINDS = {kind: (SimpleNamespace(rule=kind, decay="key"), 1) for kind in ("additive", "dplr")}
KINDS |= {"two writes": (SimpleNamespace(rule="delta", decay="token"), 2), "scan": (None, 1)}


@pytest.mark.parametrize(
    ("kind", "tokens", "heads", "device", "lengths"),
    [
        ("additive", 1 << 16, 32, "cuda", (1 << 14,) * 4),
        ("additive", 1 << 16, 32, "cpu", (1 << 16,)),
        ("additive", 1 << 15, 32, "cuda", (1 << 15,)),  # too little work
        ("dplr", 1 << 15, 32, "cuda", (1 << 13,) * 4),  # a token counts four times
        ("two writes", 1 << 15, 32, "cuda", (1 << 13,) * 4),
        ("scan", 1 << 17, 16, "cuda", (1 << 14,) * 8),
        ("scan", 1 << 16, 16, "cuda", (1 << 16,)),
        ("additive", 1 << 18, 32, "cuda", (1 << 15,) * 8),  # no longer ones
        ("dplr", 1 << 18, 32, "cuda", (1 << 13,) * 32),
        ("additive", 1 << 21, 4, "cuda", (1 << 16,) * 32),  # no more than 32
        ("additive", 1 << 15, 96, "cuda", (1 << 15,)),  # enough heads
        ("additive", 1 << 20, 0, "cuda", (1 << 20,)),
        ("additive", 70_000, 32, "cuda", (17_536,) * 3 + (17_392,)),  # whole chunks
    ],
)
def test_what_is_cut(kind, tokens, heads, device, lengths):
    from linattn.distributed._sections import lengths_of

    row, writes = KINDS[kind]
    like = SimpleNamespace(device=SimpleNamespace(type=device))
    call = SimpleNamespace(like=like, has_sections=True, T=tokens, busy=heads,
                           kind=row, writes=writes, options={})  # fmt: skip
    assert lengths_of(call) == lengths
    assert sum(lengths) == tokens


def both(group, *call):
    return in_sections(group, 0, *call), in_sections(group, 0, *call, backend="aot_eager")


@pytest.mark.parametrize(
    "op", dict.fromkeys((*FEW, KEY_DECAY[0], *(x for x in SYSTEMS if not TABLE[x].is_carried)))
)
def test_in_a_graph(op, ranks, rng):
    """The carried ones are PyTorch's sums too, which a compiler puts otherwise."""
    x, d, lengths = problem(op, rng, "a chunk each")
    for (plain, _), (compiled, _) in ranks.run(4, both, op, x, d, lengths, None):
        assert_same_bits(compiled[:3], plain[:3])
