"""Training on a prepared folder: model, optimizer, fit, exact test metrics, run folder."""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import math
import os
import platform
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins.scaling import Hyperparameters, find_rule, recipe, scale
from merlin_cowclip.workflows.datasets import check_input_names
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.prepared import PreparedData
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.runs import CONFIG, RESULT, Run, write_json

with quiet_imports():
    from merlin_cowclip.models import MODELS
    from merlin_cowclip.models.ctr_block import layer_units
    from merlin_cowclip.plugins import CowClipOptimizer, save_model
    from merlin_cowclip.plugins._stack import mm, tf
    from merlin_cowclip.plugins.adam import UPDATES
    from merlin_cowclip.workflows.evaluation import EVALUATION_BATCH, evaluate
    from merlin_cowclip.workflows.loading import Loader

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


@dataclass(frozen=True)
class TrainConfig:
    """What to train, and how; everything but the data and the place of the run.

    Attributes:
      model: a name in `MODELS`.
      batch_size: global samples per update.
      rule: a name in `SCALING_RULES`: how `base` becomes the values for `batch_size`.
      base: the hyperparameters tuned at `base.batch_size`; by default the rule's recipe.
      epochs: passes over the training part.
      seed: of the initial weights and of the order of the rows.
      update: "exact" or "lazy".
      deterministic: the same result to the last digit with the same seed on the same machine, for
        slower kernels on GPUs.
      embedding_dim: width of the embeddings.
      mlp: units of the deep stream's layers, in DLRM of the top MLP's.

    Raises:
      UserError: an unknown name, or a number out of range.
    """

    model: str = "deepfm"
    batch_size: int = 1024
    rule: str = "cowclip"
    base: Hyperparameters = field(default_factory=Hyperparameters)
    epochs: int = 10
    seed: int = 1234
    update: str = "exact"
    deterministic: bool = True
    embedding_dim: int = 10
    mlp: tuple[int, ...] = (400, 400, 400)

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise UserError(
                f"model must be one of {', '.join(MODELS)}. Received: model={self.model!r}"
            )
        if self.update not in UPDATES:
            raise UserError(
                f"update must be one of {', '.join(UPDATES)}. Received: update={self.update!r}"
            )
        if self.epochs <= 0:
            raise UserError(f"epochs must be positive. Received: epochs={self.epochs}")
        if self.seed < 0:
            raise UserError(f"seed must not be negative. Received: seed={self.seed}")
        dim = self.embedding_dim
        if isinstance(dim, bool) or not isinstance(dim, int) or dim <= 0:
            raise UserError(
                f"embedding_dim must be a positive whole number. Received: embedding_dim={dim!r}"
            )
        try:
            layer_units("mlp", self.mlp)
            _ = self.hyperparameters
        except ValueError as error:
            raise UserError(str(error)) from None

    @property
    def hyperparameters(self) -> Hyperparameters:
        """`base`, scaled to `batch_size` by `rule`."""
        return scale(self.base, to=self.batch_size, rule=self.rule)

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON, with the scaled values beside the base."""
        plain = dataclasses.asdict(self)
        plain["mlp"] = list(self.mlp)
        plain["rule"] = find_rule(self.rule).name
        return {**plain, "scaled": self.hyperparameters.to_dict()}


def base_hyperparameters(rule: str, **changes: Any) -> Hyperparameters:
    """The rule's recipe with some values replaced; `None` leaves a value alone.

    Raises:
      UserError: an unknown rule, or a value out of range.
    """
    try:
        return recipe(rule).replace(**{k: v for k, v in changes.items() if v is not None})
    except ValueError as error:
        raise UserError(str(error)) from None


def check(data: PreparedData, config: TrainConfig, out: str | Path) -> Loader:
    """Refuse what cannot be trained, before any work; returns the training part's loader.

    Raises:
      UserError: `out` exists, or the batch is larger than the training part.
    """
    out = Path(out)
    check_input_names(data.spec)
    if out.exists() or out.is_symlink():
        raise UserError(
            f"the run folder must not exist yet. Received: {out}. Remove it or choose another."
        )
    return Loader(data, "train", batch_size=config.batch_size, seed=config.seed)


def train(
    data: PreparedData, config: TrainConfig, out: str | Path, *, progress: bool = True
) -> Run:
    """Train a model on `data` and write a run folder to `out`.

    After each epoch the test part's exact AUC and log loss are measured (None without a test part);
    the times in the result are of the training alone.

    Raises:
      UserError: `out` exists, the batch is larger than the training part, or the loss became NaN.
    """
    out = Path(out)
    loader = check(data, config, out)
    test = Loader(data, "test", batch_size=EVALUATION_BATCH) if data.test_files else None

    tf.keras.backend.clear_session()
    tf.keras.utils.set_random_seed(config.seed)
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    hp = config.hyperparameters
    model = MODELS[config.model](
        data.schema, embedding_dim=config.embedding_dim, mlp=config.mlp, stddev=hp.init_stddev
    )
    optimizer = CowClipOptimizer.for_model(
        model,
        hp,
        update=config.update,
        steps_per_epoch=loader.rows // config.batch_size,  # the paper's ⌊N/b⌋
    )
    model.compile(optimizer=optimizer, metrics=[])

    described = _described(data, config)
    out.mkdir(parents=True)
    write_json(out / CONFIG, described)
    shutil.copytree(data.path / "workflow", out / "workflow")
    log = EpochLog(test, out / "metrics.csv")
    board = tf.keras.callbacks.TensorBoard(str(out / "logs"), write_graph=False)
    model.fit(
        loader.dataset(epochs=None),
        epochs=config.epochs,
        steps_per_epoch=len(loader),
        callbacks=[StopAtNaN(config), log, board],
        verbose=1 if progress else 0,
    )
    save_model(model, out / "model")
    last = log.epochs[-1]
    seconds = sum(epoch["seconds"] for epoch in log.epochs)
    result = {
        "auc": last["auc"],
        "log_loss": last["log_loss"],
        "epochs": log.epochs,
        "samples_per_second": loader.rows * config.epochs / seconds,
        "train_seconds": seconds,
        "parameters": count_parameters(model, optimizer),
        "config": described,
    }
    write_json(out / RESULT, result)
    return Run.open(out)


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

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start the clock."""
        self._started = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Stop the clock, then evaluate; the values also go to the other callbacks."""
        seconds = time.perf_counter() - self._started
        quality = None if self._test is None else evaluate(self.model, self._test)
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
        **config.to_dict(),
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
