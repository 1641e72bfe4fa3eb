"""Make each mutant of the tables beside this file and run the tests that are said to kill it.

    python -m tests.mutants [--jobs N] [WORD ...]

Each WORD selects the mutants with it in their table, file or test. A mutant is one replaced text of
one source file. It survives, and the command fails, if none of its tests fail; the tests also have
to pass without it. Quick tests kill it, which `make test` runs, unless its `tier` is extended.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import tomllib

import tests.conftest  # noqa: F401 - the environment that NumPy and TensorFlow read
from tests.warm import WarmInterpreter

ROOT = Path(__file__).parents[2]
ROOTS = ("plugins", "models", "workflows")
RANKS = ROOT / ".venv-ranks" / "bin" / "python"  # has Horovod
PYTEST = """
import os, signal, sys
signal.alarm(600)
sys.path[:0] = [os.getcwd(), *os.environ["PYTHONPATH"].split(os.pathsep)]
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
OUTCOMES = {0: "survived", 1: "killed", -14: "killed: hung"}  # pytest's exit code; SIGALRM


class Mutant(NamedTuple):
    table: str
    file: str
    old: str
    new: str
    tests: list[str]
    tier: str = "quick"

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()!r} -> {self.new.strip()!r}"

    def apply(self, root: Path) -> str:
        """Write the mutant; return the text of the file before."""
        path = root / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise SystemExit(
                f"{self.table}: {self.file} has {text.count(self.old)} of {self.old!r}"
            )
        path.write_text(text.replace(self.old, self.new))
        return text


class Worker:
    """A copy of the tracked files, and an interpreter that has imported what takes long."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True)
        for name in listed.splitlines():
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self.environment = {
            "PYTHONPATH": os.pathsep.join(str(self.root / root) for root in ROOTS),
            "PYTHONDONTWRITEBYTECODE": "1",  # a mutant of the same second and size would be missed
        }
        self._interpreter = WarmInterpreter(self.root, self.environment)
        self._runs = folder / "runs"
        self._runs.mkdir()

    def run(self, tests: list[str], tier: str) -> tuple[int, str]:
        """Pytest's exit code and output for tests that are run until one fails."""
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        if tier == "quick":
            options += ["-m", "quick"]
        elif any(test.startswith("tests/ranks") for test in tests):
            ended = subprocess.run(
                [RANKS, "-m", "pytest", *options],
                cwd=self.root,
                env={**os.environ, **self.environment},
                capture_output=True,
                text=True,
            )
            return ended.returncode, ended.stdout
        folder = self._runs / str(len(list(self._runs.iterdir())))
        program = self._interpreter.start(PYTEST, *options, folder=folder)
        ended = program.end()
        return ended.returncode, ended.stdout

    def try_mutant(self, mutant: Mutant) -> tuple[int, str]:
        """The exit code and output of the mutant's tests."""
        before = mutant.apply(self.root)
        try:
            return self.run(mutant.tests, mutant.tier)
        finally:
            (self.root / mutant.file).write_text(before)


def read_tables() -> list[Mutant]:
    """The mutants of all tables."""
    return [
        Mutant(path.stem, **row)
        for path in sorted(Path(__file__).parent.glob("*.toml"))
        for row in tomllib.loads(path.read_text()).get("mutants", [])
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    mutants = [
        mutant
        for mutant in read_tables()
        if not arguments.words
        or any(word in f"{mutant.table} {mutant.file} {mutant.tests}" for word in arguments.words)
    ]
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(arguments.jobs) as pool:
        workers: SimpleQueue[Worker] = SimpleQueue()
        for number in range(arguments.jobs):
            (folder := Path(scratch) / str(number)).mkdir()
            workers.put(Worker(folder))

        def work(on: Mutant | tuple[list[str], str]) -> tuple[int, str]:
            worker = workers.get()
            try:
                return worker.try_mutant(on) if isinstance(on, Mutant) else worker.run(*on)
            finally:
                workers.put(worker)

        of_file: dict[tuple[str, str], set[str]] = {}
        for mutant in mutants:
            for test in mutant.tests:
                of_file.setdefault((test.partition("::")[0], mutant.tier), set()).add(test)
        clean = [(sorted(tests), tier) for (_, tier), tests in of_file.items()]
        for (tests, _), (code, output) in zip(clean, pool.map(work, clean), strict=True):
            if code:
                raise SystemExit(f"Without a mutant, these have to pass: {tests}\n{output}")
        for mutant, (code, output) in zip(mutants, pool.map(work, mutants), strict=True):
            outcome = OUTCOMES.get(code, f"error {code}")
            outcomes[f"{outcome} ({mutant.tier})"] += 1
            print(f"{outcome}: {mutant}", flush=True)
            if not outcome.startswith("killed"):
                print(output, flush=True)
    print(f"{len(mutants)} mutants:", ", ".join(f"{n} {name}" for name, n in outcomes.items()))
    return int(any(not name.startswith("killed") for name in outcomes))


if __name__ == "__main__":
    sys.exit(main())
