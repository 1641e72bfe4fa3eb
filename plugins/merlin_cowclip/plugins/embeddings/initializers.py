"""What a model's embedding tables start from: a warning about another σ, and `init_tables`."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable, Iterator

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.embeddings.tables import TableSpec


def _starts(specs: Iterable[TableSpec]) -> Iterator[tuple[TableSpec, float, float]]:
    """Tables of width 2 and more with a uniform or normal initializer: its mean and σ."""
    for spec in specs:
        start = getattr(spec.layer, "embeddings_initializer", spec.layer)
        mean, stddev = getattr(start, "mean", 0.0), getattr(start, "stddev", None)
        if hasattr(start, "minval"):
            low, high = float(start.minval), float(start.maxval)
            mean, stddev = (low + high) / 2, (high - low) / math.sqrt(12)
        if spec.width > 1 and isinstance(stddev, numbers.Real):
            yield spec, float(mean), float(stddev)


def _differs(mean: float, found: float, stddev: float) -> bool:
    return abs(mean) > 1e-3 * stddev or not math.isclose(found, stddev, rel_tol=1e-2)


def warn_of_others_than(stddev: float, specs: Iterable[TableSpec], *, stacklevel: int) -> None:
    """Warn once of tables of width 2 and more that start with another mean or σ."""
    others = [one for one in _starts(specs) if _differs(*one[1:], stddev)]
    if others:
        _, mean, found = others[0]
        names = ", ".join(repr(spec.name) for spec, *_ in others[:3]) + ", …" * (len(others) > 3)
        warnings.warn(
            f"init_stddev is {stddev:g}, but the embedding tables {names} start with mean "
            f"{mean:.3g} and standard deviation {found:.3g}. Pass init_tables=True to for_model, "
            "before the model is first called.",
            stacklevel=stacklevel,
        )


def initialize(stddev: float, specs: Iterable[TableSpec]) -> None:
    """Let tables of width 2 and more with a uniform or normal initializer start from N(0, σ)."""
    layers = []
    for spec, mean, found in _starts(specs):
        if spec.layer.built:
            raise ValueError(
                f"init_tables needs tables that are yet to be built. Received: {spec.name!r}, "
                "which is built. Make the optimizer before the model is called, or leave "
                "init_tables out."
            )
        if not _differs(mean, found, stddev):
            continue
        if not hasattr(spec.layer, "embeddings_initializer"):
            raise ValueError(
                f"init_tables sets the initializers of Keras's and Merlin's tables. Received: "
                f"{spec.name!r}, which takes its stddev as an argument of its own. Give it "
                f"{stddev:g} there."
            )
        layers.append(spec.layer)
    for layer in layers:  # one for each: Keras's draw the same values from one instance
        layer.embeddings_initializer = tf.keras.initializers.RandomNormal(stddev=stddev)
