# SPDX-License-Identifier: Apache-2.0
"""The commands that turn logs into data: prepare, frequencies, adopt."""

from __future__ import annotations

import dataclasses
import functools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows.commands.options import (
    COUNTS,
    PATH,
    SIZES,
    Command,
    argument,
    given,
    option,
)
from merlin_cowclip.workflows.errors import UserError

if TYPE_CHECKING:
    from merlin_cowclip.workflows.data.prepare.fit import Encoding
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.data.spec import DatasetSpec

SHOWN_FIELDS = 5  # those with the most ids
_of_spec = functools.partial(option, group="Override the data set's specification")


@click.command(cls=Command, example="prepare criteo train.txt.gz --out data --freq-threshold 10")
@argument("dataset", metavar="criteo|avazu|SPEC.toml")
@argument("input", nargs=-1, required=False, metavar="LOG...")
@option("--out", required=True, type=PATH, metavar="DATA", help="prepared folder to write")
@option("--seed", type=int, default=0, metavar="N", help="random seed of split and shuffle")
@option("--memory", metavar="BYTES", help="of sorting and shuffling: 8GB", shown="half of all")
@option("--scratch", type=PATH, help="folder for temporary files", shown="in DATA")
@option(
    "--engine",
    metavar="duckdb|nvtabular",
    help="library that counts ids: on this machine, or on a Dask cluster",
    shown="duckdb; nvtabular with --device gpu, --workers or --scheduler",
)
@option("--device", default="cpu", metavar="cpu|gpu", help="device of NVTabular")
@option("--workers", type=int, default=0, metavar="N", help="Dask processes of NVTabular here")
@option("--scheduler", metavar="ADDRESS", help="running Dask cluster, tcp://10.0.0.1:8786")
@option("--vocabulary-from", type=PATH, metavar="RUN|DATA", help="whose ids and ranges to take")
@option("--grow", is_flag=True, help="give new ids embeddings behind those of --vocabulary-from")
@_of_spec("--split", metavar="random|sequential|time", help="held-out rows: random, last or latest")
@_of_spec(
    "--valid",
    multiple=True,
    metavar="SHARE|LOG",
    help="validation part: share of the rows that are not test rows, or files; may be repeated",
    shown="0.1",
)
@_of_spec("--test", multiple=True, metavar="SHARE|LOG", help="test part: share of rows, or files")
@_of_spec("--time-column", metavar="COLUMN", help="times of --split time")
@_of_spec(
    "--time-format",
    metavar="FORMAT",
    help="strptime format of the times, as in %d/%m/%Y",
    shown="numbers, timestamps or ISO 8601",
)
@_of_spec("--freq-threshold", type=COUNTS, help="ids with a lower training count are unknown")
@_of_spec("--hash-buckets", type=COUNTS, help="embedding rows that unknown ids share", shown="1")
@_of_spec("--non-finite", metavar="refuse|missing", help="what to do with inf and NaN")
def prepare(dataset: str, input: tuple[str, ...], out: Path, **values: Any) -> None:
    """Turn raw logs into ids, counts and parquet.

    A LOG is a file, glob, folder or URL of one (s3://…); gzip and zstd are read.
    """
    from merlin_cowclip.workflows.data.prepare.pipeline import prepare
    from merlin_cowclip.workflows.data.spec import SPECS, find_spec

    like, run = None, values["vocabulary_from"]
    if run is not None:
        if dataset in SPECS or dataset.endswith(".toml"):
            raise UserError(f"--vocabulary-from has a specification. Leave {dataset} out")
        like, input = _encoding(run, values), (dataset, *input)
    elif values["grow"]:
        raise UserError("--grow needs a vocabulary. Name it: --vocabulary-from RUN or DATA")
    elif not input:
        raise UserError("prepare needs LOG, files or folders, after criteo, avazu or SPEC.toml")
    spec = _changed_spec(like.spec if like else find_spec(dataset), values)
    names = "seed memory scratch engine device workers scheduler grow"
    options = {name: values[name] for name in names.split()}
    data = prepare(spec, input, out, like=like, **options)
    _print_report(data, is_fitted=like is None)
    how = " --warm-start RUN" * (run is not None)
    print(f"Next: merlin-cowclip train {shlex.quote(str(data.path))}{how} --out run")


def _print_report(data: PreparedData, is_fitted: bool) -> None:
    """Rows, click rates, split, the ids of each field; unknown ids of an earlier vocabulary."""
    from merlin_cowclip.workflows.data.prepared_data import TITLES

    fields, split = data.report["fields"], data.spec.split
    for name, field in fields.items():
        if field.get("not_finite"):
            print(f"{name}: {field['not_finite']:,} numbers that were not finite are missing")
    clicks = data.report["positives"]
    rows = [
        f"{number:,} {TITLES[part]} rows ({100 * clicks[part] / number:.1f} % clicks)"
        for part, number in data.rows.items()
        if number
    ]
    how = f", split {split.kind}{f' by {split.column!r}' if split.column else ''}"
    is_split = float in (type(split.valid), type(split.test))  # else all parts are files
    print(f"{', '.join(rows)}{how * is_split}: {data.path}")
    if times := data.record["boundaries"]:
        words = {"train": "training until", "valid": "valid from", "test": "test from"}
        print(", ".join(f"{words[part]} {time}" for part, time in times.items()))
    by_text = [name for name in data.spec.ids if name not in data.spec.hash_only]
    ids = {name: fields[name]["distinct"] for name in by_text}
    print(
        f"{sum(ids.values()):,} distinct ids in {len(ids)} fields: {_most(ids)}; "
        f"{data.table_rows:,} embedding rows"
    )
    if not is_fitted:
        new = {of[0]: fields[of[0]]["new"] for of in data.domains if fields[of[0]].get("new")}
        if new:
            print(f"{sum(new.values()):,} new ids: {_most(new)}")
        unknown = {name: fields[name]["below_threshold"] for name in ids}
        occurrences = {name: max(fields[name]["occurrences"], 1) for name in ids}
        share = sum(unknown.values()) / sum(occurrences.values())
        of_field = {name: unknown[name] / occurrences[name] for name in ids if unknown[name]}
        listed = f" ({_most(of_field, '.1%')})" * bool(of_field)
        print(f"unknown ids: {share:.1%} of the training occurrences{listed}")


def _encoding(path: Path, values: Mapping[str, Any]) -> Encoding:
    """How a run or prepared folder was encoded."""
    from merlin_cowclip.workflows.data.prepare.fit import Encoding
    from merlin_cowclip.workflows.data.prepared_data import RECORD, PreparedData, inputs_of
    from merlin_cowclip.workflows.data.spec import DatasetSpec
    from merlin_cowclip.workflows.training.runs import Run

    for name in ("freq-threshold", "hash-buckets", "non-finite"):
        if values[name.replace("-", "_")] is not None:
            raise UserError(f"--vocabulary-from keeps the vocabulary of {path}. Leave --{name} out")
    is_data = (path / RECORD).exists()
    inputs = inputs_of(PreparedData.open(path)) if is_data else Run.open(path).config
    if inputs["ranges"] is None:
        raise UserError(
            f"{path} is of an adopted pipeline. Transform new rows with its NVTabular workflow, "
            "write parquet, and adopt that"
        )
    return Encoding(DatasetSpec.from_dict(inputs["spec"]), inputs["ranges"], path)


def _most(numbers: Mapping[str, float], form: str = ",") -> str:
    """The fields with the greatest numbers."""
    most = sorted(numbers, key=lambda name: -numbers[name])
    listed = ", ".join(f"{name} {numbers[name]:{form}}" for name in most[:SHOWN_FIELDS])
    return listed + (f", {len(most) - SHOWN_FIELDS} more" if len(most) > SHOWN_FIELDS else "")


@click.command(cls=Command, example="frequencies data --batch-sizes 1K,8K,128K")
@argument("data", type=PATH)
@option("--out", type=PATH, help="folder to write", shown="DATA/frequencies")
@option("--batch-sizes", type=SIZES, help="in samples", shown="1024 to 131072")
def frequencies(data: Path, out: Path | None, batch_sizes: list[int] | None) -> None:
    """Show how often ids occur, and which are rare.

    Writes summary.parquet (a field per row).
    """
    from merlin_cowclip.workflows.data.frequencies import BATCH_SIZES, frequencies
    from merlin_cowclip.workflows.data.prepared_data import PreparedData

    opened = PreparedData.open(data)
    result = frequencies(opened, out, batch_sizes=batch_sizes or BATCH_SIZES)
    print(result.table())
    print(
        "ids: in the training rows as encoded, where all missing values are one id.\n"
        "top 3: share of the 3 most frequent ids; ids for 90 %: as few of the most frequent ones.\n"
        "last columns, by batch size B: % of ids that are rare, with P(id) < 1/B.\n"
        "They lose no updates at a large batch, so the choice of the scaling rule matters."
    )
    rows = opened.rows["train"]
    if max(batch_sizes or BATCH_SIZES) > rows:
        print(f"-: the batch is larger than the {rows:,} training rows.")
    print(f"{rows:,} training rows: {result.path}")


@click.command(
    cls=Command,
    example="adopt train/ --valid valid/ --workflow workflow/ --label click --out data",
)
@argument("parquet", nargs=-1, required=True, metavar="PARQUET...")
@option("--workflow", required=True, type=PATH, metavar="FOLDER", help="saved NVTabular workflow")
@option("--label", required=True, metavar="COLUMN", help="column of 0 and 1")
@option("--out", required=True, type=PATH, metavar="DATA", help="prepared folder to write")
@option("--valid", multiple=True, metavar="PARQUET", help="validation part, measured each epoch")
@option("--test", multiple=True, metavar="PARQUET", help="test part; these may be repeated")
@option(
    "--check-raw",
    multiple=True,
    metavar="RAW",
    help="parquet with the raw rows: encode some 10,000 and compare them with PARQUET",
)
def adopt(
    parquet: tuple[str, ...],
    workflow: Path,
    label: str,
    out: Path,
    valid: tuple[str, ...],
    test: tuple[str, ...],
    check_raw: tuple[str, ...],
) -> None:
    """Take a saved NVTabular workflow and its parquet.

    Checks the training part PARQUET (files, globs or folders) that the workflow wrote, counts its
    ids and writes a folder that refers to it: nothing is converted. Loading a workflow runs code
    from its folder (cloudpickle): adopt only your own.
    """
    from merlin_cowclip.workflows.data.adopt.adopt import adopt

    names, given = ("valid", "test", "check_raw"), (valid, test, check_raw)
    others: dict[str, Any] = {n: list(of) for n, of in zip(names, given, strict=True) if of}
    data = adopt(list(parquet), workflow, label, out, **others)
    print(_columns(data))
    for note in data.record["notes"]:
        print(f"Note: {note}")
    if check_raw:
        print("--check-raw: raw rows are encoded as in the parquet")
    print(_sizes(data))


def _changed_spec(spec: DatasetSpec, values: Mapping[str, Any]) -> DatasetSpec:
    """The spec with what the command line says instead."""
    from merlin_cowclip.workflows.data.prepared_data import HELD_OUT
    from merlin_cowclip.workflows.data.spec import Split

    kind, changed = values["split"] or spec.split.kind, dataclasses.asdict(spec.split)
    if kind != "time":
        changed |= {"column": None}
    if values["vocabulary_from"] is not None:  # its files are not those of the new rows
        changed = {name: of for name, of in changed.items() if not isinstance(of, tuple)}
    changed |= given({"column": values["time_column"], "time_format": values["time_format"]})
    changed |= {name: _share_or_files(values[name]) for name in HELD_OUT if values[name]}
    names = ("freq_threshold", "hash_buckets", "non_finite")
    changes = given({name: values[name] for name in names})
    for name, value in changes.items():
        if isinstance(value, dict):  # the other fields keep theirs
            before = getattr(spec, name)
            if not isinstance(before, Mapping):
                before = dict.fromkeys(spec.ids, before) if before > 1 else {}
            changes[name] = {**before, **value}
    return dataclasses.replace(spec, split=Split(**{**changed, "kind": kind}), **changes)


def _share_or_files(values: tuple[str, ...]) -> float | tuple[str, ...]:
    """The share that is one number, or the files."""
    try:
        (share,) = map(float, values)
    except ValueError:
        return values
    return share


def _columns(data: PreparedData) -> str:
    """A table of the adopted columns: role, embedding rows or range, embedding table."""
    tables = {field: " + ".join(fields) for fields in data.domains for field in fields}
    positives, count = data.report["positives"]["train"], data.rows["train"]
    rows = [(data.spec.label, "label", f"{positives / count:.4g} positive", "")]
    for field in data.spec.ids:
        role = "list of ids" if field in data.spec.lists else "id"
        rows.append((field, role, f"{data.cardinalities[field]:,} rows", tables[field]))
    for name, of in data.report["fields"].items():
        rows.append((name, "number", f"{of['min']:.4g} to {of['max']:.4g}", ""))
    return format_table(("column", "role", "rows or range", "table"), rows)


def _sizes(data: PreparedData) -> str:
    """Its rows, and the ids that its training rows hold."""
    from merlin_cowclip.workflows.data.counts import occurring_ids
    from merlin_cowclip.workflows.data.prepared_data import TITLES

    rows = [f"{number:,} {TITLES[part]}" for part, number in data.rows.items()]
    ids = f"{occurring_ids(data):,} ids in {len(data.cardinalities)} fields"
    return f"{', '.join(rows)} rows, {ids}: {data.path}"
