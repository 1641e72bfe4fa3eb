"""What a loader lets go: `python -m tests.workflows.training.letting_go DATA`.

In a process of its own: Python collects no garbage while another thread is at it, and CI had, once,
a process in which tests before had left one in the middle of that. It prints, as JSON, what went
wrong with each case; of one that holds, nothing.
"""

import contextlib
import functools
import gc
import json
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.training import order
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.streaming import ITERATORS

from .batches import BATCH, seeing, wait_until

THREAD = "merlin-cowclip-loader"


def assert_no_thread_left() -> None:
    wait_until(lambda: not any(t.name.startswith(THREAD) for t in threading.enumerate()))


class Fail(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise RuntimeError("in the middle")


def abandoned(data: PreparedData, how: str) -> None:
    """Iterators that nobody goes on with end their threads; of the loader nothing stays."""
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


def ended(data: PreparedData, how: str) -> None:
    """An endless dataset's last windows stayed in memory for as long as its loader."""
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


ABANDONED = ("batches", "dataset", "endless dataset", "loader")
ENDED = ("endless dataset", "a pass that stops", "fit", "a failing fit")
CASES: dict[str, Callable[[PreparedData], None]] = {
    **{f"abandoned: {how}": functools.partial(abandoned, how=how) for how in ABANDONED},
    **{f"ended: {how}": functools.partial(ended, how=how) for how in ENDED},
}


def main() -> None:
    order.WINDOW_ROWS, order.BLOCK_ROWS = 320, 80  # as the fixture small_windows has them
    data = PreparedData.open(Path(sys.argv[1]))
    wrong = {}
    for name, case in CASES.items():
        try:
            case(data)
        except Exception:
            wrong[name] = traceback.format_exc()
    print(json.dumps({name: wrong.get(name, "") for name in CASES}))


if __name__ == "__main__":
    main()
