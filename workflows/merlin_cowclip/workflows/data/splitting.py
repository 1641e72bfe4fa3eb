"""Which rows are for training and which for the test, and in what order."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

import numpy as np
import pyarrow as pa

from merlin_cowclip.workflows.data.datasets import Split
from merlin_cowclip.workflows.data.raw_logs import parse_number
from merlin_cowclip.workflows.errors import UserError


@dataclass(frozen=True, eq=False)
class Parts:
    """Of n rows.

    Attributes:
        in_train: (n,) bool, whether a row is in the training part.
        train: its rows, shuffled.
        test: the others, in the log's order.
        positives: labels of 1, by part.
    """

    in_train: np.ndarray
    train: np.ndarray
    test: np.ndarray
    positives: dict[str, int]

    @property
    def rows(self) -> dict[str, int]:
        """How many, by part."""
        return {"train": len(self.train), "test": len(self.test)}


def split_rows(
    split: Split,
    labels: np.ndarray,
    times: tuple[np.ndarray, pa.Array] | None,
    *,
    seed: int,
    label: str,
) -> Parts:
    """Choose the test rows; shuffle the training rows.

    Args:
        split: how, and the test part's share.
        labels: (n,) of 0 and 1.
        times: for a split by time, and only then: (n,) codes, -1 for none, of distinct texts.
        seed: of both.
        label: the column's name, for messages.

    Raises:
        UserError: a part without rows, or with labels of one kind; times that are missing, that
            do not sort, or are all the same.
    """
    n = len(labels)
    random = np.random.default_rng(seed)
    rows = np.arange(n, dtype=np.uint32 if n < 2**32 else np.int64)
    if times is not None:
        in_train = ~_latest(split, times)
        test_rows, train_rows = rows[~in_train], rows[in_train]
        random.shuffle(train_rows)
    else:
        n_test = int(n * split.test + 0.5)
        if not 0 < n_test < n:
            raise UserError(
                f"both parts must have rows. Received: {n} rows with split.test = {split.test},"
                f" which gives {n_test} test rows. Give more rows or another share"
            )
        if split.kind == "random":
            random.shuffle(rows)
            test_rows, train_rows = np.sort(rows[:n_test]), rows[n_test:]
        else:
            test_rows, train_rows = rows[n - n_test :], rows[: n - n_test]
            random.shuffle(train_rows)
        in_train = np.ones(n, dtype=bool)
        in_train[test_rows] = False
    positives = {}
    for part, mask in (("train", in_train), ("test", ~in_train)):
        counts = np.bincount(labels[mask], minlength=2)
        if not counts.all():
            raise UserError(
                "label must be 0 in some rows and 1 in others, in the "
                f"{'training' if part == 'train' else 'test'} part too. "
                f"Received: only {counts.argmax()} in its {int(mask.sum())} rows, column "
                f"{label!r}. Give more rows, or another seed or split"
            )
        positives[part] = int(counts[1])
    return Parts(in_train, train_rows, test_rows, positives)


def _latest(split: Split, times: tuple[np.ndarray, pa.Array]) -> np.ndarray:
    """(n,), whether a row belongs to the latest times, as near to the share as they allow."""
    codes, texts = times
    n = len(codes)
    if (codes < 0).any():
        raise UserError(
            f"every row must have a time. Received: {int((codes < 0).sum())} of {n} rows "
            f"without one, column {split.column!r}. Fill it, or split otherwise"
        )
    values = texts.to_numpy(zero_copy_only=False)
    numbers = [parse_number(text) for text in values]
    words = [text for text, n in zip(values, numbers, strict=True) if n is None or n != n]
    if words and len(words) < len(values):
        raise UserError(
            "times must be numbers, or all of them text that sorts by time. Received: numbers "
            f"and {words[0]!r} in column {split.column!r}. Correct it or remove the row"
        )
    held, place = np.unique(
        values.astype(str) if words else _ranks(values, numbers), return_inverse=True
    )
    counts = np.bincount(place[codes], minlength=len(held))
    later = np.cumsum(counts[::-1])[::-1]  # rows from each time on
    if len(held) < 2:
        raise UserError(
            f"a split by time needs two times at least. Received: {values[0]!r} in all {n} "
            f"rows, column {split.column!r}. Choose another column or split"
        )
    first = 1 + int(np.argmin(np.abs(later[1:] - split.test * n)))
    return place[codes] >= first


def _ranks(texts: np.ndarray, numbers: list[float | None]) -> np.ndarray:
    """(n,), numbers that sort as the texts' do: where float64 makes one of two, decimal ones."""
    floats = np.array(numbers, np.float64)
    if len(np.unique(floats)) == len(floats):
        return floats
    exact = np.array(numbers, object)
    for i, text in enumerate(texts):
        with contextlib.suppress(InvalidOperation):  # of an exponent of twenty digits
            exact[i] = Decimal(text.strip())
    return exact
