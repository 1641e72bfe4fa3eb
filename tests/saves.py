"""Saves that cost a test little: most of the time of `model.save` goes into what is not ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import tensorflow as tf

from merlin_cowclip.plugins._tensorflow import Schema, mm, quiet_stack

with quiet_stack():
    # keras, or tf_keras.src
    _KERAS = tf.keras.Model.__module__.removesuffix(".engine.training")
    trace_model_call = import_module(f"{_KERAS}.saving.legacy.saving_utils").trace_model_call

_WITH_TRACES = mm.Model.save


@contextlib.contextmanager
def quick_saves(*, traces: bool = False) -> Iterator[None]:
    """Within it Merlin does not load what it has just saved, to read the names of its outputs.

    Args:
      traces: whether those of all layers are saved, as by a user, also within one that saves none;
        else a model is saved by its configuration and weights alone, with the serving signature,
        which Keras loads the same.
    """
    module = "merlin.models.tf.models.base"
    save = _WITH_TRACES if traces else _save_without_traces
    names = mock.patch(f"{module}.get_output_schema", return_value=Schema())
    with names, mock.patch.object(mm.Model, "save", save):
        yield


def _save_without_traces(model: Any, folder: str, include_optimizer: bool = True) -> None:
    tf.keras.Model.save(
        model,
        folder,
        include_optimizer=include_optimizer,
        save_traces=False,
        signatures={"serving_default": trace_model_call(model)},
    )
