"""Batches made ahead: what is read when, which threads there are, and what is let go."""

import contextlib
import functools
import gc
import threading
import time
import weakref

import pytest

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.workflows.training import order
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.rows import Reader
from merlin_cowclip.workflows.training.streaming import ITERATORS, Stream, Streams

from .batches import (
    BATCH,
    as_numpy,
    assert_same_batches,
    seeing,
    steps_of,
    wait_until,
)

THREAD = "merlin-cowclip-loader"


def loader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(THREAD)]


def assert_no_thread_left() -> None:
    wait_until(lambda: loader_threads() == [])


def test_the_next_window_is_read_ahead_and_no_more(data, small_windows, monkeypatch):
    read = []
    stock = Reader.read

    def noted(reader, window):
        read.append((window.epoch, window.number))
        return stock(reader, window)

    monkeypatch.setattr(Reader, "read", noted)
    loader = Loader(data, batch_size=40)
    batches = iter(loader.dataset(epochs=2, epoch=3))
    next(batches)
    wait_until(lambda: len(read) == 2)
    time.sleep(0.1)
    assert read == [(3, 0), (3, 1)]
    streams = loader._streams._streams
    held = [len(streams[0]._read)]
    for _ in batches:
        held.append(len(streams[0]._read) if streams else 0)
    assert max(held) == 2
    assert held[-1] == 0  # nothing is kept of an iterator that has ended
    windows = [(w.epoch, w.number) for epoch in (3, 4) for w in loader._order.windows(epoch)]
    assert read == windows  # each once


def test_tensorflow_comes_for_a_batch_only_when_one_is_waited_for(data, monkeypatch):
    monkeypatch.setattr(order, "BLOCK_ROWS", BATCH)
    asked = []
    stock = Streams.of
    monkeypatch.setattr(Streams, "of", lambda *a: asked.append(a[1]) or stock(*a))
    loader = Loader(data, batch_size=BATCH)
    batches = iter(loader.map(lambda features, labels: labels))
    time.sleep(0.2)
    assert asked == []
    for n in range(1, 4):
        next(batches)
        time.sleep(0.1)
        assert len(asked) == n


@pytest.mark.parametrize("drop_last", [False, True])
def test_small_batches_are_made_together(data, monkeypatch, drop_last):
    """But for an epoch's smaller one, and the last, by which a pass has come to its end."""
    monkeypatch.setattr(order, "BLOCK_ROWS", 5 * BATCH)
    made = []
    stock = Stream.block
    monkeypatch.setattr(Stream, "block", lambda s, g: made.append(stock(s, g)) or made[-1])
    loader = Loader(data, batch_size=BATCH, seed=2, drop_last=drop_last)
    n, whole = len(loader), loader.rows // BATCH
    assert n == whole + (not drop_last)
    assert whole % 5 == 3
    got = as_numpy(loader.dataset(epochs=2, epoch=1, start=3))
    expected = [3, *range(5, whole, 5), *([] if drop_last else [whole])]
    second = [*range(0, whole - 1, 5), n - 1]
    assert [b.start for b, _ in made] == [n + k for k in expected] + [2 * n + k for k in second]
    assert loader.delivered == sum(len(b) for b, _ in made) == 2 * n - 3
    monkeypatch.setattr(order, "BLOCK_ROWS", 1)
    one_by_one = Loader(data, batch_size=BATCH, seed=2, drop_last=drop_last)
    assert_same_batches(got, [*one_by_one.batches(1, start=3), *one_by_one.batches(2)])


@pytest.mark.parametrize("how", ["batches", "dataset", "endless dataset", "loader"])
def test_an_abandoned_iterator_leaves_no_thread(data, small_windows, how):
    loader = Loader(data, batch_size=BATCH)
    iterate = {
        "batches": loader.batches,
        "dataset": loader.dataset,
        "endless dataset": functools.partial(loader.dataset, epochs=None),
        "loader": loader.__iter__,
    }[how]
    iterators = [iter(iterate()) for _ in range(5)]
    for iterator in iterators:
        next(iterator)
        next(iterator)
    assert_no_thread_left()  # they end by themselves
    assert len(loader._streams) <= ITERATORS  # of the others nothing is kept
    held = weakref.ref(loader)
    del iterate, iterators, iterator, loader
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("how", ["endless dataset", "a pass that stops", "fit", "a failing fit"])
def test_windows_are_let_go_with_the_iterator(data, small_windows, how):
    """An endless dataset's last windows stayed in memory for as long as its loader."""

    class Fail(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("in the middle")

    loader = Loader(data, batch_size=BATCH)
    if how.endswith("fit"):
        model = seeing(data)
        callbacks = [Fail()] if how == "a failing fit" else []
        with contextlib.suppress(RuntimeError):
            model.fit(
                loader.dataset(epochs=None), steps_per_epoch=3, callbacks=callbacks, verbose=0
            )
    else:
        iterator = iter(loader.dataset(epochs=None) if how == "endless dataset" else loader)
        next(iterator)
        assert len(loader._streams) == 1
        del iterator
    gc.collect()
    wait_until(lambda: not loader._streams)


@pytest.mark.parametrize("how", ["loader", "dataset"])
def test_a_loader_lives_as_long_as_what_it_feeds(data, how):
    def made() -> Loader:
        loader = Loader(data, batch_size=1_500, seed=3)
        return loader if how == "loader" else loader.dataset()

    expected = list(Loader(data, batch_size=1_500, seed=3).batches())
    held = made()
    iterator, mapped = iter(made()), made().map(lambda *batch: batch)
    gc.collect()
    for batches in (held, iterator, mapped):
        assert_same_batches(list(batches), expected)


def test_a_failure_while_reading_ahead_is_raised(data, small_windows, monkeypatch):
    stock = Reader.read

    def failing(reader, window):
        if window.number == 2:
            raise OSError("gone")
        return stock(reader, window)

    expected = steps_of(Loader(data, batch_size=BATCH), 0)
    monkeypatch.setattr(Reader, "read", failing)
    loader = Loader(data, batch_size=BATCH)
    with pytest.raises(OSError, match="gone"):
        list(loader.batches())
    with pytest.raises(tf.errors.OpError, match="gone"):
        list(loader.dataset())
    model = seeing(data)
    with pytest.raises(tf.errors.OpError, match="gone"):
        model.fit(loader, verbose=0)
    assert model.steps == expected[: len(model.steps)]
    assert_no_thread_left()
