"""Runs in half precision: nearly as good as in float32, resumed to the bit, used as trained."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins.optimizers.state import unwrapped
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.spec import CRITEO, DatasetSpec
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.checkpoint import Checkpoints
from merlin_cowclip.workflows.training.configuration import PRECISIONS, TrainConfig
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.train import train
from tests.runs_alike import differences, train_in_two

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

MIXED = [PRECISIONS[1], pytest.param(PRECISIONS[2], marks=pytest.mark.extended)]
TOML = f"""
name = "few"
label = "label"
categorical = ["C2", "C5", "C8", "C9"]
continuous = ["I1", "I2"]
header = false
separator = "\\t"
columns = {json.dumps(CRITEO.columns)}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A synthetic log with an effect to learn, in `home / "log"`, prepared in `home / "data"`."""
    home = tmp_path_factory.mktemp("precision")
    write_synthetic("criteo", home / "log", rows=20_000, seed=0, cardinality=100)
    (home / "few.toml").write_text(TOML)
    spec = DatasetSpec.from_toml(home / "few.toml")
    prepare(spec, [home / "log"], home / "data", progress=False)
    return home


@pytest.fixture(scope="module")
def trained(home):
    """The run of a precision, of one epoch by the command line, trained once."""

    def run(precision: str) -> Run:
        out = home / precision
        if not out.exists():
            options = ["--batch-size", "256", "--rule", "cowclip", "--epochs", "1", "--mlp", "32"]
            options += ["--dense-lr", "2e-3", "--embedding-lr", "1e-2", "--quiet"]
            command = ["train", home / "data", "--out", out, "--precision", precision, *options]
            assert main([str(part) for part in command]) == 0
        return Run.open(out)

    return run


@pytest.mark.parametrize("precision", MIXED)
def test_an_epoch_is_as_good_as_in_float32(home, trained, precision):
    full, run = trained("float32"), trained(precision)
    assert full.result["auc"] > 0.6
    assert run.result["auc"] == pytest.approx(full.result["auc"], abs=0.01)
    assert run.config["precision"] == precision
    assert run.config["identity"] != full.config["identity"]
    assert tf.keras.mixed_precision.global_policy().name == "float32"


@pytest.mark.parametrize("precision", MIXED)
def test_a_model_is_used_as_it_was_trained(home, trained, precision):
    run = trained(precision)
    features, _ = next(iter(Loader(run.data(), "test", batch_size=1000)))
    model = run.model()
    assert {weight.dtype for weight in model.trainable_weights} == {tf.float32}
    layers = [x for x in model._flatten_layers() if isinstance(x, tf.keras.layers.Dense)]
    assert len(layers) == 3
    assert {layer.compute_dtype for layer in layers} == {precision.removeprefix("mixed_")}
    found = model(features)
    assert found.dtype == tf.float32
    full = trained("float32").model()
    for mine, weight in zip(full.weights, model.weights, strict=True):
        mine.assign(weight)
    np.testing.assert_allclose(found, full(features), atol=0.02)
    assert (found.numpy() != full(features).numpy()).any()


@pytest.mark.extended
@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_evaluate_and_export(home, trained, precision, capsys, tmp_path):
    run = trained(precision)
    capsys.readouterr()
    assert main(["evaluate", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["auc"] == pytest.approx(run.result["auc"], abs=1e-6)
    check = ["--check-raw", str(home / "log")]
    assert main(["export", str(run.path), "--out", str(tmp_path / "repository"), *check]) == 0


@pytest.mark.extended
@pytest.mark.parametrize("precision", PRECISIONS[1:])
def test_a_run_resumes_to_the_bit(home, trained, precision, tmp_path):
    """Keras's loss scale, which doubles after so many steps, is in the checkpoints as well."""
    config, data = trained(precision).train_config(), trained(precision).data()
    reference = train(data, config, tmp_path / "reference", progress=False)

    def look(trainer):
        scaling = trainer.model.optimizer
        assert (unwrapped(scaling) is scaling) == (precision == "mixed_bfloat16")

    train_in_two(data, config, tmp_path / "run", 20, look)
    assert differences(tmp_path / "run", reference.path) == []
    (last,) = Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1:]
    path = Checkpoints(tmp_path / "run" / "checkpoints").path(last) / "state"
    names = tf.train.load_checkpoint(str(path)).get_variable_to_shape_map()
    scales = [name for name in names if name.startswith("state/loss_scale_")]
    assert len(scales) == (2 if precision == "mixed_float16" else 0)


@pytest.mark.extended
def test_a_warm_start_may_have_another_precision(home, trained, tmp_path):
    run = trained("mixed_float16")
    config = run.warm_start_config(keep_optimizer=True).to_dict() | {"precision": "float32"}
    more = {"warm_start": run.path, "progress": False}
    with pytest.raises(UserError, match="its warm-up, ema and precision, mixed_float16"):
        train(run.data(), TrainConfig(**config), tmp_path / "a", keep_optimizer=True, **more)
    train(run.data(), TrainConfig(**config), tmp_path / "b", **more)
