"""The demo: synthetic Criteo logs, prepared and trained with a small and a large batch.

A few minutes on two cores. It shows the paper's effect in the small: a batch that is 8 times as
large loses accuracy with linear scaling, the usual rule, and keeps it with CowClip. A batch of 128K
is more than a third of these logs, and wants more of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.plugins.scaling import Hyperparameters, K
from merlin_cowclip.workflows.commands.demo_page import PAGE, write_demo_page
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.spec import CRITEO
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import new_folder, refuse_pattern
from merlin_cowclip.workflows.training.configuration import TrainConfig, base_hyperparameters
from merlin_cowclip.workflows.training.train import train

ROWS = 300_000
CARDINALITY = 20_000
EPOCHS = 5
SEED = 1234
HEADER = ("batch size", "", "rule", "test AUC", "best, all rows", "seconds")


@dataclass(frozen=True)
class DemoRun:
    """One line of the demo's table."""

    batch_size: int
    rule: str


RUNS = (
    DemoRun(1 * K, "none"),
    DemoRun(1 * K, "cowclip"),
    DemoRun(8 * K, "linear"),
    DemoRun(8 * K, "cowclip"),
)


def base(rule: str) -> Hyperparameters:
    """A rule's recipe, its numbers tuned at 1K on the demo's own logs instead of Criteo's.

    With 150 times fewer rows, rows of the tables must move further per step and be held stronger.
    """
    return base_hyperparameters(rule, dense_lr=1e-3, embedding_lr=2e-3, l2=1e-3)


def demo(out: Path, *, rows: int = ROWS) -> str:
    """Write logs, prepared data, one run per line of the table, and a page of them all to `out`.

    Returns the table. An error or an interrupt removes `out`.

    Raises:
      UserError: `out` exists or cannot be made, or too few rows for the large batch.
    """
    refuse_pattern(out, "demo")
    largest = max(run.batch_size for run in RUNS)
    if rows < 2 * largest:
        raise UserError(
            f"rows must be at least {2 * largest:,}, for batches of {largest:,}. Received: {rows}"
        )
    # In place: the runs name the data's, so that a hidden folder, renamed at the end, would not do.
    with new_folder(out):
        print(f"Writing {rows:,} rows of synthetic logs in Criteo's format", flush=True)
        truth = write_synthetic(
            "criteo", out / "train.txt.gz", rows=rows, seed=SEED, cardinality=CARDINALITY
        )
        print("Preparing them: ids, counts, parquet", flush=True)
        data = prepare(CRITEO, [out / "train.txt.gz"], out / "data", seed=SEED)
        finished = []
        for run in RUNS:
            print(f"\nTraining DeepFM, batch size {run.batch_size:,}, rule {run.rule}", flush=True)
            config = TrainConfig(
                batch_size=run.batch_size,
                rule=run.rule,
                base=base(run.rule),
                epochs=EPOCHS,
                seed=SEED,
            )
            finished.append(train(data, config, out / f"deepfm-{run.batch_size}-{run.rule}"))
        lines = [
            (
                f"{run.batch_size:,}",
                f"{run.batch_size // K}x",
                run.rule,
                f"{done.result['auc']:.4f}",
                f"{truth.best_auc:.4f}",
                f"{done.result['train_seconds']:.0f}",
            )
            for run, done in zip(RUNS, finished, strict=True)
        ]
        write_demo_page(out, dict(zip(RUNS, finished, strict=True)), HEADER, lines, truth.best_auc)
    table = format_table(HEADER, lines)
    print(f"\n{table}\n\nThe logs, the prepared data and the runs: {out}")
    print(f"The page of all this: {out / PAGE}")
    return table
