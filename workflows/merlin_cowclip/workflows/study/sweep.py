# SPDX-License-Identifier: Apache-2.0
"""A study's runs, trained and kept: in one folder, by configuration, each once.

`OUT/sweep.json` describes the data of all runs, `OUT/studies/NAME.json` which runs a study takes,
and `OUT/runs/` holds them, each named by its configuration, so that studies share them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import signal
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import check_input_names
from merlin_cowclip.workflows.data.top_ids import keep_top_ids
from merlin_cowclip.workflows.errors import Stopped, UserError, check_whole
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_pattern, write_json
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.study.studies import (
    FULL,
    TOP,
    Cell,
    Quantity,
    Setting,
    Study,
    few_steps,
)
from merlin_cowclip.workflows.study.workers import Task, is_done, run_all
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.locks import folder_lock
from merlin_cowclip.workflows.training.runs import RESULT, columns_of, identity_of

FORMAT_VERSION = 1
RECORD, STUDIES_, RUNS = "sweep.json", "studies", "runs"
_TOP_IDS = 3


@dataclass(frozen=True)
class Outcome:
    """What the runs of a cell came to; `runs` are their folders, by seed."""

    cell: Cell
    runs: Mapping[int, Path]

    @functools.cached_property
    def results(self) -> dict[int, Mapping[str, Any] | None]:
        """By seed, of the runs that have ended; a run that diverged has `None`."""
        ended = {seed: run for seed, run in self.runs.items() if is_done(run)}
        return {seed: _result(run) for seed, run in ended.items()}

    @property
    def finished(self) -> dict[int, Mapping[str, Any]]:
        """The results of those that did not diverge."""
        return {seed: result for seed, result in self.results.items() if result is not None}

    def mean(self, quantity: str) -> tuple[float, float] | None:
        """Mean and deviation (0 of one run) over seeds; `None` if any run diverged."""
        values = [result[quantity] for result in self.finished.values()]
        if not values or len(values) < len(self.results):
            return None
        return statistics.fmean(values), statistics.stdev(values) if values[1:] else 0.0

    def shown(self, quantity: Quantity) -> str:
        """Mean ± deviation, or "diverged"; nothing if no run has ended."""
        mean = self.mean(quantity.key)
        return quantity.shown(*mean) if mean else "diverged" * bool(self.results)


def sweep(
    study: Study,
    data: PreparedData,
    out: str | Path,
    setting: Setting,
    *,
    jobs: int = 1,
    command: str = "",
    base: str = "",
    progress: bool = True,
) -> str:
    """Train what a study takes and is not there yet; returns its table.

    Run it again to resume it. Several processes may share one folder.

    Args:
      study: from `STUDIES`.
      data: the prepared folder, with a test part.
      out: the folder of the runs, of this study and of others on the same data; made if need be.
      setting: what the runs have in common; they are trained in float32.
      jobs: runs trained at a time, a process each.
      command: what prints the table again, for the report.
      base: where the values of the base come from, to be shown, also in the report.
      progress: whether to print how each run ended.

    Raises:
      UserError: something cannot be trained, found before any work; or `out` is of other data.
      Stopped: it was interrupted, or one of its processes was; all is saved.
    """
    out = Path(out)
    say: Callable[..., None] = print if progress else lambda *_, **__: None
    check_whole("jobs", jobs, 1)
    cells = list(study.cells(setting))
    _check(data, cells)
    _make_folder(out, data)
    record = {**_record(setting, cells), "base": base, "command": command}
    places = {FULL: data.path, TOP: out / TOP}
    with folder_lock(out):  # what two sweeps would write at the same time
        if any(cell.data == TOP for cell in cells) and not places[TOP].exists():
            keep_top_ids(data, _TOP_IDS, places[TOP], progress=progress)
        for folder in (STUDIES_, RUNS):
            (out / folder).mkdir(exist_ok=True)
        write_json(out / STUDIES_ / f"{study.name}.json", record)
    found = outcomes(out, study.name, record)
    tasks: dict[Path, Task] = {}
    for cell, runs in ((outcome.cell, outcome.runs) for outcome in found):
        for seed, run in runs.items():
            name = f"{cell.row}, batch {cell.config.batch_size}, seed {seed}"
            config = {**cell.config.to_dict(), "seed": seed}
            tasks.setdefault(run, Task(name, run, places[cell.data], config, jobs))
    todo = [task for task in tasks.values() if not is_done(task.run)]
    done = len(tasks) - len(todo)
    if base:
        say(f"Base: {base}", flush=True)
    if few := few_steps(data.rows["train"], setting.batch_sizes[-1]):
        say(f"Warning: {few}", flush=True)
    try:
        for task in run_all(todo, jobs):
            done += 1
            say(f"[{done}/{len(tasks)}] {task.name}: {_ended(task.run)}", flush=True)
    except KeyboardInterrupt as error:
        raise Stopped(
            f"interrupted after {done} of {len(tasks)} runs, which are kept in {out}, and what "
            "was in hand is saved. To go on, give the same command again",
            error.number if isinstance(error, Stopped) else signal.SIGINT,
        ) from None
    return table(study, found)


def run_name(config: TrainConfig, data: str) -> str:
    """Of a run's folder: the same for the same training."""
    return f"{config.identity[:16]}-{data}"


def read_record(out: Path, name: str) -> dict[str, Any]:
    """What a study's runs are, as its last sweep wrote it."""
    return read_json(out / STUDIES_ / f"{name}.json")


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def outcomes(out: Path, name: str, record: Mapping[str, Any] | None = None) -> list[Outcome]:
    """The runs of a study, cell by cell; of its last sweep, or of a record like that one's."""
    found = []
    for of in (record or read_record(out, name))["cells"]:
        cell = Cell(of["row"], TrainConfig.from_dict(of["config"]), of["column"], of["data"])
        found.append(Outcome(cell, {int(s): out / RUNS / run for s, run in of["runs"].items()}))
    return found


def grid(
    found: Iterable[Outcome],
) -> tuple[dict[tuple[str, str], Outcome], list[str], list[str]]:
    """Outcomes by row and column, the rows, and the columns."""
    cells = {(o.cell.row, o.cell.column): o for o in found}
    rows, columns = (list(dict.fromkeys(place[i] for place in cells)) for i in (0, 1))
    return cells, rows, columns


def table(study: Study, found: Iterable[Outcome]) -> str:
    """Rows by columns: the study's quantity, mean ± deviation over seeds."""
    cells, rows, columns = grid(found)
    shown = {place: outcome.shown(study.quantity) for place, outcome in cells.items()}
    lines = [(row, *(shown.get((row, column), "") for column in columns)) for row in rows]
    header = f"{study.quantity.name}, by {study.rows} and batch size"
    return format_table((header, *columns), lines)


def _check(data: PreparedData, cells: Sequence[Cell]) -> None:
    """Refuse what cannot be trained or measured, before any of it is."""
    if not data.test_files:
        raise UserError(
            f"a study needs a test part. Received: {data.path}, without one. Name data that has one"
        )
    check_input_names(data.spec)
    with quiet_imports():
        from merlin_cowclip.workflows.training.train import check_trainable

    for config in {cell.config.identity: cell.config for cell in cells}.values():
        check_trainable(data, config)


def _make_folder(out: Path, data: PreparedData) -> None:
    """Make the folder of the runs, or find it to be of these data."""
    refuse_pattern(out, "study")
    record = {
        "format": FORMAT_VERSION,
        "data_sha256": identity_of(data),
        **columns_of(data),
        "cardinalities": data.cardinalities,
        "dataset": data.spec.name,
        "rows": data.rows,
    }
    with folder_lock(out.absolute().parent):
        if not out.exists():
            with all_or_nothing(out) as folder:
                write_json(folder / RECORD, {**record, "data": str(data.path.resolve())})
    found = read_json(out / RECORD) if (out / RECORD).exists() else {}
    if {**found, **record} != found:
        of = f"of {found['data']} as it was" if found else "which is neither"
        raise UserError(
            f"output folder must not exist, or be of a sweep on the same data. Received: {out}, "
            f"{of}. Name another folder"
        )


def _record(setting: Setting, cells: Iterable[Cell]) -> dict[str, Any]:
    return {
        "batch_sizes": list(setting.batch_sizes),
        "values": dict(setting.values),
        "cells": [
            {
                **vars(cell),
                "config": cell.config.to_dict(),
                "runs": {
                    str(seed): run_name(dataclasses.replace(cell.config, seed=seed), cell.data)
                    for seed in setting.seeds
                },
            }
            for cell in cells
        ],
    }


def _result(run: Path) -> dict[str, Any] | None:
    return read_json(run / RESULT) if (run / RESULT).exists() else None


def _ended(run: Path) -> str:
    result = _result(run)
    return f"AUC {result['auc']:.4f} ({result['train_seconds']:.0f} s)" if result else "diverged"
