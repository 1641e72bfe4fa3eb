"""Tuning: values searched at the batch size itself, by rows held out of the training part."""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import Stopped, UserError
from merlin_cowclip.workflows.folders import remove, write_json
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.study.claims import Claims, alone_in
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.tune_folder import begin, check, check_fits
from merlin_cowclip.workflows.study.tune_tables import trial_line
from merlin_cowclip.workflows.study.tuned import (
    FORMAT_VERSION,
    RESULT,
    ROWS,
    TUNED,
    Tuned,
    command_of,
    how_to_go_on,
)
from merlin_cowclip.workflows.training.configuration import LARGEST_SEED, TrainConfig
from merlin_cowclip.workflows.training.stopping import Interrupted, Stopping

with quiet_imports():
    from merlin_cowclip.workflows.study.repeats import Repeat, Repeats, mean_and_deviation
    from merlin_cowclip.workflows.study.search import CLAIMS, Search, Tried, database_errors
    from merlin_cowclip.workflows.study.trials import DivergedError, Epoch, epochs_of
    from merlin_cowclip.workflows.training.runs import environment
    from merlin_cowclip.workflows.training.train import as_user_errors

PATIENCE = 2  # epochs without a better AUC, after which a trial ends
FINALISTS = 3  # the best of the search, of which one may be so by chance
_REPEATS = "repeats"
_POLL = 0.5  # seconds between two looks at what other processes do
_BEST = "best found"


def tune(
    data: PreparedData,
    config: TuneConfig,
    out: str | Path,
    *,
    trials: int = 40,
    seeds: int = 3,
    budget: float | None = None,
    progress: bool = True,
) -> Tuned:
    """Search values for one batch size, from every scaling rule's prediction on.

    Trials train on the training part without some rows, and are measured on those after each
    epoch; the best epoch counts. The test part is not read. What every rule predicts from the base
    is tried first, and to its end, so that what is found is no worse than any. At the end the
    three best of all and what the rules predict are trained again from other seeds, and the one
    with the best mean is the result: the first of many is first by chance as well.

    A tune that was stopped or killed goes on where `out` is its folder: but for what was in
    progress nothing is lost. Several processes may share one folder at a time.

    Args:
        data: the prepared folder.
        config: what to search.
        out: the folder, which is made or gone on with.
        trials: how many in all, no fewer than the rules' points.
        seeds: how often the best are trained again.
        budget: minutes that it may take, about; then fewer trials, and where the time does not
            suffice only the best of all and the best rule are trained again.
        progress: whether to show bars and a line per trial.

    Raises:
        UserError: a value out of range, `out` is no tune or one of other data or options, the
            budget is too small for one epoch, or held-out rows that cannot be measured by.
        Stopped: Ctrl-C, SIGTERM or SIGHUP; all trials that have ended are kept.
    """
    out = Path(out)
    clock = _Clock(budget)
    check(config, trials, seeds)
    with alone_in(out.absolute().parent):
        new = not os.path.lexists(out)
        if new:
            begin(data, config, out, progress=progress)
        else:
            check_fits(data, config, out)
    with database_errors(out):
        tuning = _Tuning(data, config, out, trials, seeds, clock, progress)
        with as_user_errors(tuning.rows, out), Stopping() as stopping:
            try:
                tuning.search_all(stopping)
                tuning.repeat_all(stopping)
            except Interrupted:
                raise Stopped(tuning.how_it_stands(), stopping.number) from None
            except KeyboardInterrupt:  # a second signal
                raise Stopped(tuning.how_it_stands(), stopping.number or signal.SIGINT) from None
            except _TooLittleTimeError:
                if new and not tuning.search.tried():
                    remove(out)
                raise
        tuning.write()
    return Tuned.open(out)


class _TooLittleTimeError(UserError):
    """The budget was over before the first epoch was."""


class _Clock:
    """The time that is left."""

    def __init__(self, minutes: float | None) -> None:
        if minutes is not None and not 0 < minutes < math.inf:
            raise UserError(f"budget must be positive minutes. Received: {minutes}. Correct it")
        self.minutes = minutes
        self._begun = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds; infinite without a budget."""
        if self.minutes is None:
            return math.inf
        return self._begun + 60 * self.minutes - time.monotonic()


class _Tuning:
    """A tune on its way, in one of the processes that share it."""

    def __init__(
        self,
        data: PreparedData,
        config: TuneConfig,
        out: Path,
        trials: int,
        seeds: int,
        clock: _Clock,
        progress: bool,
    ) -> None:
        self.rows = PreparedData.open(out / ROWS)
        self.search = Search(out, config.space, config.seed)
        self._claims = Claims(out / CLAIMS)
        self._repeats = Repeats(out / _REPEATS, self._claims, self.rows)
        self._data = data
        self._config = config
        self._out = out
        self._trials = trials
        self._seeds = seeds
        self._clock = clock
        self._show = progress
        self._updates = (self.rows.rows["train"] + config.batch_size - 1) // config.batch_size

    # Trials

    def search_all(self, stopping: Stopping) -> None:
        """Try points until there are enough, or the time that the repeats leave is over."""
        while self._has_time_for_a_trial():
            others = self.search.in_progress()
            trial = self.search.claim(self._trials)
            if trial is None:
                if not others:
                    return
                self._wait(stopping)
                continue
            ended = None
            try:
                with self._bar(f"trial {trial.number + 1}") as advance:
                    why, hopeless = self._try(trial, stopping, advance)
                ended = trial.end(why, hopeless=hopeless)
            finally:
                if ended is None:
                    trial.give_up()
            if self._show:
                print(trial_line(ended, self.search.tried(), self._trials), flush=True)

    def _try(self, trial: Any, stopping: Stopping, advance: Any) -> tuple[str | None, bool]:
        """Train a trial; why it ended before its last epoch, and whether it was hopeless."""
        config = self._config.train_config(trial.point)
        aucs: list[float] = []
        first = not self.search.tried()
        updates = itertools.count(1)

        def update() -> None:
            advance()
            made = next(updates)
            if first and not aucs and self._clock.left <= 0:
                raise self._too_little(made)

        try:
            with closing(epochs_of(self.rows, config, stopping, update)) as epochs:
                for epoch in epochs:
                    aucs.append(epoch.auc)
                    if trial.measured(epoch):
                        return "given up", True
                    if len(aucs) == config.epochs:
                        break
                    if len(aucs) - 1 - aucs.index(max(aucs)) >= PATIENCE:
                        return f"no better for {PATIENCE} epochs", False
                    if self._clock.left < self._reserve():
                        return "out of time", False
        except DivergedError as error:
            return str(error), True
        return None, False

    def _too_little(self, updates: int) -> _TooLittleTimeError:
        assert self._clock.minutes is not None
        needed = self._clock.minutes * self._updates / updates
        return _TooLittleTimeError(
            f"budget must suffice for an epoch of the first trial. Received: "
            f"{self._clock.minutes:g} minutes, in which {updates:,} of its {self._updates:,} "
            f"updates were made. Give it more than {needed:.2g} for each epoch of each trial"
        )

    def _has_time_for_a_trial(self) -> bool:
        if self._clock.minutes is None:
            return True
        tried = [t.seconds for t in self.search.tried() if t.epochs]
        if not tried:
            return True
        return self._clock.left - self._reserve() > sum(tried) / len(tried)

    def _reserve(self) -> float:
        """Seconds that the repeats of the best of all and of the best rule will take."""
        if self._clock.minutes is None:
            return -math.inf
        return sum(self._seeds * _seconds(tried) for tried in self._must_be_repeated())

    def _wait(self, stopping: Stopping) -> None:
        time.sleep(_POLL)
        if stopping.asked:
            raise Interrupted

    # Repeats

    def _must_be_repeated(self) -> list[Tried]:
        """The best of all and the best rule's, whatever the time; once, if they are one."""
        tried = [t for t in self.search.tried() if t.epochs]
        best = sorted(tried, key=lambda t: -t.auc)[:1]
        best += sorted((t for t in tried if t.rules), key=lambda t: -t.auc)[:1]
        return list({t.number: t for t in best}.values())

    def _to_repeat(self) -> list[Tried]:
        """Those, then the other finalists, and then what the other rules predict."""
        tried = sorted((t for t in self.search.tried() if t.epochs), key=lambda t: -t.auc)
        rules = [t for t in tried if t.rules]
        in_turn = self._must_be_repeated() + tried[:FINALISTS] + rules
        return list({t.number: t for t in in_turn}.values())

    def _configs(self, tried: Tried) -> list[TrainConfig]:
        """Its trainings from other seeds than the search's."""
        first = self._config.seed + 1
        return [
            self._config.train_config(
                tried.point, epochs=tried.best_epoch, seed=(first + k) % (LARGEST_SEED + 1)
            )
            for k in range(self._seeds)
        ]

    def repeat_all(self, stopping: Stopping) -> None:
        """Train the best, and what the rules predict, from other seeds."""
        must = {tried.number for tried in self._must_be_repeated()}
        if not must:
            reasons = {tried.why for tried in self.search.tried()}
            raise UserError(
                "a trial must end with numbers. Received: all of them diverged, the last one "
                f"with: {max(filter(None, reasons), default='nothing')}"
            )
        left = [(tried, config) for tried in self._to_repeat() for config in self._configs(tried)]
        total = len(left)
        while left:
            waiting = []
            for tried, config in left:
                if self._repeats.read(config) is not None:
                    continue
                if tried.number not in must and self._clock.left < _seconds(tried):
                    continue
                title = f"repeat {total - len(left) + 1}/{total}"
                with self._bar(title, config.epochs) as advance:
                    done = self._repeats.train(config, stopping, advance)
                if done is None:
                    waiting.append((tried, config))
            if len(waiting) == len(left):
                self._wait(stopping)
            left = waiting

    # The end

    def how_it_stands(self) -> str:
        """A sentence for a tune that was stopped."""
        again = f"{how_to_go_on(self._out, self._data.path)} {self._how_much()}"
        ended = len(self.search.tried())
        return f"interrupted; {ended} trials that have ended are kept. Go on with: {again}"

    def _how_much(self) -> str:
        """The options that are no part of the tune."""
        options = f"--trials {self._trials} --seeds {self._seeds}"
        minutes = self._clock.minutes
        return options if minutes is None else f"{options} --budget {minutes:g}"

    def write(self) -> None:
        """The configuration that was found, and the result."""
        tried = self.search.tried()
        repeated = {t.number: self._repeats_of(t) for t in self._to_repeat()}
        # Held against each other by as many seeds, of which none has diverged.
        means = {
            number: mean_and_deviation(aucs)[0] or 0.0
            for number, repeats in repeated.items()
            if len(aucs := _aucs(repeats)) == self._seeds
        }
        # What diverged when it was trained again comes after what was not trained again.
        means.update({n: -1.0 for n, repeats in repeated.items() if _diverged(repeats)})
        winner = max(self._to_repeat(), key=lambda t: (means.get(t.number, 0.0), t.auc))
        table = [self._row(_BEST, winner, repeated, winner)]
        for one in sorted((t for t in tried if t.rules), key=lambda t: -t.auc):
            table.append(self._row(", ".join(one.rules), one, repeated, winner))
        shown = {row["trial"] for row in table}
        finalists = [t for t in self._to_repeat() if t.number not in shown]
        for place, one in enumerate(sorted(finalists, key=lambda t: -t.auc), 1):
            table.insert(place, self._row(f"trial {one.number + 1}", one, repeated, winner))
        done = {rule for t in tried for rule in t.rules}
        found = self._config.train_config(winner.point, epochs=winner.best_epoch)
        surroundings = environment(("optuna",))
        result = {
            "format": FORMAT_VERSION,
            "command": self._command(),
            "data": str(self._data.path.resolve()),
            "rows": self.rows.rows,
            "config": self._config.to_dict(),
            "winner": winner.number,
            "table": table,
            "not_tried": [rule for rule in self._config.rules if rule not in done],
            "importance": self.search.importance(),
            "trials_measured": sum(bool(t.epochs) for t in tried),
            "seconds": sum(t.seconds for t in tried)
            + sum(e.seconds for repeats in repeated.values() for r in repeats for e in r.epochs),
            "trials": [t.to_dict() for t in tried],
            **surroundings,
        }
        with self._claims.alone():
            write_json(self._out / TUNED, found.to_dict())
            write_json(self._out / RESULT, result)

    def _repeats_of(self, tried: Tried) -> list[Repeat]:
        found = (self._repeats.read(config) for config in self._configs(tried))
        return [repeat for repeat in found if repeat is not None]

    def _row(
        self, what: str, tried: Tried, repeated: dict[int, list[Repeat]], winner: Tried
    ) -> dict[str, Any]:
        """A line of the table; differences are of the same seeds."""
        own = repeated.get(tried.number, [])
        aucs = _aucs(own)
        mean, deviation = mean_and_deviation(aucs)
        by_seed = {r.seed: r.auc for r in repeated[winner.number]}
        pairs = ((r.auc, by_seed.get(r.seed)) for r in own)
        differences = [a - b for a, b in pairs if a is not None and b is not None]
        difference, its_deviation = mean_and_deviation(differences)
        diverged = _diverged(own)
        if tried.number == winner.number or diverged:
            difference = its_deviation = None
        if diverged:
            mean = deviation = None
        return {
            "what": what,
            "trial": tried.number,
            "rules": list(tried.rules),
            "mean": mean,
            "deviation": deviation,
            "aucs": aucs,
            "seeds": [repeat.seed for repeat in own],
            "diverged": diverged,
            "difference": difference,
            "difference_deviation": its_deviation,
            "search_auc": tried.auc if tried.epochs else None,
            "epochs": tried.best_epoch,
            **tried.point.to_dict(),
        }

    def _command(self) -> str | None:
        """What does the same tune again, if options can say it."""
        command = command_of(self._config, self._out, self._data.path)
        return None if command is None else f"{command} {self._how_much()}"

    @contextmanager
    def _bar(self, title: str, epochs: int | None = None) -> Iterator[Any]:
        """A bar of a training's updates, with the time left; yields what advances it."""
        total = self._updates * (self._config.epochs if epochs is None else epochs)
        shown = self._show and os.isatty(2)  # in a log there is the line of each trial
        with progress_bar(title, total, " batches", show=shown) as bar:
            bar.leave = False  # its line is the trial's own

            def advance() -> None:
                if self._clock.minutes is not None:
                    left = max(self._clock.left, 0) / 60
                    bar.set_postfix_str(f"{left:.1f} min left", refresh=False)
                bar.update()

            yield advance


def _seconds(tried: Tried) -> float:
    """How long a trial took up to its best epoch, as a repeat of it will."""
    epochs: list[Epoch] = list(tried.epochs[: tried.best_epoch])
    return sum(epoch.seconds for epoch in epochs)


def _diverged(repeats: list[Repeat]) -> int:
    """How many of them diverged."""
    return sum(repeat.auc is None for repeat in repeats)


def _aucs(repeats: list[Repeat]) -> list[float]:
    return [repeat.auc for repeat in repeats if repeat.auc is not None]
