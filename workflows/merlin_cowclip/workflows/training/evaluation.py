"""Exact AUC and log loss of a model on prepared data.

Keras's `AUC()` sums over 200 thresholds, and can be off in the second digit; here all predictions
are collected and ranked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from sklearn.metrics import log_loss, roc_auc_score

from merlin_cowclip.plugins._stack import mm, tf
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.loader import Loader

EVALUATION_BATCH = 8192
"""Rows predicted at a time: a matter of speed and memory only."""


class Quality(NamedTuple):
    """How well probabilities rank and fit labels."""

    auc: float
    log_loss: float


def exact_quality(labels: np.ndarray, probabilities: np.ndarray) -> Quality:
    """AUC (area under the ROC curve, ties counted half) and mean log loss in nats.

    Args:
      labels: n, 0 or 1, both of them present.
      probabilities: n; limited to [1e-7, 1 - 1e-7] for the log loss.

    Raises:
      UserError: only one of the labels is present, or a probability is none.
    """
    labels = np.asarray(labels, np.int64).ravel()
    if labels.min() == labels.max():
        raise UserError(
            f"the test part must have labels of 0 and of 1. Received: only {labels[0]}, in "
            f"{len(labels):,} rows. Prepare it with a larger test part, or split at random"
        )
    probabilities = np.asarray(probabilities, np.float64).ravel()
    wrong = int(np.count_nonzero(~np.isfinite(probabilities)))
    if wrong:
        raise UserError(
            f"predictions must be numbers. Received: NaN for {wrong:,} of {len(labels):,} rows. "
            "The model diverged: lower the learning rates, or check the data for inf and NaN"
        )
    limited = np.clip(probabilities, 1e-7, 1 - 1e-7)
    return Quality(
        float(roc_auc_score(labels, probabilities)),
        float(log_loss(labels, limited, labels=[0, 1])),
    )


class Predictor:
    """A model's labels and probabilities on loaders, read once each; compiled at the first.

    `model.predict` gives no labels, so that they would take a second pass over the data.
    """

    def __init__(self, model: mm.Model) -> None:
        self._model = model
        self._step: Any = None
        self._spec: Any = None

    def __call__(self, loader: Loader) -> tuple[np.ndarray, np.ndarray]:
        """Labels and probabilities of every row of an unshuffled loader, n each, in its order."""
        spec, _ = loader.element_spec
        if self._step is None or spec != self._spec:
            # One graph for batches of any size: the last one is smaller.
            self._step = tf.function(self._model.predict_step, input_signature=[spec])
            self._spec = spec
        labels, probabilities = [], []
        for features, clicked in loader.dataset():
            labels.append(clicked.numpy().ravel())
            probabilities.append(self._step(features).numpy().ravel())
        return np.concatenate(labels), np.concatenate(probabilities)


def predict(model: mm.Model, loader: Loader) -> tuple[np.ndarray, np.ndarray]:
    """Labels and probabilities of every row of an unshuffled loader, n each."""
    return Predictor(model)(loader)


def evaluate(model: mm.Model, loader: Loader) -> Quality:
    """Exact AUC and log loss of a model on an unshuffled loader."""
    return exact_quality(*predict(model, loader))
