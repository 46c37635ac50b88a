"""Sphinx: a picture with sliders, whose frames are all computed when the site is built.

The directive `frames` with the name of a function of widgets.py writes its controls and every frame
as HTML. `_static/frames.js` shows the frame that the controls ask for. Without JavaScript the first
frame is shown.
"""

import html
import itertools
from typing import Any

import widgets
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def control(name: str, n: int, given: widgets.Slider | widgets.Choice) -> str:
    at = f"{name}-{n}"
    label = f'<label for="{at}">{html.escape(given.label)}</label>'
    if isinstance(given, widgets.Choice):
        options = "".join(
            f'<option value="{i}">{html.escape(text)}</option>'
            for i, text in enumerate(given.texts)
        )
        return f'<div class="frames-control">{label}<select id="{at}">{options}</select></div>'
    # a reader hears the text of a value, not its number
    texts = html.escape("|".join(given.texts))
    return (
        f'<div class="frames-control">{label}<input type="range" id="{at}" min="0" '
        f'max="{len(given.texts) - 1}" value="0" step="1" data-texts="{texts}" '
        f'aria-valuetext="{html.escape(given.texts[0])}"><span>{html.escape(given.texts[0])}</span>'
        "</div>"
    )


def as_html(name: str, widget: widgets.Widget) -> str:
    controls = "".join(control(name, n, one) for n, one in enumerate(widget.controls))
    names = " ".join(f"{name}-{n}" for n in range(len(widget.controls)))
    frames = []
    for at in itertools.product(*(range(len(one.texts)) for one in widget.controls)):
        frame = widget.frame(*at)
        hidden = " hidden" if any(at) else ""
        frames.append(
            f'<div class="frames-frame" data-at="{",".join(map(str, at))}" '
            f'data-says="{html.escape(frame.says)}"{hidden}>{frame.body}</div>'
        )
    first = widget.frame(*(0 for _ in widget.controls)).says
    return (
        f'<div class="frames" id="{name}" role="group" aria-label="{html.escape(widget.title)}">'
        f'<div class="frames-controls" hidden>{controls}</div>'
        "<noscript><p>The controls need JavaScript. This is the first picture.</p></noscript>"
        f'<output class="frames-says" for="{names}" aria-live="polite">'
        f"{html.escape(first)}</output>{''.join(frames)}</div>"
    )


class Frames(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        self.env.note_dependency(widgets.__file__)
        return [nodes.raw("", as_html(name, widgets.WIDGETS[name]()), format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("frames", Frames)
    app.add_js_file("frames.js", loading_method="defer")
    return {"parallel_read_safe": True}
