"""What two ranks train is what it was when the golden data were recorded."""

from __future__ import annotations

import pytest

from tests.golden import workflow_cases as cases

from .launch import needs_horovod

pytestmark = [needs_horovod, pytest.mark.ranks]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return cases.ranks(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("tables", ["replicated", "sharded"])
@pytest.mark.parametrize("how", ["", "-2"], ids=["at once", "stopped and resumed"])
def test_as_recorded(found, tables, how):
    told = cases.differences(found[f"{tables}{how}"], f"ranks-{tables}")
    assert not told, "\n".join(told)
