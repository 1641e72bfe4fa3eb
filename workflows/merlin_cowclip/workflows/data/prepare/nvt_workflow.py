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
import pandas as pd
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepare.operators import EncodeIds, ParseNumbers, UnitRange
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import UNKNOWN, vocabulary_file
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag import Graph
    from merlin.schema import ColumnSchema, Schema, Tags
    from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
    from nvtabular import ops


def build_workflow(spec: DatasetSpec, folder: str | Path, **options: Any) -> nvt.Workflow:
    """The spec's NVTabular workflow, not fitted; vocabularies are in ``folder/categories``.

    ``options`` are of `EncodeIds`.
    """
    if any(spec.threshold_of(name) > 1 for name in spec.ids):
        options["freq_threshold"] = {name: spec.threshold_of(name) for name in spec.ids}
    if any(spec.buckets_of(name) > 1 for name in spec.ids):
        options["num_buckets"] = {name: spec.buckets_of(name) for name in spec.ids}
    options |= {"lists": spec.lists, "null_values": spec.null_values}
    target = [Tags.TARGET, Tags.BINARY_CLASSIFICATION]
    nodes = list(spec.ids) >> EncodeIds(folder, **options)
    nodes += [spec.label] >> ops.AddMetadata(tags=target)
    if spec.continuous:
        nodes += (
            list(spec.continuous)
            >> ParseNumbers(spec.null_values, spec.non_finite == "missing")
            >> ops.FillMissing(0)
            >> UnitRange(out_dtype="float32")
            >> ops.Clip(min_value=0.0, max_value=1.0)
        )
    return nvt.Workflow(nodes)


def save_fitted_workflow(
    spec: DatasetSpec, folder: Path, ranges: Mapping[str, Sequence[float]], **options: Any
) -> None:
    """Save the workflow of `build_workflow` and its schema, with the vocabularies in ``folder``.

    ``ranges`` are the lowest and highest number of each continuous field.
    """
    workflow = build_workflow(spec, folder / "workflow", **options)
    ends = pd.DataFrame(ranges, index=["mins", "maxs"], dtype="float64").T
    paths = {field: str(vocabulary_file(folder, field)) for field in spec.ids}
    # As Categorify.fit and NormalizeMinMax.fit return them.
    for kind, found in ((EncodeIds, paths), (UnitRange, {n: ends[n] for n in ends})):
        for node in Graph.get_nodes_by_op_type([workflow.output_node], kind):
            node.op.fit_finalize(found)
            node.op.fitted = True
    workflow.fit_schema(raw_schema(spec))
    workflow.save(str(folder / "workflow"))
    columns = workflow.output_schema
    save_schema(Schema([columns[name] for name in (spec.label, *spec.fields)]), folder)


def raw_schema(spec: DatasetSpec) -> Schema:
    """The columns that the workflow reads."""
    columns = [ColumnSchema(spec.label, dtype="int64")]
    columns += [ColumnSchema(name, dtype="float64") for name in spec.continuous]
    for name in spec.ids:
        is_list = name in spec.lists
        columns.append(ColumnSchema(name, dtype="str", is_list=is_list, is_ragged=is_list))
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
