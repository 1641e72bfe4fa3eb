"""Rows per second that a loader gives: ours, as arrays and as `fit` takes them, beside Merlin's.

The same prepared Criteo-shaped rows, 26 ids and 13 numbers, shuffled, batch 8192; every batch is
looked at and let go. Loaders take turns; medians over the epochs after the first one.

    python benchmarks/bench_loader.py [--rows 1000000] [--batch-size 8192] [--epochs 4]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins.scaling import format_table
from merlin_cowclip.workflows.datasets import CRITEO
from merlin_cowclip.workflows.etl import prepare
from merlin_cowclip.workflows.loading import Loader
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.synthetic import write_synthetic

with quiet_imports():
    from merlin.io import Dataset

    from merlin_cowclip.plugins._stack import mm


def rate(epoch: Callable[[], Iterable[Any]]) -> float:
    """Rows per second of one pass."""
    start = time.perf_counter()
    rows = sum(len(labels) for _, labels in epoch())
    return rows / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-loader-") as folder:
        log = Path(folder) / "train.txt"
        write_synthetic("criteo", log, rows=arguments.rows, seed=1, cardinality=100_000)
        data = prepare(CRITEO, [log], Path(folder) / "data", progress=False)
        ours = Loader(data, batch_size=arguments.batch_size)
        stock = mm.Loader(
            Dataset([str(file) for file in data.train_files], engine="parquet", schema=data.schema),
            batch_size=arguments.batch_size,
            shuffle=True,
        )
        loaders: dict[str, Callable[[], Iterable[Any]]] = {
            "Merlin's mm.Loader": lambda: stock,
            "ours, batches()": ours.batches,
            "ours, dataset()": ours.dataset,
            "ours, fit(loader)": lambda: ours,
        }
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        for _ in range(arguments.epochs + 1):
            for name, epoch in loaders.items():
                rates[name].append(rate(epoch))
    medians = {name: statistics.median(found[1:]) for name, found in rates.items()}
    print(
        f"{os.cpu_count()} CPU cores, load {os.getloadavg()[0]:.1f}; {data.rows['train']:,} rows, "
        f"26 + 13 fields, batch {arguments.batch_size:,}"
    )
    lines = [
        (name, f"{found:,.0f}", f"{found / medians[next(iter(loaders))]:.2f}")
        for name, found in medians.items()
    ]
    print(format_table(("loader", "rows/s", "x Merlin's"), lines))


if __name__ == "__main__":
    main()
