"""The one exception for bad input: what the command line turns into exit code 2; and its words.

Not for bugs: whatever is no fault of the user stays an ordinary exception with its traceback.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, ClassVar

_VALUE, _NAMES, _REASON = 60, 200, 300  # characters in a message: of a value, names, a reason


class UserError(Exception):
    """Bad input by the user. The message is a rule, what was received and where, and a remedy.

    Example:
        ``label must be 0 or 1. Received: '7' in train.txt, line 12, column 'label'. Remove the
        row, or correct its label.``

    Attributes:
        exit_code: what a command ends with.
    """

    exit_code: ClassVar[int] = 2


class NotFiniteError(UserError):
    """A run that diverged: with its data or learning rates it would do so again."""


class AgreedError(UserError):
    """Bad input that all ranks of a run end with: the first says it for all."""


class Notice(UserWarning):
    """What a user should know, and that is no error: a command says it in one sentence."""


class Stopped(KeyboardInterrupt):
    """A run was asked to stop, and was saved. The message says how to go on.

    Attributes:
        number: the signal's; None where the time that was given is over.
    """

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.number = number


def shown(text: object, most: int = 255) -> str:
    """A name or path in a message: its beginning, if it is longer than any that a disk takes."""
    text = str(text)
    return text if len(text) <= most else f"{text[:60]}… ({len(text):,} characters)"


def excerpt(value: str | bytes) -> str:
    """A value in a message, in quotes, and not all of it if it is long."""
    return repr(value) if len(value) <= _VALUE else f"{value[:_VALUE]!r}… ({len(value):,} long)"


def quoted(names: Iterable[Any], *, brief: bool = False) -> str:
    """Names in a message, in quotes.

    Args:
        names: of any number of things.
        brief: as many as there is room for: of a file's columns, which may be any and any number.
    """
    if not brief:
        return ", ".join(map(repr, names))
    texts = [excerpt(name) for name in names]
    held = list(itertools.accumulate(len(text) + 2 for text in texts))
    room = max(1, sum(length <= _NAMES for length in held))
    return ", ".join(texts[:room]) + (f" and {len(texts) - room} more" if texts[room:] else "")


def clipped(reason: str) -> str:
    """A library's reason in a message: as one line, and not all of it."""
    line = " ".join(reason.split())
    return line if len(line) <= _REASON else f"{line[:_REASON]}…"
