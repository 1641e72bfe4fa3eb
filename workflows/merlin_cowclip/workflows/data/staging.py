"""Raw rows on disk, column by column: the place between reading a log and encoding it.

Every chunk of a log is staged by itself, under its number, and whole or not at all: so it can be
done by any thread or process, and again by another one if that one died. Then each column is read
back by itself, in the log's order. What is done with a column is `encoding.py`'s.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merlin_cowclip.workflows.data.sources.base import TIME, Chunk, Source
from merlin_cowclip.workflows.data.spec import DatasetSpec

# What is kept beside the columns, none of which can be called so.
LENGTHS = "\0lengths"  # of the lists in a column: follows the column's name
IN_TRAIN = "\0in_train"  # whether a row belongs to the training part
ROWS = {"train": "\0train_rows", "test": "\0test_rows"}  # of a part, in its order


@dataclass(frozen=True)
class StagedChunk:
    """What staging a chunk found.

    Attributes:
        rows: how many.
        replaced: by column, the numbers that were not finite and became missing.
    """

    rows: int
    replaced: Counter[str]


@dataclass(frozen=True)
class Staging:
    """A folder of staged columns: streams of Arrow batches by chunk, then arrays by column."""

    folder: Path
    spec: DatasetSpec

    def stage(
        self, number: int, log: Source, chunk: Chunk, advance: Callable[[int], Any] = int
    ) -> StagedChunk:
        """Read one chunk of a log into one file per column.

        Args:
            number: the chunk's place among all chunks of all logs.
            log: the file.
            chunk: its part.
            advance: told how many bytes of the log were read since.

        Raises:
            UserError: a bad row, named by file and line.
        """
        place = self.folder / f"{number:06d}"
        partial = self.folder / f".{number:06d}-{os.getpid()}-{secrets.token_hex(4)}"
        partial.mkdir()
        writers: dict[str, pa.RecordBatchStreamWriter] = {}
        rows = 0
        replaced: Counter[str] = Counter()
        try:
            with contextlib.ExitStack() as stack:
                for batch in log.batches(chunk, advance, replaced):
                    rows += batch.num_rows
                    for name, column in self._columns(batch):
                        if name not in writers:
                            options = pa.ipc.IpcWriteOptions(compression="lz4")
                            schema = pa.schema([("x", column.type)])
                            path = str(partial / self._file(name))
                            writers[name] = stack.enter_context(
                                pa.ipc.new_stream(path, schema, options=options)
                            )
                        writers[name].write_batch(pa.RecordBatch.from_arrays([column], ["x"]))
            try:
                os.rename(partial, place)
            except OSError:
                if not place.is_dir():  # else a twin of this task was faster, with the same rows
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return StagedChunk(rows, replaced)

    def _columns(self, batch: pa.RecordBatch) -> Any:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name in self.spec.lists:
                yield name + LENGTHS, pc.list_value_length(column)
                yield name, column.flatten().dictionary_encode()
            else:
                yield name, column

    def _file(self, name: str) -> str:
        names = [
            *(self.spec.label, TIME, *self.spec.fields),
            *(name + LENGTHS for name in self.spec.lists),
            *(IN_TRAIN, *ROWS.values()),
        ]
        return f"{names.index(name)}.arrows"

    def numbers(self, name: str, dtype: type) -> np.ndarray:
        """A column of numbers, NaN where missing."""
        chunks = self._read(name).chunks
        return np.concatenate([c.to_numpy(zero_copy_only=False) for c in chunks]).astype(
            dtype, copy=False
        )

    def codes(self, name: str) -> tuple[np.ndarray, pa.Array]:
        """A column of ids as int32 codes into distinct texts; a missing one is -1."""
        column = self._read(name).unify_dictionaries()
        codes = np.concatenate(
            [c.indices.fill_null(-1).to_numpy(zero_copy_only=False) for c in column.chunks]
        )
        return codes, column.chunk(0).dictionary

    def _read(self, name: str) -> pa.ChunkedArray:
        file = self._file(name)
        chunks: list[pa.Array] = []
        for path in sorted(self.folder.glob(f"[0-9]*/{file}")):
            with pa.OSFile(str(path)) as source, pa.ipc.open_stream(source) as stream:
                chunks += stream.read_all().column(0).chunks
        return pa.chunked_array(chunks)

    def store(self, name: str, values: np.ndarray) -> None:
        """Put a finished column, or what else all workers need, on disk as an array."""
        path = self._array(name)
        partial = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
        with partial.open("wb") as file:
            try:
                np.save(file, values)
            except OSError as error:  # NumPy does not say why less was written than given
                raise OSError(error.errno or errno.ENOSPC, *error.args[-1:]) from None
        os.replace(partial, path)

    def load(self, name: str) -> np.ndarray:
        """A stored array, mapped: its pages are the system's memory and not ours."""
        return np.load(self._array(name), mmap_mode="r")

    def _array(self, name: str) -> Path:
        return self.folder / f"{self._file(name)}.npy"

    def discard(self, name: str) -> None:
        """Remove a column's staged batches, once all that is wanted of it is stored."""
        for path in self.folder.glob(f"[0-9]*/{self._file(name)}"):
            path.unlink()
