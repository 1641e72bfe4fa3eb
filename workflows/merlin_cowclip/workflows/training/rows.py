# SPDX-License-Identifier: Apache-2.0
"""Encoded rows in memory, as Arrow tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.adopt import validate
from merlin_cowclip.workflows.data.spec import DatasetSpec

Groups = list[tuple[Path, pq.FileMetaData, int]]
"""Row groups: file, its footer and the number in it."""


def as_rows(table: pa.Table, spec: DatasetSpec, labelled: bool = True) -> pa.Table:
    """Encoded columns in our types: ids and lists of ids int64, numbers and the label float32."""
    kinds = dict.fromkeys(spec.categorical, pa.int64())
    kinds |= dict.fromkeys(spec.continuous, pa.float32())
    kinds |= dict.fromkeys(spec.lists, pa.list_(pa.int64()))
    schema = pa.schema(kinds | ({spec.label: pa.float32()} if labelled else {}))
    return table.select(schema.names).cast(schema, safe=False)  # safe: not from float64


def checked_rows(
    batch: pa.RecordBatch,
    spec: DatasetSpec,
    cardinalities: Mapping[str, int],
    where: validate.BatchLocation,
    labelled: bool,
) -> pa.Table:
    """What a workflow of the user's encoded, `as_rows`; refuses the first bad value.

    Ids must be in range, numbers finite, labels 0 or 1.
    """
    for name in spec.ids:
        validate.checked_ids(batch, name, cardinalities[name], where)
    for name in spec.continuous:
        validate.checked_numbers(batch, name, where)
    if labelled:
        validate.checked_labels(batch, spec.label, where)
    return as_rows(pa.Table.from_batches([batch]), spec, labelled)


def groups_of(footers: dict[Path, pq.FileMetaData]) -> Groups:
    """All row groups that have rows, in the order on disk."""
    return [
        (path, footer, number)
        for path, footer in footers.items()
        for number in range(footer.num_row_groups)
        if footer.row_group(number).num_rows
    ]


def read(groups: Groups, spec: DatasetSpec) -> pa.Table:
    """The rows of some row groups, one group after the other."""
    columns, tables = [*spec.fields, spec.label], []
    for path, footer, number in groups:
        with pq.ParquetFile(path, metadata=footer) as parquet:
            tables.append(as_rows(parquet.read_row_group(number, columns=columns), spec))
    return pa.concat_tables(tables).combine_chunks()


def rebatch(tables: Iterable[pa.Table], size: int) -> Iterator[pa.Table]:
    """The same rows, `size` at a time; the last table may be smaller."""
    pending: list[pa.Table] = []
    room = size
    for table in tables:
        while len(table) >= room:
            yield pa.concat_tables([*pending, table.slice(0, room)])
            pending, room, table = [], size, table.slice(room)
        if len(table):
            pending.append(table)
            room -= len(table)
    if pending:
        yield pa.concat_tables(pending)


def features_of(table: pa.Table, spec: DatasetSpec, batches: int = 1) -> dict[str, np.ndarray]:
    """The inputs of a model, for n batches of b rows each.

    Ids (int64) and numbers (float32) are n×b×1. A list column is two int64 arrays, as in Merlin:
    `name__values` (1×m) and `name__offsets` (1×(b + 1)); with lists n must be 1.
    """
    table = table.combine_chunks()
    names = (*spec.categorical, *spec.continuous)
    features = {name: table[name].to_numpy().reshape(batches, -1, 1) for name in names}
    for name in spec.lists:
        column = pa.concat_arrays(table[name].chunks)
        offsets = column.offsets.to_numpy().astype(np.int64)
        values = column.values.to_numpy()[offsets[0] : offsets[-1]]
        features[f"{name}__values"] = values[np.newaxis]
        features[f"{name}__offsets"] = (offsets - offsets[0])[np.newaxis]
    return features
