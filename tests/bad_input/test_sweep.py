"""What `sweep` and `report` refuse, before anything is trained."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest

from merlin_cowclip.plugins.scaling import recipe
from merlin_cowclip.workflows.commands.main import command_line
from merlin_cowclip.workflows.commands.studying import _setting
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.errors import Notice, UserError
from merlin_cowclip.workflows.study.studies import STUDIES
from merlin_cowclip.workflows.study.sweep import _check
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.reproducibility import in_precision
from merlin_cowclip.workflows.training.runs import columns_of, identity_of
from tests.bad_input.contract import refused

OPTIONS = [
    ("--batch-sizes 0", ["batch_size must be a positive", "0"]),
    ("--batch-sizes 32,32", ["batch_sizes must name something", "[32, 32]"]),
    ("--batch-sizes x", ["--batch-sizes", "'x'"]),
    ("--batch-sizes 32,141", ["must not exceed the training rows", "141, 140 rows"]),
    ("--batch-sizes 32 --seeds 1,1", ["seeds must name something, and each only once"]),
    ("--batch-sizes 32 --seeds=-1", ["seed must be a whole number from 0", "-1"]),
    ("--batch-sizes 32 --epochs 0", ["epochs must be a positive whole number"]),
    ("--batch-sizes 32 --update eager", ["update must be one of exact, lazy, deferred"]),
    ("--batch-sizes 32 --l2 -1", ["l2 must be a number that is not negative"]),
    ("--batch-sizes 32 --model lr --mlp 8", ["--mlp belongs to wide_and_deep", "model='lr'"]),
    ("--batch-sizes 32 --model ffm", ["model must be one of lr, fm", "'ffm'"]),
    ("--batch-sizes 32 --combiner genres=max", ["combiner must be one of", "'max'"]),
    ("--batch-sizes 32 --combiner =sum", ["--combiner must be FIELD=VALUE", "'=sum'"]),
    ("--batch-sizes 32 --dense-schedule linear:to=x", ["--dense-schedule must have numbers"]),
    ("--batch-sizes 32 --embedding-schedule fall", ["embedding_schedule must be one of", "'fall'"]),
    ("--batch-sizes 32 --jobs 0", ["jobs must be a whole number of at least 1", "0"]),
]


@pytest.mark.parametrize(("options", "words"), [pytest.param(*o, id=o[0]) for o in OPTIONS])
def test_options(toy_data, tmp_path, options, words):
    argv = ["sweep", "curves", toy_data, "--out", tmp_path / "out", *options.split()]
    refused(argv, words, folder=tmp_path)


@pytest.mark.parametrize("study", [name for name in STUDIES if name != "frequencies"])
def test_schedules_hold_for_every_run(toy_data, study):
    argv = ["sweep", study, str(toy_data), "--out", "out", "--batch-sizes", "32,64"]
    argv += ["--dense-schedule", "linear", "--embedding-schedule", "cosine:to=0.1"]
    setting = _setting(command_line().parse_args(argv), PreparedData.open(toy_data))
    configs = [cell.config for cell in STUDIES[study].cells(setting)]
    assert {config.dense_schedule["name"] for config in configs} == {"linear"}
    assert {config.embedding_schedule["to"] for config in configs} == {0.1}


@pytest.mark.parametrize(
    ("study", "options", "words"),
    [
        (
            "scaling-rules",
            "--batch-sizes 32,64 --embedding-lr 0.05",  # n²-λ has 4 times its λ at 64
            [
                "at batch size 64: ",
                "learning_rate * l2 is at most",
                "0.05 * 4e-05",
                "update='exact'",
            ],
        ),
        (
            "curves",
            "--batch-sizes 32,64 --clip-ratio 3e-5",  # r < 2λ at 64 alone
            ["at batch size 64: ", "needs clip_ratio of at least 2 * l2", "l2=2e-05"],
        ),
        (
            "curves",
            "--batch-sizes 32 --embedding-schedule cosine",
            ["needs a number as learning rate", "'name': 'cosine'"],
        ),
    ],
)
def test_what_deferred_updates_cannot_take(toy_data, tmp_path, study, options, words):
    """Before the first run, though only a later one of them would meet it."""
    argv = ["sweep", study, toy_data, "--out", tmp_path / "out", "--update", "deferred"]
    refused([*argv, *options.split()], words, folder=tmp_path)


@pytest.mark.parametrize("study", ["networks", "time"])
def test_options_of_other_networks(toy_data, tmp_path, study):
    argv = ["sweep", study, toy_data, "--out", tmp_path / "out", "--batch-sizes", "32"]
    for option, value in (("--model", "dlrm"), ("--bottom-mlp", "8")):
        words = ["networks deepfm, wide_and_deep", option[2:].replace("-", "_"), "Leave it out"]
        refused([*argv, option, value], words, folder=tmp_path)


def test_epochs_of_the_study_of_one(toy_data, tmp_path):
    argv = ["sweep", "time", toy_data, "--out", tmp_path / "out", "--epochs", "5"]
    refused(argv, ["time is of one epoch", "epochs=5", "Leave it out"], folder=tmp_path)


@pytest.mark.parametrize(
    ("option", "word"),
    [
        ("--epochs 3", "epochs=3"),
        ("--update lazy", "update='lazy'"),
        ("--seeds 1", "seeds=[1]"),
        ("--l2 0.1", "l2=0.1"),
        ("--model dcn", "model='dcn'"),
        ("--dense-schedule cosine", "dense_schedule={'name': 'cosine'}"),
        ("--base {}", "dense_lr="),
    ],
)
def test_the_study_that_trains_nothing(toy_data, tmp_path, tune, option, word):
    argv = ["sweep", "frequencies", toy_data, "--out", tmp_path / "out", "--batch-sizes", "64"]
    words = ["frequencies trains nothing, and takes batch_sizes alone", word, "Leave it out"]
    refused([*argv, *option.format(tune).split()], words, folder=tmp_path)


def test_jobs_of_the_study_that_trains_nothing(toy_data, tmp_path):
    argv = ["sweep", "frequencies", toy_data, "--out", tmp_path / "out", "--jobs", "2"]
    refused(argv, ["frequencies trains nothing", "jobs=2", "Leave it out"], folder=tmp_path)


@pytest.fixture
def tune(tmp_path_factory, toy_data):
    """What is read of one: found at 64 on the same data, for the network `deepfm`."""
    folder = tmp_path_factory.mktemp("tune")
    data = PreparedData.open(toy_data)
    found_on = {
        "data": str(toy_data),
        "data_sha256": identity_of(data),
        "columns": columns_of(data),
    }
    base = recipe("none").replace(batch_size=64)
    config = TrainConfig(batch_size=64, rule="none", base=base).to_dict()
    for name, text in (
        ("tune.json", {"format": 1, "config": {}, **found_on}),
        ("tuned.json", config),
        ("result.json", {}),
    ):
        (folder / name).write_text(json.dumps(text))
    return folder


@pytest.mark.parametrize(
    ("study", "options", "words"),
    [
        ("curves", "--batch-sizes 32,64 --tuned {}", ["--tuned is for the study scaling-rules"]),
        ("scaling-rules", "--batch-sizes 32 --tuned {}", ["at one of the batch sizes", "[64]"]),
        ("scaling-rules", "--batch-sizes 64 --model lr --tuned {}", ["of the same network"]),
        ("curves", "--batch-sizes 64 --mlp 8 --base {}", ["of the same network", "mlp=[8]"]),
        (
            "curves",
            "--batch-sizes 32,64 --base {}",
            ["must be where the base was tuned", "32, and"],
        ),
        ("curves", "--batch-sizes 64 --base /nowhere", ["a tune must be a folder"]),
    ],
)
def test_what_was_tuned(toy_data, tmp_path, tune, study, options, words):
    argv = ["sweep", study, toy_data, "--out", tmp_path / "out", *options.format(tune).split()]
    refused(argv, words, folder=tmp_path)


def change(tune, **changes):
    record = json.loads((tune / "tune.json").read_text())
    (tune / "tune.json").write_text(json.dumps({**record, **changes}))


@pytest.mark.parametrize("option", ["--base", "--tuned"])
class TestWhatWasTunedOnOtherData:
    def options(self, option, tune):
        return ["--batch-sizes", "64", "--epochs", "1", "--seeds", "1", option, tune]

    def test_of_other_columns_is_refused(self, toy_data, tmp_path, tune, option):
        change(tune, columns={**columns_of(PreparedData.open(toy_data)), "categorical": ["a"]})
        argv = ["sweep", "scaling-rules", toy_data, "--out", tmp_path / "out"]
        words = ["must have the columns that were tuned on", "categorical"]
        refused([*argv, *self.options(option, tune)], words, folder=tmp_path)

    def test_of_other_rows_is_told(self, toy_data, tmp_path, tune, option):
        change(tune, data_sha256="another", data="of/last/week")
        argv = ["sweep", "scaling-rules", toy_data, "--out", tmp_path / "out"]
        arguments = command_line().parse_args(list(map(str, [*argv, *self.options(option, tune)])))
        with pytest.warns(Notice, match="found on other rows than those of .* of/last/week"):
            _setting(arguments, PreparedData.open(toy_data))


@pytest.mark.parametrize("option", ["--base", "--tuned"])
def test_what_was_tuned_in_another_precision(toy_data, tmp_path, tune, option):
    change(tune, precision="mixed_float16")
    argv = ["sweep", "scaling-rules", toy_data, "--out", tmp_path / "out", "--batch-sizes", "64"]
    words = ["in the precision that they are compared in, which is float32", "mixed_float16"]
    refused([*argv, option, tune], words, folder=tmp_path)


def test_a_study_that_is_none(toy_data, tmp_path):
    words = ["study must be one of scaling-rules, networks", "'colours'"]
    refused(["sweep", "colours", toy_data, "--out", tmp_path / "out"], words, folder=tmp_path)


def test_an_output_that_is_something_else(toy_data, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "file").touch()
    for name in ("out", "file"):
        argv = ["sweep", "curves", toy_data, "--out", tmp_path / name, "--batch-sizes", "32"]
        refused(argv, ["must not exist, or be of a sweep", name], folder=tmp_path)


def test_a_test_part_of_one_label(toy_data):
    """As an adopted one may be."""
    data = PreparedData.open(toy_data)
    report = {**data.report, "positives": {"train": 70, "test": 60}}
    one = dataclasses.replace(data, record={**data.record, "report": report})
    with pytest.raises(UserError, match="must have labels of 0 and of 1. .* 60 clicks in 60 rows"):
        _check(one, [])


def test_a_precision_that_its_processes_would_not_have(toy_data):
    with (
        in_precision("mixed_float16"),
        pytest.raises(UserError, match=r"must be trained in float32.* Received: .*mixed_float16"),
    ):
        _check(PreparedData.open(toy_data), [])


def test_reports_of_what_is_no_sweep(toy_data, tmp_path):
    words = ["a report is of a sweep's folder", "Make one with 'merlin-cowclip sweep'"]
    refused(["report", tmp_path], words, folder=tmp_path)
    refused(["report", tmp_path / "nothing"], words, folder=tmp_path)
    refused(["report", shutil.copytree(toy_data, tmp_path / "data")], words, folder=tmp_path)
