# SPDX-License-Identifier: Apache-2.0
"""Tuning: search hyperparameters at one batch size by the AUC on the validation part.

An SQLite file has two Optuna studies: "tune" has the trials, and "repeats" trains the best of them
from other seeds. Optuna gives each to one process, and retries those whose process died.
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
from merlin_cowclip.workflows.errors import NotFiniteError, Stopped, UserError, check_whole
from merlin_cowclip.workflows.folders import (
    LOCK,
    locked,
    make_once,
    refuse_existing,
    remove,
    write_json,
)
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.study import tuned
from merlin_cowclip.workflows.study.configuration import AVERAGED, TuneConfig
from merlin_cowclip.workflows.training.configuration import LARGEST_SEED, TrainConfig, few_steps
from merlin_cowclip.workflows.training.stopping import Stopping

with quiet_imports():
    import optuna
    from optuna.trial import FrozenTrial, TrialState
    from sqlalchemy.pool import NullPool

    from merlin_cowclip.plugins._tensorflow import quiet_stack
    from merlin_cowclip.workflows.training.builder import network
    from merlin_cowclip.workflows.training.runs import columns_of, environment, identity_of
    from merlin_cowclip.workflows.training.train import as_user_errors, check_trainable
    from merlin_cowclip.workflows.training.trainer import Trainer

OVERFIT = 0.005  # a trial ends once its AUC is so far below its own best
STEPS = 12  # from the best trial at most, before TPE
ERROR = 0.002  # of an AUC, until a trial has two repeats
_HEARTBEAT, _GRACE = 10, 60  # seconds; a trial without a heartbeat for so long is tried again
_ENDED = (TrialState.COMPLETE, TrialState.PRUNED)  # PRUNED: it diverged
_OPEN = (TrialState.RUNNING, TrialState.WAITING)

Trial = Mapping[str, Any]  # that has ended, as of `tuned.trial_of`


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
) -> tuned.Tuned:
    """Search hyperparameters at one batch size, or resume a search.

    A trial's best epoch on the validation part counts. The test part is not read. The best trials
    are repeated from other seeds, and the highest mean is the result. Several processes may share
    `out`; each may add one trial.

    Args:
        data: the prepared folder, with a validation part.
        config: what to search.
        out: the folder to make or to resume.
        trials: how many in all.
        seeds: repeats of each of the best trials.
        budget: minutes for trials and repeats; at least one trial is repeated.
        command: the command that resumes the search, for messages and the result.
        progress: whether to show bars and a line per trial.

    Raises:
        UserError: a value is out of range, the data has no validation part, `out` is no study or
            one of other data or options, or no trial is stable from all seeds.
        Stopped: Ctrl-C, SIGTERM or SIGHUP; all trials that have ended are kept.
    """
    out = Path(out)
    if budget is not None and not 0 < budget < math.inf:
        raise UserError(f"budget must be positive minutes. Received: {budget}. Correct it")
    end = math.inf if budget is None else time.monotonic() + 60 * budget
    check_whole("trials", trials, 1)
    check_whole("seeds", seeds, 1)
    config = dataclasses.replace(config, rows=data.rows["train"])
    record = {
        **{"format": tuned.FORMAT_VERSION, "data": str(data.path.resolve())},
        **{"data_sha256": identity_of(data), "columns": columns_of(data)},
        **{"cardinalities": data.cardinalities, "config": dataclasses.asdict(config)},
    }
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    stopping = Stopping()
    with warnings.catch_warnings():
        for category in (optuna.exceptions.ExperimentalWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        if not os.path.lexists(out):
            _check(data, config, out)
        make_once(out, tuned.RECORD, record)
        tuned.check_resumable(out, record)
        with locked(out / LOCK):
            others = [(config.seed + 1 + k) % (LARGEST_SEED + 1) for k in range(seeds)]
            tuning = _Tuning(config, out, data, trials, others, end, stopping, progress)
        if progress and (few := few_steps(data.rows["train"], config.batch_size)):
            print(f"Warning: {few}", flush=True)
        try:
            with stopping, as_user_errors(data, out):
                tuning.run()
        except KeyboardInterrupt:
            raise Stopped(
                f"interrupted; {len(tuning.ended())} trials that have ended are kept. "
                f"Resume with: {command or 'the same call'}",
                stopping.number or signal.SIGINT,
            ) from None
        tuning.write({"command": command, "data": record["data"], "config": record["config"]})
    return tuned.Tuned.open(out)


def trial_epochs(
    data: PreparedData,
    config: TrainConfig,
    stopping: Stopping,
    after_step: Callable[[], Any] = lambda: None,
) -> Iterator[dict[str, Any]]:
    """Train without a run's folder, as `train` does, and yield the metrics of each epoch.

    Raises:
      NotFiniteError: a loss, gradient, weight or prediction is not finite.
      KeyboardInterrupt: it was asked to stop.
    """
    gc.collect()  # the network before, in cycles
    with quiet_stack():  # TensorFlow warns that many networks in one process trace many graphs
        trainer = Trainer(config, check_trainable(data, config), stopping, after_step=after_step)
        for row in trainer.epochs():
            yield {name.removeprefix("valid_"): value for name, value in row.items()}


def _check(data: PreparedData, config: TuneConfig, out: Path) -> None:
    """Refuse a bad place, and data that the first trial cannot be trained on."""
    refuse_existing(out)
    data.require("valid")
    first = config.train_config(config.queue[0][0])
    check_trainable(data, first)
    try:
        network(first, data.schema)
    except ValueError as error:  # of the data's columns, which only the network knows
        raise UserError(str(error)) from None


@dataclass
class _Tuning:
    """A study in one of the processes that share it; `end` is the budget's."""

    config: TuneConfig
    out: Path
    rows: PreparedData
    trials: int
    seeds: Sequence[int]
    end: float
    stopping: Stopping
    show: bool

    def __post_init__(self) -> None:
        storage = optuna.storages.RDBStorage(
            f"sqlite:///{self.out.absolute()}/study.db",
            {"connect_args": {"timeout": 60}, "poolclass": NullPool},
            heartbeat_interval=_HEARTBEAT,
            grace_period=_GRACE,
            failed_trial_callback=optuna.storages.RetryFailedTrialCallback(max_retry=2),
        )
        how: dict[str, Any] = {"storage": storage, "direction": "maximize", "load_if_exists": True}
        self.search = optuna.create_study(study_name="tune", **how)
        self.repeats = optuna.create_study(study_name="repeats", **how)

    def ended(self) -> list[Trial]:
        """All trials that have ended, with their repeats, by number."""
        repeats: dict[int, dict[str, float | None]] = {}
        for one in self.repeats.get_trials(deepcopy=False, states=_ENDED):
            if (of := one.user_attrs) and of["seed"] in self.seeds:
                repeats.setdefault(of["trial"], {})[str(of["seed"])] = one.value
        search = self.search.get_trials(deepcopy=False, states=_ENDED)
        return [tuned.trial_of(one, repeats.get(one.number + 1, {})) for one in search]

    def run(self) -> None:
        """Train trials and repeats, until there are enough or the time is over."""
        while study := self._next():
            study.optimize(self._train, n_trials=1, callbacks=[self._print])
        if self.show and (ended := len(self.ended())) < self.trials:
            print(f"The budget ends the search after {ended} trials. The same command continues.")

    def _next(self) -> optuna.Study | None:
        """The study that has a trial to train; None at the end. Waits for other processes."""
        while not self.stopping.asked:
            with locked(self.out / LOCK):
                for study in (self.search, self.repeats):
                    optuna.storages.fail_stale_trials(study)
                trials = self.search.get_trials(deepcopy=False, states=_OPEN)
                others = self.repeats.get_trials(deepcopy=False, states=_OPEN)
                ended = self.ended()
                running = sum(one.state == TrialState.RUNNING for one in trials)
                if len(ended) + running < self.trials and self._has_time(ended):
                    self._propose(ended, is_waiting=running < len(trials))
                    return self.search
                if any(one.state == TrialState.WAITING for one in others):
                    return self.repeats
                taken = [(t.user_attrs.get("trial"), t.user_attrs.get("seed")) for t in others]
                if pair := self._next_repeat(ended, taken):
                    self.repeats.enqueue_trial({}, user_attrs=dict(pair))
                    return self.repeats
                if not running and not others:
                    return None
            time.sleep(0.5)
        raise KeyboardInterrupt

    def _has_time(self, ended: Sequence[Trial]) -> bool:
        """For a trial, and the repeats that are left of the best two."""
        best, took = self._promising(ended)[:2], [one["seconds"] for one in ended] or [0]
        left = sum((len(self.seeds) - len(t["repeats"])) * t["repeat_seconds"] for t in best)
        return time.monotonic() + statistics.fmean(took) + left < self.end

    def _propose(self, ended: Sequence[Trial], is_waiting: bool) -> None:
        """Unless a trial is waiting, enqueue what comes before TPE, which proposes the rest."""
        trials = self.search.get_trials(deepcopy=False)
        seed = np.random.default_rng([self.config.seed, len(trials)]).integers(2**32)
        self.search.sampler = optuna.samplers.TPESampler(
            n_startup_trials=6, multivariate=True, group=True, constant_liar=True, seed=int(seed)
        )
        failed = TrialState.FAIL  # interrupted: tried again
        known = [t.system_attrs.get("fixed_params", t.params) for t in trials if t.state != failed]
        best = max(ended, key=lambda one: one["auc"] or 0, default=None)
        origins = [t.user_attrs.get("origin", "") for t in trials]
        taken = sum("×" in origin or origin == AVERAGED for origin in origins)
        steps = self.config.steps_from(best["params"]) if best and taken < STEPS else ()
        for params, origin in (*self.config.queue, *steps):
            if params not in known and not is_waiting:
                self.search.enqueue_trial(params, user_attrs={"origin": origin})
                return

    def _promising(self, ended: Sequence[Trial]) -> list[Trial]:
        """Trials that could still have the best mean, within its error; those begun come first."""
        left = [one for one in ended if len(one["repeats"]) < len(self.seeds)]
        repeated = [one for one in ended if one not in left and one["mean"] is not None]
        errors = [one["deviation"] for one in repeated if one["deviation"] is not None]
        least = max((one["mean"] for one in repeated), default=-math.inf)
        least -= statistics.fmean(errors or [ERROR])
        left = [one for one in left if (one["estimate"] or -math.inf) > least]
        return sorted(left, key=lambda one: (not one["repeats"], -one["estimate"]))

    def _next_repeat(self, ended: list[Trial], taken: list[tuple[Any, Any]]) -> Trial | None:
        """A trial and a seed, if any is left, and time for all seeds that are left of the trial."""
        is_first = not any(one["repeats"] for one in ended)  # a winner needs repeats
        for one in self._promising(ended):
            seeds = [seed for seed in self.seeds if (one["number"], seed) not in taken]
            seeds = [seed for seed in seeds if str(seed) not in one["repeats"]]
            is_late = time.monotonic() + len(seeds) * one["repeat_seconds"] > self.end
            if seeds and (is_first or one["repeats"] or not is_late):
                return {"trial": one["number"], "seed": seeds[0]}
            is_first = False
        return None

    def _train(self, trial: optuna.Trial) -> float:
        """Train a trial, whose best epoch counts; or one from another seed, up to that epoch."""
        is_repeat, of = trial.study is self.repeats, trial.user_attrs
        if is_repeat and not of:  # another process has taken what waited
            raise optuna.TrialPruned
        if is_repeat:
            (best,) = (one for one in self.ended() if one["number"] == of["trial"])
            config = self.config.train_config(best["params"], best["best_epoch"])
            config = dataclasses.replace(config, seed=of["seed"])
        else:
            config = self.config.train_config(self.config.suggest(trial))
        begun, curve, why = time.monotonic(), list[float](), None
        total = -(-self.rows.rows["train"] // config.batch_size) * config.epochs
        try:
            with progress_bar("trial", total, " batches", show=self.show and os.isatty(2)) as bar:
                bar.leave = False  # a line follows
                for epoch in trial_epochs(self.rows, config, self.stopping, bar.update):
                    curve.append(epoch["auc"])
                    if not is_repeat and curve[-1] < max(curve) - OVERFIT:
                        break
        except NotFiniteError as error:
            why = str(error)
        seconds = time.monotonic() - begun
        for name, value in {"curve": curve, "why": why, "seconds": seconds}.items():
            trial.set_user_attr(name, value)
        if why is not None:
            raise optuna.TrialPruned
        return curve[-1] if is_repeat else max(curve)

    def _print(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """A line for a trial or repeat."""
        if self.show and study is self.search:
            print(tuned.trial_line(self.ended(), trial.number + 1, self.trials), flush=True)
        elif self.show and (of := trial.user_attrs):
            auc = "diverged" if trial.value is None else f"AUC {trial.value:.5f}"
            print(f"trial {of['trial']} again, seed {of['seed']}: {auc}", flush=True)

    def write(self, more: Mapping[str, Any]) -> None:
        """Write the result, the trial with the best mean; a UserError if none is stable."""
        ended = self.ended()
        table = [one for one in ended if one["repeats"]]
        table.sort(key=lambda one: one["mean"] or -math.inf, reverse=True)
        if not table or table[0]["mean"] is None:
            remove(self.out / tuned.TUNED, self.out / tuned.RESULT)  # of other seeds
            whys = [f", the last one with: {one['why']}" for one in ended if one["why"]]
            raise UserError(
                f"no stable trial: {len(whys)} of {len(ended)} diverged{''.join(whys[-1:])}. "
                f"Repeats of {len(table)} diverged. Run the same command with more trials or time"
            )
        best, result = table[0], {"format": tuned.FORMAT_VERSION, **more, "rows": self.rows.rows}
        result |= {"winner": best["number"], "table": table, "trials": ended}
        config = self.config.train_config(best["params"], best["best_epoch"])
        with locked(self.out / LOCK):
            write_json(self.out / tuned.TUNED, config.to_dict())
            write_json(self.out / tuned.RESULT, result | environment("optuna"))
