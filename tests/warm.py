"""Programs in processes of their own: forks of an interpreter that has imported TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Not Merlin, whose import starts threads, which a fork would lack.
_INTERPRETER = """
import gc, json, os, signal, sys
import dask.dataframe, distributed, numba.cuda, sklearn.metrics, tensorflow

gc.freeze()
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if not pid:
        signal.alarm(300)  # ends what hangs
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT), number)
        sys.argv = ["-c", *job["arguments"]]
        exec(job["program"], globals())
        sys.exit()
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """How a program ended: its exit code (negative: the signal that killed it), what it wrote."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Program:
    """One that runs."""

    pid: int
    interpreter: WarmInterpreter
    folder: Path

    def end(self) -> Ended:
        """Wait for its end."""
        code = self.interpreter.number()
        return Ended(code, *((self.folder / name).read_text() for name in ("out", "err")))


class WarmInterpreter:
    """Starts programs, one at a time, in `folder` and with `environment` besides this one's."""

    def __init__(
        self, folder: Path | None = None, environment: dict[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _INTERPRETER],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, program: str, *arguments: Any, folder: Path) -> Program:
        """Start a program with `sys.argv[1:]`; its output goes to the new `folder`."""
        folder.mkdir()
        files = {name: str(folder / name) for name in ("out", "err")}
        job = {"program": program, "arguments": [str(a) for a in arguments], **files}
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(job)}\n")
        self._process.stdin.flush()
        return Program(self.number(), self, folder)

    def number(self) -> int:
        """The next number that it prints: a program's process, or its exit code."""
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End it, once its last program has ended."""
        self._process.communicate()
