"""A folder is replaced as a whole, whenever the process is killed. No TensorFlow here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from merlin_cowclip.plugins.saving.folder import MARKER, OWN, find, replacing

PART = "saved_model.pb"

# Replaces the folder `path`, and is killed by the kernel as the n-th file operation begins.
SCRIPT = f"""
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
with replacing(path) as folder:
    (folder / "{PART}").write_text("new")
    (folder / "{OWN}").mkdir()
    (folder / "{MARKER}").write_text("new")
"""


def write(folder, text):
    (folder / PART).write_text(text)
    (folder / OWN).mkdir(parents=True)
    (folder / MARKER).write_text(text)


@pytest.mark.parametrize("there", [True, False])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path, there):
    outcomes = []
    for last in range(60):
        path = tmp_path / str(last) / "model"
        path.parent.mkdir()
        if there:
            path.mkdir()
            write(path, "old")
        done = subprocess.run([sys.executable, "-c", SCRIPT, str(path), str(last)])
        current = find(path)
        if there or (current / MARKER).exists():
            text = (current / MARKER).read_text()
            assert (current / PART).read_text() == text
            outcomes.append(text)
        with replacing(path) as folder:  # clears up whatever is left
            write(folder, "next")
        assert os.listdir(path.parent) == ["model"]
        assert (path / PART).read_text() == "next"
        assert sorted(os.listdir(path)) == [OWN, PART]
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert last > 3
    assert outcomes[-1] == "new"
    assert outcomes == sorted(outcomes, key=["old", "new"].index)  # never back again
    assert ("old" in outcomes) == there


def test_a_failure_inside_leaves_nothing(tmp_path):
    def interrupted():
        with replacing(tmp_path / "deep/model") as folder:
            (folder / PART).write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_link_stays_one(tmp_path):
    (tmp_path / "disk").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk")
    with replacing(link) as folder:
        write(folder, "new")
    assert link.is_symlink()
    assert (tmp_path / "disk" / MARKER).read_text() == "new"


@pytest.mark.parametrize("entries", [["variables"], [PART, "notes"]], ids=str)
def test_what_is_no_saved_model_is_left_alone(tmp_path, entries):
    """A folder of a user that happens to have an entry of one of our names, say."""
    path = tmp_path / "site"
    path.mkdir()
    for name in entries:
        (path / name).touch()
    refused = pytest.raises(ValueError, match=f"or a saved model.*with {entries[-1]!r}")
    with refused, replacing(path):
        pass
    assert sorted(os.listdir(path)) == sorted(entries)
