"""How `tune` should search after its first settings: a table in docs/internals/portfolio.md.

All searches begin with the portfolio, without what was found on the same data. Then each has the
same number of epochs for: TPE alone (what `tune` does); steps of λ and learning rates from the best
trial, then TPE; or TPE where a trial ends once its AUC is below the median of the trials of the
same length after the same epoch.

    python benchmarks/search_ablation.py log teacher.parquet      # clicks of a random network
    python benchmarks/search_ablation.py run RECORD NAME DATA     # each: mls, sports, demo, others
    python benchmarks/search_ablation.py table RECORD

The best trial on the validation part is trained from another seed; its test AUC counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows import PreparedData, train
from merlin_cowclip.workflows.errors import NotFiniteError
from merlin_cowclip.workflows.study import configuration
from merlin_cowclip.workflows.study.configuration import Params, TuneConfig
from merlin_cowclip.workflows.study.tune import trial_epochs
from merlin_cowclip.workflows.training.configuration import CheckpointConfig
from merlin_cowclip.workflows.training.stopping import Stopping

SEARCHES = ("TPE", "steps", "median")
SEEDS = (1, 2, 3)
OVERFIT = 0.005  # as of `tune`
PORTFOLIO = Path(configuration.__file__).with_name("portfolio.json")

Tried = tuple[Params, list[float]]  # parameters, and the AUC after each epoch


def log(rows: int, seed: int) -> pd.DataFrame:
    """Clicks by the logit of a random network of two layers, on ids of 12 fields."""
    random = np.random.default_rng(seed)
    sizes = np.exp(random.uniform(np.log(30), np.log(20_000), 12)).astype(int)
    columns, inputs = {}, []
    for field, size in enumerate(sizes):
        share = (np.arange(size) + 2.0) ** -1.05
        ids = columns[f"f{field}"] = random.choice(size, rows, p=share / share.sum())
        inputs.append(random.normal(size=(size, 4))[ids])
    hidden = np.concatenate(inputs, axis=1)
    for width in (32, 16):
        weights = random.normal(size=(hidden.shape[1], width)) / np.sqrt(hidden.shape[1])
        hidden = np.maximum(1.5 * hidden @ weights, 0)
    logit = hidden @ random.normal(size=16)
    logit = 1.3 * (logit - logit.mean()) / logit.std() - 1.5
    clicked = random.random(rows) < 1 / (1 + np.exp(-logit))
    return pd.DataFrame({"y": clicked.astype(int), **columns})


class Search:
    """Trials of one seed on prepared data."""

    def __init__(self, data: PreparedData, config: TuneConfig) -> None:
        self.data, self.config = data, config

    def train(self, params: Params, others: Sequence[Tried] = ()) -> list[float]:
        """The AUC after each epoch; with others, a trial below their median ends."""
        curve: list[float] = []
        same = [aucs for one, aucs in others if one["epochs"] == params["epochs"]]
        try:
            with Stopping() as stopping:
                for epoch in trial_epochs(self.data, self.config.train_config(params), stopping):
                    curve.append(epoch["auc"])
                    there = [aucs[len(curve) - 1] for aucs in same if len(aucs) >= len(curve)]
                    is_low = len(there) >= 3 and curve[-1] < statistics.median(there)
                    if is_low or curve[-1] < max(curve) - OVERFIT:
                        break
        except NotFiniteError:
            curve.append(0.0)
        return curve

    def after(self, first: Sequence[Tried], how: str, epochs: int) -> tuple[list[Tried], int]:
        """All trials of a search that begins with `first`, and the epochs that the others took."""
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=6, multivariate=True, group=True, seed=self.config.seed
        )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        tried: list[Tried] = []
        for params, curve in first:
            self._tell(study, params, curve)
            tried.append((params, curve))
        spent = 0
        while spent < epochs:
            best = max(tried, key=lambda one: max(one[1]))[0]
            known = [params for params, _ in tried]
            steps = self.config.steps_from(best) if how == "steps" else ()
            new = [params for params, _ in steps if params not in known]
            if new:
                study.enqueue_trial(new[0])
            trial = study.ask()
            params = self.config.suggest(trial)
            curve = self.train(params, tried if how == "median" else ())
            study.tell(trial, max(curve))
            tried.append((params, curve))
            spent += len(curve)
        return tried, spent

    def _tell(self, study: optuna.Study, params: Params, curve: Sequence[float]) -> None:
        study.enqueue_trial(params)
        trial = study.ask()
        self.config.suggest(trial)
        study.tell(trial, max(curve))

    def test_auc(self, tried: Sequence[Tried]) -> float:
        """Of the best trial, trained from another seed up to its best epoch."""
        params, curve = max(tried, key=lambda one: max(one[1]))
        config = self.config.train_config(params, curve.index(max(curve)) + 1)
        config = dataclasses.replace(config, seed=config.seed + 1000)
        with tempfile.TemporaryDirectory() as folder:
            checkpointing = CheckpointConfig(keep=1, saved_model=False)
            run = Path(folder) / "run"
            result = train(self.data, config, run, checkpointing=checkpointing, progress=False)
        auc: float = result.result["auc"]
        return auc


def run(record: Path, name: str, data: PreparedData, batch_size: int, epochs: int) -> None:
    """All searches on one data set; each seed is written as it ends."""
    rows = data.rows["train"]
    for seed in SEEDS:
        own = {"epochs": 4, "rows": rows, "seed": seed}
        config = TuneConfig(batch_size, {"mlp": (128, 128)}, **own)
        search = Search(data, config)
        queue = zip(config.queue, json.loads(PORTFOLIO.read_text(encoding="utf-8")), strict=True)
        others = [params for (params, _), found in queue if found["found_on"] != name]
        first = [(params, search.train(params)) for params in others]
        known: dict[str, float] = {}
        for how in SEARCHES:
            tried, spent = search.after(first, how, epochs)
            found: dict[str, Any] = {"data": name, "seed": seed, "search": how, "epochs": spent}
            found |= {"trials": len(tried), "valid_auc": max(max(curve) for _, curve in tried)}
            found |= {"portfolio": max(max(curve) for _, curve in first)}
            best = json.dumps(max(tried, key=lambda one: max(one[1])))
            if best not in known:
                known[best] = search.test_auc(tried)
            found["auc"] = known[best]
            print(found, flush=True)
            with record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


def table(record: Path) -> str:
    """Test AUC in %, mean ± deviation over the seeds of the search."""
    found = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines()]
    lines = []
    for name in dict.fromkeys(one["data"] for one in found):
        cells = []
        for how in SEARCHES:
            same = [one for one in found if (one["data"], one["search"]) == (name, how)]
            aucs = [100 * one["auc"] for one in same]
            trials = statistics.fmean(one["trials"] for one in same)
            spread = f" ± {statistics.stdev(aucs):.2f}" if aucs[1:] else ""
            cells.append(f"{statistics.fmean(aucs):.2f}{spread} ({trials:.0f})")
        lines.append((name, *cells))
    return format_table(("data", *(f"{how} (trials)" for how in SEARCHES)), lines)


def main() -> None:
    """One of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    written = commands.add_parser("log")
    written.add_argument("out", type=Path)
    written.add_argument("--rows", type=int, default=150_000)
    written.add_argument("--seed", type=int, default=1)
    one = commands.add_parser("run")
    one.add_argument("record", type=Path)
    one.add_argument("name")
    one.add_argument("data", type=Path)
    one.add_argument("--batch-size", type=int, default=1024)
    one.add_argument("--epochs", type=int, default=40)
    commands.add_parser("table").add_argument("record", type=Path)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if options.command == "log":
        frame = log(options.rows, options.seed)
        frame.to_parquet(options.out, index=False)
        fields = json.dumps(list(frame.columns[1:]))
        options.out.with_suffix(".toml").write_text(
            f'name = "teacher"\nformat = "parquet"\nlabel = "y"\ncategorical = {fields}\n'
        )
    elif options.command == "run":
        data = PreparedData.open(options.data)
        run(options.record, options.name, data, options.batch_size, options.epochs)
    else:
        print(table(options.record))


if __name__ == "__main__":
    main()
