"""What every family must do with our optimizer, one function per demand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters, load_model, save_model

from ...saves import quick_saves
from . import BATCH
from .families import Family
from .oracle import Tape, counts, update

VALUES = Hyperparameters(
    BATCH, dense_lr=2e-3, embedding_lr=1e-3, l2=1e-4, clip_floor=1e-8, warmup_epochs=0.0
)
# The one that is saved comes last.
MODES = (("lazy", True), ("lazy", False), ("exact", True), ("exact", False))


class Built:
    """A family's model with its first weights, and the gradients of its first batch."""

    def __init__(self, family: Family) -> None:
        tf.keras.utils.set_random_seed(1)
        self.family = family
        self.model = family.build(family.schema)
        tape = Tape()
        self.model.compile(optimizer=tape, metrics=[], run_eagerly=True)
        self.model.fit(family.data(), verbose=0)
        self.gradients = tape.taken
        self.start = self.model.get_weights()
        self.before = dict(zip((w.ref() for w in self.model.weights), self.start, strict=True))
        # The clip must bite, and must not bite everywhere: r in the middle of what rows need.
        self.values = VALUES.replace(clip_ratio=float(np.median(self._ratios())))

    def held(self, variable: tf.Variable) -> np.ndarray | None:
        """Samples that hold each row, where the variable is a table."""
        return counts(self.family, variable.shape[0], 0) if variable.shape.rank == 2 else None

    def _ratios(self) -> np.ndarray:
        found = []
        for reference, gradient in self.gradients.items():
            held = self.held(reference.deref())
            if held is not None:
                w = self.before[reference]
                length = np.linalg.norm(gradient.whole + 2 * VALUES.l2 * w, axis=1)
                found.append((length / np.maximum(held, 1) / np.linalg.norm(w, axis=1))[held > 0])
        return np.concatenate(found)

    def fitted(self, mode: str, eager: bool) -> CowClipOptimizer:
        """The optimizer after one step from the first weights."""
        self.model.set_weights(self.start)
        optimizer = CowClipOptimizer.for_model(self.model, self.values, update=mode)
        self.model.compile(optimizer=optimizer, metrics=[], run_eagerly=eager)
        self.model.fit(self.family.data(), verbose=0)
        return optimizer


def check_step(built: Built, mode: str, eager: bool) -> None:
    """One step is the oracle's, in every trainable variable and both of its moments."""
    optimizer = built.fitted(mode, eager)
    owner = {owned.variable.ref(): owned.optimizer for owned in optimizer.owned()}
    assert set(owner) == {v.ref() for v in built.model.trainable_variables}
    clipped = tables = 0
    for reference, gradient in built.gradients.items():
        variable = reference.deref()
        held, before = built.held(variable), built.before[reference]
        expected = update(before, gradient, held, built.values, mode)
        part = owner[reference]
        name = f"{variable.name} {tuple(variable.shape)}"
        for slot, rtol in (("m", 2e-4), ("v", 5e-4)):
            wanted = getattr(expected, slot)
            np.testing.assert_allclose(
                part.get_slot(variable, slot).numpy(),
                wanted,
                rtol=rtol,
                atol=1e-6 * np.abs(wanted).max(),
                err_msg=f"{slot} of {name}",
            )
        np.testing.assert_allclose(variable.numpy(), expected.value, atol=2e-6, err_msg=name)
        if held is not None:
            tables += 1
            free = update(before, gradient, held, VALUES.replace(clip_ratio=1e9), mode).m
            shorter = np.linalg.norm(expected.m, axis=1) < 0.99 * np.linalg.norm(free, axis=1)
            clipped += int(shorter.any() and not shorter[held > 0].all())
    assert tables >= len(built.family.lookups())
    assert clipped  # a test without a clip would not be one


def check_saving(built: Built, folder: Path) -> None:
    """Saved and loaded, a model that was trained predicts the same, and steps on the same.

    Args:
      built: the model, trained.
      folder: to save to.
    """
    model, family = built.model, built.family
    with quick_saves(traces=family.traces):
        save_model(model, folder)
    loaded = load_model(folder, metrics=[], run_eagerly=True)
    model.compile(optimizer=model.optimizer, loss=model.loss, metrics=[], run_eagerly=True)
    features, _ = family.batch(1)
    for a, b in zip(_outputs(model, features), _outputs(loaded, features), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-6)
    for either in (model, loaded):
        either.fit(family.data(1), verbose=0)
    for a, b in zip(_weights(model), _weights(loaded), strict=True):
        np.testing.assert_allclose(b.astype(np.float64), a.astype(np.float64), atol=1e-6, rtol=1e-5)


def _outputs(model: Any, features: dict[str, Any]) -> list[np.ndarray]:
    return [np.asarray(t) for t in tf.nest.flatten(model(features))]


def _weights(model: Any) -> list[np.ndarray]:
    """In an order that Keras's loading does not change."""
    return [w.numpy() for w in sorted(model.weights, key=lambda w: w.name)]
