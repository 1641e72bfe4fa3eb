"""A log where frequent ids matter and rare ones hardly do: a study in docs/results.md.

Four fields of 50 ids have strong effects, alone and in pairs; six fields have 20,000 ids each,
whose ranks are log-uniform, so that most of them are rare, with weak effects. The best AUC is
known.

    python benchmarks/heavy_tailed_log.py log.parquet
    merlin-cowclip prepare benchmarks/heavy_tailed.toml log.parquet --out data
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

FREQUENT, RARE = [f"s{i}" for i in range(4)], [f"r{i}" for i in range(6)]
FEW, MANY = 50, 20_000
STRONG, WEAK, PAIRS = 0.5, 0.15, 0.6  # deviations of effects; PAIRS of the strong one
BIAS = -1.2


def log(rows: int, seed: int) -> tuple[pd.DataFrame, float]:
    """The log, and the AUC of the planted probabilities."""
    random = np.random.default_rng(seed)
    logit, columns, hidden = np.zeros(rows), {}, []
    share = 1 / np.arange(1, FEW + 1) ** 0.8
    for field in FREQUENT:
        ids = columns[field] = random.choice(FEW, rows, p=share / share.sum())
        logit += random.normal(0, STRONG, FEW)[ids]
        hidden.append(random.normal(0, 1, (FEW, 2))[ids])
    for i, mine in enumerate(hidden):
        for other in hidden[:i]:
            logit += PAIRS * STRONG * (mine * other).sum(1) / np.sqrt(2)
    for field in RARE:
        ids = columns[field] = np.floor(MANY ** random.random(rows)).astype(np.int64) - 1
        logit += random.normal(0, WEAK, MANY)[ids]
    logit += BIAS - logit.mean()
    clicks = random.random(rows) < 1 / (1 + np.exp(-logit))
    frame = pd.DataFrame({"y": clicks.astype(np.int64), **columns})
    return frame, float(roc_auc_score(clicks, logit))


def main() -> None:
    """Write the log."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="the log to write, .parquet")
    parser.add_argument("--rows", type=int, default=1_400_000, help="(1,400,000)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    arguments = parser.parse_args()
    if arguments.out.exists():
        sys.exit(f"out must not exist. Received: {arguments.out}. Name another file")
    frame, best = log(arguments.rows, arguments.seed)
    frame.to_parquet(arguments.out, index=False)
    print(f"{len(frame):,} rows, {frame['y'].mean():.3f} clicked; best possible AUC {best:.5f}")


if __name__ == "__main__":
    main()
