# SPDX-License-Identifier: Apache-2.0
"""The split: which rows are for training, validation and test, and in what order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.prepared_data import HELD_OUT, PARTS, TITLES
from merlin_cowclip.workflows.data.spec import Split
from merlin_cowclip.workflows.errors import UserError


class Parts(NamedTuple):
    """The parts of n rows."""

    part_of: np.ndarray  # (n,) uint8, the part of each row as an index of `PARTS`
    rows: dict[str, np.ndarray]  # by part; training rows shuffled, others in the log's order
    positives: dict[str, int]  # rows with label 1, by part
    boundaries: dict[str, str]  # of a split by time: the last time of training, the first of others


def split_rows(
    split: Split,
    labels: np.ndarray,
    times: pa.Array | None,
    given: Mapping[str, int],
    *,
    seed: int,
    label: str,
) -> Parts:
    """Divide n rows, of ``labels`` (n,) of 0 and 1, into parts.

    ``times`` are (n,) numbers or timestamps of a split by time. ``given`` has the numbers of rows
    of held-out parts whose files were given: the last of the n rows, validation rows first.
    ``seed`` is of a random split and of the order of the training rows; ``label`` is for messages.
    Raises UserError for a part without both labels, and where all times are the same.
    """
    n = len(labels)
    random = np.random.default_rng(seed)
    kind = np.uint32 if n < 2**32 else np.int64
    part_of, start = np.zeros(n, np.uint8), n - sum(given.values())
    rest = np.arange(start, dtype=kind)
    for part in HELD_OUT:
        if part in given:
            part_of[start : start + given[part]] = PARTS.index(part)
            start += given[part]
    if split.kind == "random":
        random.shuffle(rest)
    instants = None if times is None else _as_numbers(times)
    for part in reversed(HELD_OUT):
        if part in given or not (share := getattr(split, part)):
            continue
        if instants is None:
            last = np.arange(len(rest)) < int(len(rest) * share + 0.5)
            last = last if split.kind == "random" else last[::-1]
        else:
            last = latest(instants[rest], share, split.column)
        part_of[rest[last]], rest = PARTS.index(part), rest[~last]
    if split.kind != "random":
        random.shuffle(rest)
    rows = {"train": rest}
    rows |= {part: np.flatnonzero(part_of == PARTS.index(part)).astype(kind) for part in HELD_OUT}
    positives, boundaries = {}, {}
    for part, of_part in rows.items():
        ones = int(np.count_nonzero(labels[of_part]))
        if not 0 < ones < len(of_part) and (part == "train" or getattr(split, part)):
            raise UserError(
                f"the {TITLES[part]} part has {len(of_part) - ones:,} rows with label 0 and "
                f"{ones:,} with label 1, column {label!r}. Both must occur: give more rows, or "
                "another seed or split"
            )
        positives[part] = ones
        if times is not None and instants is not None and len(of_part):
            end = np.argmax if part == "train" else np.argmin
            boundaries[part] = _time_text(times[int(of_part[end(instants[of_part])])].as_py())
    return Parts(part_of, rows, positives, boundaries)


def _as_numbers(times: pa.Array) -> np.ndarray:
    """(n,) numbers that sort as times do: timestamps as whole microseconds."""
    return (times.cast(pa.int64()) if pa.types.is_timestamp(times.type) else times).to_numpy()


def latest(times: np.ndarray, share: float, column: str | None) -> np.ndarray:
    """(n,) bool, whether a row has one of the latest times, as near to the share as possible."""
    held, counts = np.unique(times, return_counts=True)
    if len(held) < 2:
        raise UserError(
            f"all {len(times):,} rows to divide have the same time, column {column!r}. Choose "
            "another column or split, or a share of 0"
        )
    later = np.cumsum(counts[::-1])[::-1]  # rows from each time on
    first = 1 + int(np.argmin(np.abs(later[1:] - share * len(times))))
    return times >= held[first]


def _time_text(time: Any) -> str:
    if isinstance(time, float):
        return repr(time).removesuffix(".0")
    text = pd.Timestamp(time).isoformat(sep=" ", timespec="auto").removesuffix("+00:00")
    return f"{text.removesuffix(':00')} UTC"
