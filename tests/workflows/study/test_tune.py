"""The search, with scripted trials that cost nothing, and a few trials that train."""

import dataclasses
import json
import random
import statistics

import pytest

from merlin_cowclip.plugins import SCALING_RULES
from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows import train
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.errors import Stopped, UserError
from merlin_cowclip.workflows.study import tune as tuning
from merlin_cowclip.workflows.study.configuration import RANGES, TuneConfig
from merlin_cowclip.workflows.study.tune import trial_epochs, tune
from merlin_cowclip.workflows.study.tuned import Tuned
from merlin_cowclip.workflows.training.stopping import Stopping

from .conftest import NETWORK

SEEDS = (1235, 1236, 1237)


def tuned_by(data, config, out, trials=7, **options) -> Tuned:
    options = {"progress": False, "command": "the command", **options}
    return tune(data, config, out, trials=trials, **options)


@pytest.fixture
def plain() -> TuneConfig:
    """Without a base: the portfolio is trials 1 to 7."""
    return TuneConfig(batch_size=256, network=NETWORK, epochs=8)


# What is tried


def test_rules_then_the_portfolio_then_tpe(data, config, tmp_path, fake):
    """Of 40 trials TPE proposes most, and varies all that is searched."""
    tuned = tuned_by(data, config, tmp_path / "tune", trials=40, seeds=1)
    trials = tuned.result["trials"]
    assert [trial["number"] for trial in trials] == [*range(1, 41)]
    origins = [trial["origin"] for trial in trials]
    steps = [origin for origin in origins if "×" in origin or origin == "averaged weights"]
    queue = [origin for origin in origins if origin != "TPE" and origin not in steps]
    assert origins == [*queue, *steps, *["TPE"] * (40 - len(queue) - len(steps))]
    assert len(steps) <= tuning.STEPS
    assert queue[-7:] == [f"portfolio {number}" for number in range(1, 8)]
    rules = ", ".join(queue[:-7]).split(", ")
    assert rules[0] == "sqrt_decay"
    assert sorted(rules) == sorted(SCALING_RULES)
    proposed = [trial["params"] for trial in trials if trial["origin"] == "TPE"]
    assert len(proposed) >= 14
    for name in ("clip", "update", "decay", "average", "epochs", *RANGES):
        assert len({params.get(name) for params in proposed}) > 1
    aucs = {origin: max(t["auc"] for t in trials if t["origin"] == origin) for origin in origins}
    assert max(aucs[one] for one in (*steps, "TPE")) == max(aucs.values())


def test_steps_from_the_best_trial(data, plain, tmp_path, fake):
    fake.curve = lambda config: [0.7 - config.l2]
    trials = tuned_by(data, plain, tmp_path / "tune", trials=10, seeds=1).result["trials"]
    best = min(trials[:7], key=lambda trial: trial["params"]["l2"])["params"]
    steps = [(trial["origin"], trial["params"]) for trial in trials[7:]]
    assert steps == [
        ("averaged weights", {**best, "decay": False, "average": True}),
        ("l2 × 2", {**best, "l2": 2 * best["l2"]}),
        ("l2 × 0.5", {**best, "l2": best["l2"] / 2}),
    ]


def test_schedules_of_different_lengths(data, plain, tmp_path, fake, monkeypatch):
    """The longest begins lowest and ends best: no trial is judged before its schedule ends."""
    curves = {
        1: [0.7452],
        2: [0.7408, 0.7533],
        4: [0.7337, 0.7440, 0.7560, 0.7611],
        8: [0.7308, 0.7350, 0.7410, 0.7480, 0.7550, 0.7610, 0.7652, 0.7649],
    }
    params, _ = plain.queue[0]
    queue = [
        ({**params, "epochs": epochs, "l2": 1e-5 * k}, f"{epochs} epochs")
        for epochs in curves
        for k in (1, 2, 3)
    ]
    monkeypatch.setattr(TuneConfig, "queue", queue)
    fake.curve = lambda config: curves[round(config.dense_schedule["epochs"] or config.epochs)]
    tuned = tuned_by(data, plain, tmp_path / "tune", trials=12)
    for trial in tuned.result["trials"]:
        assert trial["curve"] == curves[trial["params"]["epochs"]]
    assert tuned.result["table"][0]["origin"] == "8 epochs"
    config = tuned.train_config()  # the rates are as they were in the trial
    assert (config.epochs, config.dense_schedule["epochs"]) == (7, 8)
    assert {c.epochs for c in fake.configs if c.seed in SEEDS} >= {7}


def test_a_trial_that_overfits_ends(data, plain, tmp_path, fake):
    fake.curve = lambda config: [0.70, 0.698, 0.71, 0.704, 0.72][: config.epochs]
    for trial in tuned_by(data, plain, tmp_path / "tune", seeds=1).result["trials"]:
        assert len(trial["curve"]) == min(trial["params"]["epochs"], 4)
        assert trial["best_epoch"] == min(trial["params"]["epochs"], 3) - (
            trial["params"]["epochs"] == 2
        )


# Which one is the result


def test_a_trial_that_diverges_from_another_seed_does_not_win(data, plain, tmp_path, fake):
    """The next best are repeated until one is stable."""
    best = {1: 0.80, 2: 0.79, 3: 0.78, 4: 0.77, 5: 0.76}
    diverge = {number: [0.8, None, 0.8] for number in (1, 2, 3, 4)}
    fake.script(best, {**diverge, 5: [0.75] * 3})
    tuned = tuned_by(data, plain, tmp_path / "tune")
    assert tuned.result["winner"] == 5
    lines = tuned.tables().splitlines()[2:7]
    assert [line.split()[0] for line in lines] == ["5", "1", "2", "3", "4"]
    assert all("diverged, 1 of 2" in line for line in lines[1:])


def test_no_stable_trial(data, plain, tmp_path, fake):
    fake.script({}, {number: [0.8, 0.8, None] for number in range(1, 8)})
    with pytest.raises(UserError, match="no stable trial: 0 of 7 diverged. Repeats of 7 diverged"):
        tuned_by(data, plain, tmp_path / "tune")
    assert not (tmp_path / "tune/tuned.json").exists()
    fake.script({8: 0.6}, {})
    assert tuned_by(data, plain, tmp_path / "tune", trials=8).result["winner"] == 8


@pytest.mark.parametrize("case", range(3))
def test_the_table_is_in_order(data, plain, tmp_path, fake, case):
    """Of random trials: the best mean is first, and no other one could have won."""
    draw = random.Random(case)
    noise = draw.choice([1e-4, 1e-3, 1e-2])
    level = {number: draw.gauss(0.75, 0.002) for number in range(1, 13)}
    fake.script(
        {number: draw.gauss(auc, noise) for number, auc in level.items()},
        {
            number: [
                draw.gauss(auc, noise) if draw.random() < 0.8 + 0.2 * (number == 1) else None
                for _ in SEEDS
            ]
            for number, auc in level.items()
        },
    )
    for trials in (6, 12):
        result = tuned_by(data, plain, tmp_path / "tune", trials=trials).result
        table = result["table"]
        means = [row["mean"] for row in table]
        stable = [mean for mean in means if mean is not None]
        assert means == [*sorted(stable, reverse=True), *[None] * (len(means) - len(stable))]
        assert result["winner"] == table[0]["number"]
        assert list(table[0]["repeats"]) == [str(seed) for seed in SEEDS]
        assert table[0]["mean"] == statistics.fmean(fake.repeats[result["winner"]])
        for trial in result["trials"]:
            if not trial["repeats"]:
                assert trial["auc"] < table[0]["mean"]


def test_the_result(data, plain, tmp_path, fake, capsys):
    tuned = tune(data, plain, tmp_path / "tune", trials=9, command="the command")
    best = tuned.result["table"][0]
    assert tuned.train_config() == plain.train_config(best["params"], best["best_epoch"])
    assert tuned.result["rows"] == data.rows == {"train": 1215, "valid": 135, "test": 450}
    assert tuned.result["command"] == "the command"
    warning, *lines = capsys.readouterr().out.splitlines()
    assert warning.startswith("Warning: at batch size 256 an epoch has only 5 steps.")
    assert lines[0].startswith("[1/9] trial 1, portfolio 1: AUC 0.")
    repeats = [line for line in lines if ", seed 123" in line]
    assert len(lines) - len(repeats) == 9
    assert len(repeats) == sum(len(row["repeats"]) for row in tuned.result["table"])


def test_json(data, tmp_path, fake, capsys):
    out = tmp_path / "tune"
    command = ["tune", data.path, "--out", out, "--batch-size", 256, "--trials", 7, "--json"]
    assert main([*map(str, command)]) == 0
    result = json.loads((out / "result.json").read_text())
    assert json.loads(capsys.readouterr().out) == {"folder": str(out), **result}


# Budgets


class Clock:
    """Time that passes by a minute an epoch."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch, fake) -> Clock:
    clock = Clock()
    monkeypatch.setattr(fake, "advance", lambda: clock.sleep(60))
    monkeypatch.setattr(tuning, "time", clock)
    return clock


@pytest.mark.parametrize(("budget", "least"), [(25.0, 0.6), (90.0, 0.9)])
def test_a_budget_leaves_time_for_the_repeats(data, config, tmp_path, clock, capsys, budget, least):
    begun = clock.now
    tuned = tuned_by(data, config, tmp_path / "tune", trials=60, budget=budget, progress=True)
    assert least <= (clock.now - begun) / 60 / budget <= 1.05
    ended = len(tuned.result["trials"])
    assert f"The budget ends the search after {ended} trials." in capsys.readouterr().out
    assert len(tuned.result["table"][0]["repeats"]) == 3


def test_a_budget_is_kept_while_repeats_diverge(data, config, tmp_path, fake, clock):
    fake.curve = lambda config: [0.7, 0.71, 0.72 if config.seed == 1234 else None]
    begun = clock.now
    with pytest.raises(UserError, match="no stable trial"):
        tuned_by(data, config, tmp_path / "tune", trials=400, budget=60.0)
    assert (clock.now - begun) / 60 <= 60


# Resuming


def test_a_study_in_two_parts_is_one(data, plain, tmp_path, fake):
    whole = tuned_by(data, plain, tmp_path / "whole", trials=12)
    fake.configs.clear()
    tuned_by(data, plain, tmp_path / "tune", trials=9)
    tuned = tuned_by(data, plain, tmp_path / "tune", trials=12)
    assert [t["params"] for t in tuned.result["trials"]] == [
        t["params"] for t in whole.result["trials"]
    ]
    assert tuned.result["winner"] == whole.result["winner"]
    assert len(fake.configs) == 12 + sum(len(row["repeats"]) for row in tuned.result["table"])


@pytest.mark.parametrize("number", [5, 9])  # a trial, and a repeat
def test_interrupted_and_resumed(data, plain, tmp_path, fake, number):
    out, curve = tmp_path / "tune", fake.curve

    def interrupted(config):
        if len(fake.configs) == number:
            fake.stopping._received(15, None)
        return curve(config)

    fake.curve = interrupted
    words = f"{min(number - 1, 7)} trials that have ended are kept. Resume with: the command"
    with pytest.raises(Stopped, match=words) as error:
        tuned_by(data, plain, out)
    assert error.value.number == 15
    with pytest.raises(UserError, match="did not end. Resume it: merlin-cowclip tune DATA --out"):
        Tuned.open(out)
    result = tuned_by(data, plain, out).result
    assert len(result["trials"]) == 7
    interrupted_one = fake.configs.pop(number - 1)
    assert interrupted_one in fake.configs
    assert len(fake.configs) == 7 + sum(len(row["repeats"]) for row in result["table"])


def test_another_study_is_refused(data, plain, tmp_path, fake):
    tuned_by(data, plain, tmp_path / "tune", trials=1, seeds=1)
    other = dataclasses.replace(plain, batch_size=128)
    with pytest.raises(UserError, match="begun with batch_size=256, .* has batch_size=128"):
        tuned_by(data, other, tmp_path / "tune")


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
def test_a_training_ends_where_the_trial_did(data, plain, tmp_path):
    """An epoch before the schedule's last, with the same rates."""
    params = {**plain.queue[0][0], "epochs": 3}
    trial = list(trial_epochs(data, plain.train_config(params), Stopping()))
    tf.config.run_functions_eagerly(True)
    run = train(data, plain.train_config(params, 2), tmp_path / "run", progress=False)
    assert [row["valid_auc"] for row in run.result["epochs"]] == pytest.approx(
        [row["auc"] for row in trial[:2]]
    )
