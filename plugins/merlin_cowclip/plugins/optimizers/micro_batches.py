# SPDX-License-Identifier: Apache-2.0
"""A training step in micro-batches, one after the other: the activations of one are in memory.

The gradient of the batch's mean loss is the mean of those of the micro-batches, weighted by their
samples. Tables get the slices of all, and the recorded lookups of all, so counts are the batch's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from merlin_cowclip.plugins._tensorflow import filter_empty_gradients, tf

_TOO_FEW = "A batch must have a sample for each micro-batch: accumulate="
_VALUES, _OFFSETS = "__values", "__offsets"  # of a list feature, as Merlin's loader has it


class _Gradients:
    """In the place of a model's optimizer: keeps the gradients of a micro-batch."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.pairs: list[tuple[Any, tf.Variable]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def minimize(
        self, loss: Any, var_list: Any, grad_loss: Any = None, name: Any = None, tape: Any = None
    ) -> None:
        self.apply_gradients(self._optimizer._compute_gradients(loss, var_list, grad_loss, tape))

    def apply_gradients(self, grads_and_vars: Iterable[Any], *_: Any, **__: Any) -> None:
        self.pairs = list(filter_empty_gradients(grads_and_vars))


def step_in_parts(
    model: tf.keras.Model, step: Callable[[Any], Mapping[str, Any]], data: Any, number: int
) -> dict[str, Any]:
    """What a model's `train_step` does to a batch, in `number` micro-batches and one update."""
    optimizer, rows = model.optimizer, rows_of(data)
    enough = tf.debugging.Assert(rows >= number, [f"{_TOO_FEW}{number}. Received: samples:", rows])
    before: list[Any] = [] if enough is None else [enough]
    sums: list[Any] = []
    logs: dict[str, Any] = {}
    mean_loss: Any = 0.0
    for begin, end in itertools.pairwise(rows * place // number for place in range(number + 1)):
        kept = _Gradients(optimizer)
        with tf.control_dependencies(before):
            part = _cut(data, begin, end)
            object.__setattr__(model, "optimizer", kept)  # Keras would track it
            try:
                logs = dict(step(part))
            finally:
                object.__setattr__(model, "optimizer", optimizer)
            share = tf.cast(end - begin, tf.float32) / tf.cast(rows, tf.float32)
            gradients = [_times(gradient, share) for gradient, _ in kept.pairs]
            sums = [*map(_added, sums, gradients)] if sums else gradients
            mean_loss += share * tf.cast(logs.get("loss_batch", 0.0), tf.float32)
        before = [getattr(gradient, "values", gradient) for gradient in sums]
    optimizer.apply_gradients(zip(sums, (variable for _, variable in kept.pairs), strict=True))
    return {**logs, "loss_batch": mean_loss} if "loss_batch" in logs else logs


def rows_of(data: Any) -> Any:
    """The samples of a batch."""
    if isinstance(data, Mapping):
        name = next((name for name in data if not name.endswith((_VALUES, _OFFSETS))), None)
        if name is None:
            return rows_of(next(v for name, v in data.items() if name.endswith(_OFFSETS))) - 1
        return rows_of(data[name])
    if isinstance(data, Sequence):
        return rows_of(data[0])
    if isinstance(data, tf.RaggedTensor):
        return data.nrows(tf.int64)
    return tf.shape(data, tf.int64)[0] if data.shape[0] is None else data.shape[0]


def _cut(data: Any, begin: Any, end: Any) -> Any:
    """Samples from `begin` to before `end` of all that a batch has."""
    if data is None:
        return None
    if isinstance(data, Mapping):
        found = {}
        for name, value in data.items():
            field = name.removesuffix(_OFFSETS)
            if field != name:
                ends = value[begin : end + 1]
                found[name] = ends - ends[0]
                found[f"{field}{_VALUES}"] = data[f"{field}{_VALUES}"][ends[0] : ends[-1]]
            elif name not in found:
                found[name] = value if name.endswith(_VALUES) else _cut(value, begin, end)
        return found
    if isinstance(data, Sequence):
        return tuple(_cut(one, begin, end) for one in data)
    return data[begin:end]


def _times(gradient: Any, share: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = _times(gradient.values, share)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(share, gradient.dtype)


def _added(first: Any, second: Any) -> Any:
    if not isinstance(first, tf.IndexedSlices):
        return first + second
    values = tf.concat([first.values, second.values], axis=0)
    indices = tf.concat([first.indices, second.indices], axis=0)
    return tf.IndexedSlices(values, indices, first.dense_shape)
