"""The command demo: synthetic Criteo logs, prepared, trained by four rules, and a page.

It shows the paper's effect in the small: what each rule makes of a batch that is many times as
large as the one that the values were tuned for.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from merlin_cowclip.workflows.commands.options import PATH, Command, option
from merlin_cowclip.workflows.errors import UserError

if TYPE_CHECKING:
    from merlin_cowclip.workflows.study.pages import Page
    from merlin_cowclip.workflows.training.runs import Run

ROWS, CARDINALITY, SEED, EPOCHS = 300_000, 20_000, 1234, 5
BASE, LARGE = 512, 4096
TUNED: dict[str, Any] = {"dense_lr": 1e-3, "embedding_lr": 3e-3, "l2": 5e-4}
"""At the base, on these logs: with 150 times fewer rows than Criteo's, rows of the tables must move
further per step and be held stronger."""
NETWORK: dict[str, Any] = {"mlp": (128, 128)}
PAGE = "demo.html"
_FALLING = {"name": "linear", "to": 0.0}
_BEST = "best possible"
_CHANCE = 0.002  # AUC
_TITLES = {
    "none": "no scaling",
    "linear": "linear scaling",
    "sqrt": "√-scaling with falling rates",
    "cowclip": "CowClip",
}


@dataclass(frozen=True)
class DemoRun:
    """A run of the demo: a rule at a batch size, and what it does to the values."""

    name: str
    batch_size: int
    rule: str
    what: str
    schedule: Mapping[str, Any] | None = None


RUNS = (
    DemoRun("base", BASE, "none", "the values as they were tuned"),
    DemoRun("none", LARGE, "none", "the same values for the large batch"),
    DemoRun("linear", LARGE, "linear", "learning rates × s, the usual rule"),
    DemoRun("sqrt", LARGE, "sqrt", "learning rates × √s, falling to 0 over all epochs", _FALLING),
    DemoRun("cowclip", LARGE, "cowclip", "the paper's: embedding rate kept, λ × s, clip, warm-up"),
)


@click.command("demo", cls=Command, example="demo --rows 20000")
@option("--out", type=PATH, help="folder to write", shown="runs/demo-TIME")
@option("--rows", type=int, default=ROWS, metavar="N", help="synthetic rows")
def demo_command(out: Path | None, rows: int) -> None:
    """Train by four scaling rules on synthetic logs."""
    demo(out or Path("runs") / f"demo-{datetime.datetime.now():%Y%m%d-%H%M%S}", rows=rows)


def demo(out: Path, *, rows: int = ROWS) -> str:
    """Write logs, prepared data, one run per line of the table, and a page of them all to `out`.

    Returns the table. An error or an interrupt removes `out`.

    Raises:
      UserError: `out` exists or cannot be made, or too few rows for the large batch.
    """
    from merlin_cowclip.plugins._text import format_table
    from merlin_cowclip.workflows.data.prepare.pipeline import prepare
    from merlin_cowclip.workflows.data.spec import CRITEO
    from merlin_cowclip.workflows.data.synthetic import write_synthetic
    from merlin_cowclip.workflows.folders import new_folder, refuse_pattern
    from merlin_cowclip.workflows.training.configuration import TrainConfig
    from merlin_cowclip.workflows.training.keeping import Keeping
    from merlin_cowclip.workflows.training.train import train

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
        for number, run in enumerate(RUNS, 1):
            what = f"DeepFM, batch size {run.batch_size:,}, rule {run.rule}"
            print(f"\n[{number}/{len(RUNS)}] {what}: {run.what}", flush=True)
            config = TrainConfig(
                batch_size=run.batch_size,
                rule=run.rule,
                base_batch_size=RUNS[0].batch_size,
                **TUNED,
                epochs=EPOCHS,
                seed=SEED,
                dense_schedule=run.schedule,
                embedding_schedule=run.schedule,
                **NETWORK,
            )
            keeping = Keeping(saved_model=False)
            finished.append(train(data, config, out / run.name, keeping=keeping))
        page = demo_page(finished, truth.best_auc, f"merlin-cowclip demo --rows {rows}")
        page.write(out / PAGE)
    header = ("run", "batch size", "steps/epoch", "test AUC", "against the base")
    table = format_table(
        header, [_numbers(one, done, finished) for one, done in zip(RUNS, finished, strict=True)]
    )
    print(f"\n{table}\n\n{page.headline}\n\nThe logs, the prepared data and the runs: {out}")
    print(f"The page of all this: {out / PAGE}")
    return table


def _numbers(one: DemoRun, done: Run, finished: Sequence[Run]) -> list[str]:
    """A line of the table; the first of the runs is the base."""
    auc, base = done.result["auc"], finished[0].result["auc"]
    difference = "" if done is finished[0] else f"{auc - base:+.4f}"
    steps = done.config["rows"]["train"] // one.batch_size
    return [one.name, f"{one.batch_size:,}", f"{steps:,}", f"{auc:.4f}", difference]


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def demo_page(finished: Sequence[Run], best_auc: float, command: str) -> Page:
    """The page on the runs of `RUNS`, of data whose best possible AUC is known."""
    from merlin_cowclip.workflows.study.pages import Cell, Page, Section, Table, facts
    from merlin_cowclip.workflows.study.report import epoch_by_epoch
    from merlin_cowclip.workflows.training.runs import RESULT

    aucs = {one.name: done.result["auc"] for one, done in zip(RUNS, finished, strict=True)}
    base, *rules = aucs
    best = max(rules, key=lambda rule: aucs[rule])
    times = RUNS[-1].batch_size // RUNS[0].batch_size
    lost = [_TITLES[rule] for rule in rules if aucs[rule] < aucs[base] - _CHANCE]
    kept = [_TITLES[rule] for rule in rules if aucs[rule] >= aucs[base] - _CHANCE]
    if lost and kept:
        what = f"loses accuracy with {_and(lost)}, and keeps it with {_and(kept)}"
    elif kept:
        what = "keeps its accuracy with all four rules"
    else:
        what = f"loses accuracy with all four rules, least with {_TITLES[best]}"
    headline = f"A batch {times} times as large {what}."
    against = ", ".join(f"{rule} {aucs[rule] - aucs[base]:+.4f}" for rule in rules)
    headline += f" Test AUC against the base's {aucs[base]:.4f}: {against}."
    pairs = list(zip(RUNS, finished, strict=True))
    rows: list[Any] = []
    words: list[Any] = []
    for one, done in pairs:
        name, *numbers = _numbers(one, done, finished)
        rows.append([Cell(name, f"{one.name}/{RESULT}"), *numbers])
        clips = done.config["scaled"]["clip"] is not None
        words.append([name, one.what, done.result["clip"] if clips else "no clip"])
    curves = epoch_by_epoch({one.name: done.path for one, done in pairs}, {_BEST: best_auc})
    curves.notes = [
        "A large batch takes fewer steps, so its first epochs are behind. CowClip also raises the "
        "dense learning rate from 0 during the first one."
    ]
    header = ["run", "batch size", "steps/epoch", "test AUC", "against the base"]
    told = Table(["run", "what the rule does", "what the clip did"], words, words=True)
    sections = [
        Section(
            "rules",
            f"What {times} times the batch costs with each rule",
            tables=[Table(header, rows), told],
            notes=[
                f"The best possible AUC of these logs is {best_auc:.4f}, that of their true "
                "probabilities.",
                f"One seed: a difference of less than about {_CHANCE} may be chance. The values "
                "were not searched for, so a rule can end above the base.",
                "No times are shown: a CPU gains little from a large batch, a GPU much.",
            ],
            command=command,
        ),
        curves,
    ]
    configs = [done.config for done in finished]
    return Page("A large batch on logs with a known truth", headline, facts(configs), sections)
