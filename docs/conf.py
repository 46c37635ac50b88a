"""Sphinx: the pages of this folder, as they are."""

project = "linattn"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3  # links to headings, as the pages have them on GitHub
suppress_warnings = ["myst.xref_missing"]  # links to files outside of this folder
html_theme = "alabaster"
