# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: written beside, and renamed once they are whole.

`checkpoints/step-0000000400/` holds `state.index` and `state.data-…`, a `tf.train.Checkpoint` of
flat variables whose blocks have checksums, and `progress.json`. With sharded tables each rank
writes its rows there, `rows-0.…`. `tf.train.CheckpointManager` would write the best checkpoint
twice, and cannot take `progress.json` with it in one rename.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.horovod import broadcast
from merlin_cowclip.workflows.errors import UserError, clipped
from merlin_cowclip.workflows.folders import read_json, remove, write_json
from merlin_cowclip.workflows.training.ranks import gather_objects, raise_on_any_rank, rank_info

_NAME = re.compile(r"step-(\d{10,})")
_STATE, _PROGRESS = "state", "progress.json"


@dataclass(frozen=True)
class State:
    """The variables of a checkpoint, by name.

    Attributes:
      shared: the same on all ranks.
      own: small sums that each rank has of its own.
      shards: those of which this rank has its rows.
    """

    shared: Mapping[str, tf.Variable]
    own: Mapping[str, tf.Variable] = field(default_factory=dict)
    shards: Mapping[str, tf.Variable] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole.

    Attributes:
      path: its folder.
      step: after how many updates it was taken.
      progress: what the run put in, with each rank's `own` sums, and whether tables were `sharded`.
    """

    path: Path
    step: int
    progress: Mapping[str, Any]

    def restore(self, state: State) -> None:
        """Give all variables their values; on all ranks at once."""
        own, ranks = self.progress["own"], rank_info()
        with raise_on_any_rank():
            if len(own) != ranks.size and (state.shards or self.progress["sharded"]):
                raise UserError(
                    "a run with sharded tables resumes on the number of ranks that it began on. "
                    f"Received: {ranks.size}, for a checkpoint of {len(own)}. Use horovodrun -np "
                    f"{len(own)}"
                )
            if ranks.rank == 0:
                _read(self.path / _STATE, state.shared)
            if state.shards:
                _read(self.path / _rows(ranks.rank), state.shards)
        if ranks.size > 1:
            broadcast(state.shared[name] for name in sorted(state.shared))
        for name, variable in state.own.items():
            sums = np.array([one[name] for one in own], variable.dtype.as_numpy_dtype)
            is_same = len(own) == ranks.size  # else they are shared evenly
            variable.assign(sums[ranks.rank] if is_same else sums.sum(axis=0) / ranks.size)

    def read(self, variables: Mapping[str, tf.Variable]) -> None:
        """Give these the values that all ranks had together: sharded tables are made whole."""
        paths = [self.path / _rows(rank) for rank in range(len(self.progress["own"]))]
        paths = [path for path in paths if path.with_name(f"{path.name}.index").exists()]
        with raise_on_any_rank(), _as_user_errors(self.path):
            rows = [tf.train.load_checkpoint(str(path)) for path in paths]
            sharded = {n for n in variables if rows and rows[0].has_tensor(_key_in_file(n))}
            for name in sharded:
                table = np.empty(variables[name].shape, variables[name].dtype.as_numpy_dtype)
                for rank, reader in enumerate(rows):
                    table[rank :: len(rows)] = reader.get_tensor(_key_in_file(name))
                variables[name].assign(table)
            _read(self.path / _STATE, {n: v for n, v in variables.items() if n not in sharded})


class Checkpoints:
    """Those of one run; on several ranks, `save` and `restore_last` are called on all at once.

    Args:
      folder: where they lie; made with the first.
      keep: how many of the last ones are kept, beside the best.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self._keep = folder, keep

    def save(
        self, step: int, state: State, progress: Mapping[str, Any], best: int | None = None
    ) -> None:
        """Write one after `step` updates, and prune the others but that of the step `best`.

        `state` is this rank's, `progress` fit for JSON.
        """
        target, ranks = self.path(step), rank_info()
        partial = target.with_name(f".{target.name}.partial")
        own = gather_objects({name: v.numpy().tolist() for name, v in state.own.items()})
        record = {"own": own, "sharded": bool(state.shards), **progress}
        try:
            with raise_on_any_rank():
                if ranks.rank == 0 or state.shards:
                    partial.mkdir(parents=True, exist_ok=True)
                if ranks.rank == 0:
                    _write(partial / _STATE, state.shared)
                if state.shards:
                    _write(partial / _rows(ranks.rank), state.shards)
            with raise_on_any_rank():
                if ranks.rank == 0:
                    write_json(partial / _PROGRESS, record)
                    os.rename(partial, target)
                    for old in self.steps()[: -self._keep]:
                        if old != best:
                            self._remove(old)
        finally:
            if ranks.rank == 0:
                remove(partial)

    def _remove(self, step: int) -> None:
        hidden = self.folder / f".{self.path(step).name}.old"  # first: half a checkpoint is none
        os.rename(self.path(step), hidden)
        remove(hidden)

    def steps(self) -> list[int]:
        """After which steps there is one, in order."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return sorted(int(found[1]) for name in names if (found := _NAME.fullmatch(name)))

    def path(self, step: int) -> Path:
        """Where the one after `step` updates lies."""
        return self.folder / f"step-{step:010}"

    def at(self, step: int) -> Checkpoint:
        """The one after `step` updates, as the first rank finds it."""
        path, progress = self.path(step), None
        with raise_on_any_rank(), _as_user_errors(path / _PROGRESS):
            if rank_info().rank == 0:
                progress = read_json(path / _PROGRESS)
        return Checkpoint(path, step, gather_objects(progress)[0])

    def restore_last(self, state: State) -> Checkpoint | None:
        """Restore the newest one; `None` if there is none."""
        if rank_info().rank == 0:
            remove(*self.folder.glob(".step-*"))  # what was not written, or removed, to its end
        steps = gather_objects(self.steps())[0]
        if not steps:
            return None
        checkpoint = self.at(steps[-1])
        checkpoint.restore(state)
        return checkpoint


def _rows(rank: int) -> str:
    return f"rows-{rank}"


def _key(name: str) -> str:
    return name.replace("/", "_")


def _key_in_file(name: str) -> str:
    return f"state/{_key(name)}/.ATTRIBUTES/VARIABLE_VALUE"


def _checkpoint(variables: Mapping[str, tf.Variable]) -> tf.train.Checkpoint:
    """A flat one: walking over the optimizer would let deferred rows catch up."""
    return tf.train.Checkpoint(state={_key(name): v for name, v in variables.items()})


def _write(prefix: Path, variables: Mapping[str, tf.Variable]) -> None:
    _checkpoint(variables).write(str(prefix))


def _read(prefix: Path, variables: Mapping[str, tf.Variable]) -> None:
    with _as_user_errors(prefix):
        status = _checkpoint(variables).read(str(prefix))
        status.assert_existing_objects_matched().expect_partial()


@contextlib.contextmanager
def _as_user_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except tf.errors.ResourceExhaustedError:  # says nothing of the checkpoint
        raise
    except (tf.errors.OpError, OSError, AssertionError, LookupError, ValueError) as error:
        raise UserError(
            f"the checkpoint {path} is damaged, or of another network or version: "
            f"{clipped(str(error))}. To resume from the one before, remove its folder and, of a "
            "finished run, result.json"
        ) from None
