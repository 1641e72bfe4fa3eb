"""Options of commands: those that fields of a configuration become, and help."""

import dataclasses
import json
import os
import signal
from types import SimpleNamespace

import pytest

from merlin_cowclip.plugins.presets import preset
from merlin_cowclip.plugins.scaling import recipe, scale
from merlin_cowclip.workflows.commands import endings
from merlin_cowclip.workflows.commands.data import _changed_spec
from merlin_cowclip.workflows.commands.main import cli, help_of
from merlin_cowclip.workflows.commands.studying import tune_config
from merlin_cowclip.workflows.commands.training import train_config
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.errors import Stopped, UserError
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.tuned import FORMAT_VERSION, Tuned
from merlin_cowclip.workflows.training.configuration import CheckpointConfig, TrainConfig
from merlin_cowclip.workflows.training.runs import Run

K = 1024
OF_KINDS = {  # kind → a value on the command line, and as it is read
    "size": ("128K", 128 * K),
    "count": ("3", 3),
    "seed": ("0", 0),
    "positive": ("2e-3", 2e-3),
    "number": ("0", 0.0),
    "units": ("16,8", [16, 8]),
    "names": ("b,a", ["b", "a"]),
    "combiner": ("a=sum,b=mean", {"a": "sum", "b": "mean"}),
    "schedule": ("cosine:to=0.1,epochs=2", {"name": "cosine", "to": 0.1, "epochs": 2.0}),
}


def params(line: str) -> dict:
    """What a command is called with."""
    name, *words = line.split()
    return cli.commands[name].make_context(name, words).params


def data_of(dataset: str) -> SimpleNamespace:
    """What the commands read of prepared data."""
    return SimpleNamespace(spec=SimpleNamespace(name=dataset), rows={"train": 10**6})


def config_of(options: str, dataset: str = "") -> TrainConfig:
    return train_config(params(f"train data --out run {options}"), data_of(dataset))[0]


@pytest.mark.parametrize(
    "field", [*dataclasses.fields(TrainConfig), *dataclasses.fields(CheckpointConfig)]
)
def test_a_field_is_an_option(field):
    of, name = field.metadata, (field.metadata["flag"] or field.name).replace("_", "-")
    if of["kind"] == "flag":
        words, value = f"--{'no-' * field.default}{name}", not field.default
    else:
        text, value = OF_KINDS.get(of["kind"], ((of["choices"] or ["7"])[-1],) * 2)
        words = f"--{name} {text}"
    assert params(f"train data --out run {words}")[field.name] == value
    assert params("train data --out run")[field.name] is None
    shown = " ".join(help_of("train").split())
    assert of["help"].split(":")[0] in shown[shown.index(f"--{name} ") :]


def test_a_batch_size_may_be_in_thousands():
    assert params("tune data --out t --batch-size 8K --base-batch-size 1k")["batch_size"] == 8 * K
    sizes = params("batch-size data --tuned t --out s --batch-sizes 1K,2048")["batch_sizes"]
    assert sizes == [K, 2 * K]


@pytest.mark.parametrize("name", cli.commands)
def test_help(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep").mkdir()  # of the example of report
    shown = help_of(name)
    assert shown.startswith(f"Usage: merlin-cowclip {name} ")
    example = shown.splitlines()[-1].split()
    assert example[:2] == ["merlin-cowclip", name]
    params(" ".join(example[1:]))


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ("", {}),
        ("--rule linear --l2 1e-3", {"rule": "linear", "l2": 1e-3}),
        ("--clip none --warmup-epochs 0", {"clip": "none", "warmup_epochs": 0.0}),
        (
            "--config c.json --epochs 2",
            {"model": "dcn", "cross_layers": 2, "l2": 1e-3, "epochs": 2},
        ),
        ("--config c.json --model fm", {"model": "fm", "l2": 1e-3}),
        ("--config run.json --seed 2", {"clip": "field", "clip_threshold": 2.0, "seed": 2}),
    ],
)
def test_an_option_goes_before_a_file(tmp_path, monkeypatch, options, values):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.json").write_text('{"model": "dcn", "cross_layers": 2, "l2": 1e-3}')
    run = TrainConfig(clip="field", clip_threshold=2.0).to_dict()
    (tmp_path / "run.json").write_text(json.dumps(run))
    assert config_of(options) == TrainConfig(**values)


@pytest.mark.parametrize("size", [K, 128 * K])
def test_the_papers_values(size):
    """Those of Criteo are the rule's; Avazu's table leaves the rule. Data choose nothing."""
    options = f"--batch-size {size} --rule cowclip"
    avazu = config_of(f"{options} --preset avazu")
    assert avazu.hyperparameters == preset("avazu", size)
    rule = TrainConfig(batch_size=size, rule="cowclip")
    assert config_of(f"{options} --preset criteo").hyperparameters == rule.hyperparameters
    assert config_of(options, "criteo") == config_of(options, "avazu") == rule
    ours = config_of(f"--batch-size {size} --preset avazu")
    base = preset("avazu", K)
    assert ours.base == base.replace(decay=True)
    assert ours.hyperparameters == scale(base, to=size, rule="sqrt_decay")


def test_a_file_goes_before_the_papers_values_and_options_before_both(tmp_path, monkeypatch):
    """Each origin is named."""
    monkeypatch.chdir(tmp_path)

    def of(content: dict, options: str = "") -> tuple[TrainConfig, str]:
        (tmp_path / "c.json").write_text(json.dumps(content))
        return train_config(params(f"train d --out r --config c.json {options}"), data_of(""))

    avazu, paper = "--preset avazu --rule cowclip", "the paper's values for avazu at batch size"
    config, source = of({"dense_lr": 3e-4, "l2": 0.5, "epochs": 2}, f"--l2 1e-6 {avazu}")
    assert config.base == preset("avazu", K).replace(dense_lr=3e-4, l2=1e-6)
    assert config.epochs == 2
    assert source == f"{paper} 1,024; dense_lr, epochs of c.json; l2 as given"
    assert of({"batch_size": 8 * K}, avazu)[0].hyperparameters == preset("avazu", 8 * K)
    config, source = of({"rule": "linear"})
    assert config.base == recipe("linear")
    assert source == "hyperparameters of the rule; rule of c.json"


def test_a_warm_start_trains_slower_and_lazily(monkeypatch):
    """From the values scaled to the run's batch size, here by 2; later ones keep their rates."""
    scaled = {"batch_size": 4 * K, "base_batch_size": K, "rule": "sqrt", "l2": 1e-6}
    rates = {"dense_lr": 1e-3, "embedding_lr": 5e-3, "dense_schedule": "linear", "warmup_epochs": 1}
    record = {**TrainConfig(**scaled, **rates, epochs=3).to_dict(), "warm_start": None}
    monkeypatch.setattr(Run, "open", lambda path: Run(path, {"config": record}))
    new = config_of("--warm-start run")
    values = (new.dense_lr, new.embedding_lr, new.l2, new.warmup_epochs, new.dense_schedule)
    assert values == pytest.approx((4e-4, 2e-3, 2e-6, 0, None))
    assert (new.batch_size, new.base_batch_size, new.rule) == (4 * K, 4 * K, "none")
    assert (new.epochs, new.update) == (1, "lazy")
    kept = config_of("--warm-start run --keep-optimizer")  # whose state has a warm-up, too
    assert (kept.update, kept.warmup_epochs) == ("exact", 1)
    given = config_of("--warm-start run --dense-lr 3e-3 --epochs 2 --update exact")
    assert (given.dense_lr, given.epochs, given.update) == (3e-3, 2, "exact")
    with pytest.raises(UserError, match="are for batch size 4096. Received: --batch-size 1024"):
        config_of("--warm-start run --batch-size 1K")
    smaller = config_of("--warm-start run --batch-size 1K --rule sqrt").hyperparameters
    assert (smaller.dense_lr, smaller.l2) == pytest.approx((2e-4, 1e-6))
    record.update(new.to_dict(), warm_start=["run", False])
    assert config_of("--warm-start run") == new


def test_a_tuned_result_is_the_base_of_tune(tmp_path, monkeypatch):
    tuned = TrainConfig(
        model="dcn", cross_layers=2, rule="none", base_batch_size=K, dense_schedule="linear"
    )
    monkeypatch.setattr(Tuned, "open", lambda _: SimpleNamespace(train_config=lambda _: tuned))
    options = params("tune data --out t --batch-size 8K --base other --cross-layers 4")
    config, _ = tune_config(tmp_path, options, data_of(""))
    assert (config.network["model"], config.network["cross_layers"]) == ("dcn", 4)
    trained = config_of("--tuned t --batch-size 8K --rule sqrt --epochs 2")
    assert (trained.batch_size, trained.rule, trained.epochs) == (8 * K, "sqrt", 2)
    assert trained.hyperparameters == scale(tuned.hyperparameters, to=8 * K, rule="sqrt")
    base = tuned.hyperparameters.replace(decay=True)
    assert config.rules["sqrt"].hyperparameters == scale(base, to=8 * K, rule="sqrt")
    assert config.rules["sqrt"].dense_schedule


def test_options_that_are_left_out_are_those_of_the_study(tmp_path):
    begun = TuneConfig(4 * K, network={"model": "fm"}, epochs=3)
    record = {"format": FORMAT_VERSION, "config": dataclasses.asdict(begun)}
    (tmp_path / "tune.json").write_text(json.dumps(record))
    config, _ = tune_config(tmp_path, params("tune data --out t --epochs 5"), data_of(""))
    assert (config.batch_size, config.network["model"], config.epochs) == (4 * K, "fm", 5)


def test_options_of_prepare_change_the_specification():
    split = Split("time", column="hour")
    spec = DatasetSpec("toy", "y", ("user", "item"), freq_threshold=3, split=split)
    options = "--split sequential --valid a.csv --valid b.csv --test 0.2 --freq-threshold item=9"
    changed = _changed_spec(spec, params(f"prepare toy.toml log --out d {options}"))
    assert changed.freq_threshold == {"user": 3, "item": 9}
    assert changed.split == Split("sequential", test=0.2, valid=("a.csv", "b.csv"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("a bug"), 1),
        (UserError("bad input"), 2),
        (OSError(28, "No space left on device"), 2),
        (Stopped("the time is over", None), 3),
        (Stopped("saved", signal.SIGTERM), 143),
        (KeyboardInterrupt(), 130),
        (signal.SIGTERM, 143),
    ],
)
def test_exit_codes(error, code):
    def work():
        if isinstance(error, signal.Signals):
            os.kill(os.getpid(), error)
        raise error

    assert endings.run("merlin-cowclip x", work) == code
