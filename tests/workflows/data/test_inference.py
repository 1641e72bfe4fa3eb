"""Raw rows through a saved workflow: one by one, without the label, of the types of the fit."""

from __future__ import annotations

import datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from merlin_cowclip.workflows import UserError
from merlin_cowclip.workflows.data.adopt.graph import load_saved
from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow, as_fitted
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops

pytestmark = pytest.mark.filterwarnings(
    "ignore:(Initializ|Chang)ing an NVTabular Dataset", "ignore:Performing a hash-based"
)
ROWS = 60
LOG = pd.DataFrame(
    {
        "user": np.arange(ROWS) % 7,
        "city": [f"c{i % 5}" for i in range(ROWS)],
        "genres": [["a", "b"], ["c"], []] * (ROWS // 3),
        "visits": np.arange(ROWS) % 5 + 1.0,
        "weeks": np.arange(ROWS) % 3 + 1,
        "label": np.arange(ROWS) % 2,
    }
)
SIZES = pd.DataFrame({"weeks": [1, 2, 3], "length": [7.0, 14.0, 21.0]})


def fitted(nodes, log=LOG) -> nvt.Workflow:
    return nvt.Workflow(nodes).fit(nvt.Dataset(log))


def spec_of(fields, lists=()) -> DatasetSpec:
    ids = tuple(name for name in fields if name not in lists)
    return DatasetSpec("log", "label", ids, lists=tuple(lists), format="parquet")


def encoded(workflow, fields, rows, lists=()) -> pd.DataFrame:
    inference = InferenceWorkflow(workflow, spec_of(fields, lists))
    return inference.transform(dict(rows.items()), "the rows")[list(fields)]


# Columns that may be missing


def by_two(_):
    return ["visits"] >> ops.LambdaOp(lambda c, rows: c / rows["weeks"], dependency=["weeks"])


def joined(_):
    return (["weeks"] >> ops.JoinExternal(SIZES, on="weeks"))["length"] >> ops.Normalize()


def filtered(_):
    rows = ["visits", "weeks", "label"] >> ops.Filter(lambda rows: rows[rows["weeks"] > 0])
    return rows["visits"]


def means(out):
    return ["city"] >> ops.TargetEncoding("label", kfold=3, out_path=out)


NEEDED = {
    by_two: {"visits", "weeks"},
    joined: {"weeks"},
    filtered: {"visits", "weeks", "label"},  # which of them it reads nobody knows
    means: {"city"},
}


@pytest.mark.parametrize("nodes", NEEDED, ids=lambda nodes: nodes.__name__)
def test_columns_that_no_input_depends_on_may_be_missing(nodes, tmp_path):
    """Among them a label, and what a target is computed from."""
    liked = ["label", "weeks"] >> ops.LambdaOp(lambda c: c > 0) >> ops.Rename(postfix="_liked")
    workflow = fitted(nodes(str(tmp_path)) + liked + (["label"] >> ops.AddMetadata()))
    fields = [name for name in workflow.output_schema.column_names if "liked" not in name]
    fields.remove("label")
    inference = InferenceWorkflow(workflow, spec_of(fields))
    assert inference.required == NEEDED[nodes]
    expected = inference.transform(dict(LOG.items()), "the rows")[fields]
    few = LOG[sorted(NEEDED[nodes])]
    pd.testing.assert_frame_equal(inference.transform(dict(few.items()), "")[fields], expected)
    assert inference.has_label(["label", "city"])
    assert not inference.has_label(["city"])
    name = min(NEEDED[nodes])
    with pytest.raises(UserError, match=f"the rows lacks columns of the workflow: '{name}'"):
        inference.transform(dict(LOG.drop(columns=name).items()), "the rows")


# Rows


def test_new_rows_have_no_folds(tmp_path):
    """They are encoded as by a fit without folds, in any order and cut."""

    def workflow(folds: int) -> nvt.Workflow:
        out = str(tmp_path / f"{folds}")
        groups = [["visits", "user"], "user"]
        return fitted(groups >> ops.TargetEncoding("label", kfold=folds, out_path=out))

    by_fold, expected = workflow(3), workflow(1).transform(LOG.copy())
    assert not by_fold.transform(LOG.copy()).equals(expected)
    for rows in (LOG, LOG[3:9], LOG[::-1]):
        scored = encoded(by_fold, list(expected), rows.drop(columns="label"))
        pd.testing.assert_frame_equal(scored, expected.loc[rows.index].reset_index(drop=True))


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (lambda out: ["city"] >> ops.Categorify(num_buckets=4, max_size=9, out_path=out), "Categ"),
        (lambda _: ["city"] >> ops.HashBucket(9), "HashBucket depends"),
        (lambda _: ["visits"] >> ops.DifferenceLag("city"), "DifferenceLag depends on other rows"),
    ],
)
def test_workflows_that_do_not_encode_rows_one_by_one(tmp_path, node, words):
    workflow = fitted(node(str(tmp_path)))
    with pytest.raises(UserError, match=f"raw rows cannot be encoded: {words}"):
        InferenceWorkflow(workflow, spec_of(workflow.output_schema.column_names))


def test_rows_that_a_workflow_drops():
    node = ["visits", "weeks"] >> ops.Filter(lambda rows: rows[rows["weeks"] > 1])
    words = "returned 40 rows for 60, so scores cannot be matched to rows: the rows"
    with pytest.raises(UserError, match=words):
        encoded(fitted(node), ["visits"], LOG)


def test_an_operator_that_fails(capfd):
    """Of a column that is missing, and so filled."""
    liked = ["label"] >> ops.LambdaOp(lambda column: column * (1 // int(column.max())))
    workflow = fitted((["visits"] >> ops.LogOp()) + liked)
    words = "fails on the rows: ZeroDiv.* Give rows as it was fitted"
    with pytest.raises(UserError, match=words):
        encoded(workflow, ["visits"], LOG[["visits", "city"]])
    assert "Traceback" not in capfd.readouterr().err


MISSING = [
    ({"user": [None, None]}, {"user": [1, 1]}),
    ({"user": [None, 3.0]}, {"user": [1, "user"]}),
    ({"city": [None], "state": [None], "genres": [None]}, {"city": [1], "genres": [[]]}),
    ({"genres": [None, ["a"], []]}, {"genres": [[], ["genres"], []]}),
]


@pytest.mark.parametrize(("given", "expected"), MISSING)
def test_rows_of_which_every_id_is_missing(given, expected, tmp_path):
    """Stock Categorify fails on them; other rows are encoded as ever."""
    log = LOG.assign(city=np.where(LOG["user"] > 2, "x", "y"), state="z", genres=[["a", "b"]] * 60)
    alone = ["user", "genres"] >> ops.Categorify(out_path=str(tmp_path / "0"))
    joint = [["city", "state"]] >> ops.Categorify(encode_type="joint", out_path=str(tmp_path / "1"))
    workflow = fitted(alone + joint, log)
    known = workflow.transform(log.head(4))  # user 3, city x and genre a are of row 3
    rows, fields = pd.DataFrame(given), ["user", "genres", "city", "state"]
    full = log.loc[[3] * len(rows), fields].reset_index(drop=True)
    rows = full.assign(**{name: rows[name] for name in rows})
    with pytest.raises((RuntimeError, TypeError)):
        workflow.transform(rows.copy())
    scored = encoded(workflow, fields, rows, ["genres"])
    for name, ids in expected.items():
        one_id = known[name][3]  # an id, or a list of two
        ids = [[one_id[0]] if i == [name] else one_id if i == name else i for i in ids]
        assert [list(i) if np.ndim(i) else i for i in scored[name]] == ids


def test_a_workflow_where_another_lay_before(tmp_path):
    """NVTabular caches vocabularies by path, for the process."""
    log = pd.DataFrame({"user": [7, 7, 7, 8, 8, 9], "paid": [1.0, 2, 3, 4, 5, 6]})
    expected = []
    for name, frame in (("first", log), ("second", log.assign(user=[9, 9, 9, 8, 8, 7]))):
        ids = ["user"] >> ops.Categorify(out_path=str(tmp_path / f"fitted-{name}"))
        paid = ["user"] >> ops.TargetEncoding("paid", kfold=1, out_path=str(tmp_path / f"t-{name}"))
        workflow = fitted(ids + paid + ["paid"], frame)
        workflow.save(str(tmp_path / name))
        expected.append(workflow.transform(log))
    assert not expected[0].equals(expected[1])
    link = tmp_path / "current"
    for name, frame in zip(("first", "second", "first"), (*expected, expected[0]), strict=True):
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        pd.testing.assert_frame_equal(load_saved(link).transform(log), frame)


# Types


@pytest.fixture(scope="module")
def typed(tmp_path_factory) -> InferenceWorkflow:
    log = LOG.assign(
        integer=np.arange(ROWS) % 9,
        small=(np.arange(ROWS) % 9).astype("int8"),
        gaps=[None, *[1.0] * (ROWS - 1)],
        truth=np.arange(ROWS) % 2 == 0,
        day=pd.date_range("2024-01-01", periods=ROWS),
        cost=[Decimal(i % 9) for i in range(ROWS)],
        pair=[[i % 9, 1] for i in range(ROWS)],
        own="x",
    )
    names = ["city", "genres", "integer", "small", "gaps", "truth", "day", "cost", "pair"]
    ids = names >> ops.Categorify(out_path=str(tmp_path_factory.mktemp("types")))
    workflow = fitted(ids + (["own"] >> ops.LambdaOp(lambda column: column)), log)
    return InferenceWorkflow(workflow, spec_of([*names, "own"], ["genres", "pair"]))


def test_types_of_the_fit(typed):
    assert typed.types == {
        **{"city": pa.string(), "genres": pa.list_(pa.string()), "pair": pa.list_(pa.int64())},
        **{"integer": pa.int64(), "small": pa.int8(), "gaps": pa.float64(), "truth": pa.bool_()},
        **{"day": pa.timestamp("ns"), "cost": pa.decimal128(38, 0), "own": None},
    }


DATE = datetime.datetime(2024, 1, 1)
TAKEN = [
    ("gaps", pa.array([np.float16(1), None], pa.float16()), [1.0, None]),
    ("gaps", pa.array([Decimal("1.5"), None]), [1.5, None]),
    ("gaps", pa.array([1, None]), [1.0, None]),
    ("integer", pa.array([Decimal("7.00"), None]), [7, None]),
    ("integer", pa.array([1.0, None]), [1, None]),
    ("cost", pa.array([Decimal("70.00")], pa.decimal128(10, 2)), None),
    ("pair", pa.array([[1, 2], None], pa.list_(pa.int32(), 2)), None),
    ("own", pa.array(["x", None]), None),
    ("own", pa.array([Decimal(1)]), None),
    ("city", pa.array(["c1", None]).dictionary_encode(), None),
    ("city", pa.array([b"c1", None]), ["c1", None]),
    ("truth", pa.nulls(2, pa.string()), [None, None]),
    ("genres", pa.array([None, []], pa.list_(pa.null())), None),
    ("day", pa.array([DATE, None], pa.timestamp("s")), None),
]
REFUSED = [
    ("city", pa.array([1]), "is int64, but was string when the workflow was fitted. Cast it"),
    ("city", pa.array([b"\xff"]), "was string when the workflow was fitted: .*UTF8"),
    ("integer", pa.array([1.5]), r"was int64 when the workflow was fitted: .*1\.5"),
    ("integer", pa.array([Decimal("1.5")]), "was int64 when the workflow was fitted: .*data loss"),
    ("small", pa.array([261]), "was int8 when the workflow was fitted: .*261"),
    ("gaps", pa.array([2**53 + 1]), "was double when the workflow was fitted: .*9007199254740993"),
    ("day", pa.array([DATE], pa.timestamp("s", "UTC")), "is timestamp.*but was timestamp"),
    ("genres", pa.array([[1]]), "is list<item: int64>, but was list<item: string>"),
    ("own", pa.array([1]), "is int64, but was no number when the workflow was fitted"),
]


@pytest.mark.parametrize(("name", "values", "expected"), TAKEN, ids=str)
def test_values_that_the_fit_may_have_had(typed, name, values, expected):
    column = as_fitted(values, typed.types[name], "")
    assert column.to_pylist() == (values.to_pylist() if expected is None else expected)
    assert typed.types[name] in (None, column.type)


@pytest.mark.parametrize(("name", "values", "words"), REFUSED, ids=str)
def test_values_that_it_cannot_have_had(typed, name, values, words):
    with pytest.raises(UserError, match=f"the column,? .*{words}"):
        as_fitted(values, typed.types[name], "the column")


def test_frames_of_pandas_own_types():
    workflow = fitted(["user"] >> ops.LambdaOp(lambda column: column * 2))
    for dtype in ("category", "Int64", object):
        scored = encoded(workflow, ["user"], LOG[["user"]].astype(dtype))
        assert scored["user"].tolist() == (LOG["user"] * 2).tolist()
