"""What the tests of runs that end early share: short runs, each start of one in a process."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.runs_alike import differences
from tests.warm import Ended, Program, WarmInterpreter

from .killing import ROOT, START

UPDATES, EVERY = 16, 3  # an epoch's; between two checkpoints
OPTIONS = ("--batch-size", 256, "--quiet")
OF_DEEP = ("--embedding-dim", 4, "--mlp", "8")  # which logistic regression does not have
SEVERAL = ("--epochs", 2, "--checkpoint-every", EVERY)
UNSAVED = ("--no-saved-model",)


@dataclass
class Runs:
    """Runs on one prepared folder, below one folder."""

    interpreter: WarmInterpreter
    data: Path
    home: Path
    mode: str = "eager"
    _numbers: Any = field(default_factory=itertools.count)

    def start(self, place: str, *arguments: Any) -> Program:
        """Start the command."""
        folder = self.home / f"said-{next(self._numbers)}"
        return self.interpreter.start(START, ROOT, place, self.mode, *arguments, folder=folder)

    def begin(self, run: Path, *options: Any, place: str = "") -> Ended:
        """`train`, to its end."""
        of_network = () if "lr" in options else OF_DEEP
        arguments = ("train", self.data, "--out", run, *OPTIONS, *of_network, *options)
        return self.start(place, *arguments).end()

    def go_on(self, run: Path, *options: Any, place: str = "") -> Ended:
        """`train --resume`, to its end."""
        return self.start(place, "train", "--resume", run, "--quiet", *options).end()

    def reference(self, name: str, *options: Any, place: str = "") -> Path:
        """A run that is never interrupted, with all its checkpoints."""
        run = self.home / name
        done = self.begin(run, *options, "--keep", 99, place=place)
        assert done.returncode == 0, done.stderr
        return run

    def stopped(self, *options: Any) -> Path:
        """A run that was stopped in its second epoch, to copy."""
        run = self.home / "stopped"
        done = self.begin(run, *options, place="in the second epoch@SIGINT")
        assert done.returncode == 130, done.stderr
        return run


def assert_same(run: Path, reference: Path, after: Any = "") -> None:
    """Every byte that matters."""
    found = differences(run, reference)
    assert not found, f"{after}: {found}"


def sentence(done: Ended) -> str:
    """The only line that a command that was ended has said."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("merlin-cowclip train: ")
    assert done.stdout == ""
    return lines[0].removeprefix("merlin-cowclip train: ")
