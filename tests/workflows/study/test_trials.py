"""A trial is what `train` does, and `train --tuned` does what was found."""

import contextlib
import dataclasses
import json

import pytest

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.workflows import train
from merlin_cowclip.workflows.data.etl import prepare
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.held_out import hold_out
from merlin_cowclip.workflows.study.trials import DivergedError, epochs_of
from merlin_cowclip.workflows.study.tune import tune
from merlin_cowclip.workflows.training.keeping import Keeping
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.stopping import Interrupted, Stopping
from tests.bad_input.contract import command

from .conftest import NETWORK, SPEC, write_log


@pytest.fixture(scope="module", autouse=True)
def eager():
    tf.config.run_functions_eagerly(True)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.fixture(scope="module")
def rows(data, tmp_path_factory):
    return hold_out(data, 0.2, 7, tmp_path_factory.mktemp("trials") / "rows", progress=False)


@pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
@pytest.mark.parametrize(("update", "rates"), [("exact", "falling"), ("lazy", "constant")])
def test_a_trial_is_what_train_does(rows, tmp_path, update, rates):
    """On the same rows: AUC, log loss, calibration and training loss to the last digit."""
    config = TuneConfig(batch_size=256, network=NETWORK, epochs=2, update=update)
    trained = config.train_config(dataclasses.replace(config.rules["cowclip"], rates=rates))
    epochs = list(epochs_of(rows, trained, Stopping()))
    tf.config.run_functions_eagerly(True)
    run = train(rows, trained, tmp_path / "run", keeping=Keeping(saved_model=False), progress=False)
    names = ("auc", "log_loss", "calibration", "train_loss")
    for ours, theirs in zip(epochs, run.result["epochs"], strict=True):
        assert [getattr(ours, name) for name in names] == [theirs[name] for name in names]


@pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
def test_a_trial_that_diverges_says_why(rows):
    config = TuneConfig(batch_size=256, network=NETWORK, base={"dense_lr": 1e25})
    with pytest.raises(DivergedError, match="must"):
        list(epochs_of(rows, config.train_config(config.rules["none"]), Stopping()))


@pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
def test_a_trial_stops_after_the_update_in_hand(rows):
    config = TuneConfig(batch_size=256, network=NETWORK)
    stopping, updates = Stopping(), []

    def advance():
        updates.append(1)
        if len(updates) == 2:
            stopping._received(2, None)

    with pytest.raises(Interrupted):
        list(epochs_of(rows, config.train_config(config.rules["none"]), stopping, advance))
    assert len(updates) == 2


def test_a_signal_that_a_library_turns_into_an_error_of_its_own():
    """As TensorFlow's stacks of contexts do while it traces."""
    stopping = Stopping()

    def traced():
        with contextlib.suppress(Interrupted):
            stopping._received(15, None)
        raise AssertionError("Concurrent access?")

    with pytest.raises(Interrupted), stopping.anywhere():
        traced()
    with pytest.raises(AssertionError, match="of another kind"), Stopping().anywhere():
        raise AssertionError("of another kind")


@pytest.fixture
def tuned(data, config, tmp_path, fake):
    return tune(data, config, tmp_path / "tune", trials=8, seeds=2, progress=False)


@pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
class TestTrainTuned:
    def begin(self, data, tuned, out, *options):
        argv = ["train", data.path, "--tuned", tuned.path, "--out", out, "--no-saved-model"]
        return command([*argv, *options])

    def test_it_trains_what_was_found(self, data, tuned, tmp_path):
        done = self.begin(data, tuned, tmp_path / "run", "--quiet")
        assert done.code == 0, done.err
        run = Run.open(tmp_path / "run")
        assert run.train_config() == tuned.train_config()
        assert run.config["scaled"] == tuned.result["table"][0]["hyperparameters"]
        assert run.config["identity"] == tuned.train_config().identity
        assert run.config["values_from"] == str(tuned.path)
        assert len(run.result["epochs"]) == 3
        done = command(["train", "--resume", run.path, "--epochs", 4, "--quiet"])
        assert done.code == 0, done.err
        assert Run.open(run.path).config["values_from"] == str(tuned.path)

    def test_options_go_before_it(self, data, tuned, tmp_path):
        options = ["--epochs", 1, "--seed", 5, "--rule", "sqrt", "--batch-size", 1024]
        done = self.begin(data, tuned, tmp_path / "run", *options, "--quiet")
        assert done.code == 0, done.err
        config = Run.open(tmp_path / "run").train_config()
        found = tuned.train_config().hyperparameters
        assert (config.epochs, config.seed, config.batch_size) == (1, 5, 1024)
        assert config.tuned == found
        assert config.hyperparameters.dense_lr == pytest.approx(2 * found.dense_lr)

    @pytest.mark.filterwarnings("default::merlin_cowclip.workflows.errors.Notice")
    def test_another_part_of_the_log_is_told_of(self, tuned, tmp_path):
        log = write_log(tmp_path / "other.csv", rows=900, seed=3)
        other = prepare(SPEC, [log], tmp_path / "other", progress=False)
        done = self.begin(other, tuned, tmp_path / "run", "--epochs", 1, "--quiet")
        assert done.code == 0, done.err
        assert "train: warning: the values of" in done.err
        assert "were found on other rows" in done.err

    def test_another_tune_and_a_study_go_on_with_its_network(self, data, tuned, tmp_path):
        from merlin_cowclip.workflows.commands.main import command_line
        from merlin_cowclip.workflows.commands.studying import _setting
        from merlin_cowclip.workflows.commands.tuning import tune_config

        its = tuned.train_config()
        places = [str(data.path), "--out", str(tmp_path / "none"), "--base", str(tuned.path)]
        config = tune_config(command_line().parse_args(["tune", *places, "--batch-size", "512"]))
        assert config.network == TuneConfig(network=NETWORK).network
        assert config.base == its.hyperparameters.to_dict()
        setting = _setting(command_line().parse_args(["sweep", "curves", *places]), data)
        run = setting.run("none", its.batch_size)
        assert run.network_options == its.network_options

    def test_the_result_names_its_own_command(self, tuned, tmp_path):
        record = json.loads((tuned.path / "result.json").read_text())
        words = record["command"].split()
        assert words[:2] == ["merlin-cowclip", "tune"]
        assert PreparedData.open(words[2])
        from merlin_cowclip.workflows.commands.main import command_line
        from merlin_cowclip.workflows.commands.tuning import tune_config

        words[words.index("--out") + 1] = str(tmp_path / "none")
        again = tune_config(command_line().parse_args(words[1:]))
        assert again.to_dict() == record["config"]
