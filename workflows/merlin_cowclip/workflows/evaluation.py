"""Exact AUC and log loss of a model on prepared data.

Keras's `AUC()` sums over 200 thresholds, and can be off in the second digit; here all predictions
are collected and ranked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from sklearn.metrics import log_loss, roc_auc_score

from merlin_cowclip.plugins._stack import mm
from merlin_cowclip.workflows.loading import Loader

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
    """
    labels = np.asarray(labels, np.int64).ravel()
    probabilities = np.asarray(probabilities, np.float64).ravel()
    limited = np.clip(probabilities, 1e-7, 1 - 1e-7)
    return Quality(
        float(roc_auc_score(labels, probabilities)),
        float(log_loss(labels, limited, labels=[0, 1])),
    )


def predict(model: mm.Model, loader: Loader) -> tuple[np.ndarray, np.ndarray]:
    """Labels and probabilities of every row of an unshuffled loader, n each."""

    def features_only() -> Any:
        return loader.dataset().map(lambda features, labels: features)

    probabilities = model.predict(features_only(), steps=len(loader), verbose=0)
    return np.concatenate(list(_labels(loader))).ravel(), np.asarray(probabilities).ravel()


def _labels(loader: Loader) -> Iterator[np.ndarray]:
    for _, labels in loader.batches():
        yield labels


def evaluate(model: mm.Model, loader: Loader) -> Quality:
    """Exact AUC and log loss of a model on an unshuffled loader."""
    return exact_quality(*predict(model, loader))
