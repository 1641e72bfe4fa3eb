"""What a model's embedding tables start from: a warning about another σ, and `init_tables`."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.embeddings.tables import TableSpec

_KERAS = tf.keras.initializers
_OTHER_KINDS = (
    *(_KERAS.VarianceScaling, _KERAS.Orthogonal, _KERAS.Identity),  # Glorot's, He's, LeCun's too
    *(_KERAS.Zeros, _KERAS.Ones, _KERAS.Constant),
    *(tf.zeros_initializer, tf.ones_initializer, tf.constant_initializer),
)
_NOT_NORMAL = _KERAS.TruncatedNormal, _KERAS.RandomUniform, tf.random_uniform_initializer


def _initializer(spec: TableSpec) -> Any:
    return getattr(spec.layer, "embeddings_initializer", None) or spec.layer


def _start(spec: TableSpec) -> tuple[float, float] | None:
    """Mean and σ, of a uniform or normal initializer; `None` of any other."""
    start = _initializer(spec)
    if hasattr(start, "minval"):
        low, high = float(start.minval), float(start.maxval)
        return (low + high) / 2, (high - low) / math.sqrt(12)
    mean, stddev = getattr(start, "mean", 0.0), getattr(start, "stddev", None)
    if not isinstance(mean, numbers.Real) or not isinstance(stddev, numbers.Real):
        return None
    return float(mean), float(stddev)


def _is_from(start: tuple[float, float], stddev: float) -> bool:
    return abs(start[0]) <= 1e-3 * stddev and math.isclose(start[1], stddev, rel_tol=1e-2)


def warn_of_others_than(stddev: float, specs: Iterable[TableSpec], *, stacklevel: int) -> None:
    """Warn once of tables of width 2 and more that start with another mean or σ."""
    starts = [(spec.name, _start(spec)) for spec in specs if spec.width > 1]
    others = [(name, one) for name, one in starts if one and not _is_from(one, stddev)]
    if others:
        mean, found = others[0][1]
        names = ", ".join(repr(name) for name, _ in others[:3]) + ", …" * (len(others) > 3)
        warnings.warn(
            f"init_stddev is {stddev:g}, but the embedding tables {names} start with mean "
            f"{mean:.3g} and standard deviation {found:.3g}. Pass init_tables=True to for_model, "
            "before the model is first called.",
            stacklevel=stacklevel,
        )


def initialize(stddev: float, specs: Iterable[TableSpec]) -> None:
    """Let tables of width 2 and more start from N(0, σ); pretrained values and functions stay.

    Raises:
      ValueError: a table is built, and may be trained; or its layer takes another σ itself.
    """
    layers = []
    for spec in (one for one in specs if one.width > 1):
        start, initializer = _start(spec), _initializer(spec)
        is_array = np.ndim(getattr(initializer, "value", 0.0)) > 0
        if start is None and (is_array or not isinstance(initializer, _OTHER_KINDS)):
            continue
        if spec.layer.built:
            raise ValueError(
                f"init_tables needs tables that are yet to be built. Received: {spec.name!r}, "
                "which is built. Make the optimizer before the model is called, or leave "
                "init_tables out."
            )
        if start and _is_from(start, stddev) and not isinstance(initializer, _NOT_NORMAL):
            continue
        if initializer is spec.layer:
            raise ValueError(
                f"init_tables sets the initializers of Keras's and Merlin's tables. Received: "
                f"{spec.name!r}, which takes its stddev as an argument of its own. Give it "
                f"{stddev:g} there."
            )
        layers.append(spec.layer)
    for layer in layers:  # one for each: Keras's draw the same values from one instance
        layer.embeddings_initializer = _KERAS.RandomNormal(stddev=stddev)
