# SPDX-License-Identifier: Apache-2.0
"""A manifest: the files of a folder, each with its size and SHA-256.

The SHA-256 covers all of a file up to `SMALL` bytes and of a pickle, which runs when it is loaded;
of a larger file its first and last `SMALL` / 2 bytes, where parquet keeps its footer. So a check is
fast however large the folder is; it does not find a changed byte in the middle of a large file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from merlin_cowclip.workflows.errors import UserError

SMALL = 1 << 20  # bytes
PICKLE = ".pkl"


def manifest_of(folder: Path, without: Container[str] = ()) -> dict[str, Any]:
    """`entry_of` each file by its path in the folder, ``without`` some directly in it."""
    manifest = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] not in without:
            manifest[name.as_posix()] = entry_of(path)
    return manifest


def entry_of(path: Path) -> dict[str, Any]:
    """A file's ``bytes``, ``sha256`` and, of parquet, ``rows``."""
    entry: dict[str, Any] = {"bytes": path.stat().st_size, "sha256": checksum(path)}
    if path.suffix == ".parquet":
        entry["rows"] = pq.read_metadata(path).num_rows
    return entry


def check_manifest(
    folder: Path, manifest: Mapping[str, Mapping[str, Any]], what: str, remedy: str
) -> None:
    """Raise UserError for the first file of a manifest that is gone, changed or cannot be read.

    Args:
        folder: where the files are now.
        manifest: as `manifest_of` made it.
        what: the kind of folder, for the error: "prepared data".
        remedy: the end of the error: "Prepare it again".
    """
    for name, entry in manifest.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size == entry["bytes"] and checksum(path) == entry["sha256"]:
                continue
            change = f"has changed ({size:,} bytes; it had {entry['bytes']:,})"
        except OSError as error:
            change = f"cannot be read ({error.strerror})"
        raise UserError(f"{what} must keep every file as it was written. {path} {change}. {remedy}")


def checksum(path: Path) -> str:
    """SHA-256 of a file, or of the two ends of a large one; see above."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= SMALL or path.suffix == PICKLE:
            return hashlib.sha256(file.read()).hexdigest()
        ends = hashlib.sha256(file.read(SMALL // 2))
        file.seek(-(SMALL // 2), os.SEEK_END)
        ends.update(file.read())
        return ends.hexdigest()
