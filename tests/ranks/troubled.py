"""The command, on ranks of which one dies, hangs, or loses its data, at an update."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any


def main(what: str, rank: str, update: str, *arguments: str) -> int:
    """The command with these arguments.

    Args:
      what: "dies", "hangs", "hangs in writing", or a path of data that is removed.
      rank: where.
      update: before which it is looked after; 0 for before the ranks have told what they train;
        for "hangs in writing" after which.
      arguments: of the command.
    """
    from merlin_cowclip.workflows.commands.main import main as command

    if os.environ["HOROVOD_RANK"] == rank:
        from merlin_cowclip.workflows.training import checkpoint_files
        from merlin_cowclip.workflows.training import train as training
        from merlin_cowclip.workflows.training.watch import Watch

        see = Watch.see

        def trouble() -> None:
            if what == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "hangs":
                time.sleep(1000)
            elif what == "hangs in writing":
                checkpoint_files.write_tensors = lambda *_: time.sleep(1000)
            else:
                os.unlink(what)

        def troubled(watch: Watch, step: int, loss: Any) -> None:
            if step == int(update):
                trouble()
            see(watch, step, loss)

        if update == "0":
            training.check_alike = lambda record: trouble()  # type: ignore[assignment]
        Watch.see = troubled  # type: ignore[method-assign]
    return command(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
