"""From raw text to training parquet: rows per second and peak memory, beside pandas.

Synthetic Criteo logs, prepared (1) by pandas as the published CowClip code does it: a LabelEncoder
per field over all rows, MinMaxScaler, split, parquet; (2) by `merlin-cowclip prepare` with threads;
(3) with two Dask workers. Each is a process of its own. Its peak is the largest sum of the resident
memory of all its processes, sampled: Rss counts the pages that they share once in each, and the
mapped pages of files; Pss (proportional) counts them once.

Then time per row at 0.5M and at 5M rows, whose ratio says whether a larger log costs more per row.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

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


@dataclass(frozen=True)
class Cost:
    """What one process and its children took."""

    seconds: float
    rss: float  # GiB
    pss: float  # GiB


def cost(command: list[str]) -> Cost:
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak = [0, 0]
    root = psutil.Process(process.pid)
    while process.poll() is None:
        total = [0, 0]
        for one in [root, *_children(root)]:
            try:
                memory = one.memory_full_info()
            except psutil.Error:
                continue
            total = [total[0] + memory.rss, total[1] + getattr(memory, "pss", memory.rss)]
        peak = [max(a, b) for a, b in zip(peak, total, strict=True)]
        time.sleep(0.2)
    seconds = time.perf_counter() - start
    if process.returncode:
        sys.exit(process.stderr.read().decode())
    return Cost(seconds, peak[0] / 2**30, peak[1] / 2**30)


def _children(root: psutil.Process) -> list[psutil.Process]:
    try:
        return root.children(recursive=True)
    except psutil.Error:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000, help="beside pandas")
    parser.add_argument("--small", type=int, default=500_000, help="of the growth")
    parser.add_argument("--large", type=int, default=5_000_000, help="of the growth")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-prepare-") as folder:
        home = Path(folder)
        logs = {}
        for rows in sorted({arguments.rows, arguments.small, arguments.large}):
            logs[rows] = home / f"{rows}.txt"
            write_synthetic("criteo", logs[rows], rows=rows, seed=1, cardinality=CARDINALITY)
        ours = [sys.executable, "-m", "merlin_cowclip.workflows.commands.main", "prepare", "criteo"]

        def prepare(rows: int, *options: str) -> Cost:
            out = home / "out"
            done = cost([*ours, str(logs[rows]), "--out", str(out), *options])
            subprocess.run(["rm", "-rf", str(out)], check=True)
            return done

        size = logs[arguments.large].stat().st_size / 2**30
        load = os.getloadavg()[0]
        print(
            f"{os.cpu_count()} CPU cores, load {load:.1f}; synthetic Criteo logs, 26 + 13 fields; "
            f"{arguments.large:,} rows are {size:.2f} GiB of text"
        )
        pandas = cost([sys.executable, "-c", PANDAS, str(logs[arguments.rows]), str(home / "p")])
        runs = [
            (arguments.rows, "pandas, LabelEncoder, MinMaxScaler", pandas),
            (arguments.rows, "prepare", prepare(arguments.rows)),
            (arguments.rows, "prepare --workers 2", prepare(arguments.rows, "--workers", "2")),
            (arguments.small, "prepare", prepare(arguments.small)),
            (arguments.large, "prepare", prepare(arguments.large)),
            (arguments.large, "prepare --workers 2", prepare(arguments.large, "--workers", "2")),
        ]
        lines = [
            (
                f"{rows:,}",
                what,
                f"{c.seconds:.1f}",
                f"{rows / c.seconds:,.0f}",
                f"{pandas.seconds / c.seconds:.2f}" if rows == arguments.rows else "",
                f"{c.rss:.2f}",
                f"{c.pss:.2f}",
            )
            for rows, what, c in runs
        ]
        header = ("rows", "how", "seconds", "rows/s", "x pandas", "peak Rss GiB", "peak Pss GiB")
        print(format_table(header, lines))
        small, large = runs[3][2], runs[4][2]
        growth = (large.seconds / arguments.large) / (small.seconds / arguments.small)
        print(
            f"time per row, {arguments.large:,} over {arguments.small:,} rows (the start of the "
            f"program included): {growth:.2f}"
        )


if __name__ == "__main__":
    main()
