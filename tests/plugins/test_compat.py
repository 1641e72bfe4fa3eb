"""Merlin and TensorFlow as `_compat.py` finds them: every name that is not public is there."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import merlin_cowclip.models
import merlin_cowclip.plugins
from merlin_cowclip.plugins import load_model, save_model
from merlin_cowclip.plugins._tensorflow import saving_lib

from .merlin_models import SCHEMA, batch, dataset
from .test_optimizer import HOT, fitted, ours

STORED = Path(__file__).parent.parent / "data" / "saved_by_tensorflow_2_12.tar.xz"


def _sources():
    for package in (merlin_cowclip.plugins, merlin_cowclip.models):
        yield from Path(package.__file__).parent.rglob("*.py")


def _private_names():
    """Of TensorFlow: what is imported from `tensorflow.python`, and raw ops."""
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tensorflow.p"):
                yield from ((node.module, one.name) for one in node.names)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tf.raw_ops":
                yield "tensorflow.raw_ops", node.attr


@pytest.mark.parametrize(
    ("module", "name"),
    sorted(
        set(_private_names())
        - {
            ("tensorflow.python.eager", "tape"),  # of 2.12; `record` of later ones
            ("tensorflow.python.eager", "record"),
        }
    ),
)
def test_a_name_without_a_promise(module, name):
    found = tf.raw_ops if module == "tensorflow.raw_ops" else importlib.import_module(module)
    assert hasattr(found, name), f"TensorFlow {tf.__version__} has no {module}.{name}"


def test_keras_has_the_switch_that_merlins_loads_read():
    found = hasattr(saving_lib, "_SAVING_V3_ENABLED")
    assert found, f"TensorFlow {tf.__version__}: Keras has no saving_lib._SAVING_V3_ENABLED"


@pytest.mark.parametrize(("level", "shown"), [("3", ["E0000 error"]), ("0", ["I0000", "E0000"])])
def test_of_tensorflows_import_only_notes_are_dropped(tmp_path, level, shown):
    module = tmp_path / "tensorflow.py"
    module.write_text("import os; os.write(2, b'I0000 note\\nE0000 error\\n')")
    program = "from merlin_cowclip.plugins._quiet import import_tensorflow; import_tensorflow()"
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {program}"],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": level},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = ended.stderr.splitlines()
    assert len(lines) == len(shown)
    assert all(line.startswith(one) for line, one in zip(lines, shown, strict=True))


def test_recording():
    from merlin_cowclip.plugins._tensorflow import is_recording, not_recorded

    told = f"the record of tapes is another one in TensorFlow {tf.__version__}"
    with tf.GradientTape():
        assert is_recording(), told
        with not_recorded():
            assert not is_recording(), told
    assert not is_recording(), told


def _program(text: str) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(text)
    environment = {k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )


IS_NEW = tf.__version__ > "2.16"
only_new = pytest.mark.skipif(not IS_NEW, reason="Keras 2 is TensorFlow's own")


@only_new
@pytest.mark.parametrize("first", ["", "import tensorflow as tf", "import merlin_cowclip.plugins"])
def test_merlin_before_ours(first):
    """As a formatter sorts imports: by the .pth file, which an editable install has too."""
    ended = _program(f"""
        {first}
        import merlin.models.tf as mm
        import tensorflow as tf
        from merlin_cowclip.plugins import CowClipOptimizer
        assert issubclass(mm.Model, tf.keras.Model)
    """)
    assert not ended.returncode, ended.stderr


@only_new
def test_keras_3_in_use():
    ended = _program("""
        import tensorflow as tf
        tf.keras.layers.Dense
        import merlin.models.tf
    """)
    told = (
        r"ImportError: Merlin Models needs Keras 2, and .* Keras 3. Import merlin.models.tf first"
    )
    assert re.search(told, ended.stderr), ended.stderr


@only_new
def test_without_tf_keras():
    ended = _program("""
        import sys
        sys.modules["tf_keras"] = None
        import merlin_cowclip.models
    """)
    assert "ImportError: Merlin Models needs Keras 2: pip install 'tf-keras" in ended.stderr


def _after(model):
    """Predictions of one batch, and weights after two more updates: float32 of both."""
    found = model(batch(SCHEMA)[0])
    model.fit(dataset(SCHEMA, 2, first=9), verbose=0)
    return {"predictions": found.numpy(), **{v.name: v.numpy() for v in model.trainable_variables}}


def test_a_save_of_tensorflow_2_12_loads(tmp_path):
    """With its optimizer: predictions and the next updates are those that it made there."""
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path)
    with np.load(tmp_path / "after.npz") as file:
        expected = dict(file)
    found = _after(load_model(tmp_path / "model", metrics=[]))
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_save_of_another_version_that_does_not_load(tmp_path, quick_saves):
    model, _ = fitted(ours, SCHEMA)
    save_model(model, tmp_path / "model")
    marker = tmp_path / "model" / "merlin_cowclip" / "state.json"
    marker.write_text(marker.read_text().replace(tf.__version__, "2.99.0"))
    (tmp_path / "model" / "keras_metadata.pb").write_bytes(b"of another form")
    told = "cannot load .*, which 2.99.0 saved: .* Load it with TensorFlow 2.99.0 or later"
    with pytest.raises(ValueError, match=told):
        load_model(tmp_path / "model")


if __name__ == "__main__":  # with TensorFlow 2.12: python -m tests.plugins.test_compat
    with tempfile.TemporaryDirectory() as name:
        model, _ = fitted(ours, SCHEMA, HOT.replace(warmup_epochs=1.0), steps_per_epoch=5)
        save_model(model, Path(name, "model"))
        np.savez(Path(name, "after.npz"), **_after(model))
        with tarfile.open(STORED, "w:xz") as archive:
            for one in ("model", "after.npz"):
                archive.add(Path(name, one), one)
