"""A study's runs, trained and kept: in one folder, by configuration, each once.

`OUT/sweep.json` says of which data all runs are, `OUT/studies/NAME.json` which runs a study takes,
and `OUT/runs/` holds them, each named by its configuration: studies share them, and what was
trained before is not trained again.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows.checks import check_whole
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import check_input_names
from merlin_cowclip.workflows.data.top_ids import keep_top_ids
from merlin_cowclip.workflows.errors import Stopped, UserError
from merlin_cowclip.workflows.folders import (
    all_or_nothing,
    refuse_pattern,
    write_json,
)
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.study import occurrences
from merlin_cowclip.workflows.study.locks import alone_in
from merlin_cowclip.workflows.study.studies import (
    TOP,
    Cell,
    Quantity,
    Setting,
    Study,
    few_steps,
)
from merlin_cowclip.workflows.study.workers import DIVERGED, Task, run_all
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.runs import RESULT, columns_of, identity_of

FORMAT_VERSION = 1
RECORD, STUDIES_, RUNS = "sweep.json", "studies", "runs"
_TOP_IDS = 3


@dataclass(frozen=True)
class Outcome:
    """What the runs of a cell came to.

    Attributes:
      cell: which one.
      results: of its finished runs, by seed; a run that diverged has `None`.
    """

    cell: Cell
    results: Mapping[int, Mapping[str, Any] | None]

    def values(self, quantity: str) -> list[float]:
        """Of the runs that did not diverge."""
        return [r[quantity] for r in self.results.values() if r is not None]

    def mean(self, quantity: str) -> tuple[float, float] | None:
        """Mean and deviation (0 of one run) over seeds; `None` if any run diverged."""
        values = self.values(quantity)
        if not values or len(values) < len(self.results):
            return None
        return statistics.fmean(values), statistics.stdev(values) if values[1:] else 0.0


def sweep(
    study: Study,
    data: PreparedData,
    out: str | Path,
    setting: Setting,
    *,
    jobs: int = 1,
    command: str = "",
    progress: bool = True,
) -> str:
    """Train what a study takes and is not there yet; returns its table.

    Stopped or killed and started again, it goes on. Several may work on one folder.

    Args:
      study: from `STUDIES`.
      data: the prepared folder, with a test part if anything is trained.
      out: the folder of the runs, of this study and of others on the same data; made if need be.
      setting: what the runs have in common.
      jobs: runs trained at a time, a process each.
      command: what prints the table again, for the report.
      progress: whether to say how each run ended, and show a bar on stderr.

    Raises:
      UserError: something cannot be trained, found before any work; or `out` is of other data.
      Stopped: it was interrupted, or one of its processes was; all is saved.
    """
    out = Path(out)
    check_whole("jobs", jobs, 1)
    cells = list(study.cells(setting))
    if cells:
        _check(data, cells)
    elif jobs != 1:
        raise UserError(
            f"the study {study.name} trains nothing, so that no jobs share it. Received: "
            f"jobs={jobs}. Leave it out"
        )
    _open(out, data)
    record = {**_record(study, setting, cells), "command": command}
    with alone_in(out):  # what two sweeps would write at the same time
        homes = _homes(out, data, cells, progress=progress)
        for folder in (STUDIES_, RUNS):
            (out / folder).mkdir(exist_ok=True)
        write_json(out / STUDIES_ / f"{study.name}.json", record)
        if not cells:
            return occurrences.count(data, out, setting.batch_sizes, progress=progress)
    tasks: dict[str, Task] = {}
    for cell in cells:
        for seed in setting.seeds:
            config = dataclasses.replace(cell.config, seed=seed)
            name = run_name(config, cell.data)
            what = f"{cell.row}, batch {config.batch_size}, seed {seed}"
            task = Task(what, out / RUNS / name, homes[cell.data].path, config.to_dict(), jobs)
            tasks.setdefault(name, task)
    todo = [task for task in tasks.values() if not task.is_done]
    done = len(tasks) - len(todo)
    if progress and (doubt := few_steps(data.rows["train"], setting.largest)):
        print(f"Warning: {doubt}")
    with progress_bar("sweep", len(tasks), " runs", show=progress) as bar:
        bar.update(done)
        try:
            for task in run_all(todo, jobs):
                done += 1
                if progress:
                    bar.write(f"[{done}/{len(tasks)}] {task.name}: {_ended(task.run)}")
                bar.update()
        except KeyboardInterrupt as error:
            raise Stopped(
                f"interrupted after {done} of {len(tasks)} runs, which are kept in {out}, and what "
                "was in hand is saved. To go on, give the same command again",
                error.number if isinstance(error, Stopped) else signal.SIGINT,
            ) from None
    return table(study, _outcomes(out, record))  # not what another sweep has written meanwhile


def run_name(config: TrainConfig, data: str) -> str:
    """Of a run's folder: the same for the same training."""
    return f"{config.identity[:16]}-{data}"


def read_record(out: Path, name: str) -> dict[str, Any]:
    """What a study's runs are, as its last sweep wrote it."""
    return _read(out / STUDIES_ / f"{name}.json")


def outcomes(out: Path, name: str) -> list[Outcome]:
    """What the runs of a study came to, those that ended, cell by cell."""
    return _outcomes(out, read_record(out, name))


def _outcomes(out: Path, record: Mapping[str, Any]) -> list[Outcome]:
    found = []
    for cell in record["cells"]:
        results: dict[int, Mapping[str, Any] | None] = {}
        for seed, run in cell["runs"].items():
            if (out / RUNS / run / RESULT).exists():
                results[int(seed)] = _result_of(out / RUNS / run)
            elif (out / RUNS / run / DIVERGED).exists():
                results[int(seed)] = None
        config = TrainConfig.from_dict(cell["config"])
        found.append(Outcome(Cell(cell["row"], cell["column"], config, cell["data"]), results))
    return found


def _result_of(run: Path) -> dict[str, Any]:
    """Of the configuration that its name says: not so if it was resumed for more epochs."""
    found = read_result(run)
    if not run.name.startswith(found["config"]["identity"][:16]):
        raise UserError(
            f"a run of a sweep must be as the sweep would train it. Received: {run}, of another "
            "configuration. Move it elsewhere, and sweep again"
        )
    return found


def table(study: Study, found: Iterable[Outcome]) -> str:
    """Rows by columns: the study's quantity, mean ± deviation over seeds."""
    cells = {(o.cell.row, o.cell.column): o for o in found}
    rows, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    lines = [
        (row, *(_shown(cells.get((row, column)), study.quantity) for column in columns))
        for row in rows
    ]
    header = f"{study.quantity.name}, by {study.rows} and batch size"
    return format_table((header, *columns), lines)


def _shown(outcome: Outcome | None, quantity: Quantity) -> str:
    if outcome is None or not outcome.results:
        return ""
    found = outcome.mean(quantity.key)
    return "diverged" if found is None else quantity.shown(*found)


def _check(data: PreparedData, cells: Sequence[Cell]) -> None:
    """Refuse what cannot be trained or measured, before any of it is."""
    if not data.test_files:
        raise UserError(
            f"a study needs a test part. Received: {data.path}, without one. Name data that has one"
        )
    rows, clicks = (data.report.get(key, {}).get("test") for key in ("rows", "positives"))
    if clicks in (0, rows):
        raise UserError(
            "the test part of a study must have labels of 0 and of 1. Received: "
            f"{data.path}, with {clicks} clicks in {rows} rows. Prepare the data with a larger "
            "test part, or split at random"
        )
    check_input_names(data.spec)
    with quiet_imports():
        from merlin_cowclip.plugins._tensorflow import tf
        from merlin_cowclip.workflows.training.train import check_trainable

    precision = tf.keras.mixed_precision.global_policy().name
    if precision != "float32":  # in which the processes begin that train
        raise UserError(
            "a study must be trained in float32, as it is by processes of its own. Received: "
            f"Keras's precision {precision!r} in this one. Set it to float32 again, or train each "
            "run by itself"
        )
    for config in {cell.config.identity: cell.config for cell in cells}.values():
        check_trainable(data, config)


def _open(out: Path, data: PreparedData) -> None:
    """Make the folder of the runs, or find it to be of these data."""
    refuse_pattern(out, "study")
    mine = {
        "format": FORMAT_VERSION,
        "data_sha256": identity_of(data),
        **columns_of(data),
        "cardinalities": data.cardinalities,
    }
    with alone_in(out.absolute().parent):
        if not out.exists():
            with all_or_nothing(out) as folder:
                write_json(folder / RECORD, {**mine, "data": str(data.path.resolve())})
    if not (out / RECORD).exists():
        raise UserError(
            f"output folder must not exist, or be of a sweep. Received: {out}, which is neither. "
            "Name another, or remove it"
        )
    record = _read(out / RECORD, "Name another folder")
    if {key: record.get(key) for key in mine} != mine:
        raise UserError(
            f"the runs of a folder must be of one data set. Received: {data.path}, and {out}, of "
            f"{record.get('data')} as it was. Name another folder"
        )


def _homes(
    out: Path, data: PreparedData, cells: Sequence[Cell], *, progress: bool
) -> dict[str, PreparedData]:
    """The data that the cells take, made if need be."""
    homes = {cell.data: data for cell in cells}
    if TOP in homes:
        top = out / TOP
        if not top.exists():
            keep_top_ids(data, _TOP_IDS, top, progress=progress)
        homes[TOP] = PreparedData.open(top)
    return homes


def _record(study: Study, setting: Setting, cells: Sequence[Cell]) -> dict[str, Any]:
    return {
        "format": FORMAT_VERSION,
        "study": study.name,
        "title": study.title,
        "paper": study.paper,
        "rows": study.rows,
        "batch_sizes": list(setting.batch_sizes),
        "seeds": list(setting.seeds),
        "cells": [
            {
                "row": cell.row,
                "column": cell.column,
                "data": cell.data,
                "config": cell.config.to_dict(),
                "runs": {
                    str(seed): run_name(dataclasses.replace(cell.config, seed=seed), cell.data)
                    for seed in setting.seeds
                },
            }
            for cell in cells
        ],
    }


def _ended(run: Path) -> str:
    if not (run / RESULT).exists():
        return "diverged"
    result = read_result(run)
    return f"AUC {result['auc']:.4f} ({result['train_seconds']:.0f} s)"


def _read(path: Path, remedy: str = "Sweep again") -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"what a sweep wrote must be there. Received: {path}: {error}. {remedy}"
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"{path} must be as it was written. Received: another value. {remedy}")
    return found


def read_result(run: Path) -> dict[str, Any]:
    """What a run came to."""
    return _read(run / RESULT, f"Remove {run}, and sweep again")
