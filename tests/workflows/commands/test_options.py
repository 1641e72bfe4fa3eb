"""Options of commands: those that fields of a configuration become, and help."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from merlin_cowclip.plugins.presets import preset
from merlin_cowclip.plugins.scaling import recipe, scale
from merlin_cowclip.workflows.commands.main import cli, help_of
from merlin_cowclip.workflows.commands.studying import tune_config
from merlin_cowclip.workflows.commands.training import train_config
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.configuration import (
    CheckpointConfig,
    TrainConfig,
    base_fields,
)
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
    said = " ".join(help_of("train").split())
    option = said[said.index(f"--{name} ") :]
    assert of["help"].split(":")[0] in option
    default = of["shown"] or field.default
    if of["kind"] == "flag":
        default = f"--{'no-' * (not field.default)}{name}"
    if default is not None:
        assert f"{default})" in option


def test_a_batch_size_may_be_in_thousands():
    assert params("tune data --out t --batch-size 8K --base-batch-size 1k")["batch_size"] == 8 * K
    sizes = params("batch-size data --tuned t --out s --batch-sizes 1K,2048")["batch_sizes"]
    assert sizes == [K, 2 * K]
    assert params("evaluate run --batch-size 2K")["batch_size"] == 2 * K
    assert params("frequencies data --batch-sizes 1K,128K")["batch_sizes"] == [K, 128 * K]


@pytest.mark.parametrize("name", cli.commands)
def test_help(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep").mkdir()  # of the example of report
    said = help_of(name)
    assert said.startswith(f"Usage: merlin-cowclip {name} ")
    assert "[required]" not in said
    assert "Sentinel" not in said
    example = said.splitlines()[-1].split()
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--model deepfm --cross-layers 2", "cross_layers belongs to dcn, dcn_v2"),
        ("--model lr --mlp 8", "mlp belongs to wide_and_deep"),
        ("--clip none --clip-tables user", "clip_tables needs a clip rule"),
    ],
)
def test_an_option_without_meaning_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        config_of(options)


@pytest.mark.parametrize("size", [K, 2 * K, 16 * K, 128 * K])
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


def test_values_of_a_base_stay_at_the_base():
    config = config_of("--batch-size 8K --l2 1e-6 --rule cowclip --preset avazu")
    assert config.base == preset("avazu", K).replace(l2=1e-6)
    config = config_of("--batch-size 256K --rule cowclip --preset avazu")
    assert config.base == preset("avazu", 128 * K)
    assert base_fields(config.base)["base_batch_size"] == 128 * K


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
    config, source = of({"mlp": [8], "batch_size": 8 * K}, avazu)
    assert config.hyperparameters == preset("avazu", 8 * K)
    assert source == f"{paper} 8,192; mlp, batch_size of c.json"
    config, source = of({"rule": "linear"})
    assert config.base == recipe("linear")
    assert source == "hyperparameters of the rule; rule of c.json"
    whole = TrainConfig(l2=1e-3)
    assert of(whole.to_dict()) == (whole, "hyperparameters of c.json")
    source = "hyperparameters of c.json; l2 as given"
    assert of(whole.to_dict(), "--l2 1e-5") == (TrainConfig(), source)
    with pytest.raises(UserError, match="batch_size must be .* Received: .*'8K'"):
        of({"batch_size": "8K"})


def test_a_warm_start_trains_slower_and_lazily(monkeypatch):
    """From the values scaled to the run's batch size, here by 2; later ones keep their rates."""
    scaled = {"batch_size": 4 * K, "base_batch_size": K, "rule": "sqrt", "l2": 1e-6}
    rates = {"dense_lr": 1e-3, "embedding_lr": 5e-3, "dense_schedule": "linear", "warmup_epochs": 1}
    record = {**TrainConfig(**scaled, **rates, epochs=3).to_dict(), "warm_start": None}
    monkeypatch.setattr(Run, "open", lambda path: Run(path, {"config": record}))
    new = config_of("--warm-start run")
    found = (new.dense_lr, new.embedding_lr, new.l2, new.warmup_epochs, new.dense_schedule)
    assert found == pytest.approx((4e-4, 2e-3, 2e-6, 0, None))
    assert (new.batch_size, new.base_batch_size, new.rule) == (4 * K, 4 * K, "none")
    assert (new.epochs, new.update) == (1, "lazy")
    kept = config_of("--warm-start run --keep-optimizer")  # whose state has a warm-up, too
    assert (kept.update, kept.warmup_epochs) == ("exact", 1)
    given = config_of("--warm-start run --dense-lr 3e-3 --epochs 2 --update exact")
    assert (given.dense_lr, given.epochs, given.update) == (3e-3, 2, "exact")
    source = train_config(params("train data --out r --warm-start run"), data_of(""))[1]
    assert source.startswith(
        "hyperparameters of run, with learning rates 0.0004 and 0.002, constant and low"
    )
    with pytest.raises(UserError, match="are for batch size 4096. Received: --batch-size 1024"):
        config_of("--warm-start run --batch-size 1K")
    smaller = config_of("--warm-start run --batch-size 1K --rule sqrt").hyperparameters
    assert (smaller.dense_lr, smaller.l2) == pytest.approx((2e-4, 1e-6))
    record.update(new.to_dict(), warm_start=["run", False])
    assert config_of("--warm-start run") == new


def test_each_rules_own_values_are_the_base_of_tune(tmp_path):
    options = params("tune data --out t --batch-size 8K --l2 1e-6")
    config, source = tune_config(tmp_path, options, data_of("criteo"))
    base = recipe("cowclip").replace(l2=1e-6)
    assert config.rules["cowclip"].hyperparameters == scale(base, to=8 * K, rule="cowclip")
    assert source == "each rule's hyperparameters at batch size 1,024; l2 as given"
