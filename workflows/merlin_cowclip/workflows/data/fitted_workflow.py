"""A data set's NVTabular workflow: what it does to a column, and its statistics if they are known.

The statistics are those that NVTabular's operators would compute, and are handed to them
(`StatOperator.fit_finalize`): it is an ordinary fitted `nvtabular.Workflow`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt


def build_workflow(spec: DatasetSpec, folder: str | Path) -> nvt.Workflow:
    """The spec's NVTabular workflow, not fitted; vocabularies will lie in ``folder/categories``.

    `prepare` gives it the statistics of the training part. It can be fitted by NVTabular as well,
    on a GPU or a cluster: ``build_workflow(spec, folder).fit(dataset)``.
    """
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


def fitted_workflow(
    spec: DatasetSpec,
    folder: Path,
    vocabularies: Mapping[str, str],
    ranges: Mapping[str, tuple[float, float]],
) -> nvt.Workflow:
    """`build_workflow`, fitted with statistics that are there.

    Args:
        spec: what the log looks like.
        folder: where the workflow will be saved.
        vocabularies: files by field of ids, as Categorify writes them.
        ranges: lowest and highest number, by field of numbers.
    """
    with quiet_imports():
        from merlin.dag import Graph
        from merlin.schema import ColumnSchema, Schema

        from merlin_cowclip.workflows.data.prepare.operators import EncodeIds, UnitRange
    workflow = build_workflow(spec, folder)
    statistics = {EncodeIds: vocabularies, UnitRange: _range_statistics(ranges)}
    for kind, found in statistics.items():
        for node in Graph.get_nodes_by_op_type([workflow.output_node], kind):
            node.op.fit_finalize(found)
            node.op.fitted = True
    workflow.fit_schema(
        Schema(
            [
                ColumnSchema(spec.label, dtype="int64"),
                *(ColumnSchema(name, dtype="float64") for name in spec.continuous),
                *(ColumnSchema(name, dtype="str") for name in spec.categorical),
                *(
                    ColumnSchema(name, dtype="str", is_list=True, is_ragged=True)
                    for name in spec.lists
                ),
            ]
        )
    )
    return workflow


def _range_statistics(ranges: Mapping[str, tuple[float, float]]) -> dict[str, pd.Series]:
    """What NormalizeMinMax.fit computes: two series by column."""
    return {
        "mins": pd.Series({name: low for name, (low, _) in ranges.items()}, dtype="float64"),
        "maxs": pd.Series({name: high for name, (_, high) in ranges.items()}, dtype="float64"),
    }
