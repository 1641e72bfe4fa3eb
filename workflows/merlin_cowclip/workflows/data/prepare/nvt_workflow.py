# SPDX-License-Identifier: Apache-2.0
"""The NVTabular workflow of prepared data, and its schema. Imports NVTabular.

The Arrow engine computes the statistics that NVTabular's operators would, and passes them to
`StatOperator.fit_finalize`: the result is an ordinary fitted `nvtabular.Workflow`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.encoder import scale_of
from merlin_cowclip.workflows.data.prepare.operators import EncodeIds, RawFields, ScaleNumbers
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import UNKNOWN, vocabulary_file
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag import Graph
    from merlin.schema import ColumnSchema, Schema, Tags
    from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
    from nvtabular import ops


def build_workflow(
    spec: DatasetSpec, folder: str | Path, ranges: Mapping[str, Sequence[float]]
) -> nvt.Workflow:
    """The spec's NVTabular workflow; vocabularies are in ``folder/categories``.

    ``ranges`` are what numbers are scaled by.
    """
    options: dict[str, Any] = {}
    if any(spec.threshold_of(name) > 1 for name in spec.ids):
        options["freq_threshold"] = {name: spec.threshold_of(name) for name in spec.ids}
    if any(spec.buckets_of(name) > 1 for name in spec.ids):
        options["num_buckets"] = {name: spec.buckets_of(name) for name in spec.ids}
    shared = {name: spec.vocabulary_of(name) for name in spec.ids if spec.shared}
    options |= {"lists": spec.lists, "shared": shared, "null_values": spec.null_values}
    target = [Tags.TARGET, Tags.BINARY_CLASSIFICATION]

    def raw(names: Sequence[str]) -> Any:
        """These fields, of columns of the same or another name."""
        other = [name for name in names if spec.column_of(name) != name]
        same: Any = [name for name in names if name not in other]
        if not other:
            return same
        columns = [*dict.fromkeys(map(spec.column_of, other))]
        return (
            (same + (columns >> RawFields(spec, other)))
            if same
            else columns >> RawFields(spec, other)
        )

    nodes = raw(spec.ids) >> EncodeIds(folder, **options)
    nodes += raw([spec.label]) >> ops.AddMetadata(tags=target)
    if spec.continuous:
        scales = {name: scale_of(spec, name, ranges[name]) for name in spec.continuous}
        is_missing = spec.non_finite == "missing"
        nodes += raw(spec.continuous) >> ScaleNumbers(scales, spec.null_values, is_missing)
    return nvt.Workflow(nodes)


def save_fitted_workflow(
    spec: DatasetSpec, folder: Path, ranges: Mapping[str, Sequence[float]]
) -> None:
    """Save the workflow of `build_workflow` and its schema, with the vocabularies in ``folder``."""
    workflow = build_workflow(spec, folder / "workflow", ranges)
    for node in Graph.get_nodes_by_op_type([workflow.output_node], EncodeIds):
        files = {name: vocabulary_file(folder, spec.vocabulary_of(name)) for name in spec.ids}
        node.op.fit_finalize({name: str(path) for name, path in files.items()})
        node.op.fitted = True
    workflow.fit_schema(raw_schema(spec))
    workflow.save(str(folder / "workflow"))
    columns = workflow.output_schema
    save_schema(Schema([columns[name] for name in (spec.label, *spec.fields)]), folder)


def raw_schema(spec: DatasetSpec) -> Schema:
    """The columns that the workflow reads."""
    columns = [ColumnSchema(spec.column_of(spec.label), dtype="int64")]
    for name, kind in spec.raw_columns.items():
        dtype = "float64" if kind is float else "str"
        is_list = kind is list
        columns.append(ColumnSchema(name, dtype=dtype, is_list=is_list, is_ragged=is_list))
    return Schema(columns)


def save_schema(schema: Schema, folder: Path) -> None:
    """Write ``schema.pbtxt`` and ``.merlin/`` (for `merlin.io.Dataset`).

    Fields with counts get a property ``untrained_ids``: ranges (start, end, start, …) of special or
    hashed IDs without a training row. `FusedEmbeddings` initializes their embeddings with zero.
    """
    counts = folder / "counts"
    schema = Schema([_with_untrained_ids(column, counts) for column in schema])
    proto = TensorflowMetadata.from_merlin_schema(schema)
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
