"""The search, with trials that cost nothing, and a few trials that train."""

import contextlib
import dataclasses
import json
import re
import shutil
import time

import optuna
import pytest

from merlin_cowclip.plugins import SCALING_RULES
from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows import train
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import NotFiniteError, Stopped, UserError
from merlin_cowclip.workflows.study import tune as tuning
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.search_space import Point
from merlin_cowclip.workflows.study.tune import Trainers, tune
from merlin_cowclip.workflows.study.tuned import Tuned, difference
from merlin_cowclip.workflows.training.configuration import CheckpointConfig
from merlin_cowclip.workflows.training.runs import Run
from merlin_cowclip.workflows.training.stopping import Stopping

from .conftest import NETWORK, auc_of


def tuned_by(data, config, out, trials=14, **options) -> Tuned:
    options = {"progress": False, "command": "the command", **options}
    return tune(data, config, out, trials=trials, **options)


@pytest.fixture(scope="module")
def shared(data, tmp_path_factory):
    """A tune of 30 trials on a known landscape."""
    from . import conftest

    with pytest.MonkeyPatch.context() as patch:
        fake = conftest.Fake()
        patch.setattr(tuning.Trainers, "epochs", lambda _, *a: fake.epochs(*a))
        config = TuneConfig(batch_size=256, network=NETWORK, base={}, epochs=4)
        return tuned_by(data, config, tmp_path_factory.mktemp("tune") / "tune", trials=30)


def test_every_rule_is_tried_first_and_to_its_end(shared, config):
    trials = shared.result["trials"]
    rules = [rule for t in trials[: config.min_trials] for rule in t["rules"]]
    assert rules == list(SCALING_RULES)
    assert not any(trial["rules"] for trial in trials[config.min_trials :])
    for trial in trials[: config.min_trials]:
        assert len(trial["epochs"]) == 4
        assert trial["best_epoch"] == 3
        expected = config.rules[trial["rules"][0]].hyperparameters.to_dict()
        assert trial["hyperparameters"] == expected


def test_it_finds_better_than_the_rules(shared):
    aucs = [trial["auc"] for trial in shared.result["trials"]]
    rules = [t["auc"] for t in shared.result["trials"] if t["rules"]]
    assert len(aucs) == 30
    assert max(aucs) > max(rules)
    assert {t["why"] for t in shared.result["trials"]} == {"pruned", None}


def test_the_result_is_the_best_trial(shared, data):
    best = max(shared.result["trials"], key=lambda trial: trial["auc"])
    config = shared.train_config()
    assert shared.result["winner"] == best["number"]
    assert config.hyperparameters.to_dict() == best["hyperparameters"]
    assert (config.rule, config.batch_size, config.epochs) == ("none", 256, 3)
    assert config.update == best["update"]
    result = json.loads((shared.path / "result.json").read_text())
    assert result == shared.result
    assert result["rows"] == data.rows == {"train": 1215, "valid": 135, "test": 450}
    assert {"optuna", "tensorflow", "python"} <= result["versions"].keys()
    assert result["command"] == "the command"


def test_the_best_and_the_best_rule_are_repeated_from_other_seeds(shared, config):
    table = shared.result["table"]
    assert table[0]["what"] == "best found"
    assert sorted(rule for row in table[1:] for rule in row["rules"]) == sorted(SCALING_RULES)
    three = sorted(shared.result["trials"], key=lambda trial: -trial["auc"])[:3]
    finalists = [one for one in three if one["auc"] >= table[0]["mean"] - 0.002]
    best_rule = max((t for t in shared.result["trials"] if t["rules"]), key=lambda t: t["auc"])
    (best,) = (t for t in shared.result["trials"] if t["number"] == table[0]["number"])
    point = Point.from_dict(best)
    repeated = {t["number"] for t in (*finalists, best_rule)}
    assert {row["number"] for row in table if row["seeds"]} == repeated
    for row in table:
        if row["seeds"]:
            assert row["seeds"] == [1235, 1236, 1237]
            assert len(row["aucs"]) == 3
            assert row["deviation"] == pytest.approx(1e-5)
    trained = config.train_config(point)
    again = [auc_of(dataclasses.replace(trained, seed=s), 3) for s in (1235, 1236, 1237)]
    assert table[0]["aucs"] == pytest.approx(again)
    worse = next(row for row in table if row["number"] == best_rule["number"])
    assert difference(worse, table[0]) == pytest.approx(
        (worse["mean"] - table[0]["mean"], 0), abs=1e-12
    )


def test_a_lucky_trial_does_not_win(data, config, tmp_path, fake, monkeypatch):
    """The one with the best mean of the three best trials wins, not a lucky one."""
    lucky = config.rules["none"].hyperparameters.to_dict()
    stock = fake.epochs

    def by_chance(train, stopping, advance):
        luck = train.seed == config.seed and train.hyperparameters.to_dict() == lucky
        for epoch in stock(train, stopping, advance):
            yield {**epoch, "auc": 0.999 if luck else epoch["auc"]}

    monkeypatch.setattr(fake, "epochs", by_chance)
    tuned = tuned_by(data, config, tmp_path / "tune", trials=12)
    best, other, *rules = tuned.result["table"]
    trials = sorted(tuned.result["trials"], key=lambda trial: -trial["auc"])
    assert trials[0]["rules"] == ["none"]
    assert [best["number"], other["number"]] == [trial["number"] for trial in trials[1:3]]
    assert (best["what"], other["what"]) == ("best found", f"trial {other['number']}")
    assert best["mean"] > max(rule["mean"] or 0 for rule in rules)
    assert len(best["aucs"]) == 3
    assert other["auc"] < best["mean"] - 0.002  # so it cannot win
    assert other["aucs"] == []


def test_the_test_part_is_not_read(data, config, tmp_path, fake):
    source = PreparedData.open(shutil.copytree(data.path, tmp_path / "source"))
    shutil.rmtree(source.path / "test")
    tuned = tuned_by(source, config, tmp_path / "tune", trials=7, seeds=1)
    assert tuned.result["trials"]


def test_a_tune_in_two_parts_is_one_tune(data, config, tmp_path, fake, shared):
    first = tuned_by(data, config, tmp_path / "tune", trials=12)
    trained = len(fake.configs)
    tuned = tuned_by(data, config, tmp_path / "tune", trials=30)
    assert tuned.result["trials"] == shared.result["trials"]
    assert tuned.result["table"] == shared.result["table"]
    assert trained == 12 + 3 * len({row["number"] for row in first.result["table"] if row["seeds"]})
    assert len(fake.configs) - trained <= 18 + 3 * tuning.FINALISTS


def test_interrupted_and_resumed(data, config, tmp_path, fake, shared, monkeypatch, capsys):
    out = tmp_path / "tune"
    stock, calls = fake.epochs, []

    def interrupted(train, stopping, advance=lambda: None):
        calls.append(train)
        if len(calls) == 9:
            stopping._received(15, None)
        yield from stock(train, stopping, advance)

    monkeypatch.setattr(fake, "epochs", interrupted)
    with pytest.raises(Stopped, match="8 trials that have ended are kept. Resume with: ") as error:
        tuned_by(data, config, out, trials=12)
    assert error.value.number == 15
    assert str(error.value).endswith("Resume with: the command")
    assert not (out / "result.json").exists()
    with pytest.raises(UserError, match="did not end. Resume it: merlin-cowclip tune DATA --out"):
        Tuned.open(out)
    tuned = tune(data, config, out, trials=12)
    warning, _, header, *rest = capsys.readouterr().out.splitlines()
    lines, again, repeats = rest[:4], rest[4], rest[5:]
    assert warning.startswith("Warning: at batch size 256 an epoch has only 5 steps.")
    assert header.split()[:5] == ["trial", "ended", "AUC", "best", "epoch"]
    assert header.endswith("rates  origin, or why it ended")
    assert [line.split()[1] for line in lines] == ["9/12", "10/12", "11/12", "12/12"]
    assert [int(line.split()[0]) for line in lines] == [
        t["number"] for t in tuned.result["trials"][8:]
    ]
    assert again.startswith("Repeating ")
    assert all(re.match(r"trial \d+ again, seed 123\d: AUC 0\.\d{5}$", line) for line in repeats)
    assert len(repeats) == sum(len(row["seeds"]) for row in tuned.result["table"])
    trials = tuned.result["trials"]
    assert len(trials) == 12
    assert trials[:8] == shared.result["trials"][:8]
    tried = [trial["hyperparameters"] for trial in trials]
    assert shared.result["trials"][8]["hyperparameters"] in tried  # after what waited


def test_repeats_are_resumed_and_shared(data, config, tmp_path, fake, monkeypatch):
    """Each is trained once; one that another process is at is waited for."""
    out, stock, repeated = tmp_path / "tune", fake.epochs, []

    def interrupted(train, stopping, advance):
        if train.seed != config.seed:
            repeated.append((train.seed, str(train.hyperparameters)))
            if len(repeated) == 3:
                stopping._received(15, None)
        yield from stock(train, stopping, advance)

    monkeypatch.setattr(fake, "epochs", interrupted)
    with pytest.raises(Stopped, match="8 trials that have ended are kept"):
        tuned_by(data, config, out, trials=8)
    kept = optuna_attrs(out)
    assert len(kept) == 2
    is_mine = [False, *[True] * 99]

    @contextlib.contextmanager
    def alone_with(path, *, wait):
        assert path.name not in kept
        yield is_mine.pop(0)

    monkeypatch.setattr(tuning, "alone_with", alone_with)
    tuned = tuned_by(data, config, out, trials=8)
    assert repeated.pop(2) in repeated
    assert len(repeated) == len(set(repeated))
    assert len(repeated) == 3 * sum(bool(row["seeds"]) for row in tuned.result["table"])
    assert kept.items() <= optuna_attrs(out).items()


def optuna_attrs(out) -> dict:
    return optuna.load_study(study_name="tune", storage=tuning._storage(out)).user_attrs


@pytest.fixture
def diverge(monkeypatch, fake):
    """Has trials diverge whose configuration meets a condition."""
    stock = fake.epochs

    def diverge_where(condition):
        def epochs(train, *rest):
            if condition(train):
                raise NotFiniteError("loss must stay finite. Received: loss nan")
            yield from stock(train, *rest)

        monkeypatch.setattr(fake, "epochs", epochs)

    return diverge_where


def test_a_trial_that_diverges_ends_alone(data, config, tmp_path, diverge):
    diverge(lambda train: train.hyperparameters.clip is None)
    tuned = tuned_by(data, config, tmp_path / "tune", trials=10, seeds=2)
    diverged = [t for t in tuned.result["trials"] if not t["epochs"]]
    assert len(diverged) >= 5
    assert all("loss nan" in t["why"] for t in diverged)
    assert tuned.train_config().hyperparameters.clip == "adaptive_column"
    assert "diverged" in tuned.tables()
    diverge(lambda train: True)
    with pytest.raises(UserError, match="all of them diverged.*loss nan"):
        tuned_by(data, config, tmp_path / "all", trials=7)


def test_a_trial_that_diverges_from_another_seed_is_not_the_best(data, config, tmp_path, diverge):
    first = tuned_by(data, config, tmp_path / "first", trials=8, seeds=2).result
    best = first["table"][0]
    values, seed = best["hyperparameters"], best["seeds"][0]
    diverge(lambda train: (train.hyperparameters.to_dict(), train.seed) == (values, seed))
    tuned = tuned_by(data, config, tmp_path / "tune", trials=8, seeds=2)
    assert tuned.result["winner"] != first["winner"]
    (row,) = (row for row in tuned.result["table"][1:] if row["number"] == first["winner"])
    assert (row["mean"], row["aucs"].count(None), len(row["aucs"])) == (None, 1, 2)
    assert "diverged, 1 of 2" in tuned.tables()


def test_a_trial_that_gets_no_better_ends(data, tmp_path, fake):
    config = TuneConfig(batch_size=256, network=NETWORK, base={}, epochs=9)
    tuned = tuned_by(data, config, tmp_path / "tune", trials=7, seeds=1)
    for trial in tuned.result["trials"]:
        assert (trial["best_epoch"], len(trial["epochs"])) == (3, 4)
        assert trial["why"] == "no better than before"


class Clock:
    """Time that passes by the seconds that epochs say they take."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch, fake) -> Clock:
    clock = Clock()
    stock = fake.epochs

    def slow(*arguments):
        for epoch in stock(*arguments):
            clock.now += 60
            yield {**epoch, "seconds": 60.0}

    monkeypatch.setattr(fake, "epochs", slow)
    monkeypatch.setattr(tuning, "time", clock)
    return clock


def test_a_budget_leaves_room_for_the_repeats(data, config, tmp_path, clock, capsys):
    begun = clock.now
    tuned = tuned_by(data, config, tmp_path / "tune", trials=40, budget=60.0, progress=True)
    assert (clock.now - begun) / 60 == pytest.approx(60, rel=0.1)
    ended = len(tuned.result["trials"])
    assert ended < 14
    out = capsys.readouterr().out
    assert f"The budget ends the search after {ended} trials." in out
    repeated = {row["what"]: len(row["aucs"]) for row in tuned.result["table"]}
    assert repeated["best found"] == 3
    best_rule = next(row for row in tuned.result["table"][1:] if row["rules"])
    assert len(best_rule["aucs"]) == 3
    begun = clock.now
    few = tuned_by(data, config, tmp_path / "few", trials=40, budget=20.0)
    assert (clock.now - begun) / 60 == pytest.approx(20, rel=0.1)
    assert len(few.result["table"][0]["seeds"]) == 3
    assert few.result["not_tried"]
    assert "Not tried, as the trials or the time were over: " in few.tables()


def test_a_budget_that_is_none(data, config, tmp_path):
    with pytest.raises(UserError, match="budget must be positive minutes"):
        tuned_by(data, config, tmp_path / "tune", trials=7, budget=0.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 128}, "batch_size=256. Received: batch_size=128"),
        (
            {"network": {**NETWORK, "mlp": (4, 4)}},
            r"network mlp=\[\S+\]. Received: network mlp=\[4, 4\]",
        ),
    ],
)
def test_another_tune_is_refused(data, shared, config, change, words):
    other = dataclasses.replace(config, **change)
    with pytest.raises(UserError, match=f"with its own data and options, {words}"):
        tuned_by(data, other, shared.path)


def test_a_trial_whose_process_died_is_tried_again(data, config, tmp_path, fake, monkeypatch):
    out = tmp_path / "tune"
    monkeypatch.setattr(tuning, "_GRACE", 1)
    monkeypatch.setattr(tuning, "_HEARTBEAT", 1)
    tuned_by(data, config, out, trials=7, seeds=1)
    study = optuna.load_study(study_name="tune", storage=tuning._storage(out))
    trial = study.ask()  # in progress, and nobody is at it
    dataclasses.replace(config, rows=data.rows["train"]).space.suggest(trial)
    study._storage.record_heartbeat(trial._trial_id)
    time.sleep(1.5)
    tuned = tuned_by(data, config, out, trials=10, seeds=1)
    assert len(tuned.result["trials"]) == 10
    again = tuned.result["trials"][-1]  # after what waited
    assert again["number"] > trial.number
    assert again["hyperparameters"]["dense_lr"] == trial.params["dense_lr"]


def test_without_a_base_the_portfolio_is_tried_first(data, tmp_path, fake):
    config = TuneConfig(batch_size=256, network=NETWORK, epochs=4, rows=data.rows["train"])
    tuned = tuned_by(data, config, tmp_path / "tune", trials=10, seeds=2)
    trials = tuned.result["trials"]
    points = [Point.from_dict(trial) for trial in trials]
    assert points[:3] == config.portfolio[:3]
    assert [len(t["epochs"]) for t in trials[:3]] == [p.max_epochs for p in config.portfolio[:3]]
    for number in range(3, 9):
        best = max(trials[:number], key=lambda trial: trial["auc"])
        new = [p for p in config.after(Point.from_dict(best)) if p not in points[:number]]
        assert points[number] == new[0]
    assert trials[3]["step"] == "l2 × 4"
    assert not any(t["rules"] for t in trials)
    assert tuned.result["not_tried"] == []
    spent = sum(len(t["epochs"]) for t in trials)
    spent += sum(len(row["seeds"]) * row["best_epoch"] for row in tuned.result["table"])
    assert f"as long as {spent} epochs of 1.0 s." in tuned.tables()


# Trials that train


@pytest.mark.usefixtures("eager")
@pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
class TestTrials:
    def test_a_trial_is_what_train_does(self, data, tmp_path):
        """On the same rows: AUC, log loss, calibration and training loss to the last digit."""
        config = TuneConfig(batch_size=256, network=NETWORK, base={}, epochs=2, update="lazy")
        trained = config.train_config(dataclasses.replace(config.rules["cowclip"], rates="falling"))
        epochs = list(Trainers(data).epochs(trained, Stopping()))
        tf.config.run_functions_eagerly(True)
        checkpointing = CheckpointConfig(saved_model=False)
        run = train(data, trained, tmp_path / "run", checkpointing=checkpointing, progress=False)
        names = ("auc", "log_loss", "calibration")
        for ours, theirs in zip(epochs, run.result["epochs"], strict=True):
            assert [ours[name] for name in names] == [theirs[f"valid_{name}"] for name in names]
            assert ours["train_loss"] == theirs["train_loss"]

    def test_a_diverging_trial_reports_why(self, data):
        config = TuneConfig(batch_size=256, network=NETWORK, base={"dense_lr": 1e25})
        with pytest.raises(NotFiniteError, match="must"):
            list(Trainers(data).epochs(config.train_config(config.rules["none"]), Stopping()))

    def test_a_trial_stops_after_the_current_update(self, data):
        config = TuneConfig(batch_size=256, network=NETWORK, base={})
        stopping, updates = Stopping(), []

        def advance():
            updates.append(1)
            if len(updates) == 2:
                stopping._received(2, None)

        with pytest.raises(KeyboardInterrupt):
            list(
                Trainers(data).epochs(config.train_config(config.rules["none"]), stopping, advance)
            )
        assert len(updates) == 2

    def test_train_takes_the_result_and_options_override_it(self, data, shared, tmp_path):
        found = shared.train_config().hyperparameters
        argv = ["train", data.path, "--tuned", shared.path, "--no-saved-model", "--quiet", "--out"]
        argv = [*map(str, argv)]
        assert main([*argv, str(tmp_path / "run")]) == 0
        run = Run.open(tmp_path / "run")
        assert run.train_config() == shared.train_config()
        assert run.config["identity"] == shared.train_config().identity
        assert len(run.result["epochs"]) == 3
        options = ["--epochs", "1", "--seed", "5", "--rule", "sqrt", "--batch-size", "1024"]
        assert main([*argv, str(tmp_path / "other"), *options]) == 0
        config = Run.open(tmp_path / "other").train_config()
        assert (config.epochs, config.seed, config.batch_size) == (1, 5, 1024)
        assert config.base == found
        assert config.hyperparameters.dense_lr == pytest.approx(2 * found.dense_lr)
