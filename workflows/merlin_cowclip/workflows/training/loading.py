"""Loader: streams batches of a prepared folder, each a function of (seed, epoch, number) alone.

Merlin's own loader never shuffles partitions, hangs at the end with `drop_last`, and counts its
position in itself; Keras reads ahead of it. Here the order of an epoch is computed from the seed,
so that a run can start again at any batch, two loaders always agree, and so do the ranks of one.
"""

from __future__ import annotations

import atexit
import bisect
import concurrent.futures
import itertools
import numbers
import os
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.plugins._stack import Schema, tf
from merlin_cowclip.workflows.data.prepared import PARTS, PreparedData
from merlin_cowclip.workflows.errors import UserError

WINDOW_ROWS = 1 << 19
"""Rows that are in memory, and permuted, together: about 0.15 GiB for 26 + 13 fields. Two windows
are held, the one in use and the next; more only for batches larger than a window. A row group is
never parted, so one that is larger is a window of its own."""

_AHEAD = 2  # batches made before they are asked for
_ITERATORS = 2  # served side by side; one more, and the one not used for longest reads again

T = TypeVar("T")


@dataclass(frozen=True)
class Rows:
    """Some rows of a prepared folder, one after the other, as they are gathered fastest."""

    ids: np.ndarray  # n×F int64, one-hot fields
    numbers: np.ndarray  # n×C float32, continuous fields
    labels: np.ndarray  # n×1 float32
    lists: tuple[pa.ListArray, ...]  # n each

    def __len__(self) -> int:
        return len(self.labels)

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
class Batch:
    """A batch, or a rank's share of it, each field in one piece."""

    ids: np.ndarray  # F×b×1 int64
    numbers: np.ndarray  # C×b×1 float32
    labels: np.ndarray  # b×1 float32
    lists: tuple[np.ndarray, ...]  # int64, two per list field: its values, and b + 1 offsets

    @classmethod
    def of(cls, rows: Rows) -> Batch:
        """The same as `rows`."""
        return cls(
            np.ascontiguousarray(rows.ids.T)[:, :, np.newaxis],
            np.ascontiguousarray(rows.numbers.T)[:, :, np.newaxis],
            rows.labels,
            tuple(itertools.chain(*map(_values_and_offsets, rows.lists))),
        )


@dataclass(frozen=True)
class RowGroup:
    """A row group of a parquet file."""

    file: Path
    number: int
    rows: int


@dataclass(frozen=True)
class Window:
    """Row groups that are in memory together, at their place in the order of an epoch."""

    epoch: int
    number: int
    start: int  # rows of the epoch before it
    groups: tuple[RowGroup, ...]

    @property
    def rows(self) -> int:
        """Rows of all groups."""
        return sum(group.rows for group in self.groups)


class Loader(tf.data.Dataset):
    """Batches of one part of a prepared folder, in the format that Merlin's models take.

    It goes where `mm.Loader` goes: `model.fit(loader, epochs=…)`, `evaluate`, `predict`,
    `validation_data=`, `mm.sample_batch`, `for features, labels in loader`.

    **Order.** That of epoch e is a permutation of the row groups and, in windows of `WINDOW_ROWS`,
    of the rows, drawn from (seed, e) as `_permutation` says; without shuffling it is the order on
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
        _check_whole("batch size", batch_size, 1)
        _check_whole("seed", seed, 0)
        _check_whole("ranks", ranks, 1)
        _check_whole("rank", rank, 0, ranks - 1)
        if batch_size % ranks:
            fewer = batch_size - batch_size % ranks
            sizes = f"{fewer} or {fewer + ranks}" if fewer else str(ranks)
            raise UserError(
                "batch size must be a multiple of the number of ranks, which share each batch. "
                f"Received: batch size {batch_size}, {ranks} ranks. Choose {sizes}."
            )
        if drop_last is False and ranks > 1:
            raise UserError(
                "drop_last must not be False on several ranks, whose batches must be equal. "
                f"Received: drop_last=False, ranks={ranks}. Leave it out, or use one rank."
            )
        self.data = data
        self.part = part
        self.batch_size = batch_size
        self.seed = seed
        self.shuffled = part == "train" if shuffle is None else shuffle
        self.rank = rank
        self.ranks = ranks
        self.drop_last = ranks > 1 if drop_last is None else drop_last
        self._groups: list[RowGroup] = []
        self._footers = data.footers(part)  # of many row groups, parsing one takes long
        for file, footer in self._footers.items():
            for number in range(footer.num_row_groups):
                if rows := footer.row_group(number).num_rows:
                    self._groups.append(RowGroup(file, number, rows))
        self.rows = sum(group.rows for group in self._groups)
        name = "training" if part == "train" else part
        if not self.rows:
            raise UserError(
                f"the {name} part must have rows. Received: none in {data.path}. Prepare it with "
                "some."
            )
        if batch_size > self.rows and (part == "train" or self.drop_last):
            raise UserError(
                f"batch size must not exceed the {name} rows. Received: batch size {batch_size}, "
                f"{self.rows} rows in {data.path}. Choose a smaller batch or prepare more rows."
            )
        self._epoch = 0
        self._repeats = 0  # passes that may have the order of the last one without a warning
        self._passed: int | None = None  # the epoch of the last pass that came to its end
        self._lock = threading.RLock()  # a dropped iterator may be forgotten anywhere, even in it
        self._streams: OrderedDict[int, _Stream] = OrderedDict()  # by iterator, last used last
        self._iterators = itertools.count()
        self._passes = self._as_dataset(Loader._begin_pass, len(self), Loader._end_pass)
        super().__init__(self._passes._variant_tensor)

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._passes]

    @property
    def element_spec(self) -> Any:
        """Of a batch: features by name, and labels."""
        return self._passes.element_spec

    def __len__(self) -> int:
        """Batches per epoch, the same number on every rank."""
        whole, left = divmod(self.rows, self.batch_size)
        return whole + (left > 0 and not self.drop_last)

    @property
    def epoch(self) -> int:
        """That of passes over the loader itself."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        _check_whole("epoch", epoch, 0)
        with self._lock:
            self._epoch = epoch

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
        stream = _Stream(self, stop)
        return (self._named(stream[g]) for g in range(first, stop))

    def dataset(self, *, epochs: int | None = 1, epoch: int = 0, start: int = 0) -> tf.data.Dataset:
        """The same as a `tf.data.Dataset`: `epochs` epochs (`None`: endless) from a place on.

        Every iterator starts there; `loader.epoch` has no part in it. To go on with a run in the
        middle of an epoch, train the rest of that epoch and then the others:
        `fit(loader.dataset(epoch=e, start=k), initial_epoch=e, epochs=e + 1)` and
        `fit(loader.dataset(epochs=None, epoch=e + 1), initial_epoch=e + 1, epochs=…,
        steps_per_epoch=len(loader))`.

        Args:
          epochs: how many, the one begun at `start` included.
          epoch: the first one.
          start: the batch of that epoch to start with.

        Raises:
          UserError: no such epoch or start.
        """
        first, stop = self._span(epoch, epochs, start)
        return self._as_dataset(lambda _: first, None if stop is None else stop - first)

    def _span(self, epoch: int, epochs: int | None, start: int) -> tuple[int, int | None]:
        """From which batch to which, all epochs counted through."""
        _check_whole("epoch", epoch, 0)
        _check_whole("start", start, 0, len(self))
        if epochs is not None:
            _check_whole("epochs", epochs, 1)
        stop = None if epochs is None else (epoch + epochs) * len(self)
        return epoch * len(self) + start, stop

    # As a tf.data.Dataset

    def _begin_pass(self) -> int:
        with self._lock:
            epoch, again = self._epoch, self._passed == self._epoch
            allowed = self._repeats > 0
            self._repeats -= again and allowed
        if again and self.shuffled and not allowed:
            warnings.warn(
                f"this pass over the loader has the order of the last one, that of epoch {epoch}. "
                "In a fit of several epochs, give it the callback FollowEpochs(loader), or train "
                "on loader.dataset(epochs=None)",
                stacklevel=2,
            )
        return epoch * len(self)

    def _end_pass(self, first: int) -> None:
        self._passed = first // len(self)

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
            with loader._lock:
                iterator = next(loader._iterators)
            begun = _as_tensorflow_holds_it([iterator, begin(loader)])
            dropping = weakref.finalize(begun, _drop, this, iterator)
            dropping.atexit = False  # type: ignore[misc]  # a property, of which mypy does not know
            return begun

        spec = {
            "going": tf.TensorSpec([], tf.bool),
            "ids": tf.TensorSpec([len(self._one_hot), None, 1], tf.int64),
            "numbers": tf.TensorSpec([len(self.data.spec.continuous), None, 1], tf.float32),
            "labels": tf.TensorSpec([None, 1], tf.float32),
            **{key: tf.TensorSpec([None], tf.int64) for key in self._list_keys},
        }

        def fetch(begun: np.ndarray, i: np.int64) -> list[np.ndarray]:
            loader = this()
            assert loader is not None
            iterator, first = begun.tolist()
            stop = None if count is None else first + count
            try:
                with _AT_WORK:
                    batch = loader._stream(iterator, stop)[first + int(i)]
                    if first + int(i) + 1 == stop:
                        loader._forget(iterator)
                        end(loader, first)
                    return [np.array(True), batch.ids, batch.numbers, batch.labels, *batch.lists]
            except _InterpreterEnds:
                return [np.zeros([n or 0 for n in s.shape], s.dtype.name) for s in spec.values()]

        # Matrices cross from Python to TensorFlow, where unstacking them copies nothing: 40 columns
        # one by one would cost more than the reading.

        @tf.autograph.experimental.do_not_convert  # it does not know zip(…, strict=True)
        def load(begun: tf.Tensor, i: tf.Tensor) -> tuple[tf.Tensor, ...]:
            columns = tf.numpy_function(fetch, [begun, i], [s.dtype for s in spec.values()])
            for column, s in zip(columns, spec.values(), strict=True):
                column.set_shape(s.shape)
            return tuple(columns)

        @tf.autograph.experimental.do_not_convert
        def name(
            _: tf.Tensor, ids: tf.Tensor, floats: tf.Tensor, labels: tf.Tensor, *lists: tf.Tensor
        ) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
            return self._named(Batch(tf.unstack(ids), tf.unstack(floats), labels, lists))

        @tf.autograph.experimental.do_not_convert
        def one_iterator(_: tf.Tensor) -> tf.data.Dataset:
            begun = tf.numpy_function(begin_iterator, [], tf.int64)
            begun.set_shape([2])
            numbered = tf.data.Dataset.range(2**62 if count is None else count)
            loaded = numbered.map(lambda i: load(begun, i))
            return loaded.take_while(lambda going, *_: going).map(name)

        options = tf.data.Options()
        # TensorFlow would make batches ahead as well, in threads of its own that come into Python:
        # for nothing, and see `_AtWork`.
        options.experimental_optimization.inject_prefetch = False
        options.experimental_optimization.map_parallelization = False
        size = tf.data.INFINITE_CARDINALITY if count is None else count
        dataset = tf.data.Dataset.from_tensors(0).flat_map(one_iterator)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(size))
        dataset = dataset.with_options(options)
        dataset._needs = self, begin_iterator, fetch  # TensorFlow does not promise to keep them
        return dataset

    def _stream(self, iterator: int, stop: int | None) -> _Stream:
        with self._lock:
            stream = self._streams.pop(iterator, None) or _Stream(self, stop)
            self._streams[iterator] = stream
            while len(self._streams) > _ITERATORS:
                self._streams.popitem(last=False)
            return stream

    def _forget(self, iterator: int) -> None:
        with self._lock:
            self._streams.pop(iterator, None)

    # What a batch holds

    @property
    def _one_hot(self) -> tuple[str, ...]:
        return tuple(self.data.spec.categorical)

    @property
    def _list_keys(self) -> list[str]:
        return [
            f"{name}__{part}" for name in self.data.spec.lists for part in ("values", "offsets")
        ]

    def _named(self, batch: Batch) -> tuple[dict[str, Any], Any]:
        features = dict(zip(self._one_hot, batch.ids, strict=True))
        features |= dict(zip(self.data.spec.continuous, batch.numbers, strict=True))
        features |= dict(zip(self._list_keys, batch.lists, strict=True))
        return features, batch.labels

    # Where a batch lies, and reading it

    def _windows(self, epoch: int) -> list[Window]:
        """The epoch's row groups in order, `WINDOW_ROWS` or a little more at a time."""
        groups = list(self._groups)
        if self.shuffled:
            order = _permutation(len(groups), self.seed, _OF_GROUPS, epoch)
            groups = [groups[i] for i in order]
        windows: list[Window] = []
        while groups:
            start = windows[-1].start + windows[-1].rows if windows else 0
            enough = itertools.accumulate(group.rows for group in groups)
            taken = sum(1 for _ in itertools.takewhile(lambda rows: rows < WINDOW_ROWS, enough)) + 1
            windows.append(Window(epoch, len(windows), start, tuple(groups[:taken])))
            groups = groups[taken:]
        return windows

    def _share(self, k: int) -> tuple[int, int]:
        """From which row of an epoch to which this rank's share of batch k is."""
        start = k * self.batch_size
        size = min(self.batch_size, self.rows - start) // self.ranks
        return start + self.rank * size, start + (self.rank + 1) * size

    def _order(self, window: Window) -> np.ndarray:
        """Of the window's rows, as they lie on disk group by group, which comes when."""
        if not self.shuffled:
            return np.arange(window.rows)
        return _permutation(window.rows, self.seed, _OF_ROWS, window.epoch, window.number)

    def _read(self, window: Window) -> Rows:
        """The window's rows, as they lie on disk group by group."""
        spec, n = self.data.spec, window.rows
        columns = [*self._one_hot, *spec.continuous, *spec.lists, spec.label]
        ids = np.empty((n, len(self._one_hot)), np.int64)
        floats = np.empty((n, len(spec.continuous)), np.float32)
        labels = np.empty((n, 1), np.float32)
        lists: list[list[pa.Array]] = [[] for _ in spec.lists]
        at = 0
        for group in window.groups:
            with pq.ParquetFile(group.file, metadata=self._footers[group.file]) as parquet:
                table = parquet.read_row_group(group.number, columns=columns)
            here = slice(at, at + group.rows)
            for matrix, names in (
                (ids, self._one_hot),
                (floats, spec.continuous),
                (labels, [spec.label]),
            ):
                for i, name in enumerate(names):
                    matrix[here, i] = table[name].to_numpy()
            for chunks, name in zip(lists, spec.lists, strict=True):
                chunks.extend(table[name].chunks)
            at += group.rows
        return Rows(ids, floats, labels, tuple(pa.concat_arrays(chunks) for chunks in lists))


def _permutation(n: int, seed: int, *key: int) -> np.ndarray:
    """0 … n - 1 in an order that belongs to (seed, key), and will in every version of NumPy.

    `SeedSequence` keeps the streams of different keys apart, which begin with what they are for,
    also where one key is the beginning of another. The order must never change, or a run that goes
    on would train on some rows of its epoch twice; hence `RandomState`, whose numbers NumPy has
    frozen, those of `Generator` it may change.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=key))
    return np.random.RandomState(bits).permutation(n)


_OF_GROUPS, _OF_ROWS = 0, 1  # what a stream of random numbers is for


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
        there._forget(iterator)


class _Stream:
    """A loader's batches by number g = epoch · len(loader) + k, up to `stop`, some made ahead.

    Any may be asked for at any time. Asked for in order, the next ones are being made, and the next
    window is being read, while one is used; across the end of an epoch, too.
    """

    def __init__(self, loader: Loader, stop: int | None) -> None:
        self._loader = loader
        self._stop = stop
        self._plans: dict[int, list[Window]] = {}
        self._read: dict[tuple[int, int], concurrent.futures.Future[tuple[Rows, np.ndarray]]] = {}
        self._made: dict[int, concurrent.futures.Future[Batch]] = {}
        self._reading = threading.Lock()  # one window after the other: the first is wanted first

    def __getitem__(self, g: int) -> Batch:
        wanted = range(g, g + 1 + _AHEAD if self._stop is None else min(g + 1 + _AHEAD, self._stop))
        epochs = {i // len(self._loader) for i in wanted}
        self._plans = {e: self._plans.get(e) or self._loader._windows(e) for e in epochs}
        pieces = {i: self._pieces(i) for i in wanted}
        windows = {(w.epoch, w.number): w for i in wanted for w, _, _ in pieces[i]}
        first = pieces[g][0][0]
        for after in self._plans[first.epoch][first.number + 1 : first.number + 2]:
            windows[after.epoch, after.number] = after
        # What is no longer wanted goes with the old dictionary.
        self._read = {
            key: self._read.get(key) or _in_thread(self._hold, window)
            for key, window in windows.items()
        }
        self._made = {
            i: self._made.get(i)
            or _in_thread(
                _make, [(self._read[w.epoch, w.number], low, high) for w, low, high in pieces[i]]
            )
            for i in wanted
        }
        return self._made.pop(g).result()

    def _pieces(self, g: int) -> list[tuple[Window, int, int]]:
        """From which windows batch g is, from which row to which."""
        epoch, k = divmod(g, len(self._loader))
        windows = self._plans[epoch]
        start, stop = self._loader._share(k)
        pieces = []
        for window in windows[bisect.bisect_right(windows, start, key=lambda w: w.start) - 1 :]:
            if window.start >= stop:
                break
            low = max(start - window.start, 0)
            pieces.append((window, low, min(stop - window.start, window.rows)))
        return pieces

    def _hold(self, window: Window) -> tuple[Rows, np.ndarray]:
        with self._reading:
            return self._loader._read(window), self._loader._order(window)


def _make(
    pieces: list[tuple[concurrent.futures.Future[tuple[Rows, np.ndarray]], int, int]],
) -> Batch:
    parts = []
    for reading, low, high in pieces:
        rows, order = reading.result()
        parts.append(rows.take(order[low:high]))
    return Batch.of(Rows.joined(parts))


class FollowEpochs(tf.keras.callbacks.Callback):
    """Gives a loader Keras's own epoch numbers: each epoch of a `fit` has an order of its own.

    So `initial_epoch` holds for it; also with `BackupAndRestore`, which starts at an epoch that
    only Keras knows.
    """

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self._loader = loader

    _BESIDE = 2  # passes over an epoch beside the fit's own: an evaluation on it before and after

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set the loader's epoch; the first batch is asked for after this."""
        self._loader.epoch = epoch
        self._loader._repeats = self._BESIDE  # few: a fit that fails has no `on_train_end`

    def on_train_end(self, logs: Any = None) -> None:
        """What this fit said holds for no later one; but a pass to evaluate may be as its last."""
        self._loader._repeats, self._loader._passed = 0, None


def _in_thread(work: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
    """Start `work` in a thread of its own, which ends with it."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            with _AT_WORK:
                future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="merlin-cowclip-loader", daemon=True).start()
    return future


class _InterpreterEnds(Exception):  # noqa: N818 - no error
    """There are no more batches."""


class _AtWork:
    """Where threads are in our Python: they come out before the interpreter ends, and stay out.

    A thread that needs the interpreter when that has begun to end never comes back, and TensorFlow,
    which ends an iterator by waiting for its threads, would wait for ever, or abort.
    """

    _QUIET = 0.05  # seconds in which a thread of TensorFlow's would have asked again
    _PATIENCE = 10.0  # seconds for a file system that does not answer

    def __init__(self) -> None:
        self._begin()
        self._ended = False
        os.register_at_fork(after_in_child=self._begin)  # which has none of the threads
        atexit.register(self._end)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._threads = 0
        self._last = -self._QUIET

    def __enter__(self) -> None:
        with self._changed:
            self._last = time.monotonic()
            if self._ended:
                raise _InterpreterEnds
            self._threads += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._last = time.monotonic()
            self._threads -= 1
            self._changed.notify_all()

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            deadline = time.monotonic() + self._PATIENCE
            while self._threads or time.monotonic() < self._last + self._QUIET:
                if time.monotonic() > deadline:
                    return
                self._changed.wait(self._QUIET)


_AT_WORK = _AtWork()


def _check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuse what is no whole number, or out of range."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if whole and least <= value and (most is None or value <= most):
        return
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise UserError(f"{name} must be a whole number {limits}. Received: {value!r}")


def _values_and_offsets(column: pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values.to_numpy(zero_copy_only=False)[offsets[0] : offsets[-1]]
    return values.astype(np.int64), offsets - offsets[0]
