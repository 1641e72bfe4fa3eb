"""One update in NumPy, from a tape's gradients and the ids of the batch: nothing of ours in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from merlin_cowclip.plugins import Hyperparameters

from .families import Family


class Gradient(NamedTuple):
    """A variable's gradient: its rows summed, float64, and which rows a sparse one has."""

    whole: np.ndarray
    rows: np.ndarray | None  # None for a dense gradient


class After(NamedTuple):
    """A variable and its moments after the update."""

    value: np.ndarray
    m: np.ndarray
    v: np.ndarray


class Tape(tf.keras.optimizers.legacy.SGD):
    """Takes the gradients that Keras computes, and updates nothing."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.taken: dict[Any, Gradient] = {}

    def apply_gradients(self, grads_and_vars: Any, *arguments: Any, **named: Any) -> Any:
        for gradient, variable in grads_and_vars:
            if gradient is None:
                continue
            rows = None
            if isinstance(gradient, tf.IndexedSlices):
                rows = np.unique(gradient.indices.numpy())
            whole = np.zeros(variable.shape)
            if rows is None:
                whole += gradient.numpy()
            else:
                np.add.at(whole, gradient.indices.numpy(), gradient.values.numpy())
            self.taken[variable.ref()] = Gradient(whole, rows)
        return tf.no_op()


def counts(family: Family, rows: int, seed: int) -> np.ndarray | None:
    """`cnt` of every row of a table; `None` where no table has that many rows."""
    lookups = family.lookups(seed).get(rows)
    if lookups is None:
        return None
    found = np.zeros(rows)
    for lookup in lookups:
        for ids in lookup:
            found[np.unique(ids)] += 1
    return found


def update(
    value: np.ndarray, gradient: Gradient, held: np.ndarray | None, hp: Hyperparameters, mode: str
) -> After:
    """The first step from zero moments: paper, Algorithm 1, and Adam as Kingma and Ba have it.

    Args:
      value: before the step.
      gradient: of the loss, without L2.
      held: how many samples hold each row of a table; `None` for dense weights.
      hp: the values of the step.
      mode: "exact", every row; or "lazy", the rows of the batch.
    """
    w, g = value.astype(np.float64), gradient.whole.copy()
    touched = np.ones(len(w) if w.ndim else 1, bool)
    if held is not None:
        g += 2 * hp.l2 * w
        if w.shape[1] > 1:
            clip = np.maximum(held, 1) * np.maximum(
                hp.clip_ratio * np.linalg.norm(w, axis=1), hp.clip_floor
            )
            norms = np.linalg.norm(g, axis=1)
            g *= np.minimum(1, clip / np.where(norms > 0, norms, 1))[:, np.newaxis]
        if mode == "lazy" and gradient.rows is not None:
            touched = held > 0
            touched[gradient.rows] = True
    rate = hp.dense_lr if held is None else hp.embedding_lr
    m, v = (1 - 0.9) * g, (1 - 0.999) * g * g
    step = rate * np.sqrt(1 - 0.999) / (1 - 0.9) * m / (np.sqrt(v) + 1e-7)
    if not touched.all():
        m[~touched] = v[~touched] = step[~touched] = 0
    return After(w - step, m, v)
