"""Docstrings, which are Markdown, as Sphinx's autodoc takes them: fenced code becomes a block."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

FENCE = re.compile(r"^(\s*)```(\w*)\s*$")


def with_blocks(lines: list[str]) -> list[str]:
    """The lines with each fence as a directive, what it holds indented beneath."""
    made: list[str] = []
    inside = False
    for line in lines:
        fence = FENCE.match(line)
        if fence is None:
            made.append(f"   {line}" if inside and line else line)
            continue
        inside = not inside
        made += ["", f"{fence[1]}.. code-block:: {fence[2] or 'text'}", ""] if inside else [""]
    return made


def convert(
    app: Sphinx, what: str, name: str, of: object, options: object, lines: list[str]
) -> None:
    """Before Napoleon, which would take a fence for text."""
    lines[:] = with_blocks(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("autodoc-process-docstring", convert, priority=400)
    return {"parallel_read_safe": True}
