"""Day after day: several folders of one vocabulary, and tables that grow with it."""

import dataclasses

import numpy as np
import pandas as pd
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
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError

SPEC = DatasetSpec(
    "days", "y", ("user", "item"), ("price",), lists=("tags",), split=Split("sequential", 0.2)
)
CONFIG = TrainConfig(
    model="deepfm", batch_size=256, epochs=1, mlp=(8,), embedding_dim=4, seed=3, rule="none"
)


def write_day(path, day):
    """Each day has users that the last one had not."""
    random = np.random.default_rng(day)
    users = random.integers(50 * day, 50 * day + 100, 2_000)
    frame = pd.DataFrame(
        {
            "y": (random.random(2_000) < 0.2 + 0.5 * (users % 3 == 0)).astype(int),
            "user": [f"u{u}" for u in users],
            "item": random.integers(0, 30, 2_000).astype(str),
            "price": random.random(2_000),
            "tags": ["|".join(map(str, random.integers(0, 9 + day, u % 3))) for u in users],
        }
    )
    frame.to_csv(path, index=False)
    return path


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    home, days = tmp_path_factory.mktemp("days"), []
    for day in range(3):
        like = days and Encoding(SPEC, days[-1].record["ranges"], days[-1].path)
        log = write_day(home / f"{day}.csv", day)
        options = {"like": like or None, "grow": bool(like), "progress": False}
        days.append(prepare(SPEC, [log], home / str(day), **options))
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
    done = train(both, CONFIG, tmp_path / "both", progress=False)
    assert done.result["last_step"] == -(-2 * 1_440 // 256)
    assert (
        evaluate(done.model(), Loader(done.data(), "test", batch_size=512)).auc
        == done.result["auc"]
    )
    more = resume(tmp_path / "both", epochs=2, progress=False)
    assert more.result["last_step"] == 2 * -(-2 * 1_440 // 256)


def test_folders_in_another_order_or_of_other_ids_are_refused(days, tmp_path):
    with pytest.raises(UserError, match="differ in cardinalities of '.*--vocabulary-from"):
        PreparedData.open_all([days[1].path, days[0].path])
    spec = dataclasses.replace(SPEC, categorical=("user",))
    log = write_day(tmp_path / "log.csv", 0)
    other = prepare(spec, [log], tmp_path / "other", progress=False)
    with pytest.raises(UserError, match="differ in cardinalities of"):
        PreparedData.open_all([days[0].path, other.path])


def test_folders_adopted_from_other_workflows_are_refused(days):
    """Their ids may be the same, and their numbers others."""
    first, second = ({**inputs_of(day), "cardinalities": day.cardinalities} for day in days[:2])
    assert difference(first, days[0].path, days[1], grown=True) is None
    first["ranges"], first["cardinalities"] = None, second["cardinalities"]
    found = difference(first, days[0].path, days[1], grown=True)
    assert found == "the pipeline that it was adopted from"


def test_a_warm_start_keeps_what_known_ids_learned(days, run, tmp_path):
    """With learning rates of almost 0, the grown model predicts what the first one did."""
    config = dataclasses.replace(CONFIG, dense_lr=1e-12, embedding_lr=1e-12, l2=0.0, rule="none")
    grown = train(days[1], config, tmp_path / "grown", warm_start=run.path, progress=False)
    before, after = run.model(), grown.model()
    spec, rows = days[0].spec, pd.concat(map(pd.read_parquet, days[0].train_files))[:200]
    rows = rows[rows["tags"].map(len) > 0]
    batch = {name: rows[[name]].to_numpy() for name in (*spec.categorical, "price")}
    batch["price"] = batch["price"].astype(np.float32)
    batch["tags__values"] = np.concatenate(rows["tags"].to_list())
    batch["tags__offsets"] = np.cumsum([0, *rows["tags"].map(len)])
    np.testing.assert_allclose(after(batch), before(batch), atol=1e-6)
    assert grown.config["cardinalities"]["user"] > run.config["cardinalities"]["user"]


def test_what_a_grown_vocabulary_excludes(days, run, tmp_path):
    with pytest.raises(UserError, match="--keep-optimizer needs the ids of the run"):
        train(days[1], CONFIG, tmp_path / "a", warm_start=run.path, keep_optimizer=True)
    with pytest.raises(UserError, match="in cardinalities of 'tags'.*Evaluate on raw rows"):
        run.check_vocabulary(days[1])
