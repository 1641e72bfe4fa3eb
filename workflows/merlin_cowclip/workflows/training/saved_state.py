"""What a checkpoint holds, and how it comes back: on as many ranks as have taken it, or others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.horovod import SINGLE_PROCESS, Ranks, all_gather, broadcast
from merlin_cowclip.plugins.distributed.sharding import Shard
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training import checkpoint_files as files


@dataclass(frozen=True)
class State:
    """What a checkpoint holds.

    Attributes:
      variables: by name, alike on all ranks but for these.
      of_each: the names of those that each rank has its own of: sums, which another number of
        ranks shares evenly.
      shards: the names of those of which this rank has some rows alone, and which.
      ranks: this process among them, or alone.
    """

    variables: Mapping[str, tf.Variable]
    of_each: Set[str] = frozenset()
    shards: Mapping[str, Shard] = field(default_factory=dict)
    ranks: Ranks = SINGLE_PROCESS

    def described(self) -> dict[str, dict[str, Any]]:
        """Each variable as a whole, by name."""
        found = {}
        for name, variable in self.variables.items():
            shape = variable.shape.as_list()
            if name in self.shards:
                shape[0] = self.shards[name].num_rows
            found[name] = files.described(variable.name, variable.dtype, shape)
        return found


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
    def ranks(self) -> int:
        """How many have taken it."""
        return int(self.record.get("ranks", 1))

    @property
    def in_shards(self) -> Sequence[str]:
        """The names of tensors of which each rank had some rows."""
        return list(self.record.get("in_shards", ()))

    @property
    def progress(self) -> Mapping[str, Any]:
        """What the run itself put in."""
        progress: Mapping[str, Any] = self.record["progress"]
        return progress

    def check(self, state: State) -> None:
        """Refuse variables whose values it does not hold.

        Raises:
            UserError: it lacks one, or has it in another shape or dtype.
        """
        for name, has in state.described().items():
            had = self.record["tensors"].get(name)
            if had is None or (had["shape"], had["dtype"]) != (has["shape"], has["dtype"]):
                found = "nothing" if had is None else f"{had['dtype']} {had['shape']}"
                raise UserError(
                    "a checkpoint must belong to the network of its run. Received: "
                    f"{self.path}, with {found} for {has['name']!r}, {has['dtype']} "
                    f"{has['shape']}. Train again with the versions of the run's config.json"
                )

    def restore(self, state: State) -> None:
        """Assign the values of variables, by name; others that it holds are let be.

        Called on all ranks of `state` at once. With as many as have taken it each has what it had;
        with others, what follows from that.

        Raises:
            UserError: see `check`.
        """
        self.check(state)
        alike = state.variables.keys() - state.of_each - {*self.in_shards, *state.shards}
        if state.ranks.rank == 0:
            for name in alike:
                state.variables[name].assign(self._read(name, state))
        if state.ranks.size > 1:
            broadcast(state.variables[name] for name in sorted(alike))
        for name in sorted(state.of_each & state.variables.keys()):
            held = self._of_each(name, state)
            is_same = len(held) == state.ranks.size
            mine = held[state.ranks.rank] if is_same else held.sum(axis=0) / state.ranks.size
            state.variables[name].assign(mine)
        for name in sorted(state.variables.keys() & {*self.in_shards, *state.shards}):
            variable = state.variables[name]
            mine = state.shards.get(name) or Shard(0, 1, variable.shape[0])
            variable.assign(files.read_rows(self.path, name, variable.dtype, self.ranks, mine))

    def _read(self, name: str, state: State) -> np.ndarray:
        return files.read_tensor(self.path / files.STATE, name, state.variables[name].dtype)

    def _of_each(self, name: str, state: State) -> np.ndarray:
        """What each rank had, N×…; on all ranks what the first one reads."""
        variable = state.variables[name]
        held = np.empty((0, *variable.shape), variable.dtype.as_numpy_dtype)
        if state.ranks.rank == 0:
            held = self._read(name, state)
            held = held if name in self.record.get("of_each", ()) else held[np.newaxis]
        return held if state.ranks.size == 1 else all_gather(held)
