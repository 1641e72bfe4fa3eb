"""Files of a run that only grow, and are cut back to what they were at a checkpoint.

So the CSV files and TensorBoard's events of a run that was killed and goes on hold each line once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import remove

METRICS, FIELDS, NORMS, EVENTS = GROWING = ("metrics.csv", "fields.csv", "norms.csv", "logs")
_EVENT_FILES = "events.out.tfevents.*"  # TensorFlow's name; what else is in that folder is a user's


def lengths(run: Path) -> dict[str, int]:
    """The files' lengths in bytes, by path in the run; what writes them must have flushed them."""
    found = {}
    for name in GROWING:
        place = run / name
        for path in sorted(place.glob(_EVENT_FILES)) if place.is_dir() else [place]:
            if path.is_file():
                found[path.relative_to(run).as_posix()] = path.stat().st_size
    return found


def check_lengths(run: Path, to: Mapping[str, int]) -> None:
    """Refuse files that cannot be cut back to these lengths.

    Raises:
        UserError: one is gone or shorter.
    """
    now = lengths(run)
    for name, length in to.items():
        if now.get(name, -1) < length:
            found = "which is gone" if name not in now else f"of {now[name]:,} bytes"
            raise UserError(
                "what a run has logged must be there for it to go on. Received: "
                f"{run / name}, {found}, which had {length:,} bytes. Put it back, or train again"
            )


def cut_back(run: Path, to: Mapping[str, int]) -> None:
    """Cut the files to these lengths, and remove those of which there is none.

    Raises:
        UserError: one is gone or shorter; nothing was cut then.
    """
    check_lengths(run, to)
    for name in lengths(run):
        if name in to:
            os.truncate(run / name, to[name])
        else:
            remove(run / name)
