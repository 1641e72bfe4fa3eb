"""Checkpoints of a run: written beside, whole or not there, and found again.

`checkpoints/step-0000000400/` holds `state.index` and `state.data-…`, a TensorFlow checkpoint of
flat tensors, and `checkpoint.json`, written last within it: what else a run needs to go on, and of
every file its size and SHA-256. The folder gets its name when all of it is on the disk; whatever
ends the process leaves the checkpoints before it as they were.

Of several ranks the first writes what all have alike, and what each has of its own; of tables in
shards each writes its rows, `rows-00001-of-00003.…`. Any number of ranks can go on from it.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.horovod import SINGLE_PROCESS, Ranks, all_gather
from merlin_cowclip.workflows.errors import AgreedError, UserError
from merlin_cowclip.workflows.folders import remove, write_json
from merlin_cowclip.workflows.training import checkpoint_files as files
from merlin_cowclip.workflows.training.ranks import agreed, said_by_all
from merlin_cowclip.workflows.training.saved_state import Checkpoint, State

_NAME = re.compile(r"step-(\d{10,})")


class _Writing(threading.Thread):
    """A thread that writes, and what came of it."""

    def __init__(self, write: Callable[[], Any]) -> None:
        super().__init__(name="merlin-cowclip-checkpoint", daemon=True)  # no interrupt waits for it
        self.found: Any = None
        self.failure: BaseException | None = None
        self._write = write
        self.start()

    def run(self) -> None:
        try:
            self.found = self._write()
        except BaseException as error:
            self.failure = error


class Checkpoints:
    """Those of one run; on several ranks, all that reads or writes is called on all at once.

    Args:
        folder: where they lie; made with the first.
        keep: how many of the last ones are kept, beside the best.
        ranks: this process among those of the run.
    """

    def __init__(self, folder: Path, keep: int = 2, ranks: Ranks = SINGLE_PROCESS) -> None:
        self.folder = folder
        self._keep = keep
        self._ranks = ranks
        self._writing: _Writing | None = None  # this rank's files
        self._seal: Callable[[dict[str, Any]], None] | None = None  # once all ranks' are written
        self._sealing: _Writing | None = None
        self._partial: Path | None = None

    def save(
        self,
        step: int,
        state: State,
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
            state: of this rank.
            progress: fit for JSON.
            best: the step of the one that is kept beside the last ones.
            beside: files that it tells of, and that must be on the disk as it is.

        Raises:
            UserError, OSError: what the one before failed with.
        """
        self.wait()
        target = self.path(step)
        partial = self.folder / f".{target.name}.partial"
        record = {"step": step, "progress": progress, "tensors": state.described()}
        record |= self._format(state)
        held = self._held(state)

        def begin() -> None:
            if self._ranks.rank == 0:
                self.folder.mkdir(exist_ok=True)
                remove(partial)
                partial.mkdir()

        def write() -> dict[str, Any]:
            if self._ranks.size > 1:  # of which others may still write there
                return self._write(partial, held)
            try:
                begin()
                written = self._write(partial, held)
                seal(written)
            except BaseException:
                remove(partial)
                raise
            return written

        def seal(written: dict[str, Any]) -> None:
            try:
                self._give_name(partial, target, {**record, "files": written}, set(beside))
            finally:
                remove(partial)
            self._drop_old(best)

        if self._ranks.size > 1:
            with agreed():
                begin()
            self._seal, self._partial = seal, partial
        self._writing = _Writing(write)

    def _format(self, state: State) -> dict[str, Any]:
        if self._ranks.size == 1:
            return {"format": files.ALONE}
        of_ranks = {"ranks": self._ranks.size, "of_each": sorted(state.of_each)}
        return {"format": files.OF_RANKS, **of_ranks, "in_shards": sorted(state.shards)}

    def _held(self, state: State) -> dict[str, dict[str, tf.Tensor]]:
        """What this rank writes, by the file's prefix and the tensor's name."""
        rows = files.rows_of(self._ranks.rank, self._ranks.size)
        held: dict[str, dict[str, tf.Tensor]] = {files.STATE: {}, rows: {}}
        with tf.device("CPU:0"):
            for name, variable in state.variables.items():
                if name in state.shards:
                    held[rows][name] = tf.identity(variable.read_value())
                elif name in state.of_each and self._ranks.size > 1:
                    of_all = all_gather(variable.read_value()[tf.newaxis].numpy())
                    held[files.STATE][name] = tf.constant(of_all)
                elif self._ranks.rank == 0:
                    held[files.STATE][name] = tf.identity(variable.read_value())
        if self._ranks.rank:
            held[files.STATE] = {}
        return {prefix: tensors for prefix, tensors in held.items() if tensors}

    def _write(self, partial: Path, held: dict[str, dict[str, tf.Tensor]]) -> dict[str, Any]:
        """This rank's files; returns what they are known again by."""
        if not held:
            return {}
        prefixes = list(held)
        for prefix in prefixes:
            files.write_tensors(partial / prefix, held[prefix])
            held.pop(prefix)
        names = (p for p in sorted(os.listdir(partial)) if p.partition(".")[0] in prefixes)
        written = {name: files.entry(partial / name) for name in names}
        for name in written:
            files.sync(partial / name)
        return written

    def _give_name(
        self, partial: Path, target: Path, record: dict[str, Any], beside: set[Path]
    ) -> None:
        write_json(partial / files.RECORD, {**record, "sha256": files.digest(record)})
        beside |= {path.parent for path in beside}
        for path in (*beside, partial / files.RECORD, partial):
            files.sync(path)
        replaced = self.folder / f".{target.name}.replaced"
        if target.exists():  # the same weights, of before the epoch was measured
            os.rename(target, replaced)
        os.rename(partial, target)
        files.sync(self.folder)
        remove(replaced)

    def told(self) -> dict[str, Any]:
        """What the other ranks have to know of what this one writes; fit for JSON."""
        writing, failure = self._writing, self._failure()
        said = None if failure is None else str(failure) or type(failure).__name__
        written = None if writing is None or writing.is_alive() else writing.found
        return {"failure": said, "written": written}

    def hear(self, said: Sequence[Mapping[str, Any]]) -> None:
        """What all ranks have told: once all have written, the first gives the whole its name.

        Raises:
            AgreedError: one has failed.
        """
        for rank, one in enumerate(said):
            if one["failure"] is not None:
                self._refuse(rank, one["failure"])
        written = [one["written"] for one in said]
        if self._seal is not None and None not in written:
            seal, self._seal = self._seal, None
            whole = {name: entry for one in written for name, entry in one.items()}
            if self._ranks.rank == 0:
                self._sealing = _Writing(lambda: seal(whole))

    def _failure(self) -> BaseException | None:
        for thread in (self._writing, self._sealing):
            if thread is not None and not thread.is_alive() and thread.failure is not None:
                return thread.failure
        return None

    def _refuse(self, rank: int, sentence: str) -> None:
        failure = self._failure()
        if self._ranks.rank == 0 and self._partial is not None:
            self.settle()
            with contextlib.suppress(OSError):  # others may be writing there: `tidy` removes it
                remove(self._partial)
        self._forget()
        if rank == self._ranks.rank and failure is not None:
            raise failure
        raise AgreedError(f"a checkpoint must be written. Received, on rank {rank}: {sentence}")

    def _forget(self) -> None:
        self._writing = self._sealing = self._seal = None

    def wait(self) -> None:
        """Until what was begun is on the disk.

        Raises:
            UserError, OSError: it failed.
        """
        if self._writing is None:
            return
        self._writing.join()
        if self._ranks.size == 1:
            self.check()
        else:
            self.hear(said_by_all(self.told()))
            if self._sealing is not None:
                self._sealing.join()
            self.hear(said_by_all(self.told()))
        self._forget()

    def settle(self, seconds: float | None = None) -> None:
        """As `wait`, but not for longer than this, and without an error: another one has come."""
        for thread in (self._writing, self._sealing):
            if thread is not None:
                thread.join(seconds)

    def check(self) -> None:
        """Raise what the last one has failed with, if it has."""
        failure = self._failure()
        if failure is not None:
            self._forget()
            raise failure

    def _drop_old(self, best: int | None) -> None:
        steps = self.steps()
        for step in steps[: -self._keep]:
            if step != best:
                old = self.path(step)
                hidden = old.with_name(f".{old.name}.old")
                os.rename(old, hidden)  # at once: what is half removed is none
                remove(hidden)

    def steps(self) -> list[int]:
        """After which steps there is one, in order; not all need be whole."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))

    def path(self, step: int) -> Path:
        """Where the one after `step` updates lies."""
        return self.folder / f"step-{step:010}"

    def at(self, step: int) -> Checkpoint:
        """The one after `step` updates, every byte of it held against its record.

        Each rank reads a share of the files with rows; the first the others.

        Raises:
            UserError: it is damaged, or not there.
        """
        path = self.path(step)
        found: tuple[str | None, Any] = (None, None)
        if self._ranks.rank == 0:
            found = _or_refusal(lambda: files.read_record(path))
        refusal, record = self._told_by_all(found)[0]
        if refusal is None:
            names = [n for n in record["files"] if self._is_mine(n)]
            mine = _or_refusal(lambda: files.check_files(path, record, names))
            refusal = next((r for r, _ in self._told_by_all(mine) if r is not None), None)
        if refusal is not None:
            raise UserError(refusal)
        return Checkpoint(path, record)

    def _is_mine(self, name: str) -> bool:
        return files.rank_of(name) % self._ranks.size == self._ranks.rank

    def _told_by_all(self, value: Any) -> list[Any]:
        return [value] if self._ranks.size == 1 else said_by_all(value)

    def last(self) -> tuple[Checkpoint | None, list[UserError]]:
        """The last one that is whole, and what is wrong with those after it."""
        steps = []
        if self._ranks.rank == 0:
            for path in self.folder.glob(".step-*.replaced"):  # the process ended in between
                name = path.name.split(".")[1]
                if not (self.folder / name).exists():
                    os.rename(path, self.folder / name)
            steps = self.steps()
        damaged: list[UserError] = []
        for step in reversed(self._told_by_all(steps)[0]):
            try:
                return self.at(step), damaged
            except AgreedError:
                raise
            except UserError as error:
                damaged.append(error)
        return None, damaged

    def tidy(self, checkpoint: Checkpoint | None) -> None:
        """Remove what an ended process left half written, and put aside what is damaged.

        What comes after the last one that is whole is kept as `damaged-step-…`, so that it is no
        longer one of the last. It is the first rank that does so.

        Args:
            checkpoint: the last one that is whole, as `last` has found it.
        """
        for step in self.steps():
            if checkpoint is None or step > checkpoint.step:
                path = self.path(step)
                aside = path.with_name(f"damaged-{path.name}")
                remove(aside)
                os.rename(path, aside)
        for path in self.folder.glob(".step-*") if self.folder.is_dir() else ():
            remove(path)


def _or_refusal(work: Callable[[], Any]) -> tuple[str | None, Any]:
    try:
        return None, work()
    except UserError as error:
        return str(error), None


def not_finite(variables: Iterable[tf.Variable]) -> list[str]:
    """The names of those variables that hold NaN or infinity."""
    return [
        v.name
        for v in variables
        if v.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(v)))
    ]
