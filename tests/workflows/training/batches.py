"""What the tests of the loader share: batches decoded, and a model that notes them."""

import dataclasses
import itertools

import numpy as np
import pandas as pd

from merlin_cowclip.plugins._tensorflow import mm, tf
from merlin_cowclip.workflows.data.spec import Split
from merlin_cowclip.workflows.training.loader import Loader
from tests.logs import CLICKS

ROWS, TRAIN, TEST, VALID = 5_000, 4_000, 1_000, 400
BATCH = 300  # divides neither a row group nor a part
ENDS = ("values", "offsets")  # the two arrays of a list
SPEC = dataclasses.replace(
    CLICKS, continuous=("serial", "price"), split=Split("random", TEST / ROWS, valid=0)
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
            values, offsets = (np.asarray(features[f"{name}__{end}"]) for end in ENDS)
            assert (offsets[0], offsets[-1]) == (0, len(values))
            columns[name] = [tuple(values[a:b].tolist()) for a, b in itertools.pairwise(offsets)]
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def by_serial(frame: pd.DataFrame) -> pd.DataFrame:
    order = [SPEC.label, *SPEC.fields]
    return frame.sort_values("serial").reset_index(drop=True)[order]


def assert_same_batches(ours, theirs) -> None:
    for (features, labels), (others, other_labels) in zip(ours, theirs, strict=True):
        assert list(features) == list(others)
        np.testing.assert_array_equal(labels, other_labels)
        for name in features:
            np.testing.assert_array_equal(features[name], others[name])
            assert np.asarray(features[name]).dtype == np.asarray(others[name]).dtype


def serials(data, epoch=0, **options) -> list[float]:
    """The rows of an epoch, in their order."""
    return list(as_frame(Loader(data, batch_size=BATCH, **options).batches(epoch))["serial"])


def steps_of(loader, *epochs) -> list[list[float]]:
    return [list(x["serial"][:, 0]) for epoch in epochs for x, _ in loader.batches(epoch)]


def of_ranks(data, ranks, **options) -> list[Loader]:
    return [Loader(data, rank=rank, ranks=ranks, **options) for rank in range(ranks)]


class Seeing(mm.Model):
    """A Merlin model that notes which rows each step trains on."""

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
    """Stock Merlin blocks, with a list column."""
    schema = data.schema.select_by_name([*SPEC.categorical, *SPEC.lists])
    tables = mm.Embeddings(schema, dim=4, sequence_combiner="mean")
    inputs = mm.InputBlockV2(data.schema.excluding_by_name([SPEC.label]), categorical=tables)
    model = Seeing(inputs, mm.MLPBlock([4]), mm.BinaryOutput(SPEC.label))
    model.compile(optimizer="adam", metrics=[])
    return model
