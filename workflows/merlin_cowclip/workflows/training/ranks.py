# SPDX-License-Identifier: Apache-2.0
"""A run on several ranks: what they agree on, who writes and speaks, what is not offered yet."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from merlin_cowclip.workflows.errors import AgreedError, UserError, clipped
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    from merlin_cowclip.workflows.training.configuration import TrainConfig

_HOROVOD = "merlin_cowclip.plugins.distributed.horovod"
_ALIKE = ("data_sha256", "cardinalities", "spec", "identity", "versions")
_VARIABLES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # horovodrun's and one's own mpirun
)
PATIENCE = 20  # seconds for the first process to say its sentence


class RankInfo(NamedTuple):
    """Which of several processes this is; `local` ones are those of this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def launched() -> RankInfo:
    """This process among those of horovodrun or mpirun; alone without them."""
    for rank, size in _VARIABLES:
        if rank in os.environ and size in os.environ:
            return RankInfo(int(os.environ[rank]), int(os.environ[size]))
    return RankInfo()


def wait_for_rank_zero() -> None:
    """Wait for the end of the first process, at which the launcher ends the others by SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(PATIENCE)


def rank_info() -> RankInfo:
    """This process among the ranks; TensorFlow, seconds of importing, is for several only."""
    horovod = sys.modules.get(_HOROVOD)
    if launched().size == 1 and (horovod is None or horovod.ranks().size == 1):
        return RankInfo()
    return joined()


@functools.cache
def joined() -> RankInfo:
    """This process among Horovod's; of several on a machine, each has its own GPU from now on."""
    with quiet_imports():
        from merlin_cowclip.plugins._tensorflow import tf
        from merlin_cowclip.plugins.distributed.horovod import ranks
    info = RankInfo(*ranks())
    if info.size == 1 < launched().size:
        raise AgreedError(
            "several ranks need Horovod with TensorFlow and their launcher's network. Received: "
            f"{launched().size} processes that know nothing of each other. Install Horovod by "
            "containers/horovod.sh, as docs/scaling.md says, or run one process"
        )
    gpus = tf.config.list_physical_devices("GPU")
    if info.size > 1 and gpus:
        with contextlib.suppress(RuntimeError):  # a script of one's own has begun to use them
            tf.config.set_visible_devices(gpus[info.local_rank % len(gpus)], "GPU")
    return info


def is_rank_zero() -> bool:
    """Whether this process writes and prints: the first rank, or the only one."""
    return rank_info().rank == 0


@contextlib.contextmanager
def raise_on_any_rank() -> Iterator[None]:
    """What one rank refuses within it, all refuse at its end, so that none waits for ever.

    Raises:
      AgreedError: on all ranks, with what the first of those that refuse says.
    """
    if rank_info().size == 1:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    said = gather_objects(None if failure is None else str(failure) or type(failure).__name__)
    if failure is not None and not isinstance(failure, UserError):
        raise failure  # this rank's own: its traceback is wanted
    if reasons := [one for one in said if one is not None]:
        ranks = [rank for rank, one in enumerate(said) if one == reasons[0]]
        # The first speaks of itself, and of what it alone looks at.
        is_named = ranks != [0] and len(ranks) < len(said)
        where = f"on rank {', '.join(map(str, ranks))}: " if is_named else ""
        raise AgreedError(where + reasons[0]) from failure


def gather_objects(value: Any) -> list[Any]:
    """What each rank says, fit for JSON, by rank; called on all at once."""
    if rank_info().size == 1:
        return [value]
    from merlin_cowclip.plugins.distributed.horovod import all_gather_object

    return all_gather_object(value)


def check_offered(config: TrainConfig) -> None:
    """Refuse what a run on several ranks cannot do yet, and what one process cannot share."""
    size = rank_info().size
    if size == 1 and config.tables == "sharded":
        raise UserError(
            "tables='sharded' needs several ranks to share the rows. Received: one process. "
            "Start it by horovodrun, as docs/scaling.md says, or leave it out"
        )
    if size > 1 and config.update == "deferred":
        raise UserError(
            f"a run on several ranks has no update='deferred' yet. Received: it on {size} ranks. "
            "Leave it out, or train in one process"
        )


def check_alike(record: Mapping[str, Any]) -> None:
    """Refuse ranks whose `config.json`s differ in data, configuration or versions, on all ranks."""
    if rank_info().size == 1:
        return
    from merlin_cowclip.plugins.distributed.horovod import check_same

    try:
        rule = "all ranks must have the same data, configuration and versions."
        check_same({key: record[key] for key in _ALIKE}, rule)
    except ValueError as error:
        raise AgreedError(clipped(str(error))) from None
