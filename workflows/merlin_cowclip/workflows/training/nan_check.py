# SPDX-License-Identifier: Apache-2.0
"""NaN detection: what is not finite ends a run within `EVERY` updates, with its name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.errors import NotFiniteError
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.ranks import gather_objects, raise_on_any_rank

EVERY = 25  # updates between two looks


class NanCheck:
    """Looks after losses, gradients and weights.

    Gradients and rows of tables are in sums that a NaN never leaves (`CowClipOptimizer.observe`),
    so that a look costs a few scalars, and the dense weights.

    Args:
      optimizer: observed.
      steps: of an epoch.
      config: of the run, for its learning rates.
    """

    def __init__(self, optimizer: Any, steps: int, config: TrainConfig) -> None:
        self._optimizer, self._steps, self._config = optimizer, steps, config
        self._losses: list[tf.Tensor] = []

    def see(self, step: int, loss: tf.Tensor) -> None:
        """After an update: keep its loss, and look, if it is time; raises as `look`."""
        self._losses.append(loss)
        if step % EVERY == 0:
            self.look(step)

    def look(self, step: int, weights: Iterable[tf.Variable] = ()) -> None:
        """See that all is well after `step` updates, and all of these weights.

        Raises:
          NotFiniteError: a loss, a gradient or a weight is NaN or infinite; which, and since when.
        """
        losses = np.mean(gather_objects([float(loss) for loss in self._losses]), axis=0)
        self._losses = []
        with raise_on_any_rank():
            broken = [str(one) for one in self._optimizer.not_finite()]
            broken += [v.name for v in weights if not bool(tf.reduce_all(tf.math.is_finite(v)))]
            bad, hp = np.flatnonzero(~np.isfinite(losses)), self._config.hyperparameters
            if not len(bad) and not broken:
                return
            first, loss = step - len(losses) + 1, losses[-1:]
            when = f"between updates {min(first, step):,} and {step:,}"
            if len(bad):
                step, loss = first + int(bad[0]), losses[bad[:1]]
                when = f"in update {step:,}"
            named = f", with {', '.join(broken[:4])}" if broken else ""
            raise NotFiniteError(
                "loss, gradients and weights must stay finite. Received: loss "
                f"{', '.join(f'{value:g}' for value in loss)} {when}, epoch "
                f"{(step - 1) // self._steps + 1}{named}. The run diverged, with "
                f"dense_lr={hp.dense_lr:.6g}, embedding_lr={hp.embedding_lr:.6g}: lower them. If "
                "it does so with any, look for NaN among the numbers of adopted data"
            )
