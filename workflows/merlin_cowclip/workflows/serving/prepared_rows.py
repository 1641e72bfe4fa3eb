# SPDX-License-Identifier: Apache-2.0
"""Encode raw rows of prepared data without pandas and NVTabular, as its workflow does."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from merlin_cowclip.workflows.data.prepare.numbers import unit_range
from merlin_cowclip.workflows.data.prepare.operators import EncodeIds, UnitRange
from merlin_cowclip.workflows.data.sources.base import with_nulls
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
        (encode,), scale = (
            [node.op for node in Graph.get_nodes_by_op_type([workflow.output_node], kind)]
            for kind in (EncodeIds, UnitRange)
        )
        self._vocabularies = {name: encode.vocabulary(name) for name in spec.ids}
        ends = {name: (scale[0].mins[name], scale[0].maxs[name]) for name in spec.continuous}
        self._ranges = {name: (float(low), float(high)) for name, (low, high) in ends.items()}

    def encode(self, request: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Encode a request, or refuse its first bad value; offsets stay."""
        encoded = dict(request)
        for name, vocabulary in self._vocabularies.items():
            key = f"{name}__values" if name in self._spec.lists else name
            try:
                texts = pa.array(request[key], pa.binary()).cast(pa.string())
            except pa.ArrowInvalid:
                raise UserError(f"column {name!r} is not UTF-8. Encode it") from None
            encoded[key] = vocabulary.encode(with_nulls(texts, self._spec.null_values))
        for name, (low, high) in self._ranges.items():
            numbers, infinite = request[name], np.isinf(request[name])
            if self._spec.non_finite == "refuse" and infinite.any():
                row = int(infinite.argmax())
                raise UserError(
                    f"column {name!r} is {numbers[row]} in row {row + 1}. Give NaN instead"
                )
            encoded[name] = unit_range(np.where(infinite, np.nan, numbers), low, high)
        return encoded
