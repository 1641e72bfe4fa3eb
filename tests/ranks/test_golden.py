"""What two ranks train is what it was when the golden data were recorded."""

from __future__ import annotations

import pytest

from tests.golden import workflow_cases as cases

from .launch import needs_horovod

pytestmark = needs_horovod


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One with replicated tables; one in shards, which is stopped after an update and goes on."""
    home = tmp_path_factory.mktemp("ranks")
    cases.ranks(home, ["train-replicated", "stop-sharded"], ["resume-sharded"])
    return home


@pytest.mark.parametrize(
    ("tables", "name"), [("replicated", "train-exact"), ("sharded", "ranks-sharded")]
)
def test_as_recorded(runs, tables, name):
    """Replicated tables are those that one process trains."""
    changed = cases.differences(cases.of_run(runs / tables), name)
    assert not changed, "\n".join(changed)
