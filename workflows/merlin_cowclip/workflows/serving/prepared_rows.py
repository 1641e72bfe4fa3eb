"""Encode raw rows of prepared data without pandas and NVTabular, as its workflow does.

Ids are looked up in dictionaries that are built when the model loads.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepare import statistics
from merlin_cowclip.workflows.data.prepare.operators import EncodeIds, UnitRange
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag import Graph

Column = tuple[np.ndarray, np.ndarray | None]  # values, and of lists their offsets


class PreparedRows:
    """Raw rows to ids (int64) and numbers (float32).

    A request has n texts per field of ids (UTF-8; empty is missing) and n float64 per field of
    numbers (NaN is missing); of a field of lists `name__values` and `name__offsets` (n + 1).
    """

    def __init__(self, workflow: nvt.Workflow, spec: DatasetSpec) -> None:
        self._spec = spec
        (encode,), scale = (
            [node.op for node in Graph.get_nodes_by_op_type([workflow.output_node], kind)]
            for kind in (EncodeIds, UnitRange)
        )
        self._fields = {name: _Field(encode, name) for name in spec.ids}
        bounds = {name: (scale[0].mins[name], scale[0].maxs[name]) for name in spec.continuous}
        self._ranges = {name: (float(low), float(high)) for name, (low, high) in bounds.items()}

    def encode(self, request: Mapping[str, np.ndarray]) -> dict[str, Column]:
        """Encode a request, or refuse its first bad value."""
        found: dict[str, Column] = {}
        for name, field in self._fields.items():
            end = "__values" if name in self._spec.lists else ""
            found[name] = field.ids(request[name + end]), request.get(f"{name}__offsets")
        for name, (low, high) in self._ranges.items():
            numbers = self._finite(name, request[name])
            found[name] = statistics.unit_range(numbers, low, high), None
        return found

    def _finite(self, name: str, numbers: np.ndarray) -> np.ndarray:
        infinite = np.isinf(numbers)
        if self._spec.non_finite == "refuse" and infinite.any():
            row = int(infinite.argmax())
            raise UserError(f"column {name!r} is {numbers[row]} in row {row + 1}. Give NaN instead")
        return np.where(infinite, np.nan, numbers)


class _Field:
    """The ids of a field by their text, as `EncodeIds` finds them."""

    def __init__(self, encode: EncodeIds, name: str) -> None:
        storage = encode.storage_name.get(name, name)
        column = pq.read_table(encode.categories[storage], columns=[storage])[storage]
        texts = column.combine_chunks().cast(pa.string()).cast(pa.binary()).to_pylist()
        self._name = name
        self._buckets = (encode.num_buckets or {}).get(name, 1)
        self._index = dict(
            zip(texts, itertools.count(statistics.UNKNOWN + self._buckets), strict=False)
        )
        missing = statistics.UNKNOWN if name in encode.missing_as_unknown else statistics.MISSING
        self._index |= {text.encode(): missing for text in ("", *encode.null_values)}

    def ids(self, texts: np.ndarray) -> np.ndarray:
        """Ids of n texts (bytes), n int64."""
        found = map(self._index.get, texts, itertools.repeat(-1))
        ids = np.fromiter(found, np.int64, len(texts))
        unknown = np.flatnonzero(ids < 0)
        if len(unknown):
            try:
                given = pa.array(texts[unknown], pa.binary()).cast(pa.string())
            except pa.ArrowInvalid:
                raise UserError(f"column {self._name!r} is not UTF-8. Encode it") from None
            ids[unknown] = statistics.UNKNOWN
            if self._buckets > 1:
                ids[unknown] += statistics.hash_bucket(given, self._buckets)
        return ids
