"""Encode raw rows of prepared data without pandas and NVTabular, as its workflow does.

Ids are looked up in dictionaries that are built when the model loads. Importing this module imports
NVTabular.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepare.operators import EncodeIds, ParseNumbers, UnitRange
from merlin_cowclip.workflows.data.prepare.statistics import (
    MISSING,
    UNKNOWN,
    hash_bucket,
    unit_range,
)
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError, excerpt
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag import ColumnSelector, Graph


class PreparedRows:
    """Raw rows to ids and numbers.

    A request has n texts per field of ids (UTF-8; empty is missing) and n float64 per field of
    numbers (NaN is missing); of a field of lists `name__values` and `name__offsets` (n + 1).
    """

    def __init__(self, workflow: nvt.Workflow, spec: DatasetSpec) -> None:
        self._spec = spec
        encode, parse, scale = (
            [node.op for node in Graph.get_nodes_by_op_type([workflow.output_node], kind)]
            for kind in (EncodeIds, ParseNumbers, UnitRange)
        )
        self._encode, self._parse = encode[0], parse
        self._fields = {name: _Field(self._encode, name) for name in spec.ids}
        self._ranges = {
            name: (float(scale[0].mins[name]), float(scale[0].maxs[name]))
            for name in spec.continuous
        }

    def encode(self, request: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Ids (int64) and numbers (float32) by field; of a list `name__values`, `name__offsets`.

        Raises:
          UserError: text that is not UTF-8, or an infinite number where the description forbids it.
        """
        found = {name: self._fields[name].ids(request[name]) for name in self._spec.categorical}
        for name in self._spec.continuous:
            found[name] = unit_range(self._finite(name, request[name]), *self._ranges[name])
        for name in self._spec.lists:
            found[f"{name}__values"] = self._fields[name].ids(request[f"{name}__values"])
            found[f"{name}__offsets"] = request[f"{name}__offsets"]
        return found

    def _finite(self, name: str, numbers: np.ndarray) -> np.ndarray:
        infinite = np.isinf(numbers)
        if not infinite.any():
            return numbers
        if self._spec.non_finite == "refuse":
            row = int(infinite.argmax())
            raise UserError(
                f"column {name!r} is {numbers[row]} in row {row + 1} of the request. Give NaN for "
                "a missing number"
            )
        return np.where(infinite, np.nan, numbers)

    def request_of(self, frame: pd.DataFrame) -> dict[str, np.ndarray]:
        """A frame as a request has it.

        Raises:
          UserError: a column of ids, lists or numbers has something else.
        """
        found: dict[str, np.ndarray] = {}
        for name in self._spec.ids:
            texts = self._encode.as_text(frame[name])
            if name in self._spec.lists:
                found[f"{name}__offsets"] = texts.offsets.to_numpy()
                texts, name = texts.flatten(), f"{name}__values"
            texts = pc.fill_null(texts.cast(pa.binary()), b"")
            found[name] = texts.to_numpy(zero_copy_only=False)
        for parse in self._parse:  # none without numbers
            numbers = parse.transform(ColumnSelector(list(self._spec.continuous)), frame)
            found |= {name: numbers[name].to_numpy() for name in self._spec.continuous}
        return found


class _Field:
    """The ids of a field by their text, as `EncodeIds` finds them."""

    def __init__(self, encode: EncodeIds, name: str) -> None:
        storage = encode.storage_name.get(name, name)
        column = pq.read_table(encode.categories[storage], columns=[storage])[storage]
        texts = column.combine_chunks().cast(pa.string()).cast(pa.binary()).to_pylist()
        self._name = name
        self._buckets = (encode.num_buckets or {}).get(name, 1)
        self._index = dict(zip(texts, itertools.count(UNKNOWN + self._buckets), strict=False))
        missing = UNKNOWN if name in encode.missing_as_unknown else MISSING
        self._index |= {text.encode(): missing for text in ("", *encode.null_values)}

    def ids(self, texts: np.ndarray) -> np.ndarray:
        """Ids of n texts (bytes), n int64."""
        found = map(self._index.get, texts, itertools.repeat(-1))
        ids = np.fromiter(found, np.int64, len(texts))
        unknown = np.flatnonzero(ids < 0)
        if len(unknown):
            given = np.array([self._decoded(text) for text in texts[unknown]], object)
            ids[unknown] = UNKNOWN
            if self._buckets > 1:
                ids[unknown] += hash_bucket(given, self._buckets)
        return ids

    def _decoded(self, text: bytes) -> str:
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(
                f"column {self._name!r} is not UTF-8: {excerpt(text)}. Encode it"
            ) from None
