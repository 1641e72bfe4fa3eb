"""The initial standard deviation σ of a model's tables: what it is, and setting it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.tables import TableSpec


def initial_stddev(layer: Any) -> float | None:
    """σ that a table's layer starts with; `None` where that cannot be told (a function, values)."""
    found = getattr(layer, "stddev", None)
    initializer = getattr(layer, "embeddings_initializer", None)
    if isinstance(initializer, tf.keras.initializers.RandomUniform):
        found = (initializer.maxval - initializer.minval) / math.sqrt(12)
    elif initializer is not None:
        found = getattr(initializer, "stddev", None)
    return float(found) if isinstance(found, (int, float)) else None


def others_than(stddev: float, specs: Iterable[TableSpec]) -> list[tuple[TableSpec, float]]:
    """Tables of width 2 and more that are known to start with another σ, and theirs."""
    known = [(spec, initial_stddev(spec.layer)) for spec in specs if spec.width > 1]
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
