# SPDX-License-Identifier: Apache-2.0
"""Runs of many configurations: in one folder, each once, resumed by the same call.

`OUT/sweep.json` describes the data of all runs, `OUT/grids/NAME.json` which runs a sweep takes, and
`OUT/runs/` holds them, each named by its configuration, so that sweeps share them. A run is locked
while it is trained: several processes may share a folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import check_input_names
from merlin_cowclip.workflows.errors import NotFiniteError, Stopped, UserError
from merlin_cowclip.workflows.folders import (
    all_or_nothing,
    read_json,
    refuse_pattern,
    remove,
    write_json,
)
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.study.comparison import differing, shown
from merlin_cowclip.workflows.study.steps import few_steps
from merlin_cowclip.workflows.training.configuration import CheckpointConfig, TrainConfig
from merlin_cowclip.workflows.training.locks import LOCK, folder_lock
from merlin_cowclip.workflows.training.runs import (
    CHECKPOINTS,
    CONFIG,
    RESULT,
    columns_of,
    identity_of,
)

FORMAT_VERSION = 2
RECORD, GRIDS, RUNS = "sweep.json", "grids", "runs"
DIVERGED = "diverged.json"  # instead of the result, of a run whose loss or weights were not finite


def sweep(
    data: PreparedData,
    configs: Sequence[TrainConfig],
    out: str | Path,
    *,
    name: str = "sweep",
    command: str = "",
    progress: bool = True,
) -> None:
    """Train each configuration that is not there yet.

    Run it again to resume it. Several processes may share one folder, such as one for each GPU.

    Args:
      data: the prepared folder, with a validation or a test part.
      configs: what to train; they are trained in float32.
      out: the folder of the runs, of this sweep and of others on the same data; made if need be.
      name: of this sweep among them.
      command: what trains them again, for the report.
      progress: whether to print how each run ended.

    Raises:
      UserError: something cannot be trained, found before any work; or `out` is of other data.
      Stopped: it was interrupted; all is saved.
    """
    out = Path(out)
    say: Callable[..., None] = print if progress else lambda *_, **__: None
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
    if few := few_steps(data.rows["train"], max(config.batch_size for config in configs)):
        say(f"Warning: {few}", flush=True)
    todo = {out / RUNS / run: config for run, config in by_name.items()}
    say(f"{sum(map(_is_done, todo))} of {len(todo)} runs have ended. Training.", flush=True)
    try:
        while todo := {run: config for run, config in todo.items() if not _is_done(run)}:
            for run, config in todo.items():
                with _alone_with(run) as is_alone:
                    if not is_alone or _is_done(run):
                        continue
                    _train(run, config, data)
                done = sum(_is_done(out / RUNS / one) for one in by_name)
                values = [f"{one} {shown(getattr(config, one))}" for one in differ]
                what = ", ".join([*values, f"seed {config.seed}"])
                say(f"[{done}/{len(by_name)}] {what}: {_ended(run)}", flush=True)
            time.sleep(0.5)  # another process trains the rest
    except KeyboardInterrupt as error:
        raise Stopped(
            f"interrupted; runs that have ended are kept in {out}, and the one in progress is "
            "saved. To resume, give the same command again",
            error.number if isinstance(error, Stopped) else signal.SIGINT,
        ) from None


def _is_done(run: Path) -> bool:
    """Whether it ended, with a result or without."""
    return any((run / name).exists() for name in (RESULT, DIVERGED))


@contextlib.contextmanager
def _alone_with(run: Path) -> Iterator[bool]:
    """Whether no other process has it; death gives it back."""
    with (run.parent / LOCK).open("ab") as file:
        try:  # a byte for each run
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, zlib.crc32(run.name.encode()))
        except OSError:
            yield False
        else:
            yield True


def _train(run: Path, config: TrainConfig, data: PreparedData) -> None:
    """Train a run, or resume it; its checkpoints are removed once it ends."""
    from merlin_cowclip.workflows.training.train import resume, train

    try:
        if (run / CONFIG).exists():
            resume(run, data=data.path, progress=False)
        else:
            train(data, config, run, checkpointing=CheckpointConfig(keep=1), progress=False)
    except NotFiniteError as error:
        run.mkdir(exist_ok=True)
        write_json(run / DIVERGED, {"config": config.to_dict(), "message": str(error)})
    remove(run / CHECKPOINTS)


def _check(data: PreparedData, configs: dict[str, TrainConfig]) -> None:
    """Refuse what cannot be trained or measured, before any of it is."""
    if not configs:
        raise UserError("a sweep needs at least one configuration. Received: none")
    if not data.test_files:
        data.require("valid")
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
            f"the output folder must be new, or a sweep of {data.path}. {out} is {of}. Name "
            "another folder"
        )


def _ended(run: Path) -> str:
    result = read_json(run / RESULT) if (run / RESULT).exists() else None
    auc = result and (result["auc"] or result["epochs"][-1]["valid_auc"])
    return f"AUC {auc:.4f} ({result['train_seconds']:.0f} s)" if result else "diverged"
