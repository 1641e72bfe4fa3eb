"""The Python of the guides as files of a user with `mypy --strict`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .conftest import GUIDES, ROOT
from .test_python import ELSEWHERE, PRELUDES, imported, python


@pytest.mark.extended
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="mypy reads the default versions")
def test_type_checkers_accept_the_python_of_the_guides(tmp_path):
    for page in GUIDES:
        blocks = [block.text for block in python(page) if not imported(block.text) & ELSEWHERE]
        allowed = "# mypy: allow-untyped-calls"  # of Merlin's functions
        text = "\n".join([allowed, PRELUDES.get(page.stem, ""), *blocks])
        (tmp_path / f"page_{page.stem.replace('-', '_')}.py").write_text(text)
    call = [sys.executable, "-m", "mypy", *map(str, tmp_path.iterdir())]  # cache of `make lint`
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
