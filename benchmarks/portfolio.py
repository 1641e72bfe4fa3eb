"""How the settings that `tune` begins with were chosen: `study/portfolio.json` of the package.

On each of some data sets values are searched at a large batch, the best of each are tried on all
others, and those are chosen, one after the other, that lower the loss in AUC to the best known
value most, on average over the data sets:

    python benchmarks/portfolio.py logs FOLDER       # synthetic logs of five shapes, to prepare
    python benchmarks/portfolio.py measure RECORD NAME DATA --batch-size 4096   # each data set:
    python benchmarks/portfolio.py measure …         # search; and again: those of the others
    python benchmarks/portfolio.py measure … --scaled   # the others' best, scaled to this data set
    python benchmarks/portfolio.py choose RECORD     # the leave-one-out table, and the portfolio
    python benchmarks/portfolio.py transfer RECORD   # what is lost with values as found, and scaled
    python benchmarks/portfolio.py smaller DATA --batch-size 512   # the portfolio at a small batch

`benchmarks/records/portfolio.json` is the record that we chose by. "Leave one out": chosen by the
other data sets, without any point that was found on this one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd

from merlin_cowclip.plugins import Hyperparameters
from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import NotFiniteError
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.tune import trial_epochs
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.stopping import Stopping

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "few_fields": {"rows": 550_000, "sizes": [20_000] * 3, "tail": 1.1, "clicks": 0.5},
    "many_fields": {"rows": 170_000, "sizes": [(20, 3_000)] * 40, "tail": 1.0, "clicks": 0.2},
    "rare_clicks": {"rows": 600_000, "sizes": [(100, 10_000)] * 12, "tail": 1.2, "clicks": 0.02},
    "long_tail": {"rows": 450_000, "sizes": [50_000] * 8, "tail": 0.8, "clicks": 0.3},
    "dense_ids": {"rows": 800_000, "sizes": [200] * 8, "tail": 0.5, "clicks": 0.4},
}
"""Ids of each field, or between which numbers they are drawn."""
SCALED: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "as found": {},
    "λ by rows": {"l2": ("rows", 1.0)},
    "λ by steps": {"l2": ("steps", 1.0)},
    "η by steps": {"dense_lr": ("steps", 1.0), "embedding_lr": ("steps", 1.0)},
    "η by √batch size": {"dense_lr": ("batch_size", -0.5), "embedding_lr": ("batch_size", -0.5)},
}
"""How values may be scaled from one data set to another: value → of which ratio what power, of what
a data set has to what the other one has. Rows and steps are those of an epoch."""
WORST = 0.03  # a loss in AUC that is as bad as any greater one
SIZE = 7  # of the portfolio

Point = dict[str, Any]
"""`hyperparameters`, `update` and `epochs` of a training, fit for JSON."""


def log(rows: int, sizes: Sequence[Any], tail: float, clicks: float, seed: int) -> pd.DataFrame:
    """Fields of power-law ids, with effects of single ids and of pairs."""
    random = np.random.default_rng(seed)
    columns, single, total, own = {}, np.zeros(rows), np.zeros((rows, 2)), np.zeros(rows)
    for number, size in enumerate(sizes):
        if not isinstance(size, int):
            size = int(np.exp(random.uniform(*np.log(size))))
        share = (np.arange(size) + 3.0) ** -tail
        share /= share.sum()
        ids = np.searchsorted(np.cumsum(share), random.random(rows)).clip(0, size - 1)
        single += random.normal(size=size)[ids]
        vectors = random.normal(size=(size, 2))
        hidden = (vectors - share @ vectors)[ids]
        columns[f"f{number}"] = ids
        total += hidden
        own += (hidden**2).sum(1)
    pairs = ((total**2).sum(1) - own) / 2
    effect = single / single.std() + 0.7 * pairs / pairs.std()
    effect = effect / effect.std() * 1.3
    low, high = -20.0, 20.0
    for _ in range(50):
        bias = (low + high) / 2
        too_few = (1 / (1 + np.exp(-(effect + bias)))).mean() < clicks
        low, high = (bias, high) if too_few else (low, bias)
    clicked = random.random(rows) < 1 / (1 + np.exp(-(effect + bias)))
    return pd.DataFrame({"y": clicked.astype(int), **columns})


def write_logs(folder: Path) -> None:
    """A parquet file and a TOML spec of each shape."""
    folder.mkdir(parents=True)
    for seed, (name, shape) in enumerate(SHAPES.items(), 1):
        frame = log(**shape, seed=seed)
        frame.to_parquet(folder / f"{name}.parquet", index=False)
        fields = json.dumps(list(frame.columns[1:]))
        (folder / f"{name}.toml").write_text(
            f'name = "{name}"\nformat = "parquet"\nlabel = "y"\ncategorical = {fields}\n'
            '[split]\nkind = "random"\ntest = 0.1\n'
        )


def measure(record: dict[str, Any], name: str, data: Path, options: argparse.Namespace) -> None:
    """Try the record's points on a data set, then search, and add the best."""
    config = TuneConfig(options.batch_size, {"mlp": (128, 128, 128)}, epochs=options.epochs)
    of_data = record.setdefault(name, {"batch_size": config.batch_size, "tried": []})
    of_data["rows"] = PreparedData.open(data).rows["train"]
    tried = of_data["tried"]
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=7, multivariate=True)
    )
    with Stopping() as stopping:
        opened = PreparedData.open(data)

        def run(trained: TrainConfig, found_on: str) -> float:
            aucs: list[float] = []
            values = trained.hyperparameters.to_dict()
            point = {"hyperparameters": values, "update": trained.update, "epochs": trained.epochs}
            try:
                for epoch in trial_epochs(opened, trained, stopping):
                    aucs.append(epoch["auc"])
                    if aucs[-1] < max(aucs) - 0.002:
                        break
            except NotFiniteError:
                pass
            if not options.scaled:
                tried.append({"point": point, "found_on": found_on, "aucs": aucs})
            print(name, found_on, f"{max(aucs, default=0):.4f}", point, flush=True)
            return max(aucs, default=0.5)

        if options.scaled:
            of_data["scaled"] = {
                what: run(adapted(config, point), what) for what, point in scaled(record, name)
            }
            return
        for found_on, best in candidates(record):
            trained = adapted(config, best)
            values = trained.hyperparameters.to_dict()
            if values not in [one["point"]["hyperparameters"] for one in tried]:
                run(trained, found_on)
        missing = options.trials - sum(one["found_on"] == name for one in tried)
        study.optimize(
            lambda trial: run(config.train_config(config.suggest(trial)), name), max(missing, 0)
        )


def adapted(config: TuneConfig, point: Point) -> TrainConfig:
    """A point's training at the batch size of `config`, with λ as it was found."""
    return config.adapted({**point, "rows": 1})


def candidates(record: Mapping[str, Any]) -> list[tuple[str, Point]]:
    """The best two points that were found on each data set."""
    found = []
    for name, of_data in record.items():
        own = [one for one in of_data["tried"] if one["found_on"] == name and one["aucs"]]
        best = sorted(own, key=lambda one: -max(one["aucs"]))[:2]
        found += [(name, one["point"]) for one in best]
    return found


def scaled(record: Mapping[str, Any], name: str) -> Iterator[tuple[str, Point]]:
    """The best point of each other data set whose rows are known, in each way of `SCALED`."""
    mine = _quantities(record[name])
    for found_on, point in candidates(record)[::2]:
        if found_on == name or "rows" not in record[found_on]:
            continue
        its, hp = _quantities(record[found_on]), point["hyperparameters"]
        for how, powers in SCALED.items():
            values = {
                value: hp[value] * (its[of] / mine[of]) ** power
                for value, (of, power) in powers.items()
            }
            yield f"{found_on}, {how}", {**point, "hyperparameters": {**hp, **values}}


def _quantities(of_data: Mapping[str, Any]) -> dict[str, float]:
    rows, batch_size = of_data["rows"], of_data["batch_size"]
    return {"rows": rows, "batch_size": batch_size, "steps": rows / batch_size}


def transfer(record: Mapping[str, Any]) -> str:
    """Mean loss of the best point of each data set on the others, as it was found and scaled."""
    lost: dict[str, list[float]] = {how: [] for how in SCALED}
    for of_data in record.values():
        aucs = of_data.get("scaled", {})
        best = max(_best_known(of_data), *aucs.values()) if aucs else 0.0
        for what, auc in aucs.items():
            lost[what.partition(", ")[2]].append(100 * min(best - auc, WORST))
    lines = [(how, str(len(of)), f"{np.mean(of):.2f}") for how, of in lost.items()]
    return format_table(("values", "pairs of data", "mean loss of AUC, %"), lines)


def _best_known(of_data: Mapping[str, Any]) -> float:
    return max(max(one["aucs"], default=0) for one in of_data["tried"])


def losses(record: Mapping[str, Any]) -> tuple[list[tuple[str, Point]], np.ndarray]:
    """The candidates, and what each loses to the best known AUC of each data set: data × points."""
    points = candidates(record)
    loss = np.full((len(record), len(points)), WORST)
    for row, of_data in zip(loss, record.values(), strict=True):
        best = _best_known(of_data)
        known = {json.dumps(_values(one["point"])): one for one in of_data["tried"]}
        for column, (_, point) in enumerate(points):
            one = known.get(json.dumps(_values(point)))
            if one is not None and one["aucs"]:
                row[column] = min(best - max(one["aucs"]), WORST)
    return points, loss


def _values(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point without its batch size and epochs."""
    own = {k: v for k, v in point["hyperparameters"].items() if k != "batch_size"}
    return {**own, "update": point["update"]}


def choose(loss: np.ndarray, allowed: np.ndarray) -> list[int]:
    """Numbers of points: each lowers the mean of the least losses so far most."""
    chosen: list[int] = []
    least = np.full(len(loss), WORST)
    for _ in range(min(SIZE, allowed.sum())):
        means = np.minimum(least[:, None], loss).mean(axis=0)
        means[~allowed] = np.inf
        means[chosen] = np.inf
        chosen.append(int(means.argmin()))
        least = np.minimum(least, loss[:, chosen[-1]])
    return chosen


def leave_one_out(record: Mapping[str, Any]) -> str:
    """What is lost on each data set after 1, 3 and all points chosen by the others."""
    points, loss = losses(record)
    found_on = np.array([name for name, _ in points])
    lines = []
    for number, (name, of_data) in enumerate(record.items()):
        best = _best_known(of_data)
        chosen = choose(np.delete(loss, number, axis=0), found_on != name)
        after = [best - loss[number, chosen[:k]].min() for k in (1, 3, SIZE)]
        lines.append((name, *(f"{100 * auc:.2f}" for auc in (*after, best))))
    return format_table(("data", "after 1", "after 3", f"after {SIZE}", "best known"), lines)


def smaller(data: PreparedData, batch_size: int, epochs: int) -> None:
    """Try the portfolio at a small batch: as found, and scaled by √ without λ and with it.

    λ times the training rows is constant in all three.
    """
    small = TuneConfig(batch_size, {"mlp": (128, 128, 128)}, epochs=epochs, rows=data.rows["train"])
    large = TuneConfig(data.rows["train"] // 133, small.network, epochs=epochs, rows=small.rows)
    with Stopping() as stopping:
        pairs = zip(small.portfolio, large.portfolio, strict=True)
        for number, (both, found) in enumerate(pairs, 1):
            as_found = dataclasses.replace(
                both, **{name: getattr(found, name) for name in ("dense_lr", "embedding_lr", "l2")}
            )
            rates = dataclasses.replace(both, l2=found.l2)
            for what, one in {"as found": as_found, "η": rates, "η and λ": both}.items():
                try:
                    aucs = [100 * epoch["auc"] for epoch in trial_epochs(data, one, stopping)]
                except NotFiniteError:
                    aucs = []
                print(number, what, *(f"{auc:.2f}" for auc in aucs), flush=True)


def main() -> None:
    """One of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("logs").add_argument("folder", type=Path)
    one = commands.add_parser("measure")
    one.add_argument("record", type=Path)
    one.add_argument("name")
    one.add_argument("data", type=Path)
    one.add_argument("--batch-size", type=int, required=True)
    one.add_argument("--epochs", type=int, default=6)
    one.add_argument("--trials", type=int, default=24)
    one.add_argument("--scaled", action="store_true")
    commands.add_parser("transfer").add_argument("record", type=Path)
    chosen = commands.add_parser("choose")
    chosen.add_argument("record", type=Path)
    chosen.add_argument("--without", help="print a portfolio chosen without this data set alone")
    tried = commands.add_parser("smaller")
    tried.add_argument("data", type=Path)
    tried.add_argument("--batch-size", type=int, default=512)
    tried.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if options.command == "logs":
        write_logs(options.folder)
        return
    if options.command == "smaller":
        smaller(PreparedData.open(options.data), options.batch_size, options.epochs)
        return
    record = json.loads(options.record.read_text()) if options.record.exists() else {}
    if options.command == "measure":
        measure(record, options.name, options.data, options)
        options.record.write_text(json.dumps(record, indent=1) + "\n")
        return
    if options.command == "transfer":
        print(transfer(record))
        return
    points, loss = losses(record)
    allowed = np.array([name != options.without for name, _ in points])
    kept = [name != options.without for name in record]
    if options.without is None:
        print(leave_one_out(record))
    best = choose(loss[kept], allowed)
    print(json.dumps([described(record, *points[number]) for number in best], indent=1))


def described(record: Mapping[str, Any], found_on: str, point: Point) -> dict[str, Any]:
    """A point as the package has it: two digits are enough."""
    own, defaults = point["hyperparameters"], Hyperparameters(clip=None).to_dict()
    values = {
        name: float(f"{value:.2g}") if isinstance(value, float) else value
        for name, value in own.items()
        if name != "batch_size" and value != defaults[name]
    }
    first = {"found_on": found_on, "rows": record[found_on]["rows"]}
    return {**first, **point, "hyperparameters": {"clip": None, **values}}


if __name__ == "__main__":
    main()
