"""The demo's page: its table, AUC by batch size and by epoch, what the clip did, and a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from merlin_cowclip.workflows.study.pages import Section, as_html, facts, read_metrics, write_page
from merlin_cowclip.workflows.study.plots import Line, line_plot
from merlin_cowclip.workflows.training.runs import RESULT, Run
from merlin_cowclip.workflows.training.scalars import percent

if TYPE_CHECKING:
    from merlin_cowclip.workflows.commands.demonstration import DemoRun

PAGE = "demo.html"
_BEST = "best possible, all rows"


def write_demo_page(
    out: Path,
    runs: Mapping[DemoRun, Run],
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    best_auc: float,
) -> None:
    """Write `OUT/demo.html`, one page that needs no network.

    Args:
      out: the demo's folder, which holds the runs.
      runs: by the demo's lines: those of its smallest batch first, "none" and "cowclip" among them.
      header: of the table as it is printed.
      lines: of that table, one for each run.
      best_auc: of the planted truth, on all rows.
    """
    first = next(iter(runs.values()))
    rows = sum(first.config["rows"].values())
    data = f"{rows:,} synthetic rows in Criteo's format, whose best possible AUC is known"
    about = {"data": data, **facts(run.config for run in runs.values())}
    table = _table(runs, header, lines, best_auc)
    table.command = f"merlin-cowclip demo --rows {rows}"
    sections = [table, _epochs(runs, best_auc), _clip(runs)]
    write_page(out / PAGE, as_html("A large batch on logs with a known truth", sections, about))


def _name(run: DemoRun) -> str:
    return f"{run.rule}, {run.batch_size:,}"


def _table(
    runs: Mapping[DemoRun, Run],
    header: Sequence[str],
    lines: Sequence[Sequence[str]],
    best_auc: float,
) -> Section:
    """The table as it was printed, AUC by batch size, and what a large batch changes."""
    by_rule = dict(_by_rule(runs))
    sizes = sorted({run.batch_size for run in runs})
    changes = [
        f"by {large - small:+.4f} with `{rule}` ({small:.4f} → {large:.4f})"
        for rule, ((_, small, _), *_, (_, large, _)) in by_rule.items()
    ]
    verdict = (
        f"From batches of {sizes[0]:,} to {sizes[-1]:,} the test AUC changes "
        f"{' and '.join(changes)}; the best possible on all rows is {best_auc:.4f}; on the test "
        "part chance makes it another one."
    )
    at = list(header).index("test AUC")
    rows = [
        [*line[:at], f"{line[at]} [run]({run.path.name}/{RESULT})", *line[at + 1 :]]
        for line, run in zip(lines, runs.values(), strict=True)
    ]
    plot = line_plot(
        by_rule, "batch size", "test AUC", powers_of_two=True, levels={_BEST: best_auc}
    )
    return Section(
        f"What a batch {sizes[-1] // sizes[0]} times as large changes",
        "",
        verdict,
        list(header),
        rows,
        [
            f"At {sizes[0]:,} nothing is scaled: a rule without a clip is `none` there.",
            "One seed each: small differences may be chance; `merlin-cowclip sweep` takes several.",
        ],
        [("test AUC, by batch size", plot)],
    )


def _by_rule(runs: Mapping[DemoRun, Run]) -> Iterator[tuple[str, Line]]:
    """Test AUC by batch size for each rule of the largest one.

    At the smallest one nothing is scaled: without a clip all rules are "none" there.
    """
    largest = max(run.batch_size for run in runs)
    for rule in (run.rule for run in runs if run.batch_size == largest):
        same = (rule, "none") if rule != "cowclip" else (rule,)
        yield (
            rule,
            [
                (float(run.batch_size), done.result["auc"], 0.0)
                for run, done in runs.items()
                if run.rule in same
            ],
        )


def _epochs(runs: Mapping[DemoRun, Run], best_auc: float) -> Section:
    """How each run went."""
    metrics = {_name(run): read_metrics(done.path) for run, done in runs.items()}
    curves = {
        key: {
            name: [(float(row["epoch"]), float(row[key]), 0.0) for row in rows]
            for name, rows in metrics.items()
        }
        for key in ("auc", "train_loss")
    }
    epochs = len(next(iter(metrics.values())))
    auc = line_plot(curves["auc"], "epoch", "test AUC", levels={_BEST: best_auc})
    return Section(
        "How training went, epoch by epoch",
        "",
        "",
        ["test AUC after epoch", *map(str, range(1, epochs + 1))],
        [[name, *(f"{auc:.4f}" for _, auc, _ in line)] for name, line in curves["auc"].items()],
        ["From `metrics.csv` in each run; TensorBoard shows more: `tensorboard --logdir` a run."],
        [
            ("test AUC, by epoch", auc),
            ("training loss, by epoch", line_plot(curves["train_loss"], "epoch", "training loss")),
        ],
    )


def _clip(runs: Mapping[DemoRun, Run]) -> Section:
    """What the clip did, and the norms that it acts on."""
    rows, notes = [], []
    for run, done in runs.items():
        last = read_metrics(done.path)[-1]
        clipped = [last["rows_clipped"], last["occurrences_clipped"]]
        norms = [last["gradient_norm_frequent"], last["gradient_norm_rare"]]
        rows.append(
            [
                _name(run),
                *(percent(float(share)) if share else "no clip" for share in clipped),
                *(f"{float(norm):.2e}" if norm else "" for norm in norms),
            ]
        )
        if clipped[0]:
            notes.append(f"`{_name(run)}`, over all epochs: {done.result['clip']}")
    return Section(
        "What the clip did",
        "",
        "",
        [
            "in the last epoch",
            "rows clipped",
            "occurrences clipped",
            "gradient norm, frequent ids",
            "gradient norm, rare ids",
        ],
        rows,
        [
            *notes,
            "An id's gradient is clipped where its norm exceeds the bound that its count in the "
            "batch and its own weights give. Where that is seldom, the difference is that of the "
            "rest of the recipe: the scaled values, the warm-up and the wider initialisation.",
        ],
    )
