"""Fields of every kind, by pandas and NumPy: in the parts, in the saved workflow, as raw rows."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from merlin_cowclip.workflows.data.encoder import Encoder
from merlin_cowclip.workflows.data.prepare.fit import Encoding
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.errors import UserError
from tests.logs import rows_of

ROWS, TRAIN = 4_000, 3_000


def make_log(seed=0) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    stamps = pd.Timestamp("2024-03-01") + pd.to_timedelta(random.integers(0, 10**6, ROWS), "s")
    return pd.DataFrame(
        {
            "rating": random.integers(1, 6, ROWS),
            "seller": [f"p{i}" for i in random.zipf(1.5, ROWS) % 200],
            "buyer": [f"p{i}" for i in random.zipf(1.3, ROWS) % 300],
            "device": [None if i % 9 == 0 else f"d{i}" for i in random.integers(0, 999, ROWS)],
            "price": np.where(random.random(ROWS) < 0.1, np.nan, random.lognormal(3, 2, ROWS)),
            "age": random.normal(40, 9, ROWS),
            "income": random.lognormal(10, 3, ROWS).round(1),
            "when": stamps.strftime("%d/%m/%Y %H:%M:%S"),
        }
    )


SPEC = DatasetSpec(
    "toy",
    "rating",
    ("seller", "buyer", "device"),
    ("price", "age", "income"),
    split=Split("sequential", 0.25, valid=0, time_format="%d/%m/%Y %H:%M:%S"),
    shared=(("seller", "buyer"),),
    hash_only={"device": 64},
    log1p=("price",),
    standardize=("age",),
    quantiles={"income": 70},
    label_above=3,
    hour="when",
    weekday="when",
)


@pytest.fixture(scope="module")
def log():
    return make_log()


@pytest.fixture(scope="module")
def data(log, tmp_path_factory):
    home = tmp_path_factory.mktemp("fields")
    log.to_csv(home / "log.csv", index=False)
    return prepare(SPEC, [home / "log.csv"], home / "out", progress=False)


def test_ids(data, log):
    train, test, rows = log[:TRAIN], log[TRAIN:].reset_index(drop=True), rows_of(data, "test")
    together = pd.concat([train["seller"], train["buyer"]]).value_counts()
    ranked = sorted(together.index, key=lambda text: (-together[text], text))
    places = {text: 3 + i for i, text in enumerate(ranked)}
    for field in ("seller", "buyer"):
        assert rows[field].tolist() == [places.get(text, 2) for text in test[field]]
        table, own = data.counts(field), train[field].value_counts()
        assert table["raw"][3:].tolist() == ranked
        assert table["count"][3:].tolist() == [own.get(text, 0) for text in ranked]
    assert ("seller", "buyer") in data.domains
    assert data.schema["buyer"].int_domain.name == data.schema["seller"].int_domain.name == "seller"
    hashed = pd.util.hash_array(test["device"].fillna("").to_numpy(), categorize=False) % 64 + 2
    assert rows["device"].tolist() == np.where(test["device"].isna(), 1, hashed).tolist()
    assert data.cardinalities["device"] == 66
    assert data.counts("device")["count"].sum() == TRAIN
    times = pd.to_datetime(test["when"], format="%d/%m/%Y %H:%M:%S")
    for field, expected in (("hour", times.dt.hour), ("weekday", times.dt.dayofweek)):
        texts = data.counts(field)["raw"].to_numpy()[rows[field]]
        assert texts.tolist() == expected.astype(str).tolist()


def test_numbers_and_labels(data, log):
    train, test, rows = log[:TRAIN], log[TRAIN:], rows_of(data, "test")
    assert rows["rating"].tolist() == (test["rating"] > 3).astype(int).tolist()
    price, of_train = (np.log1p(of["price"].fillna(0)) for of in (test, train))
    unit = ((price - of_train.min()) / (of_train.max() - of_train.min())).clip(0, 1)
    np.testing.assert_allclose(rows["price"], unit, atol=1e-6)
    standard = (test["age"] - train["age"].mean()) / train["age"].std(ddof=0)
    np.testing.assert_allclose(rows["age"], standard, atol=1e-5)
    ranks = [max(math.ceil(TRAIN * k / 70), 1) - 1 for k in range(71)]
    quantiles = np.sort(train["income"])[ranks]
    assert data.record["ranges"]["income"] == quantiles.tolist()
    expected = np.interp(test["income"], quantiles, np.arange(71) / 70)
    np.testing.assert_allclose(rows["income"], expected, atol=1e-6)


def test_raw_rows_are_encoded_alike(data, log, tmp_path):
    """By the saved workflow, by the encoder, and as a later log with this vocabulary."""
    test, rows = log[TRAIN:].reset_index(drop=True), rows_of(data, "test")
    served = data.workflow().remove_inputs(["rating"]).transform(test)
    encoder = Encoder.open(data.path / "workflow", SPEC, data.record["ranges"])
    for field in SPEC.fields:
        assert served[field].tolist() == rows[field].tolist(), field
    for field in ("seller", "device"):
        texts = pa.array(test[field], pa.string(), from_pandas=True)
        assert encoder.encode(field, texts).to_pylist() == rows[field].tolist()
    test.to_csv(tmp_path / "next.csv", index=False)
    split = Split(test=0, valid=0, time_format=SPEC.split.time_format)
    spec = dataclasses.replace(SPEC, split=split)
    like = Encoding(SPEC, data.record["ranges"], data.path)
    again = prepare(spec, [tmp_path / "next.csv"], tmp_path / "out", like=like, progress=False)
    key = ["age", "income"]
    pd.testing.assert_frame_equal(
        rows_of(again).sort_values(key, ignore_index=True),
        rows.sort_values(key, ignore_index=True),
    )
    ids, counts = np.unique(rows["seller"], return_counts=True)
    table = again.counts("seller")["count"]
    assert table[ids].tolist() == counts.tolist()
    assert table.sum() == counts.sum()


def test_a_vocabulary_grows(data, log, tmp_path):
    """Old ids stay, new ones follow by their count; unknown ones stay where they must."""
    later = make_log(1).assign(seller=lambda of: of["seller"].replace({"p1": "new", "p2": "newer"}))
    later.to_csv(tmp_path / "next.csv", index=False)
    like = Encoding(SPEC, data.record["ranges"], data.path)
    grown = prepare(
        SPEC, [tmp_path / "next.csv"], tmp_path / "out", like=like, grow=True, progress=False
    )
    old, new = data.counts("seller"), grown.counts("seller")
    assert new["raw"][: len(old)].tolist() == old["raw"].tolist()
    train = later[:TRAIN]
    both = pd.concat([train["seller"], train["buyer"]]).value_counts()
    added = both[~both.index.isin(old["raw"])]
    ranked = sorted(added.index, key=lambda text: (-added[text], text))
    assert new["raw"][len(old) :].tolist() == ranked
    assert "new" in ranked
    own = train["seller"].value_counts()
    assert new["count"][3:].tolist() == [own.get(text, 0) for text in new["raw"][3:]]
    assert grown.cardinalities["seller"] == grown.cardinalities["buyer"] == len(new)
    assert grown.cardinalities["device"] == 66
    assert grown.record["ranges"] == data.record["ranges"]
    texts = new["raw"].to_numpy()[rows_of(grown, "test")["seller"]]
    known = pd.notna(texts)
    assert (texts[known] == later["seller"][TRAIN:].to_numpy()[known]).all()


def test_times_that_cannot_be_read_are_not_missing_ones(tmp_path, log, data):
    """A missing time is; so also in raw rows."""
    log = log.assign(when=log["when"].mask(log.index == 5, None))
    log.to_csv(tmp_path / "log.csv", index=False)
    spec = dataclasses.replace(
        SPEC, split=Split("sequential", 0.25, valid=0, time_format="%Y-%m-%d")
    )
    with pytest.raises(UserError, match=r"log.csv, line \d+, column 'when': the time '.*' is not"):
        prepare(spec, [tmp_path / "log.csv"], tmp_path / "out", progress=False)
    right = prepare(SPEC, [tmp_path / "log.csv"], tmp_path / "right", progress=False)
    assert right.report["fields"]["hour"]["missing"] == 1
    rows = log[:3].assign(when="yesterday")
    with pytest.raises(UserError, match="column 'when': the time 'yesterday' is not"):
        data.workflow().remove_inputs(["rating"]).transform(rows)


def test_negative_numbers_have_no_logarithm(tmp_path, log):
    log.assign(price=log["price"] - 5).to_csv(tmp_path / "log.csv", index=False)
    with pytest.raises(UserError, match="log1p needs numbers from 0 on. Column 'price' has -4"):
        prepare(SPEC, [tmp_path / "log.csv"], tmp_path / "out", progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["log.csv"]


def test_columns_of_any_name_are_renamed(tmp_path):
    random = np.random.default_rng(3)
    label, ids = "用户点击", ("user id", "user_id:token", "用户", "a/b")
    log = pd.DataFrame({label: random.integers(0, 2, 400)})
    for number, name in enumerate((*ids, "class")):
        log[name] = random.integers(0, 9 + number, 400)
    log["the tags"] = ["|".join(map(str, random.integers(0, 5, n % 3))) for n in range(400)]
    log["the time"] = pd.date_range("2024-01-01", periods=400, freq="h").astype(str)
    log.to_csv(tmp_path / "log.csv", index=False)
    spec = DatasetSpec(
        "toy",
        label,
        ids,
        ("class",),
        ("the tags",),
        split=Split("sequential", 0.25, valid=0),
        hash_only={"用户": 8},
        hour="the time",
    )
    data = prepare(spec, [tmp_path / "log.csv"], tmp_path / "out", progress=False)
    fields = ("class_2", "user_id", "user_id_token", "field_2", "a_b", "hour", "the_tags")
    assert (data.spec.label, data.spec.fields) == ("field", fields)
    assert data.spec.renamed["class_2"] == "class"
    assert data.cardinalities["field_2"] == 10
    rows = rows_of(data, "test")
    assert rows["field"].tolist() == log[label][300:].tolist()
    texts = data.counts("user_id_token")["raw"].to_numpy()[rows["user_id_token"]]
    assert texts.tolist() == log["user_id:token"][300:].astype(str).tolist()
    lists = [text.split("|") if text else [] for text in log["the tags"]]
    raw = log.assign(**{"the tags": lists})[300:].reset_index(drop=True)
    served = data.workflow().remove_inputs([label]).transform(raw)
    served["the_tags"] = served["the_tags"].map(tuple)
    for field in data.spec.fields:
        assert served[field].tolist() == rows[field].tolist(), field
