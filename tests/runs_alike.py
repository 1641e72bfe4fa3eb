"""Whether two runs are the same in every byte that matters; times and places are no matter."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.training.checkpoint import Checkpoints
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.train import resume, train
from merlin_cowclip.workflows.training.trainer import Trainer

TIMES = {"seconds", "samples_per_second", "train_seconds"}
PLACES = {"manifest", "config"}  # of the result; of the configuration only what is trained


def train_in_two(
    data: Any, config: TrainConfig, out: Path, step: int, look: Callable[[Trainer], Any]
) -> None:
    """Train a run that is interrupted after an update, when `look` sees its trainer, and resume."""
    see = Trainer.see

    def interrupted(trainer: Trainer, loss: Any) -> None:
        see(trainer, loss)
        if trainer.step == step:
            look(trainer)
            trainer._save()
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "see", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(data, config, out, progress=False)
    assert Checkpoints(out / "checkpoints").steps() == [step]
    resume(out, progress=False)


def differences(run: Path, reference: Path) -> list[str]:
    """What differs between two runs, of which neither need be finished.

    Of every checkpoint that both have: all tensors (weights, moments, learning rates, sums of
    statistics, the mean loss), byte by byte, and what was measured so far. Of finished
    runs also the CSV files, the scalars for TensorBoard, `result.json`, and that the last
    checkpoints are of the same step.
    """
    found = list(_in_checkpoints(run, reference))
    if all((one / "result.json").exists() for one in (run, reference)):
        last = [_checkpoints(one).steps()[-1:] for one in (run, reference)]
        if last[0] != last[1]:
            found.append(f"the last checkpoints are of {last[0]} and {last[1]}")
        for what, read in FINISHED.items():
            ours, theirs = read(run), read(reference)
            if ours != theirs:
                found.append(f"{what}: {_first_difference(ours, theirs)}")
    return found


def lines(name: str) -> Callable[[Path], list[dict[str, str]]]:
    """What reads the lines of a CSV file of a run, to the letter."""

    def read(run: Path) -> list[dict[str, str]]:
        with (run / name).open(newline="") as file:
            return [_without(row, TIMES) for row in csv.DictReader(file)]

    return read


def scalars(run: Path) -> list[tuple[int, str, bytes]]:
    """All that TensorBoard shows: step, tag and the bytes of the value.

    After a kill some updates are in two files, with the same values; the first may end in a record
    of which a part is missing.
    """
    found = set()
    for path in (run / "logs").iterdir():
        with contextlib.suppress(tf.errors.DataLossError):
            for event in tf.compat.v1.train.summary_iterator(str(path)):
                for value in event.summary.value:
                    if value.tag.removeprefix("all/") not in TIMES:
                        content = tf.make_ndarray(value.tensor).tobytes()
                        found.add((event.step, value.tag, content))
    return sorted(found)


def result(run: Path) -> dict[str, Any]:
    """`result.json`."""
    content = json.loads((run / "result.json").read_text())
    content["epochs"] = [_without(epoch, TIMES) for epoch in content["epochs"]]
    content["files"] = sorted(content["manifest"])
    content["trained"] = content["config"]["identity"], content["config"]["data_sha256"]
    return _without(content, TIMES | PLACES)


FINISHED: dict[str, Callable[[Path], Any]] = {
    "metrics.csv": lines("metrics.csv"),
    "fields.csv": lines("fields.csv"),
    "norms.csv": lines("norms.csv"),
    "TensorBoard's scalars": scalars,
    "result.json": result,
}


def _in_checkpoints(run: Path, reference: Path) -> Iterator[str]:
    ours, theirs = _checkpoints(run), _checkpoints(reference)
    for step in sorted(set(ours.steps()) & set(theirs.steps())):
        one, other = ours.at(step), theirs.at(step)
        a, b = (_tensors(checkpoint.path) for checkpoint in (one, other))
        if a.keys() != b.keys():
            yield f"checkpoint {step}: other tensors"
            continue
        if _evaluated(one) != _evaluated(other):  # taken at an epoch's end, before and after
            continue
        for name in sorted(a):
            if a[name].tobytes() != b[name].tobytes():
                yield f"checkpoint {step}: {name}"
        for key in ("epochs", "own"):
            values = [_plain(c.progress[key]) for c in (one, other)]
            if values[0] != values[1]:
                yield f"checkpoint {step}: {key}"


def _tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    found = {}
    for index in sorted(checkpoint.glob("*.index")):
        reader = tf.train.load_checkpoint(str(index.with_suffix("")))
        names = set(reader.get_variable_to_shape_map()) - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
        found |= {f"{index.stem}/{name}": np.asarray(reader.get_tensor(name)) for name in names}
    return found


def _evaluated(checkpoint: Any) -> int:
    return len(checkpoint.progress["epochs"])


def _checkpoints(run: Path) -> Checkpoints:
    return Checkpoints(run / "checkpoints")


def _plain(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_without(one, TIMES) for one in value]
    return value


def _without(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in names}


def _first_difference(ours: Any, theirs: Any) -> str:
    if isinstance(ours, dict):
        return str({key: (ours[key], theirs.get(key)) for key in ours if ours[key] != theirs[key]})
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=False) if a != b]
    return f"{len(ours)} and {len(theirs)} items; {pairs[:1]}"
