# SPDX-License-Identifier: Apache-2.0
"""What a run logs: TensorBoard's events as it trains, and three CSV files after each epoch."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

METRICS, FIELDS, NORMS, EVENTS = "metrics.csv", "fields.csv", "norms.csv", "logs"


class Logbook:
    """TensorBoard's events of one run; a context manager that opens and closes their file.

    By TensorBoard's own writer, since `tf.summary.scalar` leaks memory on Python 3.11.

    Args:
      run: the folder; `None` to write nothing, as of a trial, and of a rank that is not the first.
    """

    def __init__(self, run: Path | None) -> None:
        self._run = run
        self._events: Any = None

    def __enter__(self) -> Logbook:
        if self._run is not None:
            from tensorboard.summary import Writer  # type: ignore[import-untyped]

            self._events = Writer(str(self._run / EVENTS))
        return self

    def __exit__(self, *_: object) -> None:
        if self._events is not None:
            self._events.close()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """What TensorBoard shows of an update: tag → value. It is in the file on return."""
        if self._events is not None:
            for tag, value in values.items():
                self._events.add_scalar(tag, value, step)
            self._events.flush()


def write_csv(run: Path, tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write CSV files into a run, by name: all of their rows, whose columns are the first one's."""
    for name, rows in tables.items():
        partial = run / f".{name}.partial"
        with partial.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        os.replace(partial, run / name)
