"""Rows into two parts: every row is in one of them, by the seed and nothing else."""

import numpy as np
import pyarrow as pa
import pytest

from merlin_cowclip.workflows.data.datasets import Split
from merlin_cowclip.workflows.data.splitting import Parts, split_rows
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
    assert parts.rows == {"train": 1_000 - tested, "test": tested}
    assert parts.positives == {"train": LABELS[parts.train].sum(), "test": LABELS[parts.test].sum()}
    if kind != "random":
        assert parts.test.min() == 1_000 - tested


@pytest.mark.parametrize("kind", ["random", "sequential", "time"])
def test_the_order_is_the_seeds(kind):
    np.testing.assert_array_equal(split_by(kind).train, split_by(kind).train)
    assert (split_by(kind).train != split_by(kind, seed=4).train).any()


def test_labels_of_one_kind_are_refused():
    with pytest.raises(UserError, match=r"in the test part too\. Received: only 1 in its 250 rows"):
        split_rows(
            Split("sequential", 0.25), LABELS | (np.arange(1_000) >= 750), None, seed=0, label="y"
        )


@pytest.mark.parametrize("kind", ["{}", "-{}", "1700000000.{:09}"])
def test_times_of_which_float64_makes_one_are_told_apart(kind):
    """Nanoseconds since 1970, of which float64 holds each 256th."""
    first = 12_345_678 if "." in kind[:-2] else 1_700_000_000_000_000_000
    texts = pa.array([kind.format(first + (7 * t) % 10) for t in range(10)])
    codes = np.arange(1_000, dtype=np.int32) % 10
    split, labels = Split("time", 0.2, "t"), LABELS | (codes == 9)
    parts = split_rows(split, labels, (codes, texts), seed=0, label="y")
    latest = {3, 0} if kind[0] == "-" else {4, 7}  # of 8 and of 9 nanoseconds, or of 1 and 0
    assert set(codes[parts.test]) == latest
