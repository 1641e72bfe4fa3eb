"""What a run writes down as it trains: three CSV files, and TensorBoard's events.

`metrics.csv` has a line per epoch, `fields.csv` one per epoch and field, `norms.csv` one per epoch
and bin of gradient norms. All only grow (`growing_files.py`), and what is written depends on the
step alone, so that a run that was interrupted leaves the same lines as one that was not.
"""

from __future__ import annotations

import csv
import itertools
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.training.growing_files import EVENTS, FIELDS, METRICS, NORMS


class Logbook:
    """The files of one run folder; a context manager that closes them.

    Events are written as `tf.summary.scalar` would, but without its ten tensors for each: on Python
    3.11 TensorFlow 2.12 keeps 48 bytes of every eager tensor for ever.

    Args:
        run: the folder, which has them from a checkpoint on or not at all.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        (run / EVENTS).mkdir(exist_ok=True)
        path = _new_event_file(run / EVENTS)
        path.touch()  # where it may not be: an error that names it
        self._events = tf.io.TFRecordWriter(str(path))
        self._write(file_version="brain.Event:2")

    def __enter__(self) -> Logbook:
        return self

    def __exit__(self, *_: object) -> None:
        self._events.close()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """What TensorBoard shows of an update: tag → value. It is in the file on return."""
        shown = [_scalar(tag, value) for tag, value in values.items()]
        self._write(step=step, summary=tf.compat.v1.Summary(value=shown))

    def _write(self, **content: Any) -> None:
        event = tf.compat.v1.Event(wall_time=time.time(), **content)
        self._events.write(event.SerializeToString())
        self._events.flush()

    def epoch(
        self,
        row: Mapping[str, Any],
        fields: Sequence[Mapping[str, Any]],
        norms: Sequence[Mapping[str, Any]],
    ) -> None:
        """A line of `metrics.csv`, and those of its fields and of the bins of its gradient norms.

        Columns are those of the first one.
        """
        self._append(METRICS, [row])
        self._append(FIELDS, [{"epoch": row["epoch"], **field} for field in fields])
        self._append(NORMS, [{"epoch": row["epoch"], **bin_} for bin_ in norms])

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        path = self._run / name
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            if new:
                writer.writeheader()
            writer.writerows(rows)


class NoLogbook(Logbook):
    """What a rank writes down that is not the first: nothing."""

    def __init__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def _write(self, **content: Any) -> None: ...

    def _append(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...


def _new_event_file(folder: Path) -> Path:
    """Named as TensorFlow does: by the second, the machine, the process, and a number."""
    begun = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
    names = (folder / f"{begun}.{number}.v2" for number in itertools.count())
    return next(path for path in names if not path.exists())


def _scalar(tag: str, value: float) -> tf.compat.v1.Summary.Value:
    shown = tf.compat.v1.Summary.Value(tag=tag)
    shown.metadata.plugin_data.plugin_name = "scalars"  # the page of TensorBoard's
    shown.tensor.dtype = tf.float32.as_datatype_enum
    shown.tensor.float_val.append(value)
    return shown
