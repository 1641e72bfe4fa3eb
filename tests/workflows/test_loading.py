"""The loader: every row once per epoch, an order of its own per epoch, and no hidden state.

The oracle is pandas reading the parquet files; `serial`, a number that no two rows share, tells
rows apart.
"""

import gc
import itertools
import threading
import time

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows import loading
from merlin_cowclip.workflows.datasets import DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.etl import prepare
from merlin_cowclip.workflows.loading import Loader
from merlin_cowclip.workflows.prepared import PreparedData

ROWS, TRAIN, TEST = 5_000, 4_000, 1_000
BATCH = 300  # divides neither a row group nor a part
THREAD = "merlin-cowclip-loader"
SPEC = DatasetSpec(
    name="toy",
    label="y",
    categorical=("user", "item"),
    continuous=("serial", "price"),
    lists=("genres", "tags"),
    split=Split("random", TEST / ROWS),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> PreparedData:
    home = tmp_path_factory.mktemp("loading")
    random = np.random.default_rng(0)

    def ids_of(field: str, most: int) -> list[str]:
        return [
            "|".join(f"{field}{i}" for i in random.integers(0, 9, random.integers(0, most)))
            for _ in range(ROWS)
        ]

    pd.DataFrame(
        {
            "y": random.integers(0, 2, ROWS),
            "user": [f"u{u}" for u in random.zipf(1.5, ROWS) % 400],
            "item": random.integers(0, 40, ROWS),
            "serial": random.permutation(ROWS),
            "price": random.normal(5, 3, ROWS),
            "genres": ids_of("g", 4),
            "tags": ids_of("t", 3),
        }
    ).to_csv(home / "log.csv", index=False)
    return prepare(SPEC, [home / "log.csv"], home / "data", progress=False)


@pytest.fixture(scope="module")
def on_disk(data) -> dict[str, pd.DataFrame]:
    """Both parts in the order on disk, lists as tuples."""
    parts = {}
    for part in ("train", "test"):
        files = sorted((data.path / part).glob("*.parquet"))
        frame = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
        for name in SPEC.lists:
            frame[name] = frame[name].map(lambda ids: tuple(int(i) for i in ids))
        parts[part] = frame
    assert len(parts["train"]) == TRAIN
    assert parts["train"]["serial"].is_unique
    return parts


@pytest.fixture
def small_windows(monkeypatch) -> int:
    """Windows of two row groups and of a number of rows that no batch divides."""
    monkeypatch.setattr(loading, "WINDOW_ROWS", 320)
    return 320


def as_frame(batches) -> pd.DataFrame:
    """Batches in Merlin's format, decoded: one line per row."""
    frames = []
    for features, labels in batches:
        columns = {SPEC.label: np.asarray(labels)[:, 0].astype("int64")}
        for name in (*SPEC.categorical, *SPEC.continuous):
            assert features[name].shape == (len(columns[SPEC.label]), 1)
            columns[name] = np.asarray(features[name])[:, 0]
        for name in SPEC.lists:
            values = np.asarray(features[f"{name}__values"])
            offsets = np.asarray(features[f"{name}__offsets"])
            assert offsets[0] == 0
            assert offsets[-1] == len(values)
            assert len(offsets) == len(columns[SPEC.label]) + 1
            columns[name] = [
                tuple(int(i) for i in values[start:stop])
                for start, stop in itertools.pairwise(offsets)
            ]
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def by_serial(frame: pd.DataFrame) -> pd.DataFrame:
    order = [SPEC.label, *SPEC.fields]
    return frame.sort_values("serial").reset_index(drop=True)[order]


def assert_same_batches(ours, theirs) -> None:
    ours, theirs = list(ours), list(theirs)
    assert len(ours) == len(theirs)
    for (features, labels), (others, other_labels) in zip(ours, theirs, strict=True):
        assert list(features) == list(others)
        np.testing.assert_array_equal(labels, other_labels)
        for name in features:
            np.testing.assert_array_equal(features[name], others[name])
            assert np.asarray(features[name]).dtype == np.asarray(others[name]).dtype


def loader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith(THREAD)]


def assert_no_thread_left() -> None:
    deadline = time.monotonic() + 10
    while loader_threads() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    assert loader_threads() == []


# What an epoch holds


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_an_epoch_holds_every_row_once(data, on_disk, epoch):
    seen = as_frame(Loader(data, batch_size=BATCH, seed=3).batches(epoch))
    pd.testing.assert_frame_equal(by_serial(seen), by_serial(on_disk["train"]))
    assert seen["genres"].map(len).max() == 3  # empty lists and full ones
    assert seen["genres"].map(len).min() == 0


@pytest.mark.parametrize("batch_size", [1_999, 160, 37])
def test_an_epoch_in_many_windows_holds_every_row_once(data, on_disk, small_windows, batch_size):
    loader = Loader(data, batch_size=batch_size, seed=3)
    assert len(loader._windows(0)) > 5
    pd.testing.assert_frame_equal(
        by_serial(as_frame(loader.batches(2))), by_serial(on_disk["train"])
    )


@pytest.mark.parametrize("batch_size", [1, 250, BATCH, 1_024, TRAIN - 1, TRAIN])
def test_len_is_the_number_of_batches_and_only_the_last_is_short(data, batch_size):
    loader = Loader(data, batch_size=batch_size)
    assert loader.rows == TRAIN
    sizes = [len(labels) for _, labels in loader.batches()]
    assert len(sizes) == len(loader)
    assert set(sizes[:-1]) <= {batch_size}
    assert sizes[-1] == (TRAIN % batch_size or batch_size)


def test_format(data):
    features, labels = next(Loader(data, batch_size=BATCH).batches())
    assert labels.shape == (BATCH, 1)
    assert labels.dtype == np.float32
    assert {name: str(column.dtype) for name, column in features.items()} == {
        **{"user": "int64", "item": "int64", "serial": "float32", "price": "float32"},
        **{"genres__values": "int64", "genres__offsets": "int64"},
        **{"tags__values": "int64", "tags__offsets": "int64"},
    }


# The order


def order(data, epoch=0, **options) -> list[float]:
    frame = as_frame(Loader(data, batch_size=BATCH, **options).batches(epoch))
    return list(frame["serial"])


@pytest.mark.parametrize("window_rows", [loading.WINDOW_ROWS, 320])
def test_the_order_is_a_function_of_seed_and_epoch(data, monkeypatch, window_rows):
    monkeypatch.setattr(loading, "WINDOW_ROWS", window_rows)
    orders = [order(data, epoch, seed=seed) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert len({tuple(o) for o in orders}) == 6
    for i, one in enumerate(orders):
        for other in orders[:i]:
            # Independent shuffles share a place about once; a rotation or a repeat would not.
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 12
    assert [order(data, e, seed=s) for s in (0, 1) for e in (0, 1, 2)] == orders


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


@pytest.mark.parametrize("window_rows", [loading.WINDOW_ROWS, 320, 1])
@pytest.mark.parametrize("batch_size", [BATCH, 1_100])
def test_start_in_the_middle(data, monkeypatch, window_rows, batch_size):
    monkeypatch.setattr(loading, "WINDOW_ROWS", window_rows)
    loader = Loader(data, batch_size=batch_size, seed=5)
    everything = list(loader.batches(3))
    for k in range(len(loader) + 1):
        assert_same_batches(loader.batches(3, start=k), everything[k:])


def test_start_reads_no_window_before_it(data, small_windows, monkeypatch):
    read = []

    class Counting(Loader):
        def _read(self, epoch, number, groups):
            read.append(number)
            return super()._read(epoch, number, groups)

    loader = Counting(data, batch_size=BATCH)
    list(loader.batches(start=len(loader) - 1))
    assert len(read) <= 2
    assert min(read) > 5


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
    monkeypatch.setattr(loading, "WINDOW_ROWS", 1)  # one row group at a time: its order is seen
    sequences = []
    for epoch in range(3):
        sequence = [group_of[serial] for serial in order(data, epoch, seed=2)]
        runs = [g for i, g in enumerate(sequence) if i == 0 or g != sequence[i - 1]]
        assert sorted(runs) == groups  # each group once, in one piece
        sequences.append(runs)
    assert groups not in sequences
    assert sequences[0] != sequences[1] != sequences[2] != sequences[0]


def test_rows_are_shuffled_across_the_row_groups_of_a_window(data, on_disk):
    place = {serial: i for i, serial in enumerate(on_disk["train"]["serial"])}
    places = np.array([place[serial] for serial in order(data, seed=2)])
    # In order, neighbours would be 1 apart; in an even shuffle a third of the rows.
    assert abs(np.abs(np.diff(places)).mean() / TRAIN - 1 / 3) < 0.03


@pytest.mark.parametrize("window_rows", [loading.WINDOW_ROWS, 320])
def test_the_test_part_keeps_the_order_on_disk(data, on_disk, monkeypatch, window_rows):
    monkeypatch.setattr(loading, "WINDOW_ROWS", window_rows)
    loader = Loader(data, "test", batch_size=BATCH)
    for epoch in (0, 1):
        seen = as_frame(loader.batches(epoch))[on_disk["test"].columns]
        pd.testing.assert_frame_equal(seen, on_disk["test"])


def test_shuffle_can_be_chosen(data, on_disk):
    kept = order(data, shuffle=False)
    assert kept == list(on_disk["train"]["serial"])
    moved = as_frame(Loader(data, "test", batch_size=BATCH, shuffle=True).batches())
    assert list(moved["serial"]) != list(on_disk["test"]["serial"])
    assert sorted(moved["serial"]) == sorted(on_disk["test"]["serial"])


# As a tf.data.Dataset


def as_numpy(dataset):
    return [
        ({name: t.numpy() for name, t in features.items()}, labels.numpy())
        for features, labels in dataset
    ]


@pytest.mark.parametrize("part", ["train", "test"])
def test_dataset_is_the_same_as_batches(data, small_windows, part):
    loader = Loader(data, part, batch_size=BATCH, seed=7)
    expected = [*loader.batches(2), *loader.batches(3)]
    assert_same_batches(as_numpy(loader.dataset(epoch=2, epochs=2)), expected)


def test_endless_dataset_goes_through_the_epochs(data):
    loader = Loader(data, batch_size=1_700, seed=7)  # 3 batches per epoch
    expected = [batch for epoch in range(3) for batch in loader.batches(epoch)]
    assert_same_batches(as_numpy(loader.dataset(epochs=None).take(9)), expected)


def test_a_stock_merlin_model_takes_the_batches(data):
    import merlin.models.tf as mm

    from merlin_cowclip.plugins._stack import tf

    tf.keras.utils.set_random_seed(0)
    inputs = mm.InputBlockV2(
        data.schema.excluding_by_name([SPEC.label]),
        categorical=mm.Embeddings(
            data.schema.select_by_name([*SPEC.categorical, *SPEC.lists]),
            dim=4,
            sequence_combiner="mean",
        ),
    )
    model = mm.Model(inputs, mm.MLPBlock([8]), mm.BinaryOutput(SPEC.label))
    loader = Loader(data, batch_size=1_500, seed=1)
    features, _ = next(loader.batches())
    assert model(features).shape == (1_500, 1)
    model.compile(optimizer="adam", metrics=[])
    history = model.fit(loader.dataset(epochs=2), epochs=2, steps_per_epoch=len(loader), verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert model.predict(Loader(data, "test", batch_size=400).dataset(), verbose=0).shape == (
        TEST,
        1,
    )


# Abandoned in the middle


@pytest.mark.parametrize("how", ["batches", "dataset", "endless dataset"])
def test_an_abandoned_iterator_leaves_no_thread(data, small_windows, how):
    loader = Loader(data, batch_size=BATCH)
    for _ in range(3):
        iterator = iter(
            {
                "batches": loader.batches,
                "dataset": loader.dataset,
                "endless dataset": lambda: loader.dataset(epochs=None),
            }[how]()
        )
        for _ in range(2):
            next(iterator)
        assert loader_threads() != []
        del iterator
        assert_no_thread_left()


def test_a_failure_while_reading_ahead_is_raised(data, small_windows):
    class Failing(Loader):
        def _read(self, epoch, number, groups):
            if number == 2:
                raise OSError("gone")
            return super()._read(epoch, number, groups)

    with pytest.raises(OSError, match="gone"):
        list(Failing(data, batch_size=BATCH).batches())
    assert_no_thread_left()


# Refused


def test_a_batch_larger_than_the_training_part_is_refused(data):
    with pytest.raises(UserError) as error:
        Loader(data, batch_size=TRAIN + 1)
    assert str(error.value) == (
        f"batch size must not exceed the training rows. Received: batch size {TRAIN + 1}, "
        f"{TRAIN} rows in {data.path}. Choose a smaller batch or prepare more rows."
    )


def test_a_batch_larger_than_the_test_part_is_one_batch(data):
    loader = Loader(data, "test", batch_size=10 * TEST)
    assert [len(labels) for _, labels in loader.batches()] == [TEST]
    assert len(loader) == 1


@pytest.mark.parametrize("batch_size", [0, -5])
def test_a_batch_that_is_not_positive_is_refused(data, batch_size):
    with pytest.raises(UserError, match=f"must be positive. Received: {batch_size}"):
        Loader(data, batch_size=batch_size)


def test_an_unknown_part_is_refused(data):
    with pytest.raises(UserError, match=r"part must be one of train, test. Received: part='valid'"):
        Loader(data, "valid", batch_size=BATCH)
