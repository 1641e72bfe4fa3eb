"""Raw logs to prepared data: split, fit, encode, shuffle, and write, all or nothing.

One pass over the text stages every column by itself; from then on a thread or worker has one column
in memory at a time. Each step is a list of tasks that read and write files, done by threads or by
Dask's workers (`clusters.py`). The statistics are those that NVTabular's operators would compute,
and are handed to them (`StatOperator.fit_finalize`): what is saved is an ordinary fitted
`nvtabular.Workflow`. What a log looks like is `datasets.py`'s; reading it is `RawLog`'s.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.plugins.checks import is_whole
from merlin_cowclip.workflows import machine
from merlin_cowclip.workflows.data import clusters
from merlin_cowclip.workflows.data.arrow_ids import note_on_floats
from merlin_cowclip.workflows.data.counts import write_counts
from merlin_cowclip.workflows.data.csv_logs import CsvLog
from merlin_cowclip.workflows.data.datasets import DatasetSpec
from merlin_cowclip.workflows.data.encoding import (
    MISSING,
    UNKNOWN,
    count_ids,
    encode_ids,
    unit_range,
    widened,
)
from merlin_cowclip.workflows.data.inputs import expand_inputs
from merlin_cowclip.workflows.data.parquet_logs import ParquetLog
from merlin_cowclip.workflows.data.prepared import PreparedData, write_record
from merlin_cowclip.workflows.data.raw_logs import (
    TIME,
    Chunk,
    RawLog,
    check_logs,
    parse_number,
    unchanged,
)
from merlin_cowclip.workflows.data.staging import IN_TRAIN, LENGTHS, ROWS, StagedChunk, Staging
from merlin_cowclip.workflows.data.vocabularies import vocabulary_path, write_vocabulary
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import all_or_nothing, package_versions, refuse_existing
from merlin_cowclip.workflows.machine import gibibytes
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt
    from tqdm import tqdm

READERS: dict[str, type[RawLog]] = {"csv": CsvLog, "parquet": ParquetLog}
PART_ROWS = 500_000
ROW_GROUP_ROWS = 65_536
MIN_TRAIN_PARTS = 4  # so that the order of parts can be shuffled, from so many rows on:
MIN_ROWS_TO_PART = 4_000
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
    logs = [READERS[spec.format](spec, path) for path in expand_inputs(inputs)]
    check_logs(logs)
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


def build_workflow(spec: DatasetSpec, folder: str | Path) -> nvt.Workflow:
    """The spec's NVTabular workflow, not fitted; vocabularies will lie in ``folder/categories``.

    `prepare` gives it the statistics of the training part. It can be fitted by NVTabular as well,
    on a GPU or a cluster: ``build_workflow(spec, folder).fit(dataset)``.
    """
    with quiet_imports():
        import nvtabular as nvt
        from merlin.schema import Tags
        from nvtabular import ops

        from merlin_cowclip.workflows.data import operators
    rare: dict[str, Any] = {}
    if any(spec.threshold_of(name) > 1 for name in spec.ids):
        rare["freq_threshold"] = {name: spec.threshold_of(name) for name in spec.ids}
    if any(spec.buckets_of(name) > 1 for name in spec.ids):
        rare["num_buckets"] = {name: spec.buckets_of(name) for name in spec.ids}
    text = list(spec.ids) >> operators.IdText(lists=spec.lists)
    ids = text >> operators.EncodeIds(folder, lists=spec.lists, **rare)
    target = [Tags.TARGET, Tags.BINARY_CLASSIFICATION]
    nodes = ids + ([spec.label] >> ops.AddMetadata(tags=target))
    if spec.continuous:
        numbers: Any = list(spec.continuous)
        if spec.non_finite == "missing":
            numbers = numbers >> operators.NonFiniteToMissing()
        nodes += (
            numbers
            >> ops.FillMissing(0)
            >> operators.UnitRange(out_dtype="float32")
            >> ops.Clip(min_value=0.0, max_value=1.0)
        )
    return nvt.Workflow(nodes)


# Tasks: functions of what can be sent to another process. Each writes files under names of its own,
# and the same ones if it is done again.


@dataclass(frozen=True)
class _ChunkJob:
    number: int
    log: RawLog
    chunk: Chunk
    staging: Staging


def _stage(job: _ChunkJob, advance: Callable[[int], Any] = int) -> StagedChunk:
    return job.staging.stage(job.number, job.log, job.chunk, advance)


@dataclass(frozen=True)
class _FieldJob:
    name: str
    staging: Staging
    folder: Path
    device: str


@dataclass(frozen=True)
class _Fitted:
    """What is known of a field, but for what lies in files."""

    cardinality: int = 0
    low: float = 0.0
    high: float = 0.0
    report: dict[str, Any] | None = None


def _fit(job: _FieldJob) -> _Fitted:
    spec = job.staging.spec
    return (_fit_numbers if job.name in spec.continuous else _fit_ids)(job)


def _fit_ids(job: _FieldJob) -> _Fitted:
    name, staging, spec = job.name, job.staging, job.staging.spec
    in_train = np.asarray(staging.load(IN_TRAIN))
    if name in spec.lists:
        lengths = staging.numbers(name + LENGTHS, np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        staging.store(name + LENGTHS, offsets)
        in_train = np.repeat(in_train, lengths)
    codes, texts = staging.codes(name)
    threshold = spec.threshold_of(name)
    clusters.stop_if_unwanted()
    statistics = count_ids(
        codes,
        texts,
        in_train,
        threshold=threshold,
        buckets=spec.buckets_of(name),
        device=job.device,
    )
    if not statistics.distinct:
        raise _all_missing(name, "lists of ids" if name in spec.lists else "ids", in_train)
    if not len(statistics.vocabulary):
        raise UserError(
            f"freq_threshold must leave ids of their own. Received: {threshold} for {name!r}, "
            "whose most frequent id occurs less often. Lower it, or take the column out"
        )
    clusters.stop_if_unwanted()
    ids = encode_ids(codes, statistics.encode, job.device)
    staging.store(name, ids)
    clusters.stop_if_unwanted()
    write_vocabulary(job.folder / "workflow" / "categories", name, statistics)
    write_counts(job.folder / "counts", name, statistics.by_id, statistics.vocabulary)
    test = ids[~in_train]
    report: dict[str, Any] = {
        "occurrences": int(in_train.sum()),
        "distinct": statistics.distinct,
        "missing": statistics.missing,
        "below_threshold": int(statistics.unknown.sum()),
        "test_occurrences": len(test),
        "test_missing": int(np.count_nonzero(test == MISSING)),
        "test_unknown": int(np.count_nonzero((test >= UNKNOWN) & (test < statistics.first_id))),
    }
    note = note_on_floats(texts, read_by_pandas=spec.format == "csv")
    if note:
        report["note"] = note
    return _Fitted(cardinality=statistics.cardinality, report=report)


def _fit_numbers(job: _FieldJob) -> _Fitted:
    name, staging = job.name, job.staging
    numbers = staging.numbers(name, np.float64)  # NaN where missing
    clusters.stop_if_unwanted()
    in_train = np.asarray(staging.load(IN_TRAIN))
    train = numbers[in_train]
    held = train[~np.isnan(train)]
    if not len(held):
        raise _all_missing(name, "numbers", in_train)
    missing = len(train) - len(held)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = float(held.mean())
    if not np.isfinite(mean):  # the sum was too large, not the mean
        mean = float((held / len(held)).sum())
    low, high = float(held.min()), float(held.max())
    if missing:  # counts as 0
        low, high = min(low, 0.0), max(high, 0.0)
    scaled = unit_range(numbers, *widened(low, high), job.device)
    staging.store(name, scaled)
    test = numbers[~in_train]
    with np.errstate(invalid="ignore"):
        beyond = int(np.count_nonzero((test < low) | (test > high)))
    report = {
        "occurrences": len(train),
        "missing": missing,
        "min": float(held.min()),
        "max": float(held.max()),
        "mean": mean,
        "test_occurrences": len(test),
        "test_missing": int(np.count_nonzero(np.isnan(test))),
        "test_out_of_range": beyond,
    }
    return _Fitted(low=low, high=high, report=report)


def _all_missing(name: str, what: str, in_train: np.ndarray) -> UserError:
    return UserError(
        f"a column of {what} must hold some in the training part. Received: none in column "
        f"{name!r}, in {int(in_train.sum())} rows. Take the column out of the data set's "
        "description"
    )


@dataclass(frozen=True)
class _PartJob:
    part: str  # "train" or "test"
    number: int
    start: int  # the rows from here
    stop: int  # to here, in the order of the part
    group: int  # rows of a row group
    staging: Staging
    folder: Path


def _write_part(job: _PartJob) -> int:
    """Write one output file; returns its rows."""
    spec, staging = job.staging.spec, job.staging
    rows = np.asarray(staging.load(ROWS[job.part])[job.start : job.stop])
    names = (spec.label, *spec.fields)
    table = pa.table({name: _gather(staging, name, rows) for name in names})
    path = job.folder / job.part / f"part-{job.number:05d}.parquet"
    # Not beside it: of a worker that dies meanwhile, nothing stays in the finished folder.
    partial = staging.folder / f"{job.part}-{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        pq.write_table(table, partial, row_group_size=job.group)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return len(rows)


def _gather(staging: Staging, name: str, rows: np.ndarray) -> pa.Array:
    clusters.stop_if_unwanted()
    spec, column = staging.spec, staging.load(name)
    if name in spec.continuous:
        return pa.array(column[rows])
    if name not in spec.lists:
        # Merlin's own type for ids and labels; on disk the small ones stay small.
        return pa.array(column[rows].astype(np.int64))
    all_offsets = staging.load(name + LENGTHS)  # row i is offsets[i:i+2]
    starts = all_offsets[rows]
    lengths = all_offsets[rows.astype(np.int64) + 1] - starts
    ends = np.cumsum(lengths)
    places = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, column[places].astype(np.int64))


class _Preparation:
    """The steps of `prepare`, in order, each reading what the one before wrote."""

    def __init__(
        self,
        spec: DatasetSpec,
        logs: list[RawLog],
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
        self.fitted: dict[str, _Fitted] = {}
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
        for log in self.logs:
            if not rows[log.path]:
                raise UserError(
                    f"input file must not be empty. Received: {log.path}, without a row"
                )

    def _split(self) -> None:
        """Choose the test rows; shuffle the training rows."""
        split = self.spec.split
        labels = self.staging.numbers(self.spec.label, np.int8)
        n = len(labels)
        random = np.random.default_rng(self.seed)
        rows = np.arange(n, dtype=np.uint32 if n < 2**32 else np.int64)
        if split.kind == "time":
            in_train = ~self._latest(n)
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
        for part, mask in (("train", in_train), ("test", ~in_train)):
            counts = np.bincount(labels[mask], minlength=2)
            if not counts.all():
                raise UserError(
                    "label must be 0 in some rows and 1 in others, in the "
                    f"{'training' if part == 'train' else 'test'} part too. "
                    f"Received: only {counts.argmax()} in its {int(mask.sum())} rows, column "
                    f"{self.spec.label!r}. Give more rows, or another seed or split"
                )
            self.rows[part], self.positives[part] = int(mask.sum()), int(counts[1])
        for name, values in (
            (self.spec.label, labels),
            (IN_TRAIN, in_train),
            (ROWS["train"], train_rows),
            (ROWS["test"], test_rows),
        ):
            self.staging.store(name, values)

    def _latest(self, n: int) -> np.ndarray:
        """n, whether a row belongs to the latest times, as near to the share as they allow."""
        split = self.spec.split
        codes, texts = self.staging.codes(TIME)
        if (codes < 0).any():
            raise UserError(
                f"every row must have a time. Received: {int((codes < 0).sum())} of {n} rows "
                f"without one, column {split.column!r}. Fill it, or split otherwise"
            )
        times = texts.to_numpy(zero_copy_only=False)
        numbers = [parse_number(text) for text in times]
        words = [text for text, n in zip(times, numbers, strict=True) if n is None or n != n]
        if words and len(words) < len(times):
            raise UserError(
                "times must be numbers, or all of them text that sorts by time. Received: numbers "
                f"and {words[0]!r} in column {split.column!r}. Correct it or remove the row"
            )
        rank = times.astype(str) if words else np.array(numbers, np.float64)
        held, place = np.unique(rank, return_inverse=True)
        counts = np.bincount(place[codes], minlength=len(held))
        later = np.cumsum(counts[::-1])[::-1]  # rows from each time on
        if len(held) < 2:
            raise UserError(
                f"a split by time needs two times at least. Received: {times[0]!r} in all {n} "
                f"rows, column {split.column!r}. Choose another column or split"
            )
        first = 1 + int(np.argmin(np.abs(later[1:] - split.test * n)))
        return place[codes] >= first

    def _fit_and_encode(self) -> None:
        spec = self.spec
        (self.folder / "workflow" / "categories").mkdir(parents=True)
        (self.folder / "counts").mkdir()
        names = [*spec.categorical, *spec.lists, *spec.continuous]
        jobs = [_FieldJob(name, self.staging, self.folder, self.device) for name in names]
        with self._bar("fitting", len(jobs), " columns") as bar:
            for name, fitted in zip(names, self.cluster.map(_fit, jobs), strict=True):
                self.fitted[name] = fitted
                self.staging.discard(name)
                bar.update(1)

    def _save_workflow(self) -> None:
        """Hand the statistics to the operators and save; and the counts, for those who ask."""
        with quiet_imports():
            from merlin.dag import Graph
            from merlin.schema import ColumnSchema, Schema
            from merlin.schema.io.tensorflow_metadata import TensorflowMetadata

            from merlin_cowclip.workflows.data.operators import EncodeIds, UnitRange
        spec = self.spec
        home = self.folder / "workflow"
        vocabularies = {name: str(vocabulary_path(home / "categories", name)) for name in spec.ids}
        ranges = {name: (self.fitted[name].low, self.fitted[name].high) for name in spec.continuous}
        workflow = build_workflow(spec, home)
        statistics = {EncodeIds: vocabularies, UnitRange: _range_statistics(ranges)}
        for kind, found in statistics.items():
            for node in Graph.get_nodes_by_op_type([workflow.output_node], kind):
                node.op.fit_finalize(found)
                node.op.fitted = True
        workflow.fit_schema(
            Schema(
                [
                    ColumnSchema(spec.label, dtype="int64"),
                    *(ColumnSchema(name, dtype="float64") for name in spec.continuous),
                    *(ColumnSchema(name, dtype="str") for name in spec.categorical),
                    *(
                        ColumnSchema(name, dtype="str", is_list=True, is_ragged=True)
                        for name in spec.lists
                    ),
                ]
            )
        )
        workflow.save(str(home))
        columns = workflow.output_schema
        proto = TensorflowMetadata.from_merlin_schema(
            Schema([columns[name] for name in (spec.label, *spec.fields)])
        )
        proto.to_proto_text_file(str(self.folder))
        # So that merlin.io.Dataset finds the schema by itself, from train/ and test/.
        (self.folder / ".merlin").mkdir()
        proto.to_json_file(str(self.folder / ".merlin"))

    def _write_parts(self, part: str) -> None:
        (self.folder / part).mkdir()
        total = self.rows[part]
        files = -(-total // self.part_rows)
        if part == "train" and total >= MIN_ROWS_TO_PART:
            files = max(files, MIN_TRAIN_PARTS)
        cuts = [total * i // files for i in range(files + 1)]
        group = max(1, min(ROW_GROUP_ROWS, -(-cuts[1] // 4)))  # several to a file
        jobs = [
            _PartJob(part, i, cuts[i], cuts[i + 1], group, self.staging, self.folder)
            for i in range(files)
        ]
        with self._bar(part, total, " rows") as bar:
            for written in self.cluster.map(_write_part, jobs):
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
            "versions": package_versions(),
        }
        write_record(self.folder, record)


def _chunk_bytes(total: int, workers: int) -> int:
    """How much of a log one task reads, from the log's size and the machine's memory."""
    least, most = CHUNK_BYTES
    # A chunk is held as text and as columns, a few times its size.
    held = int(machine.memory_limit() * clusters.MEMORY_SHARE / max(workers, 1) / 16)
    return max(least, min(most, held, total // (CHUNKS_PER_WORKER * max(workers, 1))))


def _range_statistics(ranges: dict[str, tuple[float, float]]) -> dict[str, pd.Series]:
    """What NormalizeMinMax.fit computes: two series by column."""
    return {
        "mins": pd.Series({name: low for name, (low, _) in ranges.items()}, dtype="float64"),
        "maxs": pd.Series({name: high for name, (_, high) in ranges.items()}, dtype="float64"),
    }
