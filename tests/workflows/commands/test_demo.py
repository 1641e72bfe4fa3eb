"""The demo: its table and its page show the results of the runs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import re

import pandas as pd
import pytest

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.workflows import Loader, PreparedData
from merlin_cowclip.workflows.commands import demo as module
from merlin_cowclip.workflows.commands.demo import RUNS, demo
from merlin_cowclip.workflows.data.prepare import pipeline as etl
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.training import train as training
from merlin_cowclip.workflows.training.configuration import few_steps
from tests.workflows.study.test_report import as_text

pytestmark = pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")
SMALL = tuple(run._replace(batch_size=min(run.batch_size, 512)) for run in RUNS)
FEW = {"categorical": ("C1", "C2", "C3"), "continuous": ("I1",)}


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """The folder of a small demo, and what it printed."""
    train, prepare = training.train, etl.prepare

    def eagerly(*given, **options):
        tf.config.run_functions_eagerly(True)  # which a run resets
        return train(*given, **options)

    out, printed = tmp_path_factory.mktemp("demo") / "out", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        changes = {"RUNS": SMALL, "EPOCHS": 2, "CARDINALITY": 50, "NETWORK": {"model": "fm"}}
        for name, value in changes.items():
            patch.setattr(module, name, value)
        patch.setattr(
            etl,
            "prepare",
            lambda spec, *given, **options: prepare(
                dataclasses.replace(spec, **FEW), *given, **options
            ),
        )
        patch.setattr(training, "train", eagerly)
        demo(out, rows=1100)
    tf.config.run_functions_eagerly(False)
    return out, printed.getvalue()


@pytest.fixture(scope="module")
def results(shown):
    return {r.name: json.loads((shown[0] / r.name / "result.json").read_text()) for r in SMALL}


def test_the_table_shows_the_results(shown, results):
    out, printed = shown
    lines = {line.split()[0]: line.split() for line in printed.splitlines() if "  " in line}
    for run in SMALL:
        steps = math.ceil(results[run.name]["config"]["rows"]["train"] / run.batch_size)
        auc = results[run.name]["auc"]
        change = [f"{auc - results['base']['auc']:+.4f}"] * (run.name != "base")
        assert lines[run.name][1:3] == [f"{run.batch_size:,}", str(steps)]
        assert lines[run.name][4:] == [f"{auc:.4f}", *change]
    assert printed.splitlines()[-1] == f"Their page: {out / 'demo.html'}"


def test_the_runs(shown, results):
    """The rules scale the base; the portfolio's setting has its own values, λ by the rows."""
    configs = {name: result["config"] for name, result in results.items()}
    rows = configs["base"]["rows"]["train"]
    for name, config in configs.items():
        assert (config["epochs"], config["patience"], config["seed"]) == (2, 2, module.SEED)
        if name != "portfolio":
            rule = "none" if name == "base" else name
            assert (config["rule"], config["base_batch_size"]) == (rule, 64)
            assert {key: config[key] for key in module.TUNED} == module.TUNED
    tuning = TuneConfig(batch_size=512, network={"model": "fm"}, rows=rows)
    assert configs["portfolio"]["l2"] == tuning.portfolio[0].l2
    assert configs["portfolio"]["clip_ratio"] == tuning.portfolio[0].clip_ratio


def test_the_last_rows_are_the_test_part(shown):
    raw = pd.read_csv(shown[0] / "train.txt.gz", sep="\t", header=None)
    loader = Loader(PreparedData.open(shown[0] / "data"), "test", batch_size=512)
    assert sum(y.numpy().sum() for _, y in loader.dataset()) == raw[0][990:].sum()


def test_the_page_shows_the_results(shown, results):
    page = (shown[0] / "demo.html").read_text()
    assert page.count("<svg") == 4
    text = as_text(page)
    for name, result in results.items():
        assert (result["clip"] in text) == (result["config"]["clip"] != "none")
        assert re.search(rf"\| {name} \| .*\| {result['auc']:.4f} \|", text)


def test_no_conclusion_from_few_steps(shown, results):
    rows, size = results["base"]["config"]["rows"]["train"], SMALL[-1].batch_size
    few = f"No conclusion: at batch size {size} an epoch has only {math.ceil(rows / size)} steps."
    for text in (shown[1], (shown[0] / "demo.html").read_text()):
        assert few in text
        assert "is kept by" not in text


def test_the_conclusion():
    """A rule keeps the base's AUC if it loses at most 0.002."""
    aucs = {"base": 0.77, "linear": 0.761, "cowclip": 0.75, "sqrt_decay": 0.7681}
    conclusion = module._conclusion({**aucs, "portfolio": 0.772}, 243_000)
    assert (
        "This AUC is kept by the default rule sqrt_decay (-0.0019) and the first portfolio setting "
        "(+0.0020). It is lost by linear scaling (-0.0090) and the paper's rule cowclip (-0.0200)."
    ) in conclusion
    assert "3,797 steps per epoch" in conclusion


def test_the_default_rows_allow_a_conclusion():
    """A tenth is the test part, and a tenth of the rest the validation part."""
    assert not few_steps(module.ROWS * 81 // 100, module.LARGE)


def test_an_error_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(etl, "prepare", fail)
    with pytest.raises(KeyboardInterrupt):
        demo(tmp_path / "demo", rows=1_100)
    assert not list(tmp_path.iterdir())
