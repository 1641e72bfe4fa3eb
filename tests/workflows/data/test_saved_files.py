"""Operators that look values up in files of one name, of which NVTabular saves one alone."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.data.saved_files import refuse_shared_files
from merlin_cowclip.workflows.data.workflow_graph import load_saved
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports, quiet_operators

with quiet_imports():
    import nvtabular as nvt
    from merlin.io import Dataset
    from nvtabular import ops

pytestmark = pytest.mark.filterwarnings(
    "ignore:Initializing an NVTabular Dataset in CPU mode", "ignore:Performing a hash-based"
)


def log() -> pd.DataFrame:
    random = np.random.default_rng(0)
    numbers = random.integers(0, 60, 200)
    return pd.DataFrame(
        {
            "user": numbers,
            "item": [f"{'ab'[k % 2]}{k}" for k in random.zipf(1.5, 200) % 10],
            "shop": numbers % 7,
            "price": random.random(200),
            "click": numbers % 2,
        }
    )


class Operators:
    """Of a home, each with an `out_path` of its own; what they make has the name that is given."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._made = 0

    def _out(self) -> str:
        self._made += 1
        return str(self._home / f"fitted{self._made}")

    def ids(self, nodes, name="_ids", **options):
        return nodes >> ops.Categorify(out_path=self._out(), **options) >> ops.Rename(postfix=name)

    def means(self, nodes, target="click", name="_mean"):
        encoding = ops.TargetEncoding(target, kfold=1, p_smooth=1, out_path=self._out())
        return nodes >> encoding >> ops.Rename(postfix=name)

    def joined(self, nodes, column="price"):
        return nodes >> ops.JoinGroupby(cont_cols=[column], stats=["mean"], out_path=self._out())


def half():
    return ops.LambdaOp(lambda column: column // 2)


GOOD = {
    "one operator": lambda o: o.ids(["user", "item"]),
    "the same twice": lambda o: o.ids(["user"]) + o.ids(["user"], "_again"),
    "renamed before": lambda o: (
        o.ids(["user"]) + o.ids(["user"] >> half() >> ops.Rename(postfix="_half"))
    ),
    "ids and means": lambda o: o.ids(["user", "item"]) + o.means(["item", "shop"]),
    "means and joined of others": lambda o: o.means(["item"]) + o.joined(["shop"]),
}
BAD = {
    "changed": lambda o: (
        o.ids(["user"], max_size=20) + o.ids(["user"] >> half(), "_half", max_size=20)
    ),
    "a combination's name": lambda o: (
        o.ids([["item", "shop"]], encode_type="combo")
        + o.ids(["user"] >> ops.Rename(name="item_shop"), "_user")
    ),
    "another target": lambda o: o.means(["item"]) + o.means(["item"], "price", "_price"),
    "means and joined": lambda o: o.means(["item"]) + o.joined(["item"]),
}


def saved(home: Path, make) -> tuple[nvt.Workflow, pd.DataFrame, pd.DataFrame]:
    """A workflow that was saved, loaded; what it makes of the log, before and after."""
    with quiet_operators():
        workflow = nvt.Workflow(make(Operators(home)))
        workflow.fit(Dataset(log()))
        before = workflow.transform(Dataset(log())).to_ddf().compute()
        workflow.save(str(home / "workflow"))
        loaded = load_saved(home / "workflow")
        try:
            after = loaded.transform(Dataset(log())).to_ddf().compute()
        except Exception:  # of a file of the other operator
            after = pd.DataFrame()
    return loaded, before, after


@pytest.mark.parametrize("name", GOOD)
def test_a_file_of_each_operator_or_the_same_one(tmp_path, name):
    workflow, before, after = saved(tmp_path, GOOD[name])
    refuse_shared_files(workflow, tmp_path)
    pd.testing.assert_frame_equal(after, before)


@pytest.mark.parametrize("name", BAD)
def test_a_file_of_two_operators_is_refused(tmp_path, name):
    workflow, before, after = saved(tmp_path, BAD[name])
    assert not after.equals(before)  # stock NVTabular gives other values after a load
    with pytest.raises(UserError, match=r"must look values up in files of their own.*Rename the"):
        refuse_shared_files(workflow, tmp_path)
