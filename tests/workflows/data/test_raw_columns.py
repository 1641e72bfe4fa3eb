"""Which raw columns the rows of a workflow may lack: what is left of it transforms without them."""

from __future__ import annotations

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from merlin_cowclip.workflows.data.new_rows import for_new_rows
from merlin_cowclip.workflows.data.raw_columns import (
    RawColumns,
    a_row,
)
from merlin_cowclip.workflows.data.raw_types import raw_types
from merlin_cowclip.workflows.data.workflow_graph import load_saved
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
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


def looked_up(_):
    """By a key, without which not even the columns are made that the join passes on."""
    weeks = pd.DataFrame({"weeks": [1.0, 2.0, 3.0], "length": [7, 14, 21]})
    rows = ["visits", "weeks"] >> ops.JoinExternal(weeks, on="weeks")
    return rows["visits"] + LABEL, {"user", "genres", "visits", "weeks"}


def filtered(_):
    """By a column of which nothing is made, and which no schema tells."""
    rows = ["visits", "weeks", "label"] >> ops.Filter(lambda rows: rows[rows["weeks"] >= 1])
    return rows["visits", "label"], {"user", "genres", "visits", "weeks"}


CASES = [
    *(each, of_the_label, encoded, together, joined, looked_up, filtered),
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


@pytest.mark.parametrize(("encode_type", "split_out"), [("joint", 1), ("combo", 3)])
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


MISSING = [
    ({"user": [None, None]}, {"user": [1, 1]}),
    ({"user": [None, 3.0]}, {"user": [1, "user"]}),
    ({"city": [None], "state": [None], "genres": [None]}, {"city": [1], "genres": [[]]}),
    ({"genres": [None, ["a"], []]}, {"genres": [[], ["genres"], []]}),
]


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
