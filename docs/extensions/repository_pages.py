"""Sphinx: pages of the repository that are outside of docs/, and links to files outside of it.

A page outside of docs/ that the site has is included by a page of docs/generated. Links in pages
are written for the repository: they lead to the files beside the page. Here a link to a page
becomes a link to where the site has it, and a link to another file lets the reader download it.
"""

import os.path
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.transforms import SphinxTransform
from writing import write_if_changed

TOP = Path(__file__).resolve().parents[2]
README = "README.md"  # the page `index` includes it
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "csrc/cuda/README.md")
RESULTS = "benchmarks/results/*.md"


def included() -> dict[str, str]:
    """{a file of the repository: the page that includes it}."""
    files = [*PAGES, *(str(path.relative_to(TOP)) for path in sorted(TOP.glob(RESULTS)))]
    return {README: "index"} | {
        file: f"generated/{file.removesuffix('.md').lower()}" for file in files
    }


def write(app: Sphinx, config: Config) -> None:
    for file, docname in included().items():
        if file != README:
            to = Path(app.srcdir) / f"{docname}.md"
            path = os.path.relpath(TOP / file, to.parent)
            # the table of contents has some of them; links lead to all of them
            text = f"---\norphan: true\n---\n\n```{{include}} {path}\n:relative-images:\n```\n"
            write_if_changed(to, text)


class Links(SphinxTransform):
    """Links of a page, seen from the place of its text in the repository."""

    default_priority = 5  # before the downloads are collected

    def apply(self, **how: Any) -> None:
        self.pages = included()
        sources = {docname: file for file, docname in self.pages.items()}
        self.docs = Path(os.fspath(self.env.srcdir))
        here = sources.get(self.env.docname)
        self.folder = (TOP / here if here else Path(self.env.doc2path(self.env.docname))).parent
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node.get("reftype") == "myst":
                self.see(node)
        for node in list(self.document.findall(addnodes.download_reference)):
            self.see(node)

    def see(self, node: nodes.Element) -> None:
        target, _, anchor = node["reftarget"].partition("#")
        if node.get("refdomain") == "doc":
            if target in self.env.found_docs:
                return
            # MyST has found a file, and took its suffix away
            place, anchor = Path(f"{target}.md"), node.get("reftargetid") or ""
        elif not target:
            return  # within the page
        else:
            place = self.folder / target
        place = Path(os.path.normpath(place))
        if place.is_dir() and (place / "index.md").exists():
            place = place / "index.md"
        if docname := self.docname(place):
            node.replace_self(self.to_page(node, docname, anchor))
        elif place.is_file():
            node.replace_self(self.to_file(node, place))

    def docname(self, place: Path) -> str | None:
        if place.is_relative_to(TOP) and (page := self.pages.get(str(place.relative_to(TOP)))):
            return page
        docname = self.env.path2doc(str(place))
        return docname if docname in self.env.found_docs else None

    def to_page(self, node: nodes.Element, docname: str, anchor: str) -> nodes.Element:
        return addnodes.pending_xref(
            "",
            *node.children,
            refdomain="doc",
            reftype="myst",
            reftarget=docname,
            reftargetid=anchor or None,
            refdoc=self.env.docname,
            # a path as the text of a link: the site has the title of the page
            refexplicit=node.get("refexplicit", True) and not node.astext().endswith(".md"),
        )

    def to_file(self, node: nodes.Element, place: Path) -> nodes.Element:
        return addnodes.download_reference(
            "",
            *node.children,
            refdomain=None,
            reftype="myst",
            # relative to the page, as Sphinx expects it
            reftarget="/" + os.path.relpath(place, self.docs),
            refdoc=self.env.docname,
            refexplicit=True,
        )


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("config-inited", write)  # before Sphinx looks which pages there are
    app.add_transform(Links)
    return {"parallel_read_safe": True}
