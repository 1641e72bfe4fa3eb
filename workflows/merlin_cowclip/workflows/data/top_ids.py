"""Top-k data: prepared data in which every ID is frequent (Table 1, right, of the paper)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from merlin_cowclip.workflows.checks import check_whole
from merlin_cowclip.workflows.data.counts import by_falling_count, read_counts
from merlin_cowclip.workflows.data.prepare.executor import THREADS
from merlin_cowclip.workflows.data.prepare.nvt_workflow import (
    create_id_folders,
    save_workflow,
    vocabularies,
    write_ids,
)
from merlin_cowclip.workflows.data.prepare.statistics import MISSING, PADDING, UNKNOWN, IdStatistics
from merlin_cowclip.workflows.data.prepared_data import PreparedData, write_record
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    from tqdm import tqdm


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
        The new folder. Its record has ``derived_from`` (``path``, ``top_k``); the report is the
        source's.

    Raises:
        UserError: a bad argument, adopted data, counts that cannot be read, or ``out`` exists.
    """
    out = Path(out)
    check_whole("top-k", k, 1)
    if data.record.get("ranges") is None:  # adopted
        raise UserError(
            "top-k needs data that 'merlin-cowclip prepare' wrote, for it cuts the vocabularies. "
            f"Received: {data.path}, an adopted pipeline. Prepare its raw logs, or give Categorify "
            "a max_size of K + 3"
        )
    refuse_existing(out)
    with all_or_nothing(out) as folder:
        kept = {field: _Kept.of(read_counts(data, field), int(k)) for field in data.spec.ids}
        _save_workflow(data, kept, folder)
        for part, files in (("train", data.train_files), ("test", data.test_files)):
            _rewrite_part(
                files, folder / part, kept, progress_bar(part, data.rows[part], show=progress)
            )
        # What a threshold left is among the kept ids, or unknown.
        spec = dataclasses.replace(data.spec, freq_threshold=0, hash_buckets=1)
        record = {
            **data.record,
            "spec": spec.to_dict(),
            "cardinalities": {f: kept[f].statistics.cardinality for f in data.spec.ids},
            "derived_from": {"path": str(data.path.absolute()), "top_k": int(k)},
        }
        write_record(folder, record)
    return PreparedData.open(out)


@dataclass(frozen=True, eq=False)
class _Kept:
    """The IDs that a field keeps."""

    statistics: IdStatistics
    missing_is_kept: bool
    encode: np.ndarray  # (old cardinality,) int64: old id → new id

    @property
    def max_size(self) -> int:
        """Categorify's ``max_size``, so that the unknown ID counts as trained; 0 if unused."""
        return self.statistics.cardinality if self.statistics.unknown.any() else 0

    @classmethod
    def of(cls, table: pa.Table, k: int) -> _Kept:
        counts = table["count"].to_numpy()
        an_id = table["raw"].is_valid().to_numpy().copy()
        an_id[MISSING] = True
        top = by_falling_count(counts, np.flatnonzero(an_id & (counts > 0)))[:k]
        real = top[top != MISSING]
        encode = np.full(len(counts), UNKNOWN, np.int64)
        encode[PADDING] = PADDING
        encode[real] = np.arange(UNKNOWN + 1, UNKNOWN + 1 + len(real))
        missing_is_kept = MISSING in top
        if missing_is_kept:
            encode[MISSING] = MISSING
        statistics = IdStatistics(
            vocabulary=table["raw"].take(pa.array(real)).combine_chunks(),
            counts=counts[real],
            missing=int(counts[MISSING]) if missing_is_kept else 0,
            unknown=counts[encode == UNKNOWN].sum(keepdims=True),
            encode=encode,
        )
        return cls(statistics, missing_is_kept, encode)


def _save_workflow(data: PreparedData, kept: Mapping[str, _Kept], folder: Path) -> None:
    """The source's workflow with the kept vocabularies, its schema, and the counts."""
    with quiet_imports():
        from merlin.dag import Graph

        from merlin_cowclip.workflows.data.prepare.operators import EncodeIds
    columns = data.schema.column_names
    workflow = data.workflow()
    create_id_folders(folder)
    for field, ids in kept.items():
        write_ids(folder, field, ids.statistics)
    for node in Graph.get_nodes_by_op_type([workflow.output_node], EncodeIds):
        node.op = EncodeIds(
            folder / "workflow",
            max_size={field: ids.max_size for field, ids in kept.items()},
            missing_as_unknown=[f for f, ids in kept.items() if not ids.missing_is_kept],
            lists=data.spec.lists,
            null_values=data.spec.null_values,
        )
        node.op.fit_finalize(vocabularies(folder, kept))
        node.op.fitted = True
    workflow.fit_schema(workflow.input_schema)
    save_workflow(workflow, folder, columns)


def _rewrite_part(
    files: Sequence[Path], folder: Path, kept: Mapping[str, _Kept], bar: tqdm
) -> None:
    """The same files, row groups and rows, with other ids."""
    folder.mkdir()

    def rewrite(file: Path) -> None:
        _rewrite(file, folder / file.name, kept, bar.update)

    with bar, ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(rewrite, files))


def _rewrite(
    source: Path, target: Path, kept: Mapping[str, _Kept], advance: Callable[[int], Any]
) -> None:
    with pq.ParquetFile(source) as file, pq.ParquetWriter(target, file.schema_arrow) as writer:
        for group in range(file.num_row_groups):
            rows = file.read_row_group(group)
            for i, column in enumerate(rows.schema):
                if column.name in kept:
                    ids = _encoded(rows.column(i).combine_chunks(), kept[column.name].encode)
                    rows = rows.set_column(i, column, ids.cast(column.type))
            writer.write_table(rows, row_group_size=max(1, len(rows)))
            advance(len(rows))


def _encoded(ids: pa.Array, encode: np.ndarray) -> pa.Array:
    if not pa.types.is_list(ids.type):
        return pa.array(encode[ids.to_numpy()])
    lengths = pc.list_value_length(ids).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, encode[ids.flatten().to_numpy()])
