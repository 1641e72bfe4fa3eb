"""How ranks end alike: between steps they tell each other who was asked to stop, or has failed.

A signal comes to one rank, a disk is full on another. What one alone followed would leave the
others waiting, so all follow what was told at the last meeting. It costs a millisecond, so there is
one about every half second, after as many steps on all ranks.
"""

from __future__ import annotations

import time

from merlin_cowclip.plugins.distributed.horovod import Ranks
from merlin_cowclip.workflows.training.ranks import said_by_all
from merlin_cowclip.workflows.training.stopping import Stopping

SECONDS = 0.5  # between two meetings, about
_MOST = 1000  # steps


class Meeting:
    """Of the ranks of a run; one process alone meets itself, after every step.

    Args:
        ranks: this process among them.
        stopping: what this rank is asked.
    """

    def __init__(self, ranks: Ranks, stopping: Stopping) -> None:
        self._ranks = ranks
        self._stopping = stopping
        self._left = 1  # calls until the next one
        self._calls = 0
        self._since = time.monotonic()

    def hold(self, *, is_due: bool = False, now: bool = False) -> bool:
        """After a step, if it is time: whether something is due, as the first rank says.

        Afterwards `stopping` says the same on all ranks, wherever they were asked.

        Args:
            is_due: what this rank says.
            now: do not wait until it is time, nor at the next call, when something else begins.

        Raises:
            AgreedError: a rank has failed.
        """
        if self._ranks.size == 1:
            return is_due
        self._left, self._calls = self._left - 1, self._calls + 1
        if self._left > 0 and not now:
            return False
        seconds = (time.monotonic() - self._since) / self._calls
        mine = {
            "number": self._stopping.number,
            "out_of_time": self._stopping.out_of_time,
            "due": is_due,
            "seconds": seconds,
        }
        said = said_by_all(mine)
        numbers = [one["number"] for one in said if one["number"] is not None]
        self._stopping.agree(next(iter(numbers), None), any(one["out_of_time"] for one in said))
        slowest = max(one["seconds"] for one in said)
        # After `now` come calls of another kind, which may take longer.
        self._left = 1 if now else max(1, min(_MOST, int(SECONDS / max(slowest, 1e-9))))
        self._calls, self._since = 0, time.monotonic()
        return bool(said[0]["due"])
