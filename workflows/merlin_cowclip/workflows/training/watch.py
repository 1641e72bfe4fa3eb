"""A watch on a run: what is not finite ends it within `EVERY` updates, with its name."""

from __future__ import annotations

from typing import Any

import numpy as np

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.errors import NotFiniteError
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.ranks import agreed, mean_over_ranks

EVERY = 25  # updates between two looks


class Watch:
    """Looks after losses, gradients and weights.

    Gradients and rows of tables are in sums that a NaN never leaves (`CowClipOptimizer.observe`),
    so that a look costs a few scalars, and the dense weights.

    Args:
      optimizer: observed.
      loader: of the training part.
      config: of the run, for its learning rates.
    """

    def __init__(self, optimizer: Any, loader: Loader, config: TrainConfig) -> None:
        self._optimizer = optimizer
        self._batches = len(loader)
        self._config = config
        self._losses: list[tf.Tensor] = []
        self._looked = 0  # updates that were well

    def begin(self, step: int) -> None:
        """The run goes on from here, where all was well."""
        self._looked = step

    def see(self, step: int, loss: tf.Tensor) -> None:
        """After an update: keep its loss, and look, if it is time.

        Raises:
          NotFiniteError: see `look`.
        """
        self._losses.append(loss)
        if step % EVERY == 0:
            self.look(step)

    def look(self, step: int) -> None:
        """See that all is well after `step` updates.

        Raises:
          NotFiniteError: a loss, a gradient or a weight is NaN or infinite; which, and since when.
        """
        losses = mean_over_ranks(np.array([float(loss) for loss in self._losses]))
        with agreed():
            bad, broken = np.flatnonzero(~np.isfinite(losses)), self._optimizer.not_finite()
            if len(bad) or broken:
                raise NotFiniteError(self._problem(step, losses, bad, list(map(str, broken))))
        self._looked, self._losses = step, []

    def _problem(self, step: int, losses: Any, bad: np.ndarray, broken: list[str]) -> str:
        when, loss = f"between updates {self._looked + 1:,} and {step:,}", losses[-1:]
        if len(bad):
            step, loss = self._looked + int(bad[0]) + 1, losses[bad[:1]]
            when = f"in update {step:,}"
        named = f", with {', '.join(broken[:4])}" if broken else ""
        more = f" and {len(broken) - 4} more" if len(broken) > 4 else ""
        hp = self._config.hyperparameters
        return (
            "loss, gradients and weights must stay finite. Received: loss "
            f"{', '.join(f'{value:g}' for value in loss)} {when}, epoch "
            f"{(step - 1) // self._batches + 1}{named}{more}. The run diverged, with "
            f"dense_lr={hp.dense_lr:.6g}, embedding_lr={hp.embedding_lr:.6g}: lower them. If it "
            "does so with any, look for NaN among the numbers of adopted data"
        )
