"""Data set descriptions: the built-in ones, TOML files, and every rule a description can break."""

import pytest

from merlin_cowclip.workflows.data.spec import AVAZU, CRITEO, DatasetSpec, Split, find_spec
from merlin_cowclip.workflows.errors import UserError

TOML = """
name = "shop"
separator = ";"
label = "bought"
categorical = ["user", "item"]
continuous = ["price"]
lists = ["genres"]
list_separator = " "

[split]
kind = "time"
column = "when"
time_format = "%d/%m/%Y"
test = 0.25
valid = ["a.csv", "b.csv"]
"""


def test_criteo_and_avazu_have_the_papers_fields_and_splits():
    assert len(CRITEO.continuous) == 13
    assert len(CRITEO.categorical) == 26
    assert CRITEO.columns is not None
    assert CRITEO.columns[:2] == ("label", "I1")
    assert CRITEO.columns[14] == "C1"
    assert CRITEO.split == Split("random", 0.1)
    assert len(AVAZU.categorical) == 22
    assert "id" not in AVAZU.fields
    assert AVAZU.split == Split("random", 0.2)


FIELDS = DatasetSpec(
    "toy",
    "rating",
    ("seller", "buyer", "device"),
    ("price", "age", "income"),
    null_values=("\\N",),
    split=Split("time", ("a.csv", "b.csv"), "hour", 0.2, "%d/%m/%Y"),
    shared=(("seller", "buyer"),),
    freq_threshold={"device": 3},
    hash_only={"device": 64},
    standardize=("age",),
    quantiles={"income": 50},
    label_above=3,
)


@pytest.mark.parametrize("spec", [CRITEO, AVAZU, FIELDS])
def test_a_spec_survives_its_dict(spec):
    assert DatasetSpec.from_dict(spec.to_dict()) == spec


def test_toml(tmp_path):
    path = tmp_path / "shop.toml"
    path.write_text(TOML)
    expected = DatasetSpec(
        name="shop",
        label="bought",
        categorical=("user", "item"),
        continuous=("price",),
        lists=("genres",),
        separator=";",
        list_separator=" ",
        split=Split("time", 0.25, "when", ("a.csv", "b.csv"), "%d/%m/%Y"),
    )
    assert DatasetSpec.from_toml(path) == find_spec(path) == expected
    assert expected.fields == ("price", "user", "item", "genres")
    for text, message in (
        (TOML.replace('name = "shop"', ""), "a key is unknown or missing: missing 1 .* 'name'"),
        (TOML.replace("lists", "listz"), "a key is unknown .* unexpected keyword argument 'listz'"),
        (TOML.replace("[split]", "[split"), "as TOML: "),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=f"{path}.* {message}"):
            DatasetSpec.from_toml(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": 7}, "label must be a text.*Received: 7"),
        ({"label": "buyer"}, "one role. Received: 'buyer'"),
        ({"continuous": ["buyer"]}, "one role. Received: 'buyer'"),
        ({"categorical": "user"}, "categorical must be a list of texts"),
        ({"format": "orc"}, "format must be one of 'csv', 'parquet'"),
        ({"separator": ";;"}, "separator must be one ASCII character"),
        ({"header": False}, "with header = false needs columns. List all"),
        ({"format": "parquet", "columns": ["a"]}, "columns are for format csv only"),
        ({"null_values": "x"}, "null_values must be a list of texts"),
        ({"label_values": ["1"]}, "label_values must be two different texts"),
        ({"label_values": ["n", "y"]}, "label_above and label_values"),
        ({"label_above": "3"}, "label_above must be a number. Received: '3'"),
        ({"non_finite": "zero"}, "non_finite must be one of 'refuse', 'missing'"),
        ({"hour": 5}, "hour must be the name of a column. Received: 5"),
        ({"freq_threshold": -1}, "freq_threshold must be a whole number of at least 0"),
        ({"freq_threshold": {"price": 2}}, "freq_threshold must name fields of ids.*'price'"),
        ({"freq_threshold": {"buyer": 0.5}}, "freq_threshold of 'buyer' must .* Received: 0.5"),
        ({"hash_buckets": 0}, "hash_buckets must be a whole number from 1 to 1073741824"),
        ({"hash_only": {"device": 0}}, "hash_only of 'device' must .* Received: 0"),
        ({"shared": [["seller", "price"]]}, "shared must name fields of ids.*'price'"),
        ({"shared": [["seller", "buyer"], ["buyer", "device"]]}, "each once.*'buyer'"),
        ({"shared": [["seller", "device"]]}, "'seller', 'device' share a vocabulary"),
        ({"log1p": ["seller"]}, "log1p must name fields of numbers.*'seller'"),
        ({"quantiles": {"age": 4}}, "'age' must be in standardize or quantiles"),
        ({"quantiles": {"income": 1}}, "quantiles of 'income' must .* Received: 1"),
        ({"split": {"kind": "by day"}}, "split.kind must be one of"),
        ({"split": {"test": 1}}, "split.test must be a share from 0 to below 1, or .* 1"),
        ({"split": {"test": float("nan")}}, "split.test must be a share .* nan"),
        ({"split": {"valid": -0.1}}, "split.valid must be a share .* Received: -0.1"),
        ({"split": {"valid": "a.csv"}}, "split.valid must .*, or files. Received: 'a.csv'"),
        ({"split": {"seed": 1}}, "unexpected keyword argument 'seed'"),
        ({"split": {"kind": "time"}}, "split.column must name the column of times"),
        ({"split": {"column": "hour"}}, "split.column must name the column of times"),
        ({"split": {"time_format": 5}}, "time_format .* Received: 5"),
    ],
)
def test_rules(changes, message):
    with pytest.raises(UserError, match=message):
        DatasetSpec.from_dict({**FIELDS.to_dict(), **changes})


def test_a_spec_needs_ids():
    with pytest.raises(UserError, match="categorical must name at least one column"):
        DatasetSpec("x", "y", (), ("n",))


def test_find_spec():
    assert find_spec("criteo") is CRITEO
    with pytest.raises(UserError, match=r"one of 'avazu', 'criteo'.*Received: 'kriteo'"):
        find_spec("kriteo")
    with pytest.raises(UserError, match=r"cannot read none.toml as TOML: .*No such file"):
        find_spec("none.toml")
