"""AUC on day 3, in %, of warm starts on day 2: a table in docs/training.md.

The logs are like the demo's and `heavy_tailed_log.py`'s: from day to day effects drift and ids are
replaced. Each seed draws a log and initial weights. In brackets: the gain over the run of day 1.

    python benchmarks/warm_start.py --seeds 1,2,3
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from heavy_tailed_log import BIAS, FEW, FREQUENT, MANY, PAIRS, RARE, STRONG, WEAK

from merlin_cowclip.workflows import DatasetSpec, Split, TrainConfig, prepare, train
from merlin_cowclip.workflows.data.prepare.fit import Encoding
from merlin_cowclip.workflows.data.synthetic import _LOGS, _sigmoid, _World

ROWS = (240_000, 60_000, 60_000)
FALL = {"name": "linear", "to": 0.0}
SQRT = {"rule": "sqrt", "base_batch_size": 32, "dense_schedule": FALL, "embedding_schedule": FALL}
DEMO = {"dense_lr": 1.8e-4, "embedding_lr": 3.5e-4, "l2": 1.8e-4, "epochs": 5}
HEAVY = {"dense_lr": 3e-4, "embedding_lr": 1e-3, "l2": 1e-5, "epochs": 2, "embedding_dim": 4}
HEADER = ("log", "unknown ids, %", "run of day 1", "own rates", "default", "new run, days 1-2")


def drifted(effects: np.ndarray, share: float, random: np.random.Generator) -> np.ndarray:
    """Effects of the next day, of the same mean size: `share`² of their variance is new."""
    noise = random.normal(size=effects.shape) * np.abs(effects)
    return np.sqrt(1 - share**2) * effects + share * noise


def renamed(ids: np.ndarray, share: float, day: int, random: np.random.Generator) -> np.ndarray:
    """Texts of ids, a share of which is replaced by new ones."""
    return np.where(random.random(len(ids)) < share, [f"{day}/{text}" for text in ids], ids)


def demo(seed: int, drift: float, new: float) -> Iterator[pa.Table]:
    """The days of a log of `write_synthetic`, in Criteo's format."""
    world, random = _World(_LOGS["criteo"], seed, 20_000), np.random.default_rng([seed, 4])
    for day, rows in enumerate(ROWS):
        columns, effects = world.draw(rows, random)
        clicked = _sigmoid(world.factor * world.effect(effects) + world.intercept)
        yield pa.table({"y": (random.random(rows) < clicked).astype(np.int64), **columns})
        for field, (texts, shares, *all_effects) in enumerate(world.planted):
            ids = renamed(np.array(texts, object), new * (len(texts) > FEW), day, random)
            moved = (e if e is None else drifted(e, drift, random) for e in all_effects)
            world.planted[field] = (pa.array(ids), shares, *moved)


def heavy(seed: int, drift: float, new: float, sizes: Sequence[int] = ROWS) -> Iterator[pa.Table]:
    """The days of a log with a heavy tail; effects of rare ids are twice `heavy_tailed_log`'s."""
    random, share = np.random.default_rng(seed), 1 / np.arange(1, FEW + 1) ** 0.8
    strong = random.normal(0, STRONG, (len(FREQUENT), FEW))
    hidden = random.normal(0, 1, (len(FREQUENT), FEW, 2))
    weak = random.normal(0, 2 * WEAK, (len(RARE), MANY))
    texts = [np.arange(MANY).astype(str).astype(object) for _ in RARE]
    for day, rows in enumerate(sizes):
        logit, columns, total = np.full(rows, BIAS), {}, np.zeros((rows, 2))
        for field, single, vectors in zip(FREQUENT, strong, hidden, strict=True):
            ids = columns[field] = random.choice(FEW, rows, p=share / share.sum())
            logit += single[ids] + PAIRS * STRONG * (vectors[ids] * total).sum(1) / np.sqrt(2)
            total += vectors[ids]
        for number, field in enumerate(RARE):
            ids = np.floor(MANY ** random.random(rows)).astype(np.int64) - 1
            columns[field] = texts[number][ids]
            logit += weak[number][ids]
            texts[number] = renamed(texts[number], new, day, random)
        yield pa.table({"y": (random.random(rows) < _sigmoid(logit)).astype(np.int64), **columns})
        strong, hidden, weak = (drifted(e, drift, random) for e in (strong, hidden, weak))


def measure(days: Iterator[pa.Table], values: dict[str, Any], seed: int, out: Path) -> list[float]:
    """In %: unknown ids of day 2, and the AUC on day 3 of four runs."""
    for number, day in enumerate(days, 1):
        pq.write_table(day, out / f"{number}.parquet")
    *logs, test = (out / f"{number}.parquet" for number in (1, 2, 3))
    numbers = [name for name in day.column_names if name[0] == "I"]
    ids = [name for name in day.column_names[1:] if name not in numbers]
    split = Split(valid=0, test=(str(test),))
    spec = DatasetSpec("log", "y", ids, numbers, format="parquet", split=split)
    first = prepare(spec, logs[:1], out / "first", progress=False)
    like = Encoding(first.spec, first.record["ranges"], first.path)
    second = prepare(spec, logs[1:], out / "second", like=like, progress=False)
    both = prepare(spec, logs, out / "both", progress=False)
    config = TrainConfig(**SQRT, **values, mlp=(64, 64), seed=seed)
    run = train(first, config, out / "run", progress=False)
    warm = {"own": dataclasses.replace(config, epochs=1), "default": run.warm_start_config()}
    runs = [train(second, c, out / n, warm_start=run.path, progress=False) for n, c in warm.items()]
    runs = [run, *runs, train(both, config, out / "new", progress=False)]
    found = [second.report["fields"][name] for name in ids]
    unknown, all_ids = (sum(f[key] for f in found) for key in ("below_threshold", "occurrences"))
    return [100 * unknown / all_ids, *(100 * one.result["auc"] for one in runs)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="1,2,3", help="of logs and weights, two or more (1,2,3)")
    seeds = [int(seed) for seed in parser.parse_args().seeds.split(",")]
    print(f"| {' | '.join(HEADER)} |\n|---|{'---:|' * (len(HEADER) - 1)}")
    for name, log, values, drift, new in (
        ("demo", demo, DEMO, 0.2, 0.05),
        ("demo, strong drift", demo, DEMO, 0.5, 0.05),
        ("heavy tail", heavy, HEAVY, 0.1, 0.1),
        ("heavy tail, many new ids", heavy, HEAVY, 0.1, 0.4),
    ):
        found = []
        for seed in seeds:
            with tempfile.TemporaryDirectory() as out:
                found.append(measure(log(seed, drift, new), values, seed, Path(out)))
            print(name, seed, np.round(found[-1], 2), file=sys.stderr, flush=True)
        unknown, first, *aucs = np.transpose(found)
        cells = [f"{unknown.mean():.0f}", f"{first.mean():.2f} ± {first.std(ddof=1):.2f}"]
        gains = [(auc.mean(), (auc - first).mean(), (auc - first).std(ddof=1)) for auc in aucs]
        cells += [f"{auc:.2f} ({gain:+.2f} ± {sd:.2f})" for auc, gain, sd in gains]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
