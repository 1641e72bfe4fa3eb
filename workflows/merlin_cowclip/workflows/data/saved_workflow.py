"""What a prepared folder holds beside its rows, written here whoever made it.

``workflow/`` with its vocabularies, ``counts/``, ``schema.pbtxt`` and, last of all, the record.
What is read of them again is `prepared.py`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.counts import write_counts
from merlin_cowclip.workflows.data.prepare.statistics import UNKNOWN, IdStatistics
from merlin_cowclip.workflows.data.prepared import FORMAT_VERSION, MEMBERS, RECORD
from merlin_cowclip.workflows.data.vocabularies import vocabulary_path, write_vocabulary
from merlin_cowclip.workflows.folders import package_versions, write_json
from merlin_cowclip.workflows.manifest import manifest_of
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.schema import ColumnSchema, Schema


def make_room_for_ids(folder: Path) -> None:
    """Make the folders of vocabularies and counts."""
    (folder / "workflow" / "categories").mkdir(parents=True)
    (folder / "counts").mkdir()


def write_ids(folder: Path, field: str, statistics: IdStatistics) -> None:
    """Write a field's vocabulary, as Categorify does, and its counts."""
    write_vocabulary(folder / "workflow" / "categories", field, statistics)
    write_counts(folder / "counts", field, statistics.by_id, statistics.vocabulary)


def vocabularies(folder: Path, fields: Iterable[str]) -> dict[str, str]:
    """Where the vocabularies lie, by field: what Categorify's ``fit_finalize`` takes."""
    home = folder / "workflow" / "categories"
    return {field: str(vocabulary_path(home, field)) for field in fields}


def save_workflow(workflow: nvt.Workflow, folder: Path, columns: Iterable[str]) -> None:
    """Save a fitted workflow, and as the folder's schema that of some columns of its output."""
    with quiet_imports():
        from merlin.schema import Schema
    workflow.save(str(folder / "workflow"))
    found = workflow.output_schema
    save_schema(Schema([found[name] for name in columns]), folder)


def save_schema(schema: Schema, folder: Path, bucketed: Collection[str] = ()) -> None:
    """Write ``schema.pbtxt``, and ``.merlin/``, by which `merlin.io.Dataset` finds the schema.

    Fields whose counts are written get a property ``untrained_ids``: the ids without a training
    row, as first ones and ends in turn. Rows of tables that would stay as they began start at zero
    by it (`FusedEmbeddings`).

    Args:
        schema: of the columns.
        folder: with the counts.
        bucketed: fields all of whose ids are buckets, whether or not a property says how many. The
            ids of a vocabulary, and those that were never encoded, start as any.
    """
    with quiet_imports():
        from merlin.schema import Schema
        from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
    proto = TensorflowMetadata.from_merlin_schema(
        Schema(
            [
                _with_untrained_ids(column, folder / "counts", column.name in bucketed)
                for column in schema
            ]
        )
    )
    for feature in proto.proto_schema.feature:
        feature.annotation.tag.sort()  # a set's order is another one in each process
    proto.to_proto_text_file(str(folder))
    (folder / ".merlin").mkdir()
    proto.to_json_file(str(folder / ".merlin"))


def _with_untrained_ids(column: ColumnSchema, counts: Path, bucketed: bool) -> ColumnSchema:
    path = counts / f"{column.name}.parquet"
    if not path.exists():  # the label, numbers
        return column
    buckets = int(column.properties.get("num_buckets") or 1)
    count = pq.read_table(path, columns=["count"])["count"].to_numpy()
    if not bucketed and (buckets == 1 or column.properties.get("cat_path")):
        count = count[: UNKNOWN + buckets]  # a vocabulary's own ids start as any
    untrained = np.concatenate([[False], count == 0, [False]])
    ends = np.flatnonzero(np.diff(untrained))
    return column.with_properties({"untrained_ids": ends.tolist()})


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write ``prepare.json``: the last thing to do.

    It gets the packages' versions, and a manifest of the files that are there.
    """
    others = {path.name for path in folder.iterdir()} - MEMBERS  # workers still have theirs there
    record = {
        **record,
        "versions": package_versions(),
        "format": FORMAT_VERSION,
        "manifest": manifest_of(folder, others),
    }
    write_json(folder / RECORD, record)
