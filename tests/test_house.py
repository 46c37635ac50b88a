"""House rules that a program can hold: lists of ops come from the table, helpers from support."""

import ast
import pathlib
import re
import subprocess

import pytest

import linattn

ROOT = pathlib.Path(__file__).parents[1]
# A list of three ops or more is asked of linattn.VARIANTS, in tests by support/variants.py. In
# these rooms an op is a file, a definition, or what another library has for it.
ROOMS = re.compile(
    r"linattn/(ops|reference|compat|programs)\b|linattn/(nn|__init__)\.py$"
    r"|benchmarks/peers_\w+\.py$"
)
MOST = 2
# {(file, the ops that one display names): why they are named there}
ALLOWED = {
    (
        "benchmarks/cpu.py",
        "linear_attention retention simple_gla gla delta_rule gated_delta_rule kda",
    ): "a measured goal for each",
    (
        "tests/test_autograd_transforms.py",
        "retention lightning_attention linear_attention gla simple_gla",
    ): "a call of each is written out",
    (
        "tests/test_extremes.py",
        "linear_attention gla gated_delta_rule",
    ): "examples: the reference takes seconds for 2^17 tokens",
    (
        "tests/test_extremes.py",
        "simple_gla gated_delta_rule kda",
    ): "examples: the reference takes seconds for 2^20 tokens",
}


def tracked():
    """The Python files that git tracks, by their paths from the top."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout: git does not say which files are ours")
    done = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "*.py"], check=True, capture_output=True, text=True
    )
    return [name for name in done.stdout.split() if (ROOT / name).exists()]


def lists_of_ops(source):
    """(line, the ops) of every tuple, list, set or dict that names more than MOST ops."""
    for node in ast.walk(ast.parse(source)):
        members = []
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            members = node.elts
        elif isinstance(node, ast.Dict):
            members = [*node.keys, *node.values]
        words = [x.value for x in members if isinstance(x, ast.Constant)]
        named = dict.fromkeys(x for x in words if isinstance(x, str) and x in linattn.OPS)
        if len(named) > MOST:
            yield node.lineno, " ".join(named)


def test_lists_of_ops_come_from_the_table():
    found, used = [], set()
    for name in tracked():
        if not ROOMS.match(name):
            for line, ops in lists_of_ops((ROOT / name).read_text()):
                used.add((name, ops))
                if (name, ops) not in ALLOWED:
                    found.append(f"{name}:{line}: {ops}")
    assert not found, "typed by hand, but linattn.VARIANTS has it:\n" + "\n".join(found)
    assert used == set(ALLOWED), "allowed, but nowhere any more"


@pytest.mark.parametrize("source", ["x = {}", "f(op={})", "for op in {}: pass"])
def test_a_list_that_is_typed_is_found(source):
    three = linattn.OPS[:3]
    for display in (
        tuple(three),
        list(three),
        set(three),
        dict.fromkeys(three),
        dict(enumerate(three)),
    ):
        assert len(list(lists_of_ops(source.format(display)))) == 1
    assert not list(lists_of_ops(source.format(three[:2])))
    assert not list(lists_of_ops(source.format([(op, 1) for op in three])))


def test_test_files_import_from_support_alone():
    """A helper that two test files need belongs to neither."""
    names = {pathlib.Path(name).stem for name in tracked() if name.startswith("tests/test_")}
    for name in tracked():
        if name.startswith("tests/"):
            for node in ast.walk(ast.parse((ROOT / name).read_text())):
                imported = (
                    [node.module]
                    if isinstance(node, ast.ImportFrom)
                    else [alias.name for alias in node.names]
                    if isinstance(node, ast.Import)
                    else []
                )
                assert not names & set(imported) and "conftest" not in imported, name
