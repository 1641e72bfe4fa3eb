# SPDX-License-Identifier: Apache-2.0
"""Tables of text for the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain-text table: first column to the left, all others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def show(line: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        return "  ".join((first, *rest)).rstrip()

    return "\n".join([show(header), "  ".join("-" * w for w in widths), *map(show, rows)])
