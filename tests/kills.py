"""Runs that are killed or stopped at a chosen place, and what differs between two runs.

`python -m tests.kills PLACES ARGUMENTS…` is the command line that ends there.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import itertools
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.training import loader, trainer
from merlin_cowclip.workflows.training.checkpoint import Checkpoints
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.train import resume, train
from tests.warm import Ended, WarmInterpreter

START = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.kills import main, shorten
shorten()
sys.exit(main(*sys.argv[2:]))
"""
ROOT = Path(__file__).parents[1]
UPDATES = 16  # of an epoch of `OPTIONS` on 4,000 rows
OPTIONS = (
    *("--batch-size", 256, "--embedding-dim", 4, "--mlp", "8", "--rule", "cowclip", "--epochs", 2),
    *("--checkpoint-every", 3, "--no-saved-model", "--quiet"),
)
NOT_COMPARED = {"seconds", "samples_per_second", "train_seconds", "manifest", "config"}


# The command that ends itself


def main(places: str, *arguments: str) -> int:
    """Run the command line with these arguments, and end it at a place.

    Args:
        places: "trainer.Trainer.see:5@SIGINT" sends SIGINT at the fifth call of `Trainer.see`, in
            the first call without ":5", SIGKILL without "@SIGINT". "@0.5" kills half a second
            after that call. Several are separated by spaces; "1/" before them is for rank 1 only.
        arguments: of the command.
    """
    from merlin_cowclip.workflows.commands.main import main as command

    rank, _, places = places.rpartition("/")
    if rank in ("", os.environ.get("HOROVOD_RANK")):
        for place in places.split():
            _install(place)
    return command(arguments)


def _install(place: str) -> None:
    path, _, how = place.partition("@")
    path, _, number = path.partition(":")
    module, *names, name = path.split(".")
    owner = importlib.import_module(f"merlin_cowclip.workflows.training.{module}")
    for attribute in names:
        owner = getattr(owner, attribute)
    stock, calls = getattr(owner, name), itertools.count(1)

    def instead(*arguments: Any, **options: Any) -> Any:
        if next(calls) == int(number or 1):
            _end(how or "SIGKILL")
        return stock(*arguments, **options)

    setattr(owner, name, instead)


def _end(how: str) -> None:
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
    else:
        signal.setitimer(signal.ITIMER_REAL, float(how))  # SIGALRM, which nothing handles


def shorten() -> None:
    """Let runs be short: eager steps (as compiled in `make kills`), small windows and batches."""
    warnings.filterwarnings("ignore", "Even though the `tf.config.exp")
    loader.WINDOW_ROWS, trainer.EVALUATION_BATCH, trainer.LOG_EVERY = 320, 128, 4
    tf.config.run_functions_eagerly("COWCLIP_KILLS" not in os.environ)


@dataclass
class Runs:
    """Runs on one prepared folder; each start is a process of its own, and lasts to its end."""

    interpreter: WarmInterpreter
    data: Path
    home: Path
    _numbers: Any = field(default_factory=itertools.count)

    def command(self, *arguments: Any, place: str = "") -> Ended:
        """The command; see `main` for the places."""
        folder = self.home / f"output-{next(self._numbers)}"
        return self.interpreter.start(START, ROOT, place, *arguments, folder=folder).end()

    def start(self, run: Path, *options: Any, place: str = "") -> Ended:
        """`train` a new run, or `train --resume` one that is there."""
        if run.exists():
            return self.command("train", "--resume", run, "--quiet", *options, place=place)
        return self.command("train", self.data, "--out", run, *OPTIONS, *options, place=place)

    def finish(self, name: str, *options: Any) -> Path:
        """A run that is trained, or resumed, to its end."""
        run = self.home / name
        ended = self.start(run, *options)
        assert ended.returncode == 0, ended.stderr
        return run


def train_in_two(
    data: Any, config: TrainConfig, out: Path, step: int, look: Callable[[Any], Any]
) -> None:
    """Train a run that is interrupted after an update, when `look` sees its trainer, and resume."""
    see = trainer.Trainer.see

    def interrupted(self: trainer.Trainer, loss: Any) -> None:
        see(self, loss)
        if self.step == step:
            look(self)
            self._save()
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.Trainer, "see", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(data, config, out, progress=False)
    assert Checkpoints(out / "checkpoints").steps()[-1] == step
    resume(out, progress=False)


# What differs


def differences(run: Path, reference: Path) -> list[str]:
    """What differs between two runs, of which neither need be finished, but for times and paths.

    Of every checkpoint that both have: all tensors (weights, moments, learning rates, sums of
    statistics, the mean loss), byte by byte, and what was measured so far. Of finished runs also
    the last checkpoint's step, the CSV files, TensorBoard's scalars and `result.json`.
    """
    both = run, reference
    steps = [Checkpoints(one / "checkpoints").steps() for one in both]
    contents = [_checkpoints(one, set(steps[0]) & set(steps[1])) for one in both]
    if all((one / "result.json").exists() for one in both):
        for one, of_run, own_steps in zip(both, contents, steps, strict=True):
            of_run |= {"last step": own_steps[-1:], **_results(one)}
    ours, theirs = contents
    return [
        f"{name}: {ours.get(name)!r:.200} instead of {theirs.get(name)!r:.200}"
        for name in sorted(ours | theirs)
        if ours.get(name) != theirs.get(name)
    ]


def _checkpoints(run: Path, steps: Iterable[int]) -> dict[str, Any]:
    contents = {}
    for checkpoint in map(Checkpoints(run / "checkpoints").at, steps):
        name = checkpoint.path.name
        for key in ("epochs", "own"):
            contents[f"{name}/{key}"] = _compared(checkpoint.progress[key])
        for index in checkpoint.path.glob("*.index"):
            reader = tf.train.load_checkpoint(str(index.with_suffix("")))
            names = reader.get_variable_to_shape_map().keys() - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
            for tensor in names:
                value = np.asarray(reader.get_tensor(tensor)).tobytes()
                contents[f"{name}/{index.stem}/{tensor}"] = value
    return contents


def _results(run: Path) -> dict[str, Any]:
    contents: dict[str, Any] = {"TensorBoard's scalars": _scalars(run)}
    for name in ("metrics.csv", "fields.csv", "norms.csv"):
        with (run / name).open(newline="") as file:
            contents[name] = _compared(list(csv.DictReader(file)))
    result = json.loads((run / "result.json").read_text())
    result["files"] = sorted(result["manifest"])
    result["trained"] = [result["config"][name] for name in ("identity", "data_sha256")]
    return {**contents, "result.json": _compared(result)}


def _scalars(run: Path) -> list[tuple[int, str, bytes]]:
    """Steps, tags and values. After a kill the last record of a file may be cut off."""
    scalars = set()
    for path in (run / "logs").iterdir():
        with contextlib.suppress(tf.errors.DataLossError):
            for event in tf.compat.v1.train.summary_iterator(str(path)):
                for value in event.summary.value:
                    if value.tag.removeprefix("all/") not in NOT_COMPARED:
                        content = tf.make_ndarray(value.tensor).tobytes()
                        scalars.add((event.step, value.tag, content))
    return sorted(scalars)


def _compared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _compared(of) for key, of in value.items() if key not in NOT_COMPARED}
    return [_compared(one) for one in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
