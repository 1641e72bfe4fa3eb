"""What the tests of runs that end early share: short runs, each start of one in a process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.runs_alike import differences
from tests.warm import Ended, WarmInterpreter

from .killing import ROOT, START

UPDATES, EVERY = 16, 3  # an epoch's; between two checkpoints
NETWORK = ("--batch-size", 256, "--embedding-dim", 4, "--mlp", "8")
OPTIONS = (
    *NETWORK,
    "--rule",
    "cowclip",
    "--epochs",
    2,
    "--checkpoint-every",
    EVERY,
    "--no-saved-model",
    "--quiet",
)


@dataclass
class Runs:
    """Runs on one prepared folder, below one folder."""

    interpreter: WarmInterpreter
    data: Path
    home: Path
    _numbers: Any = field(default_factory=itertools.count)

    def command(self, *arguments: Any, place: str = "") -> Ended:
        """The command, to its end; see `killing` for the places."""
        folder = self.home / f"said-{next(self._numbers)}"
        return self.interpreter.start(START, ROOT, place, *arguments, folder=folder).end()

    def begin(self, run: Path, *options: Any, place: str = "") -> Ended:
        """`train`, to its end."""
        return self.command("train", self.data, "--out", run, *OPTIONS, *options, place=place)

    def go_on(self, run: Path, *options: Any, place: str = "") -> Ended:
        """`train --resume`, to its end."""
        return self.command("train", "--resume", run, "--quiet", *options, place=place)

    def reference(self, name: str, *options: Any) -> Path:
        """A run that is never interrupted, with all its checkpoints."""
        run = self.home / name
        done = self.begin(run, *options, "--keep", 99)
        assert done.returncode == 0, done.stderr
        return run


def assert_same(run: Path, reference: Path, after: Any = "") -> None:
    """Every byte that matters."""
    found = differences(run, reference)
    assert not found, f"{after}: {found}"


def assert_goes_on(runs: Runs, run: Path, reference: Path, *options: Any) -> None:
    """To its end, as if it had not been interrupted."""
    done = runs.go_on(run, *options)
    assert done.returncode == 0, done.stderr
    assert_same(run, reference)


def sentence(done: Ended) -> str:
    """The only line that a command that was ended has said."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("merlin-cowclip train: ")
    assert done.stdout == ""
    return lines[0].removeprefix("merlin-cowclip train: ")
