"""How a command ends: in one sentence and an exit code, whatever happened.

0 done, 1 what nobody foresaw, 2 bad input, 3 the time that was given is over and the run was saved,
128 + n ended by signal n (130 Ctrl-C, 143 SIGTERM; 141 where nobody reads what it prints).
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from merlin_cowclip.workflows.errors import Notice, Stopped, UnreadError, UserError
from merlin_cowclip.workflows.folders import finished_output, forget_outputs
from merlin_cowclip.workflows.launched import launched

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LONGEST_WORD, _LONGEST = 300, 1000  # characters of a message; a path may be 255 and more


def run(name: str, work: Callable[[], None]) -> int:
    """Do a command's work; returns the exit code, after a sentence on stderr where it is not 0.

    Args:
      name: what the sentence begins with, "merlin-cowclip train".
      work: raises UserError for bad input; may be ended by SIGINT, SIGTERM or SIGHUP anywhere, as
        a KeyboardInterrupt, and removes what it has not finished.
    """
    forget_outputs()
    _let_all_be_printed()
    with _notices(name), _signals() as received:
        try:
            try:
                received.listen()
                work()
                if sys.stdout is not None:  # as behind >&-
                    sys.stdout.flush()
            finally:
                received.raising = False
        except BaseException as error:
            if isinstance(error, Stopped):
                _say_once(f"{name}: {error}")
                number = received.number or error.number
                return 3 if number is None else 128 + number
            # First: what a signal raises inside a library may come out as something else.
            if received.number:
                end = signal.Signals(received.number).name
                how = "interrupted" if end == "SIGINT" else f"ended by {end}"
                _say_once(f"{name}: {_ended(how)}")
                return 128 + received.number
            if isinstance(error, SystemExit):
                raise
            if isinstance(error, KeyboardInterrupt):
                _say_once(f"{name}: {_ended('interrupted')}")
                return 130
            if isinstance(error, BrokenPipeError):
                error = UnreadError("what reads the output must read all of it")
            elif isinstance(error, OSError) and (error.errno in _FULL or _stdout_fails()):
                where = f": {error.filename}" if error.filename else ""
                error = UserError(
                    f"what it prints and writes must find room. Received: {error.strerror}{where}. "
                    "Free some, or send it elsewhere"
                )
            if isinstance(error, UserError):
                _say(f"{name}: error: {error}")
                if _stdout_fails():
                    _close_stdout()
                return error.exit_code
            if isinstance(error, MemoryError):
                _say(
                    f"{name}: error: the machine's memory must suffice. Received: less than this "
                    "takes. Give it less at a time, or take a larger machine"
                )
                return 2
            _say(f"{name}: error: {_unforeseen(error)}")
            return 1
    return 0


@contextlib.contextmanager
def _notices(name: str) -> Iterator[None]:
    """Within it a notice is a sentence like those that a command ends with."""
    usual = warnings.showwarning

    def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
        if issubclass(category, Notice):
            _say(f"{name}: warning: {message}")
        else:
            usual(message, category, *where, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = usual


def _ended(how: str) -> str:
    written = finished_output()
    if written is None:
        return f"{how} before it was done: nothing is left of it"
    return f"{how} after it had written {written}, which is whole"


def one_line(message: str) -> str:
    """A message as one line that can be printed and is not absurdly long."""
    text = "".join(c if c.isprintable() else _escaped(c) for c in " ".join(message.split("\n")))
    words = [_shortened(word, _LONGEST_WORD) for word in text.split(" ")]
    return _shortened(" ".join(words), _LONGEST)


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        print(one_line(message), file=sys.stderr, flush=True)


def _say_once(message: str) -> None:
    """Of processes that a launcher has started together and ends together, the first says it."""
    if launched().rank == 0:
        _say(message)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    return f"{text[: longest * 2 // 3]}…{text[-longest // 4 :]}"


def _unforeseen(error: BaseException) -> str:
    """The sentence for a bug or a failing library; the traceback goes to a file that it names."""
    lines = str(error).strip().splitlines()
    what = (
        f"{type(error).__name__}{': ' if lines else ''}{_shortened(lines[0], 300) if lines else ''}"
    )
    sentence = f"nobody foresaw what ended it: {what.rstrip('.')}."
    try:
        number, path = tempfile.mkstemp(prefix="merlin-cowclip-", suffix=".txt")
        with open(number, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{sys.argv}\nPython {platform.python_version()}, {platform.platform()}\n\n")
            file.writelines(traceback.format_exception(error))
    except OSError as problem:
        return f"{sentence} Its traceback could not be written ({problem.strerror})"
    return f"{sentence} The traceback, for a report, is in {path}"


@dataclass
class _Received:
    """What signal came, and whether one may end what is being done: the work, not its ending."""

    number: int = 0
    raising: bool = False

    def listen(self) -> None:
        """The work begins.

        Raises:
            KeyboardInterrupt: a signal was faster.
        """
        self.raising = True
        if self.number:
            raise KeyboardInterrupt


@contextlib.contextmanager
def _signals() -> Iterator[_Received]:
    """What would end the process at once raises KeyboardInterrupt instead, so that it tidies up."""
    received = _Received()
    if threading.current_thread() is not threading.main_thread():
        yield received  # Python gives signals to the main thread alone
        return

    def end(number: int, frame: FrameType | None) -> None:
        first = not received.number
        received.number = received.number or number
        # A second one must not end the tidying up, for which an exception is under way. Where none
        # is, the first was swallowed: raised in a finalizer, say, whose exceptions Python drops.
        if received.raising and (first or sys.exc_info()[0] is None):
            raise KeyboardInterrupt

    usual = sys.unraisablehook
    resent: list[threading.Timer] = []

    def unraisable(dropped: sys.UnraisableHookArgs) -> None:
        # Python drops what is raised in a finalizer or a callback of the garbage collector (JAX
        # has one), a signal's exception too: the signal is sent again, once that is over.
        if received.number and issubclass(dropped.exc_type, KeyboardInterrupt):
            resent.append(threading.Timer(0.1, os.kill, (os.getpid(), received.number)))
            resent[-1].start()
        else:
            usual(dropped)

    before = {}
    try:
        sys.unraisablehook = unraisable
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                before[number] = signal.signal(number, end)  # nohup's is SIG_IGN, and stays
        yield received
    finally:
        for timer in resent:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = usual


def _let_all_be_printed() -> None:
    """A path that the terminal's encoding lacks must not end what has done its work."""
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr is


def _close_stdout() -> None:
    """So that Python does not try again, and complain, as it ends."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def _stdout_fails() -> bool:
    """Whether what was printed is still waiting, and cannot be written."""
    if sys.stdout is None:
        return False
    try:
        sys.stdout.flush()
    except OSError:
        return True
    return False
