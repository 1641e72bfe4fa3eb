"""The loader: every row once per epoch, an order of its own per epoch, and no hidden state.

The oracle is pandas reading the parquet files; `serial`, a number that no two rows share, tells
rows apart.
"""

import contextlib
import functools
import gc
import itertools
import subprocess
import sys
import threading
import time
import warnings
import weakref

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.plugins._stack import mm, tf
from merlin_cowclip.workflows.data.datasets import DatasetSpec, Split
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.data.prepared import PreparedData, file_state
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training import loading
from merlin_cowclip.workflows.training.loading import FollowEpochs, Loader

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


def wait_until(holds) -> None:
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert holds()


def assert_no_thread_left() -> None:
    wait_until(lambda: loader_threads() == [])


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


ORDERS = {  # (seed, epoch): serials, in batches of 5 and windows of 9 rows or a little more
    (0, 0): "19 3 0 18 6 | 5 21 1 7 2 | 4 20 10 23 16 | 11 12 17 8 13 | 9 22 15 14",
    (0, 1): "5 4 3 7 9 | 1 10 11 6 2 | 8 0 17 18 15 | 20 14 21 22 16 | 12 19 23 13",
    (7, 0): "12 8 0 23 9 | 22 1 11 10 13 | 3 2 6 4 18 | 20 15 16 21 17 | 14 19 5 7",
    (2**40, 3): "1 15 2 17 16 | 9 3 0 10 14 | 8 11 18 19 7 | 20 22 23 21 5 | 6 4 13 12",
}


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (0, 1), (7, 0), (2**40, 3)])
def test_the_order_is_the_same_in_every_version(tmp_path, monkeypatch, seed, epoch):
    """A run that goes on in another version would else train on rows twice, and on others never.

    A change of these numbers is a change of format: a run begun before cannot go on after it.
    """
    monkeypatch.setattr(loading, "WINDOW_ROWS", 9)
    rows = np.arange(24)
    table = pa.table({"y": rows % 2, "user": rows + 3, "serial": rows.astype("float64")})
    for name, part in (("a", table.slice(0, 14)), ("b", table.slice(14))):
        pq.write_table(part, tmp_path / f"{name}.parquet", row_group_size=4)
    spec = DatasetSpec(name="tiny", label="y", categorical=("user",), continuous=("serial",))
    files = {"train": [file_state(tmp_path / f"{name}.parquet") for name in "ab"], "test": []}
    record = {"files": files, "rows": {"train": 24, "test": 0}}
    loader = Loader(PreparedData(tmp_path, spec, record), batch_size=5, seed=seed)
    batches = (x["serial"][:, 0].astype(int).astype(str) for x, _ in loader.batches(epoch))
    assert " | ".join(map(" ".join, batches)) == ORDERS[seed, epoch]


def test_groups_and_rows_are_drawn_apart(data, monkeypatch):
    """As NumPy pads seeds with zeros, [seed, epoch] and [seed, epoch, 0] are one stream."""
    groups = len(Loader(data, batch_size=BATCH)._groups)
    monkeypatch.setattr(loading, "WINDOW_ROWS", groups)  # so that both are as many
    drawn = []
    permuted = loading._permutation

    def noted(n, *key):
        drawn.append(permuted(1_000, *key))
        return permuted(n, *key)

    monkeypatch.setattr(
        loading,
        "_permutation",
        lambda n, *key: drawn.append(permuted(1_000, *key)) or permuted(n, *key),
    )
    loader = Loader(data, batch_size=BATCH)
    for epoch in (0, 1):
        list(loader.batches(epoch))
    assert len(drawn) > 2 + 2
    assert len({tuple(order) for order in drawn}) == len(drawn)
    for order in drawn:
        assert sorted(order) == list(range(1_000))


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
        def _read(self, window):
            read.append(window.number)
            return super()._read(window)

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


@pytest.mark.parametrize("window_rows", [loading.WINDOW_ROWS, 320])
def test_dataset_starts_in_the_middle(data, monkeypatch, window_rows):
    monkeypatch.setattr(loading, "WINDOW_ROWS", window_rows)
    loader = Loader(data, batch_size=BATCH, seed=7)
    expected = [batch for epoch in (2, 3, 4) for batch in loader.batches(epoch)]
    rest = loader.dataset(epochs=3, epoch=2, start=9)
    assert len(rest) == len(expected) - 9
    for _ in range(2):  # it always starts there
        assert_same_batches(as_numpy(rest), expected[9:])
    endless = loader.dataset(epochs=None, epoch=2, start=9)
    assert_same_batches(as_numpy(endless.take(20)), expected[9:29])
    assert loader.epoch == 0
    assert as_numpy(loader.dataset(start=len(loader))) == []


def test_a_stock_merlin_model_takes_the_batches(data):
    tf.keras.utils.set_random_seed(0)
    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=1)
    features, _ = next(loader.batches())
    assert model(features).shape == (1_500, 1)
    history = model.fit(loader.dataset(epochs=2), epochs=2, steps_per_epoch=len(loader), verbose=0)
    assert np.isfinite(history.history["loss"]).all()
    assert model.steps == steps_of(loader, 0, 1)
    assert model.predict(Loader(data, "test", batch_size=400).dataset(), verbose=0).shape == (
        TEST,
        1,
    )


def test_a_run_goes_on_in_the_middle_of_an_epoch(data):
    loader = Loader(data, batch_size=BATCH, seed=1)
    model = seeing(data)
    model.fit(loader.dataset(epoch=3, start=5), initial_epoch=3, epochs=4, verbose=0)
    model.fit(
        loader.dataset(epochs=None, epoch=4),
        initial_epoch=4,
        epochs=6,
        steps_per_epoch=len(loader),
        verbose=0,
    )
    assert model.steps == steps_of(loader, 3, 4, 5)[5:]


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [
        ({"categorical": ("user",)}, {"user"}),
        (
            {"continuous": ("serial",), "lists": ("genres",)},
            {"serial", "genres__values", "genres__offsets"},
        ),
    ],
)
def test_not_every_kind_of_column_has_to_be_there(tmp_path, columns, wanted):
    frame = pd.DataFrame({"y": [0, 1] * 40, "user": range(80), "serial": range(80)})
    frame["genres"] = frame["user"].map(lambda user: "|".join("ab"[: user % 3]))
    frame.to_csv(tmp_path / "log.csv", index=False)
    spec = DatasetSpec(
        name="few",
        label="y",
        **{"categorical": (), "continuous": (), "lists": (), **columns},
        split=Split("random", 0.25),
    )
    prepared = prepare(spec, [tmp_path / "log.csv"], tmp_path / "data", progress=False)
    loader = Loader(prepared, batch_size=20, seed=1)
    batches = as_numpy(loader)
    assert_same_batches(batches, loader.batches(0))
    assert [set(features) for features, _ in batches] == [wanted] * 3


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


# In a fit


class Seeing(mm.Model):
    """A Merlin model that notes which rows each step trains on, and when."""

    def __init__(self, *blocks, **options):
        super().__init__(*blocks, **options)
        self.steps = []

    def train_step(self, data):
        # Not on the path of the gradient; what it is given is what the step is given.
        tf.numpy_function(self._note, [data[0]["serial"], data[1]], tf.int64)
        return super().train_step(data)

    def _note(self, serials, labels):
        assert serials.shape == labels.shape
        self.steps.append(list(serials[:, 0]))
        return np.int64(0)


def seeing(data) -> Seeing:
    """Stock Merlin blocks, with list columns."""
    inputs = mm.InputBlockV2(
        data.schema.excluding_by_name([SPEC.label]),
        categorical=mm.Embeddings(
            data.schema.select_by_name([*SPEC.categorical, *SPEC.lists]),
            dim=4,
            sequence_combiner="mean",
        ),
    )
    model = Seeing(inputs, mm.MLPBlock([4]), mm.BinaryOutput(SPEC.label))
    model.compile(optimizer="adam", metrics=[])
    return model


def steps_of(loader, *epochs) -> list[list[float]]:
    return [list(x["serial"][:, 0]) for epoch in epochs for x, _ in loader.batches(epoch)]


def test_a_fit_trains_on_every_batch_of_its_epochs_in_order(data, small_windows):
    """With stock Merlin's loader and a pure len, batch 0 was lost and the end raised."""
    loader = Loader(data, batch_size=BATCH, seed=4)
    tf.keras.backend.clear_session()
    model = seeing(data)
    follow = FollowEpochs(loader)
    history = model.fit(loader, epochs=2, callbacks=[follow], verbose=0)
    assert model.steps == steps_of(loader, 0, 1)
    model.fit(loader, epochs=4, initial_epoch=2, callbacks=[follow], verbose=0)
    assert model.steps == steps_of(loader, 0, 1, 2, 3)
    assert np.isfinite(history.history["loss"]).all()
    for epoch in range(4):
        assert sorted(itertools.chain(*steps_of(loader, epoch))) == sorted(range_of_train(data))


def range_of_train(data) -> list[float]:
    files = sorted((data.path / "train").glob("*.parquet"))
    return list(np.concatenate([pd.read_parquet(file)["serial"].to_numpy() for file in files]))


def test_an_epoch_is_what_it_is_told_to_be(data):
    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    loader.epoch = 5
    model.fit(loader, initial_epoch=5, epochs=6, verbose=0)
    assert model.steps == steps_of(loader, 5)


def test_no_pass_moves_the_training(data):
    """Somebody looks at a batch, evaluates on the training part, or stops half way through it."""

    class Look(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            next(iter(loader))
            list(loader)
            loader.peek()
            self.model.evaluate(loader, verbose=0)
            model.steps.clear() if epoch == 0 else None

    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    callbacks = [FollowEpochs(loader), Look()]
    model.fit(loader, epochs=3, callbacks=callbacks, verbose=0)
    assert model.steps == steps_of(loader, 0, 1, 2)
    assert loader.epoch == 2


def test_epochs_of_one_order_do_not_go_unnoticed(data):
    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    model.fit(loader, verbose=0)
    with pytest.warns(UserWarning, match="order of the last one, that of epoch 0.*FollowEpochs"):
        model.fit(loader, verbose=0)
    assert model.steps == steps_of(loader, 0, 0)
    test = Loader(data, "test", batch_size=300)  # whose epochs are all alike
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(loader, epochs=2, callbacks=[FollowEpochs(loader)], verbose=0)
        assert len(list(test)) == len(list(test)) == 4
        loader.epoch = 3
        next(iter(loader))
        assert len(list(loader)) == 3


def test_what_a_fit_followed_holds_for_no_later_one(data):
    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    model.fit(loader, callbacks=[FollowEpochs(loader)], verbose=0)
    with pytest.warns(UserWarning, match="order of the last one, that of epoch 0.*FollowEpochs"):
        model.fit(loader, epochs=2, verbose=0)


def test_what_a_fit_followed_that_failed_soon_holds_no_more(data):
    """Keras tells a callback nothing of a failure."""

    class Fail(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("failed")

    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    with pytest.raises(RuntimeError, match="failed"):
        model.fit(loader, callbacks=[FollowEpochs(loader), Fail()], verbose=0)
    with pytest.warns(UserWarning, match="order of the last one, that of epoch 0.*FollowEpochs"):
        model.fit(loader, epochs=4, verbose=0)


def test_a_footer_is_parsed_once(data, monkeypatch):
    loader = Loader(data, batch_size=1_500, seed=4)
    given = []
    stock = pq.ParquetFile

    def watched(file, *, metadata=None):
        given.append(metadata)
        return stock(file, metadata=metadata)

    monkeypatch.setattr(pq, "ParquetFile", watched)
    assert len(list(loader.batches())) == 3
    assert given
    assert None not in given


def test_follow_epochs_gives_keras_own_epochs(data):
    """Whatever was done with the loader in between."""
    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    follow = FollowEpochs(loader)
    model.fit(loader, epochs=4, initial_epoch=3, callbacks=[follow], verbose=0)
    model.evaluate(loader, verbose=0)
    loader.epoch = 9
    model.fit(loader, epochs=5, initial_epoch=4, callbacks=[follow], verbose=0)
    model.fit(loader, epochs=1, callbacks=[follow], verbose=0)
    assert model.steps == steps_of(loader, 3, 4, 0)


def test_follow_epochs_with_backup_and_restore(data, tmp_path):
    """Which alone knows at which epoch the second fit starts."""

    class Stop(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise RuntimeError("stopped")

    steps = []

    class Plain(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = tf.keras.layers.Dense(1)

        def call(self, x):
            tf.numpy_function(lambda s: steps.append(list(s[:, 0])), [x["serial"]], [])
            return self.dense(x["price"])

    def fit(*callbacks):
        model = Plain()
        model.compile("sgd", "mse")
        loader = Loader(data, batch_size=1_500, seed=4)
        backup = tf.keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        follow = FollowEpochs(loader)
        model.fit(loader, epochs=3, callbacks=[backup, follow, *callbacks], verbose=0)
        return loader

    with pytest.raises(RuntimeError, match="stopped"):
        fit(Stop())
    loader = fit()
    assert steps == steps_of(loader, 0, 1, 2)


def test_class_weights_and_the_number_of_steps_leave_the_batches_alone(data):
    model = seeing(data)
    loader = Loader(data, batch_size=1_500, seed=4)
    follow = FollowEpochs(loader)
    options = {"class_weight": {0: 1.0, 1: 2.0}, "steps_per_epoch": len(loader)}
    model.fit(loader, epochs=2, callbacks=[follow], verbose=0, **options)
    assert model.steps == steps_of(loader, 0, 1)


def test_evaluate_and_predict_take_every_row_once(data, on_disk):
    model = seeing(data)
    train, test = Loader(data, batch_size=1_500), Loader(data, "test", batch_size=300)
    follow = FollowEpochs(train)
    model.fit(train, epochs=2, callbacks=[follow], validation_data=test, verbose=0)
    assert (train.epoch, test.epoch) == (1, 0)
    predicted = model.predict(test)
    assert predicted.shape == (TEST, 1)
    labels = on_disk["test"][SPEC.label].to_numpy()
    wanted = -np.mean(np.log(np.where(labels, predicted[:, 0], 1 - predicted[:, 0])))
    for _ in range(2):
        # Keras weights batches by their rows; a lost or doubled one would be seen.
        assert model.evaluate(test, verbose=0, return_dict=True)["loss"] == pytest.approx(wanted)


def test_it_has_what_merlin_asks_of_a_loader(data):
    loader = Loader(data, batch_size=BATCH, seed=6)
    first = next(loader.batches(0))
    features, labels = mm.sample_batch(loader, prepare_features=False)
    assert_same_batches([(features, labels)], [first])
    prepared, _ = mm.sample_batch(loader)
    assert isinstance(prepared["genres"], tf.RaggedTensor)
    assert_same_batches([loader.peek()], [first])
    assert loader.epoch == 0
    assert_same_batches(list(loader), loader.batches(0))
    assert_same_batches([loader.peek()], [first])
    assert loader.batch_size == BATCH
    for schema in (loader.schema, loader.input_schema, loader.output_schema):
        assert set(schema.column_names) == {SPEC.label, *SPEC.fields}
    assert len(tf.data.Dataset.zip((loader, loader))) == len(loader) == 14
    assert list(loader.element_spec[0]) == list(first[0])


def test_one_pass_after_another_and_two_side_by_side(data, small_windows):
    loader = Loader(data, batch_size=BATCH, seed=6)
    assert_same_batches(list(loader), loader.batches(0))
    iter(loader)  # Keras makes one that it never uses
    one, other = iter(loader), iter(loader)
    loader.epoch = 1
    ours = [next(one)]
    loader.epoch = 2
    theirs = [next(other)]
    for batch in other:
        theirs.append(batch)
        ours.append(next(one))
    assert_same_batches(ours, loader.batches(1))
    assert_same_batches(theirs, loader.batches(2))
    loader.epoch = 3
    assert_same_batches(list(loader.take(20)), loader.batches(3))


def test_more_iterators_than_are_served_side_by_side(data, small_windows):
    loader = Loader(data, batch_size=BATCH, seed=6)
    iterators = [iter(loader.dataset(epoch=epoch)) for epoch in range(5)]
    seen = list(zip(*iterators, strict=True))
    for epoch in range(5):
        assert_same_batches([batches[epoch] for batches in seen], loader.batches(epoch))


# Several ranks


def of_ranks(data, ranks, **options) -> list[Loader]:
    return [Loader(data, rank=rank, ranks=ranks, **options) for rank in range(ranks)]


@pytest.mark.parametrize("window_rows", [loading.WINDOW_ROWS, 320, 1])
@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_share_every_batch(data, monkeypatch, window_rows, part, ranks):
    monkeypatch.setattr(loading, "WINDOW_ROWS", window_rows)
    whole = Loader(data, part, batch_size=BATCH, seed=8, drop_last=True)
    shares = of_ranks(data, ranks, part=part, batch_size=BATCH, seed=8, drop_last=True)
    assert {len(loader) for loader in shares} == {len(whole)} == {whole.rows // BATCH}
    for epoch in (0, 3):
        together = zip(*(loader.batches(epoch) for loader in shares), strict=True)
        for batch, parts in zip(whole.batches(epoch), together, strict=True):
            assert {len(labels) for _, labels in parts} == {BATCH // ranks}
            pd.testing.assert_frame_equal(as_frame(parts), as_frame([batch]))


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (2, 3), (3, 2)])
def test_go_on_in_the_middle_with_another_number_of_ranks(
    data, small_windows, before, after, on_disk
):
    """The epoch is the same as without a break, and every row still comes once."""
    at = 6

    def rows(loaders, start, stop):
        batches = zip(*(loader.batches(2, start) for loader in loaders), strict=True)
        return [as_frame(parts) for parts in itertools.islice(batches, stop - start)]

    options = {"batch_size": 240, "seed": 8, "drop_last": True}
    broken = rows(of_ranks(data, before, **options), 0, at)
    broken += rows(of_ranks(data, after, **options), at, TRAIN // 240)
    whole = [as_frame([batch]) for batch in Loader(data, **options).batches(2)]
    assert len(broken) == len(whole) == 16
    for one, other in zip(broken, whole, strict=True):
        pd.testing.assert_frame_equal(one, other)
    serials = pd.concat(broken)["serial"]
    assert serials.is_unique
    assert set(serials) < set(on_disk["train"]["serial"])


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_below_a_batch_are_left_out_others_each_epoch(data, small_windows, on_disk, ranks):
    choice = {"drop_last": True} if ranks == 1 else {}
    loaders = of_ranks(data, ranks, batch_size=BATCH, seed=1, **choice)
    every = set(on_disk["train"]["serial"])
    left_out = []
    for epoch in range(4):
        seen = pd.concat([as_frame(loader.batches(epoch)) for loader in loaders])["serial"]
        assert seen.is_unique
        left_out.append(every - set(seen))
        assert len(left_out[-1]) == TRAIN % BATCH == 100
    # Of 100 rows among 4,000, two or three are left out twice by chance.
    assert all(len(a & b) < 50 for a, b in itertools.combinations(left_out, 2))


def test_ranks_in_a_dataset_and_a_fit(data):
    loaders = of_ranks(data, 3, batch_size=BATCH, seed=2)
    models = [seeing(data) for _ in loaders]
    for model, loader in zip(models, loaders, strict=True):
        assert_same_batches(as_numpy(loader.dataset(epoch=1)), loader.batches(1))
        model.fit(loader, verbose=0)
        assert [len(step) for step in model.steps] == [100] * 13
    whole = steps_of(Loader(data, batch_size=BATCH, seed=2, drop_last=True), 0)
    together = zip(*(model.steps for model in models), strict=True)
    assert [list(itertools.chain(*parts)) for parts in together] == whole


def test_a_rank_copies_no_more_than_its_rows(data, small_windows, monkeypatch):
    taken = []
    take = loading.Rows.take
    monkeypatch.setattr(
        loading.Rows, "take", lambda rows, order: taken.append(len(order)) or take(rows, order)
    )
    for loader in of_ranks(data, 4, batch_size=400):
        list(loader.batches())
    assert sum(taken) == TRAIN


# Threads


def test_the_next_window_is_read_ahead_and_no_more(data, small_windows):
    read = []

    class Counting(Loader):
        def _read(self, window):
            read.append((window.epoch, window.number))
            return super()._read(window)

    loader = Counting(data, batch_size=40)
    batches = iter(loader.dataset(epochs=2, epoch=3))
    next(batches)
    wait_until(lambda: len(read) == 2)
    time.sleep(0.1)
    assert read == [(3, 0), (3, 1)]
    held = [len(loader._streams[0]._read)]
    for _ in batches:
        held.append(len(loader._streams[0]._read) if loader._streams else 0)
    assert max(held) == 2
    assert held[-1] == 0  # nothing is kept of an iterator that has ended
    windows = [(w.epoch, w.number) for epoch in (3, 4) for w in loader._windows(epoch)]
    assert read == windows  # each once


def test_tensorflow_comes_for_a_batch_only_when_one_is_waited_for(data):
    asked = []

    class Counting(Loader):
        def _stream(self, iterator, stop):
            asked.append(iterator)
            return super()._stream(iterator, stop)

    loader = Counting(data, batch_size=BATCH)
    batches = iter(loader.map(lambda features, labels: labels))
    time.sleep(0.2)
    assert asked == []
    for n in range(1, 4):
        next(batches)
        time.sleep(0.1)
        assert len(asked) == n


@pytest.mark.parametrize("how", ["batches", "dataset", "endless dataset", "loader"])
def test_an_abandoned_iterator_leaves_no_thread(data, small_windows, how):
    loader = Loader(data, batch_size=BATCH)
    iterate = {
        "batches": loader.batches,
        "dataset": loader.dataset,
        "endless dataset": functools.partial(loader.dataset, epochs=None),
        "loader": loader.__iter__,
    }[how]
    iterators = [iter(iterate()) for _ in range(5)]
    for iterator in iterators:
        next(iterator)
        next(iterator)
    assert_no_thread_left()  # they end by themselves
    assert len(loader._streams) <= loading._ITERATORS  # of the others nothing is kept
    held = weakref.ref(loader)
    del iterate, iterators, iterator, loader
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("how", ["endless dataset", "a pass that stops", "fit", "a failing fit"])
def test_windows_are_let_go_with_the_iterator(data, small_windows, how):
    """An endless dataset's last windows stayed in memory for as long as its loader."""

    class Fail(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("in the middle")

    loader = Loader(data, batch_size=BATCH)
    if how.endswith("fit"):
        model = seeing(data)
        callbacks = [Fail()] if how == "a failing fit" else []
        with contextlib.suppress(RuntimeError):
            model.fit(
                loader.dataset(epochs=None), steps_per_epoch=3, callbacks=callbacks, verbose=0
            )
    else:
        iterator = iter(loader.dataset(epochs=None) if how == "endless dataset" else loader)
        next(iterator)
        assert len(loader._streams) == 1
        del iterator
    gc.collect()
    wait_until(lambda: not loader._streams)


@pytest.mark.parametrize("how", ["loader", "dataset"])
def test_a_loader_lives_as_long_as_what_it_feeds(data, how):
    def made() -> Loader:
        loader = Loader(data, batch_size=1_500, seed=3)
        return loader if how == "loader" else loader.dataset()

    expected = list(Loader(data, batch_size=1_500, seed=3).batches())
    held = made()
    iterator, mapped = iter(made()), made().map(lambda *batch: batch)
    gc.collect()
    for batches in (held, iterator, mapped):
        assert_same_batches(list(batches), expected)


def test_a_failure_while_reading_ahead_is_raised(data, small_windows):
    class Failing(Loader):
        def _read(self, window):
            if window.number == 2:
                raise OSError("gone")
            return super()._read(window)

    loader = Failing(data, batch_size=BATCH)
    with pytest.raises(OSError, match="gone"):
        list(loader.batches())
    with pytest.raises(tf.errors.OpError, match="gone"):
        list(loader.dataset())
    model = seeing(data)
    with pytest.raises(tf.errors.OpError, match="gone"):
        model.fit(loader, verbose=0)
    assert model.steps == steps_of(Loader(data, batch_size=BATCH), 0)[: len(model.steps)]
    assert_no_thread_left()


ENDS = """
import os, sys, time
from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins._stack import mm, tf
from merlin_cowclip.workflows.training import loading
from merlin_cowclip.workflows.data.prepared import PreparedData, file_state

loading.WINDOW_ROWS = 320

class Slow(loading.Loader):
    def _read(self, window):
        os.write(1, b"begun, ")
        time.sleep(0.05)  # so that something is being read, at any time
        rows = super()._read(window)
        os.write(1, b"done, ")
        return rows

loader = Slow(PreparedData.open(sys.argv[1]), batch_size=1_200)

class Model(tf.keras.Model):
    def train_step(self, data):
        return {"loss": tf.reduce_mean(data[1])}

class Fail(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise RuntimeError("in the middle")

def fit():
    model = Model()
    model.compile()
    model.fit(loader, epochs=3, callbacks=[Fail()], verbose=0)

if sys.argv[2] == "in a fit":
    fit()
iterators = [
    iterator
    for _ in range(2)
    for iterator in (
        loader.batches(),
        iter(loader),
        iter(loader.dataset()),
        iter(loader.dataset(epochs=None)),
        iter(loader.prefetch(1_000)),
        iter(loader.dataset(epochs=None).prefetch(1_000)),
    )
]
if sys.argv[2] == "in a child":
    next(iterators[0])
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    sys.exit(3)
for iterator in iterators:
    next(iterator)
sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["after a batch", "in a child", "in a fit"])
def test_a_program_ends_while_batches_are_being_made(data, where):
    """With batches made in TensorFlow's own threads, most of these programs hung in the end.

    As they are where a user asks TensorFlow to read ahead.
    """
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", ENDS, str(data.path), where],
            capture_output=True,
            text=True,
            timeout=120,
        )
        if where != "in a child":  # which has its parent's threads no more
            # None was cut off in the middle, wherever that may be.
            assert done.stdout.count("begun") == done.stdout.count("done") > 0
        if where == "in a fit":
            assert done.returncode == 1
            assert done.stderr.strip().endswith("RuntimeError: in the middle")
        else:
            assert done.returncode == 3, done.stderr
            assert "Traceback" not in done.stderr
            assert "Exception" not in done.stderr


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch size must be a whole number of at least 1. Received: 0"),
        ({"batch_size": -5}, "batch size must be a whole number of at least 1. Received: -5"),
        ({"batch_size": 8.0}, "batch size must be a whole number of at least 1. Received: 8.0"),
        ({"seed": -1}, "seed must be a whole number of at least 0. Received: -1"),
        ({"ranks": 0}, "ranks must be a whole number of at least 1. Received: 0"),
        ({"ranks": 2, "rank": 2}, "rank must be a whole number from 0 to 1. Received: 2"),
        ({"rank": 1}, "rank must be a whole number from 0 to 0. Received: 1"),
        ({"rank": -1}, "rank must be a whole number from 0 to 0. Received: -1"),
        (
            {"ranks": 7},
            "batch size must be a multiple of the number of ranks, which share each batch. "
            "Received: batch size 300, 7 ranks. Choose 294 or 301.",
        ),
        (
            {"ranks": 7, "batch_size": 5},
            "batch size must be a multiple of the number of ranks, which share each batch. "
            "Received: batch size 5, 7 ranks. Choose 7.",
        ),
        (
            {"ranks": 2, "drop_last": False},
            "drop_last must not be False on several ranks, whose batches must be equal. "
            "Received: drop_last=False, ranks=2. Leave it out, or use one rank.",
        ),
        ({"part": "valid"}, "part must be one of train, test. Received: part='valid'"),
    ],
)
def test_what_cannot_be_is_refused(data, options, message):
    with pytest.raises(UserError) as error:
        Loader(data, **{"batch_size": BATCH, **options})
    assert str(error.value) == message


@pytest.mark.parametrize("options", [{"drop_last": True}, {"ranks": 2}])
def test_a_part_of_which_nothing_would_be_left_is_refused(data, options):
    with pytest.raises(UserError, match=f"must not exceed the test rows. Received: .* {TEST} rows"):
        Loader(data, "test", batch_size=TEST + 2, **options)


def test_a_part_without_rows_is_refused(data):
    """An adopted pipeline may have no test part."""
    record = {**data.record, "files": {"train": [], "test": []}, "rows": {"train": 0, "test": 0}}
    with pytest.raises(UserError, match="the test part must have rows. Received: none in"):
        Loader(PreparedData(data.path, data.spec, record), "test", batch_size=BATCH)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"epoch": -1}, "epoch must be a whole number of at least 0. Received: -1"),
        ({"start": -1}, "start must be a whole number from 0 to 14. Received: -1"),
        ({"start": 15}, "start must be a whole number from 0 to 14. Received: 15"),
    ],
)
def test_a_place_that_is_not_there_is_refused(data, place, message):
    loader = Loader(data, batch_size=BATCH)
    for ask in (loader.batches, loader.dataset):
        with pytest.raises(UserError) as error:
            ask(**place)
        assert str(error.value) == message
    with pytest.raises(UserError, match="epochs must be a whole number of at least 1. Received: 0"):
        loader.dataset(epochs=0)
    with pytest.raises(UserError, match="epoch must be a whole number of at least 0. Received: -1"):
        loader.epoch = -1
    assert loader.epoch == 0
