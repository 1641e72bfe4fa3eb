"""Sections of tables, plots and sentences as one HTML page."""

from __future__ import annotations

import csv
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.training.logbook import METRICS, NORMS

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --faint: #77808a; --line: #d0d7de }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --paper: #0d1117; --line: #30363d } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif }
h1 { line-height: 1.2 } h2 { margin-top: 3rem }
.table { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap }
th:first-child, td:first-child { text-align: left }
td a { color: var(--faint); font-size: 0.7rem; vertical-align: super; text-decoration: none }
em, figcaption, .note, dt { color: var(--faint) }
.verdict { font-size: 1.1rem; border-left: 4px solid #0072b2; padding-left: 1rem }
figure { margin: 1.5rem 0 } svg { width: 100%; max-width: 42rem; height: auto }
pre { overflow-x: auto; padding: 0.7rem; border: 1px solid var(--line); font-size: 0.8rem }
dt { float: left; clear: left; width: 6rem } dd { margin-left: 6rem; overflow-wrap: anywhere }
@media print { body { max-width: none; font-size: 11px } h2 { break-after: avoid }
  figure, table { break-inside: avoid } :root { --ink: #000; --paper: #fff } }
""".strip()


@dataclass
class Section:
    """What a page says of one question.

    Attributes:
      title: the question.
      paper: where the paper asks it; may be empty, as may be the verdict and the command.
      verdict: the answer, in a sentence or two.
      header, rows: the table, in Markdown's words.
      notes: sentences below it.
      plots: title and SVG of each.
      command: what prints the numbers again.
    """

    title: str
    paper: str
    verdict: str
    header: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    plots: list[tuple[str, str]] = field(default_factory=list)
    command: str = ""


def facts(configs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """What runs were trained on, by which versions, on what machine; each where there are several.

    Args:
      configs: the runs' `config.json`s.
    """
    found: dict[str, list[str]] = {}
    for config in configs:
        rows = config["rows"]
        now = {
            "rows": f"{rows['train']:,} for training, {rows['test']:,} for testing",
            "table rows": (
                f"{config['table_rows']:,} in {len(config['cardinalities'])} "
                "fields, padding, missing and unknown among them"
            ),
            "versions": ", ".join(f"{k} {v}" for k, v in config["versions"].items()),
            "machine": ", ".join(
                f"{k}: {', '.join(v) or 'none' if isinstance(v, list) else v}"
                for k, v in config["machine"].items()
            ),
        }
        for key, value in now.items():
            if value not in found.setdefault(key, []):
                found[key].append(value)
    return {key: "; other runs: ".join(values) for key, values in found.items()}


def read_metrics(run: Path) -> list[dict[str, str]]:
    """A run's `metrics.csv`: a row for each epoch; what there is no value of is empty."""
    return _rows_of(run / METRICS)


def read_norms(run: Path) -> list[dict[str, str]]:
    """A run's `norms.csv`: a row for each epoch and bin."""
    return _rows_of(run / NORMS)


def _rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_page(path: Path, text: str) -> None:
    """Write a page so that a reader sees either the last one or this one."""
    partial = path.with_name(f".{path.name}.partial")
    # A path's odd bytes, as `write_json` has them.
    partial.write_text(text, encoding="utf-8", errors="backslashreplace")
    partial.replace(path)


def as_html(title: str, sections: Sequence[Section], about: Mapping[str, str]) -> str:
    """One page that needs nothing else: light and dark, on a phone and in print."""
    facts = "".join(
        f"<dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd>" for key, value in about.items()
    )
    body = "\n".join(_section(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{_STYLE}\n</style>\n"
        f"<h1>{html.escape(title)}</h1>\n<dl>{facts}</dl>\n{body}\n</html>\n"
    )


def _section(section: Section) -> str:
    head = "".join(f"<th>{_inline(cell)}</th>" for cell in section.header)
    rows = "\n".join(
        f"<tr>{''.join(f'<td>{_inline(cell)}</td>' for cell in row)}</tr>" for row in section.rows
    )
    figures = "\n".join(
        f"<figure>{svg}<figcaption>{html.escape(title)}</figcaption></figure>"
        for title, svg in section.plots
    )
    notes = "\n".join(f'<p class="note">{_inline(note)}</p>' for note in section.notes)
    paper = f" <em>{html.escape(section.paper)}</em>" if section.paper else ""
    verdict = f'<p class="verdict">{_inline(section.verdict)}</p>\n' if section.verdict else ""
    command = f"\n<pre>{html.escape(section.command)}</pre>" if section.command else ""
    return (
        f"<h2>{html.escape(section.title)}{paper}</h2>\n{verdict}"
        f'<div class="table"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n'
        f"</table></div>\n{notes}\n{figures}{command}"
    )


def _inline(text: str) -> str:
    """Markdown's code, emphasis and links in a line."""
    text = html.escape(text)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', text)
    return re.sub(r"^\*(.+)\*$", r"<em>\1</em>", text)
