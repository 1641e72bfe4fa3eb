# SPDX-License-Identifier: Apache-2.0
"""Sharded tables made whole, to save or serve a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from merlin_cowclip.plugins._tensorflow import mm, tf
from merlin_cowclip.plugins.distributed.horovod import all_gather
from merlin_cowclip.plugins.distributed.sharding import Shard
from merlin_cowclip.plugins.embeddings.discovery import find_tables
from merlin_cowclip.plugins.embeddings.tables import TableSpec
from merlin_cowclip.plugins.optimizers.state import optimizer_of

_BLOCK = 1 << 18  # rows of each rank that are gathered together
_TRACED = ("train_function", "test_function", "predict_function")


@contextlib.contextmanager
def whole_tables(model: mm.Model) -> Iterator[None]:
    """Within it, on rank 0, tables in shards and their moments are whole: a model like any other.

    Called on all ranks at once; on the others the model must not be called within it. A custom
    `tf.function` keeps the tables that it was traced with. Rank 0 needs memory for whole tables.

    ```python
    with whole_tables(model):
        if hvd.rank() == 0:
            model.save("model")
    ```
    """
    optimizer = optimizer_of(model)
    specs = [spec for spec in optimizer.table_specs if spec.shard is not None]
    if specs:
        optimizer.create_slots(model.trainable_variables)
    parts = optimizer.owner()
    with contextlib.ExitStack() as shards:
        for spec in specs:
            shard, table, part = spec.shard, spec.variable, parts[spec.variable.ref()]
            assert shard is not None
            moments = part.slots_of(table)
            whole, *others = (_whole(one, shard) for one in (table, *moments.values()))
            if whole is not None:
                shards.callback(_put, spec, part, table, moments, shard)
                _put(spec, part, whole, dict(zip(moments, others, strict=True)), None)
        if specs:  # Keras keeps what it has traced, with the tables that were there then
            shards.callback(model.__dict__.update, {n: getattr(model, n) for n in _TRACED})
            model.__dict__.update(dict.fromkeys(_TRACED))
        yield


def is_in_shards(model: mm.Model) -> bool:
    """Whether a table of a model has some of its rows here, and the others on other ranks."""
    return any(spec.shard is not None for spec in find_tables(model))


def _put(spec: TableSpec, part: Any, table: tf.Variable, moments: Any, shard: Shard | None) -> None:
    assert spec.set_variable is not None
    part.change_table(spec.variable, table, moments)
    spec.set_variable(table)
    spec.shard = shard


def _whole(variable: tf.Variable, shard: Shard) -> tf.Variable | None:
    rows, name = whole_rows(variable, shard), variable.name.rpartition(":")[0]
    return None if rows is None else tf.Variable(rows, trainable=variable.trainable, name=name)


def whole_rows(variable: tf.Variable, shard: Shard) -> NDArray[Any] | None:
    """V×d of a variable that has this rank's rows, on rank 0; on all ranks at once."""
    shape = shard.num_rows, variable.shape[1]
    whole = np.empty(shape, variable.dtype.as_numpy_dtype) if shard.rank == 0 else None
    for start in range(0, shard._replace(rank=0).rows, _BLOCK):  # rank 0 has the most
        stop = start + _BLOCK
        block = all_gather(variable[start:stop].numpy())
        if whole is None:
            continue
        for rank in range(shard.size):
            rows = whole[rank :: shard.size][start:stop]
            rows[:], block = block[: len(rows)], block[len(rows) :]
    return whole
