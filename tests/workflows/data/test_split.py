"""Rows into two parts: every row is in one of them, by the seed and nothing else."""

import numpy as np
import pyarrow as pa
import pytest

from merlin_cowclip.workflows.data.prepare.split import Parts, split_rows
from merlin_cowclip.workflows.data.spec import Split
from merlin_cowclip.workflows.errors import UserError

LABELS = np.arange(1_000) % 2
TIMES = (np.arange(1_000, dtype=np.int32) // 100, pa.array([str(t) for t in range(10)]))


def split_by(kind: str, seed: int = 3) -> Parts:
    split = Split(kind, 0.25, "t" if kind == "time" else None)
    return split_rows(split, LABELS, TIMES if kind == "time" else None, seed=seed, label="y")


@pytest.mark.parametrize(("kind", "tested"), [("random", 250), ("sequential", 250), ("time", 300)])
def test_every_row_is_in_one_part(kind, tested):
    parts = split_by(kind)
    np.testing.assert_array_equal(np.sort([*parts.train, *parts.test]), np.arange(1_000))
    np.testing.assert_array_equal(np.flatnonzero(parts.in_train), np.sort(parts.train))
    assert (np.diff(parts.test.astype(int)) > 0).all()
    assert (np.diff(parts.train.astype(int)) < 0).any()
    assert (len(parts.train), len(parts.test)) == (1_000 - tested, tested)
    assert parts.positives == {"train": LABELS[parts.train].sum(), "test": LABELS[parts.test].sum()}
    if kind != "random":
        assert parts.test.min() == 1_000 - tested


@pytest.mark.parametrize("kind", ["random", "sequential", "time"])
def test_the_order_is_the_seeds(kind):
    np.testing.assert_array_equal(split_by(kind).train, split_by(kind).train)
    assert (split_by(kind).train != split_by(kind, seed=4).train).any()


def test_labels_of_one_kind_are_refused():
    with pytest.raises(
        UserError, match=r"the test part has 0 rows with label 0 and 250 with label 1, column 'y'"
    ):
        split_rows(
            Split("sequential", 0.25), LABELS | (np.arange(1_000) >= 750), None, seed=0, label="y"
        )


def test_times_are_numbers_or_text():
    """Each number is later than the text of the one before; text sorts as text."""
    labels, codes = LABELS | (np.arange(1_000) >= 750), np.arange(1_000, dtype=np.int32) % 3
    for texts, latest in ((["9", "10", "-1e3"], {1}), (["d9", "d10", "d2"], {0})):
        times = codes, pa.array(texts)
        parts = split_rows(Split("time", 0.3, "t"), labels, times, seed=0, label="y")
        assert set(codes[parts.test]) == latest
    times = codes, pa.array(["9", "10", "noon"])
    with pytest.raises(UserError, match="column 't' has times that are numbers, and 'noon'"):
        split_rows(Split("time", 0.3, "t"), labels, times, seed=0, label="y")
