"""Ranks that wait for one that hangs end, and say which.

Horovod waits for ever: a rank whose disk does not answer, or whose process is stopped, would hold
all the others. So a thread on each rank tells the others every few seconds how far it is. A rank
that has not moved for long, behind others that have not moved either, hangs; ranks that are all at
the same place are at work, however long it takes; one that reads or writes what only it has to
(`at_work`) may take as long as it goes on with it; and where no answer comes at all, a process does
not run.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np

from merlin_cowclip.plugins.joining import Ranks, gatherer_beside, times_gathered
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.at_work import UNKNOWN, Signs, is_at_work
from merlin_cowclip.workflows.training.ranks import agreed, here
from merlin_cowclip.workflows.training.runs import how_to_resume

PATIENCE = "MERLIN_COWCLIP_PATIENCE"  # in the environment: seconds
_SECONDS = 45.0
_BEATS = 15  # in that time
_UNSEEN = 10  # times as long may one be at work of which nobody can see whether it goes on
_CPU = 0.02  # of that time, computed, is a sign of work
_PASSED_ON = 1.0  # seconds: the launcher drops what it has not yet, once any rank has ended
_numbers = itertools.count()


def _before_training() -> tuple[int, ...]:
    return 0, 0, 0, times_gathered()


_where: list[Callable[[], tuple[int, ...]]] = [_before_training]


def follow(where: Callable[[], tuple[int, ...]]) -> None:
    """From now on, this tells how far the run is on this rank: in four numbers."""
    _where.append(where)


@contextlib.contextmanager
def beating(run: Path) -> Iterator[None]:
    """Within it the ranks of a run watch each other; on all ranks at once.

    Raises:
        AgreedError: on all ranks, where one's environment has no number of seconds.
    """
    with agreed():
        heartbeat = Heartbeat(here(), lambda: _where[-1](), run)
    try:
        with heartbeat:
            yield
    finally:
        del _where[1:]


class Heartbeat:
    """Of the ranks of a run, from its first look at the data on. One process has none.

    Where a rank hangs, the first of the others says so, and all end, with exit code 2, as if they
    were killed: what is saved is as it was.

    Args:
        ranks: this process among them.
        where: how far this rank is; of ranks at the same place, the same.
        run: the run's folder.

    Raises:
        UserError: the environment has no number of seconds.
    """

    def __init__(self, ranks: Ranks, where: Callable[[], tuple[int, ...]], run: Path) -> None:
        self._number = next(_numbers)  # the last run's may still tell each other its end
        self._ranks = ranks
        self._where = where
        self._run = run
        self._patience = _patience()
        self._done = threading.Event()
        self._ticks = 0  # in which this process ran: one that all ranks are stopped for is none
        self._heard = 0
        self._threads = [
            threading.Thread(target=work, name=f"merlin-cowclip-{name}", daemon=True)
            for name, work in (("heartbeat", self._beat), ("listening", self._listen))
        ]

    def __enter__(self) -> Heartbeat:
        if self._ranks.size > 1:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        if kind is None and self._ranks.size > 1:  # else others may not come to this place
            self._threads[0].join()

    def _beat(self) -> None:
        last: np.ndarray | None = None
        moved = np.zeros(self._ranks.size)  # when each was seen to
        with contextlib.suppress(Exception):  # Horovod has ended: the main thread will know
            gathered = gatherer_beside(f"heartbeat_{self._number}")
            signs = Signs(_CPU * self._patience)
            while True:
                work = [1, signs.count()] if is_at_work() else [0, 0]
                place = [self._done.is_set(), *work, *self._where()]
                found = gathered(np.array([[self._ticks, *place]], np.int64))
                self._heard = self._ticks
                # One clock for all, the slowest: by its own, one rank would end a beat before the
                # others, and they wait for it, the one that is to say why among them.
                now, found = found[:, 0].min(), found[:, 1:]
                if found[:, 0].all():
                    return
                changed = np.any(found != last, axis=1) if last is not None else True
                moved[changed] = now
                last = found
                waited = (now - moved.max()) / _BEATS
                if waited > 1:
                    works, signs_of = found[:, 1].astype(bool), found[:, 2]
                    unseen = bool(np.any(signs_of[works] == UNKNOWN))
                    self._end_if_one_is_behind(
                        found[:, 3:].tolist(), works.tolist(), waited, _UNSEEN if unseen else 1
                    )
                self._done.wait(self._patience / _BEATS)

    def _listen(self) -> None:
        """Whether anything is heard."""
        while self._threads[0].is_alive():
            time.sleep(self._patience / _BEATS)
            self._ticks += 1
            if self._ticks - self._heard > _BEATS:
                self._end("one that does not answer", self._ranks.rank)

    def _end_if_one_is_behind(
        self, places: list[list[int]], works: list[bool], waited: float, times: int = 1
    ) -> None:
        """After having waited for so many times its patience, of which one may work for some."""
        update = max(place[0] for place in places)
        behind = [rank for rank, place in enumerate(places) if place < max(places)]
        at = f"in update {update:,}" if update else "before the first update"
        for_it = f"behind the others, which wait for it {at}"
        if any(works):
            behind = [rank for rank, works_alone in enumerate(works) if works_alone]
            for_it = "which stands still while it reads or writes what the others wait for"
        others = [rank for rank in range(len(places)) if rank not in behind]
        if behind and others and waited > times:
            self._end(f"rank {', '.join(map(str, behind))}, {for_it}", others[0], times)

    def _end(self, what: str, speaker: int, times: int = 1) -> None:
        said = PATIENCE if times == 1 else f"{times} times {PATIENCE}"
        if self._ranks.rank == speaker:
            sys.stderr.write(
                "merlin-cowclip train: error: all ranks must go on to the end. Received: "
                f"{what}, for {times * self._patience:.0f} seconds ({said}). Go on with: "
                f"{how_to_resume(self._run)}\n"
            )
            sys.stderr.flush()
            time.sleep(_PASSED_ON)
        else:
            time.sleep(3 * _PASSED_ON)
        os._exit(2)


def _patience() -> float:
    said = os.environ.get(PATIENCE, str(_SECONDS))
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UserError(
            f"{PATIENCE} in the environment must be a positive number of seconds. Received: "
            f"{said!r}. Correct it, or leave it out for {_SECONDS:.0f}"
        )
    return seconds
