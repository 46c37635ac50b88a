"""Sphinx: the pages of this folder, as they are."""

project = "linattn"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["decisions/template.md"]
suppress_warnings = ["myst.xref_missing"]
html_theme = "alabaster"
