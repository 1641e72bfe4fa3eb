"""Output folders: all or nothing, whatever ends the work, and other commands at the same place."""

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


def test_a_folder_has_its_name_at_the_end(tmp_path):
    out = tmp_path / "new" / "out"
    with all_or_nothing(out) as folder:
        (folder / "a").touch()
        assert not out.exists()
    assert names(out) == {"a"}
    assert names(tmp_path / "new") == {"out"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("is_complete", [False, True])
def test_a_signal_ends_a_command(tmp_path, number, is_complete, capsys):
    def work() -> None:
        with all_or_nothing(tmp_path / "out") as folder:
            (folder / "a").touch()
            if not is_complete:
                os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)

    assert endings.run("x", work) == 128 + number
    assert names(tmp_path) == ({"out"} if is_complete else set())
    assert "Traceback" not in capsys.readouterr().err


def test_what_is_there_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in (".", "file", "link"):
        with pytest.raises(UserError, match="output folder must not exist. Received: "):
            refuse_existing(tmp_path / name)
    with pytest.raises(UserError, match="must be in a folder that can be written"):
        refuse_existing(tmp_path / "file" / "out")
    for url in ("s3://bucket/out", "hdfs://host:8020/out", "file:///tmp/out"):
        with pytest.raises(UserError, match=f"output file must be a local path. .*{Path(url)}"):
            refuse_existing(Path(url), "file")
    refuse_existing(tmp_path / "new" / "out")
    refuse_existing(tmp_path / "2026-01-01T00:00" / "out")


def test_another_command_may_be_faster(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UserError, match="must not exist"), all_or_nothing(out):  # noqa: PT012
        out.mkdir()
        (out / "theirs").touch()
    assert names(out) == {"theirs"}
    assert names(tmp_path) == {"out"}


def test_json_of_odd_names_is_written_in_one_step_or_not_at_all(tmp_path, monkeypatch):
    odd, path, write = os.fsdecode(b"log\xff.csv"), tmp_path / "record.json", Path.write_bytes
    write_json(path, {"file": odd, "ζ": 1})
    assert json.loads(path.read_text(encoding="utf-8")) == {"file": odd, "ζ": 1}
    assert names(tmp_path) == {"record.json"}

    def full(path: Path, content: bytes) -> None:
        write(path, content[:1])
        raise OSError("full")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="full"):
        write_json(path, {})
    assert json.loads(path.read_text(encoding="utf-8"))["ζ"] == 1
