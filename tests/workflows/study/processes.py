"""The command line in a process that ends itself in a trial of a tuning study."""

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
    """Run the command with these arguments.

    Args:
        place: as "3@SIGKILL", the signal to send once the third trial has measured an epoch; ""
            for none.
        arguments: of the command.
    """
    from merlin_cowclip.plugins._tensorflow import tf
    from merlin_cowclip.workflows.commands.main import main as command
    from merlin_cowclip.workflows.study import tune

    warnings.filterwarnings("ignore", "Even though the `tf.config.exp")
    tf.config.run_functions_eagerly(True)
    tune._HEARTBEAT, tune._GRACE = 1, 5
    number, _, how = place.partition("@")
    epochs, begun = tune.trial_epochs, []

    def and_end(*trial: Any) -> Any:
        begun.append(trial)
        for epoch in epochs(*trial):
            yield epoch
            if len(begun) == int(number):
                os.kill(os.getpid(), signal.Signals[how])

    if place:
        tune.trial_epochs = and_end
    return command(arguments)
