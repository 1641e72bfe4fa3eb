# SPDX-License-Identifier: Apache-2.0
"""Encode raw rows of prepared data without pandas and NVTabular, as its workflow does."""

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


class PreparedRows:
    """Raw rows to ids (int64) and numbers (float32).

    A request has n texts per field of ids (UTF-8; empty is missing) and n float64 per field of
    numbers (NaN is missing); of a field of lists `name__values` and `name__offsets` (n + 1).
    """

    def __init__(self, workflow: nvt.Workflow, spec: DatasetSpec) -> None:
        self._spec = spec
        (self._encode,), scale = (
            [node.op for node in Graph.get_nodes_by_op_type([workflow.output_node], kind)]
            for kind in (EncodeIds, UnitRange)
        )
        self._ids = {name: self._index(name) for name in spec.ids}
        ends = {name: (scale[0].mins[name], scale[0].maxs[name]) for name in spec.continuous}
        self._ranges = {name: (float(low), float(high)) for name, (low, high) in ends.items()}

    def _index(self, field: str) -> dict[bytes, int]:
        """The id of each text of the vocabulary, and of those that mean a missing id."""
        encode = self._encode
        column = pq.read_table(encode.categories[field], columns=[field])[field]
        texts = column.cast(pa.string()).cast(pa.binary()).to_pylist()
        known = itertools.count(statistics.UNKNOWN + encode.buckets(field))
        missing = (statistics.MISSING, statistics.UNKNOWN)[field in encode.missing_as_unknown]
        none = {text.encode(): missing for text in ("", *encode.null_values)}
        return dict(zip(texts, known, strict=False)) | none

    def encode(self, request: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Encode a request, or refuse its first bad value; offsets stay."""
        encoded = dict(request)
        for name in self._spec.ids:
            key = f"{name}__values" if name in self._spec.lists else name
            encoded[key] = self._ids_of(name, request[key])
        for name, (low, high) in self._ranges.items():
            numbers, infinite = request[name], np.isinf(request[name])
            if self._spec.non_finite == "refuse" and infinite.any():
                row = int(infinite.argmax())
                raise UserError(
                    f"column {name!r} is {numbers[row]} in row {row + 1}. Give NaN instead"
                )
            encoded[name] = statistics.unit_range(np.where(infinite, np.nan, numbers), low, high)
        return encoded

    def _ids_of(self, field: str, texts: np.ndarray) -> np.ndarray:
        """Ids of n texts (bytes), n int64, as `EncodeIds` finds them."""
        found = map(self._ids[field].get, texts, itertools.repeat(-1))
        ids = np.fromiter(found, np.int64, len(texts))
        unknown = np.flatnonzero(ids < 0)
        if len(unknown):
            try:
                given = pa.array(texts[unknown], pa.binary()).cast(pa.string())
            except pa.ArrowInvalid:
                raise UserError(f"column {field!r} is not UTF-8. Encode it") from None
            buckets = self._encode.buckets(field)
            hashed = statistics.hash_bucket(given, buckets) if buckets > 1 else 0
            ids[unknown] = statistics.UNKNOWN + hashed
        return ids
