"""Merlin, TensorFlow and Keras as `_compat.py` arranges them, and a save of TensorFlow 2.12."""

from __future__ import annotations

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

from merlin_cowclip.plugins import load_model, save_model

from .merlin_models import HOT, SCHEMA, batch, dataset, fitted, ours

STORED = Path(__file__).parent.parent / "data" / "saved_by_tensorflow_2_12.tar.xz"


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


def _program(text: str) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(text)
    environment = {k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )


IS_NEW = tf.__version__ > "2.16"
only_new = pytest.mark.skipif(not IS_NEW, reason="Keras 2 is TensorFlow's own")


@only_new
def test_merlin_before_ours():
    """As a formatter sorts imports: by the .pth file, which an editable install has too."""
    ended = _program("""
        import merlin.models.tf as mm
        import tensorflow as tf
        from merlin_cowclip.plugins import CowClipOptimizer
        assert issubclass(mm.Model, tf.keras.Model)
    """)
    assert not ended.returncode, ended.stderr


@only_new
@pytest.mark.extended
@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("tf.keras.layers.Dense", "ImportError: Merlin Models needs Keras 2, .* Keras 3. Import"),
        ("sys.modules['tf_keras'] = None", "Merlin Models needs Keras 2: pip install 'tf-keras"),
    ],
)
def test_keras_3_in_use_or_no_keras_2(first, message):
    ended = _program(f"""
        import sys
        import tensorflow as tf
        {first}
        import merlin.models.tf
    """)
    assert re.search(message, ended.stderr), ended.stderr


def _after(model):
    """Predictions of one batch, and weights after two more updates: float32 of both."""
    predictions = model(batch(SCHEMA)[0]).numpy()
    model.fit(dataset(SCHEMA, 2, first=9), verbose=0)
    return {"predictions": predictions, **{v.name: v.numpy() for v in model.trainable_variables}}


def test_a_save_of_tensorflow_2_12_loads(tmp_path):
    """With its optimizer: predictions and the next updates are those that it made there."""
    with tarfile.open(STORED) as archive:
        archive.extractall(tmp_path)
    with np.load(tmp_path / "after.npz") as file:
        expected = dict(file)
    after = _after(load_model(tmp_path / "model", metrics=[]))
    assert after.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(after[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


if __name__ == "__main__":  # with TensorFlow 2.12: python -m tests.plugins.test_compat
    with tempfile.TemporaryDirectory() as name:
        model, _ = fitted(ours, SCHEMA, HOT.replace(warmup_epochs=1.0), steps_per_epoch=5)
        save_model(model, Path(name, "model"))
        np.savez(Path(name, "after.npz"), **_after(model))
        with tarfile.open(STORED, "w:xz") as archive:
            for one in ("model", "after.npz"):
                archive.add(Path(name, one), one)
