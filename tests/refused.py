"""`refused`: what a user of the command line may expect of bad input. And a small log to try it on.

One sentence on stderr that says what is wrong, where, and what to do; exit code 2; no file left
behind or changed.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split

LONGEST = 600  # characters of a message, without the paths of the test
NOISE = ("Traceback", 'File "', "Error(", "<class ", "0x7f", "WARNING", "Warning:", "oneDNN")

TOY = DatasetSpec(
    name="toy",
    label="y",
    categorical=("user", "item"),
    continuous=("price",),
    lists=("genres",),
    split=Split("random", 0.3, valid=0),
)


def toy_log(path: Path, rows: int = 200, seed: int = 0, ids: int = 9) -> Path:
    """A log of `TOY`."""
    random = np.random.default_rng(seed)
    pd.DataFrame(
        {
            "y": random.integers(0, 2, rows),
            "user": random.integers(0, ids, rows),
            "item": random.integers(0, 9, rows),
            "price": random.normal(5, 3, rows).round(2),
            "genres": [f"g{g}|g{g + 1}" for g in random.integers(0, 5, rows)],
        }
    ).to_csv(path, index=False)
    return path


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


def command(argv: Sequence[Any]) -> Done:
    """Run the command line in this process; argparse's `SystemExit` is an exit code as well."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as done:
            code = done.code if isinstance(done.code, int) else 1
    return Done(code, out.getvalue(), err.getvalue())


def listing(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Everything in a folder, hidden files too, with type, size and time of change."""
    found = {}
    for home, folders, files in os.walk(folder):
        for path in (os.path.join(home, name) for name in (*folders, *files)):
            status = os.lstat(path)
            kind = stat.S_IFMT(status.st_mode)
            told = () if kind == stat.S_IFDIR else (status.st_size, status.st_mtime_ns)
            found[os.path.relpath(path, folder)] = (kind, *told)
    return found


def refused(
    argv: Sequence[Any],
    words: Sequence[Any] = (),
    *,
    folder: Path,
    code: int = 2,
    quiet: bool = True,
) -> str:
    """Run a command that must refuse; returns its message, without the command's name.

    Args:
      argv: the arguments, as after `merlin-cowclip`.
      words: what the message must hold: the file, row or field, and a remedy.
      folder: where the command could leave a file; it must be as before.
      code: 2 for bad input, 1 for an internal error.
      quiet: whether stdout must be empty.
    """
    before = listing(folder)
    done = command(argv)
    said = f"{done.code}\n{done.out}\n{done.err}"
    assert done.code == code, said
    assert not quiet or done.out == "", said
    # A progress bar ends in \r, and may stand before the message; nothing else may.
    lines = [line for line in re.split(r"[\r\n]", done.err) if line.strip() and "%|" not in line]
    assert len(lines) == 1, said
    assert done.err.endswith(f"{lines[0]}\n"), said
    found = re.fullmatch(r"merlin-cowclip(?: ([a-z-]+))?: error: (\S.*\S)", lines[0])
    assert found, said
    assert found[1] in (None, str(argv[0]) if argv else None), said
    message = found[2]
    assert not [noise for noise in NOISE if noise in message], said
    for word in words:
        assert str(word) in message, f"no {str(word)!r} in: {message}"
    assert len(message.replace(str(folder), "")) <= LONGEST, said
    after = listing(folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not changed, f"left or changed: {sorted(changed)}"
    return message
