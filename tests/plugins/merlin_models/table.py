"""The table "what works" of the documentation, from what each family did."""

from __future__ import annotations

from collections.abc import Mapping

from .families import Family

MARKS = ("<!-- python -m tests.plugins.merlin_models prints this -->", "<!-- to here -->")


def table(failures: Mapping[Family, str | None]) -> str:
    """One line a family: its tables, and whether its step and its saved copy are right."""
    lines = ["| model | its embedding tables | one step | saved and loaded |", "|---|---|---|---|"]
    for family, failed in failures.items():
        step = "no" if failed == "step" else "exact and lazy, in a graph and eagerly"
        saved = "no" if failed else "yes"
        if family.stock_bug and not failed:
            saved = f"not by Merlin, with Adam neither: {family.stock_bug}"
        lines.append(f"| {family.name} | {family.tables} | {step} | {saved} |")
    return "\n".join(lines)
