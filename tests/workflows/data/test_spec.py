"""Data set descriptions: the built-in ones, TOML files, and every rule a description can break."""

import pytest

from merlin_cowclip.workflows.data.spec import (
    AVAZU,
    CRITEO,
    DatasetSpec,
    Split,
    find_spec,
)
from merlin_cowclip.workflows.errors import UserError

TOML = """
name = "shop"
format = "csv"
separator = ";"
label = "bought"
categorical = ["user", "item"]
continuous = ["price"]
lists = ["genres"]
list_separator = " "

[split]
kind = "sequential"
test = 0.25
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


CHOSEN = DatasetSpec(
    "toy",
    "y",
    ("user", "item"),
    freq_threshold={"user": 3},
    hash_buckets={"user": 7},
    split=Split("time", ("a.csv", "b.csv"), "hour", 0.2, "%d/%m/%Y"),
    non_finite="missing",
    null_values=("\\N",),
    label_values=("False", "True"),
)


@pytest.mark.parametrize("spec", [CRITEO, AVAZU, CHOSEN])
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
        split=Split("sequential", 0.25),
    )
    assert DatasetSpec.from_toml(path) == expected
    assert find_spec(path) == expected
    assert expected.header
    assert expected.fields == ("price", "user", "item", "genres")


def test_toml_of_a_split(tmp_path):
    path = tmp_path / "shop.toml"
    keys = 'kind = "time"\ncolumn = "when"\ntime_format = "%d/%m/%Y"\ntest = 0.2\n'
    path.write_text(TOML[: TOML.index("kind")] + keys + 'valid = ["a.csv", "b.csv"]')
    expected = Split("time", 0.2, "when", ("a.csv", "b.csv"), "%d/%m/%Y")
    assert DatasetSpec.from_toml(path).split == expected
    path.write_text(TOML)
    assert DatasetSpec.from_toml(path).split == Split("sequential", 0.25, None, 0.1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "shop"', "", r"a key is unknown or missing: missing 1 required .* 'name'"),
        ('label = "bought"', "label = 7", r"label must be a text.*Received: 7"),
        ('label = "bought"', 'label = "user"', r"one role. Received: 'user'"),
        ('["price"]', '["item"]', r"one role. Received: 'item'"),
        ('["user", "item"]', '"user"', r"categorical must be a list of texts"),
        (
            '["genres"]',
            '["genres"]\nlistz = 1',
            r"a key is unknown.*: got an unexpected keyword argument 'listz'",
        ),
        ('format = "csv"', 'format = "orc"', r"format must be one of 'csv', 'parquet'"),
        ('separator = ";"', 'separator = ";;"', r"separator must be one ASCII character"),
        ('separator = ";"', "header = false", r"with header = false needs columns. List all"),
        (
            'format = "csv"',
            'format = "parquet"\ncolumns = ["a"]',
            r"columns are for format csv only",
        ),
        ('kind = "sequential"', 'kind = "by day"', r"split.kind must be one of"),
        ("test = 0.25", "test = 1", r"split.test must be a share from 0 to below 1, or .* 1"),
        ("test = 0.25", "test = 0.25\nseed = 1", r"unexpected keyword argument 'seed'"),
        ("test = 0.25", "valid = -0.1", r"split.valid must be a share .* Received: -0.1"),
        ("test = 0.25", 'valid = "a.csv"', r"split.valid must .*, or files. Received: 'a.csv'"),
        ("test = 0.25", "valid = []", r"split.valid must .*, or files. Received: \[\]"),
        ('"sequential"', '"time"\ncolumn = "t"\ntime_format = 5', r"time_format .* Received: 5"),
        ("[split]", 'null_values = "x"\n[split]', r"null_values must be a list of texts"),
        ("[split]", 'label_values = ["1"]\n[split]', r"label_values must be two different texts"),
        ("[split]", "[split", r"cannot read .*/shop.toml as TOML"),
    ],
)
def test_toml_errors_name_the_file_and_the_key(tmp_path, old, new, message):
    assert old in TOML
    path = tmp_path / "shop.toml"
    path.write_text(TOML.replace(old, new))
    with pytest.raises(UserError, match=message) as caught:
        DatasetSpec.from_toml(path)
    assert str(path) in str(caught.value)


def test_no_ids_at_all_is_refused():
    with pytest.raises(UserError, match="categorical must name at least one column"):
        DatasetSpec("x", "y", (), ("n",))


def test_find_spec():
    assert find_spec("criteo") is CRITEO
    with pytest.raises(UserError, match=r"one of 'avazu', 'criteo'.*Received: 'kriteo'"):
        find_spec("kriteo")
    with pytest.raises(UserError, match=r"cannot read none.toml as TOML: .*No such file"):
        find_spec("none.toml")
