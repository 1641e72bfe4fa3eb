"""The pages of the documentation, their code, and the site that they make."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
sys.path.insert(0, str(DOCS / "extensions"))
error_messages = importlib.import_module("error_messages")
sys.path.pop(0)
NOT_RUN = re.compile(r"<!-- not run: (.*) -->\n+$")


@dataclass(frozen=True)
class Block:
    """Fenced code of a page."""

    page: Path
    line: int
    language: str
    text: str
    not_run: str  # why it is not, or empty

    def __str__(self) -> str:
        return f"{self.page.name}, line {self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        not_run = NOT_RUN.search(text, 0, found.start())
        yield Block(page, line, found[1].strip(), found[2], not_run[1] if not_run else "")


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The built site: a warning would be an error."""
    out = tmp_path_factory.mktemp("site") / "html"  # notebooks are unpacked beside it
    paths = os.pathsep.join(str(ROOT / floor) for floor in ("plugins", "models", "workflows"))
    call = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*call, "-d", str(tmp_path_factory.mktemp("doctrees")), str(DOCS), str(out)],
        env={**os.environ, "PYTHONPATH": paths, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return out
