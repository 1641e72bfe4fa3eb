"""Loader: streams batches of a prepared folder, each a function of (seed, epoch, number) alone.

Merlin's own loader never shuffles partitions, hangs at the end with `drop_last`, and counts its
position in itself; Keras reads ahead of it. Here the order of an epoch is computed from the seed,
so that a run can start again at any batch, two loaders always agree, and so do the ranks of one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from merlin_cowclip.plugins._tensorflow import Schema, tf
from merlin_cowclip.workflows.checks import check_whole
from merlin_cowclip.workflows.data.prepared_data import PARTS, PreparedData
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.interpreter_end import AT_WORK, InterpreterEnds
from merlin_cowclip.workflows.training.order import Order
from merlin_cowclip.workflows.training.passes import Passes
from merlin_cowclip.workflows.training.rows import Batch, Block, Reader, list_keys
from merlin_cowclip.workflows.training.streaming import Stream, Streams


class Loader(tf.data.Dataset):
    """Batches of one part of a prepared folder, in the format that Merlin's models take.

    It goes where `mm.Loader` goes: `model.fit(loader, epochs=…)`, `evaluate`, `predict`,
    `validation_data=`, `mm.sample_batch`, `for features, labels in loader`.

    **Order.** That of epoch e is a permutation of the row groups and, in windows of `WINDOW_ROWS`,
    of the rows, drawn from (seed, e) as `permutation` says; without shuffling it is the order on
    disk. Batch k is the k-th piece of it, on any number of ranks: rank r of n takes rows r·b/n to
    (r+1)·b/n of each batch of b. So a run can start again at any (epoch, k), also on another number
    of ranks. Every rank reads the whole part, and copies only its own rows.

    **Epochs.** A pass over the loader (an epoch of `fit`, an `evaluate`, a `for` loop) is of the
    epoch `loader.epoch` of the moment in which its first batch is asked for. No pass changes that:
    looking at batches or evaluating on them leaves the training as it is. Keras makes a new pass
    per epoch and tells a dataset nothing, so in a `fit` of several epochs the callback
    `FollowEpochs(loader)` sets it: `fit(loader, epochs=10, callbacks=[FollowEpochs(loader)])`, or
    with `initial_epoch=5` to go on. Without it every epoch has the same order, of which a warning
    tells. `batches` and `dataset` are told their epoch, and do not use this number:
    `fit(loader.dataset(epochs=None), epochs=10, steps_per_epoch=len(loader))` needs no callback.

    **Why a `tf.data.Dataset`** and not, as Merlin's loader, a Keras `Sequence`: `fit` asks for the
    batches of a Sequence in an order of its own, drawn from Python's global random state on each
    rank, after it has asked for batch 0 once to see what that is like. Of a Dataset it takes a new
    iterator per epoch and asks for `len(loader)` batches in order. All that Keras does with a
    Dataset holds, then: with `steps_per_epoch` other than `len(loader)` it goes on where it was,
    for which `loader.dataset(epochs=None)` has the batches; `loader.map(…)` gives a new dataset.

    **Threads.** Windows and batches are made ahead, each in a thread that ends with it, and
    TensorFlow calls Python only while somebody waits for a batch: nothing is left to stop or to
    join, nor to hang when the program ends, in the middle of a pass or not. Windows are let go when
    an iterator has ended or is dropped, by `fit` at its end.

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
            fewer = batch_size - batch_size % ranks
            sizes = f"{fewer} or {fewer + ranks}" if fewer else str(ranks)
            raise UserError(
                "batch size must be a multiple of the number of ranks, which share each batch. "
                f"Received: batch size {batch_size}, {ranks} ranks. Choose {sizes}."
            )
        if ranks > 1 and drop_last is not None and not drop_last:
            raise UserError(
                "drop_last must not be False on several ranks, whose batches must be equal. "
                f"Received: drop_last=False, ranks={ranks}. Leave it out, or use one rank."
            )
        self.data = data
        self.part = part
        self.batch_size = batch_size
        self.seed = seed
        self.shuffled = part == "train" if shuffle is None else bool(shuffle)
        self.rank = rank
        self.ranks = ranks
        self.drop_last = ranks > 1 if drop_last is None else bool(drop_last)
        reader = Reader(data.spec, data.footers(part), functools.partial(data.check_part, part))
        self._order = Order(
            reader.groups(), batch_size, seed, self.shuffled, rank, ranks, self.drop_last
        )
        self._check_rows()
        self._passes = Passes(epochs_differ=self.shuffled)
        self._make_stream = functools.partial(Stream, self._order, reader)
        self._streams = Streams(self._make_stream)
        self._batches = self._as_dataset(
            lambda loader: loader._passes.begin() * len(loader),
            len(self),
            lambda loader, first: loader._passes.end(first // len(loader)),
        )
        super().__init__(self._batches._variant_tensor)

    def whole(self) -> Loader:
        """One of the same batches, not shared."""
        if self.ranks == 1:
            return self
        return Loader(
            self.data,
            self.part,
            batch_size=self.batch_size,
            seed=self.seed,
            shuffle=self.shuffled,
            drop_last=self.drop_last,
        )

    def _check_rows(self) -> None:
        """Refuse a part without rows, or without enough."""
        name = "training" if self.part == "train" else self.part
        if not self.rows:
            raise UserError(
                f"the {name} part must have rows. Received: none in {self.data.path}. Prepare it "
                "with some."
            )
        if self.batch_size > self.rows and (self.part == "train" or self.drop_last):
            raise UserError(
                f"batch size must not exceed the {name} rows. Received: batch size "
                f"{self.batch_size}, {self.rows} rows in {self.data.path}. Choose a smaller batch "
                "or prepare more rows."
            )

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
    def epoch(self) -> int:
        """That of passes over the loader itself."""
        return self._passes.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        check_whole("epoch", epoch, 0)
        self._passes.epoch = epoch

    @property
    def schema(self) -> Schema:
        """Of the columns, the label among them."""
        return self.data.schema

    input_schema = output_schema = schema

    def peek(self) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        """The first batch of a pass over the loader."""
        features, labels = next(self.batches(self.epoch))
        return {name: tf.constant(c) for name, c in features.items()}, tf.constant(labels)

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[dict[str, Any], Any]]:
        """The batches of one epoch from number `start` on: (features, labels b×1).

        Features: b×1 int64 ids, b×1 float32 numbers, and for a list column `name__values` and
        `name__offsets`, as Merlin's loader has them. b is this rank's share.

        Raises:
          UserError: no such epoch or start.
        """
        first, stop = self._span(epoch, 1, start)
        assert stop is not None
        stream = self._make_stream(stop)
        return (self._named(stream[g]) for g in range(first, stop))

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
        first, stop = self._span(epoch, epochs, start)
        dataset = self._as_dataset(lambda _: first, None if stop is None else stop - first)
        dataset.batch_size, dataset.ranks = self.batch_size, self.ranks
        return dataset

    def _span(self, epoch: int, epochs: int | None, start: int) -> tuple[int, int | None]:
        """From which batch to which, all epochs counted through."""
        check_whole("epoch", epoch, 0)
        check_whole("start", start, 0, len(self))
        if epochs is not None:
            check_whole("epochs", epochs, 1)
        stop = None if epochs is None else (epoch + epochs) * len(self)
        return epoch * len(self) + start, stop

    # As a tf.data.Dataset

    def _as_dataset(
        self,
        begin: Callable[[Loader], int],
        count: int | None,
        end: Callable[[Loader, int], None] = lambda loader, first: None,
    ) -> tf.data.Dataset:
        """`count` batches, an iterator's first one being number `begin(self)`.

        `begin` is called when an iterator's first batch is asked for, and `end`, with its number,
        when the last one is. An iterator is a number, and what is ready for it; with that lost it
        would only read again.
        """
        # TensorFlow keeps Python functions in the default graph, for good: no reference to a
        # loader, and what it holds, in them.
        this = weakref.ref(self)

        def begin_iterator() -> np.ndarray:
            loader = this()
            assert loader is not None
            iterator = loader._streams.new_iterator()
            begun = _as_tensorflow_holds_it([iterator, begin(loader)])
            dropping = weakref.finalize(begun, _drop, this, iterator)
            dropping.atexit = False  # type: ignore[misc]  # a property, of which mypy does not know
            return begun

        spec = {
            "next": tf.TensorSpec([], tf.int64),
            "ids": tf.TensorSpec([None, len(self.data.spec.categorical), None, 1], tf.int64),
            "numbers": tf.TensorSpec([None, len(self.data.spec.continuous), None, 1], tf.float32),
            "labels": tf.TensorSpec([None, None, 1], tf.float32),
            **{key: tf.TensorSpec([None], tf.int64) for key in list_keys(self.data.spec)},
        }

        def fetch(begun: np.ndarray, g: np.int64) -> list[np.ndarray]:
            """A block of batches, from the g-th of all epochs on; the next g, or -1 at the end."""
            loader = this()
            assert loader is not None
            iterator, first = begun.tolist()
            stop = None if count is None else first + count
            try:
                with AT_WORK:
                    if int(g) != stop:
                        batches, block = loader._streams.of(iterator, stop).block(int(g))
                        if batches.stop == stop:
                            loader._streams.forget(iterator)
                            end(loader, first)
                        matrices = block.ids, block.numbers, block.labels
                        return [np.array(batches.stop), *matrices, *block.lists]
            except InterpreterEnds:
                pass
            empty = [np.zeros([n or 0 for n in s.shape], s.dtype.name) for s in spec.values()]
            return [np.array(-1), *empty[1:]]

        # Matrices cross from Python to TensorFlow, where unstacking them copies nothing: 40 columns
        # one by one would cost more than the reading.

        @tf.autograph.experimental.do_not_convert  # it does not know zip(…, strict=True)
        def load(begun: tf.Tensor, g: tf.Tensor) -> tuple[tf.Tensor, tuple[tf.Tensor, ...]]:
            columns = tf.numpy_function(fetch, [begun, g], [s.dtype for s in spec.values()])
            for column, s in zip(columns, spec.values(), strict=True):
                column.set_shape(s.shape)
            return columns[0], tuple(columns)

        @tf.autograph.experimental.do_not_convert
        def batches(
            _: tf.Tensor, ids: tf.Tensor, floats: tf.Tensor, labels: tf.Tensor, *lists: tf.Tensor
        ) -> tf.data.Dataset:
            block = Block(ids, floats, labels, lists)
            n, b = tf.unstack(tf.shape(labels, tf.int64)[:2])

            @tf.autograph.experimental.do_not_convert
            def batch(i: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
                found = block.batch(i, b)
                ids, numbers = tf.unstack(found.ids), tf.unstack(found.numbers)
                return self._named(Batch(ids, numbers, found.labels, found.lists))

            return tf.data.Dataset.range(n).map(batch)

        @tf.autograph.experimental.do_not_convert
        def one_iterator(_: tf.Tensor) -> tf.data.Dataset:
            begun = tf.numpy_function(begin_iterator, [], tf.int64)
            begun.set_shape([2])
            endless = tf.data.Dataset.from_tensors(0).repeat()
            blocks = endless.scan(begun[1], lambda g, _: load(begun, g))
            return blocks.take_while(lambda following, *_: following >= 0).flat_map(batches)

        options = tf.data.Options()
        # TensorFlow would make batches ahead as well, in threads of its own that come into Python:
        # for nothing, and see `interpreter_end`.
        options.experimental_optimization.inject_prefetch = False
        options.experimental_optimization.map_parallelization = False
        size = tf.data.INFINITE_CARDINALITY if count is None else count
        dataset = tf.data.Dataset.from_tensors(0).flat_map(one_iterator)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(size))
        dataset = dataset.with_options(options)
        dataset._needs = self, begin_iterator, fetch  # TensorFlow does not promise to keep them
        return dataset

    # What a batch holds

    def _named(self, batch: Batch) -> tuple[dict[str, Any], Any]:
        return batch.features(self.data.spec), batch.labels


def _as_tensorflow_holds_it(numbers: list[int]) -> np.ndarray:
    """An int64 array that ends with the tensor that TensorFlow makes of it.

    TensorFlow takes the memory of an array that lies as its own tensors do, and lets it go with
    them; any other one it copies.
    """
    line = 64  # bytes
    memory = np.empty(len(numbers) + line // 8, np.int64)
    start = -memory.ctypes.data % line // 8
    array = memory[start : start + len(numbers)]
    array[:] = numbers
    return array


def _drop(loader: weakref.ref[Loader], iterator: int) -> None:
    """Let go what is ready for an iterator, which TensorFlow has ended."""
    if there := loader():
        there._streams.forget(iterator)
