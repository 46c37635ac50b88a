"""Sphinx: the gallery of the notebooks. Title, sentence and picture of a card are the notebook's.

The directive `gallery` makes a card of every notebook beside its page. When the page is written,
all notebooks have been run, and a card gets the last picture of its notebook.
"""

import html
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def opening(path: Path) -> tuple[str, str]:
    """The title of a notebook, and the first sentence below it."""
    cells = json.loads(path.read_text())["cells"]
    text = "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "markdown"))
    found = re.match(r"#\s+(.+?)\n\s*\n(.+?[.!?])(?=\s|$)", text, re.DOTALL)
    if not found:
        raise ValueError(f"{path}: expected a first cell with a title and a sentence")
    return found[1], " ".join(found[2].split())


def missing(path: Path) -> str | None:
    """A package that the notebook imports and this environment does not have."""
    found = re.findall(r"^(?:import|from) (\w+)", code(path), re.MULTILINE)
    return next((name for name in found if importlib.util.find_spec(name) is None), None)


def not_to_run() -> list[str]:
    """The notebooks that miss a package, by their paths within docs/."""
    folder = Path(__file__).parents[1]
    notebooks = sorted(folder.glob("notebooks/*.ipynb"))
    return [str(path.relative_to(folder)) for path in notebooks if missing(path)]


def code(path: Path) -> str:
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


class CardPicture(nodes.General, nodes.Element):
    """The place of a picture: of the notebook `docname`."""


class Gallery(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        folder = Path(self.env.doc2path(self.env.docname)).parent
        notebooks = sorted(folder.glob("*.ipynb"))
        lines = ["::::{grid} 1 2 2 3", ":gutter: 3", ""]
        for path in notebooks:
            title, sentence = opening(path)
            if missing(path):
                sentence += f" It was not run: {missing(path)} was not there."
            self.env.note_dependency(str(path))
            lines += [
                f":::{{grid-item-card}} {title}",
                f":link: {path.stem}",
                ":link-type: doc",
                "",
                "```{card-picture} " + path.stem,
                "```",
                "",
                sentence,
                ":::",
                "",
            ]
        lines += ["::::", "", "```{toctree}", ":hidden:", ""]
        lines += [*(path.stem for path in notebooks), "```"]
        return self.parse_text_to_nodes("\n".join(lines))


class PlaceOfPicture(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        folder = self.env.docname.rpartition("/")[0]
        return [CardPicture(docname=f"{folder}/{self.arguments[0]}")]


def draw(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    for place in list(doctree.findall(CardPicture)):
        pictures = [
            image["candidates"]["*"] if "*" in image.get("candidates", {}) else image["uri"]
            for image in app.env.get_doctree(place["docname"]).findall(nodes.image)
        ]
        if pictures:
            image = nodes.image(uri=pictures[-1], alt="", classes=["card-picture"])
            image["candidates"] = {"*": pictures[-1]}
            place.replace_self(image)
            app.env.images.add_file(docname, pictures[-1])
        else:
            word = html.escape(place["docname"].rpartition("/")[2].replace("-", " "))
            text = f'<p class="card-picture" aria-hidden="true">{word}</p>'
            place.replace_self(nodes.raw("", text, format="html"))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_node(CardPicture)
    app.add_directive("gallery", Gallery)
    app.add_directive("card-picture", PlaceOfPicture)
    app.connect("doctree-resolved", draw)
    return {"parallel_read_safe": True}
