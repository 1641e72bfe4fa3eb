"""Exact quality of streamed predictions, against every pair by hand and scikit-learn."""

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import log_loss, roc_auc_score

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.evaluation import (
    MetricAccumulator,
    Predictor,
    Quality,
)

ROWS = 50_000


def streamed(labels, probabilities, batch=777) -> Quality:
    ranks = MetricAccumulator()
    for start in range(0, len(labels), batch):
        ranks.add(labels[start : start + batch], probabilities[start : start + batch])
    return ranks.quality()


def drawn(rows: int, seed: int = 0, digits: int = 12) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    probabilities = random.beta(1, 4, rows).round(digits).astype(np.float32)
    return (random.random(rows) < probabilities).astype(np.float32), probabilities


FEW = st.sampled_from([0.0, 1e-30, 0.1, np.float32(0.1), 0.25, 0.5, 1 - 2**-24, 1.0])


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
    found = streamed(labels, probabilities, batch)
    assert found.auc == wins / (len(ones) * len(zeros))  # to the last bit
    assert found.calibration == pytest.approx(probabilities.sum(dtype=float) / len(ones), rel=1e-12)


@pytest.mark.parametrize("digits", [1, 3, 12])
@pytest.mark.parametrize("batch", [1_000, ROWS])
def test_scikit_learn_says_the_same(digits, batch):
    """With ties by the thousand, by the dozen, and few."""
    labels, probabilities = drawn(ROWS, digits=digits)
    found = streamed(labels, probabilities, batch)
    assert found.auc == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-12)
    limited = np.clip(probabilities.astype(np.float64), 1e-7, 1 - 1e-7)
    assert found.log_loss == pytest.approx(log_loss(labels, limited), rel=1e-12)
    rate = labels.mean(dtype=np.float64)
    assert found.calibration == pytest.approx(probabilities.mean(dtype=np.float64) / rate, rel=1e-9)


def test_ties_are_those_of_the_precision():
    labels, probabilities = np.array([1, 0]), np.array([0.1 + 1e-12, 0.1])
    assert streamed(labels, probabilities).auc == 1.0
    assert streamed(labels, probabilities.astype(np.float32)).auc == 0.5


def test_more_pairs_than_32_bits_count():
    labels = np.repeat([1, 0], 100_000)
    assert streamed(labels, labels.astype(np.float32)).auc == 1.0
    assert streamed(labels, np.full(200_000, np.float32(0.5))).auc == 0.5
    assert streamed(labels, 1 - labels.astype(np.float32)).auc == 0.0


def test_a_few_ties():
    labels = np.array([1, 0, 1, 0, 0, 1])
    probabilities = np.array([0.9, 0.5, 0.5, 0.5, 0.1, 0.2])
    # Pairs (click, no click): 0.9 wins 3; 0.5 ties with two (1) and wins 1; 0.2 wins 1 of 3.
    assert streamed(labels, probabilities).auc == pytest.approx((3 + 2 + 1) / 9)
    terms = [0.9, 0.5, 0.5, 0.5, 0.9, 0.2]
    expected = -sum(math.log(p) for p in terms) / 6
    assert streamed(labels, probabilities).log_loss == pytest.approx(expected)


def test_quality_needs_both_labels():
    with pytest.raises(UserError, match="labels of 0 and of 1. Received: only 1, in 2 rows"):
        streamed(np.array([1, 1]), np.array([0.3, 0.4]))


def test_quality_refuses_nan():
    with pytest.raises(UserError, match="NaN for 1 of 2 rows. The model diverged"):
        streamed(np.array([1, 0]), np.array([0.3, np.nan]))


def test_quality_of_probabilities_0_and_1_is_finite():
    quality = streamed(np.array([1, 0]), np.array([0.0, 1.0], np.float32))
    assert quality.auc == 0.0
    assert quality.log_loss == pytest.approx(-math.log(1e-7))


def test_predictions_that_are_none_are_counted_over_all_batches():
    labels, probabilities = drawn(1_000)
    probabilities[[3, 4, 990]] = [np.nan, np.inf, np.nan]
    with pytest.raises(UserError, match="Received: NaN for 3 of 1,000 rows. The model diverged"):
        streamed(labels, probabilities, 100)


@pytest.mark.parametrize("score", [-0.25, 1.5])
def test_scores_that_are_no_probabilities_are_refused(score):
    """As of a model that was trained with `from_logits=True`."""
    words = f"predictions must be probabilities, 0 to 1. Received: {score}, and 1 others"
    with pytest.raises(UserError, match=re.escape(words)):
        predicted(lambda x: x, [0.5, score, score])


@pytest.mark.parametrize(
    ("outputs", "received"),
    [
        (lambda x: tf.concat([x, x], axis=1), r"EagerTensor of shape \(3, 2\)"),
        (lambda x: (x, x), r"tuple of shape None"),
        (lambda x: {"click": x, "like": x}, "dict of shape None"),
    ],
)
def test_a_model_predicts_one_probability_for_each_row(outputs, received):
    words = f"must predict one probability for each row. Received: {received}. Evaluate a model"
    with pytest.raises(UserError, match=words):
        predicted(outputs, [0.5, 0.5, 0.5])
    assert predicted(lambda x: x[:, 0], [0.5, 0.25]).tolist() == [0.5, 0.25]


def predicted(outputs, given) -> np.ndarray:
    class Network:
        def predict_step(self, features):
            return outputs(features["x"])

    x = np.array(given, np.float32)[:, np.newaxis]
    return Predictor(Network()).probabilities({"x": x})
