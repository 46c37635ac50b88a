"""Sphinx: the site. `make docs` builds it, and docs/test_site.py tests it in a browser."""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))
import gallery

project = "linattn"
extensions = [
    "myst_nb",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx_design",
    "frames",
    "gallery",
    "public_names",
    "repository_pages",
]
# autosummary writes its pages with the first suffix
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb", ".ipynb": "myst-nb"}
exclude_patterns = ["_static", "_templates", "extensions"]
templates_path = ["_templates"]
nitpicky = True
highlight_language = "text"  # formulas of docstrings are not Python; examples with >>> are
nitpick_ignore = [("py:class", "fractions.Fraction")]

# Markdown: formulas in dollars, links to headings as the pages have them on GitHub
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 4

# Docstrings. The types are in their text.
autodoc_typehints = "none"
autodoc_inherit_docstrings = False  # a method of linattn.nn would have PyTorch's
autodoc_member_order = "bysource"
autosummary_ignore_module_all = False
numpydoc_show_class_members = False
# The reference of linattn.nn needs no PyTorch, only its names.
has_torch = importlib.util.find_spec("torch") is not None
autodoc_mock_imports = [] if has_torch else ["torch", "linattn.autograd"]

# Notebooks are stored without outputs, and run here if all that they import is installed.
nb_execution_mode = "force"  # a cache does not see that linattn has changed
nb_execution_excludepatterns = gallery.not_to_run()
nb_execution_raise_on_error = True
nb_execution_timeout = 120

html_theme = "pydata_sphinx_theme"
html_title = "linattn"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
# These pages have none below them.
html_sidebars = {
    page: [] for page in ("*", "generated/*", "generated/benchmarks/**", "generated/csrc/**")
}
html_theme_options = {
    "header_links_before_dropdown": 6,
    "navbar_align": "left",
    "show_prev_next": True,
    "show_toc_level": 2,
    "navigation_depth": 3,
    "footer_start": [],
    "footer_end": [],
}
