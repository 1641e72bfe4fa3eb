"""Rows of a prepared folder in memory: reading a window's, and making batches of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.sources.base import FileState
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.training.order import RowGroup, Window


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
    def of(
        cls, spec: DatasetSpec, columns: Mapping[str, pa.Array], labels: np.ndarray | None
    ) -> Rows:
        """Rows whose encoded columns are there; without labels, which are 0 then."""
        n = len(columns[spec.fields[0]])
        ids = np.empty((n, len(spec.categorical)), np.int64)
        numbers = np.empty((n, len(spec.continuous)), np.float32)
        for matrix, names in ((ids, spec.categorical), (numbers, spec.continuous)):
            for i, name in enumerate(names):
                matrix[:, i] = columns[name].to_numpy(zero_copy_only=False)
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

    def batch(self, i: Any, b: Any) -> Batch:
        """The i-th one, of b rows; a block's fields may be tensors, and so may i and b be."""
        lists: list[Any] = []
        for values, offsets in zip(self.lists[::2], self.lists[1::2], strict=True):
            here = offsets[i * b : i * b + b + 1]
            lists += [values[here[0] : here[-1]], here - here[0]]
        return Batch(self.ids[i], self.numbers[i], self.labels[i], tuple(lists))


@dataclass(frozen=True)
class Batch:
    """A batch, or a rank's share of it, each field in one piece."""

    ids: np.ndarray  # F×b×1 int64
    numbers: np.ndarray  # C×b×1 float32
    labels: np.ndarray  # b×1 float32
    lists: tuple[np.ndarray, ...]  # int64, two per list field: its values, and b + 1 offsets

    def features(self, spec: DatasetSpec) -> dict[str, Any]:
        """By name, as Merlin's models take them: of a list `name__values` and `name__offsets`."""
        features = dict(zip(spec.categorical, self.ids, strict=True))
        features |= dict(zip(spec.continuous, self.numbers, strict=True))
        return features | dict(zip(list_keys(spec), self.lists, strict=True))


def list_keys(spec: DatasetSpec) -> list[str]:
    """Names of the features that lists become, two each."""
    return [f"{name}__{part}" for name in spec.lists for part in ("values", "offsets")]


@dataclass(frozen=True)
class Reader:
    """Reads windows of one part of a prepared folder.

    Args:
      spec: which columns there are.
      footers: of the part's files, in their order; of many row groups, parsing one takes long.
      check: refuses files that are not as they were; called where one was written or replaced.
    """

    spec: DatasetSpec
    footers: Mapping[Path, pq.FileMetaData]
    check: Callable[[], Any]
    states: dict[Path, FileState] = field(init=False)  # as they were checked last

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", {path: FileState.of(path) for path in self.footers})

    def groups(self) -> tuple[RowGroup, ...]:
        """All row groups that have rows, in the order on disk."""
        return tuple(
            RowGroup(file, number, rows)
            for file, footer in self.footers.items()
            for number in range(footer.num_row_groups)
            if (rows := footer.row_group(number).num_rows)
        )

    def read(self, window: Window) -> Rows:
        """The window's rows, as they lie on disk group by group.

        Raises:
          UserError: a file has changed since.
        """
        try:
            return self._read(window)
        finally:  # a footer of before would tell where something else lies now
            self._check({group.file for group in window.groups})

    def _check(self, files: Set[Path]) -> None:
        try:
            now = {path: FileState.of(path) for path in files}
        except OSError:
            now = {}
        if now.items() - self.states.items() or not now:
            self.check()
            self.states.update(now)

    def _read(self, window: Window) -> Rows:
        spec, n = self.spec, window.rows
        columns = [*spec.categorical, *spec.continuous, *spec.lists, spec.label]
        ids = np.empty((n, len(spec.categorical)), np.int64)
        floats = np.empty((n, len(spec.continuous)), np.float32)
        labels = np.empty((n, 1), np.float32)
        lists: list[list[pa.Array]] = [[] for _ in spec.lists]
        at = 0
        for group in window.groups:
            with pq.ParquetFile(group.file, metadata=self.footers[group.file]) as parquet:
                table = parquet.read_row_group(group.number, columns=columns)
            here = slice(at, at + group.rows)
            for matrix, names in (
                (ids, spec.categorical),
                (floats, spec.continuous),
                (labels, [spec.label]),
            ):
                for i, name in enumerate(names):
                    matrix[here, i] = table[name].to_numpy()
            for chunks, name in zip(lists, spec.lists, strict=True):
                chunks.extend(table[name].chunks)
            at += group.rows
        return Rows(ids, floats, labels, tuple(pa.concat_arrays(chunks) for chunks in lists))


def _values_and_offsets(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
    return values.astype(np.int64), offsets - offsets[0]
