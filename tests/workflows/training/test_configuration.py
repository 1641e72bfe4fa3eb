"""TrainConfig: its defaults, JSON both ways, identity; the tables of networks and schedules."""

import dataclasses
import inspect
import json
import math
import subprocess
import sys

import numpy as np
import pytest

from merlin_cowclip.plugins.scaling import SCALING_RULES, Hyperparameters, recipe
from merlin_cowclip.workflows.commands.main import command_line
from merlin_cowclip.workflows.commands.training import train_config
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.learning_rates import (
    falls_to_zero_in,
    keras_schedule,
    plain_schedule,
)
from merlin_cowclip.workflows.training.networks import NETWORKS

BASE = Hyperparameters(256, dense_lr=5e-3, l2=1e-4)
STEPS = {"name": "steps", "at": [5, 8], "factors": [0.1, 0.01]}
CONFIGS = [
    {},
    {"rule": "linear", "batch_size": 8192},
    {"base": BASE, "batch_size": 512, "seed": 2**32 - 1, "deterministic": False},
    {"base": BASE.replace(clip=None), "update": "lazy", "mlp": [8]},
    {"model": "dcn", "cross_layers": 2, "clip_tables": ["C1", "linear"]},
    {"model": "dcn_v2", "low_rank_dim": 16, "dense_schedule": "cosine"},
    {"model": "dlrm", "bottom_mlp": (8, 4), "embedding_schedule": STEPS},
    {"model": "dlrm", "bottom_mlp": ()},
    {"model": "lr", "combiner": {"genres": "sum", "tags": "sqrtn"}},
]
GOLDEN = [
    "03955781ab9b1478",
    "a40d79d86284b7bf",
    "8c234c3a735fa524",
    "153855aaf03999b9",
    "bde2c36c85ded5da",
    "36b4b0197aa9cc38",
    "9cdf8ecce2e827a5",
    "8b4e692eb8ac1975",
    "c82d9c122c17ba43",
]


# The base


@pytest.mark.parametrize("rule", SCALING_RULES)
def test_the_base_is_by_default_the_rules_recipe(rule):
    config = TrainConfig(rule=rule)
    assert config.tuned == recipe(rule)
    assert config.hyperparameters == recipe(rule)  # at the base batch size
    assert TrainConfig(rule=rule, batch_size=4096).hyperparameters.clip == recipe(rule).clip


def test_another_rule_takes_its_own_recipe_along():
    plain = dataclasses.replace(TrainConfig(), rule="linear", batch_size=8192)
    assert (plain.hyperparameters.clip, plain.hyperparameters.warmup_epochs) == (None, 0.0)
    assert plain.hyperparameters.dense_lr == 8e-4  # 8 · 1e-4
    kept = dataclasses.replace(TrainConfig(base=BASE), rule="linear")
    assert kept.tuned is BASE


# The tables, against the builders


def test_networks_are_the_builders():
    from merlin_cowclip.models import MODELS

    assert list(NETWORKS) == list(MODELS)
    for name, builder in MODELS.items():
        wanted = {
            parameter.name: parameter.default
            for parameter in inspect.signature(builder).parameters.values()
            if parameter.name not in ("schema", "stddev", "sharded")  # `tables`
        }
        options = NETWORKS[name]
        assert {option: options[option].default for option in options} == wanted
        config = TrainConfig(model=name)
        assert config.network_options == {
            option: list(default) if isinstance(default, tuple) else default
            for option, default in wanted.items()
        }


# JSON


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_from_dict_is_the_way_back(options):
    config = TrainConfig(**options)
    text = json.dumps(config.to_dict())
    again = TrainConfig.from_dict(json.loads(text))
    assert again == config
    assert again.identity == config.identity
    assert hash(again) == hash(config)
    assert again.hyperparameters == config.hyperparameters
    assert json.dumps(again.to_dict()) == text
    assert TrainConfig.from_dict({**config.to_dict(), "epochs": 99}) != config


def test_from_dict_fills_in_what_is_left_out():
    config = TrainConfig.from_dict({"rule": "sqrt", "base": {"l2": 1e-3}})
    assert config == TrainConfig(rule="sqrt", base=recipe("sqrt").replace(l2=1e-3))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": "dcn"}, "keys model, .*Received: 'modle'. Correct it"),
        ({"base": {"dense_rl": 1}}, "base has the keys batch_size, .*Received: 'dense_rl'"),
        ({"base": {"dense_lr": "fast"}}, "dense_lr must be a positive number. .*'fast'"),
        ({"base": {"clip": "global"}}, "clip='global' needs clip_threshold"),
        ({"base": 3}, "base must be Hyperparameters, .*base=3"),
        ({"rule": None}, "rule must be one of .*rule=None"),
        ({"mlp": None}, "mlp must have a value. Received: None. Leave it out"),
        ([], r"must be values by name. Received: \[\]"),
    ],
    ids=str,
)
def test_from_dict_refuses(values, message):
    with pytest.raises(UserError, match=message):
        TrainConfig.from_dict(values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "ffm"}, "model must be one of lr, fm, .*, dlrm. Received: model='ffm'"),
        ({"model": ["deepfm"]}, r"model must be one of lr, .*\['deepfm'\]"),
        ({"rule": "cube"}, "rule must be one of none, .*cowclip. Received: rule='cube'"),
        ({"update": "eager"}, "update must be one of exact, lazy, deferred. Received: .*'eager'"),
        ({"embedding_dim": 0}, "embedding_dim must be a positive whole .* Received: .*dim=0"),
        ({"mlp": (8, 0)}, r"mlp must be at least one positive .* Received: mlp=\(8, 0\)"),
        ({"cross_layers": 2}, "cross_layers belongs to dcn, dcn_v2. .*model='deepfm'"),
        ({"model": "dcn", "cross_layers": 1.5}, "cross_layers must be .*cross_layers=1.5"),
        ({"model": "dcn", "low_rank_dim": 2}, "low_rank_dim belongs to dcn_v2. .*model='dcn'"),
        ({"model": "dcn_v2", "low_rank_dim": -1}, "low_rank_dim must be a positive"),
        ({"model": "dlrm", "bottom_mlp": (8, -1)}, "bottom_mlp must be at least one positive"),
        ({"combiner": {"genres": "max"}}, "combiner must be one of mean, sum, sqrtn, .*'genres'"),
        ({"clip_tables": "C1"}, "clip_tables must be a list of names .*'C1'"),
        ({"clip_tables": []}, "clip_tables must name something"),
        ({"clip_tables": ["C1", "C1"]}, "each only once"),
        ({"clip_tables": ["C1"], "rule": "linear"}, "clip_tables needs a clip rule"),
        ({"dense_schedule": "wave"}, "dense_schedule must be one of exponential, .*'wave'"),
        ({"dense_schedule": "exponential"}, "dense_schedule 'exponential' needs rate"),
        ({"dense_schedule": {"name": "cosine", "x": 1}}, "has the parameters to, epochs. .*'x'"),
        ({"embedding_schedule": {"name": "cosine", "to": -1}}, "embedding_schedule to must be"),
        ({"embedding_schedule": {**STEPS, "at": [8, 5]}}, "rising, positive epochs and a factor"),
        ({"embedding_schedule": {**STEPS, "at": 5}}, "at must be a list of numbers"),
        ({"seed": 2**32}, "seed must be a whole number from 0 to 4294967295. .*4294967296"),
        ({"epochs": 2.5}, "epochs must be a positive whole number. .*2.5"),
        ({"batch_size": 0}, "must be a positive whole number of samples. Received: .*0"),
        ({"deterministic": 1}, "deterministic must be true or false"),
        ({"base": {"l2": 1.0}}, "base must be Hyperparameters"),
    ],
    ids=str,
)
def test_options_are_refused_by_name(options, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(**options)


# The command line


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ("", TrainConfig()),
        (
            "--rule linear --l2 1e-3",
            TrainConfig(rule="linear", base=recipe("linear").replace(l2=1e-3)),
        ),
        ("--no-clip --no-warmup", TrainConfig(base=Hyperparameters(clip=None, warmup_epochs=0.0))),
        (
            "--model dcn_v2 --cross-layers 2 --low-rank-dim 4 --mlp 8,4 --combiner sum",
            TrainConfig(model="dcn_v2", cross_layers=2, low_rank_dim=4, mlp=(8, 4), combiner="sum"),
        ),
        (
            "--model dlrm --bottom-mlp 8 --combiner a=sum,b=mean --clip-tables a,b",
            TrainConfig(
                model="dlrm",
                bottom_mlp=(8,),
                combiner={"a": "sum", "b": "mean"},
                clip_tables=("a", "b"),
            ),
        ),
        (
            "--config c.json --dense-schedule constant --embedding-schedule constant",
            TrainConfig(model="lr", epochs=5, base=Hyperparameters(l2=1e-3)),
        ),
        (
            "--clip column --clip-threshold 2 --base-batch-size 256 --no-determinism --seed 3",
            TrainConfig(
                base=Hyperparameters(256, clip="column", clip_threshold=2.0),
                deterministic=False,
                seed=3,
            ),
        ),
        (
            "--config c.json --epochs 2 --dense-lr 0.5",
            TrainConfig(model="lr", epochs=2, base=Hyperparameters(l2=1e-3, dense_lr=0.5)),
        ),
    ],
    ids=str,
)
def test_the_command_lines_options(tmp_path, monkeypatch, arguments, config):
    monkeypatch.chdir(tmp_path)
    file = {"model": "lr", "epochs": 5, "base": {"l2": 1e-3}}
    if "constant" in arguments:
        file |= {"dense_schedule": "linear", "embedding_schedule": {"name": "cosine"}}
    (tmp_path / "c.json").write_text(json.dumps(file))
    parsed = command_line().parse_args(["train", "data", "--out", "run", *arguments.split()])
    assert train_config(parsed) == config


DCN = {"model": "dcn_v2", "cross_layers": 2, "low_rank_dim": 4}
FIELD = {"clip": "field", "clip_threshold": 2.0, "dense_lr": 0.5}


@pytest.mark.parametrize(
    ("before", "options", "message"),
    [
        (DCN, "--model deepfm --cross-layers 2", "cross_layers belongs to dcn, dcn_v2"),
        ({"cross_layers": 2}, "--seed 3", "cross_layers belongs to"),
        ({"base": FIELD}, "--clip-ratio 2", "--clip-ratio belongs to"),
        ({"base": FIELD}, "--clip column", "clip='column' needs clip_threshold"),  # of another unit
        ({}, "--no-clip --clip-tables user", "clip_tables needs a clip rule"),
    ],
    ids=str,
)
def test_an_option_without_meaning_is_refused(tmp_path, before, options, message):
    (tmp_path / "c.json").write_text(json.dumps(before))
    argv = ["train", "data", "--out", "run", "--config", str(tmp_path / "c.json")]
    with pytest.raises(UserError, match=message):
        train_config(command_line().parse_args([*argv, *options.split()]))


# Identity


def test_the_identity_is_golden():
    """Runs are found again by it: a version that changes one of these loses them."""
    assert [TrainConfig(**options).identity[:16] for options in CONFIGS] == GOLDEN


def test_the_identity_of_another_process_is_the_same():
    program = (
        "from merlin_cowclip.workflows.training.configuration import TrainConfig\n"
        "print(TrainConfig(model='lr', combiner={'tags': 'sqrtn', 'genres': 'sum'}).identity)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "17", "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.strip() == TrainConfig(**CONFIGS[-1]).identity


def test_what_differs_has_another_identity():
    identities = {TrainConfig(**options).identity for options in CONFIGS}
    fields = {
        **{"model": "dcn", "batch_size": 2048, "rule": "linear", "base": BASE, "epochs": 1},
        **{"seed": 0, "update": "lazy", "deterministic": False, "embedding_dim": 4, "mlp": (8,)},
        **{"combiner": "sum", "clip_tables": ("C1",), "dense_schedule": "linear"},
        **{"embedding_schedule": {"name": "exponential", "rate": 0.5}, "tables": "sharded"},
    }
    changed = {TrainConfig(**{name: value}).identity for name, value in fields.items()}
    assert len(changed | {TrainConfig().identity}) == len(fields) + 1
    assert len(identities) == len(CONFIGS)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"mlp": [400, 400, 400]}, {"mlp": (400, 400, 400)}),
        ({}, {"base": recipe("cowclip")}),
        ({"dense_schedule": "cosine"}, {"dense_schedule": {"name": "cosine", "to": 0}}),
        ({"clip_tables": ["a", "b"]}, {"clip_tables": ["b", "a"]}),
        # No part of the result: two rules that agree, layers that the network does not have.
        ({"rule": "sqrt"}, {"rule": "linear"}),
        ({"model": "fm", "mlp": (8,)}, {"model": "fm"}),
        ({"base": BASE.replace(clip=None)}, {"base": BASE.replace(clip=None, clip_ratio=2.0)}),
        ({"combiner": "sum"}, {"combiner": {"tags": "sum"}}),
    ],
    ids=str,
)
def test_what_means_the_same_has_one_identity(one, other):
    assert TrainConfig(**one).identity == TrainConfig(**other).identity


# Schedules


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ({"name": "exponential", "rate": 0.5}, lambda t: 0.5**t),
        ({"name": "exponential", "rate": 0.5, "epochs": 0.25}, lambda t: 0.5 ** (t / 0.25)),
        ({"name": "linear"}, lambda t: 1 - t / 10),
        ({"name": "linear", "to": 0.2, "epochs": 5}, lambda t: 1 - 0.8 * min(t / 5, 1)),
        ("cosine", lambda t: (1 + math.cos(math.pi * t / 10)) / 2),
        ({"name": "cosine", "to": 0.1}, lambda t: 0.1 + 0.9 * (1 + math.cos(math.pi * t / 10)) / 2),
        (STEPS, lambda t: 1 if t < 5 else 0.1 if t < 8 else 0.01),
        (
            {"name": "steps", "at": [0.25, 1.3], "factors": [0.1, 0.01]},
            lambda t: 1 if t < 0.25 else 0.1 if t < 1.3 else 0.01,
        ),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_schedules(schedule, factors):
    """A quarter of an epoch of seven updates is no whole number of them."""
    rate, steps = 3e-3, 7
    made = keras_schedule(
        plain_schedule("dense_schedule", schedule), rate, epochs=10, steps_per_epoch=steps
    )
    found = [float(made(step)) for step in range(10 * steps)]
    expected = [rate * factors(step / steps) for step in range(10 * steps)]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize(
    ("schedule", "end"),
    [
        ({"name": "linear", "epochs": 5}, 5.0),
        ({"name": "linear"}, None),
        ({"name": "cosine", "epochs": 5, "to": 0.1}, None),
        ({"name": "steps", "at": [2, 5, 8], "factors": [0.1, 0.0, 0.0]}, 5.0),
        ({"name": "steps", "at": [2, 8], "factors": [0.0, 0.1]}, None),
        ({"name": "exponential", "rate": 2.0**-42, "epochs": 2.0}, 6.0),
        ({"name": "exponential", "rate": 2.0}, None),
    ],
    ids=str,
)
def test_when_a_schedule_is_over(schedule, end):
    """As TensorFlow computes it: where float32 has no such small normal number, it is 0."""
    plain = plain_schedule("dense_schedule", schedule)
    assert falls_to_zero_in(plain) == end
    if end is not None:
        made = keras_schedule(plain, 1.0, epochs=200, steps_per_epoch=10)
        last = round(10 * end)
        assert made(last - 1)
        assert not made(last + 1)
