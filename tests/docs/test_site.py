"""The documentation site builds without a warning, and has a page for every public name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from merlin_cowclip import models, plugins, workflows

from .conftest import DOCS, ROOT

pytestmark = pytest.mark.extended


def test_the_site(tmp_path):
    out = tmp_path / "site" / "html"  # notebooks are unpacked beside it
    paths = os.pathsep.join(str(ROOT / floor) for floor in ("plugins", "models", "workflows"))
    call = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    call += ["-D", "nb_execution_mode=off"]  # tests/notebooks runs them
    done = subprocess.run(
        [*call, "-d", str(tmp_path / "doctrees"), str(DOCS), str(out)],
        env={**os.environ, "PYTHONPATH": paths, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for package in (plugins, models, workflows):
        for name in package.__all__:
            floor = package.__name__.rpartition(".")[2]
            page = (out / f"api/names/{floor}.{name}.html").read_text(encoding="utf-8")
            assert f'id="merlin_cowclip.{floor}.' in page
