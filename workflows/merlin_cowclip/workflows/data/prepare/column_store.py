"""The columns of a log on disk: a parquet file by chunk, and an array by finished column.

Files are written whole or not at all, so that a task may run again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.sources.base import ID_TYPE, TIME, Chunk, Source
from merlin_cowclip.workflows.data.spec import DatasetSpec

# Arrays beside those of the columns.
OFFSETS = "\0offsets"  # of the lists of a column: follows its name; list i is [offsets[i:i+2]]
IN_TRAIN = "\0in_train"  # whether a row belongs to the training part
ROWS = {"train": "\0train_rows", "test": "\0test_rows"}  # of a part, in its order


@dataclass(frozen=True)
class ColumnStore:
    """A folder of parquet files by chunk, and of arrays by column."""

    folder: Path
    spec: DatasetSpec

    def write_chunk(
        self, number: int, source: Source, chunk: Chunk, advance: Callable[[int], Any] = int
    ) -> tuple[int, Counter[str]]:
        """Read chunk ``number`` of all files into one file.

        Returns:
            Its rows and, by column, the numbers that were not finite and became missing.

        Raises:
            UserError: a bad value, with file and line.
        """
        rows, replaced = 0, Counter[str]()
        with self._written(f"{number:06d}.parquet") as path, contextlib.ExitStack() as stack:
            writer = None
            for batch in source.batches(chunk, advance, replaced):
                # Numbers for names: a dot would mean a nested column.
                names = [str(self._names.index(name)) for name in batch.schema.names]
                batch = pa.RecordBatch.from_arrays(batch.columns, names)
                if writer is None:
                    ids = [field.name for field in batch.schema if field.type == ID_TYPE]
                    options = {"compression": "lz4", "use_dictionary": ids}
                    writer = pq.ParquetWriter(path, batch.schema, write_statistics=False, **options)
                    stack.enter_context(writer)
                writer.write_batch(batch)
                rows += batch.num_rows
        return rows, replaced

    def numbers(self, name: str, dtype: type) -> np.ndarray:
        """A column of numbers, NaN where missing."""
        chunks = [column.to_numpy(zero_copy_only=False) for column in self._read(name)]
        return np.concatenate(chunks).astype(dtype, copy=False)

    def codes(self, name: str) -> tuple[np.ndarray, pa.Array]:
        """A column of IDs as int32 codes into distinct texts; a missing ID is -1.

        Lists are flattened, and their offsets stored.
        """
        chunks, lengths = [], [np.zeros(1, np.int64)]
        for column in self._read(name):
            if name in self.spec.lists:
                lengths.append(pc.list_value_length(column).to_numpy())
                column = column.flatten().dictionary_encode()
            chunks.append(column)
        if name in self.spec.lists:
            self.store(name + OFFSETS, np.cumsum(np.concatenate(lengths), dtype=np.int64))
        chunks = pa.chunked_array(chunks).unify_dictionaries().chunks
        codes = [c.indices.fill_null(-1).to_numpy(zero_copy_only=False) for c in chunks]
        return np.concatenate(codes), chunks[0].dictionary

    def _read(self, name: str) -> Iterator[pa.Array]:
        column = str(self._names.index(name))
        text = [column] if name in (*self.spec.categorical, TIME) else []
        for path in sorted(self.folder.glob("[0-9]*.parquet")):
            with pq.ParquetFile(path, read_dictionary=text) as file:
                yield from file.read(columns=[column], use_threads=False).column(0).chunks

    def store(self, name: str, values: np.ndarray) -> None:
        """Save an array."""
        with self._written(self._array(name)) as path, path.open("wb") as file:
            try:
                np.save(file, values)
            except OSError as error:  # NumPy does not say why less was written than given
                raise OSError(error.errno or errno.ENOSPC, *error.args[-1:]) from None

    def store_texts(self, name: str, texts: pa.Array) -> None:
        """Save the distinct texts of a column of IDs."""
        batch = pa.record_batch([texts], ["texts"])
        with (
            self._written(self._texts(name)) as path,
            pa.ipc.new_file(str(path), batch.schema) as file,
        ):
            file.write(batch)

    def load_texts(self, name: str) -> pa.Array:
        """The saved texts, memory-mapped."""
        return pa.ipc.open_file(pa.memory_map(str(self.folder / self._texts(name)))).get_batch(0)[0]

    def load(self, name: str) -> np.ndarray:
        """A saved array, memory-mapped."""
        return np.load(self.folder / self._array(name), mmap_mode="r")

    @property
    def _names(self) -> list[str]:
        spec = self.spec
        offsets = (name + OFFSETS for name in spec.lists)
        return [spec.label, TIME, *spec.fields, *offsets, IN_TRAIN, *ROWS.values()]

    def _array(self, name: str) -> str:
        return f"column-{self._names.index(name)}.npy"

    def _texts(self, name: str) -> str:
        return f"texts-{self._names.index(name)}.arrow"

    @contextlib.contextmanager
    def _written(self, name: str) -> Iterator[Path]:
        """A path to write; the file gets its name at the end."""
        partial = self.folder / f".{name}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            yield partial
            if partial.exists():
                os.replace(partial, self.folder / name)
        finally:
            partial.unlink(missing_ok=True)
