"""Points and Optuna parameters: round trips, and every rule's prediction among them."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from merlin_cowclip.plugins import SCALING_RULES, Hyperparameters, scale
from merlin_cowclip.plugins.scaling import recipe
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study import configuration
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.search_space import Point, SearchSpace
from merlin_cowclip.workflows.training.learning_rates import over_all_epochs

SPACE = SearchSpace(4096)


class Drawn:
    """Substitute of an Optuna trial that draws from a list of numbers in [0, 1]."""

    def __init__(self, shares):
        self.shares = itertools.cycle(shares)
        self.params = {}

    def suggest_float(self, name, low, high, *, log):
        share = next(self.shares)
        value = low * (high / low) ** share if log else low + (high - low) * share
        self.params[name] = min(max(value, low), high)
        return self.params[name]

    def suggest_int(self, name, low, high, *, log):
        self.params[name] = min(low + int(next(self.shares) * (high - low + 1)), high)
        return self.params[name]

    def suggest_categorical(self, name, choices):
        self.params[name] = choices[min(int(next(self.shares) * len(choices)), len(choices) - 1)]
        return self.params[name]


@given(st.lists(st.floats(0, 1), min_size=11, max_size=11))
def test_points_and_parameters_round_trip(shares):
    point = SPACE.suggest(Drawn(shares))
    assert point.hyperparameters.batch_size == 4096
    assert SPACE.point(SPACE.params(point)) == point


@pytest.mark.parametrize("rule", SCALING_RULES)
@pytest.mark.parametrize("batch_size", [1024, 131_072])
def test_every_rule_is_in_the_space(rule, batch_size):
    config = TuneConfig(batch_size=batch_size, base={})
    predicted = scale(recipe(rule), to=batch_size, rule=rule)
    point = config.rules[rule]
    assert rule in config.queue[point]["rules"]
    assert point == Point(predicted)
    space = config.space
    assert space.point(space.params(point)) == point
    rules = [rule for one in config.queue.values() for rule in one.get("rules", ())]
    assert sorted(rules) == sorted(SCALING_RULES)  # equal points once
    assert rules[0] == "sqrt_decay"


def test_zero_is_searched():
    space = SearchSpace(4096, [Point(Hyperparameters(batch_size=4096, l2=0.0, clip_floor=0.0))])
    hp = Hyperparameters(batch_size=4096, l2=0.0, clip_floor=0.0)
    assert space.point(space.params(Point(hp))).hyperparameters == hp
    least = SPACE.suggest(Drawn([0.999, *[0.0] * 9])).hyperparameters  # a clip, then the least
    assert (least.l2, least.clip_floor) == (0, 0)
    assert least.clip_ratio > 0


def test_ranges_grow_and_a_clip_that_is_off_has_no_values():
    far = Point(Hyperparameters(batch_size=4096, dense_lr=0.5, l2=1e-12, warmup_epochs=3.5))
    space = SearchSpace(4096, [far])
    assert space.point(space.params(far)) == far
    one, other = (Point(Hyperparameters(clip=None, clip_ratio=r)) for r in (1.0, 2.0))
    assert one == other
    assert "clip_ratio" not in SearchSpace(1024).params(one)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip": "field", "clip_threshold": 1.0}, "clip must be one of none, adaptive_column"),
        ({"init_stddev": 0.0}, "init_stddev must be positive"),
    ],
)
def test_what_cannot_be_searched(changes, message):
    hp = Hyperparameters(**{"batch_size": 4096, **changes})
    with pytest.raises(ValueError, match=message):
        SearchSpace(4096, [Point(hp)])


def test_updates_and_rates_of_the_starting_points():
    with pytest.raises(UserError, match="one of exact, lazy to be searched. Received: .*deferred"):
        TuneConfig(batch_size=4096, update="deferred", base={}, try_rules=["none"])
    with pytest.raises(UserError, match="rates must be one of constant, falling"):
        TuneConfig(rates="rising", base={})
    config = TuneConfig(batch_size=4096, rates="falling", base={})
    assert {point.rates for point in config.rules.values()} == {"falling"}
    *rules, a, b, c = config.queue
    assert rules == list(dict.fromkeys(config.rules.values()))
    assert [a, b, c] == config.portfolio[:3]
    assert dataclasses.asdict(TuneConfig(**dataclasses.asdict(config))) == dataclasses.asdict(
        config
    )


def test_epochs_beyond_the_end_of_a_schedule_are_refused():
    """The learning rate would be 0 there."""
    config = TuneConfig(batch_size=4096, epochs=7, base={})
    found = config.train_config(Point(config.rules["sqrt"].hyperparameters, "exact", "falling", 7))
    assert dataclasses.replace(found, epochs=5).epochs == 5
    with pytest.raises(UserError, match="fall to 0 in 7 epochs, and 8 epochs"):
        dataclasses.replace(found, epochs=8)
    assert over_all_epochs(found.dense_schedule) == {"name": "linear", "to": 0.0, "epochs": None}


def test_falling_rates_fall_over_all_epochs():
    """As in the trial, also if fewer epochs were best."""
    config = TuneConfig(batch_size=4096, epochs=7, base={})
    falling = next(iter(config.queue))
    assert config.queue[falling] == {"rules": ["sqrt_decay"]}
    found = scale(recipe("sqrt_decay"), to=4096, rule="sqrt_decay").replace(decay=False)
    assert falling == Point(found, "exact", "falling", 7)
    schedule = {"name": "linear", "to": 0.0, "epochs": 7.0}
    whole = config.train_config(falling)
    for train in (whole, dataclasses.replace(whole, epochs=3)):
        assert train.dense_schedule == train.embedding_schedule == schedule
    assert config.train_config(config.rules["sqrt"]).dense_schedule is None
    assert Point.from_dict(falling.to_dict()) == falling
    fewer = dataclasses.replace(falling, max_epochs=2)
    assert config.train_config(fewer).epochs == 2
    assert config.train_config(fewer).dense_schedule == {**schedule, "epochs": 2.0}


def test_without_a_base_the_portfolio_comes_first():
    config = TuneConfig(batch_size=4096, epochs=3)
    assert not config.rules
    assert list(config.queue) == config.portfolio[:3]
    assert [one["portfolio"] for one in config.queue.values()] == [1, 2, 3]
    assert 6 <= len(config.portfolio) <= 8
    for point in config.portfolio:
        assert point.hyperparameters.batch_size == 4096
        assert point.max_epochs <= 3
        assert config.space.point(config.space.params(point)) == point
        config.train_config(point)


def test_l2_times_the_rows_is_that_of_the_portfolio():
    text = Path(configuration.__file__).with_name("portfolio.json").read_text(encoding="utf-8")
    config = TuneConfig(batch_size=4096, rows=1_000_000)
    for one, point in zip(json.loads(text), config.portfolio, strict=True):
        l2 = one["hyperparameters"]["l2"]
        assert 1e6 * point.hyperparameters.l2 == pytest.approx(one["rows"] * l2)


def test_steps_from_the_best_follow_then_the_rest_of_the_portfolio():
    config = TuneConfig(batch_size=4096, epochs=3)
    hp = Hyperparameters(batch_size=4096, dense_lr=2e-2, embedding_lr=1e-2, l2=1e-4, clip=None)
    after = config.after(Point(hp, "lazy", "falling", 2))
    changed = [l2 := hp.replace(l2=4e-4), hp.replace(l2=2.5e-5)]
    changed += [hp.replace(embedding_lr=2e-2), hp.replace(embedding_lr=5e-3)]
    changed.append(hp.replace(dense_lr=1e-2))  # twice as much is not searched
    steps = [Point(one, "lazy", "falling", 2) for one in changed]
    assert list(after) == [*steps, *config.portfolio]
    assert after[steps[0]] == {"step": "l2 × 4"}
    assert steps[0] not in config.after(Point(hp.replace(l2=0.0)))
    back = list(config.after(Point(l2, "lazy", "falling", 2)))
    assert back[1] == Point(hp, "lazy", "falling", 2)  # to the last bit, so that it is known


def test_values_at_the_edge_are_named():
    hp = Hyperparameters(batch_size=4096, dense_lr=1e-3, embedding_lr=0.099, l2=0.0, clip=None)
    assert SPACE.at_the_edge(Point(hp.replace(init_stddev=1e-2))) == {"embedding_lr": 0.099}
    other = hp.replace(embedding_lr=1e-2, l2=1.1e-8, dense_lr=1.1e-4, warmup_epochs=2.0)
    assert list(SPACE.at_the_edge(Point(other))) == ["dense_lr", "warmup_epochs"]  # λ may be 0


def test_the_base_is_scaled_by_every_rule():
    base = Hyperparameters(batch_size=1024, dense_lr=2e-3, l2=3e-7, clip=None, init_stddev=0.03)
    config = TuneConfig(batch_size=4096, base=base, update="lazy")
    for rule, point in config.rules.items():
        assert point == Point(scale(base, to=4096, rule=rule), "lazy")
    assert config.rules["sqrt"].max_epochs == config.epochs
    assert dataclasses.asdict(TuneConfig(**dataclasses.asdict(config))) == dataclasses.asdict(
        config
    )
    config = TuneConfig(batch_size=2048, base={"batch_size": 512, "dense_lr": 2e-3})
    tuned = recipe("cowclip").replace(batch_size=512, dense_lr=2e-3)
    assert config.rules["cowclip"] == Point(scale(tuned, to=2048, rule="cowclip"))
    with pytest.raises(UserError, match="base has the keys"):
        TuneConfig(base={"learning_rate": 1.0})


def test_a_trial_trains_what_its_point_says():
    network = {"model": "dcn", "cross_layers": 2}
    config = TuneConfig(batch_size=4096, network=network, epochs=7, base={})
    point = config.rules["sqrt"]
    train = config.train_config(point)
    assert (train.rule, train.epochs, train.seed, train.update) == ("none", 7, 1234, "exact")
    assert train.hyperparameters == point.hyperparameters
    assert train.network_options["cross_layers"] == 2
