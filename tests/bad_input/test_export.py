"""What `export` cannot make a model repository of, or not there."""

from __future__ import annotations

import shutil
import sys

import pytest

from tests.bad_input.contract import refused


def argv(run, tmp_path, *options) -> list:
    return ["export", run, "--out", tmp_path / "repository", *options]


def test_a_repository_that_is_there(toy_run, tmp_path):
    (tmp_path / "repository").mkdir()
    words = ["output folder must not exist", "repository", "Name another"]
    refused(argv(toy_run, tmp_path), words, folder=tmp_path)


def test_no_run_and_one_that_did_not_finish(toy_run, tmp_path):
    refused(argv(tmp_path / "none", tmp_path), ["a run must be a folder"], folder=tmp_path)
    shutil.copytree(toy_run, tmp_path / "run")
    (tmp_path / "run/result.json").unlink()
    words = ["a run that did not finish", "--resume"]
    refused(argv(tmp_path / "run", tmp_path), words, folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--drop-rare", "100"], ["between 0 and 100 %", "100.0"]),
        (["--drop-rare", "-1"], ["between 0 and 100 %", "-1.0"]),
        (["--drop-rare", "nan"], ["between 0 and 100 %", "nan"]),
        (["--drop-rare", "half"], ["--drop-rare: invalid", "half"]),
        (["--rare", "1,"], ["--rare: invalid", "1,"]),
        (["--rare", "1", "--data", "nowhere"], ["prepared data must be a folder", "nowhere"]),
    ],
)
def test_shares(toy_run, tmp_path, options, words):
    refused(argv(toy_run, tmp_path, *options), words, folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "received"),
    [([], "neither"), (["--drop-rare", "1", "--rare", "1"], "--drop-rare without --out")],
)
def test_nowhere_to_write(toy_run, tmp_path, options, received):
    words = ["export needs --out, or --rare", f"Received: {received}"]
    refused(["export", toy_run, *options], words, folder=tmp_path)


@pytest.mark.parametrize("package", ["merlin.systems", "tritonclient"])
def test_without_the_extra(toy_run, tmp_path, monkeypatch, package):
    for name in [*sys.modules]:
        ours = name.startswith("merlin_cowclip.workflows.serving.")
        if ours or name == package or name.startswith(f"{package}."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    words = ["needs Merlin Systems and tritonclient", f"without {package}", "merlin-cowclip[serve]"]
    refused(argv(toy_run, tmp_path, "--quiet"), words, folder=tmp_path)


@pytest.mark.parametrize(
    ("file", "options", "words"),
    [
        ("workflow/workflow.pkl", [], ["workflow.pkl", "--trust-workflow"]),
        ("model/saved_model.pb", ["--trust-workflow"], ["saved_model.pb", "Train again"]),
    ],
)
def test_a_file_that_was_changed(toy_run, tmp_path, file, options, words):
    shutil.copytree(toy_run, tmp_path / "run")
    with (tmp_path / "run" / file).open("ab") as changed:
        changed.write(b"!")
    refused(argv(tmp_path / "run", tmp_path, *options), words, folder=tmp_path)
