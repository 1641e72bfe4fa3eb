# SPDX-License-Identifier: Apache-2.0
"""Encode the rows of requests as `prepare` encodes a log, without pandas and NVTabular."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from merlin_cowclip.workflows.data.encoder import Encoder
from merlin_cowclip.workflows.data.sources.base import time_field, with_nulls
from merlin_cowclip.workflows.data.spec import TIME_FIELDS, DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import MISSING, hash_of
from merlin_cowclip.workflows.errors import UserError


class PreparedRows:
    """Raw rows to ids (int32) and numbers (float32).

    A request has the columns of the log: n texts for ids and times (UTF-8; empty is missing), n
    float64 for numbers (NaN is missing); for lists `name__values` and `name__offsets` (n + 1).
    """

    def __init__(self, spec: DatasetSpec, encoder: Encoder) -> None:
        self._spec, self._encoder = spec, encoder

    def encode(self, request: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The fields of a request; a UserError for its first bad value."""
        spec, encoded, texts = self._spec, dict[str, np.ndarray](), dict[str, pa.Array]()
        for name in spec.ids:
            column, end = spec.column_of(name), "__values" * (name in spec.lists)
            texts[name] = _text(request[f"{column}{end}"], column)
            if end:
                encoded[f"{name}__offsets"] = request[f"{column}__offsets"]
            if name in TIME_FIELDS and getattr(spec, name):
                texts[name] = time_field(name, texts[name], spec).dictionary_decode()
        # At once: hashing a few texts takes as long as hashing one.
        joined = with_nulls(pa.concat_arrays(texts.values()), spec.null_values)
        missing = joined.is_null().to_numpy(zero_copy_only=False)
        hashes = hash_of(joined.to_numpy(zero_copy_only=False))
        stop = 0
        for name, of in texts.items():
            start, stop = stop, stop + len(of)
            ids = self._encoder.vocabularies[name].encode_hashes(hashes[start:stop])
            ids[missing[start:stop]] = MISSING
            encoded[f"{name}__values" if name in spec.lists else name] = ids
        for name, scale in self._encoder.scales.items():
            column = spec.column_of(name)
            numbers, infinite = request[column], np.isinf(request[column])
            if spec.non_finite == "refuse" and infinite.any():
                row = int(infinite.argmax())
                raise UserError(
                    f"column {column!r} is {numbers[row]} in row {row + 1}. Give NaN instead"
                )
            encoded[name] = scale(np.where(infinite, np.nan, numbers))
        return encoded


def _text(values: np.ndarray, column: str) -> pa.Array:
    try:
        return pa.array(values, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        raise UserError(f"column {column!r} is not UTF-8. Encode it") from None
