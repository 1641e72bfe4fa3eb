"""A folder that is replaced as a whole: at every moment the old one or the new one can be read.

The new folder is written beside `path`, as `.NAME.new`, its marker last; `path` is renamed to
`.NAME.old`, `.NAME.new` to `path`, and the old one is removed. A process killed between the renames
leaves the new folder beside `path`, where `find` looks; the next replacement clears up.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path


def find(path: Path, marker: str) -> Path:
    """Where the folder `path` is: there, or beside it if a replacement was killed half-way."""
    kept = (one for one in _beside(path) if (one / marker).exists())
    return path if path.exists() else next(kept, path)


@contextlib.contextmanager
def replacing(path: Path, marker: str, entries: Collection[str], sign: str) -> Iterator[Path]:
    """An empty folder that takes the place of `path` once the block has ended well.

    Args:
      path: the folder to make, or to replace; of a link, the folder that it names.
      marker: a file, relative, that the block writes last.
      entries: what a folder of this kind has. Other entries of the replaced one are kept.
      sign: the entry that shows a folder to be of this kind.

    Raises:
      ValueError: `path` is a file, or a folder of another kind with such entries.
      OSError: `path` cannot be renamed: a mount point, say.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise ValueError(f"path must be a folder, or nothing yet. Received a file: {path}")
    taken = sorted(entry for entry in entries if (path / entry).exists())
    if taken and sign not in taken:
        raise ValueError(
            f"path must be a saved model, or a folder without {taken[0]!r}, which would be "
            f"replaced. Received: {path}. Save to another folder."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    new, old = _beside(path)
    _clear_up(path, marker, entries)
    new.mkdir()
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    _clear_up(path, marker, entries)


def _beside(path: Path) -> tuple[Path, Path]:
    path = Path(os.path.realpath(path))
    return path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")


def _clear_up(path: Path, marker: str, entries: Collection[str]) -> None:
    """Finish, or take back, a replacement that was killed."""
    new, old = _beside(path)
    kept = find(path, marker)
    if kept != path:
        os.rename(kept, path)
    if old.exists():
        for entry in set(os.listdir(old)) - set(entries) - set(os.listdir(path)):
            os.rename(old / entry, path / entry)
        shutil.rmtree(old)
    shutil.rmtree(new, ignore_errors=True)
