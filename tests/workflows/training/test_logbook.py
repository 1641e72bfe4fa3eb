"""TensorBoard's events: as TensorFlow writes them, and in the file at once."""

import math
import resource

import pytest

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.logbook import Logbook
from merlin_cowclip.workflows.training.train import as_user_errors

VALUES = {
    "all/loss": 0.1,
    "all/samples_per_second": 1234567.89,
    "field_ids_per_batch/embeddings/größe": 3,
    "all/valid_auc": math.nan,
    "all/dense_lr": math.inf,
}


def shown(folder):
    """Step, tag, page and value of all that TensorBoard shows of a folder."""
    found = []
    for path in folder.iterdir():
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                number = tf.make_ndarray(value.tensor)
                page = value.metadata.plugin_data.plugin_name
                found.append((event.step, value.tag, page, number.dtype, str(number)))
    return found


def test_scalars_are_those_of_tensorflow(tmp_path):
    with Logbook(tmp_path) as book:
        book.scalars(50, VALUES)
        book.scalars(2**40, VALUES)
        ours = shown(tmp_path / "logs")  # none waits for a flush
    with tf.summary.create_file_writer(str(tmp_path / "theirs")).as_default():
        for step in (50, 2**40):
            for tag, value in VALUES.items():
                tf.summary.scalar(tag, value, step)
    assert len(ours) == 10
    assert ours == shown(tmp_path / "theirs")


def test_two_of_one_second_have_their_own_files(tmp_path):
    for step in (1, 2):
        with Logbook(tmp_path) as book:
            book.scalars(step, {"a": 1.0})
    assert sorted(step for step, *_ in shown(tmp_path / "logs")) == [1, 2]


def test_a_full_disk(tmp_path):
    """As one of 20 kB: no file may have more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    refused = pytest.raises(UserError, match="output needs disk space. Received: none left for")
    with refused, as_user_errors(None, tmp_path), Logbook(tmp_path) as book:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        try:
            for step in range(20_000 // 60):
                book.scalars(step, VALUES)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
