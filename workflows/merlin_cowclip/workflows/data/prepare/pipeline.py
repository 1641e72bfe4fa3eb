# SPDX-License-Identifier: Apache-2.0
"""Raw logs to prepared data: scan, split, fit, encode, shuffle and write, all or nothing.

Memory does not grow with the rows. One pass over the text stores typed columns in pieces
(`columns.py`). Statistics are counted piece by piece and sorted by DuckDB (`fit.py`), rows are
shuffled on disk (`shuffle.py`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import duckdb
import numpy as np
import pyarrow as pa
from dask.utils import parse_bytes

from merlin_cowclip.workflows.data.encoder import Encoder
from merlin_cowclip.workflows.data.prepare.columns import Piece, Scan, write_pieces
from merlin_cowclip.workflows.data.prepare.executor import check_cluster
from merlin_cowclip.workflows.data.prepare.fit import Encoding, Report, fit_ids, fit_numbers
from merlin_cowclip.workflows.data.prepare.shuffle import PART_ROWS, write_parts
from merlin_cowclip.workflows.data.prepare.split import split_rows
from merlin_cowclip.workflows.data.prepared_data import (
    HELD_OUT,
    WORKFLOW,
    PreparedData,
    write_record,
)
from merlin_cowclip.workflows.data.sources.base import Source
from merlin_cowclip.workflows.data.sources.csv import CsvSource
from merlin_cowclip.workflows.data.sources.files import expand_paths, refuse_twice
from merlin_cowclip.workflows.data.sources.parquet import ParquetSource
from merlin_cowclip.workflows.data.spec import DatasetSpec, with_saved_names
from merlin_cowclip.workflows.errors import UserError, check_whole
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing
from merlin_cowclip.workflows.progress import progress_bar

READERS: dict[str, type[Source]] = {"csv": CsvSource, "parquet": ParquetSource}
CHUNK_BYTES = 64 << 20  # of a log that one thread reads at a time
THREAD_BYTES = 256 << 20  # of memory for each thread, at least
LEAST_MEMORY = 256 << 20


def prepare(
    spec: DatasetSpec,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    like: Encoding | None = None,
    grow: bool = False,
    seed: int = 0,
    progress: bool = True,
    part_rows: int = PART_ROWS,
    memory: int | str | None = None,
    scratch: str | Path | None = None,
    engine: Literal["duckdb", "nvtabular"] | None = None,
    workers: int = 0,
    scheduler: str | None = None,
    device: Literal["cpu", "gpu"] = "cpu",
) -> PreparedData:
    """Turn raw logs into training, validation and test parts, at ``out``.

    Ids become integers: 1 is a missing id, 2 an unknown one (not in the training part, or rarer
    than the spec's threshold), 3 the most frequent id. Numbers are scaled to [0, 1] by the range in
    the training part and clipped, or as the spec says; missing numbers count as 0. The split is
    exact, and training rows are fully shuffled. Both depend on the rows and the seed only.
    ``record["boundaries"]`` has the last training time, and the first of each held-out part, of a
    split by time.

    Args:
        spec: the columns of the log.
        inputs: files, globs or folders, CSV (compressed or not) or parquet; without the files that
            ``spec.split`` names as validation or test part.
        out: the folder to write; must not exist.
        like: encode as an earlier run or folder, instead of fitting; other ids are unknown.
        grow: with ``like``: ids that it does not have get new ones behind its own.
        seed: of split and shuffle.
        progress: show progress bars on stderr.
        part_rows: maximum number of rows in an output file.
        memory: for "duckdb": bytes, or text like "8GB", that sorting and shuffling may take; by
            default half of what the machine or container has. The program itself takes about
            0.5 GB, and each id of the largest field 40 bytes.
        scratch: for "duckdb": a folder for temporary files, of about the size of the log; by
            default in ``out``.
        engine: "duckdb", the default, uses all cores of this machine. "nvtabular" runs on Dask,
            and meets the shares of a random split by chance.
        workers: for "nvtabular": Dask processes of this machine; 0 for threads, or one per GPU.
            The calling script needs ``if __name__ == "__main__":``.
        scheduler: for "nvtabular": the address of a Dask scheduler that runs, in place of workers.
        device: for "nvtabular": "gpu" for dask-cuda's workers.

    Raises:
        UserError: bad input; nothing is left behind.
    """
    out = Path(out)
    check_whole("seed", seed, 0)
    check_whole("part_rows", part_rows, 1)
    refuse_existing(out)
    spec = with_saved_names(spec)
    engine = engine or ("nvtabular" if device == "gpu" or workers or scheduler else "duckdb")
    if engine not in ("duckdb", "nvtabular"):
        raise UserError(f"engine must be 'duckdb' or 'nvtabular'. Received: {engine!r}")
    if engine == "duckdb" and (device == "gpu" or workers or scheduler):
        raise UserError(
            "device 'gpu', workers and scheduler need engine 'nvtabular'. Leave the engine out"
        )
    if engine != "duckdb" and (memory, scratch, like) != (None, None, None):
        raise UserError("memory, scratch, --vocabulary-from need engine 'duckdb'. Leave them out")
    if scratch is not None and not os.access(scratch, os.W_OK | os.X_OK):
        raise UserError(f"scratch must be a folder that can be written. Received: {scratch}")
    check_cluster(workers, device, scheduler)
    if grow and like is None:
        raise UserError("grow needs a vocabulary (--vocabulary-from). Name one")
    limit = memory_limit(memory)
    if importlib.util.find_spec("nvtabular") is None:  # which is imported once all rows are read
        raise ModuleNotFoundError("No module named 'nvtabular'", name="nvtabular")
    files = {part: getattr(spec.split, part) for part in HELD_OUT}
    files = {"train": inputs} | {part: of for part, of in files.items() if isinstance(of, tuple)}
    reader = READERS[spec.format]
    by_part = {
        part: [reader(spec, path, root=root) for path, root in expand_paths(of).items()]
        for part, of in files.items()
    }
    sources = [source for of in by_part.values() for source in of]
    refuse_twice([source.path for source in sources])
    for source in sources:
        source.check()
    record: dict[str, Any] = {
        "spec": spec.to_dict(),
        "engine": engine,
        "inputs": [{"path": str(s.path), "bytes": s.size} for s in sources],
        "seed": int(seed),
    }
    with all_or_nothing(out) as folder:
        if engine == "nvtabular":
            from merlin_cowclip.workflows.data.prepare.nvtabular_engine import prepare_on_dask

            record |= prepare_on_dask(
                spec,
                by_part,
                folder,
                seed=seed,
                scheduler=scheduler,
                workers=workers,
                device=device,
                part_rows=part_rows,
                progress=progress,
            )
        else:
            with tempfile.TemporaryDirectory(prefix=".scratch-", dir=scratch or folder) as home:
                record |= _prepare_here(
                    spec, by_part, folder, Path(home), like, grow, seed, limit, part_rows, progress
                )
        record = write_record(folder, record)
    return PreparedData(out, spec, record)


def memory_limit(memory: int | str | None) -> int:
    """Bytes; by default half of what the machine or container has."""
    if memory is None:
        (total,) = duckdb.execute("select current_setting('memory_limit')").fetchone() or ("0",)
        return parse_bytes(total) * 5 // 8  # DuckDB's own is 80 %
    try:
        limit = parse_bytes(memory)
    except (ValueError, TypeError, AttributeError):
        limit = 0
    if limit < LEAST_MEMORY:
        raise UserError(f"memory must be at least 256MB, as '8GB'. Received: {memory!r}")
    return limit


def _prepare_here(
    spec: DatasetSpec,
    by_part: Mapping[str, Sequence[Source]],
    folder: Path,
    scratch: Path,
    like: Encoding | None,
    grow: bool,
    seed: int,
    memory: int,
    part_rows: int,
    progress: bool,
) -> dict[str, Any]:
    """Prepare with the threads of this process; returns what the record says of it."""
    threads = max(1, min(len(os.sched_getaffinity(0)), memory // THREAD_BYTES))
    options: dict[str, Any] = {
        "memory_limit": f"{memory}B",
        "temp_directory": str(scratch / "duckdb"),
        "threads": threads,
    }
    with (
        contextlib.closing(duckdb.connect(config=options)) as database,
        ThreadPoolExecutor(threads) as executor,
    ):
        scan, given, replaced = _scan(spec, by_part, scratch, database, executor, progress)
        parts = split_rows(scan, given, seed)
        reports, scales = dict[str, Report](), dict[str, Sequence[float]]()
        with progress_bar("columns", len(spec.fields), " columns", show=progress) as bar:

            def fit(fields: tuple[str, ...]) -> dict[str, Report]:
                name = fields[0]
                if name in spec.continuous:
                    fixed = like and like.ranges[name]
                    report, scales[name] = fit_numbers(name, scan, fixed)
                    return {name: report}
                return fit_ids(name, fields, scan, folder, like, grow)

            numbers = [(name,) for name in spec.continuous]
            for fitted in executor.map(fit, [*spec.vocabularies.values(), *numbers]):
                reports |= fitted
                bar.update(len(fitted))
        fields = {name: reports[name] for name in spec.fields}
        ranges = {name: [*scales[name]] for name in spec.continuous}
        encoder = Encoder.open(folder / WORKFLOW, spec, ranges)
        write_parts(
            scan,
            encoder,
            fields,
            parts.rows,
            folder,
            seed=seed,
            memory=memory,
            part_rows=part_rows,
            executor=executor,
            progress=progress,
        )
    # It imports NVTabular, and so TensorFlow: not while memory is full.
    pa.default_memory_pool().release_unused()
    from merlin_cowclip.workflows.data.prepare.nvt_workflow import save_fitted_workflow

    save_fitted_workflow(spec, folder, ranges)
    for name in spec.continuous:
        fields[name]["not_finite"] = replaced[name]  # among the missing ones
    return {
        "rows": parts.rows,
        "boundaries": parts.boundaries,
        "cardinalities": {n: of.cardinality for n, of in encoder.vocabularies.items()},
        "ranges": ranges,
        "report": {"rows": parts.rows, "positives": parts.positives, "fields": fields},
    }


def _scan(
    spec: DatasetSpec,
    by_part: Mapping[str, Sequence[Source]],
    scratch: Path,
    database: duckdb.DuckDBPyConnection,
    executor: Executor,
    progress: bool,
) -> tuple[Scan, dict[str, int], Counter[str]]:
    """All rows in pieces, rows of the held-out parts that are files, numbers not finite."""
    sources = [source for of in by_part.values() for source in of]
    total = sum(source.size for source in sources)
    pieces, replaced, rows = list[Piece](), Counter[str](), 0
    given = dict.fromkeys([*by_part][1:], 0)
    chunks = [
        (part, source, chunk)
        for part, of in by_part.items()
        for source in of
        for chunk in source.chunks(CHUNK_BYTES)
    ]
    with progress_bar("reading", total, "B", show=progress) as bar:
        write = functools.partial(write_pieces, folder=scratch, advance=bar.update)
        _, *arguments = zip(*chunks, strict=True)
        read = executor.map(write, itertools.count(), *arguments)
        for (part, _, _), (written, by_column) in zip(chunks, read, strict=True):
            for path, length in written:
                pieces.append(Piece(path, rows, rows + length))
                rows += length
                if part in given:
                    given[part] += length
            replaced += by_column
        bar.update(total - bar.n)
    if not rows:
        raise UserError(f"{sources[0].path} has no rows. Give a file with rows")
    part_of = np.memmap(scratch / "part_of", np.uint8, "w+", shape=(rows,))
    return Scan(spec, scratch, database, pieces, part_of), given, replaced
