# SPDX-License-Identifier: Apache-2.0
"""The command demo: synthetic Criteo logs, prepared, trained by four rules, and a page.

It shows the paper's effect in the small: what each rule makes of a batch that is many times as
large as the one that the values were tuned for.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from merlin_cowclip.workflows.commands.options import PATH, Command, option
from merlin_cowclip.workflows.errors import UserError

ROWS, CARDINALITY, SEED, EPOCHS = 300_000, 20_000, 1234, 5
BASE, LARGE = 512, 4096
TUNED: dict[str, Any] = {"dense_lr": 1e-3, "embedding_lr": 3e-3, "l2": 5e-4}
"""At the base, on these logs: with 150 times fewer rows than Criteo's, rows of the tables must move
further per step and be held stronger."""
NETWORK: dict[str, Any] = {"mlp": (128, 128)}
PAGE = "demo.html"
NOTES = (
    "A large batch takes fewer steps, so its first epochs are behind. CowClip also raises the "
    "dense learning rate from 0 during the first one.",
    "The dashed line is the best possible AUC of these logs, that of their true probabilities. The "
    "values were not searched for, so a rule can end above the base.",
    "Times: a CPU gains little from a large batch. In the paper, one V100 needs 1/85 of the time "
    "at 128 times the batch.",
)
_CHANCE = 0.002  # AUC


class DemoRun(NamedTuple):
    """A run of the demo: a rule at a batch size, and what it does to the values."""

    name: str
    batch_size: int
    rule: str
    title: str
    what: str


_GROWTH = LARGE // BASE
_ROOT = f"learning rates and λ × √{_GROWTH}, decay to 0, clip, warm-up"
_OURS = f"the paper's: embedding rate kept, λ × {_GROWTH}, clip, warm-up"
RUNS = (
    DemoRun("base", BASE, "none", "the base", "values chosen by hand"),
    DemoRun("none", LARGE, "none", "no scaling", "the same values for the large batch"),
    DemoRun("linear", LARGE, "linear", "linear scaling", f"learning rates × {_GROWTH}"),
    DemoRun("sqrt_decay", LARGE, "sqrt_decay", "√-scaling with decay", _ROOT),
    DemoRun("cowclip", LARGE, "cowclip", "CowClip", _OURS),
)


@click.command("demo", cls=Command, example="demo --rows 150000")
@option("--out", type=PATH, help="folder to write", shown="runs/demo-TIME")
@option("--rows", type=int, default=ROWS, metavar="N", help="synthetic rows")
def demo_command(out: Path | None, rows: int) -> None:
    """Train by four scaling rules on synthetic logs."""
    demo(out or Path("runs") / f"demo-{datetime.datetime.now():%Y%m%d-%H%M%S}", rows=rows)


def demo(out: Path, *, rows: int = ROWS) -> None:
    """Write logs, prepared data, one run per line of the table, and a page of them all to `out`.

    An error or an interrupt removes `out`.

    Raises:
      UserError: `out` exists or cannot be made, or too few rows for the large batch.
    """
    from merlin_cowclip.plugins._text import format_table
    from merlin_cowclip.workflows.data.prepare.pipeline import prepare
    from merlin_cowclip.workflows.data.spec import CRITEO
    from merlin_cowclip.workflows.data.synthetic import write_synthetic
    from merlin_cowclip.workflows.folders import refuse_existing, refuse_pattern, remove
    from merlin_cowclip.workflows.study.report import compare
    from merlin_cowclip.workflows.study.steps import few_steps
    from merlin_cowclip.workflows.training.configuration import TrainConfig
    from merlin_cowclip.workflows.training.train import train

    refuse_pattern(out, "demo")
    refuse_existing(out)
    base, *_, largest = RUNS
    least = 2 * largest.batch_size
    if rows < least:
        raise UserError(f"rows must be at least {least:,}, two large batches. Received: {rows}")
    # In place: the runs name the data's, so that a hidden folder, renamed at the end, would not do.
    out.mkdir(parents=True)
    with contextlib.ExitStack() as undo:
        undo.callback(remove, out)
        print(f"Writing {rows:,} rows of synthetic logs in Criteo's format", flush=True)
        logs = out / "train.txt.gz"
        truth = write_synthetic("criteo", logs, rows=rows, seed=SEED, cardinality=CARDINALITY)
        print("Preparing them: ids, counts, parquet", flush=True)
        data = prepare(CRITEO, [logs], out / "data", seed=SEED)
        lines, notes, aucs = [], [], []
        for number, run in enumerate(RUNS, 1):
            what = f"DeepFM, batch size {run.batch_size:,}, rule {run.rule}"
            print(f"\nRun {number} of {len(RUNS)}: {what}: {run.what}", flush=True)
            config = TrainConfig(
                batch_size=run.batch_size,
                rule=run.rule,
                base_batch_size=base.batch_size,
                **TUNED,
                epochs=EPOCHS,
                patience=EPOCHS,  # so that the validation part chooses the epoch
                seed=SEED,
                **NETWORK,
            )
            result = train(data, config, out / run.name).result
            aucs.append(result["auc"])
            steps = -(-data.rows["train"] // run.batch_size)
            lines.append((run.name, f"{run.batch_size:,}", f"{steps:,}", f"{aucs[-1]:.4f}"))
            clip = f" {result['clip']}" if config.hyperparameters.clip else ""
            notes.append(f"{run.name}: {run.what}.{clip}")
        few = few_steps(data.rows["train"], largest.batch_size)
        headline = f"No conclusion: {few}" if few else _conclusion(aucs)
        compare(
            {run.name: out / run.name for run in RUNS},
            out / PAGE,
            title="A large batch on logs with a known truth",
            headline=headline,
            notes=[*notes, *NOTES],
            levels={"best possible": truth.best_auc},
        )
        undo.pop_all()
    table = format_table(("run", "batch size", "steps/epoch", "test AUC"), lines)
    print(f"\n{table}\n\n{headline}\n\nThe logs, the prepared data and the runs: {out}")
    print(f"The page of all this: {out / PAGE}")
    print("Next, on your data: merlin-cowclip tune DATA --batch-size B --out TUNE")


def _conclusion(aucs: Sequence[float]) -> str:
    """What the rules keep of the AUC of the first run, the base."""
    rules = [(run, auc - aucs[0]) for run, auc in zip(RUNS[1:], aucs[1:], strict=True)]
    kept = [run.title for run, difference in rules if difference >= -_CHANCE]
    lost = [run.title for run, difference in rules if difference < -_CHANCE]

    def listed(titles: Sequence[str]) -> str:
        *first, last = titles or ["no rule"]
        return f"{', '.join(first)} and {last}" if first else last

    against = ", ".join(f"{run.name} {difference:+.4f}" for run, difference in rules)
    return (
        f"A batch {RUNS[-1].batch_size // RUNS[0].batch_size} times as large keeps its accuracy "
        f"with {listed(kept)}, and loses some with {listed(lost)}. "
        f"Test AUC against the base's {aucs[0]:.4f}: {against}."
    )
