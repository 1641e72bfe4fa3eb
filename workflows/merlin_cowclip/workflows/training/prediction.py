# SPDX-License-Identifier: Apache-2.0
"""A run's predictions for rows from outside, in order, and how good they are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import UNKNOWN
from merlin_cowclip.workflows.errors import UserError, check_whole
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing
from merlin_cowclip.workflows.prefetch import prefetch
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.training.evaluation import (
    EVALUATION_BATCH,
    MetricAccumulator,
    Predictor,
    Quality,
)
from merlin_cowclip.workflows.training.raw_inputs import RawInputs, open_raw_inputs
from merlin_cowclip.workflows.training.rows import features_of, rebatch
from merlin_cowclip.workflows.training.runs import Run

LABEL, PROBABILITY = "label", "probability"
"""The columns of what is written."""

GROUP_ROWS = 1 << 20  # of a row group in the output; held until it is written


def predict_logs(
    run: Run,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    batch_size: int = EVALUATION_BATCH,
    which: str | None = None,
    raw: bool = False,
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
      which: of the run's models, "last" or "best"; by default as of `Run.model`.
      raw: for a run on an adopted pipeline, whether the inputs are what its workflow reads instead.
      progress: show on stderr a progress bar, and at the end the shares of unknown ids.

    Returns:
      How many rows.

    Raises:
      UserError: bad input, by its file and place; `out` exists or cannot be made; the workflow
        cannot be loaded.
    """
    out = Path(out)
    if out.suffix != ".parquet":
        raise UserError(f"the output file must end in .parquet. Received: {out}")
    refuse_existing(out, "file")
    check_whole("batch size", batch_size, 1)
    incoming = open_raw_inputs(run, inputs, raw=raw)
    columns, rows = {PROBABILITY: pa.float32()}, 0
    columns = {LABEL: pa.int8(), **columns} if incoming.labelled else columns
    with all_or_nothing(out, "file") as file, pq.ParquetWriter(file, pa.schema(columns)) as writer:
        scored = _scored(run, incoming, which, batch_size, progress)
        for table in rebatch(scored, GROUP_ROWS):
            writer.write_table(table, GROUP_ROWS)
            rows += len(table)
    return rows


def evaluate_logs(
    run: Run,
    inputs: Sequence[str | Path],
    *,
    batch_size: int = EVALUATION_BATCH,
    which: str | None = None,
    raw: bool = False,
    progress: bool = True,
) -> tuple[Quality, int]:
    """The exact quality of a run on every row of some files, and how many rows they have.

    The arguments are `predict_logs`'s. Predictions are held.

    Raises:
      UserError: as `predict_logs`, and where there is no label, or only one of the two.
    """
    check_whole("batch size", batch_size, 1)
    incoming = open_raw_inputs(run, inputs, raw=raw)
    if not incoming.labelled:
        raise UserError(
            "what is evaluated must have labels of 0 and of 1. Received: "
            f"{incoming.files[0]}, without label {run.spec().label!r}. Rows without labels are for "
            "'merlin-cowclip predict'"
        )
    metrics, rows = MetricAccumulator(), 0
    for table in _scored(run, incoming, which, batch_size, progress):
        metrics.add(table[LABEL].to_numpy(), table[PROBABILITY].to_numpy())
        rows += len(table)
    return metrics.quality(), rows


def _scored(
    run: Run, incoming: RawInputs, which: str | None, batch_size: int, progress: bool
) -> Iterator[pa.Table]:
    """The columns of the output; rows are read and encoded ahead, in a thread."""
    spec, predictor = run.spec(), Predictor(run.model(which))
    with progress_bar("scoring", incoming.size, incoming.unit, show=progress) as bar:
        pieces = prefetch(rows for _, rows in incoming.pieces(bar.update))
        tables = rebatch(pieces, batch_size)
        for rows in _print_unknown(run, tables) if progress else tables:
            columns = {PROBABILITY: probabilities_of(predictor, rows, spec)}
            if incoming.labelled:
                columns = {LABEL: rows[spec.label].cast(pa.int8()), **columns}
            yield pa.table(columns)


def _print_unknown(run: Run, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same tables; after the last one, prints the share of unknown ids by field."""
    unknown, occurrences = Counter[str](), Counter[str]()
    for table in tables:
        for name, buckets in run.config["buckets"].items():
            is_list = pa.types.is_list(table[name].type)
            ids = (pc.list_flatten(table[name]) if is_list else table[name]).to_numpy()
            unknown[name] += np.count_nonzero((ids >= UNKNOWN) & (ids < UNKNOWN + buckets))
            occurrences[name] += len(ids)
        yield table
    if shares := [f"{name} {n / occurrences[name]:.1%}" for name, n in unknown.most_common() if n]:
        print(f"Unknown ids: {', '.join(shares)}", file=sys.stderr)


def probabilities_of(predictor: Predictor, rows: pa.Table, spec: DatasetSpec) -> np.ndarray:
    """Of n encoded rows, n float32."""
    features = {name: array[0] for name, array in features_of(rows, spec).items()}
    return predictor.probabilities(features)
