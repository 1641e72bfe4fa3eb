"""Raw logs to prepared data: split, fit, encode, shuffle, and write, all or nothing.

One pass over the text stages every column by itself; from then on a thread or worker has one column
in memory at a time. Each step is a list of tasks that read and write files, done by threads or by
Dask's workers (`clusters.py`); here is their order. What a log looks like is `datasets.py`'s;
reading it is `Source`'s.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from merlin_cowclip.plugins._checks import is_whole
from merlin_cowclip.workflows import machine
from merlin_cowclip.workflows.data import clusters
from merlin_cowclip.workflows.data.fitted_workflow import fitted_workflow
from merlin_cowclip.workflows.data.fitting import FieldJob, Fitted, fit
from merlin_cowclip.workflows.data.part_files import PART_ROWS, part_jobs, write_part
from merlin_cowclip.workflows.data.prepare.split import split_rows
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.data.saved_workflow import (
    make_room_for_ids,
    save_workflow,
    vocabularies,
    write_record,
)
from merlin_cowclip.workflows.data.sources.base import TIME, Chunk, Source, unchanged
from merlin_cowclip.workflows.data.sources.csv import CsvSource
from merlin_cowclip.workflows.data.sources.files import expand_paths
from merlin_cowclip.workflows.data.sources.parquet import ParquetSource
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.data.staging import IN_TRAIN, ROWS, StagedChunk, Staging
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing
from merlin_cowclip.workflows.machine import gibibytes
from merlin_cowclip.workflows.progress import progress_bar

if TYPE_CHECKING:
    from tqdm import tqdm

READERS: dict[str, type[Source]] = {"csv": CsvSource, "parquet": ParquetSource}
CHUNK_BYTES = (8 << 20, 256 << 20)  # of a log that one task reads, at least and at most
BUCKET_BYTES = 64  # of memory while a field is fitted, for each of its hash buckets
CHUNKS_PER_WORKER = 4  # so that all end at about the same time


def prepare(
    spec: DatasetSpec,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    seed: int = 0,
    progress: bool = True,
    part_rows: int = PART_ROWS,
    workers: int = 0,
    device: Literal["cpu", "gpu"] = "cpu",
) -> PreparedData:
    """Turn raw logs into training and test data, at ``out``.

    Ids become integers by falling frequency in the training part (3 is the most frequent; 1 is a
    missing id, 2 one that training has not seen, or that is rarer than the spec's threshold);
    numbers are scaled to [0, 1] by the training part's range and clipped to it, a missing one
    counting as 0. The split is exact, and training rows are fully shuffled; both depend on the rows
    and the seed only, never on who does the work.

    Args:
        spec: what the log looks like.
        inputs: files or globs, csv (gzipped if named .gz) or parquet as the spec says.
        out: the folder to make, on this machine; must not exist.
        seed: of the split and the shuffle.
        progress: show progress bars on stderr.
        part_rows: the most rows in one output file.
        workers: processes of a Dask cluster; 0 for threads of this process. A worker that dies is
            replaced, and its tasks are done again. (As with all of Dask's processes, the calling
            script needs an ``if __name__ == "__main__"``.)
        device: where columns are counted and encoded: "cpu", or "gpu" for dask-cuda's workers.

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
    clusters.check_cluster(workers, device)
    _check_memory(spec, clusters.processes(workers, device))
    logs = [READERS[spec.format](spec, path) for path in expand_paths(inputs)]
    for log in logs:
        log.check()
    with all_or_nothing(out) as folder:
        scratch = folder / ".scratch"
        scratch.mkdir()
        with clusters.open_cluster(workers, device, scratch=scratch) as cluster:
            _Preparation(spec, logs, folder, int(seed), progress, part_rows, cluster, device).run()
        shutil.rmtree(scratch, ignore_errors=True)
    return PreparedData.open(out)


def _check_place(out: Path) -> None:
    """Refuse what would become another folder than the one that is meant."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(out)):
        raise UserError(
            f"output folder must be on this machine. Received: {out}, which looks like a URL. Name "
            "a folder, and copy it from there"
        )
    if out.name in ("", ".."):
        raise UserError(f"output folder must have a name of its own. Received: {out}. Name one")


def _check_memory(spec: DatasetSpec, at_once: int) -> None:
    """Refuse hash buckets whose counts the machine could not hold, before any work."""
    largest = sorted((spec.buckets_of(name) for name in spec.ids), reverse=True)[:at_once]
    needed, held = BUCKET_BYTES * sum(largest), machine.memory_limit() * clusters.MEMORY_SHARE
    if needed > held and largest[0] > 1:
        raise UserError(
            "hash_buckets must leave their counts room in memory. Received: "
            f"{' + '.join(f'{number:,}' for number in largest)} for the largest fields, which take "
            f"{gibibytes(needed)} of the {gibibytes(held)} that may be used. "
            "Lower it, or use a machine with more memory"
        )


@dataclass(frozen=True)
class _ChunkJob:
    number: int
    log: Source
    chunk: Chunk
    staging: Staging


def _stage(job: _ChunkJob, advance: Callable[[int], Any] = int) -> StagedChunk:
    return job.staging.stage(job.number, job.log, job.chunk, advance)


class _Preparation:
    """The steps of `prepare`, in order, each reading what the one before wrote."""

    def __init__(
        self,
        spec: DatasetSpec,
        logs: list[Source],
        folder: Path,
        seed: int,
        progress: bool,
        part_rows: int,
        cluster: clusters.Threads | clusters.Workers,
        device: str,
    ) -> None:
        self.spec, self.logs, self.folder = spec, logs, folder
        self.seed, self.progress, self.part_rows = seed, progress, part_rows
        self.cluster, self.device = cluster, device
        self.staging = Staging(folder / ".staging", spec)
        self.replaced: Counter[str] = Counter()
        self.fitted: dict[str, Fitted] = {}
        self.rows: dict[str, int] = {}
        self.positives: dict[str, int] = {}

    def run(self) -> None:
        with unchanged(self.logs):
            self._stage()
        self._split()
        self._fit_and_encode()
        self._save_workflow()
        self._write_parts("train")
        self._write_parts("test")
        shutil.rmtree(self.staging.folder, ignore_errors=True)
        self._write_record()

    def _bar(self, title: str, total: int, unit: str) -> tqdm:
        return progress_bar(title, total, unit, show=self.progress)

    def _stage(self) -> None:
        self.staging.folder.mkdir()
        total = sum(log.state.bytes for log in self.logs)
        size = _chunk_bytes(total, self.cluster.number)
        pieces = [(log, chunk) for log in self.logs for chunk in log.chunks(size)]
        jobs = [
            _ChunkJob(number, log, chunk, self.staging)
            for number, (log, chunk) in enumerate(pieces)
        ]
        rows: Counter[Path] = Counter()
        with self._bar("reading", total, "B") as bar:
            stage: Callable[[_ChunkJob], StagedChunk] = _stage
            if isinstance(self.cluster, clusters.Threads):
                stage = functools.partial(_stage, advance=self.cluster.stoppable(bar.update))
            results = self.cluster.map(stage, jobs)
            for job, staged in zip(jobs, results, strict=True):
                rows[job.log.path] += staged.rows
                self.replaced += staged.replaced
                if not self.cluster.in_process:
                    bar.update(job.chunk.size)
            bar.update(total - bar.n)
        if not sum(rows.values()):
            raise UserError(f"{self.logs[0].path} has no rows. Give a file with rows")

    def _split(self) -> None:
        spec, staging = self.spec, self.staging
        labels = staging.numbers(spec.label, np.int8)
        times = staging.codes(TIME) if spec.split.kind == "time" else None
        parts = split_rows(spec.split, labels, times, seed=self.seed, label=spec.label)
        self.rows, self.positives = parts.rows, parts.positives
        for name, values in (
            (spec.label, labels),
            (IN_TRAIN, parts.in_train),
            (ROWS["train"], parts.train),
            (ROWS["test"], parts.test),
        ):
            staging.store(name, values)

    def _fit_and_encode(self) -> None:
        spec = self.spec
        make_room_for_ids(self.folder)
        names = [*spec.categorical, *spec.lists, *spec.continuous]
        jobs = [FieldJob(name, self.staging, self.folder, self.device) for name in names]
        with self._bar("fitting", len(jobs), " columns") as bar:
            for name, fitted in zip(names, self.cluster.map(fit, jobs), strict=True):
                self.fitted[name] = fitted
                self.staging.discard(name)
                bar.update(1)

    def _save_workflow(self) -> None:
        spec = self.spec
        ranges = {name: (self.fitted[name].low, self.fitted[name].high) for name in spec.continuous}
        files = vocabularies(self.folder, spec.ids)
        workflow = fitted_workflow(spec, self.folder / "workflow", files, ranges)
        save_workflow(workflow, self.folder, (spec.label, *spec.fields))

    def _write_parts(self, part: str) -> None:
        (self.folder / part).mkdir()
        total = self.rows[part]
        jobs = part_jobs(part, total, self.part_rows, self.staging, self.folder)
        with self._bar(part, total, " rows") as bar:
            for written in self.cluster.map(write_part, jobs):
                bar.update(written)

    def _report(self) -> dict[str, Any]:
        """What the data is like, for those who must trust it."""
        fields = {}
        for name in self.spec.fields:
            fields[name] = dict(self.fitted[name].report or {})
            if name in self.spec.continuous:
                fields[name]["not_finite"] = self.replaced[name]  # among the missing ones
        return {"rows": self.rows, "positives": self.positives, "fields": fields}

    def _write_record(self) -> None:
        record = {
            "spec": self.spec.to_dict(),
            "inputs": [{"path": str(log.path), "bytes": log.state.bytes} for log in self.logs],
            "seed": self.seed,
            "rows": self.rows,
            "cardinalities": {name: self.fitted[name].cardinality for name in self.spec.ids},
            "ranges": {
                name: [self.fitted[name].low, self.fitted[name].high]
                for name in self.spec.continuous
            },
            "report": self._report(),
        }
        write_record(self.folder, record)


def _chunk_bytes(total: int, workers: int) -> int:
    """How much of a log one task reads, from the log's size and the machine's memory."""
    least, most = CHUNK_BYTES
    # A chunk is held as text and as columns, a few times its size.
    held = int(machine.memory_limit() * clusters.MEMORY_SHARE / max(workers, 1) / 16)
    return max(least, min(most, held, total // (CHUNKS_PER_WORKER * max(workers, 1))))
