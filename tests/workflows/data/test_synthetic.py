"""Synthetic logs: their formats, their power law, and that the planted truth is the truth."""

import gzip
import json

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import OneHotEncoder

from merlin_cowclip.workflows.data import synthetic
from merlin_cowclip.workflows.data.spec import CRITEO
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.errors import UserError

AVAZU_HEADER = (
    "id,click,hour,C1,banner_pos,site_id,site_domain,site_category,app_id,app_domain,"
    "app_category,device_id,device_ip,device_model,device_type,device_conn_type,"
    "C14,C15,C16,C17,C18,C19,C20,C21"
)


@pytest.fixture
def small_calibration(monkeypatch):
    monkeypatch.setattr(synthetic, "CALIBRATION_ROWS", 1_000)


@pytest.fixture(scope="module")
def criteo(tmp_path_factory):
    path = tmp_path_factory.mktemp("synthetic") / "criteo.txt"
    truth = write_synthetic("criteo", path, rows=60_000, seed=3, cardinality=20_000)
    ids = dict.fromkeys(CRITEO.categorical, str)
    return truth, path, pd.read_csv(path, sep="\t", header=None, names=CRITEO.columns, dtype=ids)


def test_criteo_format(criteo):
    truth, path, log = criteo
    assert len(log) == truth.rows == 60_000
    assert {line.count("\t") for line in path.read_text().splitlines()} == {39}
    for name in CRITEO.categorical:
        assert log[name].dropna().str.fullmatch("[0-9a-f]{8}").all()
    numbers = log[list(CRITEO.continuous)]
    assert (numbers.dropna() == numbers.dropna().round()).all(axis=None)
    assert numbers["I2"].min() < 0
    assert numbers["I5"].max() > 100_000
    assert 0.7 < log["C22"].isna().mean() < 0.8
    sizes = log[list(CRITEO.categorical)].nunique()
    assert (sizes.min(), sizes.max() > 5_000) == (3, True)
    counts = log["C3"].value_counts()
    assert (counts <= 3).mean() > 0.5  # a heavy tail
    assert counts.iloc[:100].sum() > 0.25 * counts.sum()  # and a head


def test_truth_is_written_and_is_in_range(criteo):
    truth, path, log = criteo
    assert json.loads((path.parent / "criteo.txt.truth.json").read_text()) == vars(truth)
    assert truth.click_rate == log["label"].mean() == pytest.approx(0.25, abs=0.01)
    assert 0.78 < truth.best_auc < 0.82
    constant = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    assert truth.best_log_loss < constant - 0.05


@pytest.mark.extended
def test_a_linear_model_stays_well_below_the_best_auc(criteo):
    truth, _, log = criteo
    encoder = OneHotEncoder(handle_unknown="ignore", min_frequency=5)
    rows = encoder.fit_transform(log[list(CRITEO.categorical)].fillna("missing"))
    half = len(log) // 2
    linear = LogisticRegression(C=0.1, solver="liblinear").fit(rows[:half], log["label"][:half])
    auc = roc_auc_score(log["label"][half:], linear.decision_function(rows[half:]))
    assert 0.65 < auc < truth.best_auc - 0.04  # single ids say something, and not all


def test_avazu_format_in_several_chunks(tmp_path, monkeypatch, small_calibration):
    monkeypatch.setattr(synthetic, "CHUNK_ROWS", 300)
    path = tmp_path / "avazu.csv"
    write_synthetic("avazu", path, rows=2_000, seed=0, cardinality=100)
    assert path.read_text().split("\n", 1)[0] == AVAZU_HEADER
    log = pd.read_csv(path, dtype=str)
    assert len(log) == 2_000
    assert log.notna().all(axis=None)
    assert log["hour"].is_monotonic_increasing
    assert log["hour"].iloc[[0, -1]].tolist() == ["14102100", "14103023"]
    assert log["id"].is_unique


def test_the_seed_decides_the_bytes_gzipped_or_not(tmp_path, small_calibration):
    for name, seed in (("a.txt", 1), ("b.txt.gz", 1), ("c.txt.gz", 1), ("d.txt", 2)):
        write_synthetic("criteo", tmp_path / name, rows=100, seed=seed, cardinality=100)
    first = (tmp_path / "a.txt").read_bytes()
    assert gzip.decompress((tmp_path / "b.txt.gz").read_bytes()) == first
    assert (tmp_path / "b.txt.gz").read_bytes() == (tmp_path / "c.txt.gz").read_bytes()
    assert (tmp_path / "d.txt").read_bytes() != first


def test_nothing_is_overwritten(tmp_path):
    for name in ("log.txt", "log.txt.truth.json"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(UserError, match=f"must not exist. Received: .*{name}"):
            write_synthetic("criteo", tmp_path / "log.txt", rows=100)
        (tmp_path / name).unlink()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "movielens"}, "dataset must be one of 'criteo', 'avazu'. Received: 'movie"),
        ({"rows": 7}, "rows must be a whole number of at least 100. Received: 7"),
        ({"seed": -1}, "seed must be a whole number of at least 0. Received: -1"),
        ({"cardinality": 1.5}, "cardinality must be a whole number of at least 10. Received: 1.5"),
    ],
)
def test_bad_options(tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        write_synthetic(**{"dataset": "criteo", "path": tmp_path / "x", "rows": 100, **options})
