"""benchmarks/ranks.py: the count beside what was measured, and the page that shows it."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "distributed.md"
KINDS = ("op", "layer", "block")


@pytest.fixture
def count(bench):
    from benchmarks import ranks

    return ranks


def test_two_ranks_are_near_to_what_was_measured(count):
    for op, measured in count.TWO.items():
        found = count.one_call(op, 2 * count.SHORT, 2)
        assert found * 1e3 == pytest.approx(measured, rel=0.08)


def test_one_rank_is_one_gpu(count):
    assert all(count.efficiency(op, 1 << 20, 1) == 1 for op in count.MEASURED)


@pytest.mark.parametrize("what", KINDS)
def test_more_ranks_are_no_better_and_more_tokens_no_worse(what, count):
    for op in count.MEASURED:
        found = {
            (T, size): count.efficiency(op, T, size, what)
            for T in count.LENGTHS
            for size in count.RANKS
        }
        for few, many in pairwise(count.RANKS):
            assert all(found[T, many] <= found[T, few] for T in count.LENGTHS)
            # one GPU takes the heads of a longer row in turns, and ranks do not
            assert all(found[T, few] < 1 for T in count.LENGTHS if T < count.ROW)
        for short, long in pairwise(count.LENGTHS):
            assert all(found[short, size] <= found[long, size] for size in count.RANKS)


def test_the_page_has_the_figures_of_the_count(count):
    rows = dict(re.findall(r"^\| `(\w+`, \w+) \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    for op in count.MEASURED:
        for what in KINDS:
            found = (count.efficiency(op, 1 << 20, size, what) for size in count.RANKS)
            assert rows[f"{op}`, {what}"] == " | ".join(map(count.percent, found))
