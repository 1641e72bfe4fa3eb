"""TrainConfig: its defaults, JSON both ways, identity; the tables of networks and schedules."""

import dataclasses
import inspect
import json
import math

import numpy as np
import pytest

from merlin_cowclip.plugins.scaling import SCALING_RULES, Hyperparameters, recipe
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.builder import schedule_of
from merlin_cowclip.workflows.training.configuration import NETWORKS, TrainConfig, base_fields

SCHEDULES = ("dense_schedule", "embedding_schedule")
BASE = {"base_batch_size": 256, "dense_lr": 5e-3, "l2": 1e-4}
CONFIGS = [
    {},
    {"rule": "linear", "batch_size": 8192},
    {**BASE, "batch_size": 512, "seed": 2**32 - 1, "deterministic": False},
    {**BASE, "clip": "none", "update": "lazy", "mlp": [8]},
    {"model": "dcn", "cross_layers": 2, "clip_tables": ["C1", "linear"]},
    {"model": "dcn_v2", "low_rank_dim": 16, "dense_schedule": "cosine"},
    {"model": "dlrm", "bottom_mlp": (8, 4), "embedding_schedule": "cosine"},
    {"model": "dlrm", "bottom_mlp": ()},
    {"model": "lr", "combiner": {"genres": "sum", "tags": "sqrtn"}},
]
GOLDEN = [
    "41201e6c40f6e49e",
    "a37c6793975c7c45",
    "526d6f10f0976698",
    "e574e260a2694b22",
    "7d03fc319f29854d",
    "b4a4741f67923e9b",
    "06d6ce6768ff8858",
    "53e78117844a9ae5",
    "701776fffef8481c",
]


# Resolved once


@pytest.mark.parametrize("rule", SCALING_RULES)
def test_omitted_hyperparameters_are_the_rules_recipe(rule):
    config = TrainConfig(rule=rule)
    assert config.base == config.hyperparameters == recipe(rule)  # at the base batch size
    assert TrainConfig(rule=rule, batch_size=4096).hyperparameters.clip == recipe(rule).clip


def test_values_stay_with_another_rule():
    config = dataclasses.replace(TrainConfig(), rule="linear", batch_size=8192)
    assert config.base == recipe("sqrt_decay")
    assert config.hyperparameters.dense_lr == 8 * 8e-4
    assert config.hyperparameters.decay


def test_the_default_rules_decay_is_a_schedule_and_can_be_switched_off():
    config, to_zero = TrainConfig(), {"name": "linear", "to": 0.0, "epochs": None}
    assert config.dense_schedule == config.embedding_schedule == to_zero
    assert TrainConfig(rule="sqrt", **dict.fromkeys(SCHEDULES, "linear")).base.decay
    constant = dict.fromkeys(SCHEDULES, "constant")
    kept = TrainConfig(batch_size=8192, **constant)
    assert not kept.hyperparameters.decay
    last = float(schedule_of(kept, "dense", 30)(299))
    assert last == pytest.approx(kept.hyperparameters.dense_lr)
    assert TrainConfig.from_dict(kept.to_dict()) == kept
    assert TrainConfig(rule="none", **constant) == TrainConfig(rule="none")
    with pytest.raises(UserError, match="deferred.* a rule and a schedule that keep it constant"):
        TrainConfig(update="deferred")
    assert TrainConfig(update="deferred", **constant).update == "deferred"


def test_hyperparameters_are_fields():
    values = Hyperparameters(256, clip="column", clip_threshold=2.0)
    assert TrainConfig(**base_fields(values), rule="none").base == values


def test_networks_are_the_builders():
    from merlin_cowclip.models import MODELS

    assert list(NETWORKS) == list(MODELS)
    for name, builder in MODELS.items():
        defaults = {
            parameter.name: parameter.default
            for parameter in inspect.signature(builder).parameters.values()
            if parameter.name in NETWORKS[name]
        }
        assert TrainConfig(model=name).network_options == NETWORKS[name] == defaults


# JSON


@pytest.mark.parametrize("options", CONFIGS, ids=str)
def test_from_dict_is_the_inverse_of_to_dict(options):
    config = TrainConfig(**options)
    text = json.dumps(config.to_dict())
    again = TrainConfig.from_dict(json.loads(text))
    assert (again, again.identity) == (config, config.identity)
    assert json.dumps(again.to_dict()) == text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": "dcn"}, "keys model, .*Received: 'modle'. Correct it"),
        ({"rule": None}, "rule must have a value. Received: None. Leave it out"),
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
        ({"dense_lr": "fast"}, "dense_lr must be a positive number. .*'fast'"),
        ({"clip": "global"}, "clip='global' needs clip_threshold"),
        ({"model": "fm", "mlp": (8,)}, "mlp belongs to wide_and_deep, .* with model='fm'"),
        ({"embedding_dim": 0}, "embedding_dim must be a positive whole .* Received: .*dim=0"),
        ({"mlp": (8, 0)}, r"mlp must be at least one positive .* Received: mlp=\(8, 0\)"),
        ({"model": "dlrm", "bottom_mlp": (8, -1)}, "bottom_mlp must be at least one positive"),
        ({"combiner": {"genres": "max"}}, "combiner must be one of mean, sum, sqrtn, .*'genres'"),
        ({"clip_tables": "C1"}, "clip_tables must be a list of names .*'C1'"),
        ({"clip_tables": ["C1", "C1"]}, "each once"),
        ({"clip_tables": ["C1"], "rule": "linear"}, "clip_tables needs a clip rule"),
        ({"dense_schedule": "wave"}, "dense_schedule must be one of exponential, .*'wave'"),
        ({"dense_schedule": "exponential"}, "'exponential' has the parameters rate, epochs"),
        ({"dense_schedule": {"name": "cosine", "x": 1}}, "has the parameters to, epochs. .*'x'"),
        ({"embedding_schedule": {"name": "cosine", "to": -1}}, "embedding_schedule to must be"),
        ({"seed": 2**32}, "seed must be a whole number from 0 to 4294967295. .*4294967296"),
        ({"batch_size": 0}, "batch_size must be a positive whole number. .*batch_size=0"),
        ({"deterministic": 1}, "deterministic must be true or false"),
    ],
    ids=str,
)
def test_options_are_refused_by_name(options, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(**options)


# Identity


def test_the_identity_is_golden():
    """Runs are found again by it: a version that changes one of these loses them."""
    configs = [TrainConfig(**{"rule": "cowclip", **options}) for options in CONFIGS]
    assert [config.identity[:16] for config in configs] == GOLDEN


def test_what_differs_has_another_identity():
    fields = {
        **{"model": "dcn", "batch_size": 2048, "rule": "linear", "l2": 1e-4, "epochs": 1},
        **{"seed": 0, "update": "lazy", "deterministic": False, "embedding_dim": 4, "mlp": (8,)},
        **{"combiner": "sum", "clip_tables": ("C1",), "dense_schedule": "constant"},
        **{"embedding_schedule": {"name": "exponential", "rate": 0.5}, "tables": "sharded"},
        **{"precision": "mixed_float16", "patience": 2, "micro_batch": 8, "ema": 0.9},
    }
    changed = {TrainConfig(**{name: value}).identity for name, value in fields.items()}
    assert len(changed | {TrainConfig().identity}) == len(fields) + 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"mlp": [400, 400, 400]}, {"mlp": (400, 400, 400)}),
        ({}, base_fields(recipe("sqrt_decay"))),
        ({"dense_schedule": "cosine"}, {"dense_schedule": {"name": "cosine", "to": 0}}),
        ({"clip_tables": ["a", "b"]}, {"clip_tables": ["b", "a"]}),
        ({"rule": "sqrt_decay"}, {"rule": "none", **base_fields(recipe("sqrt_decay"))}),
        # No part of the result: two rules that agree, the ratio of a clip that is none.
        ({"rule": "sqrt"}, {"rule": "linear"}),
        ({"clip": "none"}, {"clip": "none", "clip_ratio": 2.0}),
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
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_schedules(schedule, factors):
    """A quarter of an epoch of seven updates is no whole number of them."""
    rate, steps = 3e-3, 7
    config = TrainConfig(rule="none", dense_lr=rate, dense_schedule=schedule, epochs=10)
    rates = list(map(schedule_of(config, "dense", steps), range(10 * steps)))
    expected = [rate * factors(step / steps) for step in range(10 * steps)]
    np.testing.assert_allclose(rates, expected, rtol=1e-4, atol=1e-9)
