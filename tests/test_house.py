"""House rules that a program can hold: lists of ops come from the table, helpers from support."""

import ast
import fnmatch
import pathlib
import re
import subprocess
import tomllib

import pytest
from support.variants import GATED

import linattn

ROOT = pathlib.Path(__file__).parents[1]
# A list of three ops or more is asked of linattn.VARIANTS, in tests by support/variants.py. In
# these rooms an op is a file, a definition, or what another library has for it.
ROOMS = re.compile(
    r"linattn/(nn|ops|reference|compat|programs)\b|linattn/__init__\.py$"
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
        "benchmarks/ranks.py",
        "simple_gla gla gated_delta_rule kda rwkv6 dplr_delta_rule titans linear_attention "
        "retention",
    ): "measured times of each",
    (
        "benchmarks/ranks.py",
        "simple_gla gla gated_delta_rule kda",
    ): "measured times of each",
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


def tracked(pattern="*.py"):
    """The files that git tracks, the Python ones by default, by their paths from the top."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout: git does not say which files are ours")
    done = subprocess.run(
        ["git", "-C", ROOT, "ls-files", pattern], check=True, capture_output=True, text=True
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


# ---- docs/adding-a-variant.md ----

GUIDE = ROOT / "docs" / "adding-a-variant.md"
TOYS = ("head_delta", "offset")  # the examples, which are not in the sources
PATH = re.compile(r".*/.*|.*\.(c|h|cu|cuh|def|md|py|pyi|toml|cff|png)")


def named_by_the_guide():
    """Its paths, and its other words in backticks. Code of the examples is left out."""
    prose = re.sub(r"^```.*?^```$", "", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)
    spans = [
        span
        for span in re.findall(r"`([^`]+)`", prose)
        if not any(toy in span.lower() for toy in TOYS)
    ]
    return [x for x in spans if PATH.fullmatch(x)], [x for x in spans if not PATH.fullmatch(x)]


def is_at(place, name, op):
    """Is a file at a place of the guide: a path, a pattern of paths, or a folder and a slash?"""
    pattern = place.replace("<op>", op)
    return fnmatch.fnmatch(name, pattern + "*" if pattern.endswith("/") else pattern)


def test_the_guide_names_only_what_exists():
    paths, words = named_by_the_guide()
    files, op = tracked("."), linattn.OPS[0]
    assert not [path for path in paths if not any(is_at(path, name, op) for name in files)]
    rooms = re.compile(r"csrc/|linattn/|benchmarks/\w+\.py|tests/(c|support)/|setup\.py")
    sources = [(ROOT / name).read_text() for name in files if rooms.match(name)]
    known = {word for source in sources for word in re.findall(r"\w+", source)}
    used = set(re.findall(r"[A-Za-z_]\w+", " ".join(words).replace("<op>", op)))
    assert sorted(used - known) == []


@pytest.mark.parametrize("op", [GATED[0], GATED[-1]])
def test_the_guide_names_every_file_that_names_an_op(op):
    paths, _ = named_by_the_guide()
    of_op = re.compile(rf"\b{op}\b".encode())
    files = [name for name in tracked(".") if of_op.search((ROOT / name).read_bytes())]
    files = [name for name in files if ROOT / name != GUIDE]
    assert not [name for name in files if not any(is_at(path, name, op) for path in paths)]


def test_the_diffs_of_the_guide_apply():
    """The lines that a hunk leaves or takes away follow each other in the file, hunk after hunk."""
    blocks = re.findall(r"^```diff\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == len(TOYS)
    for part in re.split(r"^--- a/", "".join(blocks), flags=re.MULTILINE)[1:]:
        path, *hunks = re.split(r"\n(?:\+\+\+ b/.*\n)?@@ .*\n", part)
        source, at = "\n" + (ROOT / path).read_text(), 0
        assert hunks
        for hunk in hunks:
            old = [line[1:] for line in hunk.splitlines() if line[:1] in " -"]
            at = source.find("\n" + "\n".join(old) + "\n", at)
            assert at >= 0, (path, old)


def test_every_package_is_installed():
    """A wheel lacks a package that is missing here; a checkout imports it all the same."""
    text = (ROOT / "pyproject.toml").read_text()
    listed = tomllib.loads(text)["tool"]["setuptools"]["packages"]
    there = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in ROOT.glob("linattn/**/__init__.py")
    }
    assert set(listed) == there


# ---- the sizes of the core ----

LONGEST_FILE, LONGEST_FUNCTION = 600, 200  # lines; a function's are those between its braces


def functions(source):
    """(line, lines) of every function whose braces stand alone: at the margin, or as a member."""
    begun = None
    for number, line in enumerate(source.splitlines(), 1):
        if line in ("{", "    {"):
            begun = number, line[:-1]
        elif begun is not None and line == begun[1] + "}":
            yield begun[0], number - begun[0] - 1
            begun = None


def test_files_and_functions_of_the_core_are_short():
    files = [name for name in tracked("csrc") if re.search(r"\.(c|h|cu|cuh|def)$", name)]
    sources = {name: (ROOT / name).read_text() for name in files}
    found = [(name, *x) for name, source in sources.items() for x in functions(source)]
    assert len(found) > 1000, "functions are not found any more"
    assert [x for x in found if x[2] > LONGEST_FUNCTION] == []
    assert [name for name, x in sources.items() if x.count("\n") > LONGEST_FILE] == []


def test_kernels_know_the_threads_of_their_launch_bounds():
    """The compiler believes threads_below: a number below that of the launch bounds breaks code."""
    pair = re.compile(r"__launch_bounds__\(([^;{}]*?)\n\{\n    threads_below<(.*)>\(\);")
    found = 0
    for name in tracked("csrc/cuda"):
        source = (ROOT / name).read_text()
        for bounds, threads in pair.findall(source):
            squeezed, known = (re.sub(r"\s", "", x) for x in (bounds, threads))
            assert squeezed.startswith((known + ",", known + ")")), (name, known)
        pairs = len(pair.findall(source))
        assert pairs == len(re.findall(r"^    threads_below<", source, re.MULTILINE)), name
        found += pairs
    assert found > 20, "kernels are not found any more"
