# SPDX-License-Identifier: Apache-2.0
"""Seeds, deterministic ops and precision of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from merlin_cowclip.plugins._tensorflow import tf


def set_seeds(seed: int, *, deterministic: bool) -> None:
    """Of Python, NumPy, TensorFlow and Keras; deterministic ops stay on in this process."""
    tf.keras.utils.set_random_seed(seed)
    if deterministic:
        tf.config.experimental.enable_op_determinism()


@contextlib.contextmanager
def in_precision(name: str) -> Iterator[None]:
    """Keras's precision of layers that are made: "float32", "mixed_float16" or another policy."""
    keras = tf.keras.mixed_precision
    before = keras.global_policy()
    keras.set_global_policy(name)
    try:
        yield
    finally:
        keras.set_global_policy(before)
