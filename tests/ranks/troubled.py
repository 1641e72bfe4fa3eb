"""The command line on ranks of which one is killed before an update."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any


def main(rank: str, update: str, *arguments: str) -> int:
    """Run the command with these arguments; this rank is killed before this update."""
    from merlin_cowclip.workflows.commands.main import main as command

    if os.environ["HOROVOD_RANK"] == rank:
        from merlin_cowclip.workflows.training.trainer import Trainer

        see = Trainer.see

        def see_and_die(trainer: Trainer, loss: Any) -> None:
            if trainer.step == int(update):
                os.kill(os.getpid(), signal.SIGKILL)
            see(trainer, loss)

        Trainer.see = see_and_die  # type: ignore[method-assign]
    return command(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
