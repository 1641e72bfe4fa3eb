"""Held-out rows: disjoint, complete, only from the training part."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.adopt.adopt import adopt
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import Split
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.study import held_out
from merlin_cowclip.workflows.study.held_out import hold_out
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.runs import identity_of

from .conftest import SPEC, write_log

with quiet_imports():
    import nvtabular as nvt
    from merlin.io import Dataset
    from merlin.schema import Tags
    from nvtabular import ops


def rows(files) -> pd.DataFrame:
    frame = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    if "genres" in frame:
        frame["genres"] = frame["genres"].map(tuple)
    return frame


def multiset(frame: pd.DataFrame) -> pd.Series:
    return frame[sorted(frame)].value_counts().sort_index()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> PreparedData:
    """Without a validation part."""
    return prepared(tmp_path_factory.mktemp("source"), Split("random", 0.25, valid=0))


def prepared(home: Path, split: Split) -> PreparedData:
    log = write_log(home / "log.csv")
    return prepare(dataclasses.replace(SPEC, split=split), [log], home / "data", progress=False)


@pytest.fixture(scope="module")
def held(data, tmp_path_factory):
    """Held out of data whose test part is gone."""
    source = shutil.copytree(data.path, tmp_path_factory.mktemp("held") / "source")
    opened = PreparedData.open(source)
    shutil.rmtree(source / "test")
    return hold_out(opened, 0.2, 7, source.parent / "rows")


def test_disjoint_and_complete(data, held):
    train, valid, source = map(rows, (held.train_files, held.valid_files, data.train_files))
    assert not set(train["serial"]) & set(valid["serial"])
    pd.testing.assert_series_equal(multiset(pd.concat([train, valid])), multiset(source))
    assert len(valid) == held.rows["valid"] == int(0.2 * len(source))
    assert len(train) == held.rows["train"]


def test_both_parts_keep_the_order(data, tmp_path, monkeypatch):
    monkeypatch.setattr(held_out, "ROW_GROUP_ROWS", 50)
    held = hold_out(data, 0.2, 7, tmp_path / "rows")
    both = pd.concat([rows(held.train_files), rows(held.valid_files)])
    pd.testing.assert_series_equal(multiset(both), multiset(rows(data.train_files)))
    assert pq.ParquetFile(held.train_files[0]).metadata.row_group(0).num_rows <= 50
    place = {number: i for i, number in enumerate(rows(data.train_files)["serial"])}
    for files in (held.train_files, held.valid_files):
        assert rows(files)["serial"].map(place).is_monotonic_increasing


def test_it_is_prepared_data(data, held):
    again = PreparedData.open(held.path)
    assert again.record["derived_from"] == {
        "path": str(held.path.parent / "source"),
        "data_sha256": identity_of(data),
        "held_out": 0.2,
        "seed": 7,
    }
    assert again.cardinalities == data.cardinalities
    assert again.report["positives"]["valid"] == rows(again.valid_files)["y"].sum()
    pd.testing.assert_frame_equal(again.counts("user"), data.counts("user"))
    features, labels = next(Loader(again, "valid", batch_size=50).batches())
    assert labels.shape == (50, 1)
    assert "genres__values" in features


def test_the_seed(data, held, tmp_path):
    other = hold_out(data, 0.2, 8, tmp_path / "other")
    assert set(rows(other.valid_files)["serial"]) != set(rows(held.valid_files)["serial"])
    same = hold_out(data, 0.2, 7, tmp_path / "same")
    assert rows(same.valid_files).equals(rows(held.valid_files))


@pytest.mark.parametrize("kind", ["sequential", "time"])
def test_rows_to_hold_out_are_the_last_ones_of_such_a_split(kind, tmp_path):
    column = "serial" if kind == "time" else None
    data = prepared(tmp_path, Split(kind, 0.25, column, valid=0))
    held = hold_out(data, 0.2, 7, tmp_path / "rows")
    log = pd.read_csv(tmp_path / "log.csv")
    order = log["serial"].to_numpy() if kind == "time" else np.arange(len(log))
    wanted = order[np.argsort(order)[1_080:1_350]]  # a fifth, before the test rows
    found = rows(held.valid_files)["serial"]  # scaled to [0, 1] by the training rows
    by_serial = log.iloc[np.flatnonzero(np.isin(order, wanted))]["serial"]
    low, high = (getattr(log["serial"][np.argsort(order)[:1_350]], f)() for f in ("min", "max"))
    np.testing.assert_allclose(np.sort(found), np.sort((by_serial - low) / (high - low)), atol=1e-6)
    assert held.rows == {"train": 1_080, "valid": 270, "test": 0}


@pytest.mark.filterwarnings("ignore:Initializing an NVTabular Dataset in CPU mode")
def test_an_adopted_pipeline(tmp_path):
    random = np.random.default_rng(0)
    log = pd.DataFrame({"user": random.integers(0, 9, 600), "click": random.integers(0, 2, 600)})
    log["serial"] = np.arange(600)
    (tmp_path / "raw").mkdir()
    for i in range(2):
        log[i * 300 : (i + 1) * 300].to_parquet(tmp_path / f"raw/{i}.parquet", index=False)
    nodes = ["user"] >> ops.Categorify(out_path=str(tmp_path / "fitted"))
    label = ["click"] >> ops.AddMetadata(tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
    workflow = nvt.Workflow(nodes + label + "serial")
    raw = Dataset(str(tmp_path / "raw/*.parquet"), engine="parquet")
    workflow.fit_transform(raw).to_parquet(str(tmp_path / "train"))
    workflow.save(str(tmp_path / "workflow"))
    data = adopt(
        [str(tmp_path / "train")], tmp_path / "workflow", "click", tmp_path / "data", progress=False
    )
    held = hold_out(data, 0.25, 1, tmp_path / "rows")
    assert held.rows == {"train": 450, "valid": 150, "test": 0}
    both = pd.concat([rows(held.train_files), rows(held.valid_files)])
    source = rows(data.train_files)[["click", "user"]]
    pd.testing.assert_series_equal(multiset(both), multiset(source))


def test_parts_that_cannot_be_measured_are_refused(data, tmp_path):
    share = 1.5 / data.rows["train"]
    for held, words in (
        (1e-6, "a valid part held out of .* has 0 clicks in 0 rows"),
        (share, "a valid part held out of .* has . clicks in 1 rows"),
    ):
        with pytest.raises(UserError, match=words):
            hold_out(data, held, 7, tmp_path / "rows")
        assert not list(tmp_path.iterdir())
