"""How long the exact AUC, log loss and calibration of many predictions take, and in what memory.

Predictions come in batches, as from a model that costs nothing; 5 bytes of each are to be held.
Memory is what the process holds at its peak beyond what it held before (Rss).

    python benchmarks/bench_quality.py [--rows 10000000 100000000]
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import subprocess
import sys
import time

from merlin_cowclip.workflows.training.evaluation import EVALUATION_BATCH, MetricAccumulator


def measure(rows: int) -> None:
    """Print one row of the table, of this process."""
    import numpy as np

    random = np.random.default_rng(0)
    probabilities = random.beta(1, 4, 64 * EVALUATION_BATCH).astype(np.float32)
    labels = (random.random(len(probabilities)) < probabilities).astype(np.float32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ranks, seconds = MetricAccumulator(), 0.0
    for start in range(0, rows, EVALUATION_BATCH):
        at = start % len(labels)
        piece = slice(at, at + min(EVALUATION_BATCH, rows - start))
        noise = random.random(EVALUATION_BATCH, np.float32)[: piece.stop - at]
        batch = probabilities[piece] * (1 - noise * np.float32(0.1))
        began = time.perf_counter()
        ranks.add(labels[piece], batch)
        seconds += time.perf_counter() - began
    began = time.perf_counter()
    quality = ranks.quality()
    ranking = time.perf_counter() - began
    held = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    print(
        f"| {rows:,} | {seconds:.1f} | {ranking:.1f} | {held / 2**20:,.0f} MiB | "
        f"{held / rows:.2f} | {quality.auc:.6f} |",
        flush=True,
    )


def main() -> None:
    """Print the table, each row of a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10**7, 10**8])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        measure(arguments.one)
        return
    print(f"{platform.machine()}, {os.cpu_count()} CPUs\n", flush=True)
    print("| rows | s to add | s to rank | memory | bytes a row | AUC |")
    print("|---:|---:|---:|---:|---:|---:|", flush=True)
    for rows in arguments.rows:
        subprocess.run([sys.executable, __file__, "--one", str(rows)], check=True)


if __name__ == "__main__":
    main()
