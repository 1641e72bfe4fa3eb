"""What a model's tables start from: its mean and standard deviation σ, and setting them."""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.tables import TableSpec

_KINDS = tf.keras.initializers

# Every weight is the same. A `Constant` may hold a table's values instead, pretrained ones.
_ONE_VALUE = (
    *(_KINDS.Zeros, _KINDS.Ones, _KINDS.Constant),
    *(tf.zeros_initializer, tf.ones_initializer, tf.constant_initializer),
)
_ONES = (_KINDS.Ones, tf.ones_initializer)

# σ of N(0, 1) cut off at ±2: √(1 - 2·2φ(2) / (2Φ(2) - 1)).
_TRUNCATED = 0.87962566103423978


class Start(NamedTuple):
    """What a table's weights are drawn from, as far as its initializer tells."""

    mean: float
    stddev: float
    is_normal: bool  # else another shape

    def has(self, stddev: float) -> bool:
        """Whether its mean is 0, and this is its σ."""
        is_centred = abs(self.mean) <= 1e-3 * stddev
        return is_centred and math.isclose(self.stddev, stddev, rel_tol=1e-3)

    def __str__(self) -> str:
        around = f" around {self.mean:.3g}" if self.mean else ""
        return f"{self.stddev:.3g}{around}"


def start_of(spec: TableSpec) -> Start | None:
    """What a table starts with; `None` where that cannot be told (a function, given values)."""
    initializer = getattr(spec.layer, "embeddings_initializer", None)
    if initializer is not None:
        return _start_of(initializer, spec.num_rows, spec.width)
    stddev = getattr(spec.layer, "stddev", None)
    return Start(0.0, float(stddev), True) if isinstance(stddev, numbers.Real) else None


def _start_of(initializer: Any, rows: int, width: int) -> Start | None:
    """Of one of Keras's or TensorFlow's own initializers, for a table of `rows`×`width`."""
    if isinstance(initializer, _KINDS.VarianceScaling):  # Glorot's, He's and LeCun's
        fans = {"fan_in": rows, "fan_out": width, "fan_avg": (rows + width) / 2}
        return Start(0.0, math.sqrt(initializer.scale / fans[initializer.mode]), False)
    if isinstance(initializer, (_KINDS.Orthogonal, _KINDS.Identity)):
        return Start(0.0, initializer.gain / math.sqrt(max(rows, width)), False)
    if hasattr(initializer, "minval"):
        low, high = float(initializer.minval), float(initializer.maxval)
        return Start((low + high) / 2, (high - low) / math.sqrt(12), False)
    if isinstance(initializer, _ONE_VALUE):
        value = getattr(initializer, "value", float(isinstance(initializer, _ONES)))
        return Start(float(value), 0.0, True) if np.ndim(value) == 0 else None
    mean, stddev = getattr(initializer, "mean", 0.0), getattr(initializer, "stddev", None)
    if not isinstance(mean, numbers.Real) or not isinstance(stddev, numbers.Real):
        return None
    if isinstance(initializer, _KINDS.TruncatedNormal):
        return Start(float(mean), _TRUNCATED * float(stddev), False)
    return Start(float(mean), float(stddev), True)


def _known(specs: Iterable[TableSpec]) -> Iterator[tuple[TableSpec, Start]]:
    """Tables of width 2 and more of which it is known how they start."""
    for spec in specs:
        start = start_of(spec) if spec.width > 1 else None
        if start is not None:
            yield spec, start


def warn_of_others_than(stddev: float, specs: Iterable[TableSpec], *, stacklevel: int) -> None:
    """Warn once of tables of width 2 and more that are known to start with another σ or mean."""
    differ = [(spec, start) for spec, start in _known(specs) if not start.has(stddev)]
    if differ:
        spec, start = differ[0]
        warnings.warn(
            f"init_stddev is {stddev:g}, but {len(differ)} of the model's tables start with "
            f"another standard deviation or mean, the first of them {spec.name!r} with "
            f"{start}. init_tables=True sets them, before the model is built; or give the "
            "layers this σ, and the mean 0.",
            stacklevel=stacklevel,
        )


def to_initialize(stddev: float, specs: Iterable[TableSpec]) -> list[TableSpec]:
    """Tables of width 2 and more that are to start from N(0, σ) and do not yet.

    Raises:
      ValueError: a table has been built, whatever it started with: it may have been trained since.
        Or its layer takes σ itself, and has another.
    """
    known = list(_known(specs))
    for spec, start in known:
        if spec.layer.built:
            raise ValueError(
                f"init_tables needs tables that are yet to be built. Received: {spec.name!r}, of σ "
                f"{start}, which has been built{_by(spec)}. Make the optimizer before the model is "
                "called, or leave init_tables out."
            )
    differ = [(spec, start) for spec, start in known if not (start.is_normal and start.has(stddev))]
    for spec, start in differ:
        if not isinstance(spec.layer, tf.keras.layers.Embedding):
            raise ValueError(
                f"init_tables sets the initializers of Keras's and Merlin's tables. Received: "
                f"{spec.name!r}, of σ {start}, which takes its stddev as an argument of its own. "
                f"Give it {stddev:g} there."
            )
    return [spec for spec, _ in differ]


def initialize(stddev: float, specs: Iterable[TableSpec]) -> None:
    """Let tables, of `to_initialize`, start from N(0, σ) when they are built."""
    for spec in specs:
        # One for each: Keras's draw the same values from one instance.
        spec.layer.embeddings_initializer = _KINDS.RandomNormal(stddev=stddev)


def _by(spec: TableSpec) -> str:
    initializer = getattr(spec.layer, "embeddings_initializer", None)
    return "" if initializer is None else f" by {type(initializer).__name__}"
