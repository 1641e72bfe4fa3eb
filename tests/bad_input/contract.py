"""What a user of the command line may expect of bad input, as one function: `refused`.

One sentence on stderr that says what is wrong, where, and what to do; an exit code; nothing left
behind and nothing changed. The suites beside this file are tables of cases, one line each:

    @pytest.mark.parametrize(("options", "words"), [pytest.param(["--seed", "-1"], ["seed"], …)])
    def test_options(data, tmp_path, options, words):
        refused(["train", data, "--out", tmp_path / "run", *options], words, folder=tmp_path)
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

from merlin_cowclip.workflows.commands.main import main

LONGEST = 600
"""Characters of a message without the folder's own path: more is a flood, not a sentence."""

NOISE = ("Traceback", 'File "', "Error(", "<class ", "0x7f", "WARNING", "Warning:", "oneDNN")
"""What comes from a library or a debugger, and never belongs into a message for a user."""


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
    """Everything below a folder, hidden and dangling things too, and how to see that it changed."""
    found = {}
    for home, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(home, name)
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
      argv: the command and its arguments, as after `merlin-cowclip`.
      words: what the message must hold: the file, row or field at fault, and a remedy.
      folder: where the command could leave something; it must be as before.
      code: the exit code: 2 for bad input, 1 for what nobody foresaw.
      quiet: whether stdout must be empty. False for what is found out while work goes on.
    """
    before = listing(folder)
    done = command(argv)
    said = f"{done.code}\n{done.out}\n{done.err}"
    assert done.code == code, said
    if quiet:
        assert done.out == "", said
    # A progress bar ends in \r, and may stand before the message; nothing else may.
    lines = [line for line in re.split(r"[\r\n]", done.err) if line.strip() and "%|" not in line]
    assert len(lines) == 1, said
    assert done.err.endswith(f"{lines[0]}\n"), said
    found = re.fullmatch(r"merlin-cowclip(?: ([a-z]+))?: error: (\S.*\S)", lines[0])
    assert found, said
    assert found[1] in (None, str(argv[0]) if argv else None), said
    message = found[2]
    for noise in NOISE:
        assert noise not in message, said
    for word in words:
        assert str(word) in message, f"no {str(word)!r} in: {message}"
    assert len(message.replace(str(folder), "")) <= LONGEST, said
    after = listing(folder)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert not changed, f"left or changed: {sorted(changed)}"
    return message
