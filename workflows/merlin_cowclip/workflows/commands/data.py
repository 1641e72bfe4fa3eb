"""The commands that turn logs into data: prepare, frequencies, adopt."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.commands.values import numbers
from merlin_cowclip.workflows.errors import UserError, quoted

if TYPE_CHECKING:
    from merlin_cowclip.workflows.commands.parser import Commands
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.data.spec import DatasetSpec

SHOWN_FIELDS = 5  # those with the most ids


def add(commands: Commands) -> None:
    """The three, with their arguments."""
    _add_prepare(commands)
    _add_frequencies(commands)
    _add_adopt(commands)


def _add_prepare(commands: Commands) -> None:
    prepare = commands.add_parser("prepare", help="raw logs → ids, counts and parquet")
    prepare.add_argument("dataset", help="criteo, avazu, or the path of a TOML specification")
    prepare.add_argument("input", nargs="+", help="raw logs: files, globs or folders; gzip is read")
    prepare.add_argument("--out", required=True, type=Path, help="the prepared folder to write")
    prepare.add_argument("--seed", type=int, default=0, help="of split and shuffle (default 0)")
    prepare.add_argument(
        "--workers",
        type=int,
        default=0,
        help="Dask processes on this machine, on GPUs one per GPU (default: threads of this one)",
    )
    prepare.add_argument(
        "--engine", help="arrow (default) or nvtabular: what counts and encodes the columns"
    )
    prepare.add_argument(
        "--device", default="cpu", help="cpu (default) or gpu, on which NVTabular runs"
    )
    own = prepare.add_argument_group("instead of what the data set's description says").add_argument
    own("--split", help="random, sequential (the last rows) or time (the latest ones)")
    own("--test", type=float, help="share of the rows in the test part")
    own("--time-column", help="numbers, or text that sorts by time, for --split time")
    own(
        "--freq-threshold",
        metavar="N|FIELD=N,…",
        help="an id that occurs less often in the training part is unknown",
    )
    own(
        "--hash-buckets",
        metavar="N|FIELD=N,…",
        help="rows that unknown ids share by hash (1)",
    )
    own("--non-finite", help="inf and NaN: refuse (default), or take for missing")
    prepare.set_defaults(run=_prepare)


def _add_frequencies(commands: Commands) -> None:
    frequencies = commands.add_parser(
        "frequencies",
        help="how often ids occur: coverage, rare ids by batch size, Figure 3; the top-k data",
        description="Writes frequencies.parquet (an id per row), summary.parquet (a field per row) "
        "and frequencies.png. With --top-k: a prepared folder with the k most frequent ids of each "
        "field and one for all others, as in Table 1 of the paper.",
    )
    frequencies.add_argument("data", type=Path, help="a prepared folder")
    frequencies.add_argument("--out", type=Path, help="the folder to write (DATA/frequencies)")
    frequencies.add_argument(
        "--batch-sizes",
        nargs="+",
        type=numbers,
        metavar="B",
        help="in samples, by spaces or commas (1024 to 131072)",
    )
    frequencies.add_argument(
        "--fields", nargs="+", metavar="FIELD", help="of the figure (default: three)"
    )
    frequencies.add_argument("--top-k", type=int, metavar="K", help="write the top-k data to --out")
    frequencies.set_defaults(run=_frequencies)


def _add_adopt(commands: Commands) -> None:
    adopt = commands.add_parser(
        "adopt",
        help="a saved NVTabular workflow and its parquet → a prepared folder",
        description="Checks parquet that an NVTabular workflow wrote, counts its ids and writes a "
        "prepared folder that refers to it: nothing is converted. Loading a workflow runs code "
        "from its folder (cloudpickle): adopt only your own.",
    )
    adopt.add_argument(
        "parquet", nargs="+", help="the training part: files, globs or folders of *.parquet"
    )
    adopt.add_argument(
        "--workflow", required=True, type=Path, help="a folder that nvtabular.Workflow.save wrote"
    )
    adopt.add_argument("--label", required=True, metavar="COLUMN", help="the column of 0 and 1")
    adopt.add_argument(
        "--test", nargs="+", metavar="PARQUET", help="the test part (default: none, no metrics)"
    )
    adopt.add_argument(
        "--check-raw",
        nargs="+",
        metavar="RAW",
        help="parquet with the raw rows: encode some 10,000 and compare them with PARQUET",
    )
    adopt.add_argument("--out", required=True, type=Path, help="the prepared folder to write")
    adopt.set_defaults(run=_adopt)


def _prepare(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.data.prepare.pipeline import prepare
    from merlin_cowclip.workflows.data.spec import find_spec

    data = prepare(
        _changed_spec(find_spec(arguments.dataset), arguments),
        arguments.input,
        arguments.out,
        seed=arguments.seed,
        workers=arguments.workers,
        device=arguments.device,
        engine=arguments.engine,
    )
    for name, field in data.report["fields"].items():
        if field.get("not_finite"):
            print(f"{name}: {field['not_finite']:,} numbers that were not finite are missing")
        if "note" in field:
            print(f"{name}: {field['note']}")
    print(_summary(data))
    print(f"Next: merlin-cowclip train {shlex.quote(str(data.path))} --out run")


def _summary(data: PreparedData) -> str:
    """Rows, click rates, split, and the ids of each field."""
    report, split = data.report, data.spec.split
    parts = [
        f"{number:,} {'training' if part == 'train' else part} rows "
        f"({100 * report['positives'][part] / number:.1f} % clicks)"
        for part, number in data.rows.items()
    ]
    column = f" by {split.column!r}" if split.column else ""
    ids = {name: report["fields"][name]["distinct"] for name in data.spec.ids}
    most = sorted(ids, key=lambda name: -ids[name])
    told = ", ".join(f"{name} {ids[name]:,}" for name in most[:SHOWN_FIELDS])
    more = f", {len(most) - SHOWN_FIELDS} more" if len(most) > SHOWN_FIELDS else ""
    return (
        f"{' and '.join(parts)}, split {split.kind}{column}: {data.path}\n"
        f"{sum(ids.values()):,} ids in {len(ids)} fields: {told}{more}"
    )


def _changed_spec(spec: DatasetSpec, arguments: argparse.Namespace) -> DatasetSpec:
    """The spec with what the command line says instead."""
    changes: dict[str, Any] = {}
    kind = spec.split.kind if arguments.split is None else arguments.split
    column = spec.split.column if kind == "time" else None
    changes["split"] = dataclasses.replace(
        spec.split,
        kind=kind,
        test=spec.split.test if arguments.test is None else arguments.test,
        column=column if arguments.time_column is None else arguments.time_column,
    )
    for key in ("freq_threshold", "hash_buckets"):
        text = getattr(arguments, key)
        if text is not None:
            given = _number_or_by_field(f"--{key.replace('_', '-')}", text)
            if isinstance(given, dict):  # the other fields keep theirs
                before = getattr(spec, key)
                if not isinstance(before, Mapping):
                    before = dict.fromkeys(spec.ids, before) if before > 1 else {}
                given = {**before, **given}
            changes[key] = given
    if arguments.non_finite is not None:
        changes["non_finite"] = arguments.non_finite
    return dataclasses.replace(spec, **changes)


def _number_or_by_field(option: str, text: str) -> int | dict[str, int]:
    """The value of "10", or of "C3=10,C4=5"."""
    try:
        if "=" not in text:
            return int(text)
        pairs = [part.rsplit("=", 1) for part in text.split(",")]
        numbers = {field: int(number) for field, number in pairs}
    except ValueError:
        given = repr(text) if len(text) <= 60 else f"{text[:60]!r}…"
        raise UserError(
            f"{option} must be a number, or numbers by field: C3=10,C4=5. Received: {given}"
        ) from None
    fields = [field for field, _ in pairs]
    twice = sorted({field for field in fields if fields.count(field) > 1})
    if twice:
        raise UserError(
            f"{option} must name a field once. Received: {quoted(twice)} more than once. "
            "Leave all but one out"
        )
    return numbers


def _frequencies(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.data.frequencies import BATCH_SIZES, frequencies
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.data.top_ids import keep_top_ids

    data = PreparedData.open(arguments.data)
    if arguments.top_k is None:
        found = frequencies(
            data,
            arguments.out,
            batch_sizes=(
                BATCH_SIZES
                if arguments.batch_sizes is None
                else [size for sizes in arguments.batch_sizes for size in sizes]
            ),
            fields=arguments.fields,
        )
        print(found.table())
        print(
            "% held by top 3, ids that hold 90 %: of all occurrences, by the most frequent ids.\n"
            "% rare at B: ids with P(id) < 1/B. Their learning rate must not be scaled with the "
            "batch (Section 3.1)."
        )
        if max(found.batch_sizes) > found.rows:
            print(f"-: the batch is larger than the {found.rows:,} training rows.")
        print(f"{found.rows:,} training rows: {found.path}")
        return
    for option in ("batch_sizes", "fields"):
        if getattr(arguments, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise UserError(f"--top-k excludes {name}. Received: both. Leave one out")
    if arguments.out is None:
        raise UserError("--top-k needs --out, the folder to write. Received: none. Name one")
    top = keep_top_ids(data, arguments.top_k, arguments.out)
    print(_sizes(top))


def _adopt(arguments: argparse.Namespace) -> None:
    from merlin_cowclip.workflows.data.adopt.pipeline import adopt

    data = adopt(
        arguments.parquet,
        arguments.workflow,
        arguments.label,
        arguments.out,
        arguments.test,
        arguments.check_raw,
    )
    print("\n".join(_columns(data)))
    for note in data.record["notes"]:
        print(f"Note: {note}")
    if arguments.check_raw is not None:
        print("--check-raw: raw rows are encoded as in the parquet")
    print(_sizes(data))


def _columns(data: PreparedData) -> list[str]:
    """A table of the adopted columns: role, number of ids or range, embedding table."""
    tables = {field: " + ".join(fields) for fields in data.domains for field in fields}
    rows = [("column", "role", "ids or range", "table")]
    positives, count = data.report["positives"]["train"], data.rows["train"]
    rows.append((data.spec.label, "label", f"{positives / count:.4g} positive", ""))
    for field in data.spec.ids:
        role = "list of ids" if field in data.spec.lists else "id"
        rows.append((field, role, f"{data.cardinalities[field]:,} ids", tables[field]))
    for name, of in data.report["fields"].items():
        rows.append((name, "number", f"{of['min']:.4g} to {of['max']:.4g}", ""))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [
        "  ".join(
            [*(cell.ljust(w) for cell, w in zip(row[:3], widths, strict=True)), row[3]]
        ).rstrip()
        for row in rows
    ]


def _sizes(data: PreparedData) -> str:
    """Its rows, and the ids that its training rows hold."""
    from merlin_cowclip.workflows.data.counts import occurring_ids

    test = f"{data.rows['test']:,}" if data.test_files else "no"
    return (
        f"{data.rows['train']:,} training and {test} test rows, {occurring_ids(data):,} ids in "
        f"{len(data.cardinalities)} fields: {data.path}"
    )
