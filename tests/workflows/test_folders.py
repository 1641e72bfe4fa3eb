"""Output folders: all or nothing, whatever ends the work, and other commands at the same place."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest

from merlin_cowclip.workflows.commands import endings
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing, write_json


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fill(folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")


def test_a_folder_has_its_name_once_it_is_whole(tmp_path):
    out = tmp_path / "new" / "out"
    with all_or_nothing(out) as folder:
        fill(folder)
        assert not out.exists()
    assert names(out) == {"a", "b"}
    assert names(tmp_path / "new") == {"out"}


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (UserError("no"), UserError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "full"), OSError),
    ],
)
def test_work_that_fails_leaves_nothing(tmp_path, error, raised):
    with pytest.raises(raised), all_or_nothing(tmp_path / "new" / "out") as folder:  # noqa: PT012
        fill(folder)
        raise error
    assert names(tmp_path) == set()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_signal_ends_a_command(tmp_path, number, is_whole, capsys):
    def work() -> None:
        with all_or_nothing(tmp_path / "out") as folder:
            fill(folder)
            if not is_whole:
                os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

    assert endings.run("x", work) == 128 + number
    assert names(tmp_path) == ({"out"} if is_whole else set())
    assert "Traceback" not in capsys.readouterr().err


def test_what_is_there_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in (".", "file", "link"):
        with pytest.raises(UserError, match="output folder must not exist. Received: "):
            refuse_existing(tmp_path / name)
    with pytest.raises(UserError, match="must be in a folder that can be written"):
        refuse_existing(tmp_path / "file" / "out")
    refuse_existing(tmp_path / "new" / "out")


def test_urls_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for url in ("s3://bucket/out", "gs://b/o", "hdfs://host:8020/out", "file:///tmp/out"):
        for kind in ("folder", "file"):
            message = f"output {kind} must be a local path. Received: {Path(url)}"
            with pytest.raises(UserError, match=message):
                refuse_existing(Path(url), kind)
            with pytest.raises(UserError, match=message), all_or_nothing(Path(url), kind):
                pass
    assert names(tmp_path) == set()
    refuse_existing(Path("a:b/c"))
    refuse_existing(tmp_path / "2026-01-01T00:00" / "out")


def test_another_command_may_be_faster(tmp_path):
    out = tmp_path / "out"

    def work() -> None:
        with all_or_nothing(out) as folder:
            fill(folder)
            out.mkdir()
            (out / "theirs").touch()

    with pytest.raises(UserError, match="output folder must not exist"):
        work()
    assert names(out) == {"theirs"}
    assert names(tmp_path) == {"out"}


# Records


def test_json_of_odd_names_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    odd = os.fsdecode(b"log\xff.csv")
    path = tmp_path / "record.json"
    write_json(path, {"file": odd, "ζ": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"file": odd, "ζ": 1}
    assert names(tmp_path) == {"record.json"}

    stock = Path.write_bytes

    def full(path: Path, content: bytes) -> None:
        stock(path, content[:1])
        raise OSError("full")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="full"):
        write_json(path, {})
    assert json.loads(path.read_text(encoding="utf-8"))["ζ"] == 1
