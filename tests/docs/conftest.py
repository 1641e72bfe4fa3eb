"""The guides and their code blocks, and the files that they assume."""

from __future__ import annotations

import gzip
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.quiet import quiet_imports
from tests.saves import quick_saves

with quiet_imports():
    import nvtabular as nvt
    from merlin.io import Dataset
    from merlin.schema import Tags
    from nvtabular import ops

ROWS, BATCH = 1200, "256"
GRID = """
[fixed]
model = "lr"
epochs = 1
[grid]
rule = ["none", "sqrt"]
batch_size = [256]
"""
ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GUIDES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SMALLER = {
    "TrainConfig(batch_size=8192": 'TrainConfig(batch_size=256, epochs=1, model="lr"',
    "epochs=20": "epochs=2",
    "131_072": "256",
    "8192": "256",
    "200_000": "1_200",
    "300_000": "1_200",
    "50_000": "1_200",
}
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
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        not_run = NOT_RUN.search(text, 0, match.start())
        yield Block(page, line, match[1].strip(), match[2], not_run[1] if not_run else "")


def smaller(text: str) -> str:
    """Python of a page at sizes for tests."""
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    return text


@pytest.fixture(scope="session")
def assumed(tmp_path_factory) -> Path:
    """A folder with the files that the pages assume: logs, prepared and adopted data, runs."""
    home = tmp_path_factory.mktemp("pages")
    write_synthetic("criteo", home / "train.txt", rows=ROWS, seed=1)
    text = (home / "train.txt").read_bytes()
    (home / "live").mkdir()
    for name in ("new.txt", "live/first.csv"):
        (home / name).write_bytes(text)
    for name in ("train.txt.gz", "day_24.csv.gz"):
        (home / name).write_bytes(gzip.compress(text))
    (home / "grid.toml").write_text(GRID)
    _existing_pipeline(home)
    _daily_logs(home)
    _tutorial_logs(home)
    with pytest.MonkeyPatch.context() as patch, quick_saves():
        patch.chdir(home)
        # With constant rates a finished run can go on.
        small = ["--model", "lr", "--epochs", "1", "--batch-size", BATCH, "--rule", "sqrt"]
        assert main(["prepare", "criteo", "train.txt", "--out", "data"]) == 0
        assert main(["train", "data", "--out", "run", *small]) == 0
    for name, of in (("DATA", "data"), ("DIR", "data"), ("RUN", "run")):
        shutil.copytree(home / of, home / name)
    return home


def _existing_pipeline(home: Path) -> None:
    """The parquet and the workflow of an existing pipeline."""
    random = np.random.default_rng(0)
    ids = {name: random.zipf(1.3, ROWS) % 60 for name in ("user", "item")}
    price, click = random.normal(5, 2, ROWS), random.integers(0, 2, ROWS)
    raw = pd.DataFrame({**ids, "price": price, "click": click})
    raw.to_parquet(home / "raw.parquet")
    log = Dataset(raw)
    fitted = list(ids) >> ops.Categorify(out_path=str(home / "fitted"))
    label = ["click"] >> ops.AddMetadata(tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
    workflow = nvt.Workflow(fitted + (["price"] >> ops.Normalize()) + label)
    workflow.fit(log)
    workflow.save(str(home / "workflow"))
    parts = ("train", "valid", "test")
    for folder in (*parts, *(f"parquet/{part}" for part in parts)):
        workflow.transform(log).to_parquet(str(home / folder))


def _daily_logs(home: Path) -> None:
    """The example of data.md's TOML block, and logs of it."""
    toml = next(block.text for block in blocks(DOCS / "data.md") if block.language == "toml")
    (home / "clicks.toml").write_text(toml, encoding="utf-8")
    random = np.random.default_rng(0)
    for name in ("day1.csv", "day2.csv", "day3.csv"):
        log = {field: random.zipf(1.3, ROWS) % 60 for field in ("ad", "site", "interests")}
        log |= {"price": random.normal(5, 2, ROWS), "clicked": random.choice(["no", "yes"], ROWS)}
        pd.DataFrame(log).to_csv(home / name, index=False)


def _tutorial_logs(home: Path) -> None:
    """The logs that the tutorial writes, and its description of them."""
    page = list(blocks(DOCS / "tutorial.md"))
    toml, python = (next(b.text for b in page if b.language == name) for name in ("toml", "python"))
    (home / "ads.toml").write_text(toml, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        exec(smaller(python), {})
