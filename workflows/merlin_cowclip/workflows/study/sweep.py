# SPDX-License-Identifier: Apache-2.0
"""Runs of many configurations: in one folder, each once, resumed by the same call.

`OUT/sweep.json` has the data and the runs of the last call. `OUT/runs/` has the runs, each named by
its configuration, so that calls share them. A run is locked while it is trained: several processes
may share a folder.
"""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import BusyError, NotFiniteError, Stopped, UserError
from merlin_cowclip.workflows.folders import (
    LOCK,
    locked,
    make_once,
    read_json,
    refuse_pattern,
    remove,
    write_json,
)
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training.configuration import (
    CheckpointConfig,
    TrainConfig,
    few_steps,
    option_text,
)
from merlin_cowclip.workflows.training.runs import (
    CHECKPOINTS,
    CONFIG,
    RESULT,
    columns_of,
    identity_of,
)

FORMAT_VERSION = 3
RECORD, RUNS = "sweep.json", "runs"
_FIRST = ("data", "model", "rule", "batch_size")  # options that name a run before all others
DIVERGED = "diverged.json"  # instead of the result, of a run whose loss or weights were not finite


def sweep(
    data: PreparedData,
    configs: Sequence[TrainConfig],
    out: str | Path,
    *,
    command: str = "",
    progress: bool = True,
) -> None:
    """Train each configuration that is not there yet.

    Run it again to resume it. Several processes may share one folder, such as one for each GPU.

    Args:
      data: the prepared folder, with a validation or a test part.
      configs: what to train; they are trained in float32.
      out: the folder of the runs, also of other sweeps on the same data; made if need be.
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
    if not configs:
        raise UserError("a sweep needs at least one configuration. Received: none")
    if not data.test_files:
        data.require("valid")
    with quiet_imports():
        from merlin_cowclip.workflows.training.train import check_trainable
    for config in by_name.values():
        check_trainable(data, config)
    runs = [{"run": one.identity[:16], "config": one.to_dict()} for one in configs]
    _write_record(out, data, {"command": command, "runs": runs})
    differ, _ = differing([{**config.to_dict(), "seed": None} for config in configs])
    if few := few_steps(data.rows["train"], max(config.batch_size for config in configs)):
        say(f"Warning: {few}", flush=True)
    todo = {out / RUNS / run: config for run, config in by_name.items()}
    say(f"{sum(map(_is_done, todo))} of {len(todo)} runs have ended. Training.", flush=True)
    try:
        while todo := {run: config for run, config in todo.items() if not _is_done(run)}:
            for run, config in todo.items():
                try:
                    with locked(run.with_name(f".{run.name}.lock"), wait=False):
                        if _is_done(run):
                            continue
                        _train(run, config, data)
                except BusyError:
                    continue
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


def _train(run: Path, config: TrainConfig, data: PreparedData) -> None:
    """Train a run, or resume it; its checkpoints are removed once it ends."""
    from merlin_cowclip.workflows.training.train import resume, train

    try:
        if (run / CONFIG).exists():
            resume(run, data=data.folders, progress=False)
        else:
            train(data, config, run, checkpointing=CheckpointConfig(keep=1), progress=False)
    except NotFiniteError as error:
        run.mkdir(exist_ok=True)
        write_json(run / DIVERGED, {"config": config.to_dict(), "message": str(error)})
    remove(run / CHECKPOINTS)


def _write_record(out: Path, data: PreparedData, runs: Mapping[str, Any]) -> None:
    """Make the folder of the runs, or find it to be of these data, and record the runs."""
    refuse_pattern(out, "sweep")
    record = {
        "format": FORMAT_VERSION,
        "data_sha256": identity_of(data),
        **columns_of(data),
        "cardinalities": data.cardinalities,
    }
    content = {**record, "data": data.folders, **runs}
    make_once(out, RECORD, content, [RUNS])
    earlier = read_json(out / RECORD) if (out / RECORD).exists() else {}
    if {**earlier, **record} != earlier:
        of = f"a sweep of {' '.join(earlier['data'])} as it was" if earlier else "neither"
        raise UserError(
            f"the output folder must be new, or a sweep of {data.path}. {out} is {of}. Name "
            "another folder"
        )
    with locked(out / LOCK):
        write_json(out / RECORD, content)


def _ended(run: Path) -> str:
    result = read_json(run / RESULT) if (run / RESULT).exists() else None
    auc = result and (result["auc"] or result["epochs"][-1]["valid_auc"])
    return f"AUC {auc:.4f} ({result['train_seconds']:.0f} s)" if result else "diverged"


def differing(options: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """The options that tell runs apart, and those that differ but are determined by them."""
    names: list[str] = []
    implied: list[str] = []
    for name in dict.fromkeys([*_FIRST, *itertools.chain.from_iterable(options)]):
        if len({key_of(of, [name]) for of in options}) > 1:
            kinds = [len({key_of(of, by) for of in options}) for by in (names, [*names, name])]
            (names if kinds[1] > kinds[0] else implied).append(name)
    return names, implied


def shown(value: Any) -> str:
    """A value of an option, for a person to read; fractions with four significant digits."""
    if isinstance(value, Mapping):
        return option_text(value) if "name" in value else str(dict(value))
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str("none" if value is None else value)


def key_of(options: Mapping[str, Any], names: Iterable[str]) -> str:
    """Equal for equal options of these names."""
    return json.dumps([options.get(name) for name in names], sort_keys=True)
