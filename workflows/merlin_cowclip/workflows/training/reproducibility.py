"""Seeds, deterministic ops and precision of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tensorflow.python.eager import context
from tensorflow.python.framework import config

from merlin_cowclip.plugins._tensorflow import tf


@contextlib.contextmanager
def seeded(seed: int, *, deterministic: bool) -> Iterator[None]:
    """Set the seeds of Python, NumPy, TensorFlow and Keras; switch deterministic ops within it.

    The switch is put back at the end. TensorFlow exports no way to switch it off:
    `disable_op_determinism` is internal, and its cache may hold kernels of the other setting.

    Args:
      seed: from 0 to 2³² - 1.
      deterministic: whether ops give the same result to the last digit in every run.
    """
    was_on = config.is_op_determinism_enabled()
    tf.keras.utils.set_random_seed(seed)
    _switch(deterministic)
    try:
        yield
    finally:
        _switch(was_on)


@contextlib.contextmanager
def in_precision(name: str | None) -> Iterator[None]:
    """Keras's precision of layers that are made: "float32", "mixed_float16" or another policy.

    Args:
      name: the policy's; `None` for the one that the process has.
    """
    keras = tf.keras.mixed_precision
    before = keras.global_policy()
    if name is not None and name != before.name:
        keras.set_global_policy(name)
    try:
        yield
    finally:
        if keras.global_policy() is not before:
            keras.set_global_policy(before)


def _switch(on: bool) -> None:
    if on:
        tf.config.experimental.enable_op_determinism()
    else:
        config.disable_op_determinism()
    context.context().clear_kernel_cache()
