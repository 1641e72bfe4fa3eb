"""Which raw columns the rows of a workflow may lack: what is left of it transforms without them."""

from __future__ import annotations

import json

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.new_rows import for_new_rows
from merlin_cowclip.workflows.data.raw_columns import (
    RawColumns,
    _read_by,
    a_row,
    learned_keys,
    name_types,
)
from merlin_cowclip.workflows.data.raw_types import raw_types
from merlin_cowclip.workflows.data.workflow_graph import load_saved
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag.ops.subgraph import Subgraph
    from nvtabular import ops

    from merlin_cowclip.workflows.data.row_for_row import transformed

pytestmark = pytest.mark.filterwarnings("ignore:Initializing an NVTabular Dataset in CPU mode")
ROWS, LABEL = 60, ["label"]
LOG = pd.DataFrame(
    {
        "user": np.arange(ROWS) % 7,
        "genres": [["a", "b"]] * ROWS,
        "visits": np.arange(ROWS) % 5 + 1,
        "weeks": np.arange(ROWS) % 3 + 1.0,
        "day": pd.date_range("2024-01-01", periods=ROWS),
        "label": np.arange(ROWS) % 2,
    }
)


def each(_):
    """Another column is read beside, as an operator makes it."""
    named = ["weeks"] >> ops.FillMissing()
    visits = ["visits"] >> ops.LambdaOp(lambda c, rows: c / rows["weeks"], dependency=[named])
    return visits + LABEL, {"user", "genres", "visits", "weeks"}


def of_the_label(_):
    """Where the label is made of another beside, neither is needed."""
    liked = ["label"] >> ops.LambdaOp(lambda c, rows: c > rows["weeks"], dependency=["weeks"])
    return ["visits"] + (liked >> ops.Rename(name="liked")), {"user", "genres", "visits"}


def encoded(out):
    """NVTabular says that it makes this without its target."""
    made = ["visits"] >> ops.TargetEncoding("label", out_path=out, kfold=1)
    return made, {"user", "genres", "visits", "label"}


def together(out):
    """A column that is there for the joint vocabulary alone."""
    cats = [["visits", "weeks"]] >> ops.Categorify(encode_type="joint", out_path=out)
    return cats["visits"] + LABEL, {"user", "genres", "visits", "weeks"}


def joined(out):
    joining = ops.JoinGroupby(cont_cols=["weeks"], stats=["mean"], out_path=out)
    return (["visits"] >> joining) + LABEL, {"user", "genres", "visits", "weeks"}


def of_a_time(_):
    """NVTabular says that it makes this without the time: two nodes use it, one of them unused."""
    days = ["day"] >> ops.LambdaOp(lambda column: column.dt.day) >> ops.Rename(postfix="_of")
    return days + LABEL, {"user", "genres", "day"}


def looked_up(_):
    """By a key, without which not even the columns are made that the join passes on."""
    weeks = pd.DataFrame({"weeks": [1.0, 2.0, 3.0], "length": [7, 14, 21]})
    rows = ["visits", "weeks"] >> ops.JoinExternal(weeks, on="weeks")
    return rows["visits"] + LABEL, {"user", "genres", "visits", "weeks"}


def from_a_table(_):
    """Columns that a join adds are made of its key alone, whatever it passes on."""
    weeks = pd.DataFrame({"weeks": [1.0, 2.0, 3.0], "length": [7, 14, 21]})
    rows = ["visits", "weeks", "label"] >> ops.JoinExternal(weeks, on="weeks")
    return rows["length", "label"], {"user", "genres", "weeks"}


def within(_):
    """Of another graph, which is one operator here: what it selects, it asks for."""
    liked = ["label"] >> ops.LambdaOp(lambda c, rows: c > rows["weeks"], dependency=["weeks"])
    inner = ["visits"] + (liked >> ops.Rename(name="liked"))
    outer = ["visits", "label", "weeks"] >> Subgraph("inner", inner) >> ops.AddMetadata()
    read = ["visits", "label", "weeks"] >> ops.FillMissing()
    return read >> Subgraph("outer", outer), {"user", "genres", "visits"}


def within_alone(_):
    """One that reads the log."""
    return Subgraph("alone", (["visits"] >> ops.FillMissing()) + LABEL), {
        "user",
        "genres",
        "visits",
    }


def within_nothing(_):
    """One of which nothing is left."""
    named = LABEL >> Subgraph("nothing", LABEL >> ops.AddMetadata())
    return (["visits"] >> ops.FillMissing()) + named, {"user", "genres", "visits"}


def reduced(_):
    """By its own list of columns, with the label."""
    return ["visits", "label"] >> ops.ReduceDtypeSize(), {"user", "genres", "visits"}


def hashed(_):
    buckets = ops.HashBucket({"visits": 9, "label": 3})
    return ["visits", "label"] >> buckets, {"user", "genres", "visits"}


def filtered(_):
    """By a column of which nothing is made, and which no schema tells."""
    rows = ["visits", "weeks", "label"] >> ops.Filter(lambda rows: rows[rows["weeks"] >= 1])
    return rows["visits", "label"], {"user", "genres", "visits", "weeks"}


def filtered_by_a_mask(_):
    """The label is not asked for; that an id is missing is asked of whatever column is there."""
    rows = ["visits", "weeks", "label"] >> ops.Filter(lambda rows: rows.weeks >= 1)
    rows = rows >> ops.Filter(lambda rows: rows.dropna()) >> ops.Dropna()
    return rows["visits", "label"], {"user", "genres", "visits", "weeks"}


CASES = [
    *(reduced, hashed, filtered, filtered_by_a_mask),
    *(each, of_the_label, encoded, together, joined, of_a_time, looked_up, from_a_table),
    *(within, within_alone, within_nothing),
]


@pytest.mark.parametrize("case", CASES)
def test_columns_that_may_be_lacking(case, tmp_path):
    made, needed = case(str(tmp_path / "stats"))
    ids = ["user", "genres"] >> ops.Categorify(out_path=str(tmp_path / "ids"))
    workflow = nvt.Workflow(ids + made)
    workflow.fit(nvt.Dataset(LOG))
    whole = workflow.transform(LOG)
    wanted = [name for name in whole if name not in ("label", "liked")]
    row = workflow.transform(a_row(workflow.input_schema))
    columns = RawColumns(workflow, wanted)
    assert columns.may_lack(set(columns.names) - needed)
    for name in needed:
        assert not columns.may_lack([name])
    left = columns.remove(columns.spare())
    assert set(left.input_schema.column_names) == needed
    assert set(left.output_schema.column_names) == set(wanted)
    pd.testing.assert_frame_equal(left.transform(LOG[[*needed]])[wanted], whole[wanted])
    assert len(row) == 1


def checking(rows):
    assert len(rows), "no rows"
    assert {"a", "b"} <= set(rows), "columns"
    assert set(rows["b"]) <= {"x", "y"}, "others"
    return rows


READING = {
    "a number": (lambda rows: rows[rows["a"] > 1], {"a"}),
    "a date": (lambda rows: pd.to_datetime(rows["b"], format="%Y-%m-%d") > "2024-01-01", {"b"}),
    "a known text": (lambda rows: rows["b"].map({"x": 1}.__getitem__) > rows["a"], {"a", "b"}),
    "the first text": (lambda rows: rows["b"].iloc[0].split("-")[1] > "1", {"b"}),
    "an attribute": (lambda rows: rows.b.iloc[0].split("-")[1] > "1", {"b"}),
    "row by row": (lambda rows: rows[rows.apply(lambda row: row["a"] > 1, axis=1)], {"a"}),
    "rows one by one": (lambda rows: rows[[row.a > 1 for row in rows.itertuples()]], {"a"}),
    "groups": (lambda rows: rows.groupby("b").filter(lambda g: g["a"].max() > 1), {"a", "b"}),
    "where rows are left": (lambda rows: rows[rows["a"] > 1] if len(rows) else rows, {"a"}),
    "by what it checks": (checking, {"a", "b"}),
    "whatever is there": (lambda rows: rows.dropna(), set()),
    "nothing": (lambda rows: rows["c"] > 1, set()),
}


@pytest.mark.parametrize("case", READING)
def test_what_a_filter_reads(case):
    """Also of values that a row of our making has not, and where no rows tell nothing."""
    function, expected = READING[case]
    assert _read_by(function, pd.DataFrame({"a": [1], "b": ["1"]})) == expected


def test_what_is_left_of_a_workflow(tmp_path):
    """Without a column of which several things are made; of one operator some stay."""
    ids = ["user", "genres", "visits"] >> ops.Categorify(out_path=str(tmp_path))
    each_week = ["visits"] >> ops.LambdaOp(lambda c, r: c / r["weeks"], dependency=["weeks"])
    workflow = nvt.Workflow(ids + (each_week >> ops.Rename(postfix="_each")) + ["label"])
    workflow.fit(nvt.Dataset(LOG))
    whole = workflow.transform(LOG)
    for gone, left in (
        ("visits", ["user", "genres", "label"]),
        ("weeks", ["user", "genres", "visits", "label"]),
        ("label", ["user", "genres", "visits", "visits_each"]),
    ):
        columns = RawColumns(cloudpickle.loads(cloudpickle.dumps(workflow)), left)
        found = columns.remove([gone]).transform(LOG.drop(columns=gone))
        pd.testing.assert_frame_equal(found, whole[left])


@pytest.mark.parametrize("seed", [42, None])
def test_new_rows_have_no_folds(tmp_path, seed):
    """They are encoded as by a fit without folds, in any order and cut."""

    def fitted(folds: int) -> nvt.Workflow:
        out = str(tmp_path / f"{folds}")
        groups = [["visits", "user"], "user"]
        made = groups >> ops.TargetEncoding("label", kfold=folds, fold_seed=seed, out_path=out)
        return nvt.Workflow(made).fit(nvt.Dataset(LOG))

    by_fold, expected = fitted(3), fitted(1).transform(LOG.copy())
    assert not by_fold.transform(LOG.copy()).equals(expected)
    new = for_new_rows(by_fold)
    for rows in (LOG, LOG[3:9], LOG[::-1]):
        found = new.transform(rows.reset_index(drop=True))
        pd.testing.assert_frame_equal(found, expected.loc[rows.index].reset_index(drop=True))


def test_a_column_of_folds_is_none_of_new_rows(tmp_path):
    made = ["user"] >> ops.TargetEncoding("label", drop_folds=False, out_path=str(tmp_path))
    workflow = nvt.Workflow(made).fit(nvt.Dataset(LOG))
    with pytest.raises(UserError, match=r"no column of folds.*TargetEncoding\(drop_folds=False\)"):
        for_new_rows(workflow)


def text_columns(workflow):
    return {name for name, one in raw_types(workflow).items() if one.kind == pa.string()}


@pytest.mark.parametrize("encode_type", ["joint", "combo"])
@pytest.mark.parametrize("split_out", [1, 3])
def test_columns_of_which_a_workflow_learned_text(tmp_path, encode_type, split_out):
    """As they are: what other operators make text of may be of any type."""
    log = LOG.assign(city="x", state="y", key=b"z", made="w", day=LOG["day"].astype(str))
    log["made"] = [["x"]] * ROWS

    def ids(number: int, names, **options):
        return names >> ops.Categorify(out_path=str(tmp_path / f"{number}"), **options)

    workflow = nvt.Workflow(
        ids(0, ["user", "genres", "key", "made"], split_out=split_out)
        + ids(1, [["city", "state"]], encode_type=encode_type, split_out=split_out)
        + ids(2, ["day"] >> ops.LambdaOp(lambda column: column.str[:4]))
    )
    workflow.fit(nvt.Dataset(log))
    assert text_columns(workflow) == {"genres", "made", "city", "state"}
    workflow.save(str(tmp_path / "saved"))
    moved = (tmp_path / "saved").rename(tmp_path / "moved")
    assert text_columns(nvt.Workflow.load(str(moved))) == {"genres", "made", "city", "state"}


def test_columns_of_text_behind_operators_that_keep_it(tmp_path):
    """What another makes of a column, as of `day`, says nothing of it; statistics do."""
    log = LOG.assign(city="x", state="y", key=b"z", shop="s", tag=[["x"]] * ROWS, sex="m", role="r")
    log["day"] = LOG["day"].astype(str)

    def ids(number: int, nodes):
        return nodes >> ops.Categorify(out_path=str(tmp_path / f"{number}"))

    renamed = ["city", "key"] >> ops.FillMissing("none") >> ops.Rename(postfix="_id")
    flagged = ["state"] >> ops.FillMissing("none", add_binary_cols=True)
    means = [["shop", "sex"]] >> ops.TargetEncoding("label", kfold=3, out_path=str(tmp_path / "te"))
    joined = ["role"] >> ops.JoinGroupby(cont_cols=["weeks"], out_path=str(tmp_path / "jg"))
    workflow = nvt.Workflow(
        ids(0, renamed)
        + ids(1, flagged["state"])
        + ids(2, ["tag"] >> ops.ListSlice(1))
        + ids(3, ["day"] >> ops.LambdaOp(lambda column: column.str[:4]))
        + means
        + joined
    )
    workflow.fit(nvt.Dataset(log))
    assert text_columns(workflow) == {"city", "state", "tag", "shop", "sex", "role"}
    workflow.save(str(tmp_path / "saved"))
    loaded = nvt.Workflow.load(str(tmp_path / "saved"))
    assert text_columns(loaded) == text_columns(workflow)
    (key,) = learned_keys(loaded)["key"]
    assert pa.types.is_binary(key.kind)
    assert key.has(b"z")
    assert not key.has(b"")
    assert not learned_keys(loaded)["city"][0].has("")


def test_a_key_beside_a_table_that_is_joined_is_of_its_vocabulary(tmp_path):
    """The table's columns are no raw ones, but of the keys that it is joined by."""
    log = LOG.assign(
        city=[f"c{i % 5}" for i in range(ROWS)], shop=[f"s{i % 3}" for i in range(ROWS)]
    )
    shops = pd.DataFrame({"shop": ["s0", "s1", "s2"], "brand": ["x", "y", "x"]})
    joined = ["shop", "city"] >> ops.JoinExternal(shops, on="shop")
    workflow = nvt.Workflow(joined["city", "brand"] >> ops.Categorify(out_path=str(tmp_path)))
    workflow.fit(nvt.Dataset(log))
    assert text_columns(workflow) == {"city", "shop"}
    assert set(learned_keys(workflow)) == {"city", "shop"}


def test_a_category_is_of_its_values(tmp_path):
    """As pandas reads a column that stands in the names of folders; its vocabulary is one, too."""
    city = pd.Series(["x", "", "y"] * ROWS)[:ROWS].astype("category")
    log = LOG.assign(city=city, day=LOG["day"].astype("category"))
    workflow = nvt.Workflow(["city", "day"] >> ops.Categorify(out_path=str(tmp_path)))
    workflow.fit(nvt.Dataset(log))
    (key,) = learned_keys(workflow)["city"]
    assert pa.types.is_dictionary(pq.read_schema(key.files[0]).field("city").type)
    assert [key.has(value) for value in ("x", "", "z")] == [True, True, False]
    assert text_columns(workflow) == {"city"}
    assert pa.types.is_timestamp(learned_keys(workflow)["day"][0].kind)


MISSING = [
    ({"user": [None, None]}, {"user": [1, 1]}),
    ({"user": [None, 3.0]}, {"user": [1, "user"]}),
    ({"city": [None], "state": [None], "genres": [None]}, {"city": [1], "genres": [[]]}),
    ({"city": ["x", None, "?"], "genres": [["a"], None, ["b"]]}, {"city": ["city", 1, 2]}),
    ({"genres": [None, ["a"], []]}, {"genres": [[], ["genres"], []]}),
]


@pytest.mark.filterwarnings("ignore:Changing an NVTabular Dataset to CPU mode")
def test_times_of_a_zone_as_ids(tmp_path):
    """Of which NVTabular's schema knows no type, nor NumPy."""
    days = pd.DataFrame({"day": pd.date_range("2024-01-01", periods=9, tz="Europe/Berlin")})
    workflow = nvt.Workflow(["day"] >> ops.Categorify(out_path=str(tmp_path)))
    workflow.fit(nvt.Dataset(days))
    name_types(workflow)
    assert not text_columns(workflow)
    assert sorted(transformed(workflow, days)["day"]) == list(range(3, 12))


def test_a_workflow_where_another_lay_before(tmp_path):
    """NVTabular keeps vocabularies by their path, for the process."""
    log = pd.DataFrame({"user": [7, 7, 7, 8, 8, 9], "paid": [1.0, 2, 3, 4, 5, 6]})
    expected = []
    for name, frame in (("first", log), ("second", log.assign(user=[9, 9, 9, 8, 8, 7]))):
        ids = ["user"] >> ops.Categorify(out_path=str(tmp_path / f"fitted-{name}"))
        means = ["user"] >> ops.TargetEncoding(
            "paid", kfold=1, out_path=str(tmp_path / f"t-{name}")
        )
        workflow = nvt.Workflow(ids + means + ["paid"]).fit(nvt.Dataset(frame))
        workflow.save(str(tmp_path / name))
        expected.append(workflow.transform(log))
    assert not expected[0].equals(expected[1])
    link = tmp_path / "current"
    for name, frame in zip(("first", "second", "first"), (*expected, expected[0]), strict=True):
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        pd.testing.assert_frame_equal(transformed(load_saved(link), log), frame)


@pytest.mark.parametrize(("given", "expected"), MISSING)
def test_rows_of_which_every_id_is_missing(given, expected, tmp_path):
    """Stock Categorify fails on them; of those that are there it makes the same as ever."""
    log = LOG.assign(city=np.where(LOG["user"] > 2, "x", "y"), state="z")
    alone = ["user", "genres"] >> ops.Categorify(out_path=str(tmp_path / "0"))
    joint = [["city", "state"]] >> ops.Categorify(encode_type="joint", out_path=str(tmp_path / "1"))
    workflow = nvt.Workflow(alone + joint).fit(nvt.Dataset(log))
    known = workflow.transform(log.head(4))  # user 3, city x and genre a: of the row 3
    rows = pd.DataFrame(given)
    full = log.loc[[3] * len(rows), ["user", "genres", "city", "state"]].reset_index(drop=True)
    rows = full.assign(**{name: rows[name] for name in rows})
    with pytest.raises((RuntimeError, TypeError)):
        workflow.transform(rows.copy())
    new = for_new_rows(workflow)
    for found in (
        new.transform(rows.copy()),
        cloudpickle.loads(cloudpickle.dumps(new)).transform(rows.copy()),
    ):
        for name, ids in expected.items():
            one = known[name][3]  # an id, or a list of two that are alike
            ids = [[one[0]] if i == [name] else one if i == name else i for i in ids]
            assert [list(i) if np.ndim(i) else i for i in found[name]] == ids


TAGS = LOG.assign(tags=["x|y", "y", None] * 20, others=[["x", "y"], ["y"], []] * 20)
MADE = {
    "lists of text": ("tags", lambda c: c.str.split("|")),
    "one of a list": ("others", lambda c: c.map(lambda tags: tags[0] if len(tags) else None)),
}


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("case", MADE)
def test_rows_of_which_all_that_an_operator_makes_is_missing(case, is_saved, tmp_path):
    """Where it makes lists, or takes one of a list, which no schema tells."""
    column, make = MADE[case]
    ids = [column] >> ops.LambdaOp(make) >> ops.Categorify(out_path=str(tmp_path))
    workflow = nvt.Workflow(ids).fit(nvt.Dataset(TAGS.dropna().reset_index(drop=True)))
    rows = TAGS[[column]].head(6)
    new = for_new_rows(workflow)
    new = cloudpickle.loads(cloudpickle.dumps(new)) if is_saved else new
    alone = new.transform(rows.iloc[[2]].reset_index(drop=True))[column][0]
    among = new.transform(rows.copy())[column][2]
    assert np.array_equal(alone, among)
    assert np.ndim(alone) == (case == "lists of text")


MADE_BY = {
    "a table": lambda column: column.map({"u7": ["x", "y"]}),
    "a text": lambda column: column.map(lambda s: json.loads(s) if isinstance(s, str) else None),
}


@pytest.mark.parametrize(
    ("case", "known", "unknown"), [("a table", "u7", "u9"), ("a text", '["x", "y"]', None)]
)
def test_a_row_of_which_an_operator_makes_no_list_has_an_empty_one(case, known, unknown, tmp_path):
    """Alone, too, as a new item is asked for; of a row of our making, 1, it makes none, or 1."""
    tags = ["user"] >> ops.LambdaOp(MADE_BY[case]) >> ops.Rename(name="tags")
    tags = tags >> ops.Categorify(out_path=str(tmp_path)) >> ops.Rename(postfix="_list")
    workflow = nvt.Workflow(tags).fit(nvt.Dataset(pd.DataFrame({"user": [known] * 9})))
    new = for_new_rows(workflow, {"tags_list": True})
    for rows in ([unknown], [unknown] * 2, [unknown, known], [unknown]):
        found = new.transform(pd.DataFrame({"user": pd.Series(rows, dtype=object)}))["tags_list"]
        assert [list(one) for one in found] == [[3, 4] if row == known else [] for row in rows]


def test_combinations_of_which_a_column_is_missing(tmp_path):
    """They are the ids that they are beside a row that has it."""
    log = LOG.assign(city=np.where(LOG["user"] > 2, "x", "y"), state=["z", None, "w"] * 20)
    combined = [["city", "state"]] >> ops.Categorify(encode_type="combo", out_path=str(tmp_path))
    workflow = nvt.Workflow(combined).fit(nvt.Dataset(log))
    rows = log[["city", "state"]].iloc[:9].reset_index(drop=True)
    expected = workflow.transform(rows)["city_state"]
    gone = rows["state"].isna()
    with pytest.raises(RuntimeError):
        workflow.transform(rows[gone].reset_index(drop=True))
    found = for_new_rows(workflow).transform(rows[gone].reset_index(drop=True))["city_state"]
    assert expected[gone].min() > 2
    assert found.tolist() == expected[gone].tolist()
    nothing = rows.iloc[:2].assign(city=None, state=None)
    assert for_new_rows(workflow).transform(nothing)["city_state"].tolist() == [1, 1]
