# SPDX-License-Identifier: Apache-2.0
"""The command demo: a synthetic Criteo log, prepared, trained at a small and a large batch, a page.

It shows how much AUC a base loses at 128 times its batch size, by the settings that users try.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from merlin_cowclip.workflows.commands.options import PATH, Command, option

ROWS, CARDINALITY, SEED, EPOCHS = 300_000, 20_000, 1234, 4
BASE, LARGE = 64, 8192
TUNED: dict[str, Any] = {"dense_lr": 1e-3, "embedding_lr": 1e-3, "l2": 2e-4, "init_stddev": 1e-2}
"""At the base: Adam's usual learning rate, and the best of four λ on the validation part."""
NETWORK: dict[str, Any] = {"mlp": (128, 128)}
PAGE = "demo.html"
NEXT = "Next, search on your data at the large batch size, or scale hyperparameters that you have:"
COMMANDS = f"""merlin-cowclip tune DATA --batch-size {LARGE} --out TUNE
merlin-cowclip train DATA --batch-size {LARGE} --out RUN \\
  --base-batch-size {BASE} --dense-lr X --embedding-lr X --l2 Y"""
NOTES = (
    "All runs train the same number of epochs, and the validation part chooses the epoch. The last "
    "rows are the test part, and the rows before them the validation part.",
    "The base has Adam's usual learning rate. Its λ was chosen by hand on this validation part. A "
    "rule scales the base's hyperparameters, so another base can change which rules keep the AUC.",
    "The best possible AUC is that of the true click probabilities. It differs slightly between "
    "parts. A run whose learning rates decay can exceed the base, because the base's are constant.",
)
_CHANCE = 0.002  # AUC


class DemoRun(NamedTuple):
    """A run of the demo: a rule at a batch size (None: the portfolio), and its description."""

    name: str
    batch_size: int
    rule: str | None
    title: str
    what: str


_GROWTH = LARGE // BASE
_ROOT = f"learning rates and λ × √{_GROWTH}, decay to 0, clip, warm-up"
_PAPER = f"embedding learning rate kept, dense × √{_GROWTH}, λ × {_GROWTH}, clip, warm-up"
_FIRST = "what tune tries first, found on other data, without the base"
RUNS = (
    DemoRun("base", BASE, "none", "the base", "constant learning rates"),
    DemoRun("linear", LARGE, "linear", "linear scaling", f"learning rates × {_GROWTH}"),
    DemoRun("cowclip", LARGE, "cowclip", "the paper's rule cowclip", _PAPER),
    DemoRun("sqrt_decay", LARGE, "sqrt_decay", "the default rule sqrt_decay", _ROOT),
    DemoRun("portfolio", LARGE, None, "the first portfolio setting", _FIRST),
)


@click.command("demo", cls=Command, example="demo --out runs/demo")
@option("--out", type=PATH, help="folder to write", shown="runs/demo-TIME")
@option("--rows", type=int, default=ROWS, metavar="N", help="rows; a conclusion needs 294,000")
def demo_command(out: Path | None, rows: int) -> None:
    """Compare training at batch sizes 64 and 8,192 on synthetic data."""
    demo(out or Path("runs") / f"demo-{datetime.datetime.now():%Y%m%d-%H%M%S}", rows=rows)


def demo(out: Path, *, rows: int = ROWS) -> None:
    """Write a log, prepared data, one run per line of the table, and a page of them all to `out`.

    An error or an interrupt removes `out`.

    Raises:
      UserError: `out` exists or cannot be made, or too few rows for the large batch.
    """
    from merlin_cowclip.plugins._text import format_table
    from merlin_cowclip.workflows.data.prepare.pipeline import prepare
    from merlin_cowclip.workflows.data.spec import CRITEO, Split
    from merlin_cowclip.workflows.data.synthetic import write_synthetic
    from merlin_cowclip.workflows.folders import refuse_existing, refuse_pattern, remove
    from merlin_cowclip.workflows.study.configuration import TuneConfig
    from merlin_cowclip.workflows.study.pages import Page, curves, write_page
    from merlin_cowclip.workflows.training.configuration import TrainConfig, few_steps
    from merlin_cowclip.workflows.training.listeners import METRICS
    from merlin_cowclip.workflows.training.train import train

    refuse_pattern(out, "demo")
    refuse_existing(out)
    base, *_, largest = RUNS
    # In place: the runs name the data's, so that a hidden folder, renamed at the end, would not do.
    out.mkdir(parents=True)
    with contextlib.ExitStack() as undo:
        undo.callback(remove, out)
        print(f"Writing {rows:,} rows of synthetic data in Criteo's format", flush=True)
        log = out / "train.txt.gz"
        truth = write_synthetic("criteo", log, rows=rows, seed=SEED, cardinality=CARDINALITY)
        print("Preparing them: ids, counts, parquet, split by time", flush=True)
        by_time = dataclasses.replace(CRITEO, split=Split("sequential"))
        data = prepare(by_time, [log], out / "data", seed=SEED)
        train_rows = data.rows["train"]
        if few := few_steps(train_rows, largest.batch_size):
            few = f"No conclusion: {few}"
            print(f"{few} Use more --rows (default: {ROWS:,}).", flush=True)
        lines, notes, configs, aucs = [], [], [], dict[str, float]()
        for number, run in enumerate(RUNS, 1):
            size = run.batch_size
            title = f"{run.name}, batch size {size:,}"
            print(f"\nRun {number} of {len(RUNS)}: {title}: {run.what}", flush=True)
            shared: dict[str, Any] = {"batch_size": size, "epochs": EPOCHS, "seed": SEED}
            if run.rule:
                own = {"rule": run.rule, "base_batch_size": base.batch_size, **TUNED, **NETWORK}
                config = TrainConfig(**shared, **own)
            else:
                config = TuneConfig(**shared, network=NETWORK, rows=train_rows).portfolio[0]
            config = dataclasses.replace(config, patience=EPOCHS)  # the best epoch is used
            result = train(data, config, out / run.name).result
            configs.append(result["config"])
            aucs[run.name] = auc = result["auc"]
            more = f"{auc - aucs[base.name]:+.4f}" if number > 1 else ""
            numbers = f"{size:,}", f"{-(-train_rows // size):,}", f"{result['train_seconds']:.0f}"
            lines.append((run.name, *numbers, f"{auc:.4f}", more))
            clip = f" {result['clip']}" if config.hyperparameters.clip else ""
            notes.append(f"{title}: {run.what}.{clip}")
        headline = few or _conclusion(aucs, train_rows)
        header = ("run", "batch size", "steps/epoch", "training s", "test AUC", "from base")
        best = {"best possible": truth.best_auc}
        plots = [*curves({run.name: out / run.name / METRICS for run in RUNS}, best)]
        title, notes = "Batch sizes 64 and 8,192 compared on synthetic clicks", [*notes, *NOTES]
        page = Page(title, headline, [(header, lines)], notes, plots, f"{NEXT}\n{COMMANDS}")
        write_page(out / PAGE, page, configs)
        undo.pop_all()
    print(f"\n{format_table(header, lines)}\n\n{headline}\n\n{NEXT}\n{COMMANDS}\n")
    print(f"Data and runs: {out}\nTheir page: {out / PAGE}")


def _conclusion(aucs: Mapping[str, float], rows: int) -> str:
    """Which runs keep the AUC of the first one, the base."""
    (base, size), large = RUNS[0][:2], RUNS[-1].batch_size
    changes = [(f"{run.title} ({(c := aucs[run.name] - aucs[base]):+.4f})", c) for run in RUNS[1:]]
    kept = " and ".join(title for title, change in changes if change >= -_CHANCE)
    lost = " and ".join(title for title, change in changes if change < -_CHANCE)
    return (
        f"At batch size {size}, the base takes {-(-rows // size):,} steps per epoch and reaches a "
        f"test AUC of {aucs[base]:.4f}. At {large:,}, an epoch has {-(-rows // large)} steps. "
        f"This AUC is kept by {kept or 'no run'}. It is lost by {lost or 'no run'}. One seed; "
        f"losses up to {_CHANCE} may be random."
    )
