"""Docstrings of the public names: each has an example that runs, and says what the code says."""

import ast
import doctest
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import linattn

PACKAGE = Path(linattn.__file__).parent
# An optional library that a module imports, or that its examples use.
NEEDS = {
    "linattn.distributed": "torch",
    "linattn.nn": "torch",
    "linattn.compat.transformers": "torch",
    "linattn.onnx": "torch",
    "linattn.plot": "matplotlib",
}
# Functions whose module needs nothing.
NEED_THEMSELVES = {
    "linattn.compat.fla.build_cp_context": "torch",
    "linattn.compat.fla.use_linattn": "torch",
}
INTERNAL = {"linattn.autograd"}  # PyTorch's operators, which the ops call
SECTIONS = (
    "Parameters",
    "Attributes",
    "Returns",
    "Raises",
    "Warns",
    "See Also",
    "Notes",
    "References",
    "Examples",
)  # of numpydoc, in its order


def names_in(path):
    """The names in __all__ of a source. It is not imported: that might need PyTorch."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def modules():
    """(name, path) of the public modules. One that others are in comes before them."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        parts = [*path.relative_to(PACKAGE.parent).with_suffix("").parts]
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not any(part.startswith("_") for part in parts) and ".".join(parts) not in INTERNAL:
            found.append((".".join(parts), path))
    return sorted(found, key=lambda module: (module[0].count("."), module[0]))


def public_names():
    """The public functions and classes. One that several modules have is taken once."""
    found, seen = [], set()
    for module, path in modules():
        for name in names_in(path):
            if NEEDS.get(module) != "torch":
                thing = getattr(importlib.import_module(module), name)
                if not callable(thing) or id(thing) in seen:
                    continue
                seen.add(id(thing))
            found.append(f"{module}.{name}")
    return found


NAMES = public_names()


def named(name):
    """The function or class of this name. The test is skipped where its library is missing."""
    needed = NEED_THEMSELVES.get(name)
    module, _, name = name.rpartition(".")
    if needed := needed or NEEDS.get(module):
        library = pytest.importorskip(needed)
        if library.__name__ == "matplotlib":
            library.use("Agg")
    return getattr(importlib.import_module(module), name)


def sections(text):
    """{title: lines} of a docstring as inspect.getdoc gives it; the summary has the title ''."""
    parts = re.split(r"^(\S.*)\n(-{3,})$", text, flags=re.MULTILINE)
    found = {"": parts[0].split("\n")}
    for title, line, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        assert len(title) == len(line) and title not in found, title
        found[title] = body.split("\n")
    return found


@pytest.fixture
def surroundings():
    """Restores what an example changes: settings of the process, figures, PyTorch's generator."""
    threads, precision = linattn.get_num_threads(), linattn.get_float32_precision()
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    yield
    linattn.set_num_threads(threads)
    linattn.set_float32_precision(precision)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


def test_the_names_are_found():
    """By three examples each: a change of the layout must not leave a test of nothing."""
    several = {*NEEDS} - {"linattn.onnx"}  # which has one function
    for module in ("linattn", "linattn.reference", "linattn.plot", *several, "linattn.compat.fla"):
        assert sum(name.rpartition(".")[0] == module for name in NAMES) >= 3, module
    assert {name.rpartition(".")[2] for name in NAMES} > set(linattn.OPS)


@pytest.mark.parametrize("name", NAMES)
def test_example(name, surroundings):
    thing = named(name)
    assert ">>> " in "\n".join(sections(inspect.getdoc(thing)).get("Examples", [])), "no example"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder().find(thing, name, globs={}):
        said = []
        assert not runner.run(test, out=said.append).failed, "".join(said)


@pytest.mark.parametrize("name", NAMES)
def test_sections_are_those_of_numpydoc(name):
    titles = [title for title in sections(inspect.getdoc(named(name))) if title]
    assert titles == [title for title in SECTIONS if title in titles]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_of_the_signature(name):
    thing = named(name)
    lines = sections(inspect.getdoc(thing)).get("Parameters")
    if lines is None:
        return
    heads = [line.partition(" :")[0] for line in lines if line and not line.startswith(" ")]
    described = [word.strip("* ") for head in heads for word in head.split(",")]
    own = [x for x in inspect.signature(thing).parameters if x[0] != "_"]  # those for users
    assert sorted(described) == sorted(own)
