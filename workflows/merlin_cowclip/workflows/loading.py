"""Loader: streams batches of a prepared folder, each a function of (seed, epoch, number) alone.

Merlin's own loader never shuffles partitions, hangs at the end with `drop_last`, and counts its
position in itself; Keras reads ahead of it. Here the order of an epoch is computed from the seed,
so that a run can start again at any batch and two loaders always agree.
"""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.prepared import PreparedData

WINDOW_ROWS = 1 << 19
"""Rows that are held, and permuted, at a time: about 0.3 GiB for 26 + 13 fields."""

PARTS = ("train", "test")


@dataclass(frozen=True)
class Rows:
    """Some rows of a prepared folder as arrays, ids and numbers each in one matrix."""

    ids: np.ndarray  # n×F int64, one-hot fields
    numbers: np.ndarray  # n×C float32, continuous fields
    labels: np.ndarray  # n×1 float32
    lists: tuple[pa.ListArray, ...]  # n each

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, order: np.ndarray) -> Rows:
        """The rows at `order`."""
        return Rows(
            self.ids[order],
            self.numbers[order],
            self.labels[order],
            tuple(column.take(pa.array(order)) for column in self.lists),
        )

    def part(self, start: int, stop: int) -> Rows:
        """The rows from `start` to `stop`, as views."""
        return Rows(
            self.ids[start:stop],
            self.numbers[start:stop],
            self.labels[start:stop],
            tuple(column.slice(start, stop - start) for column in self.lists),
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


class Loader:
    """Batches of one part of a prepared folder, in the format that Merlin's models take.

    The order of epoch e is a permutation of the row groups and, in windows of `WINDOW_ROWS`, of the
    rows, both drawn from (seed, e). Without shuffling it is the order on disk.

    Args:
      data: the prepared folder.
      part: "train" or "test".
      batch_size: samples per batch; the last batch of an epoch holds the remainder.
      seed: of the order.
      shuffle: whether epochs differ; by default only the training part is shuffled.

    Raises:
      UserError: the batch is larger than the part (training), or not positive.
    """

    def __init__(
        self,
        data: PreparedData,
        part: str = "train",
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool | None = None,
    ) -> None:
        if part not in PARTS:
            raise UserError(f"part must be one of {', '.join(PARTS)}. Received: part={part!r}")
        files = data.train_files if part == "train" else data.test_files
        self.data = data
        self.part = part
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = part == "train" if shuffle is None else shuffle
        self._groups: list[tuple[Path, int, int]] = []
        for file in files:
            with pq.ParquetFile(file) as parquet:
                for group in range(parquet.num_row_groups):
                    rows = parquet.metadata.row_group(group).num_rows
                    self._groups.append((file, group, rows))
        self.rows = sum(rows for _, _, rows in self._groups)
        if batch_size <= 0:
            raise UserError(f"batch size must be positive. Received: {batch_size}")
        if part == "train" and batch_size > self.rows:
            raise UserError(
                f"batch size must not exceed the training rows. Received: batch size {batch_size}, "
                f"{self.rows} rows in {data.path}. Choose a smaller batch or prepare more rows."
            )

    def __len__(self) -> int:
        """Batches per epoch, the remainder's included."""
        return -(-self.rows // self.batch_size)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[dict[str, Any], Any]]:
        """The batches of one epoch from number `start` on: (features, labels b×1).

        Features: b×1 int64 ids, b×1 float32 numbers, and for a list column `name__values` and
        `name__offsets`, as Merlin's loader has them.
        """
        return map(self._as_batch, self._cut(epoch, start))

    def dataset(self, *, epoch: int = 0, epochs: int | None = 1) -> tf.data.Dataset:
        """The same as a `tf.data.Dataset`, `epochs` epochs from `epoch` on (`None`: endless)."""
        spec = self.data.spec
        ids, numbers = self._one_hot, spec.continuous

        def generate() -> Iterator[tuple[Any, ...]]:
            wanted = itertools.count(epoch) if epochs is None else range(epoch, epoch + epochs)
            for e in wanted:
                for rows in self._cut(e, 0):
                    lists = [_values_and_offsets(column) for column in rows.lists]
                    yield (rows.ids, rows.numbers, rows.labels, *itertools.chain(*lists))

        @tf.autograph.experimental.do_not_convert  # it does not know zip(…, strict=True)
        def named(ids_: Any, numbers_: Any, labels: Any, *lists: Any) -> tuple[Any, Any]:
            features = {name: ids_[:, i : i + 1] for i, name in enumerate(ids)}
            features |= {name: numbers_[:, i : i + 1] for i, name in enumerate(numbers)}
            features |= dict(zip(self._list_keys(), lists, strict=True))
            return features, labels

        signature = (
            tf.TensorSpec([None, len(ids)], tf.int64),
            tf.TensorSpec([None, len(numbers)], tf.float32),
            tf.TensorSpec([None, 1], tf.float32),
            *(tf.TensorSpec([None], tf.int64) for _ in self._list_keys()),
        )
        # Matrices cross from Python to TensorFlow, and are cut into columns there: one by one,
        # 40 columns would cost more than the reading.
        dataset = tf.data.Dataset.from_generator(generate, output_signature=signature)
        return dataset.map(named).prefetch(2)

    @property
    def _one_hot(self) -> tuple[str, ...]:
        return tuple(self.data.spec.categorical)

    def _list_keys(self) -> list[str]:
        return [
            f"{name}__{part}" for name in self.data.spec.lists for part in ("values", "offsets")
        ]

    def _as_batch(self, rows: Rows) -> tuple[dict[str, Any], Any]:
        features: dict[str, Any] = {}
        for i, name in enumerate(self._one_hot):
            features[name] = rows.ids[:, i : i + 1]
        for i, name in enumerate(self.data.spec.continuous):
            features[name] = rows.numbers[:, i : i + 1]
        lists = itertools.chain(*(_values_and_offsets(column) for column in rows.lists))
        features |= dict(zip(self._list_keys(), lists, strict=True))
        return features, rows.labels

    def _windows(self, epoch: int) -> list[list[tuple[Path, int, int]]]:
        """The epoch's row groups in order, `WINDOW_ROWS` or a little more at a time."""
        groups = list(self._groups)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(groups))
            groups = [groups[i] for i in order]
        windows: list[list[tuple[Path, int, int]]] = [[]]
        for group in groups:
            if sum(rows for _, _, rows in windows[-1]) >= WINDOW_ROWS:
                windows.append([])
            windows[-1].append(group)
        return windows

    def _read(self, epoch: int, number: int, groups: list[tuple[Path, int, int]]) -> Rows:
        spec = self.data.spec
        columns = [*self._one_hot, *spec.continuous, *spec.lists, spec.label]
        tables = []
        for file, group, _ in groups:
            with pq.ParquetFile(file) as parquet:
                tables.append(parquet.read_row_group(group, columns=columns))
        table = pa.concat_tables(tables).combine_chunks()
        rows = Rows(
            _matrix(table, self._one_hot, np.int64),
            _matrix(table, spec.continuous, np.float32),
            _matrix(table, [spec.label], np.float32),
            tuple(_one_chunk(table[name]) for name in spec.lists),
        )
        if not self.shuffle:
            return rows
        order = np.random.default_rng([self.seed, epoch, number]).permutation(len(rows))
        return rows.take(order)

    def _cut(self, epoch: int, start: int) -> Iterator[Rows]:
        """The epoch's rows in batches, the next window read while this one is used."""
        skip = start * self.batch_size
        wanted: list[tuple[int, list[tuple[Path, int, int]]]] = []
        for number, groups in enumerate(self._windows(epoch)):
            rows = sum(n for _, _, n in groups)
            if not wanted and skip >= rows:
                skip -= rows
                continue
            wanted.append((number, groups))
        left: Rows | None = None
        with concurrent.futures.ThreadPoolExecutor(1, "merlin-cowclip-loader") as reader:
            ahead = [reader.submit(self._read, epoch, *window) for window in wanted[:1]]
            for i in range(len(wanted)):
                window = ahead.pop().result()
                if i + 1 < len(wanted):
                    ahead.append(reader.submit(self._read, epoch, *wanted[i + 1]))
                if i == 0 and skip:
                    window = window.part(skip, len(window))
                at = 0
                if left is not None:
                    at = min(self.batch_size - len(left), len(window))
                    left = Rows.joined([left, window.part(0, at)])
                    if len(left) < self.batch_size:
                        continue
                    yield left
                    left = None
                while at + self.batch_size <= len(window):
                    yield window.part(at, at + self.batch_size)
                    at += self.batch_size
                if at < len(window):
                    left = window.part(at, len(window))
            if left is not None:
                yield left


def _matrix(table: pa.Table, names: Any, dtype: Any) -> np.ndarray:
    matrix = np.empty((table.num_rows, len(names)), dtype)
    for i, name in enumerate(names):
        matrix[:, i] = table[name].to_numpy()
    return matrix


def _one_chunk(column: pa.ChunkedArray) -> pa.ListArray:
    array = column.combine_chunks()
    return array.chunk(0) if isinstance(array, pa.ChunkedArray) else array


def _values_and_offsets(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
    return values.astype(np.int64), offsets - offsets[0]
