"""Raw logs to prepared data: read, split, fit, encode, shuffle and write, all or nothing.

One pass over the text stores every column. From then on a thread or worker has one column in memory
at a time. Each step is a list of tasks that read and write files (`executor.py`).
"""

from __future__ import annotations

import functools
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from merlin_cowclip.plugins._checks import is_whole
from merlin_cowclip.workflows import machine
from merlin_cowclip.workflows.data.prepare.column_store import IN_TRAIN, ROWS, ColumnStore
from merlin_cowclip.workflows.data.prepare.executor import (
    MEMORY_SHARE,
    check_executor,
    make_executor,
    parallel_tasks,
)
from merlin_cowclip.workflows.data.prepare.fit import Encoding, Fitted, describe, fit
from merlin_cowclip.workflows.data.prepare.nvt_workflow import (
    create_id_folders,
    save_fitted_workflow,
)
from merlin_cowclip.workflows.data.prepare.nvtabular_engine import fit_and_encode
from merlin_cowclip.workflows.data.prepare.split import split_rows
from merlin_cowclip.workflows.data.prepare.write import PART_ROWS, PartJob, part_jobs, write_part
from merlin_cowclip.workflows.data.prepared_data import PARTS, PreparedData, write_record
from merlin_cowclip.workflows.data.sources.base import TIME, Source, unchanged
from merlin_cowclip.workflows.data.sources.csv import CsvSource
from merlin_cowclip.workflows.data.sources.files import expand_paths
from merlin_cowclip.workflows.data.sources.parquet import ParquetSource
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing
from merlin_cowclip.workflows.progress import progress_bar

ENGINES = ("arrow", "nvtabular")
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
    """Turn raw logs into training and test data, at ``out``.

    Ids become integers by falling frequency in the training part (3 is the most frequent; 1 is a
    missing id, 2 one that training has not seen, or that is rarer than the spec's threshold);
    numbers are scaled to [0, 1] by the training part's range and clipped to it, a missing one
    counting as 0. The split is exact, and training rows are fully shuffled; both depend on the rows
    and the seed only, never on who does the work.

    Args:
        spec: what the log looks like.
        inputs: files, globs or folders, CSV (gzipped or not) or parquet as the spec says.
        out: the folder to make, on this machine; must not exist.
        like: encode ids and numbers as an earlier run or folder, instead of fitting them; ids that
            it does not have are unknown.
        seed: of the split and the shuffle.
        progress: show progress bars on stderr.
        part_rows: the most rows in one output file.
        workers: processes of a Dask cluster; 0 for threads of this process. A worker that dies is
            replaced, and its tasks are done again. (As with all of Dask's processes, the calling
            script needs an ``if __name__ == "__main__"``.)
        device: where NVTabular runs: "cpu", or "gpu" for dask-cuda's workers.
        engine: what fits and encodes columns: "arrow", or "nvtabular", which ``device="gpu"``
            implies. Its ids of equal counts may be numbered differently.

    Returns:
        The folder, opened.

    Raises:
        UserError: bad input; the message names the place and the remedy, and nothing is left
            behind.
    """
    out = Path(out)
    if not is_whole(seed, 0, numpys=True):
        raise UserError(f"seed must be an integer of at least 0. Received: {seed!r}")
    if not is_whole(part_rows, 1):
        raise UserError(f"part_rows must be an integer of at least 1. Received: {part_rows!r}")
    refuse_existing(out)
    _check_place(out)
    engine = engine or ("nvtabular" if device == "gpu" else "arrow")
    if engine not in ENGINES:
        raise UserError(f"engine must be one of {quoted(ENGINES)}. Received: {engine!r}")
    if engine == "arrow" and device == "gpu":
        raise UserError("device 'gpu' needs engine 'nvtabular'. Leave one of them out")
    if like is not None and engine != "arrow":
        raise UserError("like needs engine 'arrow'. Leave the engine out")
    check_executor(workers, device)
    sources = [READERS[spec.format](spec, path) for path in expand_paths(inputs)]
    for source in sources:
        source.check()
    with all_or_nothing(out) as folder:
        scratch = folder / ".scratch"
        scratch.mkdir()
        # Text is always read on CPUs, for NVTabular by threads.
        readers = workers if engine == "arrow" else 0
        with make_executor(readers, "cpu", scratch) as executor:
            store = ColumnStore(scratch, spec)
            run = _Pipeline(spec, sources, store, folder, executor, progress, like)
            tasks = parallel_tasks(readers, "cpu")
            if engine == "arrow":
                record = run.record(int(seed), part_rows, tasks, run.by_arrow)
            else:
                by_nvtabular = functools.partial(run.by_nvtabular, workers=workers, device=device)
                record = run.record(int(seed), part_rows, tasks, by_nvtabular)
        shutil.rmtree(scratch, ignore_errors=True)
        record = write_record(folder, {**record, "engine": engine})
    return PreparedData(out, spec, record)


def _check_place(out: Path) -> None:
    """Check that ``out`` names a folder on this machine."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(out)):
        raise UserError(f"--out {out} looks like a URL. Name a folder, and copy it from there")
    if out.name in ("", ".."):
        raise UserError(f"--out must name a folder. Received: {out}")


@dataclass(frozen=True)
class _Pipeline:
    """The steps of `prepare`, each reading what the one before wrote."""

    spec: DatasetSpec
    sources: list[Source]
    store: ColumnStore
    folder: Path
    executor: Executor
    progress: bool
    like: Encoding | None

    def record(
        self,
        seed: int,
        part_rows: int,
        tasks: int,
        encode: Callable[[list[PartJob]], tuple[dict[str, Fitted], dict[str, int]]],
    ) -> dict[str, Any]:
        """Do them all; returns the record. ``encode`` fits the fields and writes the parts."""
        spec = self.spec
        with unchanged(self.sources):
            replaced = self._read(tasks)
        rows, positives = self._split(seed)
        fitted, cardinalities = encode(
            [job for part, total in rows.items() for job in part_jobs(part, total, part_rows)]
        )
        fields = {name: fitted[name].report for name in spec.fields}
        for name in spec.continuous:
            fields[name]["not_finite"] = replaced[name]  # among the missing ones
        return {
            "spec": spec.to_dict(),
            "inputs": [{"path": str(s.path), "bytes": s.state.bytes} for s in self.sources],
            "seed": seed,
            "rows": rows,
            "cardinalities": cardinalities,
            "ranges": {name: [fitted[name].low, fitted[name].high] for name in spec.continuous},
            "report": {"rows": rows, "positives": positives, "fields": fields},
        }

    def by_arrow(self, jobs: list[PartJob]) -> tuple[dict[str, Fitted], dict[str, int]]:
        """Fit and encode one column after the other, and write the parts."""
        spec, folder = self.spec, self.folder
        create_id_folders(folder)
        fitted = self._fit("fitting", functools.partial(fit, folder=folder, like=self.like))
        ranges = {name: (fitted[name].low, fitted[name].high) for name in spec.continuous}
        save_fitted_workflow(spec, folder, ranges)
        self._write(jobs, folder)
        return fitted, {name: fitted[name].cardinality for name in spec.ids}

    def by_nvtabular(
        self, jobs: list[PartJob], workers: int, device: str
    ) -> tuple[dict[str, Fitted], dict[str, int]]:
        """Write raw parts; NVTabular fits and encodes them."""
        fitted = self._fit("columns", describe)
        raw = self.store.folder / "raw"
        self._write(jobs, raw, raw=True)
        for part in PARTS:
            (self.folder / part).mkdir()
        cardinalities = fit_and_encode(
            self.spec,
            raw,
            self.folder,
            jobs,
            workers=workers,
            device=device,
            progress=self.progress,
        )
        return fitted, cardinalities

    def _read(self, tasks: int) -> Counter[str]:
        """Store all columns; returns, by column, how many numbers were not finite."""
        total, rows, replaced = sum(s.state.bytes for s in self.sources), 0, Counter[str]()
        size = _chunk_bytes(total, tasks)
        chunks = [(source, chunk) for source in self.sources for chunk in source.chunks(size)]
        with progress_bar("reading", total, "B", show=self.progress) as bar:
            write, in_process = (
                self.store.write_chunk,
                isinstance(self.executor, ThreadPoolExecutor),
            )
            if in_process:
                write = functools.partial(write, advance=bar.update)
            found = self.executor.map(write, range(len(chunks)), *zip(*chunks, strict=True))
            for (_, chunk), (number, by_column) in zip(chunks, found, strict=True):
                rows += number
                replaced += by_column
                if not in_process:
                    bar.update(chunk.size)
            bar.update(total - bar.n)
        if not rows:
            raise UserError(f"{self.sources[0].path} has no rows. Give a file with rows")
        return replaced

    def _split(self, seed: int) -> tuple[dict[str, int], dict[str, int]]:
        spec, store = self.spec, self.store
        labels = store.numbers(spec.label, np.int8)
        times = store.codes(TIME) if spec.split.kind == "time" else None
        parts = split_rows(spec.split, labels, times, seed=seed, label=spec.label)
        store.store(spec.label, labels)
        store.store(IN_TRAIN, parts.in_train)
        store.store(ROWS["train"], parts.train)
        store.store(ROWS["test"], parts.test)
        return parts.rows, parts.positives

    def _fit(self, title: str, fit_one: Callable[..., Fitted]) -> dict[str, Fitted]:
        names = [*self.spec.ids, *self.spec.continuous]
        task = functools.partial(fit_one, store=self.store)
        with progress_bar(title, len(names), " columns", show=self.progress) as bar:
            fitted = {}
            for name, found in zip(names, self.executor.map(task, names), strict=True):
                fitted[name] = found
                bar.update(1)
        return fitted

    def _write(self, jobs: list[PartJob], folder: Path, raw: bool = False) -> None:
        task = functools.partial(write_part, store=self.store, folder=folder, raw=raw)
        for part in PARTS:
            (folder / part).mkdir(parents=True)
            mine = [job for job in jobs if job.part == part]
            title = f"raw {part}" if raw else part
            with progress_bar(title, mine[-1].stop, show=self.progress) as bar:
                for written in self.executor.map(task, mine):
                    bar.update(written)


def _chunk_bytes(total: int, tasks: int) -> int:
    """How much of a log one task reads, from the log's size and the machine's memory."""
    least, most = CHUNK_BYTES
    # A chunk is held as text and as columns, a few times its size.
    held = int(machine.memory_limit() * MEMORY_SHARE / tasks / 16)
    return max(least, min(most, held, total // (CHUNKS_PER_WORKER * tasks)))
