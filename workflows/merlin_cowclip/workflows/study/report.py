"""A sweep's page: every study's table beside the paper's numbers, plots, and a verdict.

One HTML file that needs no network. Every number of ours is a link to the `result.json` that it
comes from, "diverged" to the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study import occurrences
from merlin_cowclip.workflows.study.cost import PAPERS_EPOCHS, Cost
from merlin_cowclip.workflows.study.pages import Section, as_html, facts, write_page
from merlin_cowclip.workflows.study.paper import BASELINE, CITED, PRINTED, Printed
from merlin_cowclip.workflows.study.report_plots import by_size_or_rate, plots
from merlin_cowclip.workflows.study.studies import (
    AUC,
    FULL,
    LOG_LOSS,
    MINUTES,
    STUDIES,
    Cell,
    Quantity,
)
from merlin_cowclip.workflows.study.sweep import (
    RECORD,
    RUNS,
    STUDIES_,
    Outcome,
    outcomes,
    read_record,
    read_result,
    read_sweep,
)
from merlin_cowclip.workflows.study.workers import DIVERGED
from merlin_cowclip.workflows.training.runs import RESULT

HTML = "report.html"
_TITLE = "What a large batch does to these data"
_BASE = 1024  # the paper's
_EPOCH = replace(MINUTES, factor=MINUTES.factor / PAPERS_EPOCHS)  # of the paper's
_ALL_NETWORKS = ("networks", "time")  # studies of them; the paper's others are of DeepFM


def report(out: str | Path, cost: Cost | None = None) -> Path:
    """Write `OUT/report.html` of all that a sweep's folder holds.

    Args:
      out: the folder.
      cost: what the cost model reckons with, beneath a study of time; by default an epoch of
        Criteo, without a price.

    Raises:
      UserError: it is no sweep's, or cannot be written to, or nothing of it has ended; or a cost
        without a study of time.
    """
    out = Path(out)
    if not (out / RECORD).exists():
        raise UserError(
            f"a report is of a sweep's folder. Received: {out}, which is none. Make one with "
            "'merlin-cowclip sweep'"
        )
    known = [name for name in STUDIES if (out / STUDIES_ / f"{name}.json").exists()]
    sections = [
        section
        for name in known
        for section in (_section(out, name), _log_loss(out, name))
        if section is not None
    ]
    if not sections:
        raise UserError(
            f"a report needs runs that ended. Received: {out}, without one. Sweep again to go on"
        )
    if cost is not None and "time" not in known:
        raise UserError(
            f"a cost is reckoned from the study 'time'. Received: {out}, without it. Sweep it, or "
            "leave the price and the rows out"
        )
    if "time" in known:
        sections += _costs(out, cost or Cost())
    about = _about(out)
    try:
        write_page(out / HTML, as_html(_TITLE, sections, about))
    except OSError as error:
        raise UserError(
            f"a report is written into its sweep's folder. Received: {out}: {error}. Let it be "
            "written, or copy the folder and report on the copy"
        ) from error
    return out / HTML


def _section(out: Path, name: str) -> Section | None:
    """What is said of a study; `None` if no run of it has ended."""
    record = read_record(out, name)
    if name == occurrences.NAME:
        return occurrences.section(out, record)
    found = outcomes(out, name)
    if not any(outcome.results for outcome in found):
        return None
    study, sizes = STUDIES[name], record["batch_sizes"]
    quantity = study.quantity
    columns, rows, has_papers = _table(name, found, record, quantity)
    cited = list(_cited(_dataset(found), columns)) if name == "time" else []
    rows += cited
    section = Section(
        study.title,
        study.paper,
        "",
        [study.rows, *columns],
        rows,
        command=record["command"],
    )
    missing = {
        run
        for outcome, cell in zip(found, record["cells"], strict=True)
        for seed, run in cell["runs"].items()
        if int(seed) not in outcome.results
    }
    if name == "control":
        section.verdict = _drops(found)
    else:
        section.verdict = _verdict(found, sizes, quantity)
    if missing:
        to_come = f"Runs still to come: {len(missing)}; until then means may be of fewer seeds."
        section.verdict = f"{section.verdict} {to_come}".strip()
    section.notes = list(_notes(name, found, has_papers, bool(cited)))
    section.plots = list(plots(out, name, found, record, quantity))
    return section


def _log_loss(out: Path, name: str) -> Section | None:
    """The same runs by their log loss, where the study's table is of the AUC."""
    if name == occurrences.NAME or STUDIES[name].quantity is not AUC:
        return None
    record, found = read_record(out, name), outcomes(out, name)
    if not any(outcome.results for outcome in found):
        return None
    columns, rows, _ = _table(name, found, record, LOG_LOSS)
    section = Section(
        f"{STUDIES[name].title}: the log loss",
        STUDIES[name].paper,
        _least(found),
        [STUDIES[name].rows, *columns],
        rows,
        command=record["command"],
    )
    section.plots = list(by_size_or_rate(name, found, LOG_LOSS))
    return section


def _least(found: Sequence[Outcome]) -> str:
    """The least log loss, of all cells that are alike to the last digit that is shown."""
    alike: dict[str, list[Cell]] = {}
    means = [(mean[0], o.cell) for o in found if (mean := o.mean(LOG_LOSS.key)) is not None]
    for loss, cell in sorted(means, key=lambda pair: pair[0]):
        alike.setdefault(LOG_LOSS.shown(loss, 0.0), []).append(cell)
    if not alike:
        return ""
    shown, cells = next(iter(alike.items()))
    rows: dict[str, list[str]] = {}
    for cell in cells:
        rows.setdefault(cell.column, []).append(f"`{cell.row}`")
    places = "; ".join(f"{', '.join(names)} at {column}" for column, names in rows.items())
    return f"Least: {places}, {shown}."


def _table(
    name: str, found: Sequence[Outcome], record: Mapping[str, Any], quantity: Quantity
) -> tuple[list[str], list[list[str]], bool]:
    """The columns, the rows by them, the paper's beneath where it has them, and whether it has."""
    printed = PRINTED.get((name, _dataset(found)), {})
    if record["batch_sizes"][0] != _BASE:  # the paper's column "baseline" is of that
        printed = {(row, s): one for (row, s), one in printed.items() if s != BASELINE}
    columns = list(dict.fromkeys(o.cell.column for o in found))
    rows, has_papers = [], False
    for row in dict.fromkeys(o.cell.row for o in found):
        cells = {o.cell.column: o for o in found if o.cell.row == row}
        rows.append([row, *(_cell(cells.get(c), record, quantity) for c in columns)])
        theirs = [_theirs(printed, row, column, quantity) for column in columns]
        if any(theirs):
            rows.append([f"*{row}, paper*", *theirs])
            has_papers = True
    return columns, rows, has_papers


def _dataset(found: Sequence[Outcome]) -> str:
    """The name of the data set, of any result."""
    results = (r for outcome in found for r in outcome.results.values() if r is not None)
    first = next(results, None)
    return "" if first is None else str(first["config"]["dataset"])


def _cell(outcome: Outcome | None, record: Mapping[str, Any], quantity: Quantity) -> str:
    """Mean ± deviation, and a link to each run."""
    if outcome is None or not outcome.results:
        return ""
    runs = next(
        c["runs"]
        for c in record["cells"]
        if (c["row"], c["column"]) == (outcome.cell.row, outcome.cell.column)
    )
    found = outcome.mean(quantity.key)
    shown = "diverged" if found is None else quantity.shown(*found)
    links = " ".join(
        f"[{i}]({RUNS}/{runs[str(seed)]}/{DIVERGED if result is None else RESULT})"
        for i, (seed, result) in enumerate(outcome.results.items(), start=1)
    )
    missing = len(runs) - len(outcome.results)
    return " ".join(filter(None, [shown, links, f"({missing} to come)" if missing else ""]))


def _theirs(printed: Mapping[Any, Printed], row: str, column: str, quantity: Quantity) -> str:
    """What the paper has there, at the same batch size."""
    s, rest = (BASELINE, 0)
    if column != "baseline":
        s, rest = divmod(int(column.replace(",", "")), _BASE)
        if not s:
            return ""
    found = printed.get((row, s))
    if found is None or rest:
        return ""
    if quantity in (MINUTES, _EPOCH):
        return f"{quantity.factor * 60 * (found.minutes or 0):g}"
    if quantity is LOG_LOSS:
        return "" if found.log_loss is None else f"{found.log_loss:.4f}"
    return "diverged" if found.auc is None else f"{found.auc:.2f}"


def _verdict(found: Sequence[Outcome], sizes: Sequence[int], quantity: Quantity) -> str:
    """The largest batch against the smallest: of CowClip where it is there, and of the best."""
    least, most = (f"{size:,}" for size in (sizes[0], sizes[-1]))
    by_place = {(o.cell.row, o.cell.column): o for o in found}
    ours = [row for row in ("cowclip", "adaptive_column", "deepfm") if (row, most) in by_place]
    sentences = []
    at_most = {
        row: mean
        for (row, column), o in by_place.items()
        if column == most and (mean := o.mean(AUC.key)) is not None
    }
    for row in ours[:1]:
        small, large = (by_place.get((row, column)) for column in (least, most))
        if small is None or large is None or least == most:
            continue
        a, b = small.mean(AUC.key), large.mean(AUC.key)
        if a is None or b is None:
            continue
        speed = small.mean("train_seconds"), large.mean("train_seconds")
        faster = ""
        if speed[0] and speed[1]:
            times = speed[0][0] / speed[1][0]
            shown = f"{max(times, 1 / times):.1f}"
            way = "faster" if times >= 1 else "slower"
            faster = ", as fast" if shown == "1.0" else f", {shown} times {way}"
            results = (r for o in (small, large) for r in o.results.values() if r is not None)
            jobs = max(result["jobs"] for result in results)
            if jobs > 1:
                faster += f" (trained up to {jobs} at a time, which makes each take longer)"
        sentences.append(
            f"At {most} with `{row}`, AUC {AUC.shown(*b)} % against {AUC.shown(*a)} % at "
            f"{least}{faster}."
        )
    if quantity is AUC and len(at_most) > 1:
        best = AUC.shown(*max(at_most.values()))
        worst = AUC.shown(*min(at_most.values()))
        alike: dict[str, list[str]] = {}
        for row, mean in at_most.items():
            alike.setdefault(AUC.shown(*mean), []).append(f"`{row}`")
        sentences.append(
            f"Best at {most}: {', '.join(alike[best])}, {best} %; worst: "
            f"{', '.join(alike[worst])}, {worst} %."
        )
    return " ".join([*sentences, *_diverged(found)])


def _drops(found: Sequence[Outcome]) -> str:
    """What each rule loses as the batch grows, apart for each of the data: their AUCs differ."""
    rows: dict[str, list[Outcome]] = {}
    for outcome in found:
        rows.setdefault(outcome.cell.row, []).append(outcome)
    told = []
    for row, cells in rows.items():
        a, b = cells[0].mean(AUC.key), cells[-1].mean(AUC.key)
        if a is not None and b is not None and len(cells) > 1:
            told.append(f"`{row}` {AUC.factor * (b[0] - a[0]):+.3f}")
    sentences = []
    if told:
        first, last = (found[i].cell.column for i in (0, -1))
        sentences = [f"From {first} to {last} the AUC changes by (%): {', '.join(told)}."]
    return " ".join([*sentences, *_diverged(found)])


def _diverged(found: Sequence[Outcome]) -> list[str]:
    """A sentence on the rows of which a cell has no AUC, if there are any."""
    rows = sorted({o.cell.row for o in found if o.results and o.mean(AUC.key) is None})
    return [f"Diverged somewhere: {', '.join(f'`{row}`' for row in rows)}."] if rows else []


def _ours(name: str, found: Sequence[Outcome]) -> str:
    """What stands beside the paper's numbers: the network, the epochs, the rows."""
    config = found[0].cell.config
    what = [] if name in _ALL_NETWORKS else [config.model]
    what.append(f"{config.epochs} epoch{'s' if config.epochs > 1 else ''}")
    results = (r for outcome in found for r in outcome.results.values() if r is not None)
    rows = next(results)["config"]["rows"]["train"]
    return ", ".join([*what, f"{rows:,} rows for training"])


def _notes(name: str, found: Sequence[Outcome], has_papers: bool, has_cited: bool) -> Iterator[str]:
    """The sentences below a table; of rows that are not ours only where it has such."""
    seeds = {len(outcome.results) for outcome in found if outcome.results}
    if max(seeds) > 1:
        some = "" if len(seeds) == 1 else f"{min(seeds)} to "
        yield f"Mean ± deviation of {some}{max(seeds)} seeds; the small numbers lead to each run."
    else:
        yield "One seed: differences may be chance."
    if has_papers:
        what = "" if name in _ALL_NETWORKS else "DeepFM, "
        yield (
            f"Beneath, the paper's numbers at the same batch size: {what}ten epochs on the whole "
            f"data set, one V100. Ours: {_ours(name, found)}."
        )
    if name in ("scaling-rules", "clipping", "curves"):
        yield from _clips(found)
    if name == "time":
        yield "Times of runs that were trained side by side (--jobs) are longer than of one alone."
    if has_cited:
        cited = CITED[_dataset(found)]
        aucs = ", ".join(f"{system} {c.auc:g} %" for system, c in cited.items())
        yield (
            "Systems that the paper cites, measured by neither: 1K, 2K and 4K on 1, 2 and 4 GPUs. "
            f"Their AUC: {aucs}."
        )


def _clips(found: Sequence[Outcome]) -> Iterator[str]:
    """What the clip did in each cell, by its first run that did not diverge; a note a row."""
    rows: dict[str, list[str]] = {}
    for outcome in found:
        whole = [(seed, result) for seed, result in outcome.results.items() if result is not None]
        if whole and outcome.cell.config.hyperparameters.clip is not None:
            (seed, result), cell = whole[0], outcome.cell
            rows.setdefault(cell.row, []).append(f"{cell.column} (seed {seed}): {result['clip']}")
    for row, told in rows.items():
        yield f"What the clip did over all epochs, `{row}` at " + " / ".join(told)


def _cited(dataset: str, columns: Sequence[str]) -> Iterator[list[str]]:
    """A row for each system that the paper cites, where its batch sizes are among ours."""
    for system, cited in CITED.get(dataset, {}).items():
        by_column = {f"{_BASE * n:,}": m for n, m in zip((1, 2, 4), cited.minutes, strict=True)}
        if by_column.keys() & set(columns):
            theirs = (by_column.get(column) for column in columns)
            yield [f"*{system}, cited*", *("" if m is None else f"{m:g}" for m in theirs)]


def _costs(out: Path, cost: Cost) -> Iterator[Section]:
    """What an epoch of larger data takes at the rates of the study of time."""
    record, found = read_record(out, "time"), outcomes(out, "time")
    rows_of = {
        result["config"]["rows"]["train"]
        for outcome in found
        for result in outcome.results.values()
        if result is not None
    }
    if not rows_of:
        return
    rows = rows_of.pop()
    columns = list(dict.fromkeys(o.cell.column for o in found))
    printed = PRINTED["time", "criteo"] if cost.data == "Criteo" else {}
    table, has_papers = [], False
    for network in dict.fromkeys(o.cell.row for o in found):
        cells = {o.cell.column: o for o in found if o.cell.row == network}
        for quantity in cost.quantities(rows):
            shown = (_cell(cells.get(column), record, quantity) for column in columns)
            table.append([f"{network}, {quantity.name}", *shown])
        theirs = [_theirs(printed, network, column, _EPOCH) for column in columns]
        if any(theirs):
            table.append([f"*{network}, minutes, paper*", *theirs])
            has_papers = True
    yield Section(
        f"What an epoch of {cost.data} would take at these rates",
        "a cost model",
        "",
        ["network", *columns],
        table,
        [
            f"The times above, {cost.rows:,} rows for training instead of {rows:,}: training "
            "alone, without preparation and evaluation, with the ids of these data. An exact "
            "update passes over the whole table, so more ids take longer.",
            *(
                [f"At {cost.price_per_hour:g} an hour for the machine below."]
                if cost.price_per_hour is not None
                else ["For its price: 'merlin-cowclip report' with --price-per-hour."]
            ),
            *(
                [f"The paper's: a tenth of its {PAPERS_EPOCHS} epochs, one V100."]
                if has_papers
                else []
            ),
        ],
        command=record["command"],
    )


def _about(out: Path) -> dict[str, str]:
    """Of which data, by which versions, on what machine."""
    results = (read_result(p.parent) for p in sorted(out.glob(f"{RUNS}/*-{FULL}/{RESULT}")))
    return {"data": str(read_sweep(out).get("data")), **facts(r["config"] for r in results)}
