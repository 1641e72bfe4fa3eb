"""Which cheap look at a trial of `tune` tells best what it comes to: its first epochs, or a share?

Each trial that a tune has trained to its end is trained again on a share of the training rows, for
as many epochs, and measured by the same held-out rows; its best epoch counts. As many rows go by in
its first epochs on all rows, whose AUC the tune has noted. Either look ranks the trials, and is
held against how they ended: by Spearman's correlation, and by whether the best one is in the third
that looks best, or what AUC is lost if it is not. "Batch too": the share's batch is smaller by the
same share, so that an epoch has as many updates as on all rows, with the values as they are.

    python benchmarks/screening.py TUNE [--shares 1/6 1/3] [--draws 0 1] [--batch-too] [--given-up]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import spearmanr

from merlin_cowclip.workflows import PreparedData
from merlin_cowclip.workflows.data.prepared_data import RECORD, write_record
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.held_out import hold_out
from merlin_cowclip.workflows.study.search_space import Point
from merlin_cowclip.workflows.study.trials import DivergedError, epochs_of
from merlin_cowclip.workflows.study.tuned import RESULT, ROWS, Tuned
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.stopping import Stopping

NONE = 0.5  # the AUC of a trial that diverged in its first epoch

Aucs = Mapping[int, float]  # by the number of a trial


class Training(NamedTuple):
    """The AUC on the held-out rows after each epoch, and how many seconds of CPU all took."""

    aucs: Sequence[float]
    seconds: float


class Trainings:
    """Each made once: they stay in a file, if one is given."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._made: dict[str, Any] = {}
        if file is not None and file.exists():
            self._made = json.loads(file.read_text(encoding="utf-8"))

    def get(self, name: str, rows: PreparedData, config: TrainConfig) -> Training:
        """The training of that name, made now if it is not there."""
        if name not in self._made:
            self._made[name] = _train(rows, config)._asdict()
            if self._file is not None:
                self._file.write_text(json.dumps(self._made), encoding="utf-8")
        return Training(**self._made[name])


def _train(rows: PreparedData, config: TrainConfig) -> Training:
    begun = time.process_time()
    aucs: list[float] = []
    try:
        with Stopping() as stopping:
            for epoch in epochs_of(rows, config, stopping):
                aucs.append(epoch.auc)
    except DivergedError:
        aucs = aucs or [NONE]
    return Training(aucs, time.process_time() - begun)


def share_of(rows: PreparedData, share: Fraction, draw: int, out: Path) -> PreparedData:
    """A prepared folder: a random share of the training part, and the same held-out rows."""
    drawn = hold_out(rows, float(share), draw, out, progress=False)
    record = {**drawn.record, "rows": {**rows.rows, "train": drawn.rows["test"]}}
    (out / RECORD).unlink()
    shutil.rmtree(out / "train")
    (out / "test").rename(out / "train")
    shutil.copytree(rows.path / "test", out / "test")
    write_record(out, record)
    return PreparedData.open(out)


def figures(look: Aucs, ends: Aucs) -> tuple[float, float]:
    """Spearman's correlation, and the AUC that is lost, %, by going on with the best third."""
    numbers = sorted(ends)
    correlation = spearmanr([look[n] for n in numbers], [ends[n] for n in numbers]).statistic
    third = sorted(numbers, key=lambda n: -look[n])[: len(numbers) // 3]
    return float(correlation), 100 * (max(ends.values()) - max(ends[n] for n in third))


def line(what: str, looks: Sequence[Aucs], ends: Aucs, seconds: Sequence[float] = ()) -> None:
    """Print a line of the table, the draws' figures beside each other."""
    correlations, losses = zip(*(figures(look, ends) for look in looks), strict=True)
    rho = ", ".join(f"{correlation:.2f}" for correlation in correlations)
    lost = ", ".join("none" if loss == 0 else f"{loss:.3f}" for loss in losses)
    took = f"{statistics.median(seconds):.0f}" if seconds else ""
    print(f"| {what} | {rho} | {lost} | {took} |", flush=True)


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tune", type=Path, metavar="TUNE", help="a tune's folder, which has ended")
    shares = [Fraction(1, 6), Fraction(1, 3)]
    parser.add_argument("--shares", type=Fraction, nargs="+", default=shares, help="(1/6 1/3)")
    parser.add_argument("--draws", type=int, nargs="+", default=[0], help="seeds of a share (0)")
    parser.add_argument("--batch-too", action="store_true", help="smaller batches as well")
    parser.add_argument("--given-up", action="store_true", help="train such trials to their end")
    parser.add_argument("--keep", type=Path, help="a JSON file of the trainings, to go on with")
    given = parser.parse_args()

    tuned = Tuned.open(given.tune)
    config = TuneConfig.from_dict(tuned.record["config"])
    rows, trainings = PreparedData.open(given.tune / ROWS), Trainings(given.keep)
    trials = {
        t["number"]: t for t in tuned.result["trials"] if given.given_up or _ended(t, config.epochs)
    }
    configs = {
        n: config.train_config(
            Point.from_dict({key: t[key] for key in ("hyperparameters", "update", "rates")})
        )
        for n, t in trials.items()
    }
    print(
        f"{given.tune / RESULT}: {len(trials)} trials, {config.epochs} epochs of "
        f"{rows.rows['train']:,} rows in batches of {config.batch_size:,}, one seed each; "
        f"{platform.machine()}, {os.cpu_count()} CPUs\n"
    )
    print("| look | Spearman's ρ | AUC lost by the best third, % | CPU s a trial |")
    print("|---|---:|---:|---:|", flush=True)
    noted = {n: [e["auc"] for e in t["epochs"]] or [NONE] for n, t in trials.items()}
    ends = {n: max(aucs) for n, aucs in noted.items()}
    for n, t in trials.items():
        if t["epochs"] and not _ended(t, config.epochs):
            ends[n] = max(trainings.get(f"all {n}", rows, configs[n]).aucs)
    with tempfile.TemporaryDirectory() as folder:
        for share in given.shares:
            first = share * config.epochs
            if first.denominator == 1:
                look = {n: aucs[: int(first)][-1] for n, aucs in noted.items()}
                line(f"all rows, {first} of {config.epochs} epochs", [look], ends)
            for batch_too in (False, True) if given.batch_too else (False,):
                looks, seconds = [], []
                for draw in given.draws:
                    out = Path(folder, f"{share}-{draw}-{batch_too}".replace("/", "-"))
                    part, look = share_of(rows, share, draw, out), {}
                    for n, its in configs.items():
                        name = f"{share} {draw} {n}"
                        if batch_too:
                            its = dataclasses.replace(its, batch_size=int(its.batch_size * share))
                            name += " batch too"
                        made = trainings.get(name, part, its)
                        look[n] = max(made.aucs)
                        seconds.append(made.seconds)
                    looks.append(look)
                what = f"{share} of the rows{', batch too' * batch_too}"
                line(what, looks, ends, seconds)


def _ended(trial: Mapping[str, Any], epochs: int) -> bool:
    """Whether it was trained to its end: by all epochs, or until it became no better."""
    stopped = trial["why"] is not None and trial["why"].startswith("no better for")
    return stopped or len(trial["epochs"]) == epochs


if __name__ == "__main__":
    main()
