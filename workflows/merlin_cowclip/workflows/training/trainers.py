# SPDX-License-Identifier: Apache-2.0
"""Many trainings of one network in one process, which share compiled steps."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

from distributed.system import MEMORY_LIMIT

from merlin_cowclip.plugins._tensorflow import quiet_stack, tf
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.training.builder import dummy_batch, network, set_seeds
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.step_variables import compiled_step_key
from merlin_cowclip.workflows.training.stopping import Stopping
from merlin_cowclip.workflows.training.train import check_trainable
from merlin_cowclip.workflows.training.trainer import Trainer

MOST_STEPS = 4  # compiled steps that are kept, each with a network and its moments


class Trainers:
    """Trains the trials of a study; those with one update mode and clip share a compiled step.

    Args:
      rows: data with a validation part.
    """

    def __init__(self, rows: PreparedData) -> None:
        self._rows = rows
        self._kept: dict[Any, Trainer] = {}
        self._seed: int | None = None

    def epochs(
        self, config: TrainConfig, stopping: Stopping, advance: Callable[[], Any] = lambda: None
    ) -> Iterator[dict[str, Any]]:
        """Train as `train(rows, config)` does, and measure each epoch; call `advance` each step.

        Raises:
          NotFiniteError: a loss, gradient, weight or prediction is not finite.
          KeyboardInterrupt: it was asked to stop.
        """
        with quiet_stack():  # TensorFlow warns that many networks in one process trace many graphs
            for row in self.get(config, stopping, advance).epochs():
                yield {name.removeprefix("valid_"): value for name, value in row.items()}

    def get(self, config: TrainConfig, stopping: Stopping, advance: Callable[[], Any]) -> Trainer:
        """A trainer with initial weights, as `train` makes it."""
        if self._seed != config.seed:
            gc.collect()  # the network drawn before
            self._loader = check_trainable(self._rows, config)
            # Not drawn for each trial: TensorFlow, seeded, compiles all steps again in part.
            set_seeds(config.seed, deterministic=config.deterministic)
            drawn = network(dataclasses.replace(config, init_stddev=1.0), self._rows.schema)
            drawn(dummy_batch(vars(self._rows.spec)))
            self._weights = [variable.numpy() for variable in drawn.weights]
            self._seed = config.seed
        key = compiled_step_key(config)
        trainer = self._kept.pop(key, None)
        if trainer is None:
            # As `check_trainable` counts them: all that are kept take at most half of the memory.
            size = self._rows.table_rows * ((config.embedding_dim or 0) + 1) * 3 * 4
            while len(self._kept) >= min(MOST_STEPS, max(MEMORY_LIMIT // (2 * size), 1)):
                del self._kept[next(iter(self._kept))]
            gc.collect()
            tf.keras.backend.clear_session()
            trainer = Trainer(config, self._loader, stopping)
        self._kept[key] = trainer
        trainer.reset(config, self._loader, self._weights, stopping, advance)
        return trainer
