"""A rank cuts its own tokens into sections on a GPU. Here it does so on the host, of few tokens."""

import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from support.compare import assert_same_bits
from support.shared_rows import agree, assembled, drawn, on_rank, one_process
from support.variants import FEW, GATED, KEY_DECAY

from linattn.testing import GATES
from linattn.variants import VARIANTS

LAYOUTS = ("equal", "unequal", "nothing between", "short between", "a chunk each")
OPS = [
    op for op, row in VARIANTS.items() if row.rule in ("additive", "delta") and row.decay != "pair"
]


def one_row(x, d):
    """Of a batch, the first row."""
    return ({name: y[:1] if hasattr(y, "ndim") and y.ndim > 2 else y for name, y in z.items()}
            for z in (x, d))  # fmt: skip


def in_sections(group, work, *call, backend=None):
    """on_rank, and into how many sections this rank cut its tokens."""
    from linattn.distributed import _sections, _ways

    counts = []

    def counted(call):
        found = lengths_of(call)
        counts.append(len(found))
        return found

    lengths_of = _sections.lengths_of
    small = {"DEVICES": ("cpu",), "CHUNK": 2, "WORK": work}
    with mock.patch.multiple(_sections, **small), mock.patch.object(_ways, "lengths_of", counted):
        return on_rank(group, *call, backend), max(counts)


def check(ranks, op, x, d, lengths, work=0):
    answers = ranks.run(len(lengths), in_sections, work, op, x, d, lengths, None)
    agree(assembled([a for a, _ in answers], None), one_process(op, x, d, lengths, None))
    assert [count for _, count in answers] == [sections_of(n, work) for n in lengths]


def sections_of(tokens, work):
    """At most eight, of an even number of tokens."""
    if 4 * tokens < work or tokens <= 2:  # four heads
        return 1
    return math.ceil(tokens / (2 * math.ceil(tokens / (2 * 8))))


def problem(op, rng, layout):
    options = {"normalize": False} if VARIANTS[op].normaliser else {}
    x, d, lengths, _ = drawn(op, rng, layout, **options)
    return *one_row(x, d), lengths


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_ops(op, layout, ranks, rng):
    check(ranks, op, *problem(op, rng, layout))


def by_alpha(x):
    return {name: y for name, y in x.items() if name != "g"} | {"alpha": np.exp(x["g"])}


def by_numbers(x):
    numbers = {"g": -0.1, "beta": 0.5, "gamma": 0.9, "slopes": 0.1}
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


@pytest.mark.parametrize(
    ("tokens", "heads", "device", "lengths"),
    [
        (1 << 16, 32, "cuda", (1 << 14,) * 4),
        (1 << 16, 32, "cpu", (1 << 16,)),
        (1 << 15, 32, "cuda", (1 << 15,)),  # too little work
        (1 << 18, 8, "cuda", (1 << 15,) * 8),  # no more than eight
        (1 << 20, 96, "cuda", (1 << 20,)),  # enough heads
        (1 << 20, 0, "cuda", (1 << 20,)),
        (70_000, 32, "cuda", (17_536,) * 3 + (17_392,)),  # whole chunks
    ],
)
def test_what_is_cut(tokens, heads, device, lengths):
    from linattn.distributed._sections import lengths_of

    like = SimpleNamespace(device=SimpleNamespace(type=device))
    call = SimpleNamespace(like=like, has_sections=True, T=tokens, shapes=[(heads, 128, 128)])
    assert lengths_of(call) == lengths
    assert sum(lengths) == tokens


def both(group, *call):
    return in_sections(group, 0, *call), in_sections(group, 0, *call, backend="aot_eager")


@pytest.mark.parametrize("op", [op for op in (*FEW, KEY_DECAY[0]) if op in OPS])
def test_in_a_graph(op, ranks, rng):
    x, d, lengths = problem(op, rng, "a chunk each")
    for (plain, _), (compiled, _) in ranks.run(4, both, op, x, d, lengths, None):
        assert_same_bits(compiled[:3], plain[:3])
