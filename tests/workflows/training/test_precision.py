"""Runs in half precision: nearly as good as in float32, resumed to the bit, used as trained."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins.optimizers.state import unwrapped
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.training.configuration import PRECISIONS, TrainConfig
from merlin_cowclip.workflows.training.evaluation import evaluate
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.train import train
from tests.kills import differences, train_in_two

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

FULL = TrainConfig(
    batch_size=256, rule="cowclip", epochs=1, mlp=(32,), dense_lr=2e-3, embedding_lr=1e-2
)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """The run of a precision, trained once."""
    home = tmp_path_factory.mktemp("precision")

    def run(precision: str) -> Run:
        if not (home / precision).exists():
            config = dataclasses.replace(FULL, precision=precision)
            train(data, config, home / precision, progress=False)
        return Run.open(home / precision)

    return run


@pytest.mark.parametrize(
    "precision", [PRECISIONS[1], pytest.param(PRECISIONS[2], marks=pytest.mark.extended)]
)
def test_a_run_is_as_good_as_in_float32_and_used_as_it_was_trained(data, trained, precision):
    full, run = trained("float32"), trained(precision)
    assert full.result["auc"] > 0.6
    assert run.result["auc"] == pytest.approx(full.result["auc"], abs=0.01)
    assert tf.keras.mixed_precision.global_policy().name == "float32"
    test = Loader(data, "test", batch_size=1000)
    (features, _), model = test.peek(), run.model()
    assert evaluate(model, test).auc == pytest.approx(run.result["auc"], abs=1e-6)
    assert {weight.dtype for weight in model.trainable_weights} == {tf.float32}
    layers = [x for x in model._flatten_layers() if isinstance(x, tf.keras.layers.Dense)]
    assert {layer.compute_dtype for layer in layers} == {precision.removeprefix("mixed_")}
    predicted, full_model = model(features), full.model()
    assert predicted.dtype == tf.float32
    full_model.set_weights(model.get_weights())
    np.testing.assert_allclose(predicted, full_model(features), atol=0.02)
    assert (predicted.numpy() != full_model(features).numpy()).any()


@pytest.mark.extended
@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_a_run_resumes_to_the_bit_and_is_exported(data, trained, precision, tmp_path):
    """Keras's loss scale, which doubles after so many steps, is in the checkpoints as well."""
    reference = trained(precision)

    def look(trainer):
        scaling = trainer.model.optimizer
        assert (unwrapped(scaling) is scaling) == (precision == "mixed_bfloat16")
        scales = [name for name in trainer._state.shared if name.startswith("loss_scale/")]
        assert len(scales) == (2 if precision == "mixed_float16" else 0)

    train_in_two(data, reference.train_config(), tmp_path / "run", 10, look)
    assert differences(tmp_path / "run", reference.path) == []
    check = ["--check-raw", str(data.path.parent / "log.csv")]
    assert main(["export", str(reference.path), "--out", str(tmp_path / "out"), *check]) == 0
