"""The files of a checkpoint: tensors by name, what they are known again by, and rows in shards."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.sharding import Shard
from merlin_cowclip.workflows.errors import UserError

ALONE, OF_RANKS = FORMAT_VERSIONS = (1, 2)  # what one process has written, and several ranks
RECORD = "checkpoint.json"
STATE = "state"
_ROWS = re.compile(r"rows-(\d+)-of-\d+\.")
_KEYS = {"step": int, "tensors": dict, "files": dict, "progress": dict, "sha256": str}
_KEYS_OF_RANKS = {"ranks": int, "of_each": list, "in_shards": list}
_CHUNK = 1 << 22  # bytes


def rows_of(rank: int, ranks: int) -> str:
    """What the files begin with that hold the rows of a rank of several."""
    return f"rows-{rank:05}-of-{ranks:05}"


def rank_of(name: str) -> int:
    """Of a file, the rank that has written it."""
    found = _ROWS.match(name)
    return int(found[1]) if found else 0


def write_tensors(prefix: Path, tensors: Mapping[str, tf.Tensor]) -> None:
    """A TensorFlow checkpoint of flat tensors: `prefix.index` and `prefix.data-…`.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=str(prefix),
                tensor_names=list(tensors),
                shape_and_slices=[""] * len(tensors),
                tensors=list(tensors.values()),
            )
    except tf.errors.OpError as error:  # which has the system's words, and no number
        for number in errno.errorcode:
            if os.strerror(number) in error.message:
                raise OSError(number, os.strerror(number), str(prefix)) from error
        raise


def read_tensor(prefix: Path, name: str, dtype: tf.DType) -> np.ndarray:
    """One of them; other threads go on meanwhile, which TensorFlow's own reader lets wait."""
    with tf.device("CPU:0"):
        (value,) = tf.raw_ops.RestoreV2(
            prefix=str(prefix), tensor_names=[name], shape_and_slices=[""], dtypes=[dtype]
        )
    return np.asarray(value)


def read_rows(folder: Path, name: str, dtype: tf.DType, saved: int, mine: Shard) -> np.ndarray:
    """A shard of what `saved` ranks had in shards, or one process whole.

    Args:
        folder: of the checkpoint.
        name: the tensor's.
        dtype: the tensor's.
        saved: how many ranks there were.
        mine: which rows are wanted.
    """
    found: np.ndarray | None = None
    for rank in range(saved):
        if saved == mine.size and rank != mine.rank:
            continue
        prefix = STATE if saved == 1 else rows_of(rank, saved)
        held = read_tensor(folder / prefix, name, dtype)
        if saved == mine.size:
            return held
        if found is None:
            found = np.empty((mine.rows, *held.shape[1:]), held.dtype)
        rows = rank + saved * np.arange(len(held))
        wanted = rows % mine.size == mine.rank
        found[rows[wanted] // mine.size] = held[wanted]
    assert found is not None
    return found


def described(name: str, dtype: tf.DType, shape: Iterable[int]) -> dict[str, Any]:
    """What a record says of a tensor."""
    return {"name": name, "shape": list(shape), "dtype": dtype.name}


def entry(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of all of a file, as `sha256sum` prints it."""
    digest_ = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest_.update(chunk)
        return {"bytes": file.tell(), "sha256": digest_.hexdigest()}


def check_files(folder: Path, record: Mapping[str, Any], names: Collection[str]) -> None:
    """Hold every byte of files against their record.

    Raises:
        UserError: one is damaged, or not there.
    """
    for name in names:
        was = record["files"][name]
        try:
            found = entry(folder / name)
        except OSError as error:
            refuse(folder / name, f"which cannot be read ({error.strerror})")
        if found["bytes"] != was["bytes"]:
            had = f"of {found['bytes']:,} bytes, which had {was['bytes']:,}"
            refuse(folder / name, had)
        if found["sha256"] != was["sha256"]:
            refuse(folder / name, "whose content has changed")


def digest(record: Mapping[str, Any]) -> str:
    """Of a record's content, however it is laid out in its file."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def sync(path: Path) -> None:
    """To the disk itself: what was renamed over must not be empty after a power cut."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def read_record(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, all of it there.

    Raises:
        UserError: it is damaged, or not there.
    """
    try:
        record = json.loads((path / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        refuse(path / RECORD, f"which cannot be read ({error})")
    version = record.get("format") if isinstance(record, dict) else None
    if version not in FORMAT_VERSIONS:
        refuse(path / RECORD, f"which is not of format {' or '.join(map(str, FORMAT_VERSIONS))}")
    for key, kind in (_KEYS | (_KEYS_OF_RANKS if version == OF_RANKS else {})).items():
        if not isinstance(record.get(key), kind):
            refuse(path / RECORD, f"without {key!r}")
    if record.pop("sha256") != digest(record):
        refuse(path / RECORD, "whose content has changed")
    if {f"{STATE}.index"} - record["files"].keys():
        refuse(path / RECORD, f"whose files lack {STATE}.index")
    return record


def refuse(path: Path, found: str) -> NoReturn:
    """A checkpoint, or a file of it, that is not as it was written."""
    raise UserError(f"a checkpoint must be as it was written. Received: {path}, {found}") from None
