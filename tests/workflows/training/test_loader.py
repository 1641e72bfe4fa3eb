"""The loader: every row once per epoch, an order of its own per epoch, and no hidden state.

The oracle is pandas reading the parquet files; `serial`, a number that no two rows share, tells
rows apart.
"""

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.plugins._tensorflow import mm, tf
from merlin_cowclip.workflows.data.prepared_data import PreparedData, file_state
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training import loader as module
from merlin_cowclip.workflows.training.loader import WINDOW_ROWS, Loader

from .batches import (
    BATCH,
    SPEC,
    TEST,
    TRAIN,
    as_frame,
    as_numpy,
    assert_same_batches,
    by_serial,
    serials,
)
from .test_order import ORDERS

# What an epoch holds


@pytest.mark.parametrize(
    ("window_rows", "batch_size", "epoch"),
    [(WINDOW_ROWS, BATCH, 0), (320, 1_999, 1), (320, 37, 5)],
)
def test_an_epoch_holds_every_row_once(data, on_disk, monkeypatch, window_rows, batch_size, epoch):
    monkeypatch.setattr(module, "WINDOW_ROWS", window_rows)
    seen = as_frame(Loader(data, batch_size=batch_size, seed=3).batches(epoch))
    pd.testing.assert_frame_equal(by_serial(seen), by_serial(on_disk["train"]))
    assert seen["genres"].map(len).max() == 3  # empty lists and full ones
    assert seen["genres"].map(len).min() == 0


@pytest.mark.parametrize("batch_size", [250, BATCH, TRAIN - 1, TRAIN])
def test_len_is_the_number_of_batches_and_only_the_last_is_short(data, batch_size):
    loader = Loader(data, batch_size=batch_size)
    assert loader.rows == TRAIN
    sizes = [len(labels) for _, labels in loader.batches()]
    assert len(sizes) == len(loader)
    assert set(sizes[:-1]) <= {batch_size}
    assert sizes[-1] == (TRAIN % batch_size or batch_size)
    assert sum(sizes) == loader.rows_per_epoch == TRAIN


# The order


def test_the_order_is_a_function_of_seed_and_epoch(data, small_windows):
    orders = [serials(data, epoch, seed=seed) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(o) for o in orders}) == 6
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # Independent shuffles share a place about once; a rotation or a repeat would not.
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 12
    assert [serials(data, e, seed=s) for s in (0, 1) for e in (0, 1, 2)] == orders


@pytest.mark.parametrize(("seed", "epoch"), ORDERS)
def test_rows_come_in_the_order_of_every_version(tmp_path, monkeypatch, seed, epoch):
    monkeypatch.setattr(module, "WINDOW_ROWS", 9)
    rows = np.arange(24)
    table = pa.table({"y": rows % 2, "user": rows + 3, "serial": rows.astype("float64")})
    for name, part in (("a", table.slice(0, 14)), ("b", table.slice(14))):
        pq.write_table(part, tmp_path / f"{name}.parquet", row_group_size=4)
    spec = DatasetSpec(name="tiny", label="y", categorical=("user",), continuous=("serial",))
    files = {"train": [file_state(tmp_path / f"{name}.parquet") for name in "ab"]}
    record = {"files": files, "rows": {"train": 24}}
    loader = Loader(PreparedData(tmp_path, spec, record), batch_size=5, seed=seed)
    batches = (x["serial"][:, 0].astype(int).astype(str) for x, _ in loader.batches(epoch))
    assert " | ".join(map(" ".join, batches)) == ORDERS[seed, epoch]


def test_neither_len_nor_another_iterator_moves_the_loader(data):
    """Stock Merlin's position lies in the loader: len() in mid-epoch starts it over."""
    loader = Loader(data, batch_size=BATCH, seed=9)
    expected = list(loader.batches(4))
    running = loader.batches(4)
    seen = [next(running)]
    len(loader)
    other = loader.batches(4)
    next(other)
    next(iter(loader.dataset(epoch=4)))
    seen += list(running)
    assert_same_batches(seen, expected)
    assert_same_batches(Loader(data, batch_size=BATCH, seed=9).batches(4), expected)


@pytest.mark.parametrize(
    ("window_rows", "batch_size"), [(WINDOW_ROWS, BATCH), (320, 1_100), (1, 1_100)]
)
def test_start_in_the_middle(data, monkeypatch, window_rows, batch_size):
    monkeypatch.setattr(module, "WINDOW_ROWS", window_rows)
    loader = Loader(data, batch_size=batch_size, seed=5)
    everything = list(loader.batches(3))
    for k in range(len(loader) + 1):
        assert_same_batches(loader.batches(3, start=k), everything[k:])


def test_parts_are_shuffled_and_not_only_the_rows_in_them(data, monkeypatch):
    """Stock Merlin reads the partitions of every epoch in the order on disk."""
    group_of = {}
    for file in sorted((data.path / "train").glob("*.parquet")):
        parquet = pq.ParquetFile(file)
        for group in range(parquet.num_row_groups):
            for serial in parquet.read_row_group(group, ["serial"])["serial"].to_numpy():
                group_of[serial] = (file.name, group)
    groups = sorted(set(group_of.values()))
    assert len(groups) >= 16
    monkeypatch.setattr(module, "WINDOW_ROWS", 1)  # one row group at a time: its order is seen
    sequences = []
    for epoch in range(3):
        sequence = [group_of[serial] for serial in serials(data, epoch, seed=2)]
        runs = [g for i, g in enumerate(sequence) if i == 0 or g != sequence[i - 1]]
        assert sorted(runs) == groups  # each group once, in one piece
        sequences.append(runs)
    assert groups not in sequences
    assert sequences[0] != sequences[1] != sequences[2] != sequences[0]


def test_the_test_part_keeps_the_order_on_disk(data, on_disk, small_windows):
    loader = Loader(data, "test", batch_size=BATCH)
    for epoch in (0, 1):
        seen = as_frame(loader.batches(epoch))[on_disk["test"].columns]
        pd.testing.assert_frame_equal(seen, on_disk["test"])


# As a tf.data.Dataset
def test_dataset_starts_in_the_middle(data, small_windows):
    loader = Loader(data, batch_size=BATCH, seed=7)
    expected = [batch for epoch in (2, 3, 4) for batch in loader.batches(epoch)]
    rest = loader.dataset(epochs=3, epoch=2, start=9)
    assert len(rest) == len(expected) - 9
    for _ in range(2):  # it always starts there
        assert_same_batches(as_numpy(rest), expected[9:])
    endless = loader.dataset(epochs=None, epoch=2, start=9)
    assert_same_batches(as_numpy(endless.take(20)), expected[9:29])
    assert as_numpy(loader.dataset(start=len(loader))) == []


def test_empty_row_groups_are_passed_over(data, on_disk, tmp_path, small_windows):
    files = sorted((data.path / "train").glob("*.parquet"))
    nothing = pq.read_table(files[0]).slice(0, 0)
    pq.write_table(nothing, tmp_path / "empty.parquet")
    with pq.ParquetWriter(tmp_path / "both.parquet", nothing.schema) as writer:
        for table in (nothing, *map(pq.read_table, files), nothing):
            writer.write_table(table, row_group_size=500)
    paths = [tmp_path / name for name in ("empty.parquet", "both.parquet", "empty.parquet")]
    record = {**data.record, "files": {"train": [file_state(path) for path in paths]}}
    loader = Loader(PreparedData(data.path, data.spec, record), batch_size=BATCH)
    pd.testing.assert_frame_equal(by_serial(as_frame(loader)), by_serial(on_disk["train"]))


def test_it_has_what_merlin_asks_of_a_loader(data):
    loader = Loader(data, batch_size=BATCH, seed=6)
    first = next(loader.batches(0))
    features, labels = mm.sample_batch(loader, prepare_features=False)
    assert_same_batches([(features, labels)], [first])
    prepared, _ = mm.sample_batch(loader)
    assert isinstance(prepared["genres"], tf.RaggedTensor)
    assert_same_batches([loader.peek()], [first])
    assert_same_batches(list(loader), loader.batches(0))
    assert_same_batches([loader.peek()], [first])
    assert loader.batch_size == BATCH
    for schema in (loader.schema, loader.input_schema, loader.output_schema):
        assert set(schema.column_names) == {SPEC.label, *SPEC.fields}
    assert len(tf.data.Dataset.zip((loader, loader))) == len(loader) == 14
    assert list(loader.element_spec[0]) == list(first[0])


# Refused


def test_a_batch_larger_than_the_training_part_is_refused(data):
    words = f"must not exceed the training rows. Received: batch size {TRAIN + 1}, {TRAIN} rows in"
    with pytest.raises(UserError, match=words):
        Loader(data, batch_size=TRAIN + 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 8.0}, "batch size must be a whole number of at least 1. Received: 8.0"),
        ({"seed": -1}, "seed must be a whole number of at least 0. Received: -1"),
        ({"ranks": 0}, "ranks must be a whole number of at least 1. Received: 0"),
        ({"ranks": 2, "rank": 2}, "rank must be a whole number from 0 to 1. Received: 2"),
        ({"ranks": 7}, "multiple of the number of ranks, .* 300, 7 ranks. Choose another"),
        ({"part": "dev"}, "part must be one of train, valid, test. Received: part='dev'"),
    ],
)
def test_what_cannot_be_is_refused(data, options, message):
    with pytest.raises(UserError, match=message):
        Loader(data, **{"batch_size": BATCH, **options})


def test_epochs_of_one_batch(data):
    """More of them are made ahead than one."""
    loader = Loader(data, batch_size=TRAIN, seed=3)
    wanted = [batch for epoch in range(1, 6) for batch in loader.batches(epoch)]
    assert_same_batches(as_numpy(loader.dataset(epochs=None, epoch=1).take(5)), wanted)


@pytest.mark.parametrize("options", [{"drop_last": True}, {"ranks": 2}])
def test_a_part_of_which_nothing_would_be_left_is_refused(data, options):
    with pytest.raises(UserError, match=f"must not exceed the test rows. Received: .* {TEST} rows"):
        Loader(data, "test", batch_size=TEST + 2, **options)


def test_a_part_without_rows_is_refused(data):
    """An adopted pipeline may have no test part."""
    record = {**data.record, "files": {"test": []}, "rows": {"test": 0}}
    with pytest.raises(UserError, match="has no test part. Prepare it again with --test"):
        Loader(PreparedData(data.path, data.spec, record), "test", batch_size=BATCH)


def test_a_place_that_is_not_there_is_refused(data):
    loader = Loader(data, batch_size=BATCH)
    for ask in (loader.batches, loader.dataset):
        with pytest.raises(UserError, match="epoch must be a whole number of at least 0"):
            ask(epoch=-1)
        with pytest.raises(UserError, match="from 0 to 14. Received: 15"):
            ask(start=15)
    with pytest.raises(UserError, match="epochs must be a whole number of at least 1. Received: 0"):
        loader.dataset(epochs=0)
