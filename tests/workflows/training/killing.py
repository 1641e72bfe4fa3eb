"""The command, in a process that is killed, or gets a signal, at a chosen place.

`PLACES` are in the order in which a run comes to them; `MORE_PLACES` are others. `time:S` is S
seconds after training began, whatever is done then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
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


def main(place: str, *arguments: str) -> int:
    """The command with these arguments, ended at `place`; steps are eager, none waits for a graph.

    Args:
        place: see above; "" for nowhere. `place@NAME` sends a signal instead, as SIGINT, and goes
            on.
        arguments: of the command.
    """
    from merlin_cowclip.plugins._tensorflow import tf
    from merlin_cowclip.workflows.commands.main import main as command
    from merlin_cowclip.workflows.training import loader, trainer

    warnings.filterwarnings("ignore", "Even though the `tf.config.exp")
    loader.WINDOW_ROWS = WINDOW_ROWS
    trainer.EVALUATION_BATCH, trainer.LOG_EVERY = TEST_BATCH, LOG_EVERY
    tf.config.run_functions_eagerly(True)
    name, _, how = place.partition("@")
    end = _kill if not how else lambda: os.kill(os.getpid(), signal.Signals[how])
    kind, _, number = name.partition(":")
    if kind == "time":
        _at_time(float(number))
    elif kind:
        (PLACES | MORE_PLACES)[kind](end)
    return command(arguments)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


End = Callable[[], None]
Place = Callable[[End], None]


def _at(
    owner: Callable[[], Any],
    name: str,
    when: Callable[..., bool] = lambda *_, **__: True,
    *,
    after: bool = False,
) -> Place:
    """At the first call of `owner().name` for which `when` holds: before it, or after it."""

    def install(end: End) -> None:
        stock = getattr(owner(), name)
        done = []

        def instead(*arguments: Any, **named: Any) -> Any:
            is_there = not done and when(*arguments, **named)
            if is_there:
                done.append(1)
            if is_there and not after:
                end()
            value = stock(*arguments, **named)
            if is_there and after:
                end()
            return value

        setattr(owner(), name, instead)

    return install


def _of(module: str, attribute: str = "") -> Callable[[], Any]:
    """A module of the training part, or what it has by this name, once it is needed."""

    def find() -> Any:
        found = __import__(f"merlin_cowclip.workflows.training.{module}", fromlist=["_"])
        return getattr(found, attribute) if attribute else found

    return find


def _half_written(end: End) -> None:
    """The tensors' file ends in the middle."""
    from merlin_cowclip.workflows.training import checkpoint

    stock = checkpoint._write

    def instead(prefix: Path, variables: Any) -> None:
        stock(prefix, variables)
        Path(f"{prefix}.index").unlink()
        data = Path(f"{prefix}.data-00000-of-00001")
        os.truncate(data, data.stat().st_size // 2)
        end()

    checkpoint._write = instead


def _twice(end: End) -> None:
    """Both signals, and the second while the tensors are written, which takes for ever."""
    from merlin_cowclip.workflows.training import checkpoint

    def slowly(*_: Any) -> None:
        end()
        time.sleep(100)

    checkpoint._write = slowly
    _at(_TRAINER, "see")(end)


def _update(number: int) -> Callable[..., bool]:
    return lambda trainer, loss: trainer.step % 16 == number


def _named(name: str) -> Callable[..., bool]:
    return lambda path, *_: Path(path).name == name


def _to(name: str) -> Callable[..., bool]:
    return lambda _, to: Path(to).name.startswith(name)


_TRAINER, _OS = _of("trainer", "Trainer"), lambda: os
PLACES: dict[str, Place] = {
    "before the first update": _at(_TRAINER, "epochs"),
    "before there is a network": _at(_of("trainer"), "network"),
    "in an epoch": _at(_TRAINER, "see", _update(5)),
    "at an epoch's last update": _at(_TRAINER, "see", _update(0)),
    "while the tensors are written": _half_written,
    "before the checkpoint's progress": _at(
        _of("checkpoint"), "write_json", _named("progress.json")
    ),
    "before the checkpoint has its name": _at(_OS, "rename", _to("step-")),
    "once the checkpoint has its name": _at(_OS, "rename", _to("step-"), after=True),
    "while evaluating": _at(_of("evaluation", "MetricAccumulator"), "add", after=True),
    "while metrics.csv is written": _at(_OS, "replace", _to("metrics.csv")),
    "between the evaluation and its checkpoint": _at(
        _of("listeners", "_RunFiles"), "on_epoch", after=True
    ),
    "while a checkpoint is restored": _at(_of("checkpoint", "Checkpoint"), "restore"),
    "before the result": _at(_of("train"), "write_json", _named("result.json")),
    "while the result is written": _at(_OS, "replace", _to("result.json")),
    "once the result is written": _at(_OS, "replace", _to("result.json"), after=True),
}
MORE_PLACES: dict[str, Place] = {
    "in the second epoch": _at(_TRAINER, "see", lambda trainer, loss: trainer.step == 18),
    "twice, while the tensors are written": _twice,
}


def _at_time(seconds: float) -> None:
    """From another process, which nothing that this one does can delay."""
    from merlin_cowclip.workflows.training.trainer import Trainer

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
    stock = Trainer.epochs

    def begin(trainer: Trainer) -> Any:
        os.write(write, b"!")
        return stock(trainer)

    Trainer.epochs = begin
