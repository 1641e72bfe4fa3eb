"""Whether a workflow's rows are those that it was given, one for one and in order."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.data.row_for_row import OtherRowsError, moving, transformed
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag.ops.subgraph import Subgraph
    from nvtabular import ops

pytestmark = pytest.mark.filterwarnings("ignore:(Initializ|Chang)ing an NVTabular Dataset")
ROWS = 12
LOG = pd.DataFrame(
    {
        "key": np.random.default_rng(0).permutation(ROWS),
        "user": [f"u{i}" for i in np.arange(ROWS) % 5],
        "price": np.arange(ROWS) / 7,
    }
)
EACH = pd.DataFrame({"key": np.arange(ROWS)[::-1], "size": np.arange(ROWS)})


class Own(ops.Operator):
    """A user's own, of any function of a frame."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def transform(self, col_selector, df):
        return self.function(df[col_selector.names])


def everything(node):
    return node


def join(ext, **options):
    return lambda columns: columns >> ops.JoinExternal(ext, on="key", **options)


def keep(f):
    return lambda columns: columns >> ops.Filter(f=f)


def own(f):
    return lambda columns: columns >> Own(f)


GROUPED = ops.Groupby(groupby_cols=["key"], aggs={"user": ["first"], "price": ["max"]})
TWICE = pd.DataFrame({"key": [*range(1, ROWS), 1], "size": 0})  # and 0 not at all


def fitted(move, log=LOG):
    workflow = nvt.Workflow(move(["key", "user", "price"]) >> ops.FillMissing())
    return workflow.fit(nvt.Dataset(log))


@pytest.mark.parametrize(
    "move",
    [
        everything,
        join(EACH),
        keep(lambda rows: rows["price"] >= 0),
        keep(lambda rows: rows[rows["price"] >= 0]),
        lambda columns: columns >> ops.Dropna(),
        lambda columns: ["price"] >> ops.DifferenceLag("user"),
        own(lambda rows: rows.set_index("user", drop=False)),
        own(lambda rows: rows.set_index(rows["price"].to_numpy() + 1)),
        lambda columns: columns >> Subgraph("inner", columns >> ops.FillMissing()),
    ],
)
def test_rows_that_stay(move):
    """They are NVTabular's own, to the last bit."""
    if move is everything:
        move = lambda columns: columns >> ops.FillMissing()  # noqa: E731
    workflow = fitted(move)
    pd.testing.assert_frame_equal(transformed(workflow, LOG.copy()), workflow.transform(LOG.copy()))


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (join(TWICE, how="inner"), "12 of 12 from JoinExternal, some of them moved or doubled"),
        (join(pd.concat([EACH, EACH[:1]])), "^13 of 12 from JoinExternal$"),
        (lambda columns: columns >> GROUPED, "12 of 12 from Groupby, some"),
        (keep(lambda rows: rows["price"] > 0), "^11 of 12 from Filter$"),
        (keep(lambda rows: rows.sort_values("key")), "12 of 12 from Filter, some"),
        (
            lambda columns: (
                columns >> Subgraph("outer", columns >> Subgraph("inner", columns >> GROUPED))
            ),
            "12 of 12 from Groupby, some",
        ),
        (own(lambda rows: rows.sort_values("key")), "12 of 12 from Own, some"),
        (own(lambda rows: rows.iloc[[0, *range(ROWS - 1)]]), "12 of 12 from Own, some"),
        (
            lambda columns: columns >> ops.LambdaOp(lambda c: c[::-1]),
            "12 of 12 from LambdaOp",
        ),
        (own(lambda rows: rows[:0]), "^0 of 12 from Own$"),
    ],
)
def test_rows_that_are_others(move, words):
    workflow = fitted(move)
    with pytest.raises(OtherRowsError, match=words):
        transformed(workflow, LOG.copy())


def test_rows_that_one_branch_of_two_drops():
    """NVTabular puts the rest beside other rows."""
    dropped = ["price"] >> ops.Filter(f=lambda rows: rows["price"] > 0)
    workflow = nvt.Workflow((["key", "user"] >> ops.FillMissing()) + dropped).fit(nvt.Dataset(LOG))
    assert len(workflow.transform(LOG.copy())) == ROWS
    with pytest.raises(OtherRowsError, match="^11 of 12 from Filter$"):
        transformed(workflow, LOG.copy())


def test_which_operators_may_move_rows():
    assert moving(fitted(join(EACH))) == []
    assert moving(fitted(join(EACH, how="inner"))) == ["JoinExternal(how='inner')"]
    assert moving(fitted(lambda columns: columns >> GROUPED)) == ["Groupby"]
    within = fitted(lambda columns: columns >> Subgraph("inner", columns >> GROUPED))
    assert moving(within) == ["Groupby"]
