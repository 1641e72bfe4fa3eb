# SPDX-License-Identifier: Apache-2.0
"""The training loop of a run and of a trial.

Its state is the model's and the optimizer's variables, the sums of statistics, and `Progress`; all
of it is in a checkpoint. What comes next depends on that alone.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from merlin_cowclip.plugins import FieldStatistics, RowStatistics
from merlin_cowclip.plugins._tensorflow import precision_policy, tf
from merlin_cowclip.plugins.optimizers.state import mean_loss, shards_of, training_state
from merlin_cowclip.workflows.errors import NotFiniteError, Stopped, UserError
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.training.builder import (
    compile_model,
    dummy_batch,
    network,
    set_seeds,
)
from merlin_cowclip.workflows.training.checkpoint import Checkpoints, State
from merlin_cowclip.workflows.training.configuration import CheckpointConfig, TrainConfig
from merlin_cowclip.workflows.training.evaluation import EVALUATION_BATCH, Predictor, Quality
from merlin_cowclip.workflows.training.listeners import FIELDS, METRICS, NORMS, Listener, notify
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.ranks import (
    gather_objects,
    raise_on_any_rank,
    rank_info,
)
from merlin_cowclip.workflows.training.runs import CHECKPOINTS, how_to_resume
from merlin_cowclip.workflows.training.stopping import Stopping

CHECK_EVERY = 25  # updates between two checks for NaN and infinity
LOG_EVERY = 50  # updates between two calls of `Listener.on_step`
PRINT_EVERY = 60.0  # seconds between two lines of an epoch, where no bar shows it


@dataclasses.dataclass
class Progress:
    """How far a run is, beside its variables; fit for JSON.

    Attributes:
      epochs: what was measured after each.
      seconds: of training in the epoch under way.
      tables: the rows of its CSV files, by name.
    """

    epochs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    tables: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)

    @property
    def best(self) -> int | None:
        """The number, from 1, of the epoch with the highest AUC on the validation part.

        The first of equal ones; None without a validation part.
        """
        measured = [epoch for epoch in self.epochs if epoch["valid_auc"] is not None]
        return max(measured, key=lambda e: e["valid_auc"])["epoch"] if measured else None

    def is_out_of(self, patience: int | None) -> bool:
        """Whether so many epochs have passed since the best; never without patience."""
        best = self.best
        return patience is not None and best is not None and len(self.epochs) - best >= patience


class Trainer:
    """Sets the process's seeds, builds a model, and trains it epoch by epoch.

    Args:
      config: what to train.
      loader: of the training part.
      stopping: asked after each update.
      run: the run's folder, for checkpoints; `None` for none.
      checkpointing: when to take checkpoints, and to log.
      show: whether to show bars, and a line per epoch.
      after_step: called after each update.

    Raises:
      UserError: the network does not take the data's columns.
    """

    def __init__(
        self,
        config: TrainConfig,
        loader: Loader,
        stopping: Stopping,
        *,
        run: Path | None = None,
        checkpointing: CheckpointConfig | None = None,
        show: bool = False,
        after_step: Callable[[], Any] = lambda: None,
    ) -> None:
        tf.keras.backend.clear_session()
        set_seeds(config.seed, deterministic=config.deterministic)
        data = loader.data
        self._config, self._loader, self._stopping = config, loader, stopping
        self._run, self._checkpointing, self._show = run, checkpointing or CheckpointConfig(), show
        self._after_step = after_step
        self._valid = data.valid_files and Loader(data, "valid", batch_size=EVALUATION_BATCH)
        steps = {"updates": loader.rows // config.batch_size, "batches": len(loader)}
        with precision_policy(config.precision):
            try:
                self.model = network(config, data.schema)
                self.optimizer = compile_model(config, self.model, **steps)
            except ValueError as error:  # of the data's columns, which only the network knows
                raise UserError(str(error)) from None
            self.statistics = self.optimizer.observe()
            self.model(dummy_batch(vars(data.spec)))
        self.optimizer.create_slots(self.model.trainable_variables)
        self._predictor = Predictor(self.model)
        self.listeners: Sequence[Listener] = ()
        self.progress, self.step = Progress(), 0
        self._losses: list[tf.Tensor] = []  # since the last check
        if run is not None:
            self._checkpoints = Checkpoints(run / CHECKPOINTS, self._checkpointing.keep)
            self._state = self._grouped(training_state(self.model))
            self._saved, self._saved_at = 0, time.monotonic()

    @property
    def best_step(self) -> int | None:
        """The update that the best epoch ended with."""
        best = self.progress.best
        return None if best is None else best * len(self._loader)

    # The loop

    def epochs(self) -> Iterator[dict[str, Any]]:
        """Train from where it is to the end; gives what was measured after each epoch.

        Raises:
          Stopped: it was asked to, and is saved; without a run's folder a KeyboardInterrupt.
          UserError: a loss, gradient or weight is not finite, or the data cannot be read;
            checkpoints are as they were.
        """
        epoch, start = divmod(self.step, len(self._loader))
        batches = iter(self._loader.dataset(epochs=None, epoch=epoch, start=start))
        function = self.model.make_train_function()
        while not self._is_finished():
            self._train_epoch(function, batches)
            yield self._end_epoch()
            self._stop_if_asked(now=True)

    def _is_finished(self) -> bool:
        is_last = len(self.progress.epochs) >= self._config.epochs
        return is_last or self.progress.is_out_of(self._config.patience)

    def _train_epoch(self, function: Any, batches: Any) -> None:
        """The rest of an epoch."""
        epoch, steps = len(self.progress.epochs), len(self._loader)
        every = self._checkpointing.log_every
        begin = self.step - epoch * steps
        if not begin:
            # Not `reset_metrics`, which passes over it before the process's first update.
            mean_loss(self.model).reset_state()
            self.statistics.reset()
        title = f"epoch {epoch + 1}/{self._config.epochs}"
        bars = self._show and sys.stderr.isatty()
        with progress_bar(title, steps, " batches", show=bars) as bar:
            bar.leave = False  # its line is the epoch's own
            bar.update(begin)
            # Seconds, once in each process, for however many rows: no time of training. It is held.
            if isinstance(function, tf.types.experimental.GenericFunction):  # else eager: no graph
                function.get_concrete_function(batches)
            before = printed = time.perf_counter()
            for _ in range(begin, steps):
                logs = function(batches)
                self.step += 1
                self.see(logs["loss_batch"])
                bar.update()
                now = time.perf_counter()
                self.progress.seconds, before = self.progress.seconds + now - before, now
                if self.step % (every or LOG_EVERY) == 0:
                    loss = _mean(logs["loss"])
                    bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                    if self.listeners:
                        notify(self.listeners, "on_step", self.step, self._tags(loss))
                is_due = self.step % every == 0 if every else now - printed >= PRINT_EVERY
                if self._show and not bars and is_due:
                    printed, loss, done = now, float(logs["loss"]), self.step - epoch * steps
                    speed = done * self._config.batch_size / self.progress.seconds / 1000
                    line = f"step {done}/{steps} | loss {loss:.4f} | {speed:.1f}k samples/s"
                    print(f"[{title}] {line}", flush=True)
                if self.step % steps and self._stop_if_asked():  # an epoch's end is saved measured
                    self._save()
                self._after_step()

    def see(self, loss: tf.Tensor) -> None:
        """After an update: keep its loss, and check if it is time."""
        self._losses.append(loss)
        if self.step % CHECK_EVERY == 0:
            self._check_finite()

    def _check_finite(self, weights: Iterable[tf.Variable] = ()) -> None:
        """Raise NotFiniteError if a loss, a gradient or a weight is NaN or infinite.

        Gradients and table rows are in sums that a NaN never leaves (`CowClipOptimizer.observe`),
        so a check reads a few scalars, the dense weights and `weights`.
        """
        losses = np.mean(gather_objects([float(loss) for loss in self._losses]), axis=0)
        self._losses = []
        with raise_on_any_rank():
            broken = [str(one) for one in self.optimizer.not_finite()]
            broken += [v.name for v in weights if not bool(tf.reduce_all(tf.math.is_finite(v)))]
            bad, hp = np.flatnonzero(~np.isfinite(losses)), self._config.hyperparameters
            if not len(bad) and not broken:
                return
            first = int(bad[0]) if len(bad) else len(losses) - 1
            step = self.step - len(losses) + 1 + first
            loss = "".join(f"loss {value:g} " for value in losses[first:][:1])
            named = f", with {', '.join(broken[:4])}" if broken else ""
            raise NotFiniteError(
                f"loss, gradients and weights must stay finite. Received: {loss}by update "
                f"{step:,}, epoch {(step - 1) // len(self._loader) + 1}{named}. The run diverged, "
                f"with dense_lr={hp.dense_lr:.6g}, embedding_lr={hp.embedding_lr:.6g}: lower them. "
                "If it does so with any, look for NaN among the numbers of adopted data"
            )

    def _stop_if_asked(self, *, now: bool = False) -> bool:
        """Whether a checkpoint is due; after an update or, `now`, an epoch. Saves before it stops.

        Raises:
          Stopped: it was asked to; without a run's folder a KeyboardInterrupt.
        """
        (steps, seconds), stopping = self._checkpointing.interval, self._stopping
        is_late = seconds < math.inf and time.monotonic() - self._saved_at >= seconds
        is_late = stopping.agree(is_late, now=now)
        if not stopping.asked or self._is_finished():
            return self._run is not None and (is_late or self.step % steps == 0)
        if self._run is None:
            raise KeyboardInterrupt
        self._save()
        total = self._config.epochs * len(self._loader)
        why = "stopped as its time was over" if stopping.number is None else "interrupted"
        raise Stopped(
            f"{why} after update {self.step:,} of {total:,}, which is saved. Resume with: "
            f"{how_to_resume(self._run)}",
            stopping.number,
        )

    def _end_epoch(self) -> dict[str, Any]:
        """Measure it, write it down, and take a checkpoint."""
        self._check_finite()
        row = {
            "epoch": len(self.progress.epochs) + 1,
            **{f"valid_{name}": value for name, value in self._quality(self._valid).items()},
            "train_loss": _mean(mean_loss(self.model).result()),
            "seconds": self.progress.seconds,
        }
        if self._run is not None:
            self._log(row)
        self.progress.epochs.append(row)
        self.progress.seconds = 0.0
        self._save()
        if self._show:
            print(self._line(row), flush=True)
        return row

    def finish(self) -> tuple[str, dict[str, float | None]]:
        """Restore the checkpoint that the run is used with, and measure the test part, once.

        Returns "best" (with patience) or "last", and the metrics, None without a test part.
        """
        which = "last" if self._config.patience is None else "best"
        if which == "best" and self.best_step != self.step:
            assert self.best_step is not None  # patience needs a validation part
            self._checkpoints.at(self.best_step).restore(self._state)
        data = self._loader.data
        test = data.test_files and Loader(data, "test", batch_size=EVALUATION_BATCH)
        return which, self._quality(test)

    def _quality(self, loader: Any) -> dict[str, float | None]:
        """On a held-out part; None of each metric without one."""
        if not loader:
            return dict.fromkeys(Quality._fields)
        ranks = rank_info()
        with self.optimizer.averages():
            return self._predictor.quality(loader, rank=ranks.rank, ranks=ranks.size)._asdict()

    # What it writes

    def _log(self, row: Mapping[str, Any]) -> None:
        overall, fields = self._scalars()
        tables = self.progress.tables
        for name, rows in (
            (METRICS, [{**row, **overall}]),
            (FIELDS, field_rows(fields)),
            (NORMS, [dataclasses.asdict(one) for one in self.statistics.gradient_norms()]),
        ):
            if rows:
                new = ({"epoch": row["epoch"], **one} for one in rows)
                tables.setdefault(name, []).extend(new)
        notify(self.listeners, "on_epoch", self.step, tables[METRICS][-1], tables)

    def _scalars(self) -> tuple[dict[str, float | None], list[Any]]:
        """Of the epoch so far: over all fields, and what those were like."""
        batches = (self.step - 1) % len(self._loader) + 1
        rows = min(batches * self._config.batch_size, self._loader.rows_per_epoch)
        rates, fields = self.optimizer.learning_rates(), self.statistics.read()
        overall: dict[str, float | None] = {
            "samples_per_second": rows / self.progress.seconds,
            "dense_lr": rates.dense,
            "embedding_lr": rates.embedding,
            **summary_scalars(fields),
        }
        return overall, fields

    def _tags(self, loss: float) -> dict[str, float]:
        """The same as TensorBoard has it."""
        values = {"loss": loss, **self._scalars()[0]}
        return {f"all/{name}": value for name, value in values.items() if value is not None}

    def _line(self, row: Mapping[str, Any]) -> str:
        parts = [f"loss {row['train_loss']:.4f}"]
        if row["valid_auc"] is not None:
            parts.append(f"valid AUC {row['valid_auc']:.4f}, log loss {row['valid_log_loss']:.4f}")
            parts.append(f"predicted/actual CTR {row['valid_calibration']:.2f}")
        speed = self._loader.rows_per_epoch / row["seconds"]
        shown = f"{speed / 1000:.1f}k" if speed >= 1000 else f"{speed:.0f}"
        parts.append(f"{row['seconds']:.0f} s, {shown} samples/s")
        if self.progress.best == row["epoch"]:
            parts.append("best")
        return f"[{row['epoch']}/{self._config.epochs}] {' | '.join(parts)}"

    # From and to checkpoints

    def _grouped(self, variables: dict[str, tf.Variable]) -> State:
        """All variables that training changes, by how ranks have them."""
        sharded = shards_of(self.model, variables)
        sums = {f"statistics/{i:04}": one for i, one in enumerate(self.statistics.variables)}
        own = {name for name in variables if name.startswith("loss/")}
        own |= set(sums) if sharded else set()  # of replicated tables all ranks have the same
        variables = variables | sums
        return State(
            {n: v for n, v in variables.items() if n not in own and n not in sharded},
            {name: variables[name] for name in own},
            {name: variables[name] for name in sharded},
        )

    def restore_last(self) -> None:
        """Be where the last checkpoint was taken that can be read, or at the beginning."""
        if checkpoint := self._checkpoints.restore_last(self._state):
            names = [field.name for field in dataclasses.fields(Progress)]
            self.progress = Progress(**{name: checkpoint.progress[name] for name in names})
            self.step = self._saved = checkpoint.step
        self.optimizer.broadcast()

    def _save(self) -> None:
        """Write a checkpoint of now, unless there is one; without a run's folder none."""
        if self._run is None or self.step == self._saved:
            return
        shared, shards = self._state.shared.items(), self._state.shards.items()
        weights = [v for name, v in (*shared, *shards) if name.startswith("weight/")]
        self._check_finite([v for v in weights if v.dtype.is_floating])
        progress = dataclasses.asdict(self.progress)
        self._checkpoints.save(self.step, self._state, progress, best=self.best_step)
        self._saved, self._saved_at = self.step, time.monotonic()


def _mean(loss: tf.Tensor) -> float:
    """Over all ranks."""
    return float(np.mean(gather_objects(float(loss))))


# Quantity → its value for a field that was updated.
_QUANTITIES: dict[str, Callable[[FieldStatistics], float | None]] = {
    "ids_per_batch": lambda field: field.all.rows / field.steps,
    "rows_clipped": lambda field: field.all.share_of_rows_clipped,
    "occurrences_clipped": lambda field: field.all.share_of_occurrences_clipped,
    "gradient_norm_frequent": lambda field: field.frequent.gradient_norm,
    "gradient_norm_rare": lambda field: field.rare.gradient_norm,
    "weight_norm_frequent": lambda field: field.frequent.weight_norm,
    "weight_norm_rare": lambda field: field.rare.weight_norm,
}
_OF_THE_CLIP = ("rows_clipped", "occurrences_clipped")


def _values(field: FieldStatistics) -> dict[str, float | None]:
    unseen = () if field.is_clipped else _OF_THE_CLIP
    return {
        name: None if not field.steps or name in unseen else value_of(field)
        for name, value_of in _QUANTITIES.items()
    }


def field_rows(fields: Iterable[FieldStatistics]) -> list[dict[str, Any]]:
    """For each field its `table`, its `field` (name) and every quantity.

    `None`: the field was not updated, the clip does not apply to it, or a mean over no ids. Shares
    are from 0 to 1, norms are means over ids and steps.
    """
    return [{"table": field.table, "field": field.field, **_values(field)} for field in fields]


def summary_scalars(fields: Sequence[FieldStatistics]) -> dict[str, float | None]:
    """The same over all fields of the embeddings (tables of width 2 and more, where there are any).

    What is of the clip is of all fields that it applies to, and of none other.
    """
    chosen = [field for field in fields if field.width > 1] or list(fields)
    steps = max((field.steps for field in chosen), default=0)
    frequent, rare = (_sum(getattr(f, kind) for f in chosen) for kind in ("frequent", "rare"))
    clipped = _sum(field.all for field in fields if field.is_clipped)
    return {
        **_values(FieldStatistics("", "", 0, True, steps, frequent, rare)),
        "rows_clipped": clipped.share_of_rows_clipped,
        "occurrences_clipped": clipped.share_of_occurrences_clipped,
    }


def _sum(parts: Iterable[RowStatistics]) -> RowStatistics:
    return sum(parts, RowStatistics(0, 0, 0, 0, 0.0, 0.0))


def clip_sentence(fields: Sequence[FieldStatistics], clip: str | None) -> str:
    """A sentence on what the clip did to the ids of a run; shares are of the clipped fields."""
    clipped = [one for one in fields if one.is_clipped and one.steps]
    if not clipped:
        return "No table is clipped."
    total = _sum(field.all for field in clipped)
    if not total.clipped_rows:
        name = "CowClip" if clip == "adaptive_column" else "The clip"
        return (
            f"{name} was inactive in this run (no row reached its bound); the result comes from "
            "the hyperparameters."
        )
    touched = sum(field.all.clipped_rows > 0 for field in clipped)
    return (
        f"Gradients of {100 * total.clipped_rows / total.rows:.3g} % of the rows were clipped "
        f"({100 * total.clipped_occurrences / total.occurrences:.3g} % of the occurrences), in "
        f"{touched} of {len(clipped)} clipped fields."
    )
