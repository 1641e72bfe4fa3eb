"""Starts programs on several ranks, and ends them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None,
    reason="Horovod is not installed; docs/scaling.md says how",
)
SECONDS = 600  # after which what hangs is ended


class Ended(NamedTuple):
    """How horovodrun ended, and what all ranks said."""

    code: int
    out: str
    err: str

    def said(self) -> list[str]:
        """Sentences of the command line, without the launcher's mark of the rank."""
        lines = (line.partition(">:")[2] for line in self.err.splitlines())
        return [line for line in lines if line.startswith("merlin-cowclip")]


def on_ranks(ranks: int, command: Sequence[Any]) -> Ended:
    """Run a command on several ranks of this machine."""
    launcher = Path(sys.executable).with_name("horovodrun")
    # Without --gloo it imports TensorFlow once more, to see whether there is MPI.
    argv = [launcher, "--gloo", "-np", ranks, "-H", f"localhost:{ranks}", *command]
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    process = subprocess.Popen(
        [str(argument) for argument in argv],
        cwd=ROOT,
        env={**os.environ, **threads},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=SECONDS)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # horovodrun ends its ranks
        process.wait(30)
        raise
    return Ended(process.returncode, out, err)
