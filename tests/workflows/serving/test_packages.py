"""What a repository's pickles need: packages with their versions, and modules that are in none."""

import importlib.metadata
import pickle
import sys
import types

import cloudpickle
import pytest

from merlin_cowclip.workflows.errors import Notice
from merlin_cowclip.workflows.serving.packages import needed_by


def test_packages_without_a_list_of_their_modules_are_found(tmp_path):
    """cloudpickle has no top_level.txt, which is all that Python 3.10's own function reads."""
    assert importlib.metadata.distribution("cloudpickle").read_text("top_level.txt") is None
    (tmp_path / "operator.pkl").write_bytes(cloudpickle.dumps(lambda column: column))
    version = importlib.metadata.version
    assert needed_by(tmp_path, ["numpy"]) == {
        "numpy": version("numpy"),
        "cloudpickle": version("cloudpickle"),
    }


def test_modules_in_no_package_are_told(tmp_path, monkeypatch):
    own = types.ModuleType("teams_operators")
    own.Operator = type("Operator", (), {"__module__": "teams_operators"})
    monkeypatch.setitem(sys.modules, "teams_operators", own)
    (tmp_path / "operator.pkl").write_bytes(pickle.dumps(own.Operator()))
    with pytest.warns(Notice, match="in no package: 'teams_operators'"):
        assert needed_by(tmp_path, []) == {}
