# SPDX-License-Identifier: Apache-2.0
"""The folder of a saved model is replaced as a whole: the old one or the new one can be read.

The new folder is written beside `path`, as `.NAME.new`, its marker last; `path` is renamed to
`.NAME.old`, `.NAME.new` to `path`, and the old one is removed. A process killed between the renames
leaves the new folder beside `path`, where `find` looks; the next replacement clears up.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

OWN = "merlin_cowclip"  # what a SavedModel does not have
MARKER = f"{OWN}/state.json"  # written last: without it the state is not whole
_SAVED_MODEL = "saved_model.pb"
_ENTRIES = {_SAVED_MODEL, "keras_metadata.pb", "fingerprint.pb", "variables", "assets"}
_ENTRIES |= {".merlin", OWN}


def find(path: Path) -> Path:
    """Where the folder `path` is: there, or beside it if a replacement was killed half-way."""
    kept = (one for one in _beside(path) if (one / MARKER).exists())
    return path if path.exists() else next(kept, path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `path` once the block has ended well.

    Raises:
      ValueError: `path` has other contents than a saved model's.
      OSError: `path` is a file, or cannot be renamed: a mount point, say.
    """
    path = Path(os.path.realpath(path))
    new, old = _beside(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if (kept := find(path)) != path:
        os.rename(kept, path)
    entries = set(os.listdir(path)) if path.exists() else set()
    if entries and not {_SAVED_MODEL} <= entries <= _ENTRIES:
        raise ValueError(
            "path must be a new or empty folder, or a saved model, which is replaced. Received: "
            f"{path}, with {min(entries - _ENTRIES or entries)!r}. Save to another folder."
        )
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    new.mkdir()
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    shutil.rmtree(old, ignore_errors=True)


def _beside(path: Path) -> tuple[Path, Path]:
    path = Path(os.path.realpath(path))
    return path.with_name(f".{path.name}.new"), path.with_name(f".{path.name}.old")
