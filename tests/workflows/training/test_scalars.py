"""Named numbers of an interval, and the sentence on the clip."""

from __future__ import annotations

import pytest

from merlin_cowclip.plugins import FieldStatistics, RowStatistics
from merlin_cowclip.workflows.training.trainer import (
    clip_sentence,
    field_rows,
    summary_scalars,
)

NONE = RowStatistics(0, 0, 0, 0, 0.0, 0.0)


def field(name, *, table="embeddings", width=10, clipped=(0, 0), is_clipped=True, steps=2):
    """400 rare ids and 100 frequent ones, which half of the samples hold."""
    rows, occurrences = clipped
    rare = RowStatistics(400, 800, rows, occurrences, 40.0, 4.0)
    return FieldStatistics(
        *(table, name, width, is_clipped, steps),
        frequent=RowStatistics(100, 800, 0, 0, 50.0, 100.0),
        rare=rare,
    )


LINEAR = field("a", table="linear", width=1, is_clipped=False)


def test_values_by_field():
    found = field_rows([field("a", clipped=(50, 400)), LINEAR])
    assert found[0] == {
        "table": "embeddings",
        "field": "a",
        "ids_per_batch": 250.0,
        "rows_clipped": 0.1,
        "occurrences_clipped": 0.25,
        "gradient_norm_frequent": 0.5,
        "gradient_norm_rare": 0.1,
        "weight_norm_frequent": 1.0,
        "weight_norm_rare": 0.01,
    }
    assert found[1]["rows_clipped"] is None  # the clip does not apply to the linear weights
    assert found[1]["ids_per_batch"] == 250.0


def test_nothing_is_said_of_what_was_not_there():
    frozen = FieldStatistics("t", "a", 4, True, 0, NONE, NONE)
    assert set(field_rows([frozen])[0].values()) == {"t", "a", None}
    no_frequent = FieldStatistics("t", "a", 4, True, 1, NONE, field("a").rare)
    (row,) = field_rows([no_frequent])
    assert (row["gradient_norm_frequent"], row["gradient_norm_rare"]) == (None, 0.1)


def test_a_summary_has_all_its_columns():
    fields = [field("a", clipped=(50, 400)), field("b"), LINEAR]
    assert summary_scalars(fields) == {
        "ids_per_batch": 500.0,
        "rows_clipped": 0.05,
        "occurrences_clipped": 0.125,
        "gradient_norm_frequent": 0.5,
        "gradient_norm_rare": 0.1,
        "weight_norm_frequent": 1.0,
        "weight_norm_rare": 0.01,
    }
    assert set(summary_scalars([]).values()) == {None}
    assert list(summary_scalars([])) == list(summary_scalars(fields))
    without_clip = summary_scalars([LINEAR])
    assert without_clip["rows_clipped"] is None
    assert without_clip["ids_per_batch"] == 250.0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ([LINEAR], "No table is clipped."),
        (
            [field("a"), field("b"), LINEAR],
            "CowClip was inactive in this run (no row reached its bound); the result comes from "
            "the hyperparameters.",
        ),
        (
            [field("a", clipped=(1, 2)), LINEAR],
            "Gradients of 0.2 % of the rows were clipped (0.125 % of the occurrences), in 1 of 1 "
            "clipped fields.",
        ),
        (
            [field("a", clipped=(50, 400)), field("b", clipped=(400, 800)), field("c")],
            "Gradients of 30 % of the rows were clipped (25 % of the occurrences), in 2 of 3 "
            "clipped fields.",
        ),
    ],
)
def test_the_sentence_on_the_clip(fields, sentence):
    assert clip_sentence(fields, "adaptive_column") == sentence
