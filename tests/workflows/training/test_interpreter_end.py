"""The end of the program while batches are being made."""

import pytest

ENDS = """
import os, sys, time
from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.training import order
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.rows import Reader

order.WINDOW_ROWS = 320
stock = Reader.read

def slow(reader, window):
    os.write(1, b"begun, ")
    time.sleep(0.05)  # so that something is being read, at any time
    rows = stock(reader, window)
    os.write(1, b"done, ")
    return rows

Reader.read = slow
loader = Loader(PreparedData.open(sys.argv[1]), batch_size=1_200)

class Model(tf.keras.Model):
    def train_step(self, data):
        return {"loss": tf.reduce_mean(data[1])}

class Fail(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise RuntimeError("in the middle")

def fit():
    model = Model()
    model.compile()
    model.fit(loader, epochs=3, callbacks=[Fail()], verbose=0)

if sys.argv[2] == "in a fit":
    fit()
if sys.argv[2] == "in a child":
    # No iterator of TensorFlow's: its threads are lost in a fork, and their pool's end, of
    # TensorFlow's own, may wait for them for ever.
    batches = loader.batches()
    next(batches)
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit(3)
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


@pytest.mark.slow
@pytest.mark.parametrize("where", ["after a batch", "in a child", "in a fit"])
def test_a_program_ends_while_batches_are_being_made(data, interpreter, tmp_path, where):
    """With batches made in TensorFlow's own threads, most of these programs hung in the end.

    As they are where a user asks TensorFlow to read ahead.
    """
    for time in "123":
        done = interpreter.start(ENDS, data.path, where, folder=tmp_path / time).end()
        if where != "in a child":  # which has its parent's threads no more
            # None was cut off in the middle, wherever that may be.
            assert done.stdout.count("begun") == done.stdout.count("done") > 0
        if where == "in a fit":
            assert done.returncode == 1
            assert done.stderr.strip().endswith("RuntimeError: in the middle")
        else:
            assert done.returncode == 3, done.stderr
            assert "Traceback" not in done.stderr
            assert "Exception" not in done.stderr
