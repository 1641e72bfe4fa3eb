"""The command line in a process that kills or stops itself at a chosen place of a tune."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

START = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.workflows.study.processes import main
sys.exit(main(*sys.argv[2:]))
"""
ROOT = Path(__file__).parents[3]


def main(place: str, *arguments: str) -> int:
    """The command with these arguments.

    Args:
        place: "trial:N@SIGKILL", once the N-th trial of this process has measured an epoch; the
            same of "repeat:N", once its network has made an update; "" for nowhere.
        arguments: of the command.
    """
    from merlin_cowclip.plugins._stack import tf
    from merlin_cowclip.workflows.commands.main import main as command
    from merlin_cowclip.workflows.study import repeats, search

    warnings.filterwarnings("ignore", "Even though the `tf.config.exp")
    tf.config.run_functions_eagerly(True)
    name, _, how = place.partition("@")
    kind, _, number = name.partition(":")
    seen: list[Any] = []

    def end(what: Any) -> None:
        if not any(what is one for one in seen):
            seen.append(what)
            if len(seen) == int(number):
                os.kill(os.getpid(), signal.Signals[how])

    if kind == "trial":
        measured = search.Trial.measured

        def and_end(trial: Any, epoch: Any) -> bool:
            hopeless = measured(trial, epoch)
            end(trial)
            return hopeless

        search.Trial.measured = and_end
    elif kind == "repeat":
        stock = repeats.epochs_of

        def ending(rows: Any, config: Any, *rest: Any) -> Any:
            for epoch in stock(rows, config, *rest):
                end(config)
                yield epoch

        repeats.epochs_of = ending
    return command(arguments)
