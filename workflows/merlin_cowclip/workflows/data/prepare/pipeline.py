# SPDX-License-Identifier: Apache-2.0
"""Raw logs to prepared data: read, split, fit, encode, shuffle and write, all or nothing.

One pass over the text stores every column. From then on a thread or worker has one column in memory
at a time. Each step is a list of tasks that read and write files (`executor.py`).
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepare.column_store import (
    PART_OF,
    PART_ROWS,
    ROWS,
    ColumnStore,
    PartJob,
    part_jobs,
    write_part,
)
from merlin_cowclip.workflows.data.prepare.executor import THREADS, check_executor, make_executor
from merlin_cowclip.workflows.data.prepare.fit import Encoding, Fitted, fit
from merlin_cowclip.workflows.data.prepare.split import Parts, as_numbers, split_rows
from merlin_cowclip.workflows.data.prepared_data import (
    HELD_OUT,
    ORDER,
    PARTS,
    PreparedData,
    write_record,
)
from merlin_cowclip.workflows.data.sources.base import TIME, Source, unchanged
from merlin_cowclip.workflows.data.sources.csv import CsvSource
from merlin_cowclip.workflows.data.sources.files import Input, expand_paths, refuse_twice
from merlin_cowclip.workflows.data.sources.parquet import ParquetSource
from merlin_cowclip.workflows.data.spec import DatasetSpec, check_input_names
from merlin_cowclip.workflows.errors import UserError, check_whole
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing
from merlin_cowclip.workflows.progress import progress_bar

READERS: dict[str, type[Source]] = {"csv": CsvSource, "parquet": ParquetSource}
CHUNK_BYTES = (8 << 20, 256 << 20)  # of a log that one task reads, at least and at most
CHUNKS_PER_WORKER = 4  # so that all end at about the same time


def prepare(
    spec: DatasetSpec,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    like: Encoding | None = None,
    seed: int = 0,
    progress: bool = True,
    part_rows: int = PART_ROWS,
    workers: int = 0,
    device: Literal["cpu", "gpu"] = "cpu",
    engine: Literal["arrow", "nvtabular"] | None = None,
) -> PreparedData:
    """Turn raw logs into training, validation and test parts, at ``out``.

    IDs become integers: 1 is a missing ID, 2 an unknown one (not in the training part, or rarer
    than the spec's threshold), 3 the most frequent ID. Numbers are scaled to [0, 1] by the range in
    the training part and clipped; missing numbers count as 0. The split is exact, and training
    rows are fully shuffled. Both depend on the rows and the seed only. ``record["boundaries"]`` has
    the last training time, and the first of each held-out part, of a split by time.

    Args:
        spec: the columns of the log.
        inputs: files, globs or folders, CSV (compressed or not) or parquet; without the files that
            ``spec.split`` names as validation or test part.
        out: the folder to write; must not exist.
        like: encode as an earlier run or folder, instead of fitting; other IDs are unknown.
        seed: of split and shuffle.
        progress: show progress bars on stderr.
        part_rows: maximum number of rows in an output file.
        workers: Dask processes, at most 4 per core; 0 for threads, or one per GPU. Tasks of a
            worker that dies run again. The calling script needs ``if __name__ == "__main__":``.
        device: where NVTabular runs: "cpu", or "gpu" for dask-cuda's workers.
        engine: what fits and encodes columns: "arrow", or "nvtabular", which ``device="gpu"``
            implies. IDs that occur equally often may be numbered differently.

    Raises:
        UserError: bad input; nothing is left behind.
    """
    out = Path(out)
    check_whole("seed", seed, 0)
    check_whole("part_rows", part_rows, 1)
    refuse_existing(out)
    check_input_names(spec)
    engine = engine or ("nvtabular" if device == "gpu" else "arrow")
    if engine not in ("arrow", "nvtabular"):
        raise UserError(f"engine must be 'arrow' or 'nvtabular'. Received: {engine!r}")
    if engine == "arrow" and device == "gpu":
        raise UserError("device 'gpu' needs engine 'nvtabular'. Leave one of them out")
    if engine != "arrow" and like is not None:
        raise UserError("like needs engine 'arrow'. Leave the engine out")
    check_executor(workers, device)
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
    with all_or_nothing(out) as folder:
        scratch = folder / ".scratch"
        scratch.mkdir()
        readers = workers if engine == "arrow" else 0  # for NVTabular, threads read the text
        with make_executor(readers, "cpu", scratch) as executor:
            run = _Pipeline(spec, sources, ColumnStore(scratch, spec), executor, progress)
            with unchanged(sources):
                read, replaced = run.read(readers or THREADS)
            given = {part: sum(read[s.path] for s in by_part[part]) for part in [*files][1:]}
            parts = run.split(int(seed), given, folder)
            rows = {part: len(of) for part, of in parts.rows.items()}
            jobs = [job for part in PARTS for job in part_jobs(part, rows[part], part_rows)]
            fitted = run.fit(folder if engine == "arrow" else None, like)
            ranges = {name: [*fitted[name].range] for name in spec.continuous}
            if engine == "arrow":
                from merlin_cowclip.workflows.data.prepare.nvt_workflow import save_fitted_workflow

                run.write(jobs, folder)
                save_fitted_workflow(spec, folder, ranges)
                cardinalities = {name: fitted[name].cardinality for name in spec.ids}
            else:
                from merlin_cowclip.workflows.data.prepare.nvtabular_engine import fit_and_encode

                raw = scratch / "raw"
                run.write(jobs, raw, raw=True)
                cardinalities = fit_and_encode(spec, raw, folder, jobs, workers, device, progress)
        shutil.rmtree(scratch, ignore_errors=True)
        fields = {name: fitted[name].report for name in spec.fields}
        for name in spec.continuous:
            fields[name]["not_finite"] = replaced[name]  # among the missing ones
        record = {
            "spec": spec.to_dict(),
            "engine": engine,
            "inputs": [{"path": str(s.path), "bytes": s.size} for s in sources],
            "seed": int(seed),
            "rows": rows,
            "boundaries": parts.boundaries,
            "cardinalities": cardinalities,
            "ranges": ranges,
            "report": {"rows": rows, "positives": parts.positives, "fields": fields},
        }
        record = write_record(folder, record)
    return PreparedData(out, spec, record)


@dataclass(frozen=True)
class _Pipeline:
    """The steps of `prepare`, each reading what the one before wrote."""

    spec: DatasetSpec
    sources: list[Source]
    store: ColumnStore
    executor: Executor
    progress: bool

    def read(self, tasks: int) -> tuple[Counter[Input], Counter[str]]:
        """Store all columns; returns rows by file and, by column, numbers that were not finite."""
        total, replaced = sum(s.size for s in self.sources), Counter[str]()
        rows = Counter[Input]()
        size = max(CHUNK_BYTES[0], min(CHUNK_BYTES[1], total // (CHUNKS_PER_WORKER * tasks)))
        chunks = [(source, chunk) for source in self.sources for chunk in source.chunks(size)]
        with progress_bar("reading", total, "B", show=self.progress) as bar:
            write: Callable[..., tuple[int, Counter[str]]] = self.store.write_chunk
            in_process = isinstance(self.executor, ThreadPoolExecutor)
            if in_process:
                write = functools.partial(write, advance=bar.update)
            found = self.executor.map(write, range(len(chunks)), *zip(*chunks, strict=True))
            for (source, chunk), (number, by_column) in zip(chunks, found, strict=True):
                rows[source.path] += number
                replaced += by_column
                if not in_process:
                    bar.update(chunk.size)
            bar.update(total - bar.n)
        if not rows.total():
            raise UserError(f"{self.sources[0].path} has no rows. Give a file with rows")
        return rows, replaced

    def split(self, seed: int, given: dict[str, int], folder: Path) -> Parts:
        """Choose the rows of each part; ``given`` are rows of held-out parts that are files."""
        spec, store = self.spec, self.store
        labels = store.column(spec.label)
        times = store.column(TIME) if spec.split.kind == "time" else None
        parts = split_rows(spec.split, labels.to_numpy(), times, given, seed=seed, label=spec.label)
        store.store(spec.label, labels)
        store.store(PART_OF, pa.array(parts.part_of))
        for part, rows in parts.rows.items():
            store.store(ROWS[part], pa.array(rows))
        if spec.split.kind != "random" and not len(parts.rows["valid"]):
            train = parts.rows["train"]
            order = train if times is None else as_numbers(times)[train]
            pq.write_table(pa.table({"order": order}), folder / ORDER)
        return parts

    def fit(self, folder: Path | None, like: Encoding | None) -> dict[str, Fitted]:
        """Fit each column, and store it encoded, or raw without a folder."""
        names, fitted = [*self.spec.ids, *self.spec.continuous], {}
        task = functools.partial(fit, store=self.store, folder=folder, like=like)
        with progress_bar("columns", len(names), " columns", show=self.progress) as bar:
            for name, found in zip(names, self.executor.map(task, names), strict=True):
                fitted[name] = found
                bar.update(1)
        return fitted

    def write(self, jobs: list[PartJob], folder: Path, raw: bool = False) -> None:
        """Write the parts."""
        for part in PARTS:
            (folder / part).mkdir(parents=True)
        task = functools.partial(write_part, store=self.store, folder=folder, raw=raw)
        rows = sum(job.stop - job.start for job in jobs)
        with progress_bar("raw rows" if raw else "writing", rows, show=self.progress) as bar:
            for written in self.executor.map(task, jobs):
                bar.update(written)
