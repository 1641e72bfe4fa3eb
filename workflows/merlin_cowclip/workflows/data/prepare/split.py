"""The split: which rows are for training and which for the test, and in what order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.spec import Split
from merlin_cowclip.workflows.errors import UserError


class Parts(NamedTuple):
    """Of n rows."""

    in_train: np.ndarray  # (n,) bool, whether a row is in the training part
    train: np.ndarray  # its rows, shuffled
    test: np.ndarray  # the others, in the log's order
    positives: dict[str, int]  # labels of 1, by part


def split_rows(
    split: Split,
    labels: np.ndarray,
    times: tuple[np.ndarray, pa.Array] | None,
    *,
    seed: int,
    label: str,
) -> Parts:
    """Choose the test rows of ``labels``, (n,) of 0 and 1; shuffle the training rows by ``seed``.

    ``times``, of a split by time, are (n,) codes, -1 for none, and their distinct texts. ``label``
    is for messages. Raises UserError for a part without both labels, and for times that are
    missing, do not sort, or are all the same.
    """
    n = len(labels)
    random = np.random.default_rng(seed)
    rows = np.arange(n, dtype=np.uint32 if n < 2**32 else np.int64)
    n_test = int(n * split.test + 0.5)
    if split.kind == "random":
        random.shuffle(rows)
        test_rows, train_rows = np.sort(rows[:n_test]), rows[n_test:]
        in_train = np.ones(n, dtype=bool)
        in_train[test_rows] = False
    else:
        in_train = np.arange(n) < n - n_test if times is None else ~_latest(split, times)
        test_rows, train_rows = rows[~in_train], rows[in_train]
        random.shuffle(train_rows)
    positives = {}
    for part, mask in (("train", in_train), ("test", ~in_train)):
        zeros, ones = np.bincount(labels[mask], minlength=2)
        if not (zeros and ones):
            raise UserError(
                f"the {'training' if part == 'train' else 'test'} part has {zeros:,} rows with "
                f"label 0 and {ones:,} with label 1, column {label!r}. Both must occur: give more "
                "rows, or another seed or split"
            )
        positives[part] = int(ones)
    return Parts(in_train, train_rows, test_rows, positives)


def _latest(split: Split, times: tuple[np.ndarray, pa.Array]) -> np.ndarray:
    """(n,), whether a row belongs to the latest times, as near to the share as they allow."""
    (codes, texts), column, n = times, split.column, len(times[0])
    if missing := int(np.count_nonzero(codes < 0)):
        raise UserError(
            f"{missing:,} of {n:,} rows have no time, column {column!r}. Fill it, or choose "
            "another split"
        )
    sortable = pd.to_numeric(texts.to_pandas(), errors="coerce")
    if sortable.isna().all():
        sortable = np.array(texts.to_pylist(), dtype=str)
    elif sortable.isna().any():
        wrong = texts[int(sortable.isna().argmax())].as_py()
        raise UserError(
            f"column {column!r} has times that are numbers, and {wrong!r}. Correct it or remove "
            "the row"
        )
    held, place = np.unique(sortable, return_inverse=True)
    if len(held) < 2:
        raise UserError(
            f"all {n:,} rows have the time {texts[0].as_py()!r}, column {column!r}. Choose "
            "another column or split"
        )
    counts = np.bincount(place[codes], minlength=len(held))
    later = np.cumsum(counts[::-1])[::-1]  # rows from each time on
    first = 1 + int(np.argmin(np.abs(later[1:] - split.test * n)))
    return place[codes] >= first
