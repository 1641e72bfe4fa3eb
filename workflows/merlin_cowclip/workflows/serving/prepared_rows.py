# SPDX-License-Identifier: Apache-2.0
"""Encode raw rows of prepared data without pandas and NVTabular, as its workflow does."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from merlin_cowclip.workflows.data.encoder import Encoder
from merlin_cowclip.workflows.data.sources.base import time_field, with_nulls
from merlin_cowclip.workflows.data.spec import TIME_FIELDS, DatasetSpec
from merlin_cowclip.workflows.errors import UserError


class PreparedRows:
    """Raw rows to ids (int64) and numbers (float32).

    A request has n texts per field of ids (UTF-8; empty is missing) and n float64 per field of
    numbers (NaN is missing); of a field of lists `name__values` and `name__offsets` (n + 1).
    """

    def __init__(self, spec: DatasetSpec, encoder: Encoder) -> None:
        self._spec, self._encoder = spec, encoder

    def encode(self, request: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Encode a request, or refuse its first bad value; offsets stay."""
        encoded, spec = dict(request), self._spec
        for name in spec.ids:
            column = spec.column_of(name)
            key, kept = (f"{n}__values" if name in spec.lists else n for n in (column, name))
            if name in spec.lists:
                encoded[f"{name}__offsets"] = request[f"{column}__offsets"]
            try:
                texts = pa.array(request[key], pa.binary()).cast(pa.string())
            except pa.ArrowInvalid:
                raise UserError(f"column {column!r} is not UTF-8. Encode it") from None
            if name in TIME_FIELDS and getattr(spec, name):
                texts = time_field(name, texts, spec)
            else:
                texts = with_nulls(texts, spec.null_values)
            encoded[kept] = self._encoder.vocabularies[name].encode(texts)
        for name, scale in self._encoder.scales.items():
            numbers = request[spec.column_of(name)]
            infinite = np.isinf(numbers)
            if spec.non_finite == "refuse" and infinite.any():
                row = int(infinite.argmax())
                raise UserError(
                    f"column {spec.column_of(name)!r} is {numbers[row]} in row {row + 1}. Give NaN "
                    "instead"
                )
            encoded[name] = scale(np.where(infinite, np.nan, numbers))
        return encoded
