"""What a repository's pickles need: packages with their versions, their own and others'."""

import importlib.metadata

import cloudpickle

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
