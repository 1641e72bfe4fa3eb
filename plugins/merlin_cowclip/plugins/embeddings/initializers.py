# SPDX-License-Identifier: Apache-2.0
"""What a model's embedding tables start from."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.embeddings.tables import TableSpec


def initial_values(spec: TableSpec) -> tuple[float, float] | None:
    """Mean and standard deviation of a uniform or normal initializer; `None` of other ones."""
    start = getattr(spec.layer, "embeddings_initializer", spec.layer)
    mean, sigma = getattr(start, "mean", 0.0), getattr(start, "stddev", None)
    if hasattr(start, "minval"):
        low, high = float(start.minval), float(start.maxval)
        mean, sigma = (low + high) / 2, (high - low) / math.sqrt(12)
    return (float(mean), float(sigma)) if isinstance(sigma, numbers.Real) else None


def initialize(stddev: float, specs: Iterable[TableSpec]) -> None:
    """Let tables of width 2 and more with a uniform or normal initializer start from N(0, σ)."""
    layers = []
    for spec in specs:
        mean, sigma = initial_values(spec) or (0.0, stddev)
        is_same = abs(mean) <= 1e-3 * stddev and math.isclose(sigma, stddev, rel_tol=1e-2)
        if spec.width > 1 and not is_same:
            layers.append(spec.layer)
    for layer in layers:
        if layer.built or not hasattr(layer, "embeddings_initializer"):
            raise ValueError(
                f"init_tables cannot set the initializer of {layer.name!r}, which is built, or "
                "takes its stddev as an argument. Make the optimizer before the model is called, "
                f"or give the layer stddev={stddev:g}."
            )
    for layer in layers:  # one for each: Keras's draw the same values from one instance
        layer.embeddings_initializer = tf.keras.initializers.RandomNormal(stddev=stddev)
