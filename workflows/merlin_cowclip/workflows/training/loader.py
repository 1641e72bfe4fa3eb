# SPDX-License-Identifier: Apache-2.0
"""Loader: batches of a prepared folder, each a function of (seed, epoch, number) only.

Merlin's own loader never shuffles partitions, hangs at the end with `drop_last`, and counts its
position in itself; Keras reads ahead of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from merlin_cowclip.plugins._tensorflow import Schema, tf
from merlin_cowclip.workflows.data.prepared_data import PARTS, TITLES, PreparedData
from merlin_cowclip.workflows.errors import UserError, check_whole
from merlin_cowclip.workflows.prefetch import prefetch
from merlin_cowclip.workflows.training.rows import features_of, groups_of, read, rebatch

BLOCK_ROWS = 1 << 14
"""Rows of small batches that go to TensorFlow together; each call of Python takes time."""

WINDOW_ROWS = 1 << 19
"""Rows that are permuted together: about 0.15 GiB for 26 + 13 fields. Three windows are in memory;
more only if a batch is larger than a window. A larger row group is a window by itself."""

Batch = tuple[dict[str, np.ndarray], np.ndarray]  # features and labels


_OF_GROUPS, _OF_ROWS = 0, 1  # the first number of a permutation's key


class Order(NamedTuple):
    """The order of rows, by seed, epoch and batch number only; arguments are `Loader`'s."""

    group_rows: Sequence[int]  # rows of each row group, in the order on disk
    batch_size: int
    seed: int = 0
    shuffled: bool = True
    rank: int = 0
    ranks: int = 1
    drop_last: bool = False

    @property
    def batches(self) -> int:
        """Batches per epoch, the same number on every rank."""
        full, left = divmod(sum(self.group_rows), self.batch_size)
        return full + (left > 0 and not self.drop_last)

    def windows(self, epoch: int, start: int = 0) -> Iterator[tuple[list[int], np.ndarray]]:
        """Row groups to read together, and which of their rows to take, in order.

        Rows are numbered across the groups of a window. Rows of other ranks, of batches before
        `start`, and rows that fill no batch are not taken. A window without rows is left out.
        """
        groups = np.arange(len(self.group_rows))
        if self.shuffled:
            groups = permutation(len(groups), self.seed, _OF_GROUPS, epoch)
        window: list[int] = []
        number = before = rows = 0  # windows and rows before this window, rows in it
        for group in groups.tolist():
            window.append(group)
            rows += self.group_rows[group]
            if rows < WINDOW_ROWS and before + rows < sum(self.group_rows):
                continue
            batch, place = np.divmod(np.arange(before, before + rows), self.batch_size)
            is_mine = place // (self.batch_size // self.ranks) == self.rank
            is_mine &= (start <= batch) & (batch < self.batches)
            if is_mine.any():
                order = np.arange(rows)
                if self.shuffled:
                    order = permutation(rows, self.seed, _OF_ROWS, epoch, number)
                yield window, order[is_mine]
            window, number, before, rows = [], number + 1, before + rows, 0


def permutation(n: int, seed: int, *key: int) -> np.ndarray:
    """A permutation of 0 … n - 1 by (seed, key), the same in every version of NumPy.

    Resuming depends on it. `RandomState` is frozen by NumPy, `Generator` is not. `SeedSequence`
    keeps the streams of different keys apart, also where one key is the beginning of another.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key))
    return np.random.RandomState(bits).permutation(n)


class Loader(tf.data.Dataset):
    """Batches of one split of a prepared folder, in the format of Merlin's models.

    It can be used where `mm.Loader` can: `model.fit(loader, epochs=…)`, `evaluate`, `predict`,
    `validation_data=`, `mm.sample_batch`, `for features, labels in loader`. It is a
    `tf.data.Dataset`, because `fit` reads Keras's `Sequence` in an order of its own.

    **Order.** Epoch e is a permutation of the row groups and, in windows of `WINDOW_ROWS`, of the
    rows, drawn from (seed, e); without shuffling it is the order on disk. Rank r of n takes rows
    r·b/n to (r+1)·b/n of each batch of b. So a run can resume at any (epoch, batch), also on
    another number of ranks.

    **Epochs.** The loader itself is epoch 0, in every pass. Several epochs, each in its own order:
    `fit(loader.dataset(epochs=None), epochs=10, steps_per_epoch=len(loader))`.

    Args:
      data: the prepared folder.
      part: "train", "valid" or "test".
      batch_size: samples per batch on all ranks together.
      seed: of the order; the same on all ranks.
      shuffle: whether epochs differ; by default only the training split is shuffled.
      rank: which share of each batch is wanted, from 0.
      ranks: how many share a batch.
      drop_last: whether to drop the rows of an epoch that fill no batch, others in each shuffled
        epoch; they are a smaller last batch otherwise. On several ranks they are always dropped.

    Attributes:
      rows: rows of the split.
      rows_per_epoch: rows in the batches of an epoch, on all ranks together.
      schema, input_schema, output_schema: of the columns with the label, as Merlin's.

    Raises:
      UserError: a number out of range, a file that changed, a batch that the ranks cannot share, or
        one that is larger than the split (in training, or with `drop_last`).
    """

    def __init__(
        self,
        data: PreparedData,
        part: str = "train",
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool | None = None,
        rank: int = 0,
        ranks: int = 1,
        drop_last: bool = False,
    ) -> None:
        if part not in PARTS:
            raise UserError(f"part must be one of {', '.join(PARTS)}. Received: part={part!r}")
        data.require(part)
        check_whole("batch size", batch_size, 1)
        check_whole("seed", seed, 0)
        check_whole("ranks", ranks, 1)
        check_whole("rank", rank, 0, ranks - 1)
        if batch_size % ranks:
            raise UserError(
                "batch size must be a multiple of the number of ranks, which share each batch. "
                f"Received: batch size {batch_size}, {ranks} ranks. Choose another"
            )
        self.data, self.batch_size, self.ranks = data, batch_size, ranks
        self._groups = groups_of(data.footers(part))
        sizes = [footer.row_group(number).num_rows for _, footer, number in self._groups]
        shuffled = part == "train" if shuffle is None else bool(shuffle)
        drop = drop_last or ranks > 1
        self._order = Order(sizes, batch_size, seed, shuffled, rank, ranks, drop)
        self.rows = sum(sizes)
        self.rows_per_epoch = min(len(self) * batch_size, self.rows)
        if batch_size > self.rows and (part == "train" or drop):
            raise UserError(
                f"batch size must not exceed the {TITLES[part]} rows. Received: batch size "
                f"{batch_size}, {self.rows} rows in {data.path}. Choose a smaller batch or prepare "
                "more rows."
            )
        self._batches = self.dataset()
        super().__init__(self._batches._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._batches]

    @property
    def element_spec(self) -> Any:
        """Features by name, and labels, of a batch."""
        return self._batches.element_spec

    def __len__(self) -> int:
        """Batches per epoch, the same number on every rank."""
        return self._order.batches

    @property
    def schema(self) -> Schema:
        """Of the columns with the label."""
        return self.data.schema

    input_schema = output_schema = schema

    def peek(self) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """The first batch, for `mm.sample_batch`."""
        return next(iter(self))

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from number `start` on, as NumPy arrays: (features, labels b×1).

        Features: b×1 int64 ids, b×1 float32 numbers, and for a list column `name__values` and
        `name__offsets`, as in Merlin's loader. b is this rank's share.

        Raises:
          UserError: no such epoch or start.
        """
        self._check_place(epoch, 1, start)
        return (
            ({name: array[i] for name, array in features.items()}, labels[i])
            for features, labels in self._blocks(epoch, 1, start)
            for i in range(len(labels))
        )

    def dataset(self, *, epochs: int | None = 1, epoch: int = 0, start: int = 0) -> tf.data.Dataset:
        """The batches of some epochs as a `tf.data.Dataset`.

        To resume a run in the middle of an epoch, train the rest of that epoch and then the others:
        `fit(loader.dataset(epoch=e, start=k), initial_epoch=e, epochs=e + 1)` and
        `fit(loader.dataset(epochs=None, epoch=e + 1), initial_epoch=e + 1, epochs=…,
        steps_per_epoch=len(loader))`.

        Args:
          epochs: how many, the first one included; None: endless.
          epoch: the first one.
          start: the batch of that epoch to start with.

        Raises:
          UserError: no such epoch or start.
        """
        self._check_place(epoch, epochs, start)
        spec = self.data.spec
        kinds = dict.fromkeys(spec.categorical, tf.int64)
        kinds |= dict.fromkeys(spec.continuous, tf.float32)
        features = {name: tf.TensorSpec([None, None, 1], kind) for name, kind in kinds.items()}
        for name in spec.lists:
            for end in ("values", "offsets"):
                features[f"{name}__{end}"] = tf.TensorSpec([None, None], tf.int64)
        dataset = tf.data.Dataset.from_generator(
            lambda: self._blocks(epoch, epochs, start),
            output_signature=(features, tf.TensorSpec([None, None, 1], tf.float32)),
        ).unbatch()
        count = tf.data.INFINITE_CARDINALITY if epochs is None else epochs * len(self) - start
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(count))
        options = tf.data.Options()
        # TensorFlow would make batches ahead as well, in threads of its own that come into Python.
        options.experimental_optimization.inject_prefetch = False
        options.experimental_optimization.map_parallelization = False
        return dataset.with_options(options)

    def _check_place(self, epoch: int, epochs: int | None, start: int) -> None:
        check_whole("epoch", epoch, 0)
        check_whole("start", start, 0, len(self))
        if epochs is not None:
            check_whole("epochs", epochs, 1)

    def _windows(
        self, epoch: int, epochs: int | None, start: int
    ) -> Iterator[tuple[int, pa.Table]]:
        """This rank's rows in their order, with their epoch."""
        for e in itertools.count(epoch) if epochs is None else range(epoch, epoch + epochs):
            for groups, order in self._order.windows(e, start if e == epoch else 0):
                table = read([self._groups[i] for i in groups], self.data.spec)
                yield e, table.take(pa.array(order))

    def _blocks(self, epoch: int, epochs: int | None, start: int) -> Iterator[Batch]:
        """Batches of one size, several at a time: each array has them along its first axis.

        The next block is made, and the next window read, while one is used.
        """
        spec, size = self.data.spec, self.batch_size // self.ranks
        together = 1 if spec.lists else max(BLOCK_ROWS // size, 1)

        def made() -> Iterator[Batch]:
            windows = prefetch(self._windows(epoch, epochs, start))
            for _, tables in itertools.groupby(windows, itemgetter(0)):
                for table in rebatch((table for _, table in tables), together * size):
                    whole = len(table) // size * size
                    for part in (table.slice(0, whole), table.slice(whole)):
                        if n := -(-len(part) // size):
                            labels = part[spec.label].to_numpy().reshape(n, -1, 1)
                            yield features_of(part, spec, n), labels

        return prefetch(made())
