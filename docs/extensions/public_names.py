"""Sphinx: the reference. Its pages are written from the package's own lists of public names.

For each group of names there is a page `generated/reference/<group>.rst` with a table
(autosummary), and for each name a page made from its docstring (autodoc, numpydoc). A new name in
an `__all__` is in the reference without a change here: the file that defines it decides the group.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.ext.autodoc.mock import mock
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.inspect import stringify_signature
from writing import heading, write_if_changed

HERE = "generated/reference"


class Group(NamedTuple):
    """A page of the reference.

    files : of the names of `linattn.__all__`, those whose file begins so
    modules : all public names of these modules, with the docstrings of the modules
    """

    name: str
    title: str
    says: str
    files: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


# A name goes into the first group that has its file. `linattn.` is every other file.
GROUPS = (
    Group(
        "ops",
        "Ops",
        "Each op is three functions: a whole sequence, one token, the gradients. "
        "The table of the ops, and a step that is bound to its arrays, are here too.",
        ("linattn.ops", "linattn.variants", "linattn._linattn"),
    ),
    Group(
        "systems",
        "Systems",
        "Systems that are an op with arithmetic around it, in the letters of their authors.",
        ("linattn.composed",),
    ),
    Group(
        "scans",
        "Scans and the convolution",
        "Recurrences that are diagonal in channels and states, and the short convolution in front "
        "of a mixer.",
        ("linattn.scans", "linattn.convolution"),
    ),
    Group(
        "features",
        "Feature maps",
        "Feature maps of linear attention.",
        ("linattn.features", "linattn.maps"),
    ),
    Group("gates", "linattn.gates", "", (), ("linattn.gates",)),
    Group(
        "configuration",
        "Configuration",
        "Threads, the precision of float32, and the questions about the GPU and the kernels.",
        ("linattn.config", "linattn.cuda", "linattn.kernels"),
        ("linattn.cuda",),
    ),
    Group(
        "analysis",
        "States and analysis",
        "States of a decoder, the numbers of an op for reading, and the cost of a call.",
        ("linattn.",),
    ),
    Group("reference", "linattn.reference", "", (), ("linattn.reference",)),
    Group("nn", "linattn.nn", "", (), ("linattn.nn",)),
    Group("distributed", "linattn.distributed", "", (), ("linattn.distributed",)),
    Group("onnx", "linattn.onnx", "", (), ("linattn.onnx",)),
    Group("plot", "linattn.plot", "", (), ("linattn.plot",)),
    Group("testing", "linattn.testing", "", (), ("linattn.testing",)),
    Group(
        "compat",
        "linattn.compat",
        "",
        (),
        ("linattn.compat", "linattn.compat.fla", "linattn.compat.transformers"),
    ),
)


def file_of(value: Any) -> str:
    """The module that defines a public value: a class, a function, a module, or a constant."""
    if inspect.ismodule(value):
        return value.__name__
    if isinstance(value, type) or callable(value):
        # types of the C extension say that they are the package's
        return "linattn._linattn" if value.__module__ == "linattn" else value.__module__
    return _assigned(value)[0]


def _assigned(value: Any) -> tuple[str, list[str]]:
    """The module that assigns a constant and says in a comment what it is, and that comment."""
    for module in [name for name in sys.modules if name.split(".")[0] == "linattn"]:
        for name, here in vars(sys.modules[module]).items():
            if here is value and getattr(sys.modules[module], "__file__", "").endswith(".py"):
                comment = ModuleAnalyzer.for_module(module).find_attr_docs().get(("", name))
                if comment:
                    return module, comment
    raise ValueError(f"a public constant without a comment that begins with #: {value!r}")


def groups() -> Iterator[tuple[Group, dict[str, list[str]]]]:
    """(group, {module: its public names in the order of the page})."""
    left = dict.fromkeys(importlib.import_module("linattn").__all__)
    order = {op: i for i, op in enumerate(importlib.import_module("linattn").OPS)}

    def place(name: str) -> tuple[int, str]:
        op = name.removesuffix("_step").removesuffix("_backward")
        return order.get(op, len(order)), name if op in order else name.lower()

    for group in GROUPS:
        found: dict[str, list[str]] = {}
        if group.files:
            package = importlib.import_module("linattn")
            mine = [
                name for name in left if file_of(getattr(package, name)).startswith(group.files)
            ]
            for name in mine:
                del left[name]
            found["linattn"] = sorted(mine, key=place)
        for module in group.modules:
            names = getattr(importlib.import_module(module), "__all__", [])
            found[module] = list(names)
        yield group, found
    assert not left, f"names in no group: {list(left)}"


def page(group: Group, names: dict[str, list[str]]) -> str:
    lines = [heading(group.title), group.says, ""]
    for module, its in names.items():
        if module in group.modules:
            if len(names) > 1:
                lines += [heading(module, "-")]
            lines += [f".. automodule:: {module}", "   :no-members:", ""]
        lines += [f".. currentmodule:: {module}", ""]
        shown = [name for name in its if f"{module}.{name}" not in names]  # not modules of groups
        if shown:
            lines += [".. autosummary::", "   :toctree:", "   :nosignatures:", ""]
            lines += [*(f"   {name}" for name in shown), ""]
    return "\n".join(lines)


def write(app: Sphinx, config: Config) -> None:
    to = Path(app.srcdir) / HERE
    with mock(config.autodoc_mock_imports):
        pages = {group: page(group, names) for group, names in groups()}
    for group, text in pages.items():
        write_if_changed(to / f"{group.name}.rst", text)
    index = [heading("Reference")]
    index += [
        "Every public name, with the text of its docstring. :doc:`/api` is the guide: shapes,",
        "states, gates and errors of all ops together.",
        "",
        ".. toctree::",
        "   :maxdepth: 2",
        "",
        *(f"   {group.name}" for group in pages),
    ]
    write_if_changed(to / "index.rst", "\n".join(index) + "\n")


def comment_of_a_constant(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """A constant of another file has its comment there. Autodoc would show its type's docstring."""
    if what in ("data", "attribute") and not inspect.ismodule(value):
        lines[:] = _assigned(value)[1]


def signature_of_a_class(
    app: Sphinx, what: str, name: str, value: Any, options: Any, given: str, returned: Any
) -> tuple[str, None] | None:
    """Of a layer: that of its own `__init__`. Where PyTorch is not there, its base has another."""
    if what != "class" or not inspect.isfunction(vars(value).get("__init__")):
        return None
    own = inspect.signature(value.__init__)
    own = own.replace(parameters=list(own.parameters.values())[1:])
    return stringify_signature(own, show_annotation=False), None


def is_left_out(
    app: Sphinx, what: str, name: str, value: Any, skip: bool, options: Any
) -> bool | None:
    """The fields of a NamedTuple, which its docstring has; and functions of other libraries."""
    of_others = callable(value) and not str(getattr(value, "__module__", "")).startswith("linattn")
    return True if of_others or type(value).__name__ == "_tuplegetter" else None


def without_what_is_refused(
    app: Sphinx, kind: str, name: str, value: Any, options: Any, signature: str | None, returns: Any
) -> tuple[str, Any] | None:
    """Ops refuse unknown keywords by a parameter **_unknown, which is not for users."""
    if signature is None or "**_unknown" not in signature:
        return None
    return signature.replace(", **_unknown", ""), returns


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", write)  # before Sphinx looks which pages there are
    app.connect("autodoc-process-docstring", comment_of_a_constant, priority=100)
    app.connect("autodoc-process-signature", signature_of_a_class)
    app.connect("autodoc-process-signature", without_what_is_refused)
    app.connect("autodoc-skip-member", is_left_out)
    return {"parallel_read_safe": True}
