# SPDX-License-Identifier: Apache-2.0
"""Horovod's collectives. All ranks must make the same calls in the same order.

Where Horovod is installed, Merlin imports and initialises it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from merlin_cowclip.plugins._tensorflow import FuncGraph, has_horovod, kept_on, tf

_NUMBERS = "_merlin_cowclip_numbers"


class Ranks(NamedTuple):
    """Which of several processes this is; `local` ones are those of this machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


SINGLE_PROCESS = Ranks(0, 1, 0, 1)


def ranks() -> Ranks:
    """This process among those that Horovod has started; alone without it."""
    if not has_horovod or not _horovod().is_initialized():
        return SINGLE_PROCESS
    hvd = _horovod()
    return Ranks(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())


def refuse_replicas() -> None:
    """Raise a ValueError within a `tf.distribute` strategy of several replicas."""
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise ValueError(
            "tf.distribute strategies with several replicas are not supported: their tables would "
            "drift apart. Use Horovod, one process per GPU."
        )


def _horovod() -> Any:
    import horovod.tensorflow as hvd

    return hvd


def broadcasts_variables(callback: Any) -> bool:
    """Whether it is Horovod's callback that would overwrite the rows of sharded tables."""
    if not has_horovod:
        return False
    from horovod._keras.callbacks import BroadcastGlobalVariablesCallbackImpl

    return isinstance(callback, BroadcastGlobalVariablesCallbackImpl)


def all_gather_each(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Each tensor with those of all ranks behind one another, in the ranks' order."""
    hvd = _horovod()
    return [hvd.allgather(t, name=_name("all_gather"), ignore_name_scope=True) for t in tensors]


def all_to_all(values: tf.Tensor, sizes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Send rows (n×…), `sizes` (N) to each rank in order; returns what came, and its sizes (N)."""
    name = _name("all_to_all")
    return tuple(_horovod().alltoall(values, splits=sizes, name=name, ignore_name_scope=True))


def all_reduce(values: tf.Tensor, how: str) -> tf.Tensor:
    """The "sum", "max" or "min" of what the ranks have, value by value; on all ranks at once."""
    hvd = _horovod()
    op = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}[how]
    return hvd.allreduce(values, op=op, name=_name("all_reduce"), ignore_name_scope=True)


def _name(what: str) -> str:
    """By what Horovod matches the ranks' calls; in a graph, numbered as they are traced."""
    if tf.executing_eagerly():
        return f"cowclip_{what}"
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, FuncGraph) and isinstance(graph.outer_graph, FuncGraph):
        graph = graph.outer_graph
    return f"cowclip_{what}_{next(kept_on(graph, _NUMBERS, itertools.count()))}"


def broadcast(variables: Iterable[tf.Variable]) -> None:
    """Give variables the values that they have on rank 0; eagerly, on all ranks at once."""
    hvd = _horovod()
    for variable in variables:
        variable.assign(hvd.broadcast(variable.read_value(), root_rank=0, name=_name("state")))


def check_same(of_one: Mapping[str, Any], rule: str) -> None:
    """Refuse JSON values that differ between ranks, with `rule`, a sentence; on all at once."""
    found = [
        {
            f"{key} {name}".strip(): one
            for key, value in of.items()
            for name, one in (value if isinstance(value, dict) else {"": value}).items()
        }
        for of in all_gather_object(of_one)
    ]
    for name in dict.fromkeys(itertools.chain(*found)):
        values = [one.get(name) for one in found]
        if any(value != values[0] for value in values):
            received = (f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"{rule} Received: {name} {', '.join(received)}.")


def all_gather_object(value: Any) -> list[Any]:
    """What each rank has, by rank; eagerly, on all ranks at once."""
    found: list[Any] = _horovod().allgather_object(value, name="cowclip_object")
    return found


def all_gather(values: NDArray[Any]) -> NDArray[Any]:
    """All ranks' arrays behind one another; eagerly, on all ranks at once."""
    with tf.device("CPU:0"):
        return np.asarray(all_gather_each([tf.constant(values)])[0])
