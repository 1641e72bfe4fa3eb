# SPDX-License-Identifier: Apache-2.0
"""`prepare --engine nvtabular`: NVTabular on Dask, on a cluster, with CPUs or GPUs.

Workers read the input, split it, count ids (`Categorify`), encode, shuffle and write. Rows pass
from step to step in files of the output folder, which all workers see, never through the client.
A task may run again: it writes the same files.
"""

from __future__ import annotations

import copy
import functools
import itertools
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.encoder import Encoder, scale_of
from merlin_cowclip.workflows.data.prepare.executor import connect, run_tasks
from merlin_cowclip.workflows.data.prepare.fit import all_missing
from merlin_cowclip.workflows.data.prepare.nvt_workflow import save_fitted_workflow
from merlin_cowclip.workflows.data.prepare.shuffle import (
    PART_ROWS,
    ROW_GROUP_ROWS,
    part_jobs,
    part_schema,
)
from merlin_cowclip.workflows.data.prepare.split import as_numbers, time_text
from merlin_cowclip.workflows.data.prepared_data import HELD_OUT, PARTS, TITLES, WORKFLOW
from merlin_cowclip.workflows.data.sources.base import TIME, Chunk, Source
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import (
    MISSING,
    UNKNOWN,
    Vocabulary,
    vocabulary_file,
    write_vocabulary,
)
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
Told = list[dict[str, Any]]  # of columns, by part


def prepare_on_dask(
    spec: DatasetSpec,
    sources_by_part: Mapping[str, Sequence[Source]],
    folder: Path,
    *,
    seed: int = 0,
    scheduler: str | None = None,
    workers: int = 0,
    device: str = "cpu",
    part_rows: int = PART_ROWS,
    progress: bool = True,
) -> dict[str, Any]:
    """Write parts, workflow, schema and counts into ``folder``; returns what the record says.

    Rows of training sources are divided by the spec's shares, equal rows into one part. Files have
    about ``part_rows`` rows. `connect` describes ``scheduler``, ``workers`` and ``device``. Raises
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
        files, found = _read_all(tasks, run, sources_by_part)
        rows, positives = (
            {part: int(found.at[(part, spec.label), key]) for part in PARTS}
            for key in ("occurrences", "total")
        )
        ranges = _checked_ranges(spec, found, rows, positives)
        jobs = _count_ids(client, tasks, files, found, progress)
        ids = dict(zip(spec.ids, run("ranking", tasks.rank, jobs), strict=True))
        run("workflow", save_fitted_workflow, [(spec, folder, ranges)])
        outputs = {part: max(len(part_jobs(part, rows[part], part_rows)), 1) for part in PARTS}
        buckets = {**outputs, **dict.fromkeys(HELD_OUT, 1)}
        to_encode = [(i, name, ranges, buckets[part]) for i, (part, name, _) in enumerate(files)]
        encoded = pd.DataFrame(itertools.chain(*run("encoding", tasks.encode, to_encode)))
        to_write: list[tuple[str, int, Any, int]] = []
        for part, number in outputs.items():
            of = np.array([i for i, file in enumerate(files) if file[0] == part], int)
            divided = [of] * number if part == "train" else np.array_split(of, number)
            to_write += [(part, i, of, i % buckets[part]) for i, of in enumerate(divided)]
        run("writing", tasks.write, to_write)
    shutil.rmtree(tasks.scratch, ignore_errors=True)
    outside = encoded.groupby(["part", "column"])["outside"].sum()
    fields = {name: _report(spec, name, found, outside, ids.get(name, {})) for name in spec.fields}
    return {
        "rows": rows,
        "boundaries": _boundaries(found, rows) if spec.split.kind == "time" else {},
        "cardinalities": {name: of["cardinality"] for name, of in ids.items()},
        "ranges": {name: list(ends) for name, ends in ranges.items()},
        "report": {"rows": rows, "positives": positives, "fields": fields},
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
        times = [as_numbers(batch.column(TIME)) for batch in source.batches(chunk) if len(batch)]
        if not times:
            return pd.Series(dtype=int)
        held, counts = np.unique(np.concatenate(times), return_counts=True)
        starts = np.unique(np.linspace(0, len(held), SKETCH, endpoint=False).astype(int))
        return pd.Series(np.add.reduceat(counts, starts), held[starts])

    def read(
        self, number: int, part: str, source: Source, chunk: Chunk, cuts: np.ndarray
    ) -> tuple[list[File], pd.DataFrame]:
        """Read a chunk into files by part; ``cuts`` divide training rows."""
        files: list[File] = []
        told: Told = []
        replaced, schema = Counter[str](), raw_part_schema(self.spec)
        held: dict[str, list[pa.Table]] = {part: [] for part in PARTS}
        for batch in itertools.chain(source.batches(chunk, replaced=replaced), [None]):
            if batch:
                parts = np.full(len(batch), PARTS.index(part))
                if part == "train":
                    parts = np.searchsorted(cuts, self.scores(batch), side="right")
                for i in np.unique(parts):
                    table = pa.Table.from_batches([batch]).filter(pa.array(parts == i))
                    told += _tally(self.spec, PARTS[i], table)
                    columns = [table[field.name].cast(field.type) for field in schema]
                    held[PARTS[i]].append(pa.table(columns, schema=schema))
            for name, tables in held.items():
                rows = sum(map(len, tables))
                if rows > (CELLS // len(schema) if batch else 0):
                    files.append((name, f"{name}/{number:06d}-{len(files):03d}.parquet", rows))
                    with replacing(self.scratch / files[-1][1]) as partial:
                        pq.write_table(pa.concat_tables(tables), partial, row_group_size=rows)
                    tables.clear()
        told += [{"part": "train", "column": c, "not_finite": n} for c, n in replaced.items()]
        return files, _summed(pd.DataFrame(told))

    def scores(self, batch: pa.RecordBatch) -> np.ndarray:
        """(n,) times of rows, or numbers in [0, 1) that depend on a row's values and the seed."""
        if self.spec.split.kind == "time":
            return as_numbers(batch.column(TIME))
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name in self.spec.lists:
            texts = columns[name].values.fill_null("")
            lists = pa.ListArray.from_arrays(columns[name].offsets, texts)
            columns[name] = pc.binary_join(lists, "\x1f")
        hashes = pd.util.hash_pandas_object(pa.table(columns).to_pandas(), index=False).to_numpy()
        salt = np.random.SeedSequence(self.seed).generate_state(1, np.uint64)
        mixed: np.ndarray = pd.util.hash_array(hashes ^ salt)
        return (mixed >> np.uint64(11)) * 2.0**-53

    def rank(self, name: str, path: str, known: int, missing: int) -> dict[str, int]:
        """Order the ids that NVTabular counted in a field, and write its vocabulary and counts."""
        dataset = pa.dataset.dataset(path, format="parquet")
        table = dataset.to_table(columns=[name, f"{name}_size"])
        table = table.filter(pc.is_valid(table[name])).combine_chunks()
        texts, counts = table[0].cast(pa.string()).combine_chunks(), table[1].to_numpy()
        threshold = self.spec.threshold_of(name)
        if counts.sum() != known:
            raise RuntimeError(f"NVTabular lost ids {name!r}: {counts.sum():,} of {known:,}")
        if counts.max() < threshold:
            raise UserError(
                f"no id of {name!r} occurs {threshold:,} times in the training rows "
                "(freq_threshold). Lower it, or take the column out"
            )
        by_text = pc.sort_indices(texts).to_numpy()
        order = by_text[np.argsort(-counts[by_text], kind="stable")]  # ties: by text
        counts = counts[order].astype(np.int64)
        known_to, held = np.count_nonzero(counts >= max(threshold, 1)), self.spec.buckets_of(name)
        vocabulary = Vocabulary.empty(held)
        specials = np.zeros(vocabulary.first, np.int64)
        specials[MISSING] = missing
        rare = texts.take(pa.array(order[known_to:]))
        np.add.at(specials, vocabulary.encode(rare), counts[known_to:])
        by_id = {name: np.append(specials, counts[:known_to])}
        kept = texts.take(pa.array(order[:known_to]))
        write_vocabulary(self.folder, name, [kept], by_id, vocabulary)
        sizes = {"distinct": len(texts), "cardinality": len(by_id[name])}
        return {**sizes, "below_threshold": int(counts[known_to:].sum())}

    def encode(self, number: int, name: str, ranges: Mapping[str, Any], buckets: int) -> Told:
        """Encode a file into batches by random bucket; tells of unknown ids and clipped numbers."""
        schema, outside = part_schema(self.spec), {}
        raw = pq.ParquetFile(self.scratch / name).read()
        encoder = Encoder.open(self.folder / WORKFLOW, self.spec, ranges)
        columns = self.ids_on_gpu(raw) if self.device == "gpu" else {}
        left = [field for field in self.spec.fields if field not in columns]
        columns |= {field: encoder.encode(field, _whole(raw[field])) for field in left}
        table = pa.table({self.spec.label: raw[self.spec.label], **columns})
        table = table.select(schema.names).cast(schema)
        for field in self.spec.ids:
            ids, first = _flat(table[field]).to_numpy(), UNKNOWN + self.spec.buckets_of(field)
            outside[field] = int(np.count_nonzero((ids >= UNKNOWN) & (ids < first)))
        for field, (low, high) in ranges.items():
            scale = scale_of(self.spec, field, (low, high))
            held = raw[field].to_numpy()
            numbers = np.where(np.isnan(held), low, scale.filled(held))
            outside[field] = int(np.count_nonzero((numbers < low) | (numbers > high)))
        bucket = np.random.default_rng([self.seed, 0, number]).integers(buckets, size=len(table))
        table = table.take(pa.array(np.argsort(bucket, kind="stable"))).combine_chunks()
        ends = np.cumsum(np.bincount(bucket, minlength=buckets)).tolist()
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        with (
            replacing(self.scratch / f"encoded/{number:06d}.arrow") as partial,
            pa.ipc.new_file(str(partial), schema, options=options) as file,
        ):
            for start, end in itertools.pairwise([0, *ends]):
                file.write_batch(table.to_batches()[0].slice(start, end - start))
        return [{"part": name.split("/")[0], "column": c, "outside": n} for c, n in outside.items()]

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

    def write(self, part: str, number: int, encoded: Sequence[int], bucket: int) -> None:
        """Write a file of a part: a bucket of encoded files, in order, or shuffled to train."""
        batches = []
        for name in (f"encoded/{i:06d}.arrow" for i in encoded):
            with pa.OSFile(str(self.scratch / name)) as file:
                batches.append(pa.ipc.open_file(file).get_batch(bucket))
        if not sum(map(len, batches)):
            return
        table = pa.Table.from_batches(batches).combine_chunks()
        if part == "train":
            order = np.random.default_rng([self.seed, 1, bucket]).permutation(len(table))
            table = table.take(pa.array(order))
        group = max(1, min(ROW_GROUP_ROWS, -(-len(table) // 4)))
        with replacing(self.folder / part / f"part-{number:05d}.parquet") as partial:
            pq.write_table(table, partial, row_group_size=group)


def raw_part_schema(spec: DatasetSpec) -> pa.Schema:
    """Of the files of raw rows: `part_schema` with text for ids and float64 for numbers."""
    kinds = dict.fromkeys(spec.categorical, pa.string())
    kinds |= dict.fromkeys(spec.lists, pa.list_(pa.string()))
    kinds |= dict.fromkeys(spec.continuous, pa.float64())
    return pa.schema([(f.name, kinds.get(f.name, f.type)) for f in part_schema(spec)])


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)


def _chunks(source: Source, size: int) -> tuple[Source, list[Chunk]]:
    """Divide a source, which may have to be searched for quotes and line ends."""
    return source, source.chunks(size)


def _flat(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.list_flatten(column) if pa.types.is_list(column.type) else column


def _tally(spec: DatasetSpec, part: str, rows: pa.Table) -> Iterator[dict[str, Any]]:
    """Sums of each column; the ends of numbers and times."""
    for name in rows.column_names:
        values = _flat(rows[name])
        told = {"part": part, "column": name, "occurrences": len(values)}
        told["missing"] = values.null_count
        if name in spec.ids:
            told["distinct"] = sum(len(getattr(of, "dictionary", of)) for of in values.chunks)
        else:
            told["dates"] = float(pa.types.is_timestamp(values.type))
            numbers = pd.Series((values.cast(pa.int64()) if told["dates"] else values).to_numpy())
            told |= {"min": numbers.min(), "max": numbers.max(), "total": numbers.sum()}
        yield told


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
    told = _summed(pd.concat([told for _, told in read]))
    if told.empty:
        raise UserError(f"{given[0][1].path} has no rows. Give a file with rows")
    dates = {*told.loc[told["column"] == TIME, "dates"]}
    if dates - {0.0} and dates - {1.0}:
        raise UserError(
            f"column {spec.split.column!r} has numbers and dates. Write its times in one form"
        )
    every = pd.MultiIndex.from_product([PARTS, [spec.label, *spec.fields, TIME]])
    found = told.set_index(["part", "column"]).reindex(every, fill_value=0)
    return [file for files, _ in read for file in files], found


def _summed(told: pd.DataFrame) -> pd.DataFrame:
    """What `_tally` tells of several batches, by part and column."""
    how = dict.fromkeys(("occurrences", "missing", "distinct", "total", "not_finite"), "sum")
    how |= {"min": "min", "max": "max", "dates": "mean"}
    of = ["part", "column"]
    return told.reindex(columns=[*of, *how]).groupby(of, as_index=False).agg(how)


def _cuts(
    tasks: _Tasks, run: Callable[..., list[Any]], pieces: Sequence[tuple[Source, Chunk]]
) -> np.ndarray:
    """The scores from which rows are validation rows, and test rows."""
    split = tasks.spec.split
    test, valid = (0 if isinstance(of, tuple) else of for of in (split.test, split.valid))
    if split.kind == "random":
        return np.array([(1 - test) * (1 - valid), 1 - test])
    sketches = run("times", tasks.times, pieces if test or valid else [])
    if not any(map(len, sketches)):
        return np.full(2, np.inf)
    rows_at = pd.concat(filter(len, sketches)).groupby(level=0).sum()
    times, counts = rows_at.index.to_numpy(), rows_at.to_numpy()
    cuts = [np.inf if times.dtype.kind == "f" else np.iinfo(times.dtype).max]
    for share in (test, valid):
        if share and len(times) < 2:
            raise UserError(
                f"all {counts.sum():,} rows to divide have the same time, column {split.column!r}. "
                "Choose another column or split, or a share of 0"
            )
        if share:
            later = np.cumsum(counts[::-1])[::-1]  # rows from each time on
            first = 1 + int(np.argmin(np.abs(later[1:] - share * later[0])))
            cuts.append(times[first])
            times, counts = times[:first], counts[:first]
        else:
            cuts.append(cuts[-1])
    return np.array([cuts[2], cuts[1]], times.dtype)


def _checked_ranges(
    spec: DatasetSpec, found: Any, rows: dict[str, int], positives: dict[str, int]
) -> dict[str, tuple[float, float]]:
    """The ranges of numbers; raises UserError for a part or column that cannot be used."""
    for part, ones in positives.items():
        if not 0 < ones < rows[part] and (part == "train" or getattr(spec.split, part)):
            raise UserError(
                f"the {TITLES[part]} part has {rows[part] - ones:,} rows with label 0 and "
                f"{ones:,} with label 1, column {spec.label!r}. Both must occur: give more rows, "
                "or another seed or split"
            )
    ranges = {}
    for name in spec.fields:
        of = found.loc[("train", name)]
        if of["missing"] == of["occurrences"]:
            raise all_missing(name, rows["train"])
        if name in spec.continuous:  # a missing number counts as 0
            ends = [float(of["min"]), float(of["max"]), *[0.0] * bool(of["missing"])]
            low, high = min(ends), max(ends)
            if name in spec.log1p and low < 0:
                raise UserError(f"log1p needs numbers from 0 on. Column {name!r} has {low!r}")
            of_scale = scale_of(spec, name, ()).filled(np.array([low, high]))
            ranges[name] = (float(of_scale[0]), float(of_scale[1]))
            if high - low == np.inf:
                raise UserError(
                    f"the range of column {name!r} is too large: {low} to {high}. Scale it"
                )
    return ranges


def _count_ids(
    client: Any, tasks: _Tasks, files: Sequence[File], found: Any, progress: bool
) -> list[tuple[str, str, int, int]]:
    """Let NVTabular count the ids of the training files; returns the jobs of `_Tasks.rank`."""
    of = found.loc["train"].loc[list(tasks.spec.ids)].fillna(0).astype(int)
    # NVTabular allows no threshold where it writes a vocabulary in several files: `rank` has it.
    split_out = (1 + of["distinct"] // SPLIT_IDS).to_dict()
    categorify = ops.Categorify(out_path=str(tasks.scratch), split_out=split_out)
    paths = [str(tasks.scratch / name) for part, name, _ in files if part == "train"]
    options = {"cpu": tasks.device == "cpu", "row_groups_per_part": 1}
    with progress_bar("counting", len(of), " columns", show=progress) as bar, quiet_imports():
        rows = nvt.Dataset(paths, engine="parquet", **options).to_ddf(columns=[*of.index])
        # As `Workflow.fit` does, which then loads all vocabularies into one worker.
        counted = client.compute(categorify.fit(nvt.ColumnSelector([*of.index]), rows)).result()
        bar.update(bar.total)
    known = of["occurrences"] - of["missing"]
    return [(name, counted[name], known[name], of["missing"][name]) for name in of.index]


def _report(
    spec: DatasetSpec, name: str, found: Any, outside: Any, ids: Mapping[str, int]
) -> dict[str, Any]:
    """What `PreparedData.report` says of a field."""
    train = found.loc[("train", name)]
    told: dict[str, Any] = {key: int(train[key]) for key in ("occurrences", "missing")}
    if ids:
        told |= {key: ids[key] for key in ("distinct", "below_threshold")}
    else:
        told |= {"min": float(train["min"]), "max": float(train["max"])}
        told["mean"] = float(train["total"] / (train["occurrences"] - train["missing"]))
        told["not_finite"] = int(train["not_finite"])
    for part in HELD_OUT:
        of = found.loc[(part, name)]
        told |= {f"{part}_{key}": int(of[key]) for key in ("occurrences", "missing")}
        told[f"{part}_{'unknown' if ids else 'out_of_range'}"] = int(outside.get((part, name), 0))
    return told


def _boundaries(found: Any, rows: Mapping[str, int]) -> dict[str, str]:
    """The last time of training, and the first of each other part."""
    times = {p: found.at[(p, TIME), "max" if p == "train" else "min"] for p in PARTS if rows[p]}
    if found.at[("train", TIME), "dates"]:
        times = {p: int(time) for p, time in times.items()}
    return {part: time_text(time) for part, time in times.items()}
