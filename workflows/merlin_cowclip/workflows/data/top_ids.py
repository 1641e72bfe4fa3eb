# SPDX-License-Identifier: Apache-2.0
"""Top-k data: prepared data in which every ID is frequent (Table 1, right, of the paper)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.counts import read_counts
from merlin_cowclip.workflows.data.prepare.executor import THREADS
from merlin_cowclip.workflows.data.prepare.fit import write_ids
from merlin_cowclip.workflows.data.prepare.statistics import MISSING, PADDING, UNKNOWN, IdStatistics
from merlin_cowclip.workflows.data.prepared_data import PARTS, PreparedData, write_record
from merlin_cowclip.workflows.errors import UserError, check_whole
from merlin_cowclip.workflows.folders import all_or_nothing
from merlin_cowclip.workflows.progress import progress_bar


def keep_top_ids(
    data: PreparedData, k: int, out: str | Path, *, progress: bool = True
) -> PreparedData:
    """Keep the k most frequent IDs of every field; all others become unknown (2).

    Kept IDs are 3, 4, … by descending count. A missing ID counts as an ID: it stays 1 or becomes 2.
    IDs that a threshold made unknown are never kept. Rows and row groups stay.

    Args:
        data: the prepared folder, not adopted.
        k: IDs to keep per field.
        out: the folder to write; must not exist.
        progress: show progress bars on stderr.

    Returns:
        The new folder. Its report is the source's.

    Raises:
        UserError: a bad argument, adopted data, counts that cannot be read, or ``out`` exists.
    """
    from merlin_cowclip.workflows.data.prepare.nvt_workflow import save_fitted_workflow

    out = Path(out)
    check_whole("top-k", k, 1)
    ranges = data.record.get("ranges")
    if ranges is None:  # adopted
        raise UserError(
            "top-k needs data that 'merlin-cowclip prepare' wrote, for it cuts the vocabularies. "
            f"Received: {data.path}, an adopted pipeline. Prepare its raw logs, or give Categorify "
            "a max_size of K + 3"
        )
    # What a threshold left is among the kept ids, or unknown.
    spec = dataclasses.replace(data.spec, freq_threshold=0, hash_buckets=1)
    with all_or_nothing(out) as folder:
        kept = {field: _top(read_counts(data, field), int(k)) for field in data.spec.ids}
        encode = {field: ids.encode for field, ids in kept.items()}
        for field, ids in kept.items():
            write_ids(folder, field, ids)
        # Categorify's max_size says that the unknown id is trained; 0: it is not.
        sizes = {f: len(ids.by_id) if ids.by_id[UNKNOWN] else 0 for f, ids in kept.items()}
        gone = [field for field in kept if encode[field][MISSING] == UNKNOWN]
        save_fitted_workflow(spec, folder, ranges, max_size=sizes, missing_as_unknown=gone)
        for part in PARTS:
            (folder / part).mkdir()
            files = [*data.footers(part)]
            rewrite = functools.partial(_rewrite, folder=folder / part, encode=encode)
            with (
                progress_bar(part, len(files), " files", show=progress) as bar,
                ThreadPoolExecutor(THREADS) as pool,
            ):
                for _ in pool.map(rewrite, files):
                    bar.update()
        record = {
            **data.record,
            "spec": spec.to_dict(),
            "cardinalities": {field: len(ids.by_id) for field, ids in kept.items()},
        }
        write_record(folder, record)
    return PreparedData.open(out)


def _top(table: pa.Table, k: int) -> IdStatistics:
    """The IDs that a field keeps; ``encode`` is of its old ones."""
    counts = table["count"].to_numpy()
    an_id = table["raw"].is_valid().to_numpy().copy()
    an_id[MISSING] = True
    places = np.flatnonzero(an_id & (counts > 0))
    top = places[np.argsort(-counts[places], kind="stable")][:k]  # ties: the lower id first
    real = top[top != MISSING]
    encode = np.full(len(counts), UNKNOWN, np.int64)
    encode[PADDING] = PADDING
    encode[real] = np.arange(UNKNOWN + 1, UNKNOWN + 1 + len(real))
    if MISSING in top:
        encode[MISSING] = MISSING
    by_id = np.bincount(encode, weights=counts, minlength=UNKNOWN + 1 + len(real))
    texts = table["raw"].take(pa.array(real)).combine_chunks()
    return IdStatistics(texts, by_id.astype(np.int64), encode)


def _rewrite(source: Path, folder: Path, encode: Mapping[str, np.ndarray]) -> None:
    """The same file, row groups and rows, with other ids."""
    with (
        pq.ParquetFile(source) as file,
        pq.ParquetWriter(folder / source.name, file.schema_arrow) as writer,
    ):
        for group in range(file.num_row_groups):
            rows = file.read_row_group(group)
            for i, column in enumerate(rows.schema):
                if column.name in encode:
                    old = rows.column(i).combine_chunks()
                    flat = old.values if pa.types.is_list(old.type) else old
                    ids = pa.array(encode[column.name][flat.to_numpy()])
                    if flat is not old:
                        ids = pa.ListArray.from_arrays(old.offsets, ids)
                    rows = rows.set_column(i, column, ids.cast(column.type))
            writer.write_table(rows, row_group_size=max(1, len(rows)))
