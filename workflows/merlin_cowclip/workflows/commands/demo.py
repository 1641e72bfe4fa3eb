"""The command demo; what it does is `demonstration.py`'s."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from merlin_cowclip.workflows.commands.parser import Commands


def add(commands: Commands) -> None:
    """The command, with its arguments."""
    demo = commands.add_parser(
        "demo", help="synthetic logs → prepare → train with a small and a large batch → compare"
    )
    demo.add_argument("--out", type=Path, help="the folder to write (default runs/demo-TIME)")
    demo.add_argument("--rows", type=int, help="synthetic rows (default: minutes on 2 cores)")
    demo.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.commands.demonstration import ROWS, demo

    out = arguments.out
    if out is None:
        out = Path("runs") / f"demo-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    rows = ROWS if arguments.rows is None else arguments.rows
    demo(out, rows=rows)
