"""Rows into three parts: every row is in one of them, by the seed and nothing else."""

import itertools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merlin_cowclip.workflows.data.prepare.columns import Piece, Scan
from merlin_cowclip.workflows.data.prepare.split import key_cuts, keys_of, split_rows
from merlin_cowclip.workflows.data.prepared_data import PARTS
from merlin_cowclip.workflows.data.sources.base import TIME
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError

KINDS = ("random", "sequential", "time")
LABELS = np.arange(1_000) % 2
DAYS = pa.array(np.arange(1_000) // 100, pa.float64())


def split_by(
    kind, test=0.25, valid=0.2, seed=3, files=(), labels=LABELS, times=DAYS, cut=170
) -> SimpleNamespace:
    """What the split says, and the rows of each part in their order."""
    split = Split(kind, test, "t" if kind == "time" else None, valid)
    spec = DatasetSpec("toy", "y", ("item",), split=split)
    rest = n = len(labels)
    ends = {0, n}
    for rows in reversed([dict(files).get(part, 0) for part in ("valid", "test")]):
        rest -= rows  # each file has pieces of its own
        ends |= {rest}
    ends = sorted(ends | {*range(0, rest, cut)})
    with tempfile.TemporaryDirectory() as folder:
        pieces = []
        for start, stop in itertools.pairwise(ends):
            columns = {"y": labels[start:stop], TIME: times[start:stop]}
            table = pa.table(columns if kind == "time" else {"y": labels[start:stop]})
            pieces.append(Piece(Path(folder, f"{start}.arrow"), start, stop))
            with pa.ipc.new_file(str(pieces[-1].path), table.schema) as file:
                file.write(table.combine_chunks().to_batches()[0])
        scan = Scan(spec, Path(folder), duckdb.connect(), pieces, np.full(n, 9, np.uint8))
        parts = split_rows(scan, dict(files), seed)
    rows = {part: np.flatnonzero(scan.part_of == i) for i, part in enumerate(PARTS)}
    assert parts.rows == {part: len(of) for part, of in rows.items()}
    rows["train"] = rows["train"][np.argsort(keys_of(0, n, seed)[rows["train"]])]
    return SimpleNamespace(**{**parts._asdict(), "rows": rows, "part_of": scan.part_of})


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=200, unique=True), st.data())
def test_so_many_keys_are_lower_than_a_cut(keys, data):
    ranks = data.draw(st.lists(st.integers(0, len(keys) - 1), min_size=1, max_size=4))
    batches = np.array_split(np.array(keys, np.uint64), 3)
    assert key_cuts(lambda: iter(batches), ranks).tolist() == [sorted(keys)[k] for k in ranks]


def test_a_row_has_its_key_wherever_a_batch_begins():
    whole = keys_of(0, 1_000, 5)
    assert len(np.unique(whole)) == 1_000
    for start in (1, 2, 3, 4, 517):
        np.testing.assert_array_equal(keys_of(start, 1_000, 5), whole[start:])


def check_parts(parts, labels: np.ndarray) -> None:
    """A partition; training rows are shuffled, others in order; clicks are those of the labels."""
    assert tuple(parts.rows) == PARTS
    np.testing.assert_array_equal(
        np.sort([*np.concatenate([*parts.rows.values()])]), range(len(labels))
    )
    for number, (part, rows) in enumerate(parts.rows.items()):
        np.testing.assert_array_equal(np.flatnonzero(parts.part_of == number), np.sort(rows))
        assert parts.positives[part] == labels[rows].sum()
        assert (np.diff(rows.astype(int)) > 0).all() == (part != "train")
    train = parts.rows["train"]
    assert abs(np.corrcoef(train, np.arange(len(train)))[0, 1]) < 0.25


shares = st.sampled_from((0, 0.1, 0.25, 1 / 3, 0.5))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(("random", "sequential")), st.integers(1_000, 1_300), shares, shares)
def test_sizes_are_exact(kind, n, test, valid):
    """Of all rows the test part; of the others the validation part."""
    labels = np.arange(n) % 2
    parts = split_by(kind, test, valid, labels=labels)
    check_parts(parts, labels)
    tested = int(n * test + 0.5)
    validated = int((n - tested) * valid + 0.5)
    sizes = {"train": n - tested - validated, "valid": validated, "test": tested}
    assert {part: len(rows) for part, rows in parts.rows.items()} == sizes
    assert parts.boundaries == {}
    if kind == "sequential":
        assert parts.rows["test"].tolist() == [*range(n - tested, n)]
        assert parts.rows["valid"].tolist() == [*range(n - tested - validated, n - tested)]
    else:
        for rows in parts.rows.values():  # from all over
            assert not len(rows) or abs(rows.mean() - n / 2) < n / 5


@settings(max_examples=25, deadline=None)
@given(st.integers(20, 400), shares, shares, st.integers(0, 99), st.booleans())
def test_the_latest_times_are_the_tests_and_those_before_the_validations(
    distinct, test, valid, seed, dates
):
    """No time is in two parts, so that each share is the nearest possible one."""
    random, n = np.random.default_rng(seed), 1_000
    instants = random.choice(10**6, distinct, replace=False)[random.integers(0, distinct, n)]
    instants = instants + 1_700_000_000_000_000  # microseconds: 16 digits
    times = pa.array(instants, pa.timestamp("us", "UTC") if dates else pa.float64())
    labels = np.argsort(np.argsort(instants, kind="stable")) % 2  # both, whatever the part
    parts = split_by("time", test, valid, labels=labels, times=times)
    check_parts(parts, labels)
    rest = np.arange(n)
    for part, share in (("test", test), ("valid", valid)):
        rows = parts.rows[part]
        assert bool(len(rows)) == bool(share) == (part in parts.boundaries)
        if not share:
            continue
        left, wanted = instants[rest], share * len(rest)
        sizes = [np.count_nonzero(left >= time) for time in np.unique(left)[1:]]
        assert abs(len(rows) - wanted) == np.abs(np.subtract(sizes, wanted)).min()
        rest = np.setdiff1d(rest, rows)
        assert instants[rest].max() < instants[rows].min()
        boundary = parts.boundaries[part]
        if dates:
            assert boundary.endswith(" UTC")
            assert pd.Timestamp(boundary[:-4]).value // 1_000 == instants[rows].min()
        else:
            assert boundary == str(instants[rows].min())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_files_are_their_part(kind):
    """They are the last rows; a share is one of the others."""
    times = pa.array(np.random.default_rng(0).permutation(1_000), pa.float64())
    both = split_by(kind, ("t",), ("v",), files={"valid": 200, "test": 100}, times=times)
    check_parts(both, LABELS)
    assert both.rows["valid"].tolist() == [*range(700, 900)]
    assert both.rows["test"].tolist() == [*range(900, 1_000)]
    for part, share in (("test", "valid"), ("valid", "test")):
        held_out = {part: ("f",), share: 0.1}
        parts = split_by(kind, **held_out, files={part: 200}, times=times)
        check_parts(parts, LABELS)
        assert parts.rows[part].tolist() == [*range(800, 1_000)]
        assert len(parts.rows[share]) == 80
        if kind == "time":
            late = times.to_numpy()
            assert late[parts.rows[share]].min() > late[parts.rows["train"]].max()
            assert parts.boundaries[part] == f"{late[800:].min():.0f}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_the_seeds(kind):
    same, again, other = split_by(kind), split_by(kind), split_by(kind, seed=4)
    for part, rows in same.rows.items():
        np.testing.assert_array_equal(rows, again.rows[part])
    assert (same.rows["train"] != other.rows["train"]).any()
    np.testing.assert_equal((same.part_of != other.part_of).any(), kind == "random")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"labels": LABELS | (np.arange(1_000) >= 750)},
            "the test part has 0 rows with label 0 and 250 with label 1, column 'y'",
        ),
        (
            {"labels": LABELS * ((np.arange(1_000) < 600) | (np.arange(1_000) >= 750))},
            "the validation part has 150 rows with label 0 and 0 with label 1, column 'y'",
        ),
        ({"test": 1e-9}, "the test part has 0 rows with label 0 and 0 with label 1"),
        (
            {"kind": "time", "times": pa.array(np.arange(1_000) // 500, pa.float64())},
            "all 500 rows to divide have the same time, column 't'",  # once those of the test left
        ),
    ],
)
def test_a_part_needs_both_labels_and_two_times(change, words):
    with pytest.raises(UserError, match=words):
        split_by(**{"kind": "sequential", **change})
