"""Loader: streams batches of a prepared folder, each a function of (seed, epoch, number) alone.

Merlin's own loader never shuffles partitions, hangs at the end with `drop_last`, and counts its
position in itself; Keras reads ahead of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from merlin_cowclip.plugins._tensorflow import Schema, tf
from merlin_cowclip.workflows.data.prepared_data import PARTS, PreparedData
from merlin_cowclip.workflows.errors import UserError, check_whole
from merlin_cowclip.workflows.training.order import Order
from merlin_cowclip.workflows.training.rows import Block, Reader, blocks, list_keys


class Loader(tf.data.Dataset):
    """Batches of one part of a prepared folder, in the format that Merlin's models take.

    It goes where `mm.Loader` goes: `model.fit(loader, epochs=…)`, `evaluate`, `predict`,
    `validation_data=`, `mm.sample_batch`, `for features, labels in loader`.

    **Order.** That of epoch e is a permutation of the row groups and, in windows of `WINDOW_ROWS`,
    of the rows, drawn from (seed, e); without shuffling it is the order on disk. Batch k is the
    k-th piece of it, and rank r of n takes rows r·b/n to (r+1)·b/n of each batch of b. So a run can
    start again at any (epoch, k), also on another number of ranks, each of which reads all rows.

    **Epochs.** A pass over the loader is of the epoch `loader.epoch` of the moment in which its
    first batch is asked for. Keras makes a new pass per epoch and tells a dataset nothing, so in a
    `fit` of several epochs the callback `FollowEpochs(loader)` sets it; without it every epoch has
    the same order. `fit(loader.dataset(epochs=None), epochs=10, steps_per_epoch=len(loader))` needs
    no callback.

    It is a `tf.data.Dataset` and not, as Merlin's loader, a Keras `Sequence`, of which `fit` asks
    for batches in an order of its own. Batches are made ahead in threads, which end with their
    iterator.

    Args:
      data: the prepared folder.
      part: "train" or "test".
      batch_size: samples per batch on all ranks together.
      seed: of the order; the same on all ranks.
      shuffle: whether epochs differ; by default only the training part is shuffled.
      rank: which share of each batch is wanted, from 0.
      ranks: how many share a batch.
      drop_last: whether to leave out the rows of an epoch that fill no batch, so that all batches
        are equal. By default they are a last, smaller batch on one rank, and left out on several.
        With shuffling they are others each epoch.

    Attributes:
      epoch: that of passes over the loader itself, 0 unless set.
      rows: rows of the part, those left out included.
      rows_per_epoch: rows that its batches hold, on all ranks together.
      schema, input_schema, output_schema: of the columns, the label among them, as Merlin's.

    Raises:
      UserError: a number out of range, a part that is not as it was written, or without rows, a
        batch that the ranks cannot share, or one larger than the part (in training, and where the
        last rows are left out).
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
        drop_last: bool | None = None,
    ) -> None:
        if part not in PARTS:
            raise UserError(f"part must be one of {', '.join(PARTS)}. Received: part={part!r}")
        check_whole("batch size", batch_size, 1)
        check_whole("seed", seed, 0)
        check_whole("ranks", ranks, 1)
        check_whole("rank", rank, 0, ranks - 1)
        if batch_size % ranks:
            raise UserError(
                "batch size must be a multiple of the number of ranks, which share each batch. "
                f"Received: batch size {batch_size}, {ranks} ranks. Choose another"
            )
        if ranks > 1 and drop_last is not None and not drop_last:
            raise UserError(
                "drop_last must not be False on several ranks, whose batches must be equal. "
                f"Received: drop_last=False, ranks={ranks}. Leave it out, or use one rank."
            )
        self.data, self.part, self.batch_size, self.seed = data, part, batch_size, seed
        self.rank, self.ranks = rank, ranks
        self.shuffled = part == "train" if shuffle is None else bool(shuffle)
        self.drop_last = ranks > 1 if drop_last is None else bool(drop_last)
        self._reader = Reader(data.spec, data.footers(part))
        self._order = Order(
            self._reader.groups(), batch_size, seed, self.shuffled, rank, ranks, self.drop_last
        )
        if not self.rows or (batch_size > self.rows and (part == "train" or self.drop_last)):
            name = "training" if part == "train" else part
            raise UserError(
                f"batch size must not exceed the {name} rows. Received: batch size {batch_size}, "
                f"{self.rows} rows in {data.path}. Choose a smaller batch or prepare more rows."
            )
        self.epoch = 0
        self._batches = self._as_dataset(lambda: self._blocks(self.epoch, 1, 0), len(self))
        super().__init__(self._batches._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._batches]

    @property
    def element_spec(self) -> Any:
        """Of a batch: features by name, and labels."""
        return self._batches.element_spec

    def __len__(self) -> int:
        """Batches per epoch, the same number on every rank."""
        return self._order.batches

    @property
    def rows(self) -> int:
        """Rows of the part, those left out included."""
        return self._order.rows

    @property
    def rows_per_epoch(self) -> int:
        """Rows that the batches of an epoch hold, on all ranks together."""
        return min(len(self) * self.batch_size, self.rows)

    @property
    def schema(self) -> Schema:
        """Of the columns, the label among them."""
        return self.data.schema

    input_schema = output_schema = schema

    def peek(self) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """The first batch of a pass over the loader, for `mm.sample_batch`."""
        return next(iter(self))

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[dict[str, Any], Any]]:
        """The batches of one epoch from number `start` on: (features, labels b×1).

        Features: b×1 int64 ids, b×1 float32 numbers, and for a list column `name__values` and
        `name__offsets`, as Merlin's loader has them. b is this rank's share.

        Raises:
          UserError: no such epoch or start.
        """
        return (
            block.batch(self.data.spec, i, block.labels.shape[1])
            for block in self._blocks(epoch, 1, start)
            for i in range(len(block.labels))
        )

    def dataset(self, *, epochs: int | None = 1, epoch: int = 0, start: int = 0) -> tf.data.Dataset:
        """The same as a `tf.data.Dataset`: `epochs` epochs (`None`: endless) from a place on.

        Every iterator starts there; `loader.epoch` has no part in it. To go on with a run in the
        middle of an epoch, train the rest of that epoch and then the others:
        `fit(loader.dataset(epoch=e, start=k), initial_epoch=e, epochs=e + 1)` and
        `fit(loader.dataset(epochs=None, epoch=e + 1), initial_epoch=e + 1, epochs=…,
        steps_per_epoch=len(loader))`.

        It has the loader's `batch_size` and `ranks`, by which an optimizer knows the global batch.

        Args:
          epochs: how many, the one begun at `start` included.
          epoch: the first one.
          start: the batch of that epoch to start with.

        Raises:
          UserError: no such epoch or start.
        """
        self._check_place(epoch, epochs, start)
        count = None if epochs is None else epochs * len(self) - start
        dataset = self._as_dataset(lambda: self._blocks(epoch, epochs, start), count)
        dataset.batch_size, dataset.ranks = self.batch_size, self.ranks
        return dataset

    @functools.cached_property
    def endless(self) -> tf.data.Dataset:
        """`dataset(epochs=None)`, made once: that takes longer than a few batches."""
        return self.dataset(epochs=None)

    def _check_place(self, epoch: int, epochs: int | None, start: int) -> None:
        check_whole("epoch", epoch, 0)
        check_whole("start", start, 0, len(self))
        if epochs is not None:
            check_whole("epochs", epochs, 1)

    def _blocks(self, epoch: int, epochs: int | None, start: int) -> Iterator[Block]:
        self._check_place(epoch, epochs, start)
        return blocks(self._order, self._reader, epoch, epochs, start)

    def _as_dataset(
        self, blocks_of: Callable[[], Iterator[Block]], count: int | None
    ) -> tf.data.Dataset:
        """`count` batches; `blocks_of` is called when an iterator's first one is asked for."""
        spec = self.data.spec
        keys = list_keys(spec)
        types = (
            tf.TensorSpec([None, len(spec.categorical), None, 1], tf.int64),
            tf.TensorSpec([None, len(spec.continuous), None, 1], tf.float32),
            tf.TensorSpec([None, None, 1], tf.float32),
            *(tf.TensorSpec([None], tf.int64) for _ in keys),
        )

        # Matrices cross from Python to TensorFlow, where unstacking them copies nothing: 40 columns
        # one by one would cost more than the reading.

        def made() -> Iterator[tuple[Any, ...]]:
            for block in blocks_of():
                yield block.ids, block.numbers, block.labels, *block.lists

        @tf.autograph.experimental.do_not_convert  # it does not know zip(…, strict=True)
        def batches(ids: Any, numbers: Any, labels: Any, *lists: Any) -> tf.data.Dataset:
            block = Block(ids, numbers, labels, lists)
            n, b = tf.unstack(tf.shape(labels, tf.int64)[:2])

            @tf.autograph.experimental.do_not_convert
            def batch(i: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
                return block.batch(spec, i, b, tf.unstack)

            return tf.data.Dataset.range(n).map(batch)

        options = tf.data.Options()
        # TensorFlow would make batches ahead as well, in threads of its own that come into Python.
        options.experimental_optimization.inject_prefetch = False
        options.experimental_optimization.map_parallelization = False
        size = tf.data.INFINITE_CARDINALITY if count is None else count
        dataset = tf.data.Dataset.from_generator(made, output_signature=types).flat_map(batches)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(size))
        return dataset.with_options(options)


class FollowEpochs(tf.keras.callbacks.Callback):
    """Gives a loader Keras's own epoch numbers: each epoch of a `fit` has an order of its own.

    So `initial_epoch` holds for it; also with `BackupAndRestore`, which starts at an epoch that
    only Keras knows. Not behind `loader.repeat().prefetch(n)`, which asks for an epoch's first
    batch in the epoch before: `loader.dataset(epochs=None).prefetch(n)` needs no callback.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self._loader = loader

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the loader's epoch; the first batch is asked for after this."""
        self._loader.epoch = epoch
