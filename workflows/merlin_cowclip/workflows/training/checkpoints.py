"""Checkpoints of a run: written beside, whole or not there, and found again.

`checkpoints/step-0000000400/` holds `state.index` and `state.data-…`, a TensorFlow checkpoint of
flat tensors, and `checkpoint.json`, written last within it: what else a run needs to go on, and of
every file its size and SHA-256. The folder gets its name when all of it is on the disk; whatever
ends the process leaves the checkpoints before it as they were.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import remove, write_json

FORMAT_VERSION = 1
RECORD = "checkpoint.json"
STATE = "state"
_NAME = re.compile(r"step-(\d{10,})")
_KEYS = {"step": int, "tensors": dict, "files": dict, "progress": dict, "sha256": str}
_CHUNK = 1 << 22  # bytes


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole."""

    path: Path
    record: Mapping[str, Any]

    @property
    def step(self) -> int:
        """After how many updates it was taken."""
        return int(self.record["step"])

    @property
    def progress(self) -> Mapping[str, Any]:
        """What the run itself put in."""
        progress: Mapping[str, Any] = self.record["progress"]
        return progress

    def check(self, variables: Mapping[str, tf.Variable]) -> None:
        """Refuse variables whose values it does not hold.

        Raises:
            UserError: it lacks one, or has it in another shape or dtype.
        """
        for name, variable in variables.items():
            had, has = self.record["tensors"].get(name), _described(variable)
            if had is None or (had["shape"], had["dtype"]) != (has["shape"], has["dtype"]):
                found = "nothing" if had is None else f"{had['dtype']} {had['shape']}"
                raise UserError(
                    "a checkpoint must belong to the network of its run. Received: "
                    f"{self.path}, with {found} for {has['name']!r}, {has['dtype']} "
                    f"{has['shape']}. Train again with the versions of the run's config.json"
                )

    def restore(self, variables: Mapping[str, tf.Variable]) -> None:
        """Assign the values of variables, by name; others that it holds are let be.

        Raises:
            UserError: see `check`.
        """
        self.check(variables)
        values = tf.train.load_checkpoint(str(self.path / STATE))
        for name, variable in variables.items():
            variable.assign(values.get_tensor(name))


class Checkpoints:
    """Those of one run.

    Args:
        folder: where they lie; made with the first.
        keep: how many of the last ones are kept, beside the best.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self._keep = keep
        self._writing: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(
        self,
        step: int,
        variables: Mapping[str, tf.Variable],
        progress: Mapping[str, Any],
        *,
        best: int | None = None,
        beside: Iterable[Path] = (),
    ) -> None:
        """Begin to write one; training may go on meanwhile.

        The values are those of now: they are held, not copied, until the next step changes them,
        for which TensorFlow makes the copy; a GPU's are copied to the host here.

        Args:
            step: after how many updates.
            variables: by name.
            progress: fit for JSON.
            best: the step of the one that is kept beside the last ones.
            beside: files that it tells of, and that must be on the disk as it is.

        Raises:
            UserError, OSError: what the one before failed with.
        """
        self.wait()
        with tf.device("CPU:0"):
            tensors = {name: tf.identity(v.read_value()) for name, v in variables.items()}
        record = {
            "format": FORMAT_VERSION,
            "step": step,
            "progress": progress,
            "tensors": {name: _described(variable) for name, variable in variables.items()},
        }

        def write() -> None:
            try:
                self._write(step, tensors, record, best, set(beside))
            except BaseException as error:
                self._failure = error

        self._writing = threading.Thread(target=write, name="merlin-cowclip-checkpoint")
        self._writing.daemon = True  # an interrupt does not wait for it
        self._writing.start()

    def wait(self) -> None:
        """Until what was begun is on the disk.

        Raises:
            UserError, OSError: it failed.
        """
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        self.check()

    def settle(self, seconds: float | None = None) -> None:
        """As `wait`, but not for longer than this, and without an error: another one has come."""
        if self._writing is not None:
            self._writing.join(seconds)

    def check(self) -> None:
        """Raise what the last one has failed with, if it has."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _write(
        self,
        step: int,
        tensors: dict[str, tf.Tensor],
        record: dict[str, Any],
        best: int | None,
        beside: set[Path],
    ) -> None:
        self.folder.mkdir(exist_ok=True)
        target = self.folder / f"step-{step:010}"
        partial = self.folder / f".{target.name}.partial"
        remove(partial)
        partial.mkdir()
        try:
            with tf.device("CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=str(partial / STATE),
                    tensor_names=list(tensors),
                    shape_and_slices=[""] * len(tensors),
                    tensors=list(tensors.values()),
                )
            tensors.clear()
            files = {path.name: _entry(path) for path in sorted(partial.iterdir())}
            record = {**record, "files": files}
            write_json(partial / RECORD, {**record, "sha256": _digest(record)})
            beside |= {path.parent for path in beside}
            for path in (*beside, *partial.iterdir(), partial):
                _sync(path)
            replaced = self.folder / f".{target.name}.replaced"
            if target.exists():  # the same weights, of before the epoch was measured
                os.rename(target, replaced)
            os.rename(partial, target)
            _sync(self.folder)
            remove(replaced)
        finally:
            remove(partial)
        self._drop_old(best)

    def _drop_old(self, best: int | None) -> None:
        steps = self.steps()
        for step in steps[: -self._keep]:
            if step != best:
                old = self.folder / f"step-{step:010}"
                hidden = old.with_name(f".{old.name}.old")
                os.rename(old, hidden)  # at once: what is half removed is none
                remove(hidden)

    def steps(self) -> list[int]:
        """After which steps there is one, in order; not all need be whole."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))

    def at(self, step: int) -> Checkpoint:
        """The one after `step` updates, every byte of it held against its record.

        Raises:
            UserError: it is damaged, or not there.
        """
        path = self.folder / f"step-{step:010}"
        record = _read_record(path)
        for name, entry in record["files"].items():
            try:
                found = _entry(path / name)
            except OSError as error:
                _refuse(path / name, f"which cannot be read ({error.strerror})")
            if found["bytes"] != entry["bytes"]:
                had = f"of {found['bytes']:,} bytes, which had {entry['bytes']:,}"
                _refuse(path / name, had)
            if found["sha256"] != entry["sha256"]:
                _refuse(path / name, "whose content has changed")
        return Checkpoint(path, record)

    def last(self) -> tuple[Checkpoint | None, list[UserError]]:
        """The last one that is whole, and what is wrong with those after it."""
        for path in self.folder.glob(".step-*.replaced"):  # the process ended in between
            name = path.name.split(".")[1]
            if not (self.folder / name).exists():
                os.rename(path, self.folder / name)
        damaged: list[UserError] = []
        for step in reversed(self.steps()):
            try:
                return self.at(step), damaged
            except UserError as error:
                damaged.append(error)
        return None, damaged

    def tidy(self, checkpoint: Checkpoint | None) -> None:
        """Remove what an ended process left half written, and put aside what is damaged.

        What comes after the last one that is whole is kept as `damaged-step-…`, so that it is no
        longer one of the last.

        Args:
            checkpoint: the last one that is whole, as `last` has found it.
        """
        for step in self.steps():
            if checkpoint is None or step > checkpoint.step:
                path = self.folder / f"step-{step:010}"
                aside = path.with_name(f"damaged-{path.name}")
                remove(aside)
                os.rename(path, aside)
        for path in self.folder.glob(".step-*") if self.folder.is_dir() else ():
            remove(path)


def _described(variable: tf.Variable) -> dict[str, Any]:
    return {"name": variable.name, "shape": list(variable.shape), "dtype": variable.dtype.name}


def _entry(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of all of a file, as `sha256sum` prints it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _digest(record: Mapping[str, Any]) -> str:
    """Of a record's content, however it is laid out in its file."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    """To the disk itself: what was renamed over must not be empty after a power cut."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        _refuse(path / RECORD, f"which cannot be read ({error})")
    if not isinstance(record, dict) or record.get("format") != FORMAT_VERSION:
        _refuse(path / RECORD, f"which is not of format {FORMAT_VERSION}")
    for key, kind in _KEYS.items():
        if not isinstance(record.get(key), kind):
            _refuse(path / RECORD, f"without {key!r}")
    if record.pop("sha256") != _digest(record):
        _refuse(path / RECORD, "whose content has changed")
    if {f"{STATE}.index"} - record["files"].keys():
        _refuse(path / RECORD, f"whose files lack {STATE}.index")
    return record


def _refuse(path: Path, found: str) -> NoReturn:
    raise UserError(f"a checkpoint must be as it was written. Received: {path}, {found}") from None


def not_finite(variables: Iterable[tf.Variable]) -> list[str]:
    """The names of those variables that hold NaN or infinity."""
    return [
        v.name
        for v in variables
        if v.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(v)))
    ]
