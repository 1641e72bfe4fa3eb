"""`refused`: a command that refuses bad input leaves one sentence on stderr, and no file."""

from __future__ import annotations

import contextlib
import io
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from merlin_cowclip.workflows.commands.main import main

LONGEST = 600  # characters of a message, without the paths of the test
NOISE = ("Traceback", 'File "', "Error(", "<class ", "0x7f", "WARNING", "Warning:", "oneDNN")


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def command(argv: Sequence[Any]) -> Done:
    """Run the command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in argv])
    return Done(code, out.getvalue(), err.getvalue())


def listing(folder: Path) -> dict[Path, tuple[int, ...] | None]:
    """Everything in a folder, with mode, size and time of change of what is no folder."""
    stats = {path: path.lstat() for path in folder.rglob("*")}
    return {
        path: None if stat.S_ISDIR(of.st_mode) else (of.st_mode, of.st_size, of.st_mtime_ns)
        for path, of in stats.items()
    }


def refused(
    argv: Sequence[Any], words: Sequence[Any], *, folder: Path, code: int = 2, quiet: bool = True
) -> str:
    """Run a command that must refuse; returns its message, without the command's name.

    Args:
      argv: the arguments, as after `merlin-cowclip`.
      words: what the message must have: the file, row or field, and a remedy.
      folder: where the command could leave a file; it must be as before.
      code: 2 for bad input, 1 for an internal error.
      quiet: whether stdout must be empty.
    """
    before = listing(folder)
    done = command(argv)
    assert done.code == code, done
    assert not quiet or done.out == "", done
    # A progress bar ends in \r, and may be before the message; nothing else may.
    lines = [line for line in re.split(r"[\r\n]", done.err) if line.strip() and "%|" not in line]
    assert len(lines) == 1, done
    parts = re.fullmatch(r"merlin-cowclip(?: ([a-z-]+))?: error: (\S.*\S)", lines[0])
    assert parts, done
    assert parts[1] in (None, *map(str, argv[:1])), done
    message = parts[2]
    assert not [noise for noise in NOISE if noise in message], done
    for word in words:
        assert str(word) in message, f"no {str(word)!r} in: {message}"
    assert len(message.replace(str(folder), "")) <= LONGEST, done
    assert listing(folder) == before
    return message
