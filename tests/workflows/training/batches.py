"""What the tests of the loader share: a log, its batches decoded, and a model that notes them."""

import itertools
import time

import numpy as np
import pandas as pd

from merlin_cowclip.plugins._tensorflow import mm, tf
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.training.loader import Loader

ROWS, TRAIN, TEST, VALID = 5_000, 4_000, 1_000, 400
BATCH = 300  # divides neither a row group nor a part
SPEC = DatasetSpec(
    name="toy",
    label="y",
    categorical=("user", "item"),
    continuous=("serial", "price"),
    lists=("genres", "tags"),
    split=Split("random", TEST / ROWS, valid=0),
)


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


def as_numpy(dataset):
    return [
        ({name: t.numpy() for name, t in features.items()}, labels.numpy())
        for features, labels in dataset
    ]


def serials(data, epoch=0, **options) -> list[float]:
    """The rows of an epoch, in their order."""
    return list(as_frame(Loader(data, batch_size=BATCH, **options).batches(epoch))["serial"])


def steps_of(loader, *epochs) -> list[list[float]]:
    return [list(x["serial"][:, 0]) for epoch in epochs for x, _ in loader.batches(epoch)]


def of_ranks(data, ranks, **options) -> list[Loader]:
    return [Loader(data, rank=rank, ranks=ranks, **options) for rank in range(ranks)]


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


def wait_until(holds) -> None:
    deadline = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert holds()
