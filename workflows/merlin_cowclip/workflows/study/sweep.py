# SPDX-License-Identifier: Apache-2.0
"""Runs of many configurations: in one folder, each once, resumed by the same call.

`OUT/sweep.json` describes the data of all runs, `OUT/grids/NAME.json` which runs a sweep takes, and
`OUT/runs/` holds them, each named by its configuration, so that sweeps share them.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import check_input_names
from merlin_cowclip.workflows.errors import Stopped, UserError, check_whole
from merlin_cowclip.workflows.folders import all_or_nothing, read_json, refuse_pattern, write_json
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.study.comparison import differing, shown
from merlin_cowclip.workflows.study.steps import few_steps
from merlin_cowclip.workflows.study.workers import Task, is_done, run_all
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.locks import folder_lock
from merlin_cowclip.workflows.training.runs import RESULT, columns_of, identity_of

FORMAT_VERSION = 2
RECORD, GRIDS, RUNS = "sweep.json", "grids", "runs"


def sweep(
    data: PreparedData,
    configs: Sequence[TrainConfig],
    out: str | Path,
    *,
    name: str = "sweep",
    jobs: int = 1,
    command: str = "",
    progress: bool = True,
) -> None:
    """Train each configuration that is not there yet.

    Run it again to resume it. Several processes may share one folder.

    Args:
      data: the prepared folder, with a validation or a test part.
      configs: what to train; they are trained in float32.
      out: the folder of the runs, of this sweep and of others on the same data; made if need be.
      name: of this sweep among them.
      jobs: runs trained at a time, a process each.
      command: what trains them again, for the report.
      progress: whether to print how each run ended.

    Raises:
      UserError: something cannot be trained, found before any work; or `out` is of other data.
      Stopped: it was interrupted; all is saved.
    """
    out = Path(out)
    say: Callable[..., None] = print if progress else lambda *_, **__: None
    check_whole("jobs", jobs, 1)
    by_name: dict[str, TrainConfig] = {}
    for config in configs:
        by_name.setdefault(config.identity[:16], config)
    _check(data, by_name)
    _make_folder(out, data)
    runs = [{"run": one.identity[:16], "config": one.to_dict()} for one in configs]
    with folder_lock(out):  # what two sweeps would write at the same time
        for place in (GRIDS, RUNS):
            (out / place).mkdir(exist_ok=True)
        write_json(out / GRIDS / f"{name}.json", {"command": command, "runs": runs})
    differ, _ = differing([{**config.to_dict(), "seed": None} for config in configs])
    tasks = []
    for run, config in by_name.items():
        values = [f"{one} {shown(getattr(config, one))}" for one in differ]
        title = ", ".join([*values, f"seed {config.seed}"])
        tasks.append(Task(title, out / RUNS / run, data.path, config.to_dict(), jobs))
    todo = [task for task in tasks if not is_done(task.run)]
    done = len(tasks) - len(todo)
    if few := few_steps(data.rows["train"], max(config.batch_size for config in configs)):
        say(f"Warning: {few}", flush=True)
    try:
        for task in run_all(todo, jobs):
            done += 1
            say(f"[{done}/{len(tasks)}] {task.name}: {_ended(task.run)}", flush=True)
    except KeyboardInterrupt as error:
        raise Stopped(
            f"interrupted after {done} of {len(tasks)} runs, which are kept in {out}; the runs in "
            "progress are saved. To resume, give the same command again",
            error.number if isinstance(error, Stopped) else signal.SIGINT,
        ) from None


def _check(data: PreparedData, configs: dict[str, TrainConfig]) -> None:
    """Refuse what cannot be trained or measured, before any of it is."""
    if not configs:
        raise UserError("a sweep needs at least one configuration. Received: none")
    if not data.test_files and not data.valid_files:
        raise UserError(f"{data.path} has no validation or test part. Name data that has one")
    check_input_names(data.spec)
    with quiet_imports():
        from merlin_cowclip.workflows.training.train import check_trainable

    for config in configs.values():
        check_trainable(data, config)


def _make_folder(out: Path, data: PreparedData) -> None:
    """Make the folder of the runs, or find it to be of these data."""
    refuse_pattern(out, "sweep")
    record = {
        "format": FORMAT_VERSION,
        "data_sha256": identity_of(data),
        **columns_of(data),
        "cardinalities": data.cardinalities,
    }
    with folder_lock(out.absolute().parent):
        if not out.exists():
            with all_or_nothing(out) as folder:
                write_json(folder / RECORD, {**record, "data": str(data.path.resolve())})
    found = read_json(out / RECORD) if (out / RECORD).exists() else {}
    if {**found, **record} != found:
        of = f"a sweep of {found['data']} as it was" if found else "neither"
        raise UserError(
            f"{out} is {of}. The output folder must be new, or a sweep of {data.path}. Name "
            "another folder"
        )


def _ended(run: Path) -> str:
    result = read_json(run / RESULT) if (run / RESULT).exists() else None
    auc = result and (result["auc"] or result["epochs"][-1]["valid_auc"])
    return f"AUC {auc:.4f} ({result['train_seconds']:.0f} s)" if result else "diverged"
