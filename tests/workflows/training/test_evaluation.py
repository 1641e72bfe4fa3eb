"""Exact quality of streamed predictions, against every pair by hand and scikit-learn."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.evaluation import MetricAccumulator, Predictor, Quality


def streamed(labels, probabilities, batch=777) -> Quality:
    metrics = MetricAccumulator()
    for start in range(0, len(labels), batch):
        metrics.add(labels[start : start + batch], probabilities[start : start + batch])
    return metrics.quality()


FEW = st.sampled_from([0.0, 1e-30, 0.1, np.float32(0.1), 0.25, 0.5, 1 - 2**-24, 1.0])


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), FEW), min_size=2, max_size=12), st.integers(1, 5))
def test_every_pair_of_a_tiny_set(rows, batch):
    labels = np.array([clicked for clicked, _ in rows], np.float32)
    probabilities = np.array([p for _, p in rows], np.float32)
    ones, zeros = probabilities[labels == 1], probabilities[labels == 0]
    if not (len(ones) and len(zeros)):
        with pytest.raises(UserError, match=f"Received: only {int(labels[0])}, in {len(rows)} row"):
            streamed(labels, probabilities, batch)
        return
    wins = sum(1 if p > q else 0.5 if p == q else 0 for p in ones for q in zeros)
    quality = streamed(labels, probabilities, batch)
    assert quality.auc == wins / (len(ones) * len(zeros))  # to the last bit
    rate = probabilities.sum(dtype=float) / len(ones)
    assert quality.calibration == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize("digits", [1, 12])
def test_equal_to_scikit_learn(digits):
    """With ties by the thousand, and few; several chunks of both labels."""
    random = np.random.default_rng(0)
    probabilities = random.beta(1, 1, 200_000).round(digits).astype(np.float32)
    labels = (random.random(200_000) < probabilities).astype(np.float32)
    quality = streamed(labels, probabilities, 1_000)
    assert quality.auc == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-12)
    limited = np.clip(probabilities.astype(np.float64), 1e-7, 1 - 1e-7)
    assert quality.log_loss == pytest.approx(log_loss(labels, limited), rel=1e-12)
    rate = probabilities.mean(dtype=np.float64) / labels.mean(dtype=np.float64)
    assert quality.calibration == pytest.approx(rate, rel=1e-9)


def test_probabilities_0_and_1_have_a_finite_log_loss():
    quality = streamed(np.array([1, 0]), np.array([0.0, 1.0], np.float32))
    assert quality.auc == 0.0
    assert quality.log_loss == pytest.approx(-math.log(1e-7))


def test_predictions_that_are_not_finite_are_counted_over_all_batches():
    probabilities = np.linspace(0, 1, 1_000)
    probabilities[[3, 4, 990]] = [np.nan, np.inf, np.nan]
    with pytest.raises(UserError, match="Received: NaN for 3 of 1,000 rows. The model diverged"):
        streamed(np.arange(1_000) % 2, probabilities, 100)


def predicted(outputs, given) -> np.ndarray:
    class Network:
        def predict_step(self, features):
            return outputs(features["x"])

    x = np.array(given, np.float32)[:, np.newaxis]
    return Predictor(Network()).probabilities({"x": x})


@pytest.mark.parametrize("score", [-0.25, 1.5])
def test_scores_that_are_no_probabilities_are_refused(score):
    """As of a model that was trained with `from_logits=True`."""
    words = f"predictions must be probabilities, 0 to 1. Received: {score}, and 1 others"
    with pytest.raises(UserError, match=re.escape(words)):
        predicted(lambda x: x, [0.5, score, score])


@pytest.mark.parametrize("outputs", [lambda x: tf.concat([x, x], axis=1), lambda x: (x, x)])
def test_a_model_predicts_one_probability_for_each_row(outputs):
    with pytest.raises(UserError, match="must predict one probability for each row. Received: "):
        predicted(outputs, [0.5, 0.5, 0.5])
    assert predicted(lambda x: x[:, 0], [0.5, 0.25]).tolist() == [0.5, 0.25]
