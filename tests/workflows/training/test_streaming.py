"""Batches made ahead: what is read when, and what of it stays."""

import time

import pytest

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.training import loader as module
from merlin_cowclip.workflows.training.loader import Loader

from .batches import BATCH, TRAIN, assert_same_batches, seeing, steps_of

ENDS = """
import sys, time
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.training import loader as module

module.WINDOW_ROWS, stock = 320, module.read

def slow(groups, spec):
    time.sleep(0.05)  # so that something is being read, at any time
    return stock(groups, spec)

module.read = slow
loader = module.Loader(PreparedData.open(sys.argv[1]), batch_size=1_200)
datasets = [loader, loader.dataset(epochs=None), loader.prefetch(1_000)]
iterators = [iter(dataset) for dataset in datasets * 2]
for iterator in iterators:
    next(iterator)
sys.exit(3)
"""


@pytest.mark.extended
def test_a_program_ends_while_batches_are_being_made(data, interpreter, tmp_path):
    """With batches made in TensorFlow's own threads, most of these programs hung in the end."""
    for name in "abc":
        ended = interpreter.start(ENDS, data.path, folder=tmp_path / name).end()
        assert ended.returncode == 3, ended.stderr
        assert "Traceback" not in ended.stderr


def test_the_next_window_is_read_ahead_and_no_more(data, small_windows, monkeypatch):
    read, stock = [], module.read

    def noted(groups, spec):
        read.append(groups)
        return stock(groups, spec)

    monkeypatch.setattr(module, "read", noted)
    loader = Loader(data, batch_size=40)
    order = [groups for epoch in (3, 4) for groups, _ in loader._order.windows(epoch)]
    windows = [[loader._groups[i] for i in groups] for groups in order]
    batches = iter(loader.dataset(epochs=2, epoch=3))
    next(batches)
    deadline = time.monotonic() + 30
    while len(read) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.1)
    assert read == windows[:2]
    for _ in batches:
        pass
    assert read == windows  # each once


@pytest.mark.parametrize("drop_last", [False, True])
def test_small_batches_that_are_made_together_are_the_same(data, monkeypatch, drop_last):
    options = {"batch_size": BATCH, "seed": 2, "drop_last": drop_last}
    monkeypatch.setattr(module, "BLOCK_ROWS", 5 * BATCH)
    together = list(Loader(data, **options).dataset(epochs=2, epoch=1, start=3))
    monkeypatch.setattr(module, "BLOCK_ROWS", 1)
    one_by_one = Loader(data, **options)
    assert_same_batches(together, [*one_by_one.batches(1, start=3), *one_by_one.batches(2)])


def test_epochs_of_one_batch(data):
    """More of them are made ahead than one."""
    loader = Loader(data, batch_size=TRAIN, seed=3)
    wanted = [batch for epoch in range(1, 6) for batch in loader.batches(epoch)]
    assert_same_batches(loader.dataset(epochs=None, epoch=1).take(5), wanted)


def test_a_failure_while_reading_ahead_is_raised(data, small_windows, monkeypatch):
    stock, left = module.read, [0, 1]

    def failing(groups, spec):
        if not left:
            raise OSError("gone")
        left.pop()
        return stock(groups, spec)

    expected = steps_of(Loader(data, batch_size=BATCH), 0)
    monkeypatch.setattr(module, "read", failing)
    model = seeing(data)
    with pytest.raises(tf.errors.OpError, match="gone"):
        model.fit(Loader(data, batch_size=BATCH), verbose=0)
    assert model.steps == expected[: len(model.steps)]
