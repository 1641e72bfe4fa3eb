# SPDX-License-Identifier: Apache-2.0
"""What a model's embedding tables start from: a warning about another σ, and `init_tables`."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.embeddings.tables import TableSpec


def _others_than(stddev: float, specs: Iterable[TableSpec]) -> list[tuple[TableSpec, float, float]]:
    """Tables of width 2 and more whose uniform or normal initializer has another mean or σ."""
    found = []
    for spec in specs:
        start = getattr(spec.layer, "embeddings_initializer", spec.layer)
        mean, sigma = getattr(start, "mean", 0.0), getattr(start, "stddev", None)
        if hasattr(start, "minval"):
            low, high = float(start.minval), float(start.maxval)
            mean, sigma = (low + high) / 2, (high - low) / math.sqrt(12)
        if spec.width == 1 or not isinstance(sigma, numbers.Real):
            continue
        if abs(mean) > 1e-3 * stddev or not math.isclose(sigma, stddev, rel_tol=1e-2):
            found.append((spec, float(mean), float(sigma)))
    return found


def warn_of_others_than(stddev: float, specs: Iterable[TableSpec], *, stacklevel: int) -> None:
    """Warn once of tables of width 2 and more that start with another mean or σ."""
    if others := _others_than(stddev, specs):
        _, mean, sigma = others[0]
        names = ", ".join(repr(spec.name) for spec, *_ in others[:3]) + ", …" * (len(others) > 3)
        warnings.warn(
            f"init_stddev is {stddev:g}, but the embedding tables {names} start with mean "
            f"{mean:.3g} and standard deviation {sigma:.3g}. Pass init_tables=True to for_model, "
            f"before the model is first called. Or, for trained tables, init_stddev={sigma:.3g}.",
            stacklevel=stacklevel,
        )


def initialize(stddev: float, specs: Iterable[TableSpec]) -> None:
    """Let tables of width 2 and more with a uniform or normal initializer start from N(0, σ)."""
    layers = [spec.layer for spec, *_ in _others_than(stddev, specs)]
    for layer in layers:
        if layer.built or not hasattr(layer, "embeddings_initializer"):
            raise ValueError(
                f"init_tables cannot set the initializer of {layer.name!r}, which is built, or "
                "takes its stddev as an argument. Make the optimizer before the model is called, "
                f"or give the layer stddev={stddev:g}."
            )
    for layer in layers:  # one for each: Keras's draw the same values from one instance
        layer.embeddings_initializer = tf.keras.initializers.RandomNormal(stddev=stddev)
