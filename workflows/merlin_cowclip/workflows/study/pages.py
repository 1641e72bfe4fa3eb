"""The page that `report` and `demo` write: one HTML file that needs no network."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.errors import UserError


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
      text: the first line.
      small: the second line.
      links: addresses of runs: of one, which the text links to, or of several, in the second line.
      kind: its CSS class: "paper" for a number that is not ours.
    """

    text: str
    small: str = ""
    links: Sequence[str] = ()
    kind: str = ""


Row = Sequence[str | Cell]


@dataclass
class Table:
    """A table: its header and its rows."""

    header: Row
    rows: Sequence[Row]
    words: bool = False  # text that may wrap, not numbers


@dataclass
class Section:
    """What a page says on one question.

    Attributes:
      name: its anchor.
      title: the question.
      paper: where the paper asks it.
      runs: how many have ended.
      verdict: the answer.
      doubt: why there is no answer.
      plots: title and SVG of each.
      command: what prints the numbers again.
    """

    name: str
    title: str
    paper: str = ""
    runs: str = ""
    verdict: str = ""
    doubt: str = ""
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: list[tuple[str, str]] = field(default_factory=list)
    command: str = ""


def write_page(
    path: Path,
    title: str,
    sections: Sequence[Section],
    configs: Iterable[Mapping[str, Any]],
    headline: str = "",
) -> Path:
    """Write a page so that a reader sees either the last one or this one.

    Args:
      path: the file, which is returned.
      title: of the page.
      sections: with a summary of them first, where there is no headline.
      configs: `config.json` of the runs, for a list of data, versions and machines.
      headline: what to conclude.

    Raises:
      UserError: it cannot be written.
    """
    from jinja2 import Environment, FileSystemLoader

    folder = FileSystemLoader(Path(__file__).parent / "templates")
    template = Environment(loader=folder, autoescape=True).get_template("page.html.j2")
    text = template.render(title=title, headline=headline, facts=_facts(configs), sections=sections)
    partial = path.with_name(f".{path.name}.partial")
    try:
        # A path's odd bytes, as `write_json` has them.
        partial.write_text(text, "utf-8", errors="backslashreplace")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"a report must be written. Received: {path}: {error}") from error
    return path


def _facts(configs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The date, and what the runs are of; where they differ, all of it."""
    found: dict[str, dict[str, None]] = {}
    for config in configs:
        rows, machine = config["rows"], config["machine"]
        gpus = ", ".join(machine.get("gpus", ())) or "none"
        mlp = ",".join(map(str, config.get("mlp") or ()))
        now = {
            "data": f"{config['dataset']}, {config['data']}",
            "rows": f"{rows['train']:,} for training, {rows['test']:,} for testing",
            "embedding rows": f"{config['table_rows']:,} in {len(config['cardinalities'])} fields",
            "network": f"{config['model']}{mlp and f', MLP {mlp}'}",
            "epochs": str(config.get("epochs", "")),
            "machine": f"{machine.get('processor') or machine['platform']}, "
            f"{machine['cpus']} CPUs, GPUs: {gpus}",
            "versions": ", ".join(f"{name} {of}" for name, of in config["versions"].items()),
        }
        for key, value in now.items():
            found.setdefault(key, {})[value] = None
    today = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
    return {"date": today, **{key: "; ".join(values) for key, values in found.items()}}
