"""What a run writes down as it trains: three CSV files, and TensorBoard's events.

`metrics.csv` has a line per epoch, `fields.csv` one per epoch and field, `norms.csv` one per epoch
and bin of gradient norms. A run that goes on cuts all back to where they were at its checkpoint.
"""

from __future__ import annotations

import csv
import itertools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import remove

METRICS, FIELDS, NORMS, EVENTS = "metrics.csv", "fields.csv", "norms.csv", "logs"
_EVENT_FILES = "events.out.tfevents.*"  # TensorFlow's name; what else is in that folder is a user's


class Logbook:
    """The files of one run folder; a context manager that opens and closes them.

    Events are written as `tf.summary.scalar` would, but without its ten tensors for each: on Python
    3.11 TensorFlow 2.12 keeps 48 bytes of every eager tensor for ever.

    Args:
      run: the folder; `None` to write nothing, as of a trial, and of a rank that is not the first.
    """

    def __init__(self, run: Path | None) -> None:
        self._run = run
        self._events: Any = None

    def __enter__(self) -> Logbook:
        if self._run is not None:
            from merlin_cowclip.plugins._tensorflow import tf

            (self._run / EVENTS).mkdir(exist_ok=True)
            path = _new_event_file(self._run / EVENTS)
            path.touch()  # where it may not be: an error that names it
            self._events = tf.io.TFRecordWriter(str(path))
            self._write(file_version="brain.Event:2")
        return self

    def __exit__(self, *_: object) -> None:
        if self._events is not None:
            self._events.close()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """What TensorBoard shows of an update: tag → value. It is in the file on return."""
        if self._events is not None:
            from merlin_cowclip.plugins._tensorflow import tf

            shown = [_scalar(tag, value) for tag, value in values.items()]
            self._write(step=step, summary=tf.compat.v1.Summary(value=shown))

    def _write(self, **content: Any) -> None:
        from merlin_cowclip.plugins._tensorflow import tf

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
        for name, rows in ((METRICS, [row]), (FIELDS, fields), (NORMS, norms)):
            if self._run is None or not rows:
                continue
            lines = [{"epoch": row["epoch"], **one} for one in rows]
            new = not (self._run / name).exists()
            with (self._run / name).open("a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(lines[0]))
                if new:
                    writer.writeheader()
                writer.writerows(lines)

    def lengths(self) -> dict[str, int]:
        """The files' lengths in bytes, by path in the run."""
        if self._run is None:
            return {}
        files = [self._run / name for name in (METRICS, FIELDS, NORMS)]
        files += sorted((self._run / EVENTS).glob(_EVENT_FILES))
        return {
            path.relative_to(self._run).as_posix(): path.stat().st_size
            for path in files
            if path.is_file()
        }

    def cut_back(self, to: Mapping[str, int], begin: Callable[[], None] = lambda: None) -> None:
        """Cut the files to these lengths, and remove the others.

        Args:
          to: what `lengths` gave.
          begin: called before anything is changed.

        Raises:
          UserError: one is gone or shorter; nothing was changed then.
        """
        now = self.lengths()
        assert self._run is not None
        for name, length in to.items():
            if now.get(name, -1) < length:
                raise UserError(
                    "what a run has logged must be there for it to go on. Received: "
                    f"{self._run / name}, which is gone or shorter than its {length:,} bytes. Put "
                    "it back, or train again"
                )
        begin()
        for name in now:
            if name in to:
                os.truncate(self._run / name, to[name])
            else:
                remove(self._run / name)


def _new_event_file(folder: Path) -> Path:
    """Named as TensorFlow does: by the second, the machine, the process, and a number."""
    begun = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
    names = (folder / f"{begun}.{number}.v2" for number in itertools.count())
    return next(path for path in names if not path.exists())


def _scalar(tag: str, value: float) -> Any:
    from merlin_cowclip.plugins._tensorflow import tf

    shown = tf.compat.v1.Summary.Value(tag=tag)
    shown.metadata.plugin_data.plugin_name = "scalars"  # the page of TensorBoard's
    shown.tensor.dtype = tf.float32.as_datatype_enum
    shown.tensor.float_val.append(value)
    return shown
