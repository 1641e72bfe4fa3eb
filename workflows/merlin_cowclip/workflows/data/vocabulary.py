# SPDX-License-Identifier: Apache-2.0
"""The one encoder of ids: training data, raw rows and requests to a server go through it.

Beside a vocabulary's file (`unique.<name>.parquet`, as Categorify writes it: texts by id) lie the
64-bit hashes of its texts, sorted, and their ids: 12 bytes per id, which processes share.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepared_data import WORKFLOW
from merlin_cowclip.workflows.errors import UserError

PADDING, MISSING, UNKNOWN = 0, 1, 2  # Categorify's ids; `UNKNOWN` is the first hash bucket
CATEGORIES = "categories"  # in the folder of a workflow
BATCH_ROWS = 1 << 16
COUNTS = pa.schema([("id", pa.int64()), ("raw", pa.string()), ("count", pa.int64())])
_NO_HASHES = np.zeros(0, np.uint64)


@dataclass(frozen=True)
class Vocabulary:
    """Ids of texts: 0 padding, 1 missing, then hash buckets of unknown texts, then its own.

    Attributes:
        hashes: (n,) uint64, ascending.
        places: (n,) int32, the place of each hash's text among the n texts of the vocabulary.
        buckets: of unknown texts, 1 for one id.
    """

    hashes: np.ndarray
    places: np.ndarray
    buckets: int = 1

    @classmethod
    def open(cls, path: str | Path, buckets: int = 1) -> Vocabulary:
        """The vocabulary of a file of texts; its index is mapped, or made if there is none."""
        hashes, places = _index(Path(path))
        if hashes.exists():
            return cls(np.load(hashes, "r"), np.load(places, "r"), buckets)
        parts = [hash_of(texts.to_numpy(zero_copy_only=False)) for texts in read_texts(Path(path))]
        return cls.of_hashes(np.concatenate([_NO_HASHES, *parts]), buckets)

    @classmethod
    def of_hashes(cls, hashes: np.ndarray, buckets: int = 1) -> Vocabulary:
        """A vocabulary of the hashes, (n,) uint64, of its texts in the order of their ids.

        Raises UserError if two are equal: with 10 million texts, the probability is 3e-6.
        """
        places = np.argsort(hashes).astype(np.int32)
        hashes = hashes[places]
        if (hashes[1:] == hashes[:-1]).any():
            raise UserError(
                "two ids of a field have the same 64-bit hash. Keep fewer ids by freq_threshold"
            )
        return cls(hashes, places, buckets)

    @classmethod
    def empty(cls, buckets: int) -> Vocabulary:
        """A vocabulary without texts: all are unknown."""
        return cls.of_hashes(_NO_HASHES, buckets)

    @property
    def first(self) -> int:
        """The id of the first text."""
        return UNKNOWN + self.buckets

    @property
    def cardinality(self) -> int:
        """Ids in all."""
        return self.first + len(self.hashes)

    def encode(self, texts: pa.Array) -> np.ndarray:
        """The ids, (n,) int32, of n texts, or binary, null where missing."""
        if pa.types.is_dictionary(texts.type):
            ids = np.append(self.encode(texts.dictionary), np.int32(MISSING))
            return ids[texts.indices.fill_null(-1).to_numpy()]
        if len(self.hashes) or self.buckets > 1:
            ids = self.encode_hashes(hash_of(texts.to_numpy(zero_copy_only=False)))
        else:
            ids = np.full(len(texts), UNKNOWN, np.int32)
        if texts.null_count:
            ids[texts.is_null().to_numpy(zero_copy_only=False)] = MISSING
        return ids

    def encode_hashes(self, hashes: np.ndarray) -> np.ndarray:
        """The ids, (n,) int32, of n texts by their hashes."""
        ids = (hashes % np.uint64(self.buckets)).astype(np.int32) + UNKNOWN
        if not len(self.hashes):
            return ids
        order = np.argsort(hashes) if len(hashes) > 1 else slice(None)  # near hashes share pages
        ordered = hashes[order]
        positions = np.minimum(np.searchsorted(self.hashes, ordered), len(self.hashes) - 1)
        known = self.hashes[positions] == ordered
        ids[order] = np.where(known, self.places[positions] + self.first, ids[order])
        return ids


def hash_of(texts: np.ndarray) -> np.ndarray:
    """Pandas' hash, (n,) uint64, of n texts or their UTF-8, the same in every version and place."""
    return pd.util.hash_array(texts, categorize=False)


def vocabulary_file(workflow: Path, name: str) -> Path:
    """The file of a vocabulary's texts in the folder of a saved workflow."""
    return workflow / CATEGORIES / f"unique.{name}.parquet"


def read_texts(path: Path) -> Iterator[pa.Array]:
    """The texts of a vocabulary's file, in the order of their ids."""
    with pq.ParquetFile(path) as file:
        columns = [path.stem.split(".", 1)[1]]
        for batch in file.iter_batches(BATCH_ROWS, columns=columns) if file.num_row_groups else ():
            yield batch.column(0).cast(pa.string())


def write_vocabulary(
    folder: Path,
    name: str,
    texts: Iterable[pa.Array],
    counts: Mapping[str, np.ndarray],
    base: Vocabulary,
) -> None:
    """Write a vocabulary as Categorify does, its index, and ``counts/<field>.parquet``.

    Args:
        folder: a prepared folder.
        name: of the vocabulary.
        texts: all of them, in the order of their ids.
        counts: by field that has this vocabulary, the count of each id.
        base: the vocabulary of the first texts, if there was one.
    """
    path, first, hashes = vocabulary_file(folder / WORKFLOW, name), base.first, [_NO_HASHES]
    sizes, home = np.sum([*counts.values()], axis=0), folder / "counts"
    for directory in (path.parent, home):
        directory.mkdir(parents=True, exist_ok=True)
    specials = (pa.nulls(first, pa.string()),)
    with contextlib.ExitStack() as stack:
        unique = stack.enter_context(
            pq.ParquetWriter(path, _unique_schema(name, first, len(sizes)))
        )
        files = {
            field: stack.enter_context(pq.ParquetWriter(home / f"{field}.parquet", COUNTS))
            for field in counts
        }
        stop = 0
        for batch in itertools.chain(specials, texts):
            start, stop = stop, stop + len(batch)
            ids = np.arange(start, stop)
            for field, writer in files.items():
                columns = [ids, batch, counts[field][start:stop]]
                writer.write_batch(pa.record_batch(columns, schema=COUNTS))
            if start:
                unique.write_batch(
                    pa.record_batch([batch, sizes[start:stop]], schema=unique.schema)
                )
                hashes.append(hash_of(batch.to_numpy(zero_copy_only=False)))
    vocabulary = Vocabulary.of_hashes(np.concatenate(hashes), base.buckets)
    for file, array in zip(_index(path), (vocabulary.hashes, vocabulary.places), strict=True):
        np.save(file, array)


def _unique_schema(name: str, first: int, stop: int) -> pa.Schema:
    """Of Categorify's file: pandas' index has the ids."""
    frame = pd.DataFrame({name: [""], f"{name}_size": [0]}, index=pd.RangeIndex(first, first + 1))
    schema = pa.Schema.from_pandas(frame)
    pandas = json.loads(schema.metadata[b"pandas"])
    pandas["index_columns"][0]["stop"] = stop
    return schema.with_metadata({"pandas": json.dumps(pandas)})


def _index(path: Path) -> tuple[Path, Path]:
    """The files of hashes and of places beside a file of texts."""
    return path.with_suffix(".hashes.npy"), path.with_suffix(".places.npy")
