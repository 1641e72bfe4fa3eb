"""The Python of the guides, run block after block at smaller sizes.

`PRELUDES` defines what a page assumes. Blocks for several ranks, SOK or Triton are only compiled.
"""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from merlin_cowclip.plugins import CowClipOptimizer
from merlin_cowclip.plugins._tensorflow import tf

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
def test_the_python_of_a_page(page, stand_ins, tmp_path, monkeypatch):
    home = tmp_path / "home"
    shutil.copytree(stand_ins, home)
    monkeypatch.chdir(home)
    shutil.rmtree("train")
    shutil.copytree("data/train", "train")
    made = {"datasets": "train.txt.gz", "training": "run"}.get(page.stem)  # by the page itself
    if made:
        shutil.move(made, tmp_path)
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


def test_migrated_hyperparameters_train_as_before():
    """As Keras's Adam, with the hyperparameters of the migration page."""
    names: dict[str, Any] = {}
    (page,) = (page for page in GUIDES if page.stem == "coming-from")
    exec(python(page)[0].text, names)
    ids = np.random.default_rng(0).integers(0, 23, 4 * 2048)
    labels = ids % 3 == 0
    weights = []
    for ours in (True, False):
        tf.keras.utils.set_random_seed(1)
        layers = [tf.keras.layers.Embedding(23, 4), tf.keras.layers.Dense(1, "sigmoid")]
        model = tf.keras.Sequential([tf.keras.Input((), dtype="int64"), *layers])
        optimizer = tf.keras.optimizers.Adam(1e-3)
        if ours:
            optimizer = CowClipOptimizer.for_model(model, names["theirs"])
        model.compile(optimizer, loss="binary_crossentropy")
        model.fit(ids, labels, batch_size=2048, epochs=1, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_all_other_languages_are_data():
    found = {block.language.partition(" ")[0] for page in GUIDES for block in blocks(page)}
    assert found <= {"", "python", "toml", "{toctree}", "{include}", "bibtex"}
