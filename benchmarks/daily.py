"""AUC on the next day, in %, of a model that is trained every day: a table in docs/training.md.

A week of a synthetic log with a heavy tail. Effects drift, and each day a share of the rare ids is
replaced by new ones. From day 2 on, three ways:

- frozen: encoded with the vocabulary of day 1, a warm start on the day's rows
- growing: the same with --grow, so that the tables get rows for new ids
- anew: all days so far prepared again, and a new run on them

    python benchmarks/daily.py --seeds 1,2,3
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from warm_start import HEAVY, SQRT, heavy

from merlin_cowclip.workflows import DatasetSpec, Split, TrainConfig, evaluate_logs, prepare, train
from merlin_cowclip.workflows.data.prepare.fit import Encoding

DAYS = 7
WAYS = ("frozen", "growing", "anew")


def measure(seed: int, rows: int, new: float, out: Path) -> np.ndarray:
    """AUC on the next day, (ways, days - 1), after each day but the last."""
    sizes = (3 * rows, *[rows] * (DAYS - 1))
    logs = []
    for number, day in enumerate(heavy(seed, 0.1, new, sizes), 1):
        logs.append(out / f"{number}.parquet")
        pq.write_table(day, logs[-1])
    split = Split(test=0, valid=0)
    spec = DatasetSpec("log", "y", day.column_names[1:], format="parquet", split=split)
    config = TrainConfig(**SQRT, **HEAVY, mlp=(64, 64), seed=seed)
    first = prepare(spec, logs[:1], out / "1", progress=False)
    begin = train(first, config, out / "run1", progress=False)
    found = np.full((len(WAYS), DAYS - 1), evaluate_logs(begin, logs[1], progress=False)[0].auc)
    for number, way in enumerate(WAYS):
        data, run = first, begin
        for day in range(1, DAYS - 1):
            home, options = out / f"{way}{day}", {"progress": False}
            if way == "anew":
                data = prepare(spec, logs[: day + 1], home, **options)
                run = train(data, config, out / f"run-{way}{day}", **options)
            else:
                like = Encoding(spec, data.record["ranges"], data.path)
                grow = way == "growing"
                data = prepare(spec, [logs[day]], home, like=like, grow=grow, **options)
                warm, start = run.warm_start_config(), run.path
                run = train(data, warm, out / f"run-{way}{day}", warm_start=start, **options)
            found[number, day] = evaluate_logs(run, logs[day + 1], progress=False)[0].auc
    return 100 * found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="1,2,3", help="of logs and weights, two or more (1,2,3)")
    parser.add_argument("--rows", type=int, default=60_000, help="a day; three times in the first")
    parser.add_argument("--new", type=float, default=0.2, help="share of rare ids replaced a day")
    arguments = parser.parse_args()
    found = []
    for seed in map(int, arguments.seeds.split(",")):
        with tempfile.TemporaryDirectory() as out:
            found.append(measure(seed, arguments.rows, arguments.new, Path(out)))
    mean, deviation = np.mean(found, 0), np.std(found, 0, ddof=1)
    days = [f"day {day}" for day in range(2, DAYS + 1)]
    print(f"| AUC, % | {' | '.join(days)} |\n|---|{'---:|' * len(days)}")
    for way, row, spread in zip(WAYS, mean, deviation, strict=True):
        cells = [f"{auc:.2f} ± {sd:.2f}" for auc, sd in zip(row, spread, strict=True)]
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
