# SPDX-License-Identifier: Apache-2.0
"""How a command ends: in one sentence and an exit code.

0 done, 1 internal error, 2 bad input, 3 the time that was given is over and the run was saved,
128 + n ended by signal n (130 Ctrl-C, 143 SIGTERM, 141 a closed pipe behind stdout).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType

from merlin_cowclip.workflows.errors import FULL_DISK, AgreedError, Stopped, UserError
from merlin_cowclip.workflows.training.ranks import launched, wait_for_rank_zero

_EXTRAS = {  # of pyproject.toml, by the module that is missing
    **dict.fromkeys(("tensorflow", "tf_keras", "absl"), "tensorflow"),
    **dict.fromkeys(("nvtabular", "dask", "distributed", "tqdm", "tomli", "sklearn"), "workflows"),
    **dict.fromkeys(("scipy", "optuna", "sqlalchemy", "jinja2", "matplotlib"), "workflows"),
}
_LONGEST = 1000  # characters of a message


def run(name: str, work: Callable[[], None]) -> int:
    """Do a command's work; returns the exit code, after a sentence on stderr where it is not 0.

    The sentence begins with `name`. SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt in the work,
    which removes what it has not finished.
    """
    with _signals() as received:
        try:
            work()
            print(end="", flush=True)
        except BaseException as error:
            return _code_of(error, name, received)
    return 0


def _code_of(error: BaseException, name: str, received: list[int]) -> int:
    """The exit code for what ended the work, after its sentence."""
    # First: what a signal raises inside a library may come out as something else.
    if received or isinstance(error, KeyboardInterrupt):
        asked = error.number if isinstance(error, Stopped) else signal.SIGINT
        number = received[0] if received else asked
        if launched().rank == 0:  # a launcher ends all of its processes
            by = f"interrupted by {signal.Signals(number or signal.SIGINT).name}"
            say(f"{name}: {error if isinstance(error, Stopped) else by}")
        elif isinstance(error, Stopped):
            wait_for_rank_zero()
        return 3 if number is None else 128 + number
    if isinstance(error, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        return 128 + signal.SIGPIPE
    if isinstance(error, OSError) and error.errno in FULL_DISK:
        error = UserError(f"{error}. Free some space, or write to another disk")
    if isinstance(error, UserError):
        if isinstance(error, AgreedError) and launched().rank > 0:
            wait_for_rank_zero()
        else:
            say(f"{name}: error: {error}")
        return error.exit_code
    if isinstance(error, ImportError) and (extra := _EXTRAS.get((error.name or "").split(".")[0])):
        say(f"{name}: error: {error}. Install it: pip install 'merlin-cowclip[{extra}]'")
        return UserError.exit_code
    with contextlib.suppress(OSError):
        traceback.print_exception(error)
    say(f"{name}: internal error (please report it): {type(error).__name__}: {error}")
    return 1


def say(message: str) -> None:
    """Print a message on stderr, as one line that is printable and not absurdly long."""
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message.replace("\n", " "))
    with contextlib.suppress(OSError):
        print(shortened(text, _LONGEST), file=sys.stderr, flush=True)


def shortened(text: str, longest: int) -> str:
    """A text without its middle, if it is longer."""
    if len(text) <= longest:
        return text
    return f"{text[: longest * 2 // 3]}…{text[-longest // 4 :]}"


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Within it a first signal raises KeyboardInterrupt; a second one has its previous handler.

    Yields:
        The number of the signal that came, if any.
    """
    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        before.close()
        raise KeyboardInterrupt

    with contextlib.ExitStack() as before:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            is_usual = signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
            # nohup's is SIG_IGN, and stays; Python gives signals to the main thread alone.
            if is_usual and threading.current_thread() is threading.main_thread():
                before.callback(signal.signal, number, signal.signal(number, end))
        yield received
