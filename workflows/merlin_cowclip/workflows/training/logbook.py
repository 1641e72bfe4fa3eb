"""What a run writes down as it trains: `metrics.csv`, a line per epoch, and TensorBoard's events.

Both only grow (`growing_files.py`), and what is written depends on the step alone, so that a run
that was interrupted leaves the same lines as one that was not.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins._stack import tf

METRICS, EVENTS = "metrics.csv", "logs"


class Logbook:
    """The files of one run folder; a context manager that closes them.

    Args:
        run: the folder, which has them from a checkpoint on or not at all.
    """

    def __init__(self, run: Path) -> None:
        self._metrics = run / METRICS
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

    def epoch(self, row: Mapping[str, Any]) -> None:
        """A line of `metrics.csv`; its columns are those of the first one."""
        new = not self._metrics.exists()
        with self._metrics.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)

    def flush(self) -> None:
        """To the files."""
        self._writer.flush()
