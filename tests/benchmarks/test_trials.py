"""A search goes on in another folder with what was tried in the first."""

from __future__ import annotations

import json

import pytest

from merlin_cowclip.workflows import TuneConfig, UserError, tune
from merlin_cowclip.workflows.study import tune as tuning
from merlin_cowclip.workflows.study.trials import Epoch
from merlin_cowclip.workflows.study.tune_folder import begin
from tests.bad_input.conftest import TOY, toy_log

from .test_why_it_works import module, prepare


def test_another_folder_goes_on(tmp_path, monkeypatch):
    trained = []

    def epochs_of(rows, config, stopping, advance=lambda: None):
        trained.append(config)
        for _ in range(2):
            yield Epoch(0.5 + config.hyperparameters.dense_lr, 0.5, 1.0, 0.5, 1.0)

    monkeypatch.setattr(tuning, "epochs_of", epochs_of)
    monkeypatch.setattr("merlin_cowclip.workflows.study.repeats.epochs_of", epochs_of)
    data = prepare(TOY, [toy_log(tmp_path / "log.csv")], tmp_path / "data", progress=False)
    config = TuneConfig(64, epochs=2)
    tune(data, config, tmp_path / "a", trials=9, seeds=1, progress=False)
    trials = module("trials")

    def published(tune):
        return json.loads(json.dumps(trials.trials_of(tune)))

    given = published(tmp_path / "a")
    assert len(given["trials"]) == 9

    begin(data, config, tmp_path / "b", progress=False)
    assert trials.add(tmp_path / "b", given) == 9
    assert trials.add(tmp_path / "b", given) == 0
    assert published(tmp_path / "b") == given
    trained.clear()
    found = tune(data, config, tmp_path / "b", trials=11, seeds=1, progress=False)
    assert [config.seed for config in trained].count(config.seed) == 2
    assert len(found.result["trials"]) == 11
    assert published(tmp_path / "b")["trials"][:9] == given["trials"]

    begin(data, TuneConfig(32, epochs=2), tmp_path / "c", progress=False)
    with pytest.raises(UserError, match=r"same data and options. Received: config .*tune there"):
        trials.add(tmp_path / "c", given)
