"""What a run writes down as it trains: two CSV files, and TensorBoard's events.

`metrics.csv` has a line per epoch, `fields.csv` one per epoch and field. All only grow
(`growing_files.py`), and what is written depends on the step alone, so that a run that was
interrupted leaves the same lines as one that was not.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.workflows.training.growing_files import EVENTS, FIELDS, METRICS


class Logbook:
    """The files of one run folder; a context manager that closes them.

    Args:
        run: the folder, which has them from a checkpoint on or not at all.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._writer = tf.summary.create_file_writer(str(run / EVENTS))

    def __enter__(self) -> Logbook:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """What TensorBoard shows of an update: tag → value."""
        with self._writer.as_default(step):
            for tag, value in values.items():
                tf.summary.scalar(tag, value)

    def epoch(self, row: Mapping[str, Any], fields: Sequence[Mapping[str, Any]]) -> None:
        """A line of `metrics.csv`, and those of its fields; columns are those of the first one."""
        self._append(METRICS, [row])
        self._append(FIELDS, [{"epoch": row["epoch"], **field} for field in fields])

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        path = self._run / name
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            if new:
                writer.writeheader()
            writer.writerows(rows)

    def flush(self) -> None:
        """To the files."""
        self._writer.flush()
