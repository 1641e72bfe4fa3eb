"""The search: which point is tried next, and which trial is hopeless. Optuna's study, in SQLite.

All trials are there as they end. One that was in progress when its process died is tried again:
see `claims`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import sqlalchemy.exc
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.pool import NullPool

from merlin_cowclip.workflows.errors import UserError, clipped
from merlin_cowclip.workflows.study.claims import Claim, Claims
from merlin_cowclip.workflows.study.search_space import Point, SearchSpace
from merlin_cowclip.workflows.study.trials import Epoch

DATABASE = "study.db"
CLAIMS = ".claims"
_NAME = "tune"
_WAIT = 60.0  # seconds for another process's transaction
_STARTUP = 6  # trials before TPE has a model of the values
_STEP = 0.5  # standard deviation of a step, in decades; of the warm-up in epochs
_MOVED, _FLIPPED = 0.6, 0.2  # in how many steps a number moves, and a choice is drawn anew
_KEPT = 75.0  # percent of trials: the median ends some that rise slowly, and then highest
_FEWEST_AS_FAR = 5  # trials that have to have come as far, before any is given up
_NOT_PRUNED = 1  # epochs: in the first one a warm-up may still go on
_DEATHS = 3  # after so many, a trial is what kills its process
_MEASURED = (TrialState.COMPLETE, TrialState.PRUNED)


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
        return max((epoch.auc for epoch in self.epochs), default=-np.inf)

    @property
    def seconds(self) -> float:
        """All it took."""
        return sum(epoch.seconds for epoch in self.epochs)

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


class Trial:
    """A trial in progress, which this process has claimed."""

    def __init__(self, search: Search, trial: optuna.Trial, point: Point, claim: Claim) -> None:
        self.point = point
        self.number = trial.number
        self.rules: tuple[str, ...] = tuple(trial.user_attrs.get("rules", ()))
        self._search = search
        self._trial = trial
        self._claim = claim
        self._epochs: list[Epoch] = []

    def measured(self, epoch: Epoch) -> bool:
        """Note an epoch; whether the trial is hopeless by it. A rule's own point never is."""
        self._epochs.append(epoch)
        self._trial.report(epoch.auc, len(self._epochs))
        return not self.rules and self._trial.should_prune()

    def end(self, why: str | None = None, *, hopeless: bool = False) -> Tried:
        """It has ended, and is kept.

        Args:
          why: why before its last epoch.
          hopeless: whether it was given up by the search, or diverged.
        """
        self._trial.set_user_attr("epochs", [dataclasses.asdict(e) for e in self._epochs])
        self._trial.set_user_attr("why", why)
        study = self._search.study
        if hopeless:
            study.tell(self._trial, state=TrialState.PRUNED)
        else:
            study.tell(self._trial, max(epoch.auc for epoch in self._epochs))
        self._claim.let_go()
        return Tried(self.number, self.point, tuple(self._epochs), why, self.rules)

    def give_up(self) -> None:
        """It is to be tried again, from its beginning."""
        self._search.again(self.number, deaths=0)
        self._claim.let_go()


class Search:
    """The search in a tune's folder, which several processes may share.

    Args:
      folder: of the tune, made by `create`.
      space: what is searched.
      seed: what is proposed for trial n follows from it, n and the trials that have ended.
    """

    def __init__(self, folder: Path, space: SearchSpace, seed: int) -> None:
        self._space = space
        self._claims = Claims(folder / CLAIMS)
        if not (folder / DATABASE).is_file():
            raise _refusal(folder, "which is gone")
        with _quietly():
            self.study = optuna.load_study(
                study_name=_NAME,
                storage=_storage(folder),
                sampler=Proposals(seed),
                pruner=Pruner(),
            )

    @staticmethod
    def create(folder: Path, space: SearchSpace, starts: Mapping[Point, Sequence[str]]) -> None:
        """A search without trials, but for those to begin with: point → the rules behind it."""
        with _quietly():
            study = optuna.create_study(
                study_name=_NAME, storage=_storage(folder), direction="maximize"
            )
            for point, rules in starts.items():
                study.enqueue_trial(space.params(point), user_attrs={"rules": list(rules)})

    def claim(self, most: int) -> Trial | None:
        """The next trial, unless `most` have ended or are in progress."""
        with self._claims.alone(), _quietly():
            self._revive()
            states = [trial.state for trial in self.study.get_trials(deepcopy=False)]
            if sum(state in (*_MEASURED, TrialState.RUNNING) for state in states) >= most:
                return None
            trial = self.study.ask()
            claim = self._claims.take(f"trial-{trial.number}")
            assert claim is not None
            return Trial(self, trial, self._space.suggest(trial), claim)

    def in_progress(self) -> int:
        """How many trials other processes are at; those of dead ones wait to be tried again."""
        with self._claims.alone(), _quietly():
            self._revive()
            trials = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            return len(trials)

    def tried(self) -> list[Tried]:
        """All trials that have ended, by number."""
        trials = self.study.get_trials(deepcopy=False, states=_MEASURED)
        return [self._tried(trial) for trial in trials]

    def again(self, number: int, *, deaths: int) -> None:
        """Put what a trial was to try in the queue once more, and close it."""
        trials = self.study.get_trials(deepcopy=False)
        before = next(trial for trial in trials if trial.number == number)
        if before.state.is_finished():
            return
        params = {**before.system_attrs.get("fixed_params", {}), **before.params}
        queued = any(trial.user_attrs.get("again") == number for trial in trials)
        with _quietly():
            if params and not queued:  # a process may die between this line and the last
                kept = {"rules": list(before.user_attrs.get("rules", ()))}
                self.study.enqueue_trial(params, {**kept, "again": number, "deaths": deaths})
            self.study.tell(number, state=TrialState.FAIL)

    def _revive(self) -> None:
        """Trials whose process has died are to be tried again."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            claim = self._claims.take(f"trial-{trial.number}")
            if claim is None:
                continue
            deaths = int(trial.user_attrs.get("deaths", 0)) + 1
            if deaths < _DEATHS or not trial.params:
                self.again(trial.number, deaths=deaths)
            else:
                why = f"its process died {deaths} times"
                storage = self.study._storage
                storage.set_trial_user_attr(trial._trial_id, "why", why)
                self.study.tell(trial.number, state=TrialState.PRUNED)
            claim.let_go()

    def _tried(self, trial: FrozenTrial) -> Tried:
        attributes = trial.user_attrs
        return Tried(
            trial.number,
            self._space.point(trial.params),
            tuple(Epoch(**epoch) for epoch in attributes.get("epochs", ())),
            attributes.get("why"),
            tuple(attributes.get("rules", ())),
        )

    def importance(self) -> dict[str, float] | None:
        """What share of the AUC's variance over the trials each value explains, greatest first.

        By fANOVA (Hutter et al. 2014), over all trials that were measured, each by its best epoch.
        r and ζ, which only trials with a clip have, are left out. `None` below `FEWEST` trials.
        """
        trials = [
            optuna.trial.create_trial(
                params=trial.params, distributions=trial.distributions, value=tried.auc
            )
            for trial in self.study.get_trials(deepcopy=False, states=_MEASURED)
            if (tried := self._tried(trial)).epochs
        ]
        if len(trials) < FEWEST or len({trial.value for trial in trials}) == 1:
            return None
        with _quietly():
            study = optuna.create_study(direction="maximize")
            study.add_trials(trials)
            evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
            found = optuna.importance.get_param_importances(study, evaluator=evaluator)
        return {name: float(share) for name, share in found.items()}


FEWEST = 10
"""Trials below which nothing is said of importance."""


class Proposals(optuna.samplers.BaseSampler):
    """What is tried next: in turn a step from the best so far, and what Optuna's TPE proposes.

    A few dozen trials are few for TPE's model of eight values, and good points lie together; steps
    alone would stay where the best rule is. A step moves most of the values, by a third of a decade
    or so, and seldom a choice.

    All random numbers follow from the seed and the trial's number: a search that was interrupted
    goes on as it would have, and processes that share one do not propose the same.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._number = -1
        self._sampler: Any = None

    def _of(self, trial: FrozenTrial) -> optuna.samplers.TPESampler:
        if trial.number != self._number:
            self._number = trial.number
            self._sampler = optuna.samplers.TPESampler(
                n_startup_trials=_STARTUP,
                multivariate=True,
                group=True,
                constant_liar=True,
                seed=int(self._drawn(trial).integers(2**32)),
            )
        return self._sampler

    def _drawn(self, trial: FrozenTrial) -> np.random.Generator:
        return np.random.default_rng([self._seed, trial.number])

    def infer_relative_search_space(self, study: Any, trial: FrozenTrial) -> Any:
        """Optuna's, of the values that trials so far had."""
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(self, study: Any, trial: FrozenTrial, search_space: Any) -> Any:
        """All values at once."""
        best = _best(study) if trial.number % 2 else None
        if best is not None:
            return _step(best.params, search_space, self._drawn(trial))
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(
        self, study: Any, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        """A value that no trial so far had."""
        sampler = self._of(trial)
        return sampler.sample_independent(study, trial, param_name, param_distribution)


class Pruner(optuna.pruners.BasePruner):
    """Hopeless is whose best AUC so far is among the lowest quarter of all that came as far.

    Of all that have ended, given up or not. Optuna's percentile pruner compares with those that
    came to their end alone: here mostly the rules' own points, which are good and never given up,
    so that a trial better than half of all would be ended.
    """

    def prune(self, study: Any, trial: FrozenTrial) -> bool:
        """Whether the trial, which has just reported an epoch, is to be given up."""
        epoch = trial.last_step
        if epoch is None or epoch <= _NOT_PRUNED:
            return False
        as_far = [
            _best_by(other, epoch) for other in _kept(study) if epoch in other.intermediate_values
        ]
        if len(as_far) < _FEWEST_AS_FAR:
            return False
        return bool(_best_by(trial, epoch) < np.percentile(as_far, 100.0 - _KEPT))


def _kept(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that were measured, and not those that end their process each time."""
    trials = study.get_trials(deepcopy=False, states=_MEASURED)
    return [trial for trial in trials if "epochs" in trial.user_attrs]


def _best_by(trial: FrozenTrial, epoch: int) -> float:
    """A trial's best AUC in its first epochs."""
    return max(auc for step, auc in trial.intermediate_values.items() if step <= epoch)


def _best(study: optuna.Study) -> FrozenTrial | None:
    """The trial with the highest AUC so far, by its best epoch as everywhere (`Tried.auc`).

    Optuna's own value of a trial that was given up is that of its last epoch.
    """
    measured = [trial for trial in _kept(study) if trial.intermediate_values]
    return max(measured, key=lambda trial: max(trial.intermediate_values.values()), default=None)


def _step(
    params: Mapping[str, Any], search_space: Mapping[str, Any], drawn: np.random.Generator
) -> dict[str, Any]:
    """Parameters near others; those that only the space has are left to be drawn."""
    found = {}
    for name, distribution in search_space.items():
        moves, by = drawn.random(), drawn.normal()
        if name not in params:
            continue
        value = params[name]
        if isinstance(distribution, optuna.distributions.CategoricalDistribution):
            if moves < _FLIPPED:
                value = distribution.choices[int(drawn.integers(len(distribution.choices)))]
        elif moves < _MOVED:
            value = value * 10 ** (_STEP * by) if distribution.log else value + _STEP * by
            value = min(max(value, distribution.low), distribution.high)
        found[name] = value
    return found


@contextlib.contextmanager
def database_errors(folder: Path) -> Iterator[None]:
    """What SQLite has against a tune's database, as an error of the user's.

    Raises:
        UserError: it is none, or cannot be read or written.
    """
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


def _storage(folder: Path) -> optuna.storages.RDBStorage:
    # By a function: a path in a URL would have to be escaped, for SQLAlchemy and for Optuna.
    connect = functools.partial(_connect, str(folder / DATABASE))
    return optuna.storages.RDBStorage("sqlite://", {"creator": connect, "poolclass": NullPool})


def _connect(path: str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_WAIT)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without Optuna's log, and its warnings of what it calls experimental."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)
