"""The training loop of a run: update by update, from any place, so that it can go on from one.

Its state is the model's and the optimizer's variables, the sums of statistics, and `Progress`; all
of it is in a checkpoint. What comes next depends on that alone.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from merlin_cowclip.plugins import FieldStatistics
from merlin_cowclip.plugins._tensorflow import mm, tf
from merlin_cowclip.plugins.optimizers.state import (
    mean_loss,
    optimizer_of,
    shards_of,
    training_state,
)
from merlin_cowclip.workflows.errors import Notice, Stopped, UserError
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.training.checkpoint import (
    Checkpoint,
    Checkpoints,
    State,
    not_finite,
)
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.epochs import Progress
from merlin_cowclip.workflows.training.evaluation import Predictor
from merlin_cowclip.workflows.training.growing_files import check_lengths, cut_back, lengths
from merlin_cowclip.workflows.training.keeping import Keeping
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.logbook import Logbook, NoLogbook
from merlin_cowclip.workflows.training.meeting import Meeting
from merlin_cowclip.workflows.training.ranks import agreed, here, mean_over_ranks
from merlin_cowclip.workflows.training.runs import CHECKPOINTS, RESULT, how_to_resume
from merlin_cowclip.workflows.training.scalars import (
    clip_sentence,
    field_rows,
    field_scalars,
    summary_scalars,
)
from merlin_cowclip.workflows.training.stopping import Interrupted, Stopping
from merlin_cowclip.workflows.training.watch import NotFiniteError, Watch

_SUMS = "statistics"
LOG_EVERY = 50  # updates between two points of TensorBoard's curves


class NoCheckpointError(UserError):
    """A finished run has none to go on from."""


class Training:
    """One run on its way.

    Args:
      run: its folder, with all that does not change.
      model: built, compiled, its optimizer observed.
      statistics: of the optimizer.
      config: of the run.
      keeping: when to take checkpoints.
      loader: of the training part.
      test: of the test part, or `None`.
      progress: whether to show bars, and a line per epoch.
    """

    def __init__(
        self,
        run: Path,
        model: mm.Model,
        statistics: Any,
        config: TrainConfig,
        keeping: Keeping,
        loader: Loader,
        test: Loader | None,
        *,
        progress: bool,
    ) -> None:
        self.model = model
        self.progress = Progress()
        self.step = 0
        self._here = here()
        self.checkpoints = Checkpoints(run / CHECKPOINTS, keeping.keep, self._here)
        self._run = run
        self._statistics = statistics
        self._config = config
        self._keeping = keeping
        self._loader = loader
        self._test = test
        self._show = progress
        self._predictor = Predictor(model)
        self._optimizer = optimizer_of(model)
        self._watch = Watch(self._optimizer, loader, config)
        self._state = self._all_of_it()
        self._saved = (-1, 0)  # updates, and epochs that were measured
        self._saved_at = time.monotonic()

    @property
    def rows(self) -> int:
        """Rows that an epoch trains on."""
        return self._loader.rows_per_epoch

    @property
    def best_step(self) -> int | None:
        """The update that the best epoch ended with."""
        best = self.progress.best
        return None if best is None else self._end_of(best)

    @property
    def _is_first(self) -> bool:
        """Whether this is the rank that has the run's folder."""
        return self._here.rank == 0

    @property
    def _place(self) -> tuple[int, int]:
        """Updates, and epochs that were measured: of the end of one there are two states."""
        return self.step, len(self.progress.epochs)

    # From and to checkpoints

    def _all_of_it(self) -> State:
        variables = training_state(self.model)
        sharded = shards_of(self.model, variables)
        sums = {f"{_SUMS}/{i:04}": one for i, one in enumerate(self._statistics.variables)}
        own = {name for name in variables if name.startswith("loss/")}
        own |= set(sums) if sharded else set()  # of replicated tables all ranks have the same
        variables |= sums
        return State(
            {n: v for n, v in variables.items() if n not in own and n not in sharded},
            {name: variables[name] for name in own},
            {name: variables[name] for name in sharded},
        )

    def go_on_from_last(self, begin: Callable[[], None] = lambda: None) -> None:
        """Be where the last checkpoint was taken that can be read, or at the beginning.

        Args:
          begin: called once it is sure, before anything of the run is changed.

        Raises:
          NoCheckpointError: the run is finished, and would have to begin again.
          UserError: no checkpoint can be read, or a file that grows is gone.
        """
        checkpoint, damaged = self.checkpoints.restore_last(self._state)
        with agreed():
            if self._is_first:
                self._check_can_go_on(checkpoint)
        for problem in damaged:
            assert checkpoint is not None
            then = f"The run goes on from update {checkpoint.step:,}"
            warnings.warn(f"{problem}. {then}", Notice, stacklevel=4)
        with agreed():
            if self._is_first:
                begin()
                self.checkpoints.tidy(checkpoint)
                cut_back(self._run, checkpoint.progress["lengths"] if checkpoint else {})
        if checkpoint is not None:
            progress = checkpoint.progress
            _set_random_state(progress["random"])
            self.step = checkpoint.step
            self.progress = Progress(list(progress["epochs"]), progress["seconds"])
            self._saved = self._place
            self._watch.begin(self.step)
        self._optimizer.broadcast()

    def _check_can_go_on(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is not None:
            check_lengths(self._run, checkpoint.progress["lengths"])
        elif (self._run / RESULT).exists():
            raise NoCheckpointError(
                f"a finished run goes on from its last checkpoint. Received: {self._run}, without "
                "one. Its result is as it was. Put the checkpoint back, or train another run"
            )

    def _save(self, book: Logbook) -> None:
        """Write a checkpoint of now, unless there is one.

        Raises:
          UserError: something is not finite, which no checkpoint may hold.
        """
        if self._place == self._saved:
            return
        self._watch.look(self.step)
        with agreed():
            broken = not_finite({**self._state.shared, **self._state.shards})
            if broken:
                raise NotFiniteError(
                    "weights must stay finite. Received: NaN or infinity in "
                    f"{', '.join(broken[:4])}, after update {self.step:,}. The run diverged: lower "
                    "the learning rates"
                )
        self.checkpoints.save(
            self.step,
            self._state,
            {
                **dataclasses.asdict(self.progress),
                "lengths": lengths(self._run) if self._is_first else {},
                "random": _random_state(),
            },
            best=self.best_step,
        )
        self._saved, self._saved_at = self._place, time.monotonic()

    def _end_of(self, epoch: int) -> int:
        return epoch * len(self._loader)

    # The loop

    def train(self, stopping: Stopping) -> None:
        """Train to the end; or stop before it, saved.

        Raises:
          Stopped: it was asked to.
          UserError: a loss, gradient or weight is not finite, the data cannot be read, or the disk
            is full; checkpoints are as they were.
        """
        total = self._end_of(self._config.epochs)
        self._meeting = Meeting(self._here, stopping)
        with Logbook(self._run) if self._is_first else NoLogbook() as book:
            function = self.model.make_train_function()
            k = self.step % len(self._loader)
            begin = {"epoch": self.step // len(self._loader), "start": k}
            iterator = iter(self._loader.dataset(epochs=None, **begin))
            if self.step and not k and len(self.progress.epochs) < begin["epoch"]:
                self._end_epoch(book, stopping)  # it was stopped between the two
            patience = self._config.patience
            while self.step < total and not self.progress.is_out_of(patience):
                self._epoch(function, iterator, book, stopping)
                self._end_epoch(book, stopping)

    def _epoch(self, function: Any, iterator: Any, book: Logbook, stopping: Stopping) -> None:
        """The rest of an epoch."""
        epoch, k = divmod(self.step, len(self._loader))
        if not k:
            # Not `reset_metrics`, which passes over it before the process's first update.
            mean_loss(self.model).reset_state()
        title = f"epoch {epoch + 1}/{self._config.epochs}"
        bars = self._show and sys.stderr.isatty()  # in a log there is the line of each epoch
        with progress_bar(title, len(self._loader), " batches", show=bars) as bar:
            bar.leave = False  # its line is the epoch's own
            bar.update(k)
            # Seconds, once in each process, for however many rows: no time of training. It is held.
            if isinstance(function, tf.types.experimental.GenericFunction):  # else eager: no graph
                function.get_concrete_function(iterator)
            stopping.begin()
            begun = time.perf_counter()
            for _ in range(k, len(self._loader)):
                logs = function(iterator)
                self.step += 1
                self._watch.see(self.step, logs["loss_batch"])
                bar.update()
                now = time.perf_counter()
                self.progress.seconds, begun = self.progress.seconds + now - begun, now
                if self.step % LOG_EVERY == 0:
                    loss = self._of_all_ranks(float(logs["loss"]))
                    bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
                    book.scalars(self.step, self._tags(loss))
                is_due = self._meeting.hold(is_due=self._is_late())
                if stopping.asked:
                    raise self._stopped(book, stopping)
                if self._is_due(is_due):
                    self._save(book)

    def _is_late(self) -> bool:
        """Whether the minutes between two checkpoints are over."""
        minutes = self._keeping.minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def _is_due(self, is_late: bool) -> bool:
        if self.step % len(self._loader) == 0:
            return False  # one is taken once the epoch is measured
        every = self._keeping.steps
        return is_late or (every is not None and self.step % every == 0)

    def _end_epoch(self, book: Logbook, stopping: Stopping) -> None:
        """Measure it, write it down, and take a checkpoint."""
        stopping.begin()  # a run that goes on may have it before any update
        self._watch.look(self.step)
        self._meeting.hold(now=True)
        if stopping.asked:
            raise self._stopped(book, stopping)

        def between() -> None:
            self._meeting.hold()
            if stopping.number is not None or (stopping.asked and self._here.size > 1):
                raise Interrupted

        quality = None
        if self._test is not None:
            try:
                quality = self._predictor.quality(
                    self._test, rank=self._here.rank, ranks=self._here.size, between=between
                )
            except Interrupted:
                raise self._stopped(book, stopping) from None
        loss = self._of_all_ranks(float(mean_loss(self.model).result()))
        row = {
            "epoch": len(self.progress.epochs) + 1,
            "auc": quality and quality.auc,
            "log_loss": quality and quality.log_loss,
            "calibration": quality and quality.calibration,
            "train_loss": loss,
            "seconds": self.progress.seconds,
        }
        overall, fields = self._scalars(loss)
        whole = {**row, **{k: v for k, v in overall.items() if k != "loss"}}
        norms = [dataclasses.asdict(one) for one in self._statistics.gradient_norms()]
        measured = {f"all/test_{k}": row[k] for k in ("auc", "log_loss", "calibration")}
        with agreed():
            book.epoch(whole, field_rows(fields), norms)
            book.scalars(self.step, {k: v for k, v in measured.items() if v is not None})
        self.progress.epochs.append(row)
        self.progress.seconds = 0.0
        self._statistics.reset()
        self._save(book)
        if self._show:
            print(self._line(row), flush=True)
        self._meeting.hold(now=True)
        if stopping.asked and self.step < self._end_of(self._config.epochs):
            raise self._stopped(book, stopping)

    def _of_all_ranks(self, loss: float) -> float:
        return float(mean_over_ranks(np.array(loss)))

    def _scalars(self, loss: float) -> tuple[dict[str, float | None], list[FieldStatistics]]:
        """Of the epoch so far: over all fields, and what those were like."""
        k = (self.step - 1) % len(self._loader) + 1
        rows = min(k * self._config.batch_size, self.rows)
        rates, fields = self._optimizer.learning_rates(), self._statistics.read()
        overall: dict[str, float | None] = {
            "loss": loss,
            "samples_per_second": rows / self.progress.seconds,
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
        quality = (
            ""
            if row["auc"] is None
            else f"test AUC {row['auc']:.5f}, log loss {row['log_loss']:.5f}, "
            f"calibration {row['calibration']:.3f}, "
        )
        speed = self.rows / row["seconds"]
        best = ", best" if row["auc"] is not None and self.progress.best == row["epoch"] else ""
        return (
            f"epoch {row['epoch']}/{self._config.epochs}: loss {row['train_loss']:.5f}, {quality}"
            f"{row['seconds']:.0f} s, {speed:,.0f} samples/s{best}"
        )

    def what_the_clip_did(self) -> str:
        """A sentence for the end of the run; on all ranks at once."""
        return clip_sentence(self._statistics.total())

    def _stopped(self, book: Logbook, stopping: Stopping) -> Stopped:
        """Save, and say so."""
        self._save(book)
        why = "stopped as its time was over" if stopping.number is None else "interrupted"
        total = self._end_of(self._config.epochs)
        return Stopped(
            f"{why} after update {self.step:,} of {total:,}, which is saved. Go on with: "
            f"{how_to_resume(self._run)}",
            stopping.number,
        )


def _random_state() -> dict[str, Any]:
    """Python's and NumPy's; TensorFlow's is used by no step of our networks, which a test says."""
    version, numbers, following = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), following],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers), following))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
