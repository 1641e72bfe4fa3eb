# SPDX-License-Identifier: Apache-2.0
"""Rows of a fused table: which each field has, and what they start from."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from merlin.schema import ColumnSchema

from merlin_cowclip.models.vocabulary import PADDING_ID, UNKNOWN_ID, Ids, cardinality, is_encoded
from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.horovod import all_gather_object
from merlin_cowclip.plugins.distributed.sharding import Shard

_BLOCK = 1 << 16  # rows that are drawn together


def row_ranges(columns: Sequence[ColumnSchema]) -> tuple[tuple[int, ...], dict[str, int]]:
    """Divide the rows of a table by int domain, as Merlin's `mm.Embeddings` does.

    Fields whose domains have one name share its rows; one without a name is its field's own.
    Returns the first row of each domain, then V; and for each field the number of its domain.
    """
    sizes = {c.name: cardinality(c) for c in columns}
    domains = {c.name: str(c.int_domain.name or c.name) for c in columns}
    first: dict[str, str] = {}  # field of each domain
    for field, domain in domains.items():
        other = first.setdefault(domain, field)
        if sizes[field] != sizes[other]:
            raise ValueError(
                "Columns of one int domain must have one cardinality, for they share its rows. "
                f"Received: {other!r} with {sizes[other]} ids and {field!r} with "
                f"{sizes[field]}, both of the domain {domain!r}. Encode them jointly, "
                "Categorify(encode_type='joint'), or give their domains different names."
            )
    offsets = itertools.accumulate((sizes[field] for field in first.values()), initial=0)
    numbers = {domain: number for number, domain in enumerate(first)}
    return tuple(offsets), {field: numbers[domain] for field, domain in domains.items()}


def draw_rows(
    stddev: float, zero_rows: Ids, shape: Any, dtype: tf.DType, **kwargs: Any
) -> tf.Tensor:
    """A V×d table of N(0, stddev), with `zero_rows` (numbers) at zero; stddev 0: all zeros."""
    if stddev == 0:
        return tf.zeros(shape, dtype)
    values = tf.random.normal(shape, stddev=stddev, dtype=dtype)
    zeros = tf.zeros([len(zero_rows), shape[1]], dtype)
    return tf.tensor_scatter_nd_update(values, zero_rows[:, np.newaxis], zeros)


def draw_shard(
    shard: Shard, stddev: float, zero_rows: Ids, shape: Any, dtype: tf.DType, **kwargs: Any
) -> tf.Tensor:
    """This rank's rows of a V×d table; on all ranks at once.

    Drawn in blocks from a seed of rank 0: the same table for any number of ranks, but not that of
    `draw_rows`.
    """
    values = np.zeros(shape, dtype.as_numpy_dtype)
    if stddev == 0:
        return tf.constant(values)
    seed = all_gather_object(int(tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32)))[0]
    done = 0
    for number, start in enumerate(range(0, shard.num_rows, _BLOCK)):
        size = [min(_BLOCK, shard.num_rows - start), shape[1]]
        drawn = tf.random.stateless_normal(size, (seed, number), stddev=stddev, dtype=dtype)
        mine = drawn.numpy()[(shard.rank - start) % shard.size :: shard.size]
        values[done : done + len(mine)] = mine
        done += len(mine)
    here = zero_rows[zero_rows % shard.size == shard.rank]
    values[shard.local_row(here)] = 0
    return tf.constant(values)


def untrained_rows(columns: Sequence[ColumnSchema], first_row: Mapping[str, int]) -> Ids:
    """Rows that no training row of any field has, int64, rising.

    Padding, and the ids that prepared data counted no training row of; else the unknown id.
    """
    untrained: dict[int, Ids] = {}
    for column in columns:
        ids = np.array([PADDING_ID, UNKNOWN_ID])
        counted = column.properties.get("untrained_ids")  # starts and ends in turn; read as floats
        if counted is not None:
            spans = [(PADDING_ID, PADDING_ID + is_encoded(column))]  # else it may be an id
            spans += np.array(counted, np.int64).reshape(-1, 2).tolist()
            ids = np.concatenate([np.arange(*span) for span in spans])
        ids, first = ids[ids < cardinality(column)], first_row[column.name]
        untrained[first] = np.intersect1d(untrained.get(first, ids), ids)
    return np.sort(np.concatenate([first + ids for first, ids in untrained.items()]))
