"""A run's predictions for rows from outside, in order, and how good they are."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.plugins._tensorflow import mm
from merlin_cowclip.workflows.data.adopt.validate import prefetch
from merlin_cowclip.workflows.data.prepare.statistics import UNKNOWN
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import Notice, UserError, check_whole, quoted
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.training.evaluation import (
    EVALUATION_BATCH,
    Predictor,
    Quality,
    QualityOf,
)
from merlin_cowclip.workflows.training.incoming import Incoming, open_incoming
from merlin_cowclip.workflows.training.rows import Block, Rows, in_batches
from merlin_cowclip.workflows.training.runs import Run

LABEL, PROBABILITY = "label", "probability"
"""The columns of what is written."""

ENOUGH = 100  # unknown ids of a field, of which chance alone makes none known
GROUP_ROWS = 1 << 20  # of a row group in it, or a batch more; held until it is written


def predict_logs(
    run: Run,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    batch_size: int = EVALUATION_BATCH,
    which: str = "last",
    raw: bool = False,
    trust_workflow: bool = False,
    progress: bool = True,
) -> int:
    """Write the probability of a click for every row of some files, all of them or nothing.

    Args:
      run: the finished run.
      inputs: files or globs of raw logs, as `prepare` took the run's own, or in parquet, with or
        without the label; for a run on an adopted pipeline, parquet that its workflow wrote.
      out: the parquet file to make; must not exist. A row for each row read, in order:
        `probability` (float32) and, where there was a label, `label` (int8) before it.
      batch_size: rows predicted at a time: a matter of speed and memory, but for the last digits.
      which: of the run's models, "last" or "best".
      raw: for a run on an adopted pipeline, whether the inputs are what its workflow reads instead.
      trust_workflow: whether to run the workflow's code also where the run's manifest does not
        confirm it.
      progress: show a progress bar on stderr.

    Returns:
      How many rows.

    Raises:
      UserError: bad input, by its file and place; `out` exists or cannot be made; the workflow must
        not be loaded, or cannot.
    """
    out = Path(out)
    if out.suffix != ".parquet":
        raise UserError(f"output file must be named *.parquet. Received: {out}. Name it so")
    refuse_existing(out, "file")
    check_whole("batch size", batch_size, 1)
    incoming = open_incoming(run, inputs, raw=raw, trust_workflow=trust_workflow)
    with all_or_nothing(out, "file") as file:
        scored = _scored(run, incoming, which, batch_size, progress)
        return _write(file, incoming.labelled, scored, -(-GROUP_ROWS // batch_size))


def evaluate_logs(
    run: Run,
    inputs: Sequence[str | Path],
    *,
    batch_size: int = EVALUATION_BATCH,
    which: str = "last",
    raw: bool = False,
    trust_workflow: bool = False,
    progress: bool = True,
) -> tuple[Quality, int]:
    """The exact quality of a run on every row of some files, and how many rows they have.

    The arguments are `predict_logs`'s. Predictions are held.

    Raises:
      UserError: as `predict_logs`, and where there is no label, or only one of the two.
    """
    check_whole("batch size", batch_size, 1)
    incoming = open_incoming(run, inputs, raw=raw, trust_workflow=trust_workflow)
    if not incoming.labelled:
        raise UserError(
            "what is evaluated must have labels of 0 and of 1. Received: "
            f"{incoming.files[0]}, without label {run.spec().label!r}. Rows without labels are for "
            "'merlin-cowclip predict'"
        )
    found, rows = QualityOf(), 0
    for labels, probabilities in _scored(run, incoming, which, batch_size, progress):
        found.add(labels, probabilities)
        rows += len(labels)
    return found.quality(), rows


def _scored(
    run: Run, incoming: Incoming, which: str, batch_size: int, progress: bool
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Labels and probabilities, b float32 each; rows are read and encoded ahead, in a thread."""
    probabilities, unknown = scorer(run.model(which), run.spec()), _UnknownIds(run)
    with progress_bar("scoring", incoming.size, incoming.unit, show=progress) as bar:
        pieces = (rows for _, rows in incoming.pieces(bar.update))
        for rows in in_batches(prefetch(pieces), batch_size):
            unknown.see(rows)
            yield rows.labels.ravel(), probabilities(rows)
    unknown.warn()


class _UnknownIds:
    """Fields of whose ids a run knows none: written otherwise than where it learned.

    Of one id nobody can tell whether it is new or written in another way (True for true, 7 for 007,
    a number for text); if all ids of a field are unknown, a warning says so.
    """

    def __init__(self, run: Run) -> None:
        self._spec, special = run.spec(), run.config["special_ids"]
        first = {name: UNKNOWN + special[name]["buckets"] for name in self._spec.ids}
        # Of fields that have a vocabulary: the id that it begins with, after the hash buckets.
        self._first = {n: i for n, i in first.items() if i < run.config["cardinalities"][n]}
        self._unknown = dict.fromkeys(self._first, 0)  # until the first known one

    def see(self, rows: Rows) -> None:
        """Count those of some encoded rows."""
        lists = (column.flatten().to_numpy(zero_copy_only=False) for column in rows.lists)
        for name, ids in zip(self._spec.ids, (*rows.ids.T, *lists), strict=True):
            if name not in self._unknown:
                continue
            if len(ids) and ids.max() >= self._first[name]:
                del self._unknown[name]
            else:
                self._unknown[name] += int(np.count_nonzero(ids >= UNKNOWN))

    def warn(self) -> None:
        """Say which fields have had ids enough, and none that is known."""
        fields = [name for name, unknown in self._unknown.items() if unknown >= ENOUGH]
        if fields:
            warnings.warn(
                f"the run knows no id of {quoted(fields)} in these rows: all count as "
                "unknown. Later times do; others may be written otherwise than in the run's own "
                "data, or be of another type",
                Notice,
                stacklevel=2,
            )


def scorer(model: mm.Model, spec: DatasetSpec) -> Callable[[Rows], np.ndarray]:
    """What gives the probabilities, n float32, of n encoded rows."""
    predictor = Predictor(model)

    def probabilities(rows: Rows) -> np.ndarray:
        features, _ = Block.of(rows).batch(spec, 0, len(rows))
        return predictor.probabilities(features)

    return probabilities


def _write(
    file: Path, labelled: bool, scored: Iterator[tuple[np.ndarray, np.ndarray]], batches: int
) -> int:
    """Write a parquet file, so many batches in a row group, and return its rows."""
    fields = [pa.field(LABEL, pa.int8(), False), pa.field(PROBABILITY, pa.float32(), False)]
    schema = pa.schema(fields if labelled else fields[1:])
    rows = 0
    with pq.ParquetWriter(file, schema) as writer:
        while held := list(itertools.islice(scored, batches)):
            labels, probabilities = map(np.concatenate, zip(*held, strict=True))
            columns = [labels.astype(np.int8), probabilities]
            table = pa.table(columns[-len(schema) :], schema=schema)
            writer.write_table(table, row_group_size=len(table))
            rows += len(table)
    return rows
