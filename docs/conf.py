"""The documentation site: `make docs` builds it, without the network and without a warning."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "extensions"))

project = "merlin-cowclip"
author = "The merlin-cowclip authors"
copyright = author
release = importlib.metadata.version(project)

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docstrings",
    "links",
    "public_names",
]
exclude_patterns = ["_build", "extensions"]

myst_heading_anchors = 4  # as GitHub has them
nb_execution_mode = "force"  # in git they have no outputs
nb_execution_timeout = 900  # seconds per cell
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_merge_streams = True
smartquotes = False  # quotes in messages and code stay as printed
highlight_language = "text"  # a block without a language: what a command prints

default_role = "code"  # docstrings are Markdown, where `x` is code
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True  # no entry of their own for attributes, which may be properties
napoleon_use_rtype = False

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_sphinx = False
