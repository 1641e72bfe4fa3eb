# SPDX-License-Identifier: Apache-2.0
"""The page that `report`, `batch-size` and `demo` write: one HTML file that needs no network."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from merlin_cowclip.workflows.data.prepared_data import PARTS, TITLES
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import replacing


class Cell(NamedTuple):
    """A cell of a table: its text, a second line, and addresses of the runs that it is of."""

    text: str
    small: str = ""
    links: Sequence[str] = ()


Row = Sequence[str | Cell]


class Table(NamedTuple):
    """A table: its header and its rows."""

    header: Row
    rows: Sequence[Row]
    words: bool = False  # text that may wrap, not numbers


@dataclass
class Section:
    """What a page says on one question."""

    name: str  # its anchor
    title: str
    runs: str = ""  # how many have ended
    verdict: str = ""
    doubt: str = ""  # why there is no verdict
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: list[tuple[str, str]] = field(default_factory=list)  # title and SVG
    command: str = ""  # what prints the numbers again


_BASE = ("base_batch_size", "dense_lr", "embedding_lr", "l2")  # of a configuration


def write_page(
    path: Path,
    title: str,
    sections: Sequence[Section],
    configs: Iterable[Mapping[str, Any]],
    headline: str = "",
) -> Path:
    """Write a page so that a reader sees either the last one or this one; returns its path.

    A headline says what to conclude; without one the page begins with a summary of its sections.
    Data, versions and machines are listed from the `config.json` of the runs.
    """
    from jinja2 import Environment, FileSystemLoader

    folder = FileSystemLoader(Path(__file__).parent / "templates")
    template = Environment(loader=folder, autoescape=True).get_template("page.html.j2")
    text = template.render(title=title, headline=headline, facts=_facts(configs), sections=sections)
    try:
        with replacing(path) as partial:  # a path's odd bytes, as `write_json` has them
            partial.write_text(text, "utf-8", errors="backslashreplace")
    except OSError as error:
        raise UserError(f"a report must be written. Received: {path}: {error}") from error
    return path


def _facts(configs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The date, and what the runs are of; where they differ, all of it."""
    found: dict[str, list[str]] = {"date": [f"{datetime.datetime.now():%Y-%m-%d %H:%M}"]}
    for config in configs:
        rows, machine = config["rows"], config["machine"]
        gpus = ", ".join(machine.get("gpus", ())) or "none"
        cpu = f"{machine.get('processor') or machine['platform']}, {machine['cpus']} CPUs"
        mlp = ",".join(map(str, config.get("mlp") or ()))
        for key, value in {
            "data": f"{config['dataset']}, {config['data']}",
            "rows": ", ".join(f"{rows[part]:,} {TITLES[part]}" for part in PARTS),
            "embedding rows": f"{config['table_rows']:,} in {len(config['cardinalities'])} fields",
            "network": f"{config['model']}{mlp and f', MLP {mlp}'}",
            "epochs": str(config.get("epochs", "")),
            "base": ", ".join(f"{name} {config[name]:,.6g}" for name in _BASE if name in config),
            "machine": f"{cpu}, GPUs: {gpus}",
            "versions": ", ".join(f"{name} {of}" for name, of in config["versions"].items()),
        }.items():
            found.setdefault(key, []).append(value)
    return {key: "; ".join(dict.fromkeys(values)) for key, values in found.items()}
