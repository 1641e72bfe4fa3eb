# SPDX-License-Identifier: Apache-2.0
"""The NVTabular workflow of prepared data, and its schema. Imports NVTabular.

The engines compute the statistics, so that nothing is left to fit: the result is an ordinary
`nvtabular.Workflow`.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.encoder import Encoder
from merlin_cowclip.workflows.data.prepared_data import WORKFLOW
from merlin_cowclip.workflows.data.sources.base import decoded, typed, without_place
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import CATEGORIES, UNKNOWN, vocabulary_file
from merlin_cowclip.workflows.errors import UserError, clipped
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin.schema import ColumnSchema, Schema, Tags
    from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
    from nvtabular import ops
    from nvtabular.ops import StatOperator


class EncodeFields(StatOperator):
    """The fields of prepared data from columns of raw rows, by the `Encoder` of the folder.

    Ids may be of any type: 1382, 1382.0 and "1382" are one id. An empty text is missing, a missing
    list is empty. A frame on a GPU is encoded on the CPU.

    Args:
        spec: what the columns are.
        ranges: what numbers are scaled by.
        workflow: the folder of the workflow, with ``categories/``.
    """

    fitted = True

    def __init__(
        self, spec: DatasetSpec, ranges: Mapping[str, Sequence[float]], workflow: Path
    ) -> None:
        super().__init__()
        self.spec, self.ranges, self.workflow = spec, ranges, workflow
        self._encoder: Encoder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_encoder": None}  # read again from the files

    def set_storage_path(self, new_path: str, copy: bool = False) -> None:
        """Move to another folder, to which ``copy`` copies the vocabularies."""
        target = Path(new_path)
        if copy and target != self.workflow:
            shutil.copytree(self.workflow / CATEGORIES, target / CATEGORIES, dirs_exist_ok=True)
        self.workflow, self._encoder = target, None

    @property
    def encoder(self) -> Encoder:
        """What encodes, opened once."""
        if self._encoder is None:
            self._encoder = Encoder.open(self.workflow, self.spec, self.ranges)
        return self._encoder

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The fields of a frame's columns; raises UserError for a value that cannot be read."""
        frame = df.to_pandas() if hasattr(df, "to_pandas") else df
        sources = {field: of[0] for field, of in self.column_mapping(col_selector).items()}
        columns = {}
        for name in sources.values():
            try:
                cells = pa.array(frame[name], from_pandas=True)
            except (pa.ArrowException, ValueError) as error:
                reason = clipped(str(error))
                raise UserError(f"cannot read column {name!r}: {reason}. Read it as text") from None
            is_one_chunk = isinstance(cells, pa.Array)
            columns[name] = decoded(cells if is_one_chunk else cells.combine_chunks())
        rows = typed(self.spec, sources, columns, without_place, Counter(), "of a frame")
        out = pd.DataFrame(index=frame.index)
        for field in sources:
            values = self.encoder.encode(field, rows[field]).to_pandas()
            values = values.astype(np.int64) if field in self.spec.categorical else values
            out[field] = values.set_axis(frame.index)
        return out if frame is df else type(df).from_pandas(out)

    def column_mapping(self, col_selector: Any) -> dict[str, list[str]]:
        """The column of each field."""
        columns = {field: self.spec.column_of(field) for field in self.spec.fields}
        return {field: [of] for field, of in columns.items() if of in col_selector.names}

    def compute_output_schema(
        self, input_schema: Schema, col_selector: Any, prev_output_schema: Any = None
    ) -> Schema:
        """The fields, with tags and domains."""
        selected = col_selector or nvt.ColumnSelector(input_schema.column_names)
        return Schema([self._schema_of(field) for field in self.column_mapping(selected)])

    def _schema_of(self, field: str) -> ColumnSchema:
        spec, is_list = self.spec, field in self.spec.lists
        if field in spec.continuous:
            return ColumnSchema(field, [Tags.CONTINUOUS], dtype=np.float32)
        name, buckets = spec.vocabulary_of(field), spec.buckets_of(field)
        highest = self.encoder.vocabularies[field].cardinality - 1
        properties = {  # Categorify's, with a path in the folder of the workflow: folders move
            "num_buckets": buckets if buckets > 1 else None,
            "freq_threshold": spec.threshold_of(field),
            "max_size": 0,
            "cat_path": vocabulary_file(Path(), name).as_posix(),
            "domain": {"min": 0, "max": highest, "name": name},
            "empty_is_missing": True,
        }
        return ColumnSchema(field, [Tags.CATEGORICAL], properties, np.int64, is_list, is_list)


def save_fitted_workflow(
    spec: DatasetSpec, folder: Path, ranges: Mapping[str, Sequence[float]]
) -> None:
    """Save the workflow and the schema of a folder with vocabularies and counts.

    ``ranges`` are what numbers are scaled by.
    """
    label: Any = [spec.column_of(spec.label)]
    if label != [spec.label]:
        label = label >> ops.Rename(name=spec.label)
    label = label >> ops.AddMetadata(tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
    columns = dict.fromkeys(map(spec.column_of, (*spec.ids, *spec.continuous)))
    fields = [*columns] >> EncodeFields(spec, ranges, folder / WORKFLOW)
    workflow = nvt.Workflow(fields + label).fit_schema(raw_schema(spec))
    workflow.save(str(folder / WORKFLOW))
    schema = workflow.output_schema
    save_schema(Schema([schema[name] for name in (spec.label, *spec.fields)]), folder)


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
    hashed ids without a training row. `FusedEmbeddings` initializes their embeddings with zero.
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
