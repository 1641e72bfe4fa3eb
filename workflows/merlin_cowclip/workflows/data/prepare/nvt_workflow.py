"""The NVTabular workflow of prepared data, its vocabularies, counts and schema.

The Arrow engine computes the statistics that NVTabular's operators would, and passes them to
`StatOperator.fit_finalize`: the result is an ordinary fitted `nvtabular.Workflow`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.counts import write_counts
from merlin_cowclip.workflows.data.prepare.statistics import (
    MISSING,
    PADDING,
    UNKNOWN,
    IdStatistics,
)
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.schema import ColumnSchema, Schema

CATEGORIES = "workflow/categories"  # in a prepared folder


def build_workflow(spec: DatasetSpec, folder: str | Path) -> nvt.Workflow:
    """The spec's NVTabular workflow, not fitted; vocabularies are in ``folder/categories``."""
    with quiet_imports():
        import nvtabular as nvt
        from merlin.schema import Tags
        from nvtabular import ops

        from merlin_cowclip.workflows.data.prepare import operators
    rare: dict[str, Any] = {}
    if any(spec.threshold_of(name) > 1 for name in spec.ids):
        rare["freq_threshold"] = {name: spec.threshold_of(name) for name in spec.ids}
    if any(spec.buckets_of(name) > 1 for name in spec.ids):
        rare["num_buckets"] = {name: spec.buckets_of(name) for name in spec.ids}
    encode = operators.EncodeIds(folder, lists=spec.lists, null_values=spec.null_values, **rare)
    ids = list(spec.ids) >> encode
    target = [Tags.TARGET, Tags.BINARY_CLASSIFICATION]
    nodes = ids + ([spec.label] >> ops.AddMetadata(tags=target))
    if spec.continuous:
        nodes += (
            list(spec.continuous)
            >> operators.ParseNumbers(spec.null_values, spec.non_finite == "missing")
            >> ops.FillMissing(0)
            >> operators.UnitRange(out_dtype="float32")
            >> ops.Clip(min_value=0.0, max_value=1.0)
        )
    return nvt.Workflow(nodes)


def save_fitted_workflow(
    spec: DatasetSpec, folder: Path, ranges: Mapping[str, tuple[float, float]]
) -> None:
    """Pass statistics to the workflow; save it and its schema.

    Args:
        spec: the columns.
        folder: the prepared folder, with vocabularies and counts.
        ranges: lowest and highest number of each continuous field.
    """
    with quiet_imports():
        from merlin.dag import Graph

        from merlin_cowclip.workflows.data.prepare.operators import EncodeIds, UnitRange
    workflow = build_workflow(spec, folder / "workflow")
    ends = pd.DataFrame(ranges, index=["mins", "maxs"], dtype="float64").T
    statistics = {
        EncodeIds: vocabularies(folder, spec.ids),
        UnitRange: {"mins": ends["mins"], "maxs": ends["maxs"]},  # as NormalizeMinMax.fit
    }
    for kind, found in statistics.items():
        for node in Graph.get_nodes_by_op_type([workflow.output_node], kind):
            node.op.fit_finalize(found)
            node.op.fitted = True
    workflow.fit_schema(raw_schema(spec))
    save_workflow(workflow, folder, (spec.label, *spec.fields))


def raw_schema(spec: DatasetSpec) -> Schema:
    """The columns that the workflow reads."""
    with quiet_imports():
        from merlin.schema import ColumnSchema, Schema
    columns = [ColumnSchema(spec.label, dtype="int64")]
    columns += [ColumnSchema(name, dtype="float64") for name in spec.continuous]
    columns += [ColumnSchema(name, dtype="str") for name in spec.categorical]
    columns += [
        ColumnSchema(name, dtype="str", is_list=True, is_ragged=True) for name in spec.lists
    ]
    return Schema(columns)


def create_id_folders(folder: Path) -> None:
    """Create the folders of vocabularies and counts."""
    (folder / CATEGORIES).mkdir(parents=True)
    (folder / "counts").mkdir()


def write_ids(folder: Path, field: str, statistics: IdStatistics) -> None:
    """Write a field's counts and its vocabulary, ``unique.*`` and ``meta.*`` as in Categorify."""
    home, first, unknown = folder / CATEGORIES, statistics.first_id, statistics.unknown
    pd.DataFrame(
        {field: statistics.vocabulary.to_pandas().to_numpy(), f"{field}_size": statistics.counts},
        index=pd.RangeIndex(first, statistics.cardinality),
    ).to_parquet(home / f"unique.{field}.parquet", compression=None)
    observed = [0, statistics.missing, int(unknown.sum()), int(statistics.counts.sum())]
    pd.DataFrame(
        {
            "kind": ["pad", "null", "oov", "unique"],
            "offset": [PADDING, MISSING, UNKNOWN, first],
            "num_indices": [1, 1, len(unknown), len(statistics.vocabulary)],
            "num_observed": observed,
        }
    ).to_parquet(home / f"meta.{field}.parquet")
    write_counts(folder / "counts", field, statistics.by_id, statistics.vocabulary)


def vocabularies(folder: Path, fields: Iterable[str]) -> dict[str, str]:
    """Vocabulary files by field, for Categorify's ``fit_finalize``."""
    return {field: str(folder / CATEGORIES / f"unique.{field}.parquet") for field in fields}


def save_workflow(workflow: nvt.Workflow, folder: Path, columns: Iterable[str]) -> None:
    """Save a fitted workflow, and the schema of some of its output columns."""
    with quiet_imports():
        from merlin.schema import Schema
    workflow.save(str(folder / "workflow"))
    found = workflow.output_schema
    save_schema(Schema([found[name] for name in columns]), folder)


def save_schema(schema: Schema, folder: Path) -> None:
    """Write ``schema.pbtxt`` and ``.merlin/`` (for `merlin.io.Dataset`).

    Fields with counts get a property ``untrained_ids``: ranges (start, end, start, …) of special or
    hashed IDs without a training row. `FusedEmbeddings` initializes their embeddings with zero.

    Args:
        schema: of the columns.
        folder: the prepared folder, with counts.
    """
    with quiet_imports():
        from merlin.schema import Schema
        from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
    proto = TensorflowMetadata.from_merlin_schema(
        Schema([_with_untrained_ids(column, folder / "counts") for column in schema])
    )
    for feature in proto.proto_schema.feature:
        feature.annotation.tag.sort()  # a set has no order
    proto.to_proto_text_file(str(folder))
    (folder / ".merlin").mkdir()
    proto.to_json_file(str(folder / ".merlin"))


def _with_untrained_ids(column: ColumnSchema, counts: Path) -> ColumnSchema:
    path = counts / f"{column.name}.parquet"
    if not path.exists():  # the label, numbers
        return column
    buckets = int(column.properties.get("num_buckets") or 1)
    count = pq.read_table(path, columns=["count"])["count"].to_numpy()
    is_known = not column.properties.get("no_raw_ids")  # else any id may be a bucket
    if is_known and (buckets == 1 or column.properties.get("cat_path")):
        count = count[: UNKNOWN + buckets]
    untrained = np.concatenate([[False], count == 0, [False]])
    ends = np.flatnonzero(np.diff(untrained))
    return column.with_properties({"untrained_ids": ends.tolist()})
