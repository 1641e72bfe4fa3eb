# SPDX-License-Identifier: Apache-2.0
"""A manifest: the files of a folder, each with its size and SHA-256.

The SHA-256 covers all of a file up to `SMALL` bytes and of a pickle, which runs when it is loaded;
of a larger file its first and last `SMALL` / 2 bytes, where parquet keeps its footer. So a check is
fast however large the folder is; it does not find a changed byte in the middle of a large file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from merlin_cowclip.workflows.errors import UserError

SMALL = 1 << 20  # bytes
PICKLE = ".pkl"


def manifest_of(folder: Path, without: Container[str] = ()) -> dict[str, Any]:
    """What lies in a folder, for its record, which is written after it.

    Args:
        folder: a folder that is whole but for its record.
        without: files and folders directly in it that are no part of it.

    Returns:
        Path in the folder, with slashes → `entry_of` the file.
    """
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
    folder: Path,
    manifest: Mapping[str, Mapping[str, Any]],
    what: str,
    remedy: str,
    whole: Iterable[str] = (),
) -> None:
    """Refuse a folder in which a file is not as the manifest says.

    Args:
        folder: where the files lie now.
        manifest: as `manifest_of` made it.
        what: whose files, for the sentence: "prepared data".
        remedy: the sentence's end: "Prepare it again".
        whole: folders in it in which there must be no other files, but hidden ones.

    Raises:
        UserError: names the first file that is gone, cannot be read, has changed, or is new.
    """
    for name, entry in manifest.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size == entry["bytes"] and checksum(path) == entry["sha256"]:
                continue
            found = "whose content has changed"
            if size != entry["bytes"]:
                found = f"of {size:,} bytes, which had {entry['bytes']:,}"
        except FileNotFoundError:
            found = "which is gone"
        except OSError as error:
            found = f"which cannot be read ({error.strerror})"
        raise UserError(
            f"{what} must keep every file as it was written. Received: {path}, {found}. {remedy}"
        )
    for inner in whole:
        for path in sorted((folder / inner).rglob("[!.]*")):
            if path.is_file() and path.relative_to(folder).as_posix() not in manifest:
                raise UserError(
                    f"{what} must have no other files in {inner}. Received: {path}, which its "
                    f"manifest does not name. Remove it. {remedy}"
                )


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
