# SPDX-License-Identifier: Apache-2.0
"""Errors of users, which commands print as one sentence, and helpers for messages."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from typing import Any, ClassVar

from merlin_cowclip.plugins._checks import integer_range, is_integer

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REASON = 300  # characters of a library's reason in a message


class UserError(Exception):
    """Bad input by the user; the message says what is wrong, where, and how to correct it."""

    exit_code: ClassVar[int] = 2  # of a command


class BusyError(UserError):
    """Another process uses a folder."""


class NotFiniteError(UserError):
    """A run that diverged: with its data or learning rates it would do so again."""


class AgreedError(UserError):
    """Bad input that all ranks of a run end with: the first says it for all."""


class Stopped(KeyboardInterrupt):
    """A run was asked to stop, and was saved. The message says how to go on.

    Attributes:
        number: the signal's; None where the time that was given is over.
    """

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.number = number


def quoted(names: Iterable[Any]) -> str:
    """Names in a message, in quotes."""
    return ", ".join(map(repr, names))


def clipped(reason: str) -> str:
    """A library's reason in a message: as one line, and not all of it."""
    line = " ".join(reason.split())
    return line if len(line) <= _REASON else f"{line[:_REASON]}…"


def check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise UserError for what is no whole number, Python's or NumPy's, or out of range."""
    if not is_integer(value, least, most):
        raise UserError(f"{name} must be {integer_range(least, most)}. Received: {value!r}")
