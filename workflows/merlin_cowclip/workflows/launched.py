"""Processes that a launcher has started together, as its environment tells without Horovod."""

from __future__ import annotations

import os
import signal
import time
from typing import NamedTuple, NoReturn

from merlin_cowclip.workflows.errors import UserError

_VARIABLES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # horovodrun's and one's own mpirun
)
PATIENCE = 20  # seconds for the first process to say its sentence


class Place(NamedTuple):
    """Which of several processes this is."""

    rank: int
    size: int


def launched() -> Place:
    """This process among those of horovodrun or mpirun; alone without them."""
    for rank, size in _VARIABLES:
        if rank in os.environ and size in os.environ:
            return Place(int(os.environ[rank]), int(os.environ[size]))
    return Place(0, 1)


def refuse_together(message: str) -> NoReturn:
    """Refuse what each process knows to be wrong: the first says it, the others wait for that.

    Raises:
        UserError: on the first process.
        SystemExit: with 2 on the others.
    """
    if launched().rank == 0:
        raise UserError(message)
    wait_for_the_first()
    raise SystemExit(2)


def wait_for_the_first() -> None:
    """Wait for the end of the first process, at which the launcher ends the others by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(PATIENCE)


def check_alone(command: str) -> None:
    """Refuse a command that several processes would do side by side, each all of it.

    Raises:
        UserError: it is one, as `refuse_together`.
    """
    if launched().size > 1:
        refuse_together(
            f"only train shares its work among several ranks. Received: {command} on "
            f"{launched().size}. Run it without horovodrun"
        )
