"""Every notebook has a test that executes it, and its links exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .conftest import NOTEBOOKS

pytestmark = pytest.mark.extended
FOUND = sorted(NOTEBOOKS.glob("*.ipynb"))


def test_every_notebook_is_run():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [path.name[:2] for path in FOUND] == ["01", "02", "03", "04"]
    assert sorted(re.findall(r'^NOTEBOOK = "(.*)"$', tests, re.MULTILINE)) == [
        path.stem for path in FOUND
    ]


def test_links_exist():
    for path in FOUND:
        for link in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
            assert (NOTEBOOKS / link).is_file(), (path.name, link)
