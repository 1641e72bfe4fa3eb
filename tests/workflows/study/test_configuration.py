"""Trainings and Optuna's parameters: round trips, the rules' predictions, the portfolio."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merlin_cowclip.plugins import SCALING_RULES, Hyperparameters, scale
from merlin_cowclip.plugins.scaling import recipe
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study import configuration
from merlin_cowclip.workflows.study.configuration import TuneConfig

CONFIG = TuneConfig(4096)


class Drawn:
    """Substitute of an Optuna trial that draws from a list of numbers in [0, 1]."""

    def __init__(self, shares):
        self.shares = itertools.cycle(shares)

    def suggest_float(self, name, low, high, *, log):
        share = next(self.shares)
        value = low * (high / low) ** share if log else low + (high - low) * share
        return min(max(value, low), high)

    def suggest_int(self, name, low, high, *, log):
        return min(low + int(next(self.shares) * (high - low + 1)), high)

    def suggest_categorical(self, name, choices):
        return choices[min(int(next(self.shares) * len(choices)), len(choices) - 1)]


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=11, max_size=11))
def test_parameters_and_trainings_round_trip(shares):
    config = CONFIG.train_config(CONFIG.suggest(Drawn(shares)))
    assert (config.batch_size, config.rule, config.seed) == (4096, "none", 1234)
    assert CONFIG.train_config(CONFIG.params(config)) == config


@pytest.mark.parametrize("rule", SCALING_RULES)
@pytest.mark.parametrize("batch_size", [1024, 131_072])
def test_every_rule_is_tried(rule, batch_size):
    config = TuneConfig(batch_size=batch_size, base={}, epochs=7)
    predicted = scale(recipe(rule), to=batch_size, rule=rule)
    (params,) = (params for params, origin in config.queue if rule in origin.split(", "))
    trained = config.train_config(params)
    assert trained.hyperparameters == predicted
    assert (trained.epochs, trained.update) == (7, "exact")
    rules = ", ".join(origin for _, origin in config.queue[:-7]).split(", ")
    assert sorted(rules) == sorted(SCALING_RULES)  # equal points once
    assert rules[0] == "sqrt_decay"


def test_zero_is_searched():
    base = Hyperparameters(batch_size=4096, l2=0.0, clip_floor=0.0)
    config = TuneConfig(batch_size=4096, base=base)
    rule = config.rules["cowclip"]
    assert config.train_config(config.params(rule)).hyperparameters == rule.hyperparameters
    least = CONFIG.train_config(CONFIG.suggest(Drawn([0.999, *[0.0] * 10])))  # a clip, the least
    assert (least.l2, least.clip_floor) == (0, 0)
    assert least.clip_ratio > 0


def test_ranges_grow_and_without_a_clip_there_are_none_of_its_parameters():
    base = {"batch_size": 4096, "dense_lr": 0.5, "l2": 1e-12, "warmup_epochs": 3.5}
    config = TuneConfig(batch_size=4096, base=base)
    far = config.rules["cowclip"]
    assert config.train_config(config.params(far)).hyperparameters == far.hyperparameters
    assert "clip_ratio" in config.params(far)
    assert "clip_ratio" not in config.params(config.rules["sqrt"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base": {"clip": "field", "clip_threshold": 1.0}}, "clip among none, adaptive_column"),
        ({"base": {"init_stddev": 0.0}}, "positive init_stddev"),
        ({"base": {"learning_rate": 1.0}}, "base has the keys"),
        ({"network": {"width": 3}}, "network has the keys"),
    ],
)
def test_what_is_refused(values, message):
    with pytest.raises(UserError, match=message):
        TuneConfig(batch_size=4096, **values)


def test_a_schedule_is_the_same_if_training_stops_before():
    params = {**CONFIG.queue[0][0], "epochs": 7, "decay": True}
    schedule = {"name": "linear", "to": 0.0, "epochs": 7.0}
    whole, some = CONFIG.train_config(params), CONFIG.train_config(params, 3)
    assert (whole.epochs, whole.dense_schedule) == (7, {**schedule, "epochs": None})
    assert (some.epochs, some.dense_schedule, some.embedding_schedule) == (3, schedule, schedule)
    constant = CONFIG.train_config({**params, "decay": False}, 3)
    assert (constant.epochs, constant.dense_schedule) == (3, None)


def test_the_portfolio():
    """It is in the ranges, and λ times the rows is that of the data where it was found."""
    more = {"precision": "mixed_bfloat16", "deterministic": False}
    config = TuneConfig(batch_size=4096, epochs=3, rows=500_000, **more)
    assert not config.rules
    assert [origin for _, origin in config.queue] == [f"portfolio {n}" for n in range(1, 8)]
    text = Path(configuration.__file__).with_name("portfolio.json").read_text(encoding="utf-8")
    for one, (params, _), found in zip(
        json.loads(text), config.queue, config.portfolio, strict=True
    ):
        trial = config.train_config(params)
        assert trial.hyperparameters == found.hyperparameters
        assert (trial.precision, trial.deterministic) == tuple(more.values())
        assert (found.batch_size, found.update) == (4096, one["update"])
        assert found.epochs == min(one["epochs"], 3)
        l2 = one["hyperparameters"]["l2"]
        assert 5e5 * found.hyperparameters.l2 == pytest.approx(one["rows"] * l2)


def test_a_batch_with_many_steps_scales_the_portfolio():
    """As from the batch size that has 133 steps, the most where a setting was found."""
    large, small = (TuneConfig(batch_size, rows=1_064_000) for batch_size in (8000, 500))
    for mine, its in zip(small.portfolio, large.portfolio, strict=True):
        assert mine.hyperparameters == scale(its.hyperparameters, to=500, rule="sqrt")
    text = Path(configuration.__file__).with_name("portfolio.json").read_text(encoding="utf-8")
    for mine, one in zip(large.portfolio, json.loads(text), strict=True):
        assert mine.dense_lr == one["hyperparameters"]["dense_lr"]


def test_a_base_is_scaled_by_every_rule():
    base = Hyperparameters(batch_size=1024, dense_lr=2e-3, l2=3e-7, clip=None, init_stddev=0.03)
    config = TuneConfig(batch_size=4096, base=base, epochs=6)
    for rule, found in config.rules.items():
        assert found.hyperparameters == scale(base, to=4096, rule=rule)
        assert (found.update, found.epochs) == ("exact", 6)
    again = TuneConfig(**dataclasses.asdict(config))
    assert dataclasses.asdict(again) == dataclasses.asdict(config)
    config = TuneConfig(batch_size=2048, base={"batch_size": 512, "dense_lr": 2e-3})
    tuned = recipe("cowclip").replace(batch_size=512, dense_lr=2e-3)
    assert config.rules["cowclip"].hyperparameters == scale(tuned, to=2048, rule="cowclip")
