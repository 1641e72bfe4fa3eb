"""Training on a prepared folder: model, optimizer, fit, exact test metrics, run folder."""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.data.datasets import check_input_names
from merlin_cowclip.workflows.data.prepared import PARTS, PreparedData
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing, write_json
from merlin_cowclip.workflows.machine import memory_limit
from merlin_cowclip.workflows.manifest import manifest_of
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.learning_rates import keras_schedule
from merlin_cowclip.workflows.training.memory import refuse_what_does_not_fit
from merlin_cowclip.workflows.training.runs import CONFIG, FORMAT_VERSION, RESULT, Run, inputs_of

with quiet_imports():
    from merlin_cowclip.models import MODELS
    from merlin_cowclip.plugins import CowClipOptimizer, LinearWarmup, save_model
    from merlin_cowclip.plugins._stack import mm, tf
    from merlin_cowclip.workflows.training.evaluation import (
        EVALUATION_BATCH,
        Predictor,
        exact_quality,
    )
    from merlin_cowclip.workflows.training.loader import Loader
    from merlin_cowclip.workflows.training.reproducibility import seeded

_PACKAGES = (
    "merlin-cowclip",
    "merlin-models",
    "merlin-core",
    "nvtabular",
    "tensorflow",
    "numpy",
    "pandas",
    "pyarrow",
)
_TABLES = ("embeddings", "linear")  # of our networks, by layer


def check(data: PreparedData, config: TrainConfig, out: str | Path) -> Loader:
    """Refuse what cannot be trained, before any work; returns the training part's loader.

    Raises:
      UserError: `out` exists or cannot be made, an option names a field that the data has not, the
        batch is larger than the training part, or the machine's memory is too small.
    """
    check_input_names(data.spec)
    refuse_existing(Path(out))
    for name in config.clip_tables or ():
        if name not in (*data.spec.ids, *_TABLES):
            raise UserError(
                f"clip_tables must name fields of the data, {', '.join(data.spec.ids)}, or tables, "
                f"{', '.join(_TABLES)}. Received: {name!r}"
            )
    loader = Loader(data, "train", batch_size=config.batch_size, seed=config.seed)
    if not tf.config.list_physical_devices(
        "GPU"
    ):  # there, TensorFlow's own error becomes a sentence
        numbers = len(data.spec.continuous)
        refuse_what_does_not_fit(config, data.cardinalities, numbers, memory_limit())
    return loader


def train(
    data: PreparedData, config: TrainConfig, out: str | Path, *, progress: bool = True
) -> Run:
    """Train a model on `data` and write a run folder to `out`, all of it or nothing.

    After each epoch the test part's exact AUC and log loss are measured (None without a test part);
    the times in the result are of the training alone. Until it is whole, the run lies in a hidden
    folder beside `out`, `.NAME.partial-…`, with TensorBoard's logs in its `logs/`; an error or an
    interrupt removes it. The process's random state and deterministic ops are put back at the end.

    Raises:
      UserError: `out` exists, the batch is larger than the training part, or the loss became NaN.
    """
    out = Path(out)
    loader = check(data, config, out)
    test = Loader(data, "test", batch_size=EVALUATION_BATCH) if data.test_files else None
    tf.keras.backend.clear_session()
    with (
        seeded(config.seed, deterministic=config.deterministic),
        all_or_nothing(out) as folder,
        _as_user_errors(data, out),
    ):
        _train(data, config, loader, test, folder, progress=progress)
    return Run.open(out)


def _train(
    data: PreparedData,
    config: TrainConfig,
    loader: Loader,
    test: Loader | None,
    folder: Path,
    *,
    progress: bool,
) -> None:
    """Write a whole run to `folder`."""
    described = _described(data, config)
    write_json(folder / CONFIG, described)
    shutil.copytree(data.path / "workflow", folder / "workflow")
    try:
        model, optimizer = _compiled(data, config, loader)
    except ValueError as error:  # of the data's columns, which only the network knows
        raise UserError(str(error)) from None
    log = EpochLog(test, folder / "metrics.csv")
    board = tf.keras.callbacks.TensorBoard(str(folder / "logs"), write_graph=False)
    model.fit(
        loader.dataset(epochs=None),
        epochs=config.epochs,
        steps_per_epoch=len(loader),
        callbacks=[StopAtNaN(config), log, board],
        verbose=1 if progress else 0,
    )
    save_model(model, folder / "model")
    last = log.epochs[-1]
    seconds = sum(epoch["seconds"] for epoch in log.epochs)
    result = {
        "format": FORMAT_VERSION,
        "auc": last["auc"],
        "log_loss": last["log_loss"],
        "epochs": log.epochs,
        "samples_per_second": loader.rows * config.epochs / seconds,
        "train_seconds": seconds,
        "parameters": count_parameters(model, optimizer),
        "config": described,
        "manifest": manifest_of(folder, without=("logs",)),
    }
    write_json(folder / RESULT, result)


def _compiled(
    data: PreparedData, config: TrainConfig, loader: Loader
) -> tuple[mm.Model, CowClipOptimizer]:
    hp = config.hyperparameters
    model = MODELS[config.model](data.schema, stddev=hp.init_stddev, **config.network_options)
    steps_per_epoch = loader.rows // config.batch_size  # the paper's ⌊N/b⌋
    schedules: dict[str, Any] = {}
    for name, rate in (("dense", hp.dense_lr), ("embedding", hp.embedding_lr)):
        plain = getattr(config, f"{name}_schedule")
        if plain is not None:
            assert not isinstance(plain, str)
            schedules[f"{name}_schedule"] = keras_schedule(
                plain, rate, epochs=config.epochs, steps_per_epoch=len(loader)
            )
    if "dense_schedule" in schedules:
        warmup_steps = math.floor(hp.warmup_epochs * steps_per_epoch)
        schedules["dense_schedule"] = LinearWarmup(schedules["dense_schedule"], warmup_steps)
    optimizer = CowClipOptimizer.for_model(
        model,
        hp,
        update=config.update,
        steps_per_epoch=steps_per_epoch,
        clip_tables=config.clip_tables,
        **schedules,
    )
    model.compile(optimizer=optimizer, metrics=[])
    return model, optimizer


@contextlib.contextmanager
def _as_user_errors(data: PreparedData, out: Path) -> Iterator[None]:
    """TensorFlow's and shutil's errors for a full disk, want of memory or other data, as these."""
    try:
        yield
    except (tf.errors.OpError, shutil.Error) as error:  # the latter has many errors, and no errno
        if "No space left on device" in str(error):
            raise UserError(
                f"output needs disk space. Received: none left for {out}. Free some, or name a "
                "folder on another disk"
            ) from None
        if isinstance(error, tf.errors.ResourceExhaustedError):
            raise UserError(
                "a step must fit into memory. Received: less than it takes "
                f"({str(error).splitlines()[0][:200]}). Choose a smaller batch size or network"
            ) from None
        for part in PARTS:
            data.footers(part)  # what a loader has met in a thread is an error of TensorFlow's here
        raise


def count_parameters(model: mm.Model, optimizer: CowClipOptimizer) -> dict[str, int]:
    """Trainable weights: `embedding` (all rows of all tables, 1-wide ones too) and `network`."""
    tables = {spec.variable.ref() for spec in optimizer.table_specs}
    sizes = {"embedding": 0, "network": 0}
    for variable in model.trainable_variables:
        kind = "embedding" if variable.ref() in tables else "network"
        sizes[kind] += math.prod(variable.shape)
    return sizes


class EpochLog(tf.keras.callbacks.Callback):
    """Measures each epoch: seconds of training, mean training loss, exact test AUC and log loss.

    Args:
      test: the loader of the test part; `None`: AUC and log loss are `None`, empty in the file.
      path: a CSV file that gets one line per epoch, as soon as the epoch ends.
    """

    def __init__(self, test: Loader | None, path: Path) -> None:
        super().__init__()
        self.epochs: list[dict[str, Any]] = []
        self._test = test
        self._path = path
        self._started = 0.0
        self._predictor: Predictor | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Stop the clock, then evaluate; the values also go to the other callbacks."""
        seconds = time.perf_counter() - self._started
        quality = None
        if self._test is not None:
            self._predictor = self._predictor or Predictor(self.model)
            quality = exact_quality(*self._predictor(self._test))
        logs = {} if logs is None else logs
        logs.pop("loss_batch", None)  # of the last batch alone
        logs.pop("regularization_loss", None)  # L2 is in the optimizer
        if quality is not None:
            logs.update(test_auc=quality.auc, test_log_loss=quality.log_loss)
        self.epochs.append(
            {
                "epoch": epoch + 1,
                "auc": quality and quality.auc,
                "log_loss": quality and quality.log_loss,
                "train_loss": float(logs["loss"]),
                "seconds": seconds,
            }
        )
        with self._path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(self.epochs[-1]))
            if epoch == 0:
                writer.writeheader()
            writer.writerow(self.epochs[-1])


class StopAtNaN(tf.keras.callbacks.Callback):
    """Ends a diverged run with a sentence instead of training on with NaN."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self._config = config

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Raise UserError if the epoch's mean loss is not finite."""
        loss = float((logs or {}).get("loss", 0.0))
        if not math.isfinite(loss):
            hp = self._config.hyperparameters
            raise UserError(
                f"the training loss must stay finite. Received: {loss} in epoch {epoch + 1}, with "
                f"dense_lr={hp.dense_lr:.6g}, embedding_lr={hp.embedding_lr:.6g}. The run "
                "diverged: lower the learning rates, or check the data for inf and NaN."
            )


def _described(data: PreparedData, config: TrainConfig) -> dict[str, Any]:
    gpus = [device.name for device in tf.config.list_physical_devices("GPU")]
    return {
        "data": str(data.path.resolve()),
        "dataset": data.spec.name,
        "rows": data.rows,
        "cardinalities": data.cardinalities,
        **inputs_of(data),
        **config.to_dict(),
        "scaled": config.hyperparameters.to_dict(),
        "identity": config.identity,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "gpus": gpus,
        },
    }
