"""Tuning: values searched at the batch size itself, by rows held out of the training part.

Two Optuna studies in one SQLite file: "tune" has the trials, "repeats" the best of them trained
again from other seeds. Optuna's heartbeat finds trials whose process died, and they are retried.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import signal
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from merlin_cowclip.workflows.checks import check_whole
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import check_input_names
from merlin_cowclip.workflows.errors import NotFiniteError, Stopped, UserError
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing, write_json
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.held_out import held_out_rows, hold_out
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
    how_to_go_on,
    record_of,
    trial_line,
)
from merlin_cowclip.workflows.training.configuration import LARGEST_SEED, TrainConfig
from merlin_cowclip.workflows.training.one_at_a_time import alone_in
from merlin_cowclip.workflows.training.stopping import Stopping

with quiet_imports():
    import optuna
    from optuna.trial import FrozenTrial, TrialState
    from sqlalchemy.pool import NullPool

    from merlin_cowclip.plugins._tensorflow import quiet_stack, tf
    from merlin_cowclip.workflows.training.evaluation import EVALUATION_BATCH
    from merlin_cowclip.workflows.training.loader import Loader
    from merlin_cowclip.workflows.training.rebuilding import network
    from merlin_cowclip.workflows.training.reproducibility import set_seeds
    from merlin_cowclip.workflows.training.runs import environment
    from merlin_cowclip.workflows.training.train import as_user_errors, check_trainable
    from merlin_cowclip.workflows.training.trainer import Trainer

DATABASE = "study.db"
PATIENCE = 2  # epochs without a better AUC, after which a trial ends
FINALISTS = 3  # the best of the search, of which one may be so by chance
_HEARTBEAT, _GRACE = 10, 60  # seconds; a trial without a heartbeat for so long is tried again
_RETRIES = 2
_POLL = 0.5  # seconds between two looks at what other processes do
_WAIT = 60.0  # seconds for another process's transaction
_STARTUP = 6  # trials before TPE has a model of the values
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
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        with alone_in(out.absolute().parent):
            if os.path.lexists(out):
                check_fits(data, config, out, precision)
            else:
                _begin(data, config, out, precision, progress=progress)
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


def epochs_of(
    rows: PreparedData,
    config: TrainConfig,
    stopping: Stopping,
    advance: Callable[[], Any] = lambda: None,
) -> Iterator[Epoch]:
    """Train as `train(rows, config)` would, to the last bit; what each epoch came to.

    Args:
      rows: what `hold_out` made.
      config: of the trial.
      stopping: ends it after the update in hand.
      advance: called after each update.

    Raises:
      NotFiniteError: a loss, gradient, weight or prediction is no finite number.
      KeyboardInterrupt: it was asked to stop.
    """
    begun = time.perf_counter()
    loader = check_trainable(rows, config)
    held_out = Loader(rows, "test", batch_size=EVALUATION_BATCH)
    gc.collect()  # the last trial's network
    tf.keras.backend.clear_session()
    with quiet_stack():  # of many networks in one process TensorFlow warns that it traces many
        set_seeds(config.seed, deterministic=config.deterministic)
        trainer = Trainer(rows, config, loader, held_out, stopping, after_update=advance)
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
        self._seeds = [(config.seed + 1 + k) % (LARGEST_SEED + 1) for k in range(seeds)]
        self._updates = -(-self.rows.rows["train"] // config.batch_size)
        load = functools.partial(optuna.load_study, storage=_storage(out))
        pruner = optuna.pruners.PercentilePruner(75.0, n_startup_trials=5, n_warmup_steps=1)
        self._study = load(study_name="tune", pruner=pruner)
        self._again = load(study_name="repeats", sampler=optuna.samplers.RandomSampler())

    # Trials

    def tried(self) -> list[dict[str, Any]]:
        """All trials that have ended, by number, as the result has them."""
        return [self._tried(t) for t in self._study.get_trials(deepcopy=False, states=_ENDED)]

    def _tried(self, trial: FrozenTrial) -> dict[str, Any]:
        epochs: list[Epoch] = trial.user_attrs.get("epochs", [])
        aucs = [epoch["auc"] for epoch in epochs]
        return {
            "number": trial.number,
            "rules": trial.user_attrs.get("rules", []),  # that predicted it
            "auc": max(aucs, default=None),
            "best_epoch": aucs.index(max(aucs)) + 1 if aucs else 0,
            "why": trial.user_attrs.get("why"),  # it ended before its last epoch
            "seconds": sum(epoch["seconds"] for epoch in epochs),
            **self._config.space.point(trial.params).to_dict(),
            "epochs": epochs,
        }

    def search(self) -> None:
        """Try points until there are enough, or the time that the repeats leave is over."""
        if self._show:
            if few := few_steps(self.rows.rows["train"], self._config.batch_size):
                print(f"Warning: {few}")
            print(HEADER, flush=True)
        while self._has_time_for_a_trial():
            optuna.storages.fail_stale_trials(self._study)
            trials = self._study.get_trials(deepcopy=False)
            ended = sum(trial.state in _ENDED for trial in trials)
            running = sum(trial.state == TrialState.RUNNING for trial in trials)
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
            self._study.optimize(self._try, n_trials=1, callbacks=[self._tell])

    def _try(self, trial: optuna.Trial) -> float:
        """Train a trial's point, and report each epoch."""
        config = self._config.train_config(self._config.space.suggest(trial))

        def why_end(aucs: list[float]) -> str | None:
            trial.report(aucs[-1], len(aucs))
            # What a rule predicted is never given up.
            if not trial.user_attrs.get("rules") and trial.should_prune():
                return "given up"
            is_over = len(aucs) - 1 - aucs.index(max(aucs)) >= PATIENCE
            return (
                f"no better for {PATIENCE} epochs"
                if is_over and len(aucs) < config.epochs
                else None
            )

        epochs, why = self._train(trial, config, f"trial {trial.number + 1}", why_end)
        if why == "given up" or not epochs:
            raise optuna.TrialPruned
        return max(epoch["auc"] for epoch in epochs)

    def _tell(self, study: optuna.Study, trial: FrozenTrial) -> None:
        if self._show and trial.state in _ENDED:
            print(trial_line(self._tried(trial), self.tried(), self._trials), flush=True)

    def _train(
        self,
        trial: optuna.Trial,
        config: TrainConfig,
        title: str,
        why_end: Callable[[list[float]], str | None],
    ) -> tuple[list[Epoch], str | None]:
        """Train; what ends it, interrupted or refused, is tried again when the tune goes on."""
        epochs: list[Epoch] = []
        why = None
        shown = self._show and os.isatty(2)  # in a log there is the line of each trial
        total = self._updates * config.epochs
        with progress_bar(title, total, " batches", show=shown) as bar:
            bar.leave = False
            found = epochs_of(self.rows, config, self._stopping, bar.update)
            try:
                for epoch in found:
                    epochs.append(epoch)
                    why = why_end([one["auc"] for one in epochs])
                    if why:
                        break
            except NotFiniteError as error:
                why = str(error)
            except BaseException:
                attrs = {"rules": trial.user_attrs.get("rules", [])}
                trial.study.enqueue_trial(trial.params, user_attrs=attrs)
                raise
        trial.set_user_attr("epochs", epochs)
        trial.set_user_attr("why", why)
        return epochs, why

    @property
    def _left(self) -> float:
        """Seconds of the budget; infinite without one."""
        return self._end - time.monotonic()

    def _has_time_for_a_trial(self) -> bool:
        """Beside the repeats of the best of all and of the best rule."""
        took = [tried["seconds"] for tried in self.tried() if tried["epochs"]]
        must, _ = self._to_repeat()
        reserve = sum(len(self._seeds) * _seconds_again(one) for one in must.values())
        return not took or self._left - reserve > statistics.fmean(took)

    def _wait(self) -> None:
        time.sleep(_POLL)
        if self._stopping.asked:
            raise KeyboardInterrupt

    # Repeats

    def _to_repeat(self) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
        """By number, in turn: the best of all and the best rule's, and with those all others."""
        ranked = sorted((t for t in self.tried() if t["epochs"]), key=lambda t: -t["auc"])
        of_rules = [one for one in ranked if one["rules"]]
        must = {one["number"]: one for one in (*ranked[:1], *of_rules[:1])}
        return must, must | {one["number"]: one for one in (*ranked[:FINALISTS], *of_rules)}

    def repeat(self) -> None:
        """Train the best, and what the rules predict, from other seeds."""
        must, finalists = self._to_repeat()
        if not must:
            raise UserError(
                "a trial must end with numbers. Received: all of them diverged, one with: "
                f"{self.tried()[-1]['why']}"
            )
        with alone_in(self._out):
            trials = self._again.get_trials()
            known = {_key(t) for t in trials if t.state != TrialState.FAIL}
            for number in finalists:
                for seed in self._seeds:
                    if (number, seed) not in known:
                        self._again.enqueue_trial({"trial": number, "seed": seed})
        while True:
            optuna.storages.fail_stale_trials(self._again)
            trials = self._again.get_trials(deepcopy=False)
            waiting = [_key(t) for t in trials if t.state == TrialState.WAITING]
            if waiting:
                number = waiting[0][0]
                if number not in must and self._left < _seconds_again(finalists[number]):
                    return
                self._again.optimize(self._try_again, n_trials=1)
            elif any(t.state == TrialState.RUNNING for t in trials):
                self._wait()
            else:
                return

    def _try_again(self, trial: optuna.Trial) -> float:
        number = trial.suggest_int("trial", 0, 2**31 - 1)
        seed = trial.suggest_int("seed", 0, LARGEST_SEED)
        tried = {one["number"]: one for one in self.tried()}.get(number)
        if tried is None:  # drawn, as another process took the last that waited
            raise optuna.TrialPruned
        config = self._config.train_config(
            Point.from_dict(tried), epochs=tried["best_epoch"], seed=seed
        )
        epochs, why = self._train(trial, config, f"repeat of {number + 1}", lambda aucs: None)
        if why:
            raise optuna.TrialPruned
        return epochs[-1]["auc"]

    # The end

    def write(self, command: str) -> None:
        """The configuration that was found, and the result."""
        tried, (_, finalists) = self.tried(), self._to_repeat()
        # Of each repeat the last epoch's AUC: none is chosen by the rows that it is measured by.
        repeats: dict[int, dict[int, float | None]] = {}
        seconds = sum(one["seconds"] for one in tried)
        for trial in self._again.get_trials(deepcopy=False, states=_ENDED):
            epochs, why = trial.user_attrs.get("epochs", []), trial.user_attrs.get("why")
            seconds += sum(epoch["seconds"] for epoch in epochs)
            number, seed = _key(trial)
            if (epochs or why) and seed in self._seeds:
                repeats.setdefault(number, {})[seed] = None if why else epochs[-1]["auc"]

        def mean(one: dict[str, Any]) -> float:
            """Of all seeds; what diverged from one comes last."""
            of = repeats.get(one["number"], {})
            aucs = [auc for auc in of.values() if auc is not None]
            if len(aucs) < len(of):
                return -1.0
            return statistics.fmean(aucs) if len(aucs) == len(self._seeds) else 0.0

        best = max(finalists.values(), key=lambda one: (mean(one), one["auc"]))
        others = sorted(finalists.values(), key=lambda one: -one["auc"])
        lines = [
            ("best found", best),
            *((f"trial {t['number'] + 1}", t) for t in others if not t["rules"] and t is not best),
            *((", ".join(t["rules"]), t) for t in others if t["rules"]),
            *((", ".join(t["rules"]), t) for t in tried if t["rules"] and not t["epochs"]),
        ]
        done = {rule for one in tried for rule in one["rules"]}
        own = repeats.get(best["number"], {})
        found = self._config.train_config(Point.from_dict(best), epochs=best["best_epoch"])
        result = {
            "format": FORMAT_VERSION,
            "command": command,
            "data": str(self._data.path.resolve()),
            "rows": self.rows.rows,
            "config": self._config.to_dict(),
            "winner": best["number"],
            "table": [_row(what, t, repeats.get(t["number"], {}), own) for what, t in lines],
            "not_tried": [rule for rule in self._config.rules if rule not in done],
            "importance": self._importance(),
            "trials_measured": sum(bool(one["epochs"]) for one in tried),
            "seconds": seconds,
            "trials": tried,
            **environment("optuna"),
        }
        with alone_in(self._out):
            write_json(self._out / TUNED, found.to_dict())
            write_json(self._out / RESULT, result)

    def _importance(self) -> dict[str, float] | None:
        """What share of the AUC's variance over the trials each value explains, greatest first.

        By fANOVA (Hutter et al. 2014), over all trials that were measured, each by its best epoch.
        r and ζ, which only trials with a clip have, are left out. `None` below `FEWEST` trials.
        """
        measured = [
            optuna.trial.create_trial(
                params=trial.params, distributions=trial.distributions, value=auc
            )
            for trial in self._study.get_trials(deepcopy=False, states=_ENDED)
            if (auc := self._tried(trial)["auc"]) is not None
        ]
        if len(measured) < FEWEST or len({trial.value for trial in measured}) == 1:
            return None
        study = optuna.create_study(direction="maximize")
        study.add_trials(measured)
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
        return {name: float(share) for name, share in found.items()}


def _row(
    what: str,
    tried: dict[str, Any],
    own: dict[int, float | None],
    best: dict[int, float | None],
) -> dict[str, Any]:
    """A line of the table; differences are of the same seeds."""
    aucs = [auc for auc in own.values() if auc is not None]
    diverged = len(own) - len(aucs)
    pairs = [] if own is best or diverged else [(auc, best.get(s)) for s, auc in own.items()]
    mean, deviation = _mean_and_deviation([] if diverged else aucs)
    difference, its_deviation = _mean_and_deviation(
        [a - b for a, b in pairs if a is not None and b is not None]
    )
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
        **{key: tried[key] for key in ("hyperparameters", "update", "rates")},
    }


def _mean_and_deviation(values: Sequence[float]) -> tuple[float | None, float | None]:
    mean = statistics.fmean(values) if values else None
    return mean, statistics.stdev(values) if len(values) > 1 else None


def _seconds_again(tried: dict[str, Any]) -> float:
    """What a repeat takes: up to the best epoch."""
    return sum(epoch["seconds"] for epoch in tried["epochs"][: tried["best_epoch"]])


def _key(trial: FrozenTrial) -> tuple[int, int]:
    """Of a repeat: its trial and its seed."""
    params = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
    return params["trial"], params["seed"]


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
