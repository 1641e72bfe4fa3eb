# SPDX-License-Identifier: Apache-2.0
"""A log on disk, column by column: typed parquet files of the rows in order, of bounded size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from merlin_cowclip.workflows.data.sources.base import Chunk, Source
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError

PIECE_BYTES = 64 << 20  # of the columns in memory


class Piece(NamedTuple):
    """A file of consecutive rows."""

    path: Path
    start: int  # its first row, of all rows
    stop: int  # one beyond the last


@dataclass(frozen=True)
class Scan:
    """All rows in pieces, and the part of each.

    Attributes:
        spec: what the columns are.
        scratch: the folder of temporary files.
        database: sorts on disk what is too large for memory.
        pieces: in the order of the rows.
        part_of: (rows,) uint8, an index of `PARTS`, in a file; set by the split.
    """

    spec: DatasetSpec
    scratch: Path
    database: duckdb.DuckDBPyConnection
    pieces: Sequence[Piece]
    part_of: np.ndarray

    @property
    def rows(self) -> int:
        """Rows in all."""
        return self.pieces[-1].stop

    def runs(self, rows: int) -> Iterator[list[Piece]]:
        """Consecutive pieces of about ``rows`` rows together."""
        run: list[Piece] = []
        for piece in self.pieces:
            if run and piece.stop - run[0].start > rows:
                yield run
                run = []
            run.append(piece)
        yield run


def write_pieces(
    number: int,
    source: Source,
    chunk: Chunk,
    *,
    folder: Path,
    advance: Callable[[int], Any] = int,
) -> tuple[list[tuple[Path, int]], Counter[str]]:
    """Read chunk ``number`` of all files into files of at most about `PIECE_BYTES`.

    Returns them with their rows and, by column, the numbers that were not finite and became
    missing.
    """
    replaced, pieces, pending = Counter[str](), list[tuple[Path, int]](), list[pa.RecordBatch]()

    def write() -> None:
        if len({batch.schema for batch in pending}) > 1:
            raise mixed_times(source.spec)
        table = pa.Table.from_batches(pending).unify_dictionaries().combine_chunks()
        (batch,) = table.to_batches()
        path = folder / f"{number:08d}-{len(pieces):06d}.arrow"
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with pa.ipc.new_file(str(path), table.schema, options=options) as file:
            file.write(batch)
        pieces.append((path, len(batch)))
        pending.clear()

    for batch in filter(len, source.batches(chunk, advance, replaced)):
        pending.append(batch)
        if sum(batch.nbytes for batch in pending) >= PIECE_BYTES:
            write()
    if pending:
        write()
    return pieces, replaced


def read_column(path: Path, name: str) -> pa.Array:
    """A column of a piece: ids have a dictionary."""
    with pa.memory_map(str(path)) as file:
        names = pa.ipc.open_file(file).schema.names
        options = pa.ipc.IpcReadOptions(included_fields=[names.index(name)])
        column = pa.ipc.open_file(file, options=options).get_batch(0).column(0)
    if pa.types.is_list(column.type):
        return pa.ListArray.from_arrays(column.offsets, column.values.dictionary_encode())
    return column


def mixed_times(spec: DatasetSpec) -> UserError:
    """The error of a column of times in two forms."""
    return UserError(
        f"column {spec.split.column!r} has numbers and dates. Write its times in one form"
    )
