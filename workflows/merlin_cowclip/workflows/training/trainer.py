"""The training loop: of a run, from any of its checkpoints on, and of a trial.

Its state is the model's and the optimizer's variables, the sums of statistics, and `Progress`; all
of it is in a checkpoint. What comes next depends on that alone.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.optimizers.state import mean_loss, shards_of, training_state
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import Notice, Stopped, UserError
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.training.checkpoint import Checkpoints, State
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.evaluation import Predictor
from merlin_cowclip.workflows.training.keeping import Keeping
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.logbook import FIELDS, METRICS, NORMS, Logbook, write_csv
from merlin_cowclip.workflows.training.ranks import agreed, here, mean_over_ranks
from merlin_cowclip.workflows.training.rebuilding import any_batch, compile_by, network
from merlin_cowclip.workflows.training.runs import CHECKPOINTS, RESULT, how_to_resume
from merlin_cowclip.workflows.training.scalars import (
    clip_sentence,
    field_rows,
    field_scalars,
    summary_scalars,
)
from merlin_cowclip.workflows.training.step_variables import StepVariables
from merlin_cowclip.workflows.training.stopping import Stopping
from merlin_cowclip.workflows.training.watch import Watch

LOG_EVERY = 50  # updates between two points of TensorBoard's curves
_QUALITY = ("auc", "log_loss", "calibration")


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
        """The number, from 1, of the epoch with the highest test AUC; the first of equal ones."""
        measured = [epoch for epoch in self.epochs if epoch["auc"] is not None]
        return max(measured, key=lambda e: e["auc"])["epoch"] if measured else None

    def is_out_of(self, patience: int | None) -> bool:
        """Whether so many epochs have passed since the best; never without patience."""
        best = self.best
        return patience is not None and best is not None and len(self.epochs) - best >= patience


class Trainer:
    """Builds a model, and trains it epoch by epoch.

    Args:
      data: the prepared folder.
      config: what to train.
      loader: of the training part.
      test: of the part that each epoch is measured on, or `None`.
      stopping: asked after each update.
      run: the run's folder, for checkpoints and logs; `None` for neither.
      keeping: when to take checkpoints.
      show: whether to show bars, and a line per epoch.
      after_update: called after each update.

    Raises:
      UserError: the network does not take the data's columns.
    """

    def __init__(
        self,
        data: PreparedData,
        config: TrainConfig,
        loader: Loader,
        test: Loader | None,
        stopping: Stopping,
        *,
        run: Path | None = None,
        keeping: Keeping | None = None,
        show: bool = False,
        after_update: Callable[[], Any] = lambda: None,
    ) -> None:
        try:
            self.model = network(config, data.schema)
            updates, batches = loader.rows // config.batch_size, len(loader)
            steps = {"updates": updates, "batches": batches}
            self.optimizer = compile_by(config, self.model, **steps)
        except ValueError as error:  # of the data's columns, which only the network knows
            raise UserError(str(error)) from None
        self._statistics = self.optimizer.observe()
        self.model(any_batch(vars(data.spec)))
        self._variables: StepVariables | None = None
        if config.update != "deferred":
            self._variables = StepVariables(config, self.optimizer, **steps)
        state = training_state(self.model)
        scales = (v for name, v in state.items() if name.startswith("loss_scale/"))
        self._scales = [(variable, variable.numpy()) for variable in scales]
        self._here = here()
        self._config, self._loader, self._test, self._stopping = config, loader, test, stopping
        self._run = run
        self._keeping = keeping or Keeping()
        self._show, self._after_update = show, after_update
        self._predictor = Predictor(self.model)
        self._start_anew()
        self._logbook = Logbook(run if self._here.rank == 0 else None)
        if run is not None:
            self._checkpoints = Checkpoints(run / CHECKPOINTS, self._keeping.keep, self._here)
            self._state = self._all_of_it()
            self._saved = (-1, 0)  # updates, and epochs that were measured
            self._saved_at = time.monotonic()

    def reset(
        self,
        config: TrainConfig,
        loader: Loader,
        weights: Sequence[np.ndarray],
        stopping: Stopping,
        after_update: Callable[[], Any],
    ) -> None:
        """Reset to the state of a new trainer without a run; keep the compiled step.

        Args:
          config: with the same `compiled_step_key`.
          loader: of the training part.
          weights: initial ones, in the order of `model.weights`; of tables for σ = 1.
          stopping: asked after each update.
          after_update: called after each update.
        """
        assert self._variables is not None
        stddev = config.hyperparameters.init_stddev
        tables = {spec.variable.ref() for spec in self.optimizer.table_specs}
        for variable, value in zip(self.model.weights, weights, strict=True):
            # As `tf.random.normal` does: so a zero has no sign.
            variable.assign(value * stddev + 0.0 if variable.ref() in tables else value)
        for variable in (*self.optimizer.weights, *self._statistics.variables):
            variable.assign(tf.zeros_like(variable))
        for variable, value in self._scales:
            variable.assign(value)
        self._variables.assign(config)
        self._config, self._loader = config, loader
        self._stopping, self._after_update = stopping, after_update
        self._start_anew()

    def _start_anew(self) -> None:
        self.progress, self.step = Progress(), 0
        self._watch = Watch(self.optimizer, len(self._loader), self._config)

    @property
    def rows(self) -> int:
        """Rows that an epoch trains on."""
        return self._loader.rows_per_epoch

    @property
    def best_step(self) -> int | None:
        """The update that the best epoch ended with."""
        best = self.progress.best
        return None if best is None else best * len(self._loader)

    def clip_summary(self) -> str:
        """A sentence for the end of the run; on all ranks at once."""
        return clip_sentence(self._statistics.total(), self._config.clip)

    # The loop

    def epochs(self) -> Iterator[dict[str, Any]]:
        """Train from where it is to the end; gives what was measured after each epoch.

        Raises:
          Stopped: it was asked to, and is saved; without a run's folder a KeyboardInterrupt.
          UserError: a loss, gradient or weight is not finite, or the data cannot be read;
            checkpoints are as they were.
        """
        loader, dataset = self._loader, self._loader.endless
        if self.step:
            epoch, start = divmod(self.step, len(loader))
            dataset = loader.dataset(epochs=None, epoch=epoch, start=start)
        batches = iter(dataset)
        function = self.model.make_train_function()
        with self._logbook:
            while not self._is_finished():
                self._train_epoch(function, batches)
                yield self._end_epoch()
                self._stop_if_asked(now=True)

    def _is_finished(self) -> bool:
        is_last = len(self.progress.epochs) >= self._config.epochs
        return is_last or self.progress.is_out_of(self._config.patience)

    def _train_epoch(self, function: Any, batches: Any) -> None:
        """The rest of an epoch; none, if it was stopped before the epoch was measured."""
        epoch, steps = len(self.progress.epochs), len(self._loader)
        k = self.step - epoch * steps
        if not k:
            # Not `reset_metrics`, which passes over it before the process's first update.
            mean_loss(self.model).reset_state()
            self._statistics.reset()
        title = f"epoch {epoch + 1}/{self._config.epochs}"
        bars = self._show and sys.stderr.isatty()  # in a log there is the line of each epoch
        with progress_bar(title, steps, " batches", show=bars) as bar:
            bar.leave = False  # its line is the epoch's own
            bar.update(k)
            # Seconds, once in each process, for however many rows: no time of training. It is held.
            if isinstance(function, tf.types.experimental.GenericFunction):  # else eager: no graph
                function.get_concrete_function(batches)
            self._stopping.begin()
            begun = time.perf_counter()
            for _ in range(k, steps):
                logs = function(batches)
                self.step += 1
                self._watch.see(self.step, logs["loss_batch"])
                bar.update()
                now = time.perf_counter()
                self.progress.seconds, begun = self.progress.seconds + now - begun, now
                if self.step % LOG_EVERY == 0:
                    loss = _mean(logs["loss"])
                    bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                    if self._run is not None:
                        self._logbook.scalars(self.step, self._tags(loss))
                if self._stop_if_asked() and self.step % steps:
                    self._save()
                self._after_update()

    def _stop_if_asked(self, *, now: bool = False) -> bool:
        """Whether a checkpoint is due; called after each update, and, `now`, between epochs."""
        every, minutes = self._keeping.steps, self._keeping.minutes
        is_late = minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes
        is_late = self._stopping.agree(is_late, now=now)
        if self._stopping.asked and not self._is_finished():
            raise self._stopped()
        return self._run is not None and (is_late or (every is not None and self.step % every == 0))

    def _stopped(self) -> BaseException:
        """Save, and say so."""
        if self._run is None:
            return KeyboardInterrupt()
        self._save()
        number, total = self._stopping.number, self._config.epochs * len(self._loader)
        why = "stopped as its time was over" if number is None else "interrupted"
        return Stopped(
            f"{why} after update {self.step:,} of {total:,}, which is saved. Resume with: "
            f"{how_to_resume(self._run)}",
            number,
        )

    def _end_epoch(self) -> dict[str, Any]:
        """Measure it, write it down, and take a checkpoint."""
        self._stopping.begin()  # a resumed run may have it before any update
        self._watch.look(self.step)
        self._stop_if_asked(now=True)
        quality: Sequence[float | None] = (None, None, None)
        place = self._here
        if self._test is not None:
            quality = self._predictor.quality(self._test, rank=place.rank, ranks=place.size)
        row = {
            "epoch": len(self.progress.epochs) + 1,
            **dict(zip(_QUALITY, quality, strict=True)),
            "train_loss": _mean(mean_loss(self.model).result()),
            "seconds": self.progress.seconds,
        }
        if self._run is not None:
            self._log(row)
        self.progress.epochs.append(row)
        self.progress.seconds = 0.0
        if self._run is not None:
            self._save()
        if self._show:
            print(self._line(row), flush=True)
        return row

    # What it writes

    def _log(self, row: Mapping[str, Any]) -> None:
        overall, fields = self._scalars(row["train_loss"])
        epoch, tables = {"epoch": row["epoch"]}, self.progress.tables
        for name, rows in (
            (METRICS, [{**row, **{k: v for k, v in overall.items() if k != "loss"}}]),
            (FIELDS, field_rows(fields)),
            (NORMS, [dataclasses.asdict(one) for one in self._statistics.gradient_norms()]),
        ):
            if rows:
                tables.setdefault(name, []).extend({**epoch, **one} for one in rows)
        measured = {f"all/test_{k}": row[k] for k in _QUALITY if row[k] is not None}
        with agreed():
            if self._run is not None and self._here.rank == 0:
                write_csv(self._run, tables)
            self._logbook.scalars(self.step, measured)

    def _scalars(self, loss: float) -> tuple[dict[str, float | None], list[Any]]:
        """Of the epoch so far: over all fields, and what those were like."""
        k = (self.step - 1) % len(self._loader) + 1
        rates, fields = self.optimizer.learning_rates(), self._statistics.read()
        overall: dict[str, float | None] = {
            "loss": loss,
            "samples_per_second": min(k * self._config.batch_size, self.rows)
            / self.progress.seconds,
            "dense_lr": rates.dense,
            "embedding_lr": rates.embedding,
            **summary_scalars(fields),
        }
        return overall, fields

    def _tags(self, loss: float) -> dict[str, float]:
        """The same as TensorBoard has it, which shows the groups of its page by name."""
        overall, fields = self._scalars(loss)
        tags = {f"all/{name}": value for name, value in overall.items() if value is not None}
        return tags | {f"field_{tag}": value for tag, value in field_scalars(fields).items()}

    def _line(self, row: Mapping[str, Any]) -> str:
        parts = [f"loss {row['train_loss']:.4f}"]
        if row["auc"] is not None:
            parts += [f"test AUC {row['auc']:.4f}", f"log loss {row['log_loss']:.4f}"]
            parts.append(f"predicted/actual CTR {row['calibration']:.2f}")
        speed = self.rows / row["seconds"]
        shown = f"{speed / 1000:.1f}k" if speed >= 1000 else f"{speed:.0f}"
        parts.append(f"{row['seconds']:.0f} s, {shown} samples/s")
        if row["auc"] is not None and self.progress.best == row["epoch"]:
            parts.append("best")
        return f"[{row['epoch']}/{self._config.epochs}] {' | '.join(parts)}"

    # From and to checkpoints

    def _all_of_it(self) -> State:
        variables = training_state(self.model)
        sharded = shards_of(self.model, variables)
        sums = {f"statistics/{i:04}": one for i, one in enumerate(self._statistics.variables)}
        own = {name for name in variables if name.startswith("loss/")}
        own |= set(sums) if sharded else set()  # of replicated tables all ranks have the same
        variables |= sums
        return State(
            {n: v for n, v in variables.items() if n not in own and n not in sharded},
            {name: variables[name] for name in own},
            {name: variables[name] for name in sharded},
        )

    def restore_last(self) -> None:
        """Be where the last checkpoint was taken that can be read, or at the beginning."""
        assert self._run is not None
        checkpoint, damaged = self._checkpoints.restore_last(self._state)
        if checkpoint is None:
            with agreed():
                if self._here.rank == 0 and (self._run / RESULT).exists():
                    raise UserError(
                        f"a finished run resumes from its last checkpoint. Received: {self._run}, "
                        "without one. Put it back, or train another run"
                    )
        else:
            for problem in damaged:
                then = f"The run resumes from update {checkpoint.step:,}"
                warnings.warn(f"{problem}. {then}", Notice, stacklevel=4)
            progress, names = checkpoint.progress, dataclasses.fields(Progress)
            self.progress = Progress(**{field.name: progress[field.name] for field in names})
            self.step = checkpoint.step
            self._saved = self._place
        if self._here.rank == 0:
            self._checkpoints.tidy(checkpoint)
        self.optimizer.broadcast()

    @property
    def _place(self) -> tuple[int, int]:
        """Updates, and epochs that were measured: of the end of one there are two states."""
        return self.step, len(self.progress.epochs)

    def _save(self) -> None:
        """Write a checkpoint of now, unless there is one."""
        if self._place == self._saved:
            return
        shared, shards = self._state.shared.items(), self._state.shards.items()
        weights = [v for name, v in (*shared, *shards) if name.startswith("weight/")]
        self._watch.look(self.step, [v for v in weights if v.dtype.is_floating])
        progress = dataclasses.asdict(self.progress)
        self._checkpoints.save(self.step, self._state, progress, best=self.best_step)
        self._saved, self._saved_at = self._place, time.monotonic()


def _mean(loss: tf.Tensor) -> float:
    """Over all ranks."""
    return float(mean_over_ranks(np.array(float(loss))))
