"""Raw logs to prepared data: split, fit, encode, shuffle, and write, all or nothing.

One pass over the text stages every column by itself; from then on one column is in memory at a
time. The statistics are those that NVTabular's operators would compute and are handed to them
(`StatOperator.fit_finalize`), so what is saved is an ordinary fitted `nvtabular.Workflow`. What a
log looks like is `datasets.py`'s; reading it is `raw_logs.py`'s.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.metadata
import json
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from merlin_cowclip.workflows.datasets import DatasetSpec
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.prepared import FORMAT_VERSION, RECORD, PreparedData
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.raw_logs import RawLog, check_logs, expand_inputs

if TYPE_CHECKING:
    import nvtabular as nvt
    from tqdm import tqdm

PART_ROWS = 500_000
ROW_GROUP_ROWS = 65_536
MIN_TRAIN_PARTS = 4  # so that the order of parts can be shuffled, from so many rows on:
MIN_ROWS_TO_PART = 4_000
THREADS = min(4, os.cpu_count() or 1)  # each holds one column, or one part

PADDING, MISSING, UNKNOWN, FIRST_ID = 0, 1, 2, 3  # Categorify's ids


def prepare(
    spec: DatasetSpec,
    inputs: Sequence[str | Path],
    out: str | Path,
    *,
    seed: int = 0,
    progress: bool = True,
    part_rows: int = PART_ROWS,
) -> PreparedData:
    """Turn raw logs into training and test data, at ``out``.

    Ids become integers by falling frequency in the training part (3 is the most frequent; 1 is a
    missing id, 2 one that training has not seen); numbers are scaled to [0, 1] by the training
    part's range and clipped to it, a missing one counting as 0. The split is exact, and training
    rows are fully shuffled; both depend on the rows and the seed only.

    Args:
        spec: what the log looks like.
        inputs: files or globs, csv (gzipped if named .gz) or parquet as the spec says.
        out: the folder to make; must not exist.
        seed: of the split and the shuffle.
        progress: show progress bars on stderr.
        part_rows: the most rows in one output file.

    Returns:
        The folder, opened.

    Raises:
        UserError: bad input; the message names the place and the remedy, and nothing is left
            behind.
    """
    out = Path(out)
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise UserError(f"seed must be an integer of at least 0. Received: {seed!r}")
    if isinstance(part_rows, bool) or not isinstance(part_rows, int) or part_rows < 1:
        raise UserError(f"part_rows must be an integer of at least 1. Received: {part_rows!r}")
    _refuse_existing(out)
    logs = check_logs(spec, expand_inputs(inputs))
    with _all_or_nothing(out) as folder:
        _Preparation(spec, logs, folder, int(seed), progress, part_rows).run()
    return PreparedData.open(out)


def build_workflow(spec: DatasetSpec, folder: str | Path) -> nvt.Workflow:
    """The spec's NVTabular workflow, not fitted; vocabularies will lie in ``folder/categories``.

    `prepare` gives it the statistics of the training part. It can be fitted by NVTabular as well,
    on a GPU or a cluster: ``build_workflow(spec, folder).fit(dataset)``.
    """
    with quiet_imports():
        import nvtabular as nvt
        from merlin.schema import Tags
        from nvtabular import ops

        from merlin_cowclip.workflows import operators
    ids = list(spec.ids) >> operators.IdText() >> operators.EncodeIds(folder)
    target = [Tags.TARGET, Tags.BINARY_CLASSIFICATION]
    nodes = ids + ([spec.label] >> ops.AddMetadata(tags=target))
    if spec.continuous:
        nodes += (
            list(spec.continuous)
            >> ops.FillMissing(0)
            >> operators.UnitRange(out_dtype="float32")
            >> ops.Clip(min_value=0.0, max_value=1.0)
        )
    return nvt.Workflow(nodes)


@dataclass(frozen=True)
class _IdStatistics:
    """What the training part says of one id field."""

    vocabulary: pa.Array  # texts, by falling count, then by text: vocabulary[i] has id i + 3
    counts: np.ndarray  # (len(vocabulary),)
    missing: int
    encode: np.ndarray  # (codes + 1,) int32: staged code → id; the last one is for missing

    @property
    def cardinality(self) -> int:
        return len(self.vocabulary) + FIRST_ID


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
    ) -> None:
        self.spec, self.logs, self.folder = spec, logs, folder
        self.seed, self.progress, self.part_rows = seed, progress, part_rows
        self.staging = _Staging(folder / ".staging", spec)
        # Column files stay mapped while parts are written: pages, not memory of ours.
        self.columns: dict[str, np.ndarray] = {}
        self.offsets: dict[str, np.ndarray] = {}  # of list fields: row i is offsets[i:i+2]
        self.statistics: dict[str, _IdStatistics] = {}
        self.ranges: dict[str, tuple[float, float]] = {}

    def run(self) -> None:
        self._stage()
        self._split()
        self._fit_and_encode()
        self._save_workflow()
        self._write_parts("train", self.train_rows)
        self._write_parts("test", self.test_rows)
        self.columns.clear()
        self.offsets.clear()
        shutil.rmtree(self.staging.folder)
        self._write_record()

    def _bar(self, title: str, total: int, unit: str) -> tqdm:
        from tqdm import tqdm

        return tqdm(
            total=total,
            desc=f"{title:<8}",
            unit=unit,
            unit_scale=unit != " columns",
            disable=not self.progress,
            file=sys.stderr,
        )

    def _stage(self) -> None:
        total = sum(log.path.stat().st_size for log in self.logs)
        with self._bar("reading", total, "B") as bar, self.staging:
            for log in self.logs:
                for batch in log.batches(bar.update):
                    self.staging.append(batch)
            bar.update(total - bar.n)

    def _split(self) -> None:
        """Draw the test rows, exactly as many as the share says; shuffle the training rows."""
        split = self.spec.split
        labels = self.staging.numbers(self.spec.label, np.int8)
        n = len(labels)
        n_test = int(n * split.test + 0.5)
        if not 0 < n_test < n:
            raise UserError(
                f"both parts must have rows. Received: {n} rows with split.test = {split.test}, "
                f"which gives {n_test} test rows. Give more rows or another share"
            )
        random = np.random.default_rng(self.seed)
        rows = np.arange(n, dtype=np.uint32 if n < 2**32 else np.int64)
        if split.kind == "random":
            random.shuffle(rows)
            self.test_rows = np.sort(rows[:n_test])
            self.train_rows = rows[n_test:]
        else:
            self.test_rows = rows[n - n_test :]
            self.train_rows = rows[: n - n_test]
            random.shuffle(self.train_rows)
        self.in_train = np.ones(n, dtype=bool)
        self.in_train[self.test_rows] = False
        for part, mask in (("training", self.in_train), ("test", ~self.in_train)):
            held = np.unique(labels[mask])
            if len(held) < 2:
                raise UserError(
                    f"label must be 0 in some rows and 1 in others, in the {part} part too. "
                    f"Received: only {held[0]} in its {int(mask.sum())} rows, column "
                    f"{self.spec.label!r}. Give more rows, or another seed or split"
                )
        self.columns[self.spec.label] = self.staging.store(self.spec.label, labels)

    def _fit_and_encode(self) -> None:
        with quiet_imports():  # here, not in the threads below
            importlib.import_module("merlin_cowclip.workflows.operators")
        spec = self.spec
        jobs: list[tuple[Callable[[str], None], str]] = [
            *((self._fit_ids, name) for name in spec.categorical),
            *((self._fit_lists, name) for name in spec.lists),
            *((self._fit_numbers, name) for name in spec.continuous),
        ]
        with self._bar("fitting", len(jobs), " columns") as bar:
            for _ in _in_threads(lambda job: job[0](job[1]), jobs):
                bar.update(1)

    def _fit_ids(self, name: str) -> None:
        codes, texts = self.staging.codes(name)
        statistics = _count(codes[self.in_train], texts)
        if not len(statistics.vocabulary):
            raise self._all_missing(name, "ids")
        self.statistics[name] = statistics
        self.columns[name] = self.staging.store(name, statistics.encode[codes])

    def _fit_lists(self, name: str) -> None:
        lengths = self.staging.numbers(name + _LENGTHS, np.int32)
        codes, texts = self.staging.codes(name)
        statistics = _count(codes[np.repeat(self.in_train, lengths)], texts)
        if not len(statistics.vocabulary):
            raise self._all_missing(name, "lists of ids")
        self.statistics[name] = statistics
        self.columns[name] = self.staging.store(name, statistics.encode[codes])
        self.offsets[name] = self.staging.store(
            name + _LENGTHS, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        )

    def _fit_numbers(self, name: str) -> None:
        from merlin_cowclip.workflows.operators import UnitRange

        numbers = self.staging.numbers(name, np.float64)  # NaN where missing
        missing = np.isnan(numbers)
        if missing[self.in_train].all():
            raise self._all_missing(name, "numbers")
        numbers[missing] = 0.0
        train = numbers[self.in_train]
        low, high = float(train.min()), float(train.max())
        self.ranges[name] = (low, high)
        # As FillMissing, UnitRange and Clip do it in the saved workflow, to the bit.
        scale = UnitRange(out_dtype="float32")
        scale.fit_finalize(_range_statistics({name: (low, high)}))
        low, high = scale.mins[name], scale.maxs[name]
        with np.errstate(over="ignore"):
            scaled = ((numbers - low) / (high - low)).astype(np.float32)
        self.columns[name] = self.staging.store(name, np.clip(scaled, 0.0, 1.0))

    def _all_missing(self, name: str, what: str) -> UserError:
        return UserError(
            f"a column of {what} must hold some in the training part. Received: none in column "
            f"{name!r}, in {len(self.train_rows)} rows. Take the column out of the data set's "
            "description"
        )

    def _save_workflow(self) -> None:
        """Hand the statistics to the operators and save; and the counts, for those who ask."""
        with quiet_imports():
            from merlin.schema import ColumnSchema, Schema
            from merlin.schema.io.tensorflow_metadata import TensorflowMetadata

            from merlin_cowclip.workflows.operators import EncodeIds, UnitRange
        spec = self.spec
        home = self.folder / "workflow"
        (home / "categories").mkdir(parents=True)
        (self.folder / "counts").mkdir()
        vocabularies = {}
        for name, statistics in self.statistics.items():
            vocabularies[name] = _write_vocabulary(home / "categories", name, statistics)
            _write_counts(self.folder / "counts", name, statistics)
        workflow = build_workflow(spec, home)
        for node in _nodes(workflow.output_node):
            if isinstance(node.op, EncodeIds):
                node.op.fit_finalize(vocabularies)
                node.op.fitted = True
            elif isinstance(node.op, UnitRange):
                node.op.fit_finalize(_range_statistics(self.ranges))
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

    def _write_parts(self, part: str, rows: np.ndarray) -> None:
        folder = self.folder / part
        folder.mkdir()
        files = -(-len(rows) // self.part_rows)
        if part == "train" and len(rows) >= MIN_ROWS_TO_PART:
            files = max(files, MIN_TRAIN_PARTS)
        pieces = np.array_split(rows, files)
        group = max(1, min(ROW_GROUP_ROWS, -(-len(pieces[0]) // 4)))  # several to a file

        def write(numbered: tuple[int, np.ndarray]) -> int:
            i, piece = numbered
            table = pa.table({name: self._gather(name, piece) for name in self._order})
            pq.write_table(table, folder / f"part-{i:05d}.parquet", row_group_size=group)
            return len(piece)

        with self._bar(f"{part}", len(rows), " rows") as bar:
            for written in _in_threads(write, enumerate(pieces)):
                bar.update(written)

    @property
    def _order(self) -> tuple[str, ...]:
        return (self.spec.label, *self.spec.fields)

    def _gather(self, name: str, rows: np.ndarray) -> pa.Array:
        column = self.columns[name]
        if name in self.spec.continuous:
            return pa.array(column[rows])
        if name not in self.spec.lists:
            # Merlin's own type for ids and labels; on disk the small ones stay small.
            return pa.array(column[rows].astype(np.int64))
        starts = self.offsets[name][rows]
        lengths = self.offsets[name][rows.astype(np.int64) + 1] - starts
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        offsets = np.concatenate([[0], ends]).astype(np.int32)
        return pa.ListArray.from_arrays(offsets, column[places].astype(np.int64))

    def _write_record(self) -> None:
        record = {
            "format": FORMAT_VERSION,
            "spec": self.spec.to_dict(),
            "inputs": [
                {"path": str(log.path), "bytes": log.path.stat().st_size} for log in self.logs
            ],
            "seed": self.seed,
            "rows": {"train": len(self.train_rows), "test": len(self.test_rows)},
            "cardinalities": {name: self.statistics[name].cardinality for name in self.spec.ids},
            "ranges": {name: list(self.ranges[name]) for name in self.spec.continuous},
            "versions": _versions(),
        }
        text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        (self.folder / RECORD).write_text(text, encoding="utf-8")


_LENGTHS = "\0lengths"  # no column can be called so


class _Staging:
    """One file per column, appended to batch by batch, read back whole."""

    def __init__(self, folder: Path, spec: DatasetSpec) -> None:
        self.folder, self.spec = folder, spec
        names = [spec.label, *spec.fields, *(name + _LENGTHS for name in spec.lists)]
        self.files = {name: folder / f"{i}.arrows" for i, name in enumerate(names)}
        self.writers: dict[str, pa.RecordBatchStreamWriter] = {}

    def __enter__(self) -> _Staging:
        self.folder.mkdir()
        return self

    def __exit__(self, *exception: Any) -> None:
        for writer in self.writers.values():
            writer.close()

    def append(self, batch: pa.RecordBatch) -> None:
        """Add the rows of one batch, as `RawLog.batches` gives them."""
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name in self.spec.lists:
                self._append(name + _LENGTHS, pc.list_value_length(column))
                self._append(name, column.flatten().dictionary_encode())
            else:
                self._append(name, column)

    def _append(self, name: str, column: pa.Array) -> None:
        batch = pa.RecordBatch.from_arrays([column], ["x"])
        if name not in self.writers:
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            self.writers[name] = pa.ipc.new_stream(
                str(self.files[name]), batch.schema, options=options
            )
        self.writers[name].write_batch(batch)

    def _read(self, name: str) -> pa.ChunkedArray:
        with pa.OSFile(str(self.files[name])) as file, pa.ipc.open_stream(file) as stream:
            column = stream.read_all().column(0)
        self.files[name].unlink()  # read once
        return column

    def numbers(self, name: str, dtype: type) -> np.ndarray:
        """A column of numbers, NaN where missing."""
        chunks = self._read(name).chunks
        return np.concatenate([c.to_numpy(zero_copy_only=False) for c in chunks]).astype(
            dtype, copy=False
        )

    def codes(self, name: str) -> tuple[np.ndarray, pa.Array]:
        """A column of ids as int32 codes into distinct texts; a missing one is -1."""
        column = self._read(name).unify_dictionaries()
        codes = np.concatenate(
            [c.indices.fill_null(-1).to_numpy(zero_copy_only=False) for c in column.chunks]
        )
        return codes, column.chunk(0).dictionary

    def store(self, name: str, values: np.ndarray) -> np.ndarray:
        """Put a finished column on disk and give it back, mapped."""
        if not len(values):
            return values
        path = self.files[name].with_suffix(".npy")
        np.save(path, values)
        return np.load(path, mmap_mode="r")


def _count(codes: np.ndarray, texts: pa.Array) -> _IdStatistics:
    """Count the training part's codes (-1: missing), and rank them by falling count."""
    counts = np.bincount(codes + 1, minlength=len(texts) + 1)
    missing, counts = int(counts[0]), counts[1:]
    by_text = pc.sort_indices(texts).to_numpy()
    order = by_text[np.argsort(-counts[by_text], kind="stable")]  # ties: by text
    order = order[: np.count_nonzero(counts)]  # the rest occurs in the test part only
    encode = np.full(len(texts) + 1, UNKNOWN, dtype=np.int32)
    encode[order] = np.arange(FIRST_ID, FIRST_ID + len(order), dtype=np.int32)
    encode[-1] = MISSING
    return _IdStatistics(texts.take(pa.array(order)), counts[order], missing, encode)


def _range_statistics(ranges: dict[str, tuple[float, float]]) -> dict[str, pd.Series]:
    """What NormalizeMinMax.fit computes: two series by column."""
    return {
        "mins": pd.Series({name: low for name, (low, _) in ranges.items()}, dtype="float64"),
        "maxs": pd.Series({name: high for name, (_, high) in ranges.items()}, dtype="float64"),
    }


def _write_vocabulary(folder: Path, name: str, statistics: _IdStatistics) -> str:
    """``unique.*`` and ``meta.*``, as Categorify writes them."""
    path = folder / f"unique.{name}.parquet"
    index = pd.RangeIndex(FIRST_ID, statistics.cardinality)
    pd.DataFrame(
        {name: statistics.vocabulary.to_pandas().to_numpy(), f"{name}_size": statistics.counts},
        index=index,
    ).to_parquet(path, compression=None)
    pd.DataFrame(
        {
            "kind": ["pad", "null", "oov", "unique"],
            "offset": [PADDING, MISSING, UNKNOWN, FIRST_ID],
            "num_indices": [1, 1, 1, len(statistics.vocabulary)],
            "num_observed": [0, statistics.missing, 0, int(statistics.counts.sum())],
        }
    ).to_parquet(folder / f"meta.{name}.parquet")
    return str(path)


def _write_counts(folder: Path, name: str, statistics: _IdStatistics) -> None:
    nothing = pa.nulls(FIRST_ID, pa.string())
    counts = np.concatenate([[0, statistics.missing, 0], statistics.counts]).astype(np.int64)
    table = pa.table(
        {
            "id": np.arange(statistics.cardinality, dtype=np.int64),
            "raw": pa.concat_arrays([nothing, statistics.vocabulary]),
            "count": counts,
        }
    )
    pq.write_table(table, folder / f"{name}.parquet")


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for parent in node.parents_with_dependencies:
        yield from _nodes(parent)


def _in_threads(work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Results as they come in order; at the first failure nothing new is begun."""
    pool = ThreadPoolExecutor(THREADS)
    try:
        yield from pool.map(work, items)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _refuse_existing(out: Path) -> None:
    if os.path.lexists(out):
        raise UserError(
            f"output folder must not exist. Received: {out}. Name another, or remove it first"
        )


@contextlib.contextmanager
def _all_or_nothing(out: Path) -> Iterator[Path]:
    """A hidden folder beside ``out``, renamed to it at the end, or removed on any failure."""
    out = out.absolute()
    home = next(parent for parent in out.parents if parent.exists())
    folder = home / f".{out.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        raise UserError(
            f"output folder must be in a folder that can be written. Received: {out}: "
            f"{error.strerror}. Name another"
        ) from None
    try:
        yield folder
        _refuse_existing(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        os.rename(folder, out)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(
            f"output needs disk space. Received: none left for {out}. Free some, or name a folder "
            "on another disk"
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _versions() -> dict[str, str]:
    versions = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in ("merlin-cowclip", "nvtabular", "merlin-core", "pandas", "pyarrow", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
