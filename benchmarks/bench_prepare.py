"""From raw text to training parquet: CPU seconds and peak memory, beside pandas and Polars.

Synthetic Criteo logs, prepared (1) by pandas as the published CowClip code does it: a LabelEncoder
per field over all rows, MinMaxScaler, split, parquet; (2) the same by Polars (`pip install polars`;
left out without it), ids ranked by their count; (3) by `merlin-cowclip prepare` with --memory 1GB.
Each is a process of its own. CPU seconds are of all its threads, and include the start of Python.
Its peak is the resident memory that the kernel reports.

Then rows from 1M to 5M: CPU time per row and the peak should not grow. (`--large 20_000_000` takes
15 GB of disk.)
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from record import save_record

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows.data.synthetic import write_synthetic

CARDINALITY = 400_000

PANDAS = """
import sys
import numpy as np, pandas as pd
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import LabelEncoder, MinMaxScaler

log, out = sys.argv[1:]
dense, sparse = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
data = pd.read_csv(log, sep="\\t", names=["label", *dense, *sparse])
data[sparse] = data[sparse].fillna("-1")
data[dense] = data[dense].fillna(0)
for field in sparse:
    data[field] = LabelEncoder().fit_transform(data[field].astype(str))
data[dense] = MinMaxScaler(feature_range=(0, 1)).fit_transform(data[dense]).astype("float32")
train, test = train_test_split(data, test_size=0.1, random_state=0)
train.to_parquet(out + ".train.parquet", index=False)
test.to_parquet(out + ".test.parquet", index=False)
"""

POLARS = """
import sys
import polars as pl

log, out = sys.argv[1:]
dense, sparse = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
kinds = dict.fromkeys(dense, pl.Float64) | dict.fromkeys(sparse, pl.String)
schema = {"label": pl.Int64, **kinds}
data = pl.read_csv(log, separator="\\t", has_header=False, schema=schema).sample(
    fraction=1, shuffle=True, seed=0
)
cut = len(data) // 10
train, test = data[cut:], data[:cut]
low, high = train.select(pl.col(dense).fill_null(0).min()), train.select(pl.col(dense).max())
units = [
    ((pl.col(n).fill_null(0) - low[n][0]) / (high[n][0] - low[n][0])).clip(0, 1).cast(pl.Float32)
    for n in dense
]
train, test = train.with_columns(units), test.with_columns(units)
for field in sparse:
    ranked = train[field].drop_nulls().value_counts(sort=True)
    ids = ranked.select(field).with_row_index("id", offset=3)
    train, test = (
        part.join(ids, on=field, how="left", maintain_order="left").with_columns(
            pl.when(pl.col(field).is_null()).then(1).otherwise(pl.col("id").fill_null(2))
            .cast(pl.Int64).alias(field)
        ).drop("id")
        for part in (train, test)
    )
train.write_parquet(out + ".train.parquet")
test.write_parquet(out + ".test.parquet")
"""


@dataclass(frozen=True)
class Cost:
    """What one process took."""

    seconds: float
    cpu: float
    peak: float  # GB


def cost(command: list[str]) -> Cost:
    """Run a command; raises SystemExit if it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(errors.decode())
    seconds = time.perf_counter() - start
    return Cost(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="beside the others")
    parser.add_argument("--small", type=int, default=1_000_000, help="of the growth")
    parser.add_argument("--large", type=int, default=5_000_000, help="of the growth")
    parser.add_argument("--record", action="store_true", help="write benchmarks/records/")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as folder:
        home = Path(folder)

        def log(rows: int) -> str:
            path = home / f"{rows}.txt"
            if not path.exists():
                write_synthetic("criteo", path, rows=rows, seed=1, cardinality=CARDINALITY)
            return str(path)

        def prepare(rows: int) -> Cost:
            module = "merlin_cowclip.workflows.commands.main"
            command = [sys.executable, "-m", module, "prepare", "criteo", log(rows)]
            done = cost([*command, "--out", str(home / "out"), "--memory", "1GB"])
            subprocess.run(["rm", "-rf", str(home / "out")], check=True)
            return done

        load = os.getloadavg()[0]
        cores = len(os.sched_getaffinity(0))
        print(f"{cores} CPU cores, load {load:.1f}; synthetic Criteo logs, 26 + 13 fields")
        others = {"pandas, LabelEncoder, MinMaxScaler": PANDAS}
        if importlib.util.find_spec("polars"):
            others["Polars, joins"] = POLARS
        runs = [
            (
                arguments.rows,
                how,
                cost([sys.executable, "-c", script, log(arguments.rows), f"{home}/p"]),
            )
            for how, script in others.items()
        ]
        sizes = (arguments.rows, arguments.small, arguments.large)
        runs += [(rows, "prepare --memory 1GB", prepare(rows)) for rows in sizes]
        lines = [
            (
                f"{rows:,}",
                how,
                f"{c.seconds:.1f}",
                f"{c.cpu:.1f}",
                f"{c.cpu / rows * 1e6:.2f}",
                f"{c.peak:.2f}",
            )
            for rows, how, c in runs
        ]
        header = ("rows", "how", "seconds", "CPU seconds", "CPU µs per row", "peak GB")
        print(format_table(header, lines))
        if arguments.record:
            save_record([{"rows": rows, "how": how, **asdict(c)} for rows, how, c in runs])


if __name__ == "__main__":
    main()
