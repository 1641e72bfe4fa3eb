"""Seeds, kernels and precision for one piece of work, and the process as it was after it."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
from keras import backend
from tensorflow.python.eager import context
from tensorflow.python.framework import config

from merlin_cowclip.plugins._stack import tf


@contextlib.contextmanager
def seeded(seed: int, *, deterministic: bool) -> Iterator[None]:
    """Python's, NumPy's, TensorFlow's and Keras's seeds, and TensorFlow's deterministic ops.

    With `deterministic=False` the ops are without, whatever the process had switched on. All is put
    back at the end: the state of Python's, NumPy's and TensorFlow's eager random numbers, and the
    switch. TensorFlow exports no way to switch it off; `disable_op_determinism` is its own, and
    kernels made under the other setting are dropped with its cache.

    Args:
      seed: from 0 to 2³² - 1.
      deterministic: whether ops give the same result to the last digit in every run.
    """
    eager = context.context()
    was_on = config.is_op_determinism_enabled()
    states = random.getstate(), np.random.get_state()
    tensorflow = eager._seed, getattr(eager, "_rng", None)  # set together
    keras = getattr(backend._SEED_GENERATOR, "generator", None)
    tf.keras.utils.set_random_seed(seed)
    _switch(deterministic)
    try:
        yield
    finally:
        _switch(was_on)
        random.setstate(states[0])
        np.random.set_state(states[1])
        eager._seed, eager._rng = tensorflow
        backend._SEED_GENERATOR.generator = keras


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
