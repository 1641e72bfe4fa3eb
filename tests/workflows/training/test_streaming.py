"""Batches made ahead: what is read when, which threads there are, and what is let go."""

import gc
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.workflows.training import order
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.rows import Reader
from merlin_cowclip.workflows.training.streaming import Stream, Streams

from .batches import (
    BATCH,
    as_numpy,
    assert_same_batches,
    seeing,
    steps_of,
    wait_until,
)
from .letting_go import CASES, assert_no_thread_left


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


@pytest.fixture(scope="module")
def let_go(data) -> dict[str, str]:
    """What went wrong with each case of `letting_go`."""
    program = [sys.executable, "-m", "tests.workflows.training.letting_go", str(data.path)]
    done = subprocess.run(
        program, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_what_is_ready_is_let_go_with_its_iterator(let_go, case):
    assert let_go[case] == ""


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
