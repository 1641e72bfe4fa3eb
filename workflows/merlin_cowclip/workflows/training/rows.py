"""Rows of a prepared folder in memory: reading a window's, and making batches of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.adopt.validate import prefetch
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.training.order import Order, RowGroup, Window

BLOCK_ROWS = 1 << 12
"""Rows of small batches that are made at a time: one by one, batches of 32 would take half as long
to make as a step on them."""


@dataclass(frozen=True)
class Rows:
    """Some rows of a prepared folder, one after the other, as they are gathered fastest."""

    ids: np.ndarray  # n×F int64, one-hot fields
    numbers: np.ndarray  # n×C float32, continuous fields
    labels: np.ndarray  # n×1 float32
    lists: tuple[pa.ListArray, ...]  # n each

    def __len__(self) -> int:
        return len(self.labels)

    @classmethod
    def of(cls, spec: DatasetSpec, columns: Mapping[str, Any], labels: np.ndarray | None) -> Rows:
        """Rows whose encoded columns, Arrow's, are there; without labels, which are 0 then."""
        n = len(columns[spec.fields[0]])
        ids = np.empty((n, len(spec.categorical)), np.int64)
        numbers = np.empty((n, len(spec.continuous)), np.float32)
        for matrix, names in ((ids, spec.categorical), (numbers, spec.continuous)):
            for i, name in enumerate(names):
                matrix[:, i] = np.asarray(columns[name])
        held = np.zeros((n, 1), np.float32)
        if labels is not None:
            held[:, 0] = labels
        return cls(ids, numbers, held, tuple(columns[name] for name in spec.lists))

    def part(self, low: int, high: int) -> Rows:
        """Rows `low` to `high` of them, not copied."""
        return Rows(
            self.ids[low:high],
            self.numbers[low:high],
            self.labels[low:high],
            tuple(column.slice(low, high - low) for column in self.lists),
        )

    def take(self, order: np.ndarray) -> Rows:
        """The rows at `order`, copied."""
        return Rows(
            self.ids.take(order, axis=0),
            self.numbers.take(order, axis=0),
            self.labels.take(order, axis=0),
            tuple(column.take(pa.array(order)) for column in self.lists),
        )

    @staticmethod
    def joined(parts: list[Rows]) -> Rows:
        """All rows of several, in order."""
        if len(parts) == 1:
            return parts[0]
        return Rows(
            np.concatenate([p.ids for p in parts]),
            np.concatenate([p.numbers for p in parts]),
            np.concatenate([p.labels for p in parts]),
            tuple(pa.concat_arrays(c) for c in zip(*(p.lists for p in parts), strict=True)),
        )


@dataclass(frozen=True)
class Block:
    """Batches of one size, or a rank's shares of them, each field of each batch in one piece."""

    ids: np.ndarray  # n×F×b×1 int64
    numbers: np.ndarray  # n×C×b×1 float32
    labels: np.ndarray  # n×b×1 float32
    lists: tuple[np.ndarray, ...]  # int64, two per list field: all values, and n·b + 1 offsets

    @classmethod
    def of(cls, rows: Rows, n: int = 1) -> Block:
        """The same as `rows`, in n batches."""
        ids, numbers, labels = (
            matrix.reshape(n, len(rows) // n, matrix.shape[1])
            for matrix in (rows.ids, rows.numbers, rows.labels)
        )
        return cls(
            np.ascontiguousarray(ids.transpose(0, 2, 1))[..., np.newaxis],
            np.ascontiguousarray(numbers.transpose(0, 2, 1))[..., np.newaxis],
            labels,
            tuple(itertools.chain(*map(_values_and_offsets, rows.lists))),
        )

    def batch(self, spec: DatasetSpec, i: Any, b: Any, parts: Any = list) -> tuple[Any, Any]:
        """The i-th one, of b rows: features by name, as Merlin's models take them, and labels.

        A block's fields may be tensors, and so may i and b be; `parts` unstacks one then.
        """
        lists: list[Any] = []
        for values, offsets in zip(self.lists[::2], self.lists[1::2], strict=True):
            here = offsets[i * b : i * b + b + 1]
            lists += [values[here[0] : here[-1]], here - here[0]]
        names = (*spec.categorical, *spec.continuous, *list_keys(spec))
        columns = (*parts(self.ids[i]), *parts(self.numbers[i]), *lists)
        return dict(zip(names, columns, strict=True)), self.labels[i]


def list_keys(spec: DatasetSpec) -> list[str]:
    """Names of the features that lists become, two each."""
    return [f"{name}__{part}" for name in spec.lists for part in ("values", "offsets")]


@dataclass(frozen=True)
class Reader:
    """Reads windows of one part of a prepared folder, whose files stay as they are.

    Args:
      spec: which columns there are.
      footers: of the part's files, in their order; of many row groups, parsing one takes long.
    """

    spec: DatasetSpec
    footers: Mapping[Path, pq.FileMetaData]

    def groups(self) -> tuple[RowGroup, ...]:
        """All row groups that have rows, in the order on disk."""
        return tuple(
            RowGroup(file, number, rows)
            for file, footer in self.footers.items()
            for number in range(footer.num_row_groups)
            if (rows := footer.row_group(number).num_rows)
        )

    def read(self, window: Window) -> Rows:
        """The window's rows, as they lie on disk group by group."""
        names, found = [*self.spec.fields, self.spec.label], []
        for group in window.groups:
            with pq.ParquetFile(group.file, metadata=self.footers[group.file]) as parquet:
                table = parquet.read_row_group(group.number, columns=names)
            lists = {name: pa.concat_arrays(table[name].chunks) for name in self.spec.lists}
            columns = {name: table[name] for name in names} | lists
            found.append(Rows.of(self.spec, columns, np.asarray(table[self.spec.label])))
        return Rows.joined(found)


def blocks(
    order: Order, reader: Reader, epoch: int, epochs: int | None, start: int
) -> Iterator[Block]:
    """Batches of some epochs (`None`: endless), from batch `start` of the first one on.

    While one block is used the next is made, and the next window read, also across the end of an
    epoch.
    """
    size = order.batch_size // order.ranks

    def windows() -> Iterator[tuple[int, Rows]]:
        for e in itertools.count(epoch) if epochs is None else range(epoch, epoch + epochs):
            for window in order.windows(e):
                mine = order.of_rows(window, start if e == epoch else 0)
                if len(mine):
                    yield e, reader.read(window).take(mine)

    def made() -> Iterator[Block]:
        for _, pieces in itertools.groupby(prefetch(windows()), lambda piece: piece[0]):
            for rows in in_batches((rows for _, rows in pieces), max(BLOCK_ROWS // size, 1) * size):
                whole, left = divmod(len(rows), size)
                if whole:
                    yield Block.of(rows.part(0, whole * size), whole)
                if left:
                    yield Block.of(rows.part(whole * size, len(rows)))

    return prefetch(made())


def in_batches(pieces: Iterator[Rows], size: int) -> Iterator[Rows]:
    """The same rows, `size` at a time; the last ones may be fewer."""
    held: list[Rows] = []
    room = size
    for rows in pieces:
        start = 0
        while start < len(rows):
            stop = min(len(rows), start + room)
            held.append(rows.part(start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield Rows.joined(held)
                held, room = [], size
    if held:
        yield Rows.joined(held)


def _values_and_offsets(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
    return values.astype(np.int64), offsets - offsets[0]
