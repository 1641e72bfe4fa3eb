"""Tuning: values searched at the batch size itself, by rows held out of the training part.

Two Optuna studies in one SQLite file: "tune" has the trials, "repeats" the best of them trained
again from other seeds. Optuna's heartbeat finds trials whose process died, and they are retried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import signal
import sqlite3
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from merlin_cowclip.workflows.checks import check_whole
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import check_input_names
from merlin_cowclip.workflows.errors import Stopped, UserError, clipped
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing, write_json
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.held_out import held_out_rows, hold_out
from merlin_cowclip.workflows.study.locks import alone_in
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
    check_fits,
    how_to_go_on,
    record_of,
    trial_line,
)
from merlin_cowclip.workflows.training.configuration import LARGEST_SEED
from merlin_cowclip.workflows.training.stopping import Interrupted, Stopping

with quiet_imports():
    import optuna
    import sqlalchemy.exc
    from optuna.trial import FrozenTrial, TrialState
    from sqlalchemy.pool import NullPool

    from merlin_cowclip.plugins._tensorflow import tf
    from merlin_cowclip.workflows.study.trials import DivergedError, Epoch, epochs_of
    from merlin_cowclip.workflows.training.rebuilding import network
    from merlin_cowclip.workflows.training.runs import environment
    from merlin_cowclip.workflows.training.train import as_user_errors, check_trainable

DATABASE = "study.db"
PATIENCE = 2  # epochs without a better AUC, after which a trial ends
FINALISTS = 3  # the best of the search, of which one may be so by chance
FEWEST = 10
"""Trials below which nothing is said of importance."""
_HEARTBEAT, _GRACE = 10, 60  # seconds; a trial without a heartbeat for so long is tried again
_RETRIES = 2
_POLL = 0.5  # seconds between two looks at what other processes do
_WAIT = 60.0  # seconds for another process's transaction
_STARTUP = 6  # trials before TPE has a model of the values
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)


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
    """Search values for one batch size, from every scaling rule's prediction on.

    Trials train on the training part without some rows, and are measured on those after each
    epoch; the best epoch counts. The test part is not read. What every rule predicts from the base
    is tried first, and to its end, so that what is found is no worse than any. At the end the
    three best of all and what the rules predict are trained again from other seeds, and the one
    with the best mean is the result: the first of many is first by chance as well.

    A tune that was stopped or killed goes on where `out` is its folder. Several processes may share
    one folder at a time; each may then make a trial more.

    Args:
        data: the prepared folder.
        config: what to search.
        out: the folder, which is made or gone on with.
        trials: how many in all, no fewer than the rules' points.
        seeds: how often the best are trained again.
        budget: minutes that it may take, about; then fewer trials, and where the time does not
            suffice only the best of all and the best rule are trained again.
        command: what searches the same again, for the result.
        progress: whether to show bars and a line per trial.

    Raises:
        UserError: a value out of range, `out` is no tune or one of other data or options, or
            held-out rows that cannot be measured by.
        Stopped: Ctrl-C, SIGTERM or SIGHUP; all trials that have ended are kept.
    """
    out = Path(out)
    if budget is not None and not 0 < budget < math.inf:
        raise UserError(f"budget must be positive minutes. Received: {budget}. Correct it")
    end = math.inf if budget is None else time.monotonic() + 60 * budget
    for name, number in (("trials", trials), ("seeds", seeds)):
        check_whole(name, number, 1)
    if trials < len(config.starts):
        raise UserError(
            f"trials must be at least {len(config.starts)}, what the scaling rules predict, which "
            f"is tried first. Received: trials={trials}. Give it more"
        )
    precision = str(tf.keras.mixed_precision.global_policy().name)
    with _optuna_errors(out), _quiet_optuna():
        with alone_in(out.absolute().parent):
            if not os.path.lexists(out):
                _begin(data, config, out, precision, progress=progress)
            else:
                check_fits(data, config, out, precision)
        with Stopping() as stopping:
            tuning = _Tuning(data, config, out, trials, seeds, end, stopping, progress)
            with as_user_errors(tuning.rows, out):
                try:
                    tuning.search()
                    tuning.repeat()
                except KeyboardInterrupt:
                    raise Stopped(
                        f"interrupted; {len(tuning.tried())} trials that have ended are kept. Go "
                        f"on with: {how_to_go_on(out, data.path)}",
                        stopping.number or signal.SIGINT,
                    ) from None
        tuning.write(command)
    return Tuned.open(out)


def _begin(
    data: PreparedData, config: TuneConfig, out: Path, precision: str, *, progress: bool
) -> None:
    """Make the folder: the rows, the studies, the record."""
    check_input_names(data.spec)
    refuse_existing(out)
    first = config.train_config(next(iter(config.starts)))
    check_trainable(data, first)
    try:
        network(first, data.schema)
    except ValueError as error:  # of the data's columns, which only the network knows
        raise UserError(str(error)) from None
    rows = data.rows["train"]
    left = rows - held_out_rows(rows, config.held_out)
    if config.batch_size > left:
        raise UserError(
            "batch size must not exceed the rows that are left to train on. Received: batch size "
            f"{config.batch_size:,}, {left:,} of {rows:,} rows of {data.path} with "
            f"held_out={config.held_out}. Choose a smaller batch, or hold out less"
        )
    with all_or_nothing(out) as folder:
        hold_out(data, config.held_out, config.seed, folder / ROWS, progress=progress)
        for name in ("tune", "repeats"):
            study = optuna.create_study(
                study_name=name, storage=_storage(folder), direction="maximize"
            )
            for point, rules in config.queue.items() if name == "tune" else ():
                study.enqueue_trial(config.space.params(point), user_attrs={"rules": list(rules)})
        write_json(folder / RECORD, record_of(data, config, precision))


@dataclass(frozen=True)
class Tried:
    """A trial that has ended.

    Attributes:
      number: from 0.
      point: what it tried.
      epochs: those that it trained; none if it diverged in the first.
      why: why it ended before its last epoch, or `None`.
      rules: those that predicted its point; none of a point that the search has found.
    """

    number: int
    point: Point
    epochs: Sequence[Epoch]
    why: str | None
    rules: Sequence[str]

    @property
    def best_epoch(self) -> int:
        """The epoch with the highest AUC, from 1; 0 if it has none."""
        aucs = [epoch.auc for epoch in self.epochs]
        return aucs.index(max(aucs)) + 1 if aucs else 0

    @property
    def auc(self) -> float:
        """Of its best epoch; -inf if it has none."""
        return max((epoch.auc for epoch in self.epochs), default=-math.inf)

    @property
    def seconds(self) -> float:
        """All it took."""
        return sum(epoch.seconds for epoch in self.epochs)

    @property
    def seconds_again(self) -> float:
        """What a repeat takes: up to the best epoch."""
        return sum(epoch.seconds for epoch in list(self.epochs)[: self.best_epoch])

    def to_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {
            "number": self.number,
            "rules": list(self.rules),
            "auc": self.auc if self.epochs else None,
            "best_epoch": self.best_epoch,
            "why": self.why,
            "seconds": self.seconds,
            **self.point.to_dict(),
            "epochs": [dataclasses.asdict(epoch) for epoch in self.epochs],
        }


class _Tuning:
    """A tune on its way, in one of the processes that share it."""

    def __init__(
        self,
        data: PreparedData,
        config: TuneConfig,
        out: Path,
        trials: int,
        seeds: int,
        end: float,
        stopping: Stopping,
        progress: bool,
    ) -> None:
        self.rows = PreparedData.open(out / ROWS)
        self._data, self._config, self._out = data, config, out
        self._trials, self._end, self._stopping, self._show = trials, end, stopping, progress
        first = config.seed + 1
        self._seeds = [(first + k) % (LARGEST_SEED + 1) for k in range(seeds)]
        self._updates = -(-self.rows.rows["train"] // config.batch_size)
        load = functools.partial(optuna.load_study, storage=_storage(out))
        pruner = optuna.pruners.PercentilePruner(75.0, n_startup_trials=5, n_warmup_steps=1)
        self._study = load(study_name="tune", pruner=pruner)
        self._again = load(study_name="repeats", sampler=optuna.samplers.RandomSampler())

    @property
    def _left(self) -> float:
        """Seconds of the budget; infinite without one."""
        return self._end - time.monotonic()

    def tried(self) -> list[Tried]:
        """All trials that have ended, by number."""
        return [self._tried(t) for t in self._study.get_trials(deepcopy=False, states=_ENDED)]

    def _tried(self, trial: FrozenTrial) -> Tried:
        epochs, why, rules = _attributes(trial)
        return Tried(trial.number, self._config.space.point(trial.params), epochs, why, rules)

    # Trials

    def search(self) -> None:
        """Try points until there are enough, or the time that the repeats leave is over."""
        if self._show:
            if few := few_steps(self.rows.rows["train"], self._config.batch_size):
                print(f"Warning: {few}")
            print(HEADER, flush=True)
        while self._has_time_for_a_trial():
            optuna.storages.fail_stale_trials(self._study)
            trials = self._study.get_trials(deepcopy=False)
            running = sum(trial.state == TrialState.RUNNING for trial in trials)
            ended = sum(trial.state in _ENDED for trial in trials)
            if ended >= self._trials:
                return
            if ended + running >= self._trials:
                self._wait()
                continue
            # Of the seed and the trials so far: a tune in two parts is one, and processes that
            # share a tune do not propose the same.
            drawn = np.random.default_rng([self._config.seed, len(trials)])
            self._study.sampler = optuna.samplers.TPESampler(
                n_startup_trials=_STARTUP,
                multivariate=True,
                group=True,
                constant_liar=True,
                seed=int(drawn.integers(2**32)),
            )
            self._study.optimize(self._try, n_trials=1)
            if self._show:
                tried = self.tried()
                for one in (one for one in tried if one.number == self._last):
                    print(trial_line(one, tried, self._trials), flush=True)

    def _try(self, trial: optuna.Trial) -> float:
        """Train a trial's point, and report each epoch."""
        point = self._config.space.suggest(trial)
        config = self._config.train_config(point)
        rules = trial.user_attrs.get("rules", [])
        self._last = trial.number
        epochs: list[Epoch] = []
        why: str | None = None
        bar = self._bar(f"trial {trial.number + 1}")
        with self._once_more(self._study, trial, {"rules": rules}), bar as advance:
            try:
                with contextlib.closing(
                    epochs_of(self.rows, config, self._stopping, advance)
                ) as found:
                    for epoch in found:
                        epochs.append(epoch)
                        trial.report(epoch.auc, len(epochs))
                        why = self._why_end(trial, rules, [e.auc for e in epochs])
                        if why or len(epochs) == config.epochs:
                            break
            except DivergedError as error:
                why = str(error)
        _note(trial, epochs, why)
        if why == "given up" or not epochs:
            raise optuna.TrialPruned
        return max(epoch.auc for epoch in epochs)

    def _why_end(self, trial: optuna.Trial, rules: Sequence[str], aucs: list[float]) -> str | None:
        if not rules and trial.should_prune():  # what a rule predicted is never given up
            return "given up"
        if len(aucs) == self._config.epochs:
            return None
        if len(aucs) - 1 - aucs.index(max(aucs)) >= PATIENCE:
            return f"no better for {PATIENCE} epochs"
        return "out of time" if self._left < self._reserve() else None

    @contextlib.contextmanager
    def _once_more(self, study: optuna.Study, trial: optuna.Trial, attrs: Any) -> Iterator[None]:
        """What ends within, interrupted or refused, is tried again when the tune goes on."""
        try:
            yield
        except BaseException as error:
            study.enqueue_trial(trial.params, user_attrs=attrs)
            if isinstance(error, Interrupted):
                raise KeyboardInterrupt from None  # which Optuna notes as a failed trial
            raise

    def _has_time_for_a_trial(self) -> bool:
        tried = [t.seconds for t in self.tried() if t.epochs]
        return not tried or self._left - self._reserve() > statistics.fmean(tried)

    def _reserve(self) -> float:
        """Seconds that the repeats of the best of all and of the best rule will take."""
        return sum(len(self._seeds) * one.seconds_again for one in self._must_be_repeated())

    def _wait(self) -> None:
        time.sleep(_POLL)
        if self._stopping.asked:
            raise KeyboardInterrupt

    # Repeats

    def _must_be_repeated(self) -> list[Tried]:
        """The best of all and the best rule's, whatever the time; once, if they are one."""
        tried = sorted((t for t in self.tried() if t.epochs), key=lambda t: -t.auc)
        best = [*tried[:1], *[t for t in tried if t.rules][:1]]
        return list({t.number: t for t in best}.values())

    def _to_repeat(self) -> list[Tried]:
        """Those, then the other finalists, and then what the other rules predict."""
        tried = sorted((t for t in self.tried() if t.epochs), key=lambda t: -t.auc)
        in_turn = [*self._must_be_repeated(), *tried[:FINALISTS], *(t for t in tried if t.rules)]
        return list({t.number: t for t in in_turn}.values())

    def repeat(self) -> None:
        """Train the best, and what the rules predict, from other seeds."""
        must = {tried.number for tried in self._must_be_repeated()}
        if not must:
            reasons = {tried.why for tried in self.tried()}
            raise UserError(
                "a trial must end with numbers. Received: all of them diverged, the last one "
                f"with: {max(filter(None, reasons), default='nothing')}"
            )
        by_number = {tried.number: tried for tried in self._to_repeat()}
        wanted = [(number, seed) for number in by_number for seed in self._seeds]
        with alone_in(self._out):
            known = {_key(t) for t in self._again.get_trials() if t.state != TrialState.FAIL}
            for number, seed in wanted:
                if (number, seed) not in known:
                    self._again.enqueue_trial({"trial": number, "seed": seed})
        while True:
            optuna.storages.fail_stale_trials(self._again)
            trials = self._again.get_trials(deepcopy=False)
            waiting = [_key(t) for t in trials if t.state == TrialState.WAITING]
            if waiting:
                number = waiting[0][0]
                if number not in must and self._left < by_number[number].seconds_again:
                    return
                self._again.optimize(self._try_again, n_trials=1)
            elif any(t.state == TrialState.RUNNING for t in trials):
                self._wait()
            else:
                return

    def _try_again(self, trial: optuna.Trial) -> float:
        number = trial.suggest_int("trial", 0, 2**31 - 1)
        seed = trial.suggest_int("seed", 0, LARGEST_SEED)
        tried = {one.number: one for one in self.tried()}.get(number)
        if tried is None:  # drawn, as another process took the last that waited
            raise optuna.TrialPruned
        config = self._config.train_config(tried.point, epochs=tried.best_epoch, seed=seed)
        epochs: list[Epoch] = []
        why = None
        bar = self._bar(f"repeat of {number + 1}", config.epochs)
        with self._once_more(self._again, trial, {}), bar as advance:
            try:
                epochs.extend(epochs_of(self.rows, config, self._stopping, advance))
            except DivergedError as error:
                why = str(error)
        _note(trial, epochs, why)
        if why:
            raise optuna.TrialPruned
        return epochs[-1].auc

    def _repeats(self) -> dict[int, dict[int, float | None]]:
        """By trial and seed the last epoch's AUC; `None` if it diverged.

        After the last epoch: none is chosen by the rows that it is measured by.
        """
        found: dict[int, dict[int, float | None]] = {}
        for trial in self._again.get_trials(deepcopy=False, states=_ENDED):
            number, seed = _key(trial)
            epochs, why, _ = _attributes(trial)
            if (epochs or why) and seed in self._seeds:
                found.setdefault(number, {})[seed] = None if why else epochs[-1].auc
        return found

    # The end

    def write(self, command: str) -> None:
        """The configuration that was found, and the result."""
        tried, finalists, repeats = self.tried(), self._to_repeat(), self._repeats()
        # Compared by as many seeds, of which none has diverged; what diverged comes last.
        means = {}
        for number, of in repeats.items():
            aucs = [auc for auc in of.values() if auc is not None]
            if len(aucs) == len(self._seeds):
                means[number] = statistics.fmean(aucs)
            elif len(aucs) < len(of):
                means[number] = -1.0
        winner = max(finalists, key=lambda t: (means.get(t.number, 0.0), t.auc))
        best = winner.number
        rules = sorted((t for t in tried if t.rules), key=lambda t: -t.auc)
        shown = {best, *(t.number for t in rules)}
        others = sorted((t for t in finalists if t.number not in shown), key=lambda t: -t.auc)
        lines = [
            ("best found", winner),
            *((f"trial {t.number + 1}", t) for t in others),
            *((", ".join(t.rules), t) for t in rules),
        ]
        done = {rule for t in tried for rule in t.rules}
        found = self._config.train_config(winner.point, epochs=winner.best_epoch)
        again = self._again.get_trials(deepcopy=False, states=_ENDED)
        of_repeats = (e.seconds for trial in again for e in _attributes(trial)[0])
        result = {
            "format": FORMAT_VERSION,
            "command": command,
            "data": str(self._data.path.resolve()),
            "rows": self.rows.rows,
            "config": self._config.to_dict(),
            "winner": best,
            "table": [
                _row(what, t, repeats.get(t.number, {}), repeats.get(best, {})) for what, t in lines
            ],
            "not_tried": [rule for rule in self._config.rules if rule not in done],
            "importance": self._importance(),
            "trials_measured": sum(bool(t.epochs) for t in tried),
            "seconds": sum(t.seconds for t in tried) + sum(of_repeats),
            "trials": [t.to_dict() for t in tried],
            **environment(("optuna",)),
        }
        with alone_in(self._out):
            write_json(self._out / TUNED, found.to_dict())
            write_json(self._out / RESULT, result)

    def _importance(self) -> dict[str, float] | None:
        """What share of the AUC's variance over the trials each value explains, greatest first.

        By fANOVA (Hutter et al. 2014), over all trials that were measured, each by its best epoch.
        r and ζ, which only trials with a clip have, are left out. `None` below `FEWEST` trials.
        """
        trials = [
            optuna.trial.create_trial(
                params=trial.params, distributions=trial.distributions, value=tried.auc
            )
            for trial in self._study.get_trials(deepcopy=False, states=_ENDED)
            if (tried := self._tried(trial)).epochs
        ]
        if len(trials) < FEWEST or len({trial.value for trial in trials}) == 1:
            return None
        study = optuna.create_study(direction="maximize")
        study.add_trials(trials)
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
        return {name: float(share) for name, share in found.items()}

    @contextlib.contextmanager
    def _bar(self, title: str, epochs: int | None = None) -> Iterator[Any]:
        """A bar of a training's updates; yields what advances it."""
        total = self._updates * (self._config.epochs if epochs is None else epochs)
        shown = self._show and os.isatty(2)  # in a log there is the line of each trial
        with progress_bar(title, total, " batches", show=shown) as bar:
            bar.leave = False  # its line is the trial's own

            yield bar.update


def _row(
    what: str, tried: Tried, own: dict[int, float | None], best: dict[int, float | None]
) -> dict[str, Any]:
    """A line of the table; differences are of the same seeds."""
    aucs = [auc for auc in own.values() if auc is not None]
    diverged = len(own) - len(aucs)
    pairs = [] if own is best or diverged else [(auc, best.get(s)) for s, auc in own.items()]
    differences = [a - b for a, b in pairs if a is not None and b is not None]
    mean, deviation = _mean_and_deviation([] if diverged else aucs)
    difference, its_deviation = _mean_and_deviation(differences)
    return {
        "what": what,
        "trial": tried.number,
        "rules": list(tried.rules),
        "mean": mean,
        "deviation": deviation,
        "aucs": aucs,
        "seeds": list(own),
        "diverged": diverged,
        "difference": difference,
        "difference_deviation": its_deviation,
        "search_auc": tried.auc if tried.epochs else None,
        "epochs": tried.best_epoch,
        **tried.point.to_dict(),
    }


def _mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def _note(trial: optuna.Trial, epochs: Sequence[Epoch], why: str | None) -> None:
    trial.set_user_attr("epochs", [dataclasses.asdict(epoch) for epoch in epochs])
    trial.set_user_attr("why", why)


def _attributes(trial: FrozenTrial) -> tuple[tuple[Epoch, ...], str | None, tuple[str, ...]]:
    attrs = trial.user_attrs
    epochs = tuple(Epoch(**epoch) for epoch in attrs.get("epochs", ()))
    return epochs, attrs.get("why"), tuple(attrs.get("rules", ()))


def _key(trial: FrozenTrial) -> tuple[int, int]:
    """Of a repeat: its trial and its seed."""
    params = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
    return params["trial"], params["seed"]


def _storage(folder: Path) -> optuna.storages.RDBStorage:
    if (folder / RECORD).exists() and not (folder / DATABASE).is_file():
        raise _refusal(folder, "which is gone")
    # By a function: a path in a URL would have to be escaped, for SQLAlchemy and for Optuna.
    connect = functools.partial(_connect, str(folder / DATABASE))
    with warnings.catch_warnings():  # Optuna 4.9 has other names for the heartbeat's callback
        warnings.simplefilter("ignore")
        return optuna.storages.RDBStorage(
            "sqlite://",
            {"creator": connect, "poolclass": NullPool},
            heartbeat_interval=_HEARTBEAT,
            grace_period=_GRACE,
            failed_trial_callback=optuna.storages.RetryFailedTrialCallback(max_retry=_RETRIES),
        )


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_WAIT)


@contextlib.contextmanager
def _optuna_errors(folder: Path) -> Iterator[None]:
    """What SQLite has against a tune's database, as an error of the user's."""
    try:
        yield
    except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        cause = error.__cause__ or error
        reason = getattr(cause, "orig", None) or getattr(cause, "__cause__", None) or cause
        raise _refusal(folder, f"which cannot be used ({clipped(str(reason))})") from None
    except KeyError as error:
        if "Record does not exist" not in str(error):
            raise
        raise _refusal(folder, "without the study") from None


def _refusal(folder: Path, found: str) -> UserError:
    return UserError(
        f"a tune must hold its trials, and be a folder that can be written. Received: "
        f"{folder / DATABASE}, {found}. Put it back, free some space, or tune into another folder"
    )


@contextlib.contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Without Optuna's log, and its warnings of what it calls experimental."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
