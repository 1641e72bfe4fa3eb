# SPDX-License-Identifier: Apache-2.0
"""Learning rates as variables that the compiled training step reads, so that trials share a step.

`train` has the same variables: a graph with constants in their place may round differently.
"""

from __future__ import annotations

import math
from typing import Any

from merlin_cowclip.plugins import CowClipOptimizer, LinearWarmup
from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.learning_rates import CONSTANT_SCHEDULE, schedule_of


class StepVariables:
    """Learning rates and warm-up of an optimizer with exact or lazy updates; sets λ, r and ζ, too.

    Schedules other than a constant and a linear one stay part of the step. Arguments are those of
    `compile_model`.
    """

    def __init__(
        self, config: TrainConfig, optimizer: CowClipOptimizer, *, updates: int, batches: int
    ) -> None:
        *self._tables, dense = optimizer.optimizers
        self._updates, self._batches = updates, batches
        self._warm_up: Any = optimizer.warm_up
        if self._warm_up is None:
            self._warm_up = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._lines: dict[str, list[tf.Variable]] = {}
        for name, part in (("dense", dense), ("embedding", self._tables[0])):
            if (getattr(config, f"{name}_schedule") or CONSTANT_SCHEDULE)["name"] != "linear":
                continue
            line = [tf.Variable(1.0, trainable=False) for _ in range(3)]
            rate = tf.keras.optimizers.schedules.PolynomialDecay(*line)
            part.learning_rate.rate = LinearWarmup(rate, self._warm_up) if part is dense else rate
            self._lines[name] = line
        self.assign(config)

    def assign(self, config: TrainConfig) -> None:
        """Set all variables; `config` has the same `compiled_step_key` as the first one."""
        hp = config.hyperparameters
        for name, line in self._lines.items():
            schedule = schedule_of(config, name, self._batches)
            names = ("initial_learning_rate", "decay_steps", "end_learning_rate")
            for variable, attribute in zip(line, names, strict=True):
                variable.assign(getattr(schedule, attribute))
        self._warm_up.assign(math.floor(hp.warmup_epochs * self._updates))
        for part in self._tables:
            part.l2, part.clip_ratio, part.clip_floor = hp.l2, hp.clip_ratio, hp.clip_floor


def compiled_step_key(config: TrainConfig) -> tuple[Any, ...]:
    """Equal for configurations of one tune that can share a compiled step."""
    return config.update, config.hyperparameters.clip
