"""A watch on a run: what is not finite ends it within `EVERY` updates, with what it was."""

from __future__ import annotations

from typing import Any

import numpy as np

from merlin_cowclip.plugins._tensorflow import quiet_stack, tf
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.ranks import agreed, mean_over_ranks

EVERY = 25  # updates between two looks
_GROWN = 100.0  # times as large as a look before: a dense weight that diverges


class NotFiniteError(UserError):
    """A run that would end likewise if it went on: with its data, or its learning rates."""


class Watch:
    """Looks after losses, gradients and weights.

    Gradients and rows of tables are in sums that a NaN never leaves (`CowClipOptimizer.observe`),
    so that a look costs a few scalars, and the dense weights.

    Args:
        optimizer: observed.
        loader: of the training part, to look for what is wrong in the data.
        config: of the run, for its learning rates.
    """

    def __init__(self, optimizer: Any, loader: Loader, config: TrainConfig) -> None:
        self._optimizer = optimizer
        self._loader = loader
        self._config = config
        self._losses: list[tf.Tensor] = []
        self._looked = 0  # updates that were well
        self._largest = 0.0  # of the dense weights, at the last good look
        self._largest_graph = tf.function(self._largest_now, autograph=False)

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
            NotFiniteError: a loss, a gradient or a weight is NaN or infinite; which and since
                when, and whether it came with the data or the learning rates.
        """
        losses = mean_over_ranks(np.array([float(loss) for loss in self._losses]))
        with agreed():
            self._look(step, losses)

    def _look(self, step: int, losses: np.ndarray) -> None:
        broken = self._optimizer.not_finite()
        if np.isfinite(losses).all() and not broken:
            self._looked, self._losses = step, []
            if len(losses):
                self._largest = self._largest_dense()
            return
        bad = np.flatnonzero(~np.isfinite(losses))
        first = self._looked + int(bad[0]) + 1 if len(bad) else None
        when = (
            f"in update {first:,}"
            if first
            else f"between updates {self._looked + 1:,} and {step:,}"
        )
        epoch = ((first or step) - 1) // len(self._loader) + 1
        loss = losses[bad[0]] if len(bad) else losses[-1]
        found = f"loss {loss:g} {when}, epoch {epoch}"
        if broken:
            found += f", with {_listed([str(item) for item in broken])}"
        raise NotFiniteError(
            "loss, gradients and weights must stay finite. Received: "
            f"{found}. {self._why(first or step, losses)}"
        )

    def _why(self, step: int, losses: np.ndarray) -> str:
        wrong = self._wrong_in_data(step)
        if wrong:
            return f"The data is at fault: {wrong}. Prepare it again without such values"
        hp = self._config.hyperparameters
        rates = f"dense_lr={hp.dense_lr:.6g}, embedding_lr={hp.embedding_lr:.6g}"
        finite = losses[np.isfinite(losses)]
        rise = f"; the loss before it was {finite[-1]:.6g}" if len(finite) else ""
        now = self._largest_dense()
        dense = not np.isfinite(now) or now > _GROWN * max(self._largest, 1e-3)
        rows = any(item.table for item in self._optimizer.not_finite())
        which = (
            "the dense learning rate first"
            if dense and not rows
            else "the learning rates, the dense one first"
            if dense
            else "the embedding learning rate"
        )
        return f"The run diverged, with {rates}{rise}. The data is finite: lower {which}"

    def _largest_dense(self) -> float:
        with quiet_stack():  # of many networks in one process it warns that it traces many
            return float(self._largest_graph())

    def _largest_now(self) -> tf.Tensor:
        """The largest dense weight's magnitude; infinite where one is not finite."""
        dense = self._optimizer.default_optimizer
        weights = [o.variable for o in self._optimizer.owned() if o.optimizer is dense]
        sizes = [tf.where(tf.math.is_finite(w), tf.abs(w), np.inf) for w in weights]
        return tf.reduce_max([0.0, *(tf.cast(tf.reduce_max(s), tf.float32) for s in sizes)])

    def _wrong_in_data(self, step: int) -> str | None:
        """Of the batches since all was well, the first value that is no finite number."""
        for g in range(self._looked, step):
            epoch, k = divmod(g, len(self._loader))
            features, labels = next(iter(self._loader.whole().batches(epoch, k)))
            for name, column in {**features, self._loader.data.spec.label: labels}.items():
                column = np.asarray(column)
                if column.dtype.kind == "f" and not np.isfinite(column).all():
                    rows = int(np.count_nonzero(~np.isfinite(column)))
                    return (
                        f"{name!r} is NaN or infinite in {rows:,} of {len(column):,} rows of "
                        f"batch {k + 1:,} of epoch {epoch + 1}"
                    )
        return None


def _listed(items: list[str], most: int = 4) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
