"""The initial standard deviation σ of a model's tables: what it is, and setting it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.tables import TableSpec

# Every weight is the same. A `Constant` may hold a table's values instead, pretrained ones.
_ONE_VALUE = (
    *(tf.keras.initializers.Zeros, tf.keras.initializers.Ones, tf.keras.initializers.Constant),
    *(tf.zeros_initializer, tf.ones_initializer, tf.constant_initializer),
)


def initial_stddev(spec: TableSpec) -> float | None:
    """σ that a table starts with; `None` where that cannot be told (a function, given values)."""
    found = getattr(spec.layer, "stddev", None)
    initializer = getattr(spec.layer, "embeddings_initializer", None)
    if initializer is not None:
        found = _stddev_of(initializer, spec.num_rows, spec.width)
    return float(found) if isinstance(found, (int, float)) else None


def _stddev_of(initializer: Any, rows: int, width: int) -> Any:
    """σ of one of Keras's or TensorFlow's own initializers, for a table of `rows`×`width`."""
    kinds = tf.keras.initializers
    if isinstance(initializer, kinds.VarianceScaling):  # Glorot's, He's and LeCun's
        fans = {"fan_in": rows, "fan_out": width, "fan_avg": (rows + width) / 2}
        return math.sqrt(initializer.scale / fans[initializer.mode])
    if isinstance(initializer, (kinds.Orthogonal, kinds.Identity)):
        return initializer.gain / math.sqrt(max(rows, width))
    if hasattr(initializer, "minval"):
        return (initializer.maxval - initializer.minval) / math.sqrt(12)
    if isinstance(initializer, _ONE_VALUE) and np.ndim(getattr(initializer, "value", 0)) == 0:
        return 0.0
    return getattr(initializer, "stddev", None)


def others_than(stddev: float, specs: Iterable[TableSpec]) -> list[tuple[TableSpec, float]]:
    """Tables of width 2 and more that are known to start with another σ, and theirs."""
    known = [(spec, initial_stddev(spec)) for spec in specs if spec.width > 1]
    return [
        (spec, found)
        for spec, found in known
        if found is not None and not math.isclose(found, stddev, rel_tol=1e-3)
    ]


def initialize(stddev: float, specs: Iterable[TableSpec]) -> None:
    """Let the tables of width 2 and more start from N(0, σ) when they are built.

    Raises:
      ValueError: a table has been built, or its layer takes σ itself.
    """
    differ = others_than(stddev, specs)
    for spec, found in differ:
        keras = isinstance(spec.layer, tf.keras.layers.Embedding)
        if spec.layer.built or not keras:
            why = "has been built" if keras else "takes its stddev as an argument of its own"
            raise ValueError(
                f"init_tables needs tables that are yet to be built. Received: {spec.name!r}, of σ "
                f"{found:.3g}, which {why}. Make the optimizer before the model is called, or "
                "give the layer this σ."
            )
    for spec, _ in differ:
        # One for each: Keras's draw the same values from one instance.
        initializer = tf.keras.initializers.RandomNormal(stddev=stddev)
        spec.layer.embeddings_initializer = initializer
