"""Day after day: several folders of one vocabulary, and tables that grow with it."""

import dataclasses

import numpy as np
import pytest

from merlin_cowclip.workflows import (
    Loader,
    PreparedData,
    TrainConfig,
    evaluate,
    prepare,
    resume,
    train,
)
from merlin_cowclip.workflows.data.prepare.fit import Encoding
from merlin_cowclip.workflows.data.prepared_data import difference, inputs_of
from merlin_cowclip.workflows.data.spec import Split
from merlin_cowclip.workflows.errors import UserError
from tests.logs import CLICKS, click_log, write_csv

SPEC = dataclasses.replace(CLICKS, split=Split("sequential", 0.2))
CONFIG = TrainConfig(
    model="deepfm", batch_size=256, epochs=1, mlp=(8,), embedding_dim=4, seed=3, rule="none"
)


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """Each day has users that the last one had not."""
    home, days = tmp_path_factory.mktemp("days"), []
    for day in range(2):
        log = click_log(2_000, day)
        log["user"] = log["user"].where(log["serial"] % 2 == 0, f"{day} " + log["user"])
        like = days and Encoding(SPEC, days[-1].record["ranges"], days[-1].path)
        options = {"like": like or None, "grow": bool(like), "progress": False}
        days.append(prepare(SPEC, [write_csv(log, home / "csv")], home / str(day), **options))
    return days


@pytest.fixture(scope="module")
def run(days, tmp_path_factory):
    return train(days[0], CONFIG, tmp_path_factory.mktemp("run") / "run", progress=False)


def test_several_folders_are_trained_as_one(days, tmp_path):
    both = PreparedData.open_all([days[0].path, days[1].path])
    assert both.rows == {"train": 2 * 1_440, "valid": 160, "test": 400}
    assert both.train_files == [*days[0].train_files, *days[1].train_files]
    assert (both.valid_files, both.test_files) == (days[1].valid_files, days[1].test_files)
    assert both.cardinalities == days[1].cardinalities
    run = train(both, CONFIG, tmp_path / "both", progress=False)
    assert run.result["last_step"] == -(-2 * 1_440 // 256)
    quality = evaluate(run.model(), Loader(run.data(), "test", batch_size=512))
    assert quality.auc == run.result["auc"]
    more = resume(tmp_path / "both", epochs=2, progress=False)
    assert more.result["last_step"] == 2 * -(-2 * 1_440 // 256)


def test_folders_in_another_order_or_of_other_workflows_are_refused(days):
    with pytest.raises(UserError, match="differ in cardinalities of 'user'.*--vocabulary-from"):
        PreparedData.open_all([days[1].path, days[0].path])
    first, second = ({**inputs_of(day), "cardinalities": day.cardinalities} for day in days)
    assert difference(first, days[0].path, days[1], grown=True) is None
    # The ids of other adopted workflows may be the same, and their numbers others.
    first["ranges"], first["cardinalities"] = None, second["cardinalities"]
    pipeline = "the pipeline that it was adopted from"
    assert difference(first, days[0].path, days[1], grown=True) == pipeline


def test_a_warm_start_keeps_what_known_ids_learned(days, run, tmp_path):
    """With learning rates of almost 0, the grown model predicts what the first one did."""
    config = dataclasses.replace(CONFIG, dense_lr=1e-12, embedding_lr=1e-12, l2=0.0)
    grown = train(days[1], config, tmp_path / "grown", warm_start=run.path, progress=False)
    features, _ = Loader(days[0], batch_size=200).peek()
    np.testing.assert_allclose(grown.model()(features), run.model()(features), atol=1e-6)
    assert grown.config["cardinalities"]["user"] > run.config["cardinalities"]["user"]


def test_what_a_grown_vocabulary_excludes(days, run, tmp_path):
    with pytest.raises(UserError, match="--keep-optimizer needs the ids of the run"):
        train(days[1], CONFIG, tmp_path / "a", warm_start=run.path, keep_optimizer=True)
    with pytest.raises(UserError, match="in cardinalities of 'user'.*Evaluate on raw rows"):
        run.check_vocabulary(days[1])
