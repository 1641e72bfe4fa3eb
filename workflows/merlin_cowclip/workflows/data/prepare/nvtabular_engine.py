# SPDX-License-Identifier: Apache-2.0
"""`prepare --engine nvtabular`: NVTabular on Dask, on a cluster, with CPUs or GPUs.

Workers read the input, split it, count ids (`Categorify`), encode, shuffle and write. Rows pass
from step to step in files of the output folder, which all workers see, never through the client.
A task may run again: it writes the same files.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.encoder import Encoder
from merlin_cowclip.workflows.data.prepare import fit, shuffle, split
from merlin_cowclip.workflows.data.prepare.columns import mixed_times
from merlin_cowclip.workflows.data.prepare.executor import connect, run_tasks
from merlin_cowclip.workflows.data.prepare.nvt_workflow import save_fitted_workflow
from merlin_cowclip.workflows.data.prepared_data import PARTS, WORKFLOW
from merlin_cowclip.workflows.data.sources.base import TIME, Chunk, Source
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import MISSING, Vocabulary, vocabulary_file
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.folders import replacing
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops

NOT_OFFERED = ("hash_only", "shared", "standardize", "quantiles")
CHUNKS = 64  # of the input, each of at least and at most so many bytes:
CHUNK_BYTES = (8 << 20, 64 << 20)
CELLS = 1 << 24  # rows × columns of a file between two steps
SKETCH = 1024  # times that stand for those of a chunk, if it has more
SPLIT_IDS = 1 << 25  # ids of a field, distinct by batch, that one task merges

File = tuple[str, str, int]  # between two steps: part, name, rows
Tallies = list[dict[str, Any]]  # of columns, by part


def prepare_on_dask(
    spec: DatasetSpec,
    sources_by_part: Mapping[str, Sequence[Source]],
    folder: Path,
    *,
    seed: int = 0,
    scheduler: str | None = None,
    workers: int = 0,
    device: str = "cpu",
    part_rows: int = shuffle.PART_ROWS,
    progress: bool = True,
) -> dict[str, Any]:
    """Write parts, workflow, schema and counts into ``folder``; returns what the record says.

    Rows of training sources are divided by about the spec's shares. Files have about ``part_rows``
    rows. `connect` describes ``scheduler``, ``workers`` and ``device``. Raises
    UserError for bad input.
    """
    if spec.split.kind == "sequential":
        raise UserError(
            "engine 'nvtabular' reads files at the same time and has no sequential split. Split by "
            "time or at random, or give files"
        )
    if refused := [key for key in NOT_OFFERED if getattr(spec, key)]:
        raise UserError(
            f"engine 'nvtabular' does not offer {quoted(refused)} of the specification. Leave them "
            "out, or the engine"
        )
    tasks = _Tasks(spec, folder, seed, device)
    for home in (*PARTS, ".scratch/encoded", *(f".scratch/{part}" for part in PARTS)):
        (folder / home).mkdir(parents=True)
    with connect(tasks.scratch, scheduler, workers, device) as client:
        run = functools.partial(run_tasks, client, progress=progress)
        files, totals = _read_all(tasks, run, sources_by_part)
        rows, positives = (
            {part: int(totals.at[(part, spec.label), key]) for part in PARTS}
            for key in ("occurrences", "total")
        )
        split.check_labels(spec, rows, positives)
        ranges = {}
        for name in spec.fields:
            of = totals.loc[("train", name)]
            if of["missing"] == of["occurrences"]:
                raise fit.all_missing(name, int(of["missing"]))
            if name in spec.continuous:
                ends = float(of["min"]), float(of["max"]), bool(of["missing"])
                ranges[name] = fit.checked_range(spec, name, *ends)
        jobs = _count_ids(client, tasks, files, totals, progress)
        reports = dict(zip(spec.ids, run("ranking", tasks.rank, jobs), strict=True))
        run("workflow", save_fitted_workflow, [(spec, folder, ranges)])
        outputs = {part: shuffle.part_jobs(part, rows[part], part_rows) for part in PARTS}
        buckets = {**dict.fromkeys(PARTS, 1), "train": len(outputs["train"])}
        to_encode = [(i, name, ranges, buckets[part]) for i, (part, name, _) in enumerate(files)]
        run("encoding", tasks.encode, to_encode)
        to_write: list[tuple[shuffle.PartJob, int, Any]] = []
        for part, parquet in outputs.items():
            of = np.array([i for i, file in enumerate(files) if file[0] == part], int)
            if part == "train":
                to_write += [(job, number, of) for number, job in enumerate(parquet)]
            elif parquet:
                divided = np.array_split(of, len(parquet))
                to_write += [(job, 0, some) for job, some in zip(parquet, divided, strict=True)]
        run("writing", tasks.write, to_write)
    shutil.rmtree(tasks.scratch, ignore_errors=True)
    encoder = Encoder.open(folder / WORKFLOW, spec, ranges)
    for name in spec.continuous:
        of = totals.loc[("train", name)]
        mean = float(of["total"] / (of["occurrences"] - of["missing"]))
        reports[name] = {key: int(of[key]) for key in ("occurrences", "missing", "not_finite")}
        reports[name] |= {"min": float(of["min"]), "max": float(of["max"]), "mean": mean}
    return {
        "rows": rows,
        "boundaries": _boundaries(totals, rows) if spec.split.kind == "time" else {},
        "cardinalities": {n: of.cardinality for n, of in encoder.vocabularies.items()},
        "ranges": {name: list(ends) for name, ends in ranges.items()},
        "report": {
            "rows": rows,
            "positives": positives,
            "fields": {name: reports[name] for name in spec.fields},
        },
    }


@dataclass(frozen=True)
class _Tasks:
    """What workers do."""

    spec: DatasetSpec
    folder: Path
    seed: int
    device: str

    @property
    def scratch(self) -> Path:
        """The folder of files between two steps."""
        return self.folder / ".scratch"

    def times(self, source: Source, chunk: Chunk) -> pd.Series[int]:
        """Rows of a chunk by time, or `SKETCH` times and the rows from each to the next."""
        spec, source = copy.copy(source.spec), copy.copy(source)
        vars(spec).update(categorical=(), continuous=(), lists=())  # which are not read
        vars(source).update(spec=spec)
        times = [
            split.as_numbers(batch.column(TIME)) for batch in source.batches(chunk) if len(batch)
        ]
        if not times:
            return pd.Series(dtype=int)
        distinct, counts = np.unique(np.concatenate(times), return_counts=True)
        starts = np.unique(np.linspace(0, len(distinct), SKETCH, endpoint=False).astype(int))
        return pd.Series(np.add.reduceat(counts, starts), distinct[starts])

    def read(
        self, number: int, part: str, source: Source, chunk: Chunk, cuts: Mapping[str, Any]
    ) -> tuple[list[File], pd.DataFrame]:
        """Read a chunk into files by part; ``cuts`` divide training rows."""
        files: list[File] = []
        tallies: Tallies = []
        replaced, schema = Counter[str](), raw_part_schema(self.spec)
        random = np.random.default_rng([self.seed, number, 1])
        pending: dict[str, list[pa.Table]] = {part: [] for part in PARTS}
        for batch in itertools.chain(source.batches(chunk, replaced=replaced), [None]):
            if batch:
                parts = np.full(len(batch), PARTS.index(part))
                if part == "train":
                    places = random.random(len(batch))
                    if self.spec.split.kind == "time":
                        places = split.as_numbers(batch.column(TIME))
                    parts = split.parts_of(places, cuts)
                for i in np.unique(parts):
                    table = pa.Table.from_batches([batch]).filter(pa.array(parts == i))
                    tallies += _tally(self.spec, PARTS[i], table)
                    columns = [table[field.name].cast(field.type) for field in schema]
                    pending[PARTS[i]].append(pa.table(columns, schema=schema))
            for name, tables in pending.items():
                rows = sum(map(len, tables))
                if rows > (CELLS // len(schema) if batch else 0):
                    files.append((name, f"{name}/{number:06d}-{len(files):03d}.parquet", rows))
                    with replacing(self.scratch / files[-1][1]) as partial:
                        pq.write_table(pa.concat_tables(tables), partial, row_group_size=rows)
                    tables.clear()
        tallies += [{"part": "train", "column": c, "not_finite": n} for c, n in replaced.items()]
        return files, _summed(pd.DataFrame(tallies))

    def rank(self, name: str, path: str, missing: int) -> dict[str, Any]:
        """Order the ids that NVTabular counted in a field, and write its vocabulary and counts."""
        vocabulary = Vocabulary.empty(self.spec.buckets_of(name))
        counts = np.zeros(vocabulary.first, np.int64)
        counts[MISSING] = missing
        column = name.replace('"', '""')
        table = (
            f'(select "{column}"::varchar as text, "{column}_size" as n, 0 as field '
            f'from read_parquet($source) where "{column}" is not null)'
        )
        files = Path(path, "*.parquet") if Path(path).is_dir() else Path(path)
        config: Any = {"threads": 1, "temp_directory": str(self.scratch / f"{name}.duckdb")}
        with contextlib.closing(duckdb.connect(config=config)) as database:
            given = {name: counts}, vocabulary, database, files, table, self.folder
            return fit.rank_ids(name, self.spec, *given)[name]

    def encode(self, number: int, name: str, ranges: Mapping[str, Any], buckets: int) -> None:
        """Encode a file into batches by random bucket."""
        spec, part = self.spec, name.split("/")[0]
        raw = pq.ParquetFile(self.scratch / name).read()
        encoder = Encoder.open(self.folder / WORKFLOW, spec, ranges)
        columns = self.ids_on_gpu(raw) if self.device == "gpu" else {}
        left = [field for field in spec.fields if field not in columns]
        columns |= {field: encoder.encode(field, raw[field].combine_chunks()) for field in left}
        rows, cuts = np.arange(len(raw)), np.linspace(0, 2.0**64, buckets + 1)[1:-1]
        keys = rows.astype(np.uint64) + np.uint64(number << 32)  # in their order
        if part == "train":
            random = np.random.default_rng([self.seed, number, 2])
            keys = random.integers(2**64, size=len(raw), dtype=np.uint64)
        encoded = {field: columns[field] for field in spec.fields}
        encoded = {spec.label: raw[spec.label].combine_chunks(), **encoded}
        with replacing(self.scratch / f"encoded/{number:06d}.arrow") as partial:
            shuffle.write_run(partial, encoded, rows, keys, cuts.astype(np.uint64))

    def ids_on_gpu(self, raw: pa.Table) -> dict[str, pa.Array]:
        """The fields that stock Categorify encodes right: not lists, hashed ids, nulls only."""
        import cudf  # type: ignore[import-not-found]

        spec, ids = self.spec, dict[str, pa.Array]()
        files = {n: vocabulary_file(self.folder / WORKFLOW, n) for n in spec.categorical}
        categorify = ops.Categorify(out_path=str(self.scratch))
        categorify.fit_finalize({name: str(path) for name, path in files.items()})
        for name in files:
            is_own = name in ("order", "labels")  # which Categorify adds to a frame
            if not is_own and spec.buckets_of(name) == 1 and raw[name].null_count < len(raw):
                frame = cudf.DataFrame.from_arrow(raw.select([name]))
                frame = categorify.transform(nvt.ColumnSelector([name]), frame)
                ids[name] = frame[name].to_arrow()
        return ids

    def write(self, job: shuffle.PartJob, number: int, encoded: Sequence[int]) -> None:
        """Write a file of a part, of batch ``number`` of encoded files."""
        runs = [self.scratch / f"encoded/{i:06d}.arrow" for i in encoded]
        if runs:
            shuffle.write_file(job, number, runs, self.spec, self.folder)


def raw_part_schema(spec: DatasetSpec) -> pa.Schema:
    """Of the files of raw rows: `part_schema` with text for ids and float64 for numbers."""
    kinds = dict.fromkeys(spec.categorical, pa.string())
    kinds |= dict.fromkeys(spec.lists, pa.list_(pa.string()))
    kinds |= dict.fromkeys(spec.continuous, pa.float64())
    return pa.schema([(f.name, kinds.get(f.name, f.type)) for f in shuffle.part_schema(spec)])


def _chunks(source: Source, size: int) -> tuple[Source, list[Chunk]]:
    """Divide a source, which may have to be searched for quotes and line ends."""
    return source, source.chunks(size)


def _flat(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.list_flatten(column) if pa.types.is_list(column.type) else column


def _tally(spec: DatasetSpec, part: str, rows: pa.Table) -> Iterator[dict[str, Any]]:
    """Sums of each column; the ends of numbers and times."""
    for name in rows.column_names:
        values = _flat(rows[name])
        tally = {"part": part, "column": name, "occurrences": len(values)}
        tally["missing"] = values.null_count
        if name in spec.ids:
            tally["distinct"] = sum(len(getattr(of, "dictionary", of)) for of in values.chunks)
        else:
            tally["dates"] = float(pa.types.is_timestamp(values.type))
            numbers = pd.Series((values.cast(pa.int64()) if tally["dates"] else values).to_numpy())
            tally |= {"min": numbers.min(), "max": numbers.max(), "total": numbers.sum()}
        yield tally


def _read_all(
    tasks: _Tasks, run: Callable[..., list[Any]], sources_by_part: Mapping[str, Sequence[Source]]
) -> tuple[list[File], Any]:
    """Read all sources into files; returns them, and a frame of what is known of each column."""
    spec = tasks.spec
    given = [(part, source) for part, of in sources_by_part.items() for source in of]
    size = sum(source.size for _, source in given) // CHUNKS
    size = max(CHUNK_BYTES[0], min(CHUNK_BYTES[1], size))
    divided = run("dividing", _chunks, [(source, size) for _, source in given])
    pieces = [
        (part, source, chunk)
        for (part, _), (source, chunks) in zip(given, divided, strict=True)
        for chunk in chunks
    ]
    cuts = _cuts(tasks, run, [piece[1:] for piece in pieces if piece[0] == "train"])
    jobs = [(number, *piece, cuts) for number, piece in enumerate(pieces)]
    read = run("reading", tasks.read, jobs, [chunk.size for *_, chunk in pieces])
    tallies = _summed(pd.concat([tallies for _, tallies in read]))
    if tallies.empty:
        raise UserError(f"{given[0][1].path} has no rows. Give a file with rows")
    dates = {*tallies.loc[tallies["column"] == TIME, "dates"]}
    if dates - {0.0} and dates - {1.0}:
        raise mixed_times(spec)
    every = pd.MultiIndex.from_product([PARTS, [spec.label, *spec.fields, TIME]])
    totals = tallies.set_index(["part", "column"]).reindex(every, fill_value=0)
    return [file for files, _ in read for file in files], totals


def _summed(tallies: pd.DataFrame) -> pd.DataFrame:
    """What `_tally` tells of several batches, by part and column."""
    how = dict.fromkeys(("occurrences", "missing", "distinct", "total", "not_finite"), "sum")
    how |= {"min": "min", "max": "max", "dates": "mean"}
    of = ["part", "column"]
    return tallies.reindex(columns=[*of, *how]).groupby(of, as_index=False).agg(how)


def _cuts(
    tasks: _Tasks, run: Callable[..., list[Any]], pieces: Sequence[tuple[Source, Chunk]]
) -> dict[str, Any]:
    """The times, or the numbers from 0 to 1, from which on rows are in a held-out part."""
    wanted = tasks.spec.split
    test, valid = (0 if isinstance(of, tuple) else of for of in (wanted.test, wanted.valid))
    if not (test or valid) or wanted.kind == "random":
        return {"test": 1 - test, "valid": (1 - test) * (1 - valid)}
    sketches = [*filter(len, run("times", tasks.times, pieces))]
    if not sketches:
        return {}
    times = pd.concat(sketches).rename_axis("time").rename("rows").reset_index()
    times.to_parquet(file := tasks.scratch / "times.parquet")
    with contextlib.closing(duckdb.connect()) as database:
        return split.time_cuts(wanted, database, file)


def _count_ids(
    client: Any, tasks: _Tasks, files: Sequence[File], totals: Any, progress: bool
) -> list[tuple[str, str, int]]:
    """Let NVTabular count the ids of the training files; returns the jobs of `_Tasks.rank`."""
    of = totals.loc["train"].loc[list(tasks.spec.ids)].fillna(0).astype(int)
    # NVTabular allows no threshold where it writes a vocabulary in several files: `rank` has it.
    split_out = (1 + of["distinct"] // SPLIT_IDS).to_dict()
    categorify = ops.Categorify(out_path=str(tasks.scratch), split_out=split_out)
    given = [str(tasks.scratch / name) for part, name, _ in files if part == "train"]
    options = {"cpu": tasks.device == "cpu", "row_groups_per_part": 1}
    with progress_bar("counting", len(of), " columns", show=progress) as bar, quiet_imports():
        rows = nvt.Dataset(given, engine="parquet", **options).to_ddf(columns=[*of.index])
        # As `Workflow.fit` does, which then loads all vocabularies into one worker.
        paths = client.compute(categorify.fit(nvt.ColumnSelector([*of.index]), rows)).result()
        bar.update(bar.total)
    return [(n, paths[n], of["missing"][n]) for n in of.index]


def _boundaries(totals: Any, rows: Mapping[str, int]) -> dict[str, str]:
    """The last time of training, and the first of each other part."""
    times = {p: totals.at[(p, TIME), "max" if p == "train" else "min"] for p in PARTS if rows[p]}
    if totals.at[("train", TIME), "dates"]:
        times = {p: int(time) for p, time in times.items()}
    return {part: split.time_text(time) for part, time in times.items()}
