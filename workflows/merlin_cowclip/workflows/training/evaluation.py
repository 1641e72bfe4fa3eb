# SPDX-License-Identifier: Apache-2.0
"""Exact AUC, log loss and calibration of a model's predictions, in one pass.

Keras's `AUC()` sums over 200 thresholds, and can be off in the second digit; here all predictions
are held, 5 bytes each and twice more as they are ranked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from merlin_cowclip.plugins._tensorflow import mm, quiet_stack, tf
from merlin_cowclip.plugins.saving.gather_tables import is_in_shards
from merlin_cowclip.workflows.errors import NotFiniteError, UserError
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.ranks import raise_on_any_rank

EVALUATION_BATCH = 8192
"""Rows predicted at a time: a matter of speed and memory, but for the last digits."""

_CHUNK = 1 << 16  # predictions that are looked at together


class Quality(NamedTuple):
    """How well probabilities rank and fit labels.

    Attributes:
      auc: area under the ROC curve, ties counted half: of all pairs of a clicked row and another,
        the share in which the clicked one has the higher probability.
      log_loss: mean, in nats, of probabilities limited to [1e-7, 1 - 1e-7].
      calibration: mean probability over click rate: 1 is right, above it clicks are overestimated.
    """

    auc: float
    log_loss: float
    calibration: float


class MetricAccumulator:
    """The quality of predictions that come batch by batch, all of which it holds."""

    def __init__(self) -> None:
        self._clicked, self._found = [np.empty(0, bool)], [np.empty(0, np.float32)]

    def add(self, labels: np.ndarray, probabilities: np.ndarray) -> None:
        """Take a batch: n labels, 0 or 1, and n probabilities."""
        self._clicked.append(labels == 1)
        self._found.append(probabilities)

    def quality(self, ranks: int = 1) -> Quality:
        """Of all that was added, also on other ranks, each row on one of them."""
        clicked, scores = np.concatenate(self._clicked), np.concatenate(self._found)
        self._clicked, self._found = [clicked], [scores]  # the parts take as much once more
        if ranks > 1:
            from merlin_cowclip.plugins.distributed.horovod import all_gather

            clicked, scores = all_gather(clicked.astype(np.uint8)).astype(bool), all_gather(scores)
        rows, clicks = len(clicked), int(np.count_nonzero(clicked))
        if clicks in (0, rows):
            raise UserError(
                "what is evaluated must have labels of 0 and of 1. Received: only "
                f"{int(clicks > 0)}, in {rows:,} rows. Take more rows: prepare the data with a "
                "larger test part, or split at random"
            )
        if wrong := int(np.count_nonzero(~np.isfinite(scores))):
            raise NotFiniteError(
                f"predictions must be numbers. Received: NaN for {wrong:,} of {rows:,} rows. "
                "The model diverged: lower the learning rates, or check the data for inf and NaN"
            )
        loss = total = 0.0
        for start in range(0, rows, _CHUNK):
            here, some = clicked[start : start + _CHUNK], scores[start : start + _CHUNK]
            total += float(some.sum(dtype=np.float64))
            limited = np.clip(some.astype(np.float64), 1e-7, 1 - 1e-7)
            loss -= float(np.log(np.where(here, limited, 1 - limited)).sum())
        auc = _wins(scores[clicked], scores[~clicked]) / (2 * clicks * (rows - clicks))
        return Quality(auc, loss / rows, total / clicks)


def _wins(ones: np.ndarray, zeros: np.ndarray) -> int:
    """2 for each pair of which the one is greater, 1 for each tie; sorts both in place."""
    ones.sort()
    zeros.sort()
    wins = 0  # Python's: 10⁸ rows have 10¹⁵ pairs
    for start in range(0, len(ones), _CHUNK):
        chunk = ones[start : start + _CHUNK]
        for side in ("left", "right"):
            wins += int(np.searchsorted(zeros, chunk, side).sum(dtype=np.int64))
    return wins


class Predictor:
    """A model's labels and probabilities on loaders, read once each; compiled at the first.

    `model.predict` gives no labels, so that they would take a second pass over the data.
    """

    def __init__(self, model: mm.Model) -> None:
        self._model = model
        self._step: Any = None

    def quality(self, loader: Loader, *, rank: int = 0, ranks: int = 1) -> Quality:
        """Of every row of a loader; several ranks share its batches, and all call this."""
        found = MetricAccumulator()
        for labels, scores in self.batches(loader, rank, ranks):
            found.add(labels, scores)
        if rank >= len(loader) % ranks > 0 and is_in_shards(self._model):
            self.probabilities(loader.peek()[0])  # other ranks, with a batch more, look rows up
        with raise_on_any_rank():
            return found.quality(ranks)

    def batches(
        self, loader: Loader, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Labels and probabilities of every `ranks`-th batch, b float32 each."""
        for features, labels in itertools.islice(loader.dataset(), rank, None, ranks):
            yield labels.numpy().ravel(), self.probabilities(features)

    def probabilities(self, features: dict[str, Any]) -> np.ndarray:
        """Of one batch, b float32."""
        if self._step is None:
            # One graph for batches of any size: the last one is smaller.
            spec = {n: tf.TensorSpec([None, *x.shape[1:]], x.dtype) for n, x in features.items()}
            self._step = tf.function(self._model.predict_step, input_signature=[spec])
        with quiet_stack():  # of many networks in one process it warns that it traces many
            predictions = self._step(features)
        shape = getattr(predictions, "shape", None)
        if shape is None or len(shape) > 2 or shape[1:] not in ((), (1,)):
            raise UserError(
                "a model must predict one probability for each row. Received: "
                f"{type(predictions).__name__} of shape {shape}. Evaluate a model of one output"
            )
        scores: np.ndarray = np.asarray(predictions, np.float32).ravel()
        wrong = scores[(scores < 0) | (scores > 1)]  # NaN is reported once all rows are known
        if len(wrong):
            raise UserError(
                f"predictions must be probabilities, 0 to 1. Received: {wrong[0]:.6g}, and "
                f"{len(wrong) - 1:,} others. End the model in a sigmoid, and take its loss "
                "of probabilities (from_logits=False)"
            )
        return scores


def predict(model: mm.Model, loader: Loader) -> tuple[np.ndarray, np.ndarray]:
    """Labels and probabilities of every row of an unshuffled loader, n each.

    Raises:
      UserError: the model predicts anything else than a probability for each row.
    """
    labels, probabilities = zip(*Predictor(model).batches(loader), strict=True)
    return np.concatenate(labels), np.concatenate(probabilities)


def evaluate(model: mm.Model, loader: Loader) -> Quality:
    """Exact AUC, log loss and calibration of a model on a loader.

    Raises:
      UserError: the model predicts anything else than a probability for each row, or only one of
        the labels is present.
    """
    return Predictor(model).quality(loader)
