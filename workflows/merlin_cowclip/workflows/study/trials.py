"""One trial: a network trained as `train` does it, and measured on the held-out rows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.stopping import Stopping

with quiet_imports():
    from merlin_cowclip.plugins._tensorflow import quiet_stack, tf
    from merlin_cowclip.workflows.training.evaluation import EVALUATION_BATCH
    from merlin_cowclip.workflows.training.loader import Loader
    from merlin_cowclip.workflows.training.reproducibility import set_seeds
    from merlin_cowclip.workflows.training.train import check_trainable
    from merlin_cowclip.workflows.training.trainer import Trainer
    from merlin_cowclip.workflows.training.watch import NotFiniteError


@dataclass(frozen=True)
class Epoch:
    """One epoch of a trial.

    Attributes:
      auc: on the held-out rows, as are `log_loss` and `calibration`.
      train_loss: mean of the epoch's batches.
      seconds: with the measuring and, in the first, with building the network.
    """

    auc: float
    log_loss: float
    calibration: float
    train_loss: float
    seconds: float


class DivergedError(Exception):
    """A trial's loss, gradients, weights or predictions are no finite numbers; says which."""


def epochs_of(
    rows: PreparedData,
    config: TrainConfig,
    stopping: Stopping,
    advance: Callable[[], Any] = lambda: None,
) -> Generator[Epoch, None, None]:
    """Train as `train(rows, config)` would, to the last bit, and measure after each epoch.

    Args:
      rows: what `hold_out` made.
      config: of the trial.
      stopping: ends it after the update in hand.
      advance: called after each update.

    Raises:
      DivergedError: something is not finite.
      Interrupted: it was asked to stop.
      UserError: the configuration does not go with the data or the machine.
    """
    begun = time.perf_counter()
    loader = check_trainable(rows, config)
    held_out = Loader(rows, "test", batch_size=EVALUATION_BATCH)
    gc.collect()  # the last trial's network
    tf.keras.backend.clear_session()
    # Of many networks in one process TensorFlow warns that it traces many.
    with quiet_stack():
        set_seeds(config.seed, deterministic=config.deterministic)
        trainer = Trainer(rows, config, loader, held_out, stopping, after_update=advance)
        try:
            for row in trainer.epochs():
                seconds = time.perf_counter() - begun
                measured = {name: row[name] for name in ("auc", "log_loss", "calibration")}
                yield Epoch(**measured, train_loss=row["train_loss"], seconds=seconds)
                begun = time.perf_counter()
        except NotFiniteError as error:
            raise DivergedError(str(error)) from None
        except UserError as error:
            if "predictions must be numbers" not in str(error):
                raise
            raise DivergedError(str(error)) from None
