"""A folder that is replaced as a whole: at every moment the old one or the new one can be read.

A folder cannot be renamed over another that is not empty, so a replacement takes two renames, both
within one parent folder:

1. the new folder is written beside `path`, as `.NAME.new`, its marker last;
2. `path` becomes `.NAME.old`;
3. `.NAME.new` becomes `path`;
4. `.NAME.old` is removed.

A process killed in 1 or 2 leaves `path` as it was; between 2 and 3 the new folder is whole beside
it, where `find` looks; from 3 on it is in place. The next replacement clears up what was left. One
process at a time may replace a folder. Pure Python: nothing here knows what the folder holds but
for the marker that says it is whole.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path


def find(path: Path, marker: str) -> Path:
    """Where the folder `path` lies: there, or beside it if a replacement was killed half-way.

    Args:
      path: the folder.
      marker: a file in it, relative, that is written last.
    """
    new, old = _beside(path)
    if path.exists():
        return path
    return next((kept for kept in (new, old) if (kept / marker).exists()), path)


@contextlib.contextmanager
def replacing(
    path: Path, marker: str, own: Collection[str], signs: Collection[str] = ()
) -> Iterator[Path]:
    """An empty folder that takes the place of `path` once the block has ended well.

    Args:
      path: the folder to make, or to replace.
      marker: a file, relative, that the block writes last.
      own: the entries that a folder of this kind has. Others, which somebody put into the one
        that is replaced, are kept.
      signs: files, relative, that show a folder to be of this kind, as the marker does.

    Raises:
      ValueError: `path` is a file, or a folder of another kind with entries of these names.
      OSError: `path` cannot be renamed: a mount point, say.
    """
    path = Path(os.path.realpath(path))  # the folder that a link names, not the link
    if path.exists() and not path.is_dir():
        raise ValueError(f"path must be a folder, or nothing yet. Received a file: {path}")
    _refuse_another_kind(path, own, (marker, *signs))
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_up(path, marker, own)
    new, old = _beside(path)
    new.mkdir()
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    _clear_up(path, marker, own)


def _refuse_another_kind(path: Path, own: Collection[str], signs: Collection[str]) -> None:
    """A folder that nothing shows to be ours has somebody's own files, whatever their names."""
    if path.exists() and not any((path / sign).exists() for sign in signs):
        taken = sorted(set(os.listdir(path)) & set(own))
        if taken:
            raise ValueError(
                f"path must be a folder that was saved before, or one without {taken[0]!r}, which "
                f"would be replaced. Received: {path}, which holds it and is no saved model. Save "
                "to another folder."
            )


def _beside(path: Path) -> tuple[Path, Path]:
    path = Path(os.path.realpath(path))
    return path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")


def _clear_up(path: Path, marker: str, own: Collection[str]) -> None:
    """Finish, or take back, a replacement that did not come to its end."""
    new, old = _beside(path)
    kept = find(path, marker)
    if kept != path:
        os.rename(kept, path)
    if old.exists():
        for entry in os.listdir(old):
            if entry not in own and not os.path.lexists(path / entry):
                os.rename(old / entry, path / entry)
        shutil.rmtree(old)
    if new.exists():
        shutil.rmtree(new)
