"""Tuning: values searched at the batch size itself, by rows held out of the training part.

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
from collections.abc import Callable, Iterator, Sequence
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
    FEWEST,
    FORMAT_VERSION,
    HEADER,
    RECORD,
    RESULT,
    ROWS,
    TUNED,
    Tuned,
    check_fits,
    how_to_resume,
    record_of,
    trial_line,
)
from merlin_cowclip.workflows.study.workers import alone_with
from merlin_cowclip.workflows.training.configuration import LARGEST_SEED, TrainConfig
from merlin_cowclip.workflows.training.one_at_a_time import alone_in
from merlin_cowclip.workflows.training.stopping import Stopping

with quiet_imports():
    import optuna
    from distributed.system import MEMORY_LIMIT
    from optuna.trial import FrozenTrial, TrialState
    from sqlalchemy.pool import NullPool

    from merlin_cowclip.plugins._tensorflow import quiet_stack, tf
    from merlin_cowclip.workflows.training.rebuilding import any_batch, network
    from merlin_cowclip.workflows.training.reproducibility import set_seeds
    from merlin_cowclip.workflows.training.runs import environment
    from merlin_cowclip.workflows.training.step_variables import compiled_step_key
    from merlin_cowclip.workflows.training.train import as_user_errors, check_trainable
    from merlin_cowclip.workflows.training.trainer import Trainer

DATABASE = "study.db"
FINALISTS = 3  # the best of the search, of which one may be so by chance
_HEARTBEAT, _GRACE = 10, 60  # seconds; a trial without a heartbeat for so long is tried again
_RETRIES = 2
_POLL = 0.5  # seconds between two looks at what other processes do
_WAIT = 60.0  # seconds for another process's transaction
_STARTUP = 6  # trials before TPE has a model of the values
_PRUNED = "pruned"
_STEPS = 4  # the most compiled steps that are kept, each with a network and its moments
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)

Epoch = dict[str, float]
"""`auc`, `log_loss` and `calibration` on the held-out rows, `train_loss`, and all `seconds`."""


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
    """Search values for one batch size, from settings of other data sets on, or from a base.

    Trials train on the training part without some rows, and are measured on those after each
    epoch; the best epoch counts. The test part is not read. Without a base the portfolio comes
    first: settings that were best at large batches of other data sets. With a base what every rule
    predicts from it is tried first, and to its end, so that what is found is no worse than any. At
    the end the three best of all and the best rule's are trained again from other seeds, and the
    one with the best mean is the result: the first of many is first by chance as well.

    Call it again with the same `out` to resume it. Several processes may share one folder; each may
    then make one trial more.

    Args:
        data: the prepared folder.
        config: what to search.
        out: the folder, which is made or resumed.
        trials: how many in all, no fewer than the rules' points.
        seeds: how often the best are trained again.
        budget: minutes that it may take, about; then fewer trials, and where the time does not
            suffice only the best of all and the best rule's are trained again.
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
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        with alone_in(out.absolute().parent):
            if os.path.lexists(out):
                check_fits(data, config, out, precision)
            else:
                _begin(data, config, out, precision, progress=progress)
        with Stopping() as stopping:
            others = [(config.seed + 1 + k) % (LARGEST_SEED + 1) for k in range(seeds)]
            tuning = _Tuning(data, config, out, trials, others, end, stopping, progress)
            with as_user_errors(tuning.rows, out):
                try:
                    tuning.search()
                    tuning.repeat()
                except KeyboardInterrupt:
                    raise Stopped(
                        f"interrupted; {len(tuning.tried())} trials that have ended are kept. "
                        f"Resume with: {command or how_to_resume(out, data.path)}",
                        stopping.number or signal.SIGINT,
                    ) from None
        tuning.write(command)
    return Tuned.open(out)


class Trainers:
    """Trainers that the trials of a tune share, one per compiled step.

    Args:
      rows: what `hold_out` made.
    """

    def __init__(self, rows: PreparedData) -> None:
        self._rows = rows
        self._kept: dict[Any, Trainer] = {}
        self._seed: int | None = None

    def get(self, config: TrainConfig, stopping: Stopping, advance: Callable[[], Any]) -> Trainer:
        """A trainer at its beginning, as `train` makes it, to the last bit."""
        if self._seed != config.seed:
            gc.collect()  # the network drawn before
            self._loader = check_trainable(self._rows, config)
            self._weights, self._seed = self._drawn(config), config.seed
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

    def _drawn(self, config: TrainConfig) -> list[np.ndarray]:
        """A new network's weights, of tables with σ = 1.

        Not for each trial: TensorFlow, seeded, compiles all steps again in part.
        """
        set_seeds(config.seed, deterministic=config.deterministic)
        new = network(dataclasses.replace(config, init_stddev=1.0), self._rows.schema)
        new(any_batch(vars(self._rows.spec)))
        return [variable.numpy() for variable in new.weights]


def epochs_of(
    rows: PreparedData,
    config: TrainConfig,
    stopping: Stopping,
    advance: Callable[[], Any] = lambda: None,
    trainers: Trainers | None = None,
) -> Iterator[Epoch]:
    """Train as `train(rows, config)` would, to the last bit; what each epoch came to.

    Args:
      rows: what `hold_out` made.
      config: of the trial.
      stopping: ends it after the update in hand.
      advance: called after each update.
      trainers: of trials before on the same rows.

    Raises:
      NotFiniteError: a loss, gradient, weight or prediction is no finite number.
      KeyboardInterrupt: it was asked to stop.
    """
    begun = time.perf_counter()
    with quiet_stack():  # of many networks in one process TensorFlow warns that it traces many
        trainer = (trainers or Trainers(rows)).get(config, stopping, advance)
        for row in trainer.epochs():
            now = time.perf_counter()
            measured = {k: row[k] for k in ("auc", "log_loss", "calibration", "train_loss")}
            yield {**measured, "seconds": now - begun}
            begun = time.perf_counter()


def _begin(
    data: PreparedData, config: TuneConfig, out: Path, precision: str, *, progress: bool
) -> None:
    """Make the folder: the rows, the studies, the record."""
    check_input_names(data.spec)
    refuse_existing(out)
    first = config.train_config(next(iter(config.queue)))
    check_trainable(data, first)
    try:
        network(first, data.schema)
    except ValueError as error:  # of the data's columns, which only the network knows
        raise UserError(str(error)) from None
    with all_or_nothing(out) as folder:
        hold_out(data, config.held_out, config.seed, folder / ROWS, progress=progress)
        check_trainable(PreparedData.open(folder / ROWS), first)  # fewer rows
        study = optuna.create_study(
            study_name="tune", storage=_storage(folder), direction="maximize"
        )
        for point, rules in config.queue.items():
            study.enqueue_trial(config.space.params(point), user_attrs={"rules": list(rules)})
        write_json(folder / RECORD, record_of(data, config, precision))


class _Sampler(optuna.samplers.BaseSampler):
    """TPE, anew for each trial, of the seed and the trial's number.

    So a tune in two parts is one, and processes that share a tune do not propose the same.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
        """The first that a study asks of a trial."""
        drawn = np.random.default_rng([self._seed, trial.number])
        self._of_trial = optuna.samplers.TPESampler(
            n_startup_trials=_STARTUP,
            multivariate=True,
            group=True,
            constant_liar=True,
            seed=int(drawn.integers(2**32)),
        )
        return self._of_trial.infer_relative_search_space(study, trial)

    def sample_relative(self, study: Any, trial: Any, search_space: Any) -> Any:
        """TPE's."""
        return self._of_trial.sample_relative(study, trial, search_space)

    def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
        """TPE's."""
        return self._of_trial.sample_independent(study, trial, name, distribution)


@dataclass
class _Tuning:
    """A tune on its way, in one of the processes that share it; `end` is when the budget is."""

    data: PreparedData
    config: TuneConfig
    out: Path
    trials: int
    seeds: Sequence[int]
    end: float
    stopping: Stopping
    show: bool

    def __post_init__(self) -> None:
        self.rows = PreparedData.open(self.out / ROWS)
        pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=0)
        storage = _storage(self.out)
        self.study = optuna.load_study(
            study_name="tune", storage=storage, pruner=pruner, sampler=_Sampler(self.config.seed)
        )
        self.trainers = Trainers(self.rows)

    def tried(self) -> list[dict[str, Any]]:
        """All trials that have ended, by number, as the result has them."""
        return [self._tried(t) for t in self.study.get_trials(deepcopy=False, states=_ENDED)]

    def _tried(self, trial: FrozenTrial) -> dict[str, Any]:
        epochs: list[Epoch] = trial.user_attrs.get("epochs", [])
        aucs = [epoch["auc"] for epoch in epochs]
        return {
            "number": trial.number,
            "rules": trial.user_attrs.get("rules", []),  # that predicted it
            "auc": max(aucs, default=None),
            "best_epoch": _best(aucs),
            "why": trial.user_attrs.get("why"),  # it ended before its last epoch
            "seconds": _seconds(epochs),
            **self.config.space.point(trial.params).to_dict(),
            "epochs": epochs,
        }

    # Trials

    def search(self) -> None:
        """Try points until there are enough, or the time that the repeats leave is over."""
        if self.show:
            if few := few_steps(self.rows.rows["train"], self.config.batch_size):
                print(f"Warning: {few}")
            print(HEADER, flush=True)
        while self._has_time_for_a_trial():
            optuna.storages.fail_stale_trials(self.study)
            states = [trial.state for trial in self.study.get_trials(deepcopy=False)]
            ended = sum(state in _ENDED for state in states)
            if ended >= self.trials:
                return
            if ended + states.count(TrialState.RUNNING) >= self.trials:
                self._wait()
                continue
            self.study.optimize(self._try, n_trials=1, callbacks=[self._tell])

    def _has_time_for_a_trial(self) -> bool:
        """Beside the repeats of the best of all and of the best rule."""
        took = [tried["seconds"] for tried in self.tried() if tried["epochs"]]
        must, _ = self._to_repeat()
        reserve = sum(len(self.seeds) * _seconds_again(one) for one in must.values())
        return not took or self.end - time.monotonic() - reserve > statistics.fmean(took)

    def _wait(self) -> None:
        """For what other processes do."""
        time.sleep(_POLL)
        if self.stopping.asked:
            raise KeyboardInterrupt

    def _try(self, trial: optuna.Trial) -> float:
        """Train a trial's point, and report each epoch."""
        config = self.config.train_config(self.config.space.suggest(trial))
        try:
            epochs, why = self._train(config, f"trial {trial.number + 1}", trial)
        except BaseException:  # interrupted or refused: tried again when the tune is resumed
            trial.study.enqueue_trial(trial.params, user_attrs=trial.user_attrs)
            raise
        trial.set_user_attr("epochs", epochs)
        trial.set_user_attr("why", why)
        if why == _PRUNED or not epochs:
            raise optuna.TrialPruned
        return max(epoch["auc"] for epoch in epochs)

    def _tell(self, study: optuna.Study, trial: FrozenTrial) -> None:
        if self.show and trial.state in _ENDED:
            print(trial_line(self._tried(trial), self.tried(), self.trials), flush=True)

    def _train(
        self, config: TrainConfig, title: str, trial: optuna.Trial | None = None
    ) -> tuple[list[Epoch], str | None]:
        """Train until the last epoch, or until a trial of the search may end, and why it did."""
        epochs: list[Epoch] = []
        why = None
        shown = self.show and os.isatty(2)  # in a log there is the line of each trial
        total = -(-self.rows.rows["train"] // config.batch_size) * config.epochs
        with progress_bar(title, total, " batches", show=shown) as bar:
            bar.leave = False
            try:
                given = (self.rows, config, self.stopping, bar.update, self.trainers)
                for epoch in epochs_of(*given):
                    epochs.append(epoch)
                    if trial is not None and (why := self._why_end(trial, config, epochs)):
                        break
            except NotFiniteError as error:
                why = str(error)
        return epochs, why

    def _why_end(self, trial: optuna.Trial, config: TrainConfig, epochs: list[Epoch]) -> str | None:
        """Why a trial ends after its last epoch so far; `None`: it continues."""
        aucs = [epoch["auc"] for epoch in epochs]
        trial.report(aucs[-1], len(aucs))
        is_first = self.config.space.point(trial.params) in self.config.queue  # which never is
        if not is_first and trial.should_prune():
            return _PRUNED
        is_over = _best(aucs) < len(aucs) < config.epochs
        return "no better than before" if is_over else None

    # Repeats

    def _to_repeat(self) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
        """By number: the best and the best rule's, or the second; with those, all finalists."""
        ranked = sorted((t for t in self.tried() if t["epochs"]), key=lambda t: -t["auc"])
        of_rules = [one for one in ranked if one["rules"]]
        must = {one["number"]: one for one in (*ranked[:1], *(of_rules or ranked[1:])[:1])}
        return must, must | {one["number"]: one for one in ranked[:FINALISTS]}

    def repeat(self) -> None:
        """Train the best, and what the rules predict, from other seeds."""
        must, finalists = self._to_repeat()
        if not must:
            raise UserError(
                "a trial must end with numbers. Received: all of them diverged, one with: "
                f"{self.tried()[-1]['why']}"
            )
        wanted = [(number, seed) for number in finalists for seed in self.seeds]
        if self.show:
            minutes = len(self.seeds) * sum(map(_seconds_again, finalists.values())) / 60
            print(
                f"Training {len(finalists)} of them again from {len(self.seeds)} other seeds, "
                f"about {minutes:.1f} minutes",
                flush=True,
            )
        while True:
            known = self.study.user_attrs
            left = [one for one in wanted if _repeat(*one) not in known]
            if not left:
                return
            for number, seed in left:
                end = time.monotonic() + _seconds_again(finalists[number])
                if number not in must and end > self.end:
                    return
                with alone_with(self.out / _repeat(number, seed), wait=False) as is_mine:
                    if is_mine:
                        self._train_again(finalists[number], seed)
                        break
            else:
                self._wait()

    def _train_again(self, tried: dict[str, Any], seed: int) -> None:
        name = _repeat(tried["number"], seed)
        if name in self.study.user_attrs:  # another process's, meanwhile
            return
        point, epochs = Point.from_dict(tried), tried["best_epoch"]
        config = self.config.train_config(point, epochs=epochs, seed=seed)
        found, why = self._train(config, f"repeat of {tried['number'] + 1}")
        # The last epoch's AUC: none is chosen by the rows that it is measured by.
        auc = None if why else found[-1]["auc"]
        self.study.set_user_attr(name, {"auc": auc, "seconds": _seconds(found)})

    # The end

    def write(self, command: str) -> None:
        """The configuration that was found, and the result."""
        tried, (_, finalists) = self.tried(), self._to_repeat()
        known = self.study.user_attrs
        repeats: dict[int, dict[int, float | None]] = {
            one["number"]: {
                seed: known[name]["auc"]
                for seed in self.seeds
                if (name := _repeat(one["number"], seed)) in known
            }
            for one in tried
        }
        seconds = sum(one["seconds"] for one in (*tried, *known.values()))

        def mean(one: dict[str, Any]) -> float:
            """Of all seeds; what diverged from one comes last."""
            aucs = [auc for auc in repeats[one["number"]].values() if auc is not None]
            if len(aucs) < len(repeats[one["number"]]):
                return -1.0
            return statistics.fmean(aucs) if len(aucs) == len(self.seeds) else 0.0

        best = max(finalists.values(), key=lambda one: (mean(one), one["auc"]))
        others = [one for one in finalists.values() if not one["rules"] and one is not best]
        rules = sorted((one for one in tried if one["rules"]), key=lambda one: -(one["auc"] or 0))
        lines = [
            ("best found", best),
            *((f"trial {one['number'] + 1}", one) for one in others),
            *((", ".join(one["rules"]), one) for one in rules),
        ]
        done = {rule for one in rules for rule in one["rules"]}
        own = repeats[best["number"]]
        found = self.config.train_config(Point.from_dict(best), epochs=best["best_epoch"])
        importance, measured = self._importance()
        result = {
            "format": FORMAT_VERSION,
            "command": command,
            "data": str(self.data.path.resolve()),
            "rows": self.rows.rows,
            "config": self.config.to_dict(),
            "at_the_edge": self.config.space.at_the_edge(Point.from_dict(best)),
            "epoch_seconds": statistics.median(
                epoch["seconds"] for one in tried for epoch in one["epochs"]
            ),
            "winner": best["number"],
            "table": [_row(what, one, repeats[one["number"]], own) for what, one in lines],
            "not_tried": [rule for rule in self.config.rules if rule not in done],
            "importance": importance,
            "trials_measured": measured,
            "seconds": seconds,
            "trials": tried,
            **environment("optuna"),
        }
        with alone_in(self.out):
            write_json(self.out / TUNED, found.to_dict())
            write_json(self.out / RESULT, result)

    def _importance(self) -> tuple[dict[str, float] | None, int]:
        """What share of the AUC's variance each value explains, greatest first; of how many trials.

        By fANOVA (Hutter et al. 2014), over the trials that were not given up. r and ζ, which only
        trials with a clip have, are left out. `None` below `FEWEST` trials.
        """
        trials = self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        if len(trials) < FEWEST or len({trial.value for trial in trials}) == 1:
            return None, len(trials)
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(self.study, evaluator=evaluator)
        return {name: float(share) for name, share in found.items()}, len(trials)


def _row(
    what: str,
    tried: dict[str, Any],
    own: dict[int, float | None],
    best: dict[int, float | None],
) -> dict[str, Any]:
    """A line of the table; differences are of the same seeds."""
    aucs = [auc for auc in own.values() if auc is not None]
    diverged = len(own) - len(aucs)
    differences = [
        auc - of_best
        for seed, auc in own.items()
        if auc is not None and (of_best := best.get(seed)) is not None
    ]
    mean, deviation = _mean_and_deviation([] if diverged else aucs)
    difference, its_deviation = _mean_and_deviation([] if diverged or own is best else differences)
    return {
        "what": what,
        "trial": tried["number"],
        "rules": tried["rules"],
        "mean": mean,
        "deviation": deviation,
        "aucs": aucs,
        "seeds": list(own),
        "diverged": diverged,
        "difference": difference,
        "difference_deviation": its_deviation,
        "search_auc": tried["auc"],
        "epochs": tried["best_epoch"],
        **{key: tried[key] for key in ("hyperparameters", "update", "rates", "max_epochs")},
    }


def _mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def _best(aucs: Sequence[float]) -> int:
    """The number of the best epoch; 0 of none."""
    return aucs.index(max(aucs)) + 1 if aucs else 0


def _seconds(epochs: Sequence[Epoch]) -> float:
    return sum(epoch["seconds"] for epoch in epochs)


def _seconds_again(tried: dict[str, Any]) -> float:
    """What a repeat takes: up to the best epoch."""
    return _seconds(tried["epochs"][: tried["best_epoch"]])


def _repeat(number: int, seed: int) -> str:
    """The name of what a trial comes to from another seed."""
    return f"repeat {number} {seed}"


def _storage(folder: Path) -> optuna.storages.RDBStorage:
    with warnings.catch_warnings():  # Optuna 4.9 has other names for the heartbeat's callback
        warnings.simplefilter("ignore")
        return optuna.storages.RDBStorage(
            f"sqlite:///{folder.absolute() / DATABASE}",
            {"connect_args": {"timeout": _WAIT}, "poolclass": NullPool},
            heartbeat_interval=_HEARTBEAT,
            grace_period=_GRACE,
            failed_trial_callback=optuna.storages.RetryFailedTrialCallback(max_retry=_RETRIES),
        )
