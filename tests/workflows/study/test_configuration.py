"""Trainings and Optuna's parameters: round trips, the rules' predictions, the portfolio."""

import json
from pathlib import Path

import optuna
import pytest

from merlin_cowclip.plugins import SCALING_RULES, scale
from merlin_cowclip.plugins.scaling import recipe
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study import configuration
from merlin_cowclip.workflows.study.configuration import TuneConfig

CONFIG = TuneConfig(4096)


def test_parameters_and_trainings_round_trip():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    configs = [CONFIG.train_config(CONFIG.suggest(study.ask())) for _ in range(60)]
    for config in configs:
        assert (config.batch_size, config.rule, config.seed) == (4096, "none", 1234)
        assert CONFIG.train_config(CONFIG.params(config)) == config
    assert {config.l2 == 0 for config in configs} == {True, False}


@pytest.mark.parametrize("rule", SCALING_RULES)
def test_every_rule_is_tried(rule):
    config = TuneConfig(batch_size=131_072, base={}, epochs=7)
    predicted = scale(recipe(rule), to=131_072, rule=rule)
    (params,) = (params for params, origin in config.queue if rule in origin.split(", "))
    trained = config.train_config(params)
    assert trained.hyperparameters == predicted
    assert (trained.epochs, trained.update) == (7, "exact")
    rules = ", ".join(origin for _, origin in config.queue[:-7]).split(", ")
    assert sorted(rules) == sorted(SCALING_RULES)  # equal points once
    assert rules[0] == "sqrt_decay"


def test_a_base_may_have_zeros():
    config = TuneConfig(batch_size=4096, base={"batch_size": 4096, "l2": 0.0, "clip_floor": 0.0})
    rule = config.rules["cowclip"]
    assert config.train_config(config.params(rule)).hyperparameters == rule.hyperparameters


def test_ranges_grow_to_contain_the_base():
    base = {"batch_size": 4096, "dense_lr": 0.5, "l2": 1e-12, "warmup_epochs": 3.5}
    config = TuneConfig(batch_size=4096, base=base)
    far = config.rules["cowclip"]
    assert config.train_config(config.params(far)).hyperparameters == far.hyperparameters


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base": {"clip": "field", "clip_threshold": 1.0}}, "clip among none, adaptive_column"),
        ({"base": {"init_stddev": 0.0}}, "positive init_stddev"),
        ({"network": {"width": 3}}, "'width'"),
    ],
)
def test_a_bad_value_is_refused(values, message):
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


def test_weights_are_averaged_over_an_epoch():
    config = TuneConfig(batch_size=4096, rows=409_600)
    params = {**config.queue[0][0], "average": True}
    assert config.train_config(params).ema == pytest.approx(0.99)


def test_the_portfolio():
    """It is in the ranges, and λ times the rows is that of the data where it was setting."""
    more = {"precision": "mixed_bfloat16", "deterministic": False}
    config = TuneConfig(batch_size=4096, epochs=3, rows=500_000, **more)
    assert not config.rules
    assert [origin for _, origin in config.queue] == [f"portfolio {n}" for n in range(1, 8)]
    text = Path(configuration.__file__).with_name("portfolio.json").read_text(encoding="utf-8")
    for one, (params, _), setting in zip(
        json.loads(text), config.queue, config.portfolio, strict=True
    ):
        trial = config.train_config(params)
        assert trial.hyperparameters == setting.hyperparameters
        assert (trial.precision, trial.deterministic) == tuple(more.values())
        assert (setting.batch_size, setting.update) == (4096, one["update"])
        assert setting.epochs == min(one["epochs"], 3)
        l2 = one["hyperparameters"]["l2"]
        assert 5e5 * setting.hyperparameters.l2 == pytest.approx(one["rows"] * l2)


def test_a_batch_with_many_steps_scales_the_portfolio():
    """As from the batch size that has 133 steps, the most where a setting was setting."""
    large, small = (TuneConfig(batch_size, rows=1_064_000) for batch_size in (8000, 500))
    for one, other in zip(small.portfolio, large.portfolio, strict=True):
        assert one.hyperparameters == scale(other.hyperparameters, to=500, rule="sqrt")
    text = Path(configuration.__file__).with_name("portfolio.json").read_text(encoding="utf-8")
    for one, other in zip(large.portfolio, json.loads(text), strict=True):
        assert one.dense_lr == other["hyperparameters"]["dense_lr"]


def test_a_base_is_scaled_and_the_recipe_has_the_rest():
    config = TuneConfig(batch_size=2048, base={"batch_size": 512, "dense_lr": 2e-3})
    base = recipe("cowclip").replace(batch_size=512, dense_lr=2e-3)
    assert config.rules["cowclip"].hyperparameters == scale(base, to=2048, rule="cowclip")
