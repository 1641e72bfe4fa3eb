"""A folder is replaced as a whole, whenever the process is killed. No TensorFlow here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from merlin_cowclip.plugins.saving.folder import find, replacing

OWN = ("marker", "part")

# Replaces the folder `path`, and is killed by the kernel as the n-th file operation begins.
SCRIPT = """
import os, signal, sys
from pathlib import Path
from merlin_cowclip.plugins.saving.folder import replacing

path, last = Path(sys.argv[1]), int(sys.argv[2])
seen = 0

def count(event, arguments):
    global seen
    if event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "open"):
        if seen == last:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

sys.addaudithook(count)
with replacing(path, "marker", ("marker", "part"), "marker") as folder:
    (folder / "part").write_text("new")
    (folder / "marker").write_text("new")
"""


def write(folder, text):
    (folder / "part").write_text(text)
    (folder / "marker").write_text(text)


@pytest.mark.parametrize("there", [True, False])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path, there):
    path, outcomes = tmp_path / "model", []
    for last in range(60):
        if there:
            path.mkdir()
            write(path, "old")
            (path / "notes").write_text("kept")
        done = subprocess.run([sys.executable, "-c", SCRIPT, str(path), str(last)])
        found = find(path, "marker")
        if there or (found / "marker").exists():
            text = (found / "marker").read_text()
            assert (found / "part").read_text() == text
            outcomes.append(text)
        # Whatever is left is cleared up by the next one, and what is not ours is kept.
        with replacing(path, "marker", OWN, "marker") as folder:
            write(folder, "next")
        assert os.listdir(tmp_path) == ["model"]
        assert (path / "part").read_text() == "next"
        assert sorted(os.listdir(path)) == ["marker", *["notes"] * there, "part"]
        for entry in path.iterdir():
            entry.unlink()
        path.rmdir()
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert last > 3
    assert outcomes[-1] == "new"
    assert outcomes == sorted(outcomes, key=["old", "new"].index)  # never back again
    assert ("old" in outcomes) == there


def test_a_failure_inside_leaves_nothing(tmp_path):
    def interrupted():
        with replacing(tmp_path / "deep/model", "marker", OWN, "marker") as folder:
            (folder / "part").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list((tmp_path / "deep").iterdir()) == []


def test_links_and_files(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk")
    for text in ("one", "two"):
        with replacing(link, "marker", OWN, "marker") as folder:
            write(folder, text)
        assert link.is_symlink()
        assert (tmp_path / "disk/marker").read_text() == text
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match="path must be a folder.*Received a file"),
        replacing(tmp_path / "file", "marker", OWN, "marker"),
    ):
        pass


def test_what_is_no_saved_model_is_left_alone(tmp_path):
    """A folder of somebody's own that happens to have an entry of one of our names."""
    path = tmp_path / "site"
    path.mkdir()
    (path / "part").write_text("mine")
    with (
        pytest.raises(ValueError, match=r"saved model, or a folder without 'part', which would be"),
        replacing(path, "marker", OWN, "marker"),
    ):
        pass
    assert (path / "part").read_text() == "mine"
    assert os.listdir(tmp_path) == ["site"]
    (path / "marker").touch()
    with replacing(path, "marker", OWN, "marker") as folder:
        write(folder, "new")
    assert (path / "part").read_text() == "new"
