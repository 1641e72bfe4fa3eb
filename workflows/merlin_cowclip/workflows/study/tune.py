# SPDX-License-Identifier: Apache-2.0
"""Tuning: hyperparameters searched at the batch size itself, by the AUC on the validation part.

An Optuna study in an SQLite file has the trials and, as attributes, what the best of them came to
from other seeds. Optuna's heartbeat finds trials whose process died, and they are retried.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import check_input_names
from merlin_cowclip.workflows.errors import NotFiniteError, Stopped, UserError, check_whole
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing, write_json
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.held_out import hold_out
from merlin_cowclip.workflows.study.search_space import Point
from merlin_cowclip.workflows.study.studies import few_steps
from merlin_cowclip.workflows.study.tuned import (
    FORMAT_VERSION,
    HEADER,
    RECORD,
    RESULT,
    ROWS,
    TUNED,
    Tuned,
    check_resumable,
    record_of,
    spread,
    trial_line,
)
from merlin_cowclip.workflows.study.workers import alone_with
from merlin_cowclip.workflows.training.configuration import LARGEST_SEED, TrainConfig
from merlin_cowclip.workflows.training.locks import folder_lock
from merlin_cowclip.workflows.training.stopping import Stopping

with quiet_imports():
    import optuna
    from distributed.system import MEMORY_LIMIT
    from optuna.trial import FrozenTrial, TrialState
    from sqlalchemy.pool import NullPool

    from merlin_cowclip.plugins._tensorflow import quiet_stack, tf
    from merlin_cowclip.workflows.training.builder import dummy_batch, network
    from merlin_cowclip.workflows.training.reproducibility import set_seeds
    from merlin_cowclip.workflows.training.runs import environment
    from merlin_cowclip.workflows.training.step_variables import compiled_step_key
    from merlin_cowclip.workflows.training.train import as_user_errors, check_trainable
    from merlin_cowclip.workflows.training.trainer import Trainer

DATABASE = "study.db"
HELD_OUT = 0.1  # share of the training rows that are the validation part of data without one
FINALISTS = 3  # the best of the search, of which one may be so by chance
MARGIN = 0.002  # AUC, by which other seeds are seldom better: what is further behind cannot win
_RESERVED = 2  # finalists for whose repeats a budget leaves time
_HEARTBEAT, _GRACE = 10, 60  # seconds; a trial without a heartbeat for so long is tried again
_PRUNED = "pruned"
_STEPS = 4  # the most compiled steps that are kept, each with a network and its moments
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)

Epoch = dict[str, float]
"""As `Trainer.epochs` has it, measured on the validation part; `seconds` are all it took."""

Tried = dict[str, Any]
"""A trial that has ended, as `result.json` has it."""


def tune(
    data: PreparedData,
    config: TuneConfig,
    out: str | Path,
    *,
    trials: int = 40,
    seeds: int = 3,
    budget: float | None = None,
    command: str = "",
    progress: bool = True,
) -> Tuned:
    """Search hyperparameters at one batch size, or resume a search.

    Trials are measured on the validation part after each epoch; the best epoch counts. Data without
    one have a tenth of their training rows held out. The test part is not read. What the rules
    predict from a base, and three settings of the portfolio, are tried first, and to their end.
    Steps from the best trial follow, the rest of the portfolio, and TPE. Then the three best trials
    and the best rule's are trained again from other seeds, as long as they can still win, and the
    one with the best mean is the result. Several processes may share one `out`; each may then make
    one trial more.

    Args:
        data: the prepared folder.
        config: what to search.
        out: the folder, which is made or resumed.
        trials: how many in all, no fewer than the rules' points.
        seeds: how often the best are trained again.
        budget: minutes that it may take, about; then fewer trials, and where the time does not
            suffice only the best is trained again. Time that is left is for more trials.
        command: the command that searches the same again, for the result.
        progress: whether to show bars and a line per trial.

    Raises:
        UserError: a value out of range, `out` is no tune or one of other data or options, or a
            validation part that cannot be measured by.
        Stopped: Ctrl-C, SIGTERM or SIGHUP; all trials that have ended are kept.
    """
    out = Path(out)
    if budget is not None and not 0 < budget < math.inf:
        raise UserError(f"budget must be positive minutes. Received: {budget}. Correct it")
    end = math.inf if budget is None else time.monotonic() + 60 * budget
    check_whole("trials", trials, config.min_trials)
    check_whole("seeds", seeds, 1)
    config = dataclasses.replace(config, rows=data.rows["train"])
    record = record_of(data, config, tf.keras.mixed_precision.global_policy().name)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        with folder_lock(out.absolute().parent):
            if os.path.lexists(out):
                check_resumable(out, record)
            else:
                _begin(data, config, out, record, progress=progress)
        with Stopping() as stopping:
            others = [(config.seed + 1 + k) % (LARGEST_SEED + 1) for k in range(seeds)]
            rows = data if data.valid_files else PreparedData.open(out / ROWS)
            tuning = _Tuning(config, out, rows, trials, others, end, stopping, progress)
            try:
                with as_user_errors(tuning.rows, out):
                    tuning.run()
            except KeyboardInterrupt:
                raise Stopped(
                    f"interrupted; {len(tuning.tried())} trials that have ended are kept. "
                    f"Resume with: {command or 'the same call'}",
                    stopping.number or signal.SIGINT,
                ) from None
        tuning.write({"command": command, "data": record["data"], "config": record["config"]})
    return Tuned.open(out)


def _begin(
    data: PreparedData, config: TuneConfig, out: Path, record: Mapping[str, Any], *, progress: bool
) -> None:
    """Make the folder: the rows, the study, the record."""
    check_input_names(data.spec)
    refuse_existing(out)
    first = config.train_config(next(iter(config.queue)))
    check_trainable(data, first)
    try:
        network(first, data.schema)
    except ValueError as error:  # of the data's columns, which only the network knows
        raise UserError(str(error)) from None
    with all_or_nothing(out) as folder:
        if not data.valid_files:
            if progress:
                how = f"{HELD_OUT:.0%} of its training rows, split {data.spec.split.kind}"
                print(f"{data.path} has no validation part. Held out: {how}", flush=True)
            hold_out(data, HELD_OUT, config.seed, folder / ROWS, progress=progress)
            check_trainable(PreparedData.open(folder / ROWS), first)  # fewer rows
        study = optuna.create_study(
            study_name="tune", storage=_storage(folder), direction="maximize"
        )
        for point, origin in config.queue.items():
            study.enqueue_trial(config.space.params(point), user_attrs=origin)
        write_json(folder / RECORD, record)


class Trainers:
    """Trains the trials of a tune, with one compiled step for those that can share it.

    Args:
      rows: data with a validation part.
    """

    def __init__(self, rows: PreparedData) -> None:
        self._rows = rows
        self._kept: dict[Any, Trainer] = {}
        self._seed: int | None = None

    def epochs(
        self, config: TrainConfig, stopping: Stopping, advance: Callable[[], Any] = lambda: None
    ) -> Iterator[Epoch]:
        """Train as `train(rows, config)` would, to the last bit; `advance` follows each update.

        Raises:
          NotFiniteError: a loss, gradient, weight or prediction is no finite number.
          KeyboardInterrupt: it was asked to stop.
        """
        begun = time.perf_counter()
        with quiet_stack():  # of many networks in one process TensorFlow warns that it traces many
            for row in self.get(config, stopping, advance).epochs():
                row = {name.removeprefix("valid_"): value for name, value in row.items()}
                yield {**row, "seconds": time.perf_counter() - begun}
                begun = time.perf_counter()

    def get(self, config: TrainConfig, stopping: Stopping, advance: Callable[[], Any]) -> Trainer:
        """A trainer at its beginning, as `train` makes it, to the last bit."""
        if self._seed != config.seed:
            gc.collect()  # the network drawn before
            self._loader = check_trainable(self._rows, config)
            # Not drawn for each trial: TensorFlow, seeded, compiles all steps again in part.
            set_seeds(config.seed, deterministic=config.deterministic)
            drawn = network(dataclasses.replace(config, init_stddev=1.0), self._rows.schema)
            drawn(dummy_batch(vars(self._rows.spec)))
            self._weights = [variable.numpy() for variable in drawn.weights]
            self._seed = config.seed
        key = compiled_step_key(config)
        trainer = self._kept.pop(key, None)
        if trainer is None:
            # As `check_trainable` counts them: what was kept takes half of the memory at most.
            size = self._rows.table_rows * ((config.embedding_dim or 0) + 1) * 3 * 4
            while len(self._kept) >= min(_STEPS, max(MEMORY_LIMIT // (2 * size), 1)):
                del self._kept[next(iter(self._kept))]
            gc.collect()
            tf.keras.backend.clear_session()
            trainer = Trainer(config, self._loader, stopping)
        self._kept[key] = trainer
        trainer.reset(config, self._loader, self._weights, stopping, advance)
        return trainer


class _Sampler(optuna.samplers.TPESampler):
    """TPE that begins anew for each trial, with a seed of the trial's number.

    So a tune in two parts is one, and processes that share a tune do not propose the same.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """The first that a study asks of a trial."""
        drawn = np.random.default_rng([self._seed, trial.number])
        super().__init__(
            n_startup_trials=6,
            multivariate=True,
            group=True,
            constant_liar=True,
            seed=int(drawn.integers(2**32)),
        )


@dataclass
class _Tuning:
    """A tune on its way, in one of the processes that share it; `end` is when the budget is."""

    config: TuneConfig
    out: Path
    rows: PreparedData
    trials: int
    seeds: Sequence[int]
    end: float
    stopping: Stopping
    show: bool

    def __post_init__(self) -> None:
        self.study = optuna.load_study(
            study_name="tune",
            storage=_storage(self.out),
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=0),
            sampler=_Sampler(self.config.seed),
        )
        self.trainers = Trainers(self.rows)

    def tried(self) -> list[Tried]:
        """All trials that have ended, by number."""
        return [self._tried(t) for t in self.study.get_trials(deepcopy=False, states=_ENDED)]

    def _tried(self, trial: FrozenTrial) -> Tried:
        attributes = trial.user_attrs
        epochs: list[Epoch] = attributes.get("epochs", [])
        return {
            "number": trial.number + 1,
            "rules": attributes.get("rules", []),  # that predicted it
            "portfolio": attributes.get("portfolio"),  # its number there
            "step": attributes.get("step"),  # from the best trial before
            "auc": max((epoch["auc"] for epoch in epochs), default=None),
            "best_epoch": _best(epochs),
            "why": attributes.get("why"),  # it ended before its last epoch
            "seconds": _seconds(epochs),
            **self.config.space.point(trial.params).to_dict(),
            "epochs": epochs,
        }

    def run(self) -> None:
        """Search and repeat; again while a budget has time left."""
        if self.show:
            if few := few_steps(self.rows.rows["train"], self.config.batch_size):
                print(f"Warning: {few}")
            print("The first trial compiles the training step, which takes longer.")
            print(HEADER, flush=True)
        while True:
            self._search()
            self._repeat()
            if len(self.tried()) >= self.trials or not self._has_time_for_a_trial():
                break
        if self.show and (ended := len(self.tried())) < self.trials:
            print(f"The budget ends the search after {ended} trials. The same command continues.")

    # Trials

    def _search(self) -> None:
        """Try points until there are enough, or the time that the repeats leave is over."""
        while self._has_time_for_a_trial():
            optuna.storages.fail_stale_trials(self.study)
            states = [trial.state for trial in self.study.get_trials(deepcopy=False)]
            ended = sum(state in _ENDED for state in states)
            if ended >= self.trials:
                return
            if ended + states.count(TrialState.RUNNING) >= self.trials:
                self._wait()
            else:
                self._enqueue()
                self.study.optimize(self._try, n_trials=1, callbacks=[self._print])

    def _enqueue(self) -> None:
        """If no trial waits, the first point after the queue that is new; else TPE proposes one."""
        trials = self.study.get_trials(deepcopy=False)
        ended = [tried for tried in self.tried() if tried["epochs"]]
        if not ended or TrialState.WAITING in [trial.state for trial in trials]:
            return
        known = [trial.params for trial in trials]
        best = Point.from_dict(max(ended, key=lambda tried: tried["auc"]))
        for point, origin in self.config.after(best).items():
            if (params := self.config.space.params(point)) not in known:
                self.study.enqueue_trial(params, user_attrs=origin)
                return

    def _has_time_for_a_trial(self) -> bool:
        """Besides the repeats that are left of the first finalists, or those of the trial."""
        if not (tried := [one for one in self.tried() if one["epochs"]]):
            return True
        left = [finalist for finalist, _ in self._left(self._finalists()[:_RESERVED])]
        own = len(self.seeds) * statistics.fmean(map(_seconds_again, tried))
        again = max(own, sum(map(_seconds_again, left)))
        took = statistics.fmean(one["seconds"] for one in tried)
        return self.end - time.monotonic() - again > took

    def _wait(self) -> None:
        """For what other processes do."""
        time.sleep(0.5)
        if self.stopping.asked:
            raise KeyboardInterrupt

    def _try(self, trial: optuna.Trial) -> float:
        """Train a trial's point, and report each epoch."""
        point, epochs, why = self.config.space.suggest(trial), list[Epoch](), None
        try:
            config = self.config.train_config(point)
            for epoch in self._epochs(config, f"trial {trial.number + 1}"):
                epochs.append(epoch)
                trial.report(epoch["auc"], len(epochs))
                if point not in self.config.queue and trial.should_prune():
                    why = _PRUNED
                    break
                if _best(epochs) < len(epochs) < point.max_epochs:
                    why = "no better than before"
                    break
        except NotFiniteError as error:
            why = str(error)
        except BaseException:  # interrupted or refused: tried again when the tune is resumed
            trial.study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)
            raise
        trial.set_user_attr("epochs", epochs)
        trial.set_user_attr("why", why)
        if why == _PRUNED or not epochs:
            raise optuna.TrialPruned
        return max(epoch["auc"] for epoch in epochs)

    def _epochs(self, config: TrainConfig, title: str) -> Iterator[Epoch]:
        """Train, with a bar on a terminal."""
        total = -(-self.rows.rows["train"] // config.batch_size) * config.epochs
        with progress_bar(title, total, " batches", show=self.show and os.isatty(2)) as bar:
            bar.leave = False  # its line is the trial's own
            yield from self.trainers.epochs(config, self.stopping, bar.update)

    def _print(self, _: optuna.Study, trial: FrozenTrial) -> None:
        if self.show and trial.state in _ENDED:
            print(trial_line(self._tried(trial), self.tried(), self.trials), flush=True)

    # Repeats

    def _finalists(self) -> list[Tried]:
        """The best, the best rule's, and the other trials of the best three."""
        ranked = sorted((t for t in self.tried() if t["epochs"]), key=lambda t: -t["auc"])
        rules = [one for one in ranked if one["rules"]]
        chosen = [*ranked[:1], *rules[:1], *ranked[:FINALISTS]]
        return list({one["number"]: one for one in chosen}.values())

    def _is_behind(self, tried: Tried) -> bool:
        """Whether a trial is no rule's, and too far below the best mean of other seeds to win."""
        rows = [self._row(one) for one in self._finalists()]
        means = [row["mean"] for row in rows if self._rank(row)[0] > 0]
        return not tried["rules"] and tried["auc"] < max(means, default=0) - MARGIN

    def _repeat(self) -> None:
        """Train the finalists from other seeds."""
        finalists = self._finalists()
        if not finalists:
            raise UserError(
                "a trial must end with numbers. Received: all of them diverged, one with: "
                f"{self.tried()[-1]['why']}"
            )
        left = self._left(finalists)
        if self.show and left:
            minutes = sum(_seconds_again(tried) for tried, _ in left) / 60
            number = len({tried["number"] for tried, _ in left})
            print(
                f"Repeating up to {number} trials with other seeds, {minutes:.1f} minutes at most",
                flush=True,
            )
        while left:
            for tried, seed in left:
                is_late = time.monotonic() + _seconds_again(tried) > self.end
                if is_late and tried is not finalists[0]:
                    return
                name = _name(tried, seed)
                with alone_with(self.out / name, wait=False) as is_mine:
                    if not is_mine:
                        self._wait()
                    elif self._is_left(tried, seed):  # by other processes, too
                        self._train_again(tried, seed)
            left = self._left(finalists)

    def _left(self, finalists: Sequence[Tried]) -> list[tuple[Tried, int]]:
        """Of which finalists and seeds repeats are left."""
        pairs = [(tried, seed) for tried in finalists for seed in self.seeds]
        return [(tried, seed) for tried, seed in pairs if self._is_left(tried, seed)]

    def _is_left(self, tried: Tried, seed: int) -> bool:
        """Whether it is to be trained again from a seed."""
        return _name(tried, seed) not in self.study.user_attrs and not self._is_behind(tried)

    def _train_again(self, tried: Tried, seed: int) -> None:
        config = dataclasses.replace(self._best_of(tried), seed=seed)
        found, auc = list[Epoch](), None
        try:
            found += self._epochs(config, f"repeat of {tried['number']}")
            auc = found[-1]["auc"]  # not the best one, which these rows would have chosen
        except NotFiniteError:
            pass
        if self.show:
            ended = "diverged" if auc is None else f"AUC {auc:.5f}"
            print(f"trial {tried['number']} again, seed {seed}: {ended}", flush=True)
        self.study.set_user_attr(_name(tried, seed), {"auc": auc, "seconds": _seconds(found)})

    def _best_of(self, tried: Tried) -> TrainConfig:
        """A trial's training up to its best epoch."""
        config = self.config.train_config(Point.from_dict(tried))
        return dataclasses.replace(config, epochs=tried["best_epoch"])

    # The end

    def write(self, more: Mapping[str, Any]) -> None:
        """Write the configuration that was found, and the result with `more`."""
        tried, rows = self.tried(), [*map(self._row, self._finalists())]
        best = max(rows, key=self._rank)
        others = [row for row in rows if not row["rules"] and row is not best]
        of_rules = sorted((t for t in tried if t["rules"]), key=lambda t: -(t["auc"] or 0))
        done = [rule for one in of_rules for rule in one["rules"]]
        repeats = self.study.user_attrs.values()
        result = {
            "format": FORMAT_VERSION,
            **more,
            "rows": self.rows.rows,
            "winner": best["number"],
            "table": [{**best, "what": "best found"}, *others, *map(self._row, of_rules)],
            "not_tried": [rule for rule in self.config.rules if rule not in done],
            "at_the_edge": self.config.space.at_the_edge(Point.from_dict(best)),
            "seconds": sum(one["seconds"] for one in (*tried, *repeats)),
            "epoch_seconds": statistics.median(e["seconds"] for t in tried for e in t["epochs"]),
            "trials": tried,
            **environment("optuna"),
        }
        with folder_lock(self.out):
            write_json(self.out / TUNED, self._best_of(best).to_dict())
            write_json(self.out / RESULT, result)

    def _row(self, tried: Tried) -> dict[str, Any]:
        """A line of the table; an AUC is `None` where it diverged from that seed."""
        known = self.study.user_attrs
        seeds = [seed for seed in self.seeds if _name(tried, seed) in known]
        aucs = [known[_name(tried, seed)]["auc"] for seed in seeds]
        what = ", ".join(tried["rules"]) or f"trial {tried['number']}"
        row = {"what": what, **tried, "seeds": seeds, "aucs": aucs}
        row["mean"], row["deviation"] = spread(aucs)
        del row["epochs"]
        return row

    def _rank(self, row: Mapping[str, Any]) -> tuple[float, float]:
        """By the mean of all seeds; last what diverged from one."""
        is_whole = len(row["aucs"]) == len(self.seeds)
        return -1 if None in row["aucs"] else row["mean"] if is_whole else 0, row["auc"]


def _best(epochs: Sequence[Epoch]) -> int:
    """The number of the best epoch; 0 of none."""
    aucs = [epoch["auc"] for epoch in epochs]
    return aucs.index(max(aucs)) + 1 if aucs else 0


def _seconds(epochs: Sequence[Epoch]) -> float:
    return sum(epoch["seconds"] for epoch in epochs)


def _seconds_again(tried: Tried) -> float:
    """What a repeat takes: up to the best epoch."""
    return _seconds(tried["epochs"][: tried["best_epoch"]])


def _name(tried: Tried, seed: int) -> str:
    """The name of what a trial comes to from another seed."""
    return f"repeat {tried['number']} {seed}"


def _storage(folder: Path) -> optuna.storages.RDBStorage:
    with warnings.catch_warnings():  # Optuna 4.9 has other names for the heartbeat's callback
        warnings.simplefilter("ignore")
        return optuna.storages.RDBStorage(
            f"sqlite:///{folder.absolute() / DATABASE}",
            {"connect_args": {"timeout": 60}, "poolclass": NullPool},
            heartbeat_interval=_HEARTBEAT,
            grace_period=_GRACE,
            failed_trial_callback=optuna.storages.RetryFailedTrialCallback(max_retry=2),
        )
