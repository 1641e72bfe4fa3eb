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
    assert_same_batches,
    by_serial,
    seeing,
    serials,
    steps_of,
)
from .test_order import ORDERS

# What an epoch holds


@pytest.mark.parametrize(
    ("window_rows", "batch_size", "epoch"),
    [(WINDOW_ROWS, BATCH, 0), (320, 1_999, 1), (320, 37, 5)],
)
def test_an_epoch_has_every_row_once(data, on_disk, monkeypatch, window_rows, batch_size, epoch):
    monkeypatch.setattr(module, "WINDOW_ROWS", window_rows)
    loader = Loader(data, batch_size=batch_size, seed=3)
    batches = list(loader.batches(epoch))
    sizes = [len(labels) for _, labels in batches]
    assert sizes == [batch_size] * (TRAIN // batch_size) + [TRAIN % batch_size]
    assert (len(loader), loader.rows_per_epoch) == (len(sizes), TRAIN)
    seen = as_frame(batches)
    pd.testing.assert_frame_equal(by_serial(seen), by_serial(on_disk["train"]))
    assert set(seen["genres"].map(len)) == {0, 1, 2, 3}


# The order


def test_the_order_is_a_function_of_seed_and_epoch(data, small_windows):
    orders = [serials(data, epoch, seed=seed) for seed in (0, 1) for epoch in (0, 1)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # Independent shuffles share a place about once; a rotation or a repeat would not.
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 12
    assert [serials(data, epoch, seed=seed) for seed in (0, 1) for epoch in (0, 1)] == orders


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


@pytest.mark.parametrize(
    ("window_rows", "batch_size"), [(WINDOW_ROWS, BATCH), (320, 1_100), (1, 1_100)]
)
def test_start_in_the_middle(data, monkeypatch, window_rows, batch_size):
    monkeypatch.setattr(module, "WINDOW_ROWS", window_rows)
    loader = Loader(data, batch_size=batch_size, seed=5)
    everything = list(loader.batches(3))
    for k in range(len(loader) + 1):
        assert_same_batches(loader.batches(3, start=k), everything[k:])


def test_the_test_part_keeps_the_order_on_disk(data, on_disk, small_windows):
    seen = as_frame(Loader(data, "test", batch_size=BATCH).batches(1))
    pd.testing.assert_frame_equal(seen[on_disk["test"].columns], on_disk["test"])


# As a tf.data.Dataset, in Merlin and in Keras


def test_dataset_starts_in_the_middle(data, small_windows):
    loader = Loader(data, batch_size=BATCH, seed=7)
    expected = [batch for epoch in (2, 3, 4) for batch in loader.batches(epoch)]
    rest = loader.dataset(epochs=3, epoch=2, start=9)
    assert len(rest) == len(expected) - 9
    for _ in range(2):  # it always starts there
        assert_same_batches(rest, expected[9:])
    endless = loader.dataset(epochs=None, epoch=2, start=9)
    assert_same_batches(endless.take(20), expected[9:29])
    assert list(loader.dataset(start=len(loader))) == []


def test_it_has_what_merlin_asks_of_a_loader(data):
    loader = Loader(data, batch_size=BATCH, seed=6)
    first = next(loader.batches(0))
    assert_same_batches([mm.sample_batch(loader, prepare_features=False)], [first])
    prepared, _ = mm.sample_batch(loader)
    assert isinstance(prepared["genres"], tf.RaggedTensor)
    assert_same_batches(list(loader), loader.batches(0))
    for schema in (loader.schema, loader.input_schema, loader.output_schema):
        assert set(schema.column_names) == {SPEC.label, *SPEC.fields}
    assert len(tf.data.Dataset.zip((loader, loader))) == len(loader) == 14


def test_a_fit_trains_on_every_batch_of_its_epochs_in_order(data, small_windows):
    """A stock Merlin model, also on a part of an epoch, as a run that resumes has it."""
    loader = Loader(data, batch_size=BATCH, seed=4)
    model = seeing(data)
    options = {"class_weight": {0: 1.0, 1: 2.0}, "steps_per_epoch": len(loader), "verbose": 0}
    history = model.fit(loader.dataset(epochs=None), epochs=2, validation_data=loader, **options)
    assert np.isfinite(history.history["loss"]).all()
    model.fit(loader.dataset(epoch=3, start=5), verbose=0)
    assert model.steps == steps_of(loader, 0, 1) + steps_of(loader, 3)[5:]


def test_evaluate_and_predict_take_every_row_once(data, on_disk):
    model = seeing(data)
    test = Loader(data, "test", batch_size=300)
    predicted = model.predict(test)
    assert predicted.shape == (TEST, 1)
    labels = on_disk["test"][SPEC.label].to_numpy()
    wanted = -np.mean(np.log(np.where(labels, predicted[:, 0], 1 - predicted[:, 0])))
    # Keras weights batches by their rows; a lost or doubled one would be seen.
    assert model.evaluate(test, verbose=0, return_dict=True)["loss"] == pytest.approx(wanted)


# Refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": TRAIN + 1}, "must not exceed the training rows. Received: .* 4000 rows in"),
        ({"batch_size": 8.0}, "batch size must be a whole number of at least 1. Received: 8.0"),
        ({"seed": -1}, "seed must be a whole number of at least 0. Received: -1"),
        ({"ranks": 2, "rank": 2}, "rank must be a whole number from 0 to 1. Received: 2"),
        ({"ranks": 7}, "multiple of the number of ranks, .* 300, 7 ranks. Choose another"),
        ({"part": "dev"}, "part must be one of train, valid, test. Received: part='dev'"),
        ({"part": "test", "batch_size": 1_002, "drop_last": True}, "must not exceed the test rows"),
    ],
)
def test_options_out_of_range_are_refused(data, options, message):
    with pytest.raises(UserError, match=message):
        Loader(data, **{"batch_size": BATCH, **options})


def test_a_part_without_rows_is_refused(data):
    """An adopted pipeline may have no test part."""
    record = {**data.record, "files": {"test": []}, "rows": {"test": 0}}
    with pytest.raises(UserError, match="has no test part. Prepare it again with --test"):
        Loader(PreparedData(data.path, data.spec, record), "test", batch_size=BATCH)


@pytest.mark.parametrize("place", [{"epoch": -1}, {"start": 15}, {"epochs": 0}])
def test_a_place_out_of_range_is_refused(data, place):
    (name,) = place
    with pytest.raises(UserError, match=f"{name} must be a whole number"):
        Loader(data, batch_size=BATCH).dataset(**place)
