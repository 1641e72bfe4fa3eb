"""Batches made ahead: what is read when, and what of it stays."""

import gc
import time

import pytest

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.training import loader as module
from merlin_cowclip.workflows.training.loader import Loader

from .batches import BATCH, as_numpy, assert_same_batches, seeing, steps_of, wait_until


def test_the_next_window_is_read_ahead_and_no_more(data, small_windows, monkeypatch):
    read = []
    stock = module.read

    def noted(groups, spec):
        read.append(groups)
        return stock(groups, spec)

    monkeypatch.setattr(module, "read", noted)
    loader = Loader(data, batch_size=40)
    order = [groups for epoch in (3, 4) for groups, _ in loader._order.windows(epoch)]
    windows = [[loader._groups[i] for i in groups] for groups in order]
    batches = iter(loader.dataset(epochs=2, epoch=3))
    next(batches)
    wait_until(lambda: len(read) == 2)
    time.sleep(0.1)
    assert read == windows[:2]
    for _ in batches:
        pass
    assert read == windows  # each once


@pytest.mark.parametrize("drop_last", [False, True])
def test_small_batches_that_are_made_together_are_the_same(data, monkeypatch, drop_last):
    options = {"batch_size": BATCH, "seed": 2, "drop_last": drop_last}
    monkeypatch.setattr(module, "BLOCK_ROWS", 5 * BATCH)
    together = as_numpy(Loader(data, **options).dataset(epochs=2, epoch=1, start=3))
    monkeypatch.setattr(module, "BLOCK_ROWS", 1)
    one_by_one = Loader(data, **options)
    assert_same_batches(together, [*one_by_one.batches(1, start=3), *one_by_one.batches(2)])


def test_a_loader_lives_as_long_as_what_it_feeds(data):
    options = {"batch_size": 1_500, "seed": 3}
    expected = list(Loader(data, **options).batches())
    mapped = Loader(data, **options).dataset().map(lambda *batch: batch)
    iterator = iter(Loader(data, **options))
    gc.collect()
    assert_same_batches(list(iterator), expected)
    assert_same_batches(list(mapped), expected)


def test_a_failure_while_reading_ahead_is_raised(data, small_windows, monkeypatch):
    stock, left = module.read, [0, 1]

    def failing(groups, spec):
        if not left:
            raise OSError("gone")
        left.pop()
        return stock(groups, spec)

    expected = steps_of(Loader(data, batch_size=BATCH), 0)
    monkeypatch.setattr(module, "read", failing)
    loader = Loader(data, batch_size=BATCH)
    with pytest.raises(OSError, match="gone"):
        list(loader.batches())
    left[:] = [0, 1]
    model = seeing(data)
    with pytest.raises(tf.errors.OpError, match="gone"):
        model.fit(loader, verbose=0)
    assert model.steps == expected[: len(model.steps)]
