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
    rare = RowStatistics(400, 800, *clipped, 40.0, 4.0)
    frequent = RowStatistics(100, 800, 0, 0, 50.0, 100.0)
    return FieldStatistics(table, name, width, is_clipped, steps, frequent, rare)


LINEAR = field("a", table="linear", width=1, is_clipped=False)
NORMS = {
    "gradient_norm_frequent": 0.5,
    "gradient_norm_rare": 0.1,
    "weight_norm_frequent": 1.0,
    "weight_norm_rare": 0.01,
}


def test_values_by_field():
    rows = field_rows([field("a", clipped=(50, 400)), LINEAR])
    assert rows[0] == {
        **{"table": "embeddings", "field": "a"},
        **{"ids_per_batch": 250.0, "rows_clipped": 0.1, "occurrences_clipped": 0.25},
        **NORMS,
    }
    assert rows[1]["rows_clipped"] is None  # the clip does not apply to the linear weights
    frozen = FieldStatistics("t", "a", 4, True, 0, NONE, NONE)
    assert set(field_rows([frozen])[0].values()) == {"t", "a", None}
    no_frequent = FieldStatistics("t", "a", 4, True, 1, NONE, field("a").rare)
    assert field_rows([no_frequent])[0]["gradient_norm_frequent"] is None


def test_a_summary_is_over_the_fields_of_the_embeddings():
    fields = [field("a", clipped=(50, 400)), field("b"), LINEAR]
    assert summary_scalars(fields) == {
        **{"ids_per_batch": 500.0, "rows_clipped": 0.05, "occurrences_clipped": 0.125},
        **NORMS,
    }
    assert summary_scalars([]) == dict.fromkeys(summary_scalars(fields))
    without_clip = summary_scalars([LINEAR])
    assert without_clip["rows_clipped"] is None
    assert without_clip["ids_per_batch"] == 250.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([LINEAR], "No table is clipped"),
        ([field("a"), field("b"), LINEAR], "CowClip was inactive in this run"),
        (
            [field("a", clipped=(50, 400)), field("b", clipped=(400, 800)), field("c"), LINEAR],
            "of 30 % of the rows were clipped (25 % of the occurrences), in 2 of 3 clipped fields",
        ),
    ],
)
def test_the_sentence_on_the_clip(fields, words):
    assert words in clip_sentence(fields, "adaptive_column")
