"""The command, in a process that is killed, or stopped, at a chosen place.

`PLACES` are chosen ones, in the order in which a run comes to them, `MORE_PLACES` others; `line:N`
is before the N-th line of our own code that the training part executes, in whatever thread;
`time:S` is S seconds after training began, whatever is done then.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

START = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.workflows.training.killing import main
sys.exit(main(*sys.argv[2:]))
"""
ROOT = Path(__file__).parents[3]
LOG_EVERY = 4  # updates between two points of TensorBoard's curves, in these short runs
TEST_BATCH = 128
WINDOW_ROWS = 320


def main(place: str, mode: str, *arguments: str) -> int:
    """The command with these arguments, ended at `place`.

    Args:
        place: see above; "" for nowhere. `place@NAME` sends a signal instead, as SIGINT, and goes
            on.
        mode: "graph" as for users, or "eager", where a start does not wait for tracing.
        arguments: of the command.
    """
    from merlin_cowclip.plugins._stack import tf
    from merlin_cowclip.workflows.commands.main import main as command
    from merlin_cowclip.workflows.training import loop, order, train
    from tests.saves import quick_saves

    warnings.filterwarnings("ignore", "Even though the `tf.config.exp")
    order.WINDOW_ROWS = WINDOW_ROWS
    train.EVALUATION_BATCH, loop.LOG_EVERY = TEST_BATCH, LOG_EVERY
    if mode == "eager":
        tf.config.run_functions_eagerly(True)
        _before(lambda: train, "save_model")(lambda: tf.config.run_functions_eagerly(False))
    name, _, how = place.partition("@")
    end = _kill if not how else lambda: os.kill(os.getpid(), signal.Signals[how])
    kind, _, number = name.partition(":")
    if kind == "line":
        _at_line(int(number), end)
    elif kind == "time":
        _at_time(float(number))
    elif kind:
        (PLACES | MORE_PLACES)[kind](end)
    with quick_saves():
        code = command(arguments)
    if kind == "line":
        print(f"lines: {_lines}")
    return code


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before(owner: Any, name: str, when: Callable[..., bool] = lambda *_, **__: True) -> Any:
    def install(end: Callable[[], None]) -> None:
        stock = getattr(owner(), name)
        done = []

        def instead(*arguments: Any, **named: Any) -> Any:
            if not done and when(*arguments, **named):
                done.append(1)
                end()
            return stock(*arguments, **named)

        setattr(owner(), name, instead)

    return install


def _after(owner: Any, name: str, when: Callable[..., bool] = lambda *_, **__: True) -> Any:
    def install(end: Callable[[], None]) -> None:
        stock = getattr(owner(), name)
        done = []

        def instead(*arguments: Any, **named: Any) -> Any:
            value = stock(*arguments, **named)
            if not done and when(*arguments, **named):
                done.append(1)
                end()
            return value

        setattr(owner(), name, instead)

    return install


def _module(name: str) -> Callable[[], Any]:
    return lambda: __import__(f"merlin_cowclip.workflows.{name}", fromlist=["_"])


def _within(name: str, attribute: str) -> Callable[[], Any]:
    return lambda: getattr(_module(name)(), attribute)


def _half_written(end: Callable[[], None]) -> None:
    """The tensors' file ends in the middle."""
    from merlin_cowclip.plugins._stack import tf

    stock = tf.raw_ops.SaveV2

    def instead(prefix: str, **named: Any) -> None:
        stock(prefix=prefix, **named)
        Path(f"{prefix}.index").unlink()
        data = Path(f"{prefix}.data-00000-of-00001")
        os.truncate(data, data.stat().st_size // 2)
        end()

    tf.raw_ops.SaveV2 = instead


def _twice(end: Callable[[], None]) -> None:
    """Both signals, and the second while the tensors are written, which takes for ever."""
    from merlin_cowclip.plugins._stack import tf

    def slowly(**_: Any) -> None:
        end()
        time.sleep(100)

    tf.raw_ops.SaveV2 = slowly
    _before(_WATCH, "see")(end)


def _limited(end: Callable[[], None]) -> None:
    """No file may have more than 20,000 bytes, which is less than the tensors take."""
    limit = (20_000, resource.RLIM_INFINITY)
    _before(_TRAINING, "train")(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))


def _vanishing(end: Callable[[], None]) -> None:
    """The data is gone from the second update of this process on."""
    from merlin_cowclip.workflows.data.prepared import PreparedData

    stock = PreparedData.open.__func__
    paths = []

    def note(cls: Any, path: Any, *arguments: Any, **named: Any) -> Any:
        paths.append(Path(path))
        return stock(cls, path, *arguments, **named)

    PreparedData.open = classmethod(note)
    _before(_WATCH, "see")(lambda: paths[0].rename(paths[0].with_name("gone")))


def _slowly(end: Callable[[], None]) -> None:
    """Not ended, but for longer than there may be time."""
    _after(_within("training.evaluation", "QualityOf"), "add")(lambda: time.sleep(3))


def _half_a_line(end: Callable[[], None]) -> None:
    """The CSV files end in the middle of a line."""
    from merlin_cowclip.workflows.training.logbook import Logbook

    stock = Logbook.epoch

    def instead(book: Logbook, *given: Any) -> None:
        stock(book, *given)
        for path in (book._run / f"{name}.csv" for name in ("metrics", "fields", "norms")):
            os.truncate(path, path.stat().st_size - 20)
        end()

    Logbook.epoch = instead


def _half_removed(end: Callable[[], None]) -> None:
    """An old checkpoint has lost its record, and not yet its tensors."""
    from merlin_cowclip.workflows.training import checkpoints
    from merlin_cowclip.workflows.training.checkpoint_files import RECORD

    stock = checkpoints.remove

    def instead(*paths: Path) -> None:
        for path in paths:
            if path.name.endswith(".old"):
                (path / RECORD).unlink()
                end()
        stock(*paths)

    checkpoints.remove = instead


def _half_a_model(end: Callable[[], None]) -> None:
    """The SavedModel has its first files."""
    from merlin_cowclip.workflows.training import train

    stock = train.save_model

    def instead(model: Any, folder: Path) -> None:
        def watch() -> None:
            while not list(folder.rglob("*.index")):
                time.sleep(0.001)
            end()

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        stock(model, folder)
        watching.join()  # in time, also where it is saved fast

    train.save_model = instead


def _update(number: int) -> Callable[..., bool]:
    return lambda watch, step, loss: step % 16 == number


def _named(name: str) -> Callable[..., bool]:
    return lambda path, *_: Path(path).name == name


def _to(name: str) -> Callable[..., bool]:
    return lambda _, to: Path(to).name.startswith(name)


_TRAINING = _within("training.loop", "Training")
_WATCH = _within("training.watch", "Watch")
PLACES: dict[str, Callable[[Callable[[], None]], None]] = {
    "before the first update": _before(_TRAINING, "train"),
    "before there is a network": _before(_module("training.train"), "compiled"),
    "in an epoch": _before(_WATCH, "see", _update(5)),
    "at an epoch's last update": _before(_WATCH, "see", _update(0)),
    "while the tensors are written": _half_written,
    "before the checkpoint's record": _before(
        _module("training.checkpoints"), "write_json", _named("checkpoint.json")
    ),
    "before the checkpoint has its name": _before(lambda: os, "rename", _to("step-")),
    "once the checkpoint has its name": _after(lambda: os, "rename", _to("step-")),
    "while an old checkpoint is dropped": _half_removed,
    "while evaluating": _after(_within("training.evaluation", "QualityOf"), "add"),
    "while metrics.csv is written": _half_a_line,
    "between the evaluation and its checkpoint": _after(
        _within("training.logbook", "Logbook"), "epoch"
    ),
    "while the logs are cut back": _after(lambda: os, "truncate"),
    "while a checkpoint is restored": _before(
        _within("training.checkpoints", "Checkpoint"), "restore"
    ),
    "while the model is saved": _half_a_model,
    "before the result": _before(_module("training.train"), "write_json", _named("result.json")),
    "while the result is written": _before(lambda: os, "replace", _to("result.json")),
    "once the result is written": _after(lambda: os, "replace", _to("result.json")),
}

MORE_PLACES = {
    "in the second epoch": _before(_WATCH, "see", lambda watch, step, loss: step == 18),
    "twice, while the tensors are written": _twice,
    "slowly evaluating": _slowly,
    "files may not grow": _limited,
    "the data vanishes": _vanishing,
    "while a checkpoint is replaced": _after(lambda: os, "rename", _to(".step-")),
}

_lines = 0


def _at_line(number: int, end: Callable[[], None]) -> None:
    from merlin_cowclip.workflows.training import train

    ours = str(Path(train.__file__).parent)
    outer = (str(Path(ours).parent / "folders.py"),)

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        global _lines
        if event == "line":
            _lines += 1
            if _lines == number:
                end()
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_code.co_filename
        return line if name.startswith(ours) or name in outer else None

    def begin(*arguments: Any, **named: Any) -> Any:
        threading.settrace(call)
        sys.settrace(call)
        try:
            return stock(*arguments, **named)
        finally:
            sys.settrace(None)
            threading.settrace(None)

    stock = train._train
    train._train = begin


def _at_time(seconds: float) -> None:
    """From another process, which nothing that this one does can delay."""
    from merlin_cowclip.workflows.training.loop import Training

    read, write = os.pipe()
    parent = os.getpid()
    if not os.fork():
        os.close(write)
        began = os.read(read, 1)
        if began and not select.select([read], [], [], seconds)[0]:  # it has not ended
            with contextlib.suppress(ProcessLookupError):
                os.kill(parent, signal.SIGKILL)
        os._exit(0)
    os.close(read)
    stock = Training.train

    def begin(*arguments: Any) -> None:
        os.write(write, b"!")
        stock(*arguments)

    Training.train = begin
