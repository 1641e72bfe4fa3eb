# SPDX-License-Identifier: Apache-2.0
"""Typed raw columns to what a model reads: of training data, raw rows and requests alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import Vocabulary, vocabulary_file


@dataclass(frozen=True)
class Scale:
    """How numbers are scaled.

    Attributes:
        method: "range" to [0, 1] by the lowest and highest number, clipped; "standardize" by mean
            and standard deviation; "quantiles" to [0, 1] by n + 1 quantiles, between which it is
            linear.
        log1p: whether log(1 + x) comes first, in which negative numbers count as 0.
        values: those numbers, of the training rows.
    """

    method: str
    log1p: bool
    values: Sequence[float]

    def filled(self, numbers: np.ndarray) -> np.ndarray:
        """N float64, before they are scaled; a missing one (NaN) counts as 0."""
        filled = np.where(np.isnan(numbers), 0.0, numbers)
        return np.log1p(np.maximum(filled, 0.0)) if self.log1p else filled

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """N float64, NaN where missing, to n float32."""
        filled = self.filled(numbers)
        with np.errstate(over="ignore"):  # beyond the range: clipped
            if self.method == "standardize":
                mean, deviation = self.values
                return ((filled - mean) / (deviation or 1.0)).astype(np.float32)
            if self.method == "quantiles":
                return np.interp(filled, *_knots(self.values)).astype(np.float32)
            low, high = self.values
            high = high if high > low else low + max(1.0, abs(low))  # its one value becomes 0
            return np.clip(((filled - low) / (high - low)).astype(np.float32), 0.0, 1.0)


def _knots(quantiles: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Different quantiles, and the mean of the shares that each is of."""
    values, first, counts = np.unique(quantiles, return_index=True, return_counts=True)
    return values, (first + (counts - 1) / 2) / max(len(quantiles) - 1, 1)


@dataclass(frozen=True)
class Encoder:
    """All fields of a data set.

    Attributes:
        spec: what the columns are.
        vocabularies: by field of ids.
        scales: by continuous field.
    """

    spec: DatasetSpec
    vocabularies: Mapping[str, Vocabulary]
    scales: Mapping[str, Scale]

    @classmethod
    def open(
        cls, workflow: Path, spec: DatasetSpec, ranges: Mapping[str, Sequence[float]]
    ) -> Encoder:
        """Open the encoder of a folder with vocabularies; ``ranges`` are what scales numbers."""
        vocabularies = {
            name: Vocabulary.open(
                vocabulary_file(workflow, spec.vocabulary_of(name)), spec.buckets_of(name)
            )
            for name in spec.ids
        }
        return cls(spec, vocabularies, {n: scale_of(spec, n, ranges[n]) for n in spec.continuous})

    def encode(self, name: str, column: pa.Array) -> pa.Array:
        """A column of n values: texts to int32, lists of texts to such lists, float64 to float32.

        A missing value is null, in a list too.
        """
        if name in self.scales:
            return pa.array(self.scales[name](column.to_numpy(zero_copy_only=False)))
        vocabulary = self.vocabularies[name]
        if name not in self.spec.lists:
            return pa.array(vocabulary.encode(column))
        ids = pa.array(vocabulary.encode(column.flatten()))
        offsets = column.offsets.to_numpy()
        return pa.ListArray.from_arrays(pa.array(offsets - offsets[0]), ids)


def scale_of(spec: DatasetSpec, name: str, values: Sequence[float]) -> Scale:
    """How the spec has a continuous field scaled."""
    method = "range"
    if name in spec.standardize:
        method = "standardize"
    elif name in spec.quantiles:
        method = "quantiles"
    return Scale(method, name in spec.log1p, values)
