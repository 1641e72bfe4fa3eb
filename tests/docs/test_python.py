"""The Python of the guides, run block after block at smaller sizes.

`PRELUDES` defines what a page assumes. Blocks for several ranks, SOK or Triton are only compiled.
"""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import pytest

from .conftest import GUIDES, Block, blocks, smaller

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("quick_saves", "graphs_as_traced")]
ELSEWHERE = {"horovod", "sparse_operation_kit", "tritonclient"}
MODEL = """
from merlin_cowclip.models import deepfm, embeddings_of
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin_cowclip.workflows import Loader, PreparedData
data = PreparedData.open("data")
workflow, schema = data.workflow(), data.workflow().output_schema
big = Hyperparameters(batch_size=256)
loader = Loader(data, batch_size=256)
model = my_merlin_model = deepfm(schema, mlp=(8,))
"""
OPTIMIZER = """
optimizer = CowClipOptimizer.for_model(model, big)
model.compile(optimizer=optimizer)
"""
PRELUDES = {
    "README": MODEL
    + """
import merlin.io
train = merlin.io.Dataset("data/train/*.parquet", engine="parquet", schema=schema)
""",
    "index": MODEL,
    "existing-pipeline": MODEL,
    "coming-from": MODEL,
    "optimizer": MODEL + OPTIMIZER,
    "data": MODEL + OPTIMIZER,
    "models": MODEL
    + """
model.compile(optimizer=CowClipOptimizer.for_model(model, big))
model.fit(loader)
frame = embeddings_of(model)["embeddings"].to_df("C3", workflow="data/workflow")
pretrained = frame.dropna(subset="raw").set_index("raw")
""",
}


def python(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python"]


def imported(text: str) -> set[str]:
    """The packages that a block imports."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.filterwarnings("ignore")  # of batch sizes that are not the page's
@pytest.mark.parametrize("page", [p for p in GUIDES if python(p)], ids=lambda page: page.stem)
def test_the_python_of_a_page(page, assumed, tmp_path, monkeypatch):
    home = tmp_path / "home"
    shutil.copytree(assumed, home)
    monkeypatch.chdir(home)
    shutil.rmtree("train")
    shutil.copytree("data/train", "train")
    written = {"datasets": "train.txt.gz", "training": "run"}.get(page.stem)  # by the page itself
    if written:
        shutil.move(written, tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    prelude = PRELUDES.get(page.stem, "")
    for block in python(page):
        text = smaller(block.text)
        code = compile(text, str(block), "exec")
        if imported(text) & ELSEWHERE:
            continue
        exec(prelude, names)
        exec(code, names)
        prelude = ""
