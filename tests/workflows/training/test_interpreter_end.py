"""The end of the program while batches are being made."""

import pytest

ENDS = """
import os, sys, time
from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.training import loader as module

module.WINDOW_ROWS = 320
stock = module.read

def slow(groups, spec):
    os.write(1, b"begun, ")
    time.sleep(0.05)  # so that something is being read, at any time
    rows = stock(groups, spec)
    os.write(1, b"done, ")
    return rows

module.read = slow
loader = module.Loader(PreparedData.open(sys.argv[1]), batch_size=1_200)
iterators = [
    iterator
    for _ in range(2)
    for iterator in (
        loader.batches(),
        iter(loader),
        iter(loader.dataset()),
        iter(loader.dataset(epochs=None)),
        iter(loader.prefetch(1_000)),
        iter(loader.dataset(epochs=None).prefetch(1_000)),
    )
]
for iterator in iterators:
    next(iterator)
sys.exit(3)
"""


@pytest.mark.extended
def test_a_program_ends_while_batches_are_being_made(data, interpreter, tmp_path):
    """With batches made in TensorFlow's own threads, most of these programs hung in the end."""
    for time in "123":
        done = interpreter.start(ENDS, data.path, folder=tmp_path / time).end()
        # None was cut off in the middle, wherever that may be.
        assert done.stdout.count("begun") == done.stdout.count("done") > 0
        assert done.returncode == 3, done.stderr
        assert "Traceback" not in done.stderr
        assert "Exception" not in done.stderr
