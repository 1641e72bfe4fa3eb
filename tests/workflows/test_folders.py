"""Output folders under fire: interrupts anywhere, and other commands at the same place."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from merlin_cowclip.workflows import folders
from merlin_cowclip.workflows.commands import demonstration, endings
from merlin_cowclip.workflows.commands.demonstration import demo as run_demo
from merlin_cowclip.workflows.data import synthetic
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing, write_json


@pytest.fixture
def once_interrupted(monkeypatch):
    """The first removal of a folder is interrupted after one file, as a first Ctrl-C does it."""
    rmtree, calls = shutil.rmtree, []

    def interrupted(folder: Any, *arguments: Any, **options: Any) -> None:
        calls.append(folder)
        if len(calls) == 1:
            next(path for path in Path(folder).rglob("*") if path.is_file()).unlink()
            os.kill(os.getpid(), signal.SIGINT)
        rmtree(folder, *arguments, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    return calls


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fill(folder: Path) -> None:
    (folder / "a").write_text("a")
    (folder / "b").write_text("b")


def test_an_interrupt_of_the_tidying_waits_for_it(tmp_path, once_interrupted, capsys):
    def work() -> None:
        with all_or_nothing(tmp_path / "out") as folder:
            fill(folder)
            raise UserError("no")

    assert endings.run("x", work) == 130
    assert capsys.readouterr().err == "x: interrupted before it was done: nothing is left of it\n"
    assert once_interrupted
    assert names(tmp_path) == set()


def test_an_interrupt_of_the_demos_tidying_waits_for_it(tmp_path, once_interrupted, monkeypatch):
    def write(dataset: str, path: Path, **options: Any) -> None:
        fill(path.parent)
        raise UserError("no")

    monkeypatch.setattr(demonstration, "write_synthetic", write)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path / "new" / "demo")
    assert names(tmp_path) == set()


def test_an_interrupted_synthetic_log_leaves_nothing(tmp_path, monkeypatch):
    """Between the truth and the log, and again as they are removed."""
    link, unlink, calls = os.link, Path.unlink, []

    def truth_only(part: Path, file: Path) -> None:
        if file.name == "log":
            raise KeyboardInterrupt
        link(part, file)

    def interrupted(path: Path, *arguments: Any, **options: Any) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise KeyboardInterrupt
        unlink(path, *arguments, **options)

    monkeypatch.setattr(synthetic.os, "link", truth_only)
    monkeypatch.setattr(Path, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_synthetic("criteo", tmp_path / "log", rows=100, cardinality=10)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("place", ["link", "rename"])
def test_a_synthetic_log_interrupted_once_it_is_whole(tmp_path, monkeypatch, place):
    """It keeps its truth, also on a disk without links."""
    stock = getattr(os, place)

    def refused(*_: Path) -> None:
        raise OSError("no links here")

    def interrupted(part: Path, file: Path) -> None:
        stock(part, file)
        if file.name == "log":
            raise KeyboardInterrupt

    monkeypatch.setattr(synthetic.os, "link", refused)
    monkeypatch.setattr(synthetic.os, place, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_synthetic("criteo", tmp_path / "log", rows=100, cardinality=10)
    assert names(tmp_path) == {"log", "log.truth.json"}


def test_an_interrupt_after_the_output_is_whole_says_so(tmp_path, capsys):
    """While it is opened again, or its table printed."""
    out = tmp_path / "new" / "out"

    def work() -> None:
        with all_or_nothing(out) as folder:
            fill(folder)
        os.kill(os.getpid(), signal.SIGTERM)

    assert endings.run("x", work) == 143
    says = f"x: ended by SIGTERM after it had written {out}, which is whole\n"
    assert capsys.readouterr().err == says
    assert names(out) == {"a", "b"}

    def again() -> None:
        raise KeyboardInterrupt

    assert endings.run("x", again) == 130  # of this command, nothing was written
    assert capsys.readouterr().err == "x: interrupted before it was done: nothing is left of it\n"


def test_an_interrupt_right_after_the_renaming(tmp_path, monkeypatch, capsys):
    rename = os.rename

    def interrupted(*arguments: Any) -> None:
        rename(*arguments)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(folders.os, "rename", interrupted)

    def work() -> None:
        with all_or_nothing(tmp_path / "out") as folder:
            fill(folder)

    assert endings.run("x", work) == 130
    assert f"after it had written {tmp_path / 'out'}, which is whole" in capsys.readouterr().err
    assert names(tmp_path / "out") == {"a", "b"}


def test_an_interrupt_between_the_work_and_its_tidying(tmp_path, monkeypatch, capsys):
    """Before the first step of the removal, which can no longer wait for its end."""

    def never(*_: Any) -> None:
        raise KeyboardInterrupt

    def work() -> None:
        with monkeypatch.context() as patch, all_or_nothing(tmp_path / "out") as folder:
            fill(folder)
            patch.setattr(folders, "remove", never)
            raise UserError("no")

    assert endings.run("x", work) == 130
    assert "nothing is left of it" in capsys.readouterr().err
    assert names(tmp_path) == set()


def test_what_has_taken_an_unfinished_folders_place_is_anothers(tmp_path):
    """Somebody removed it while a command worked in it, and made one of that name."""
    out = tmp_path / "demo"

    def work() -> None:
        with folders.new_folder(out):
            (tmp_path / "theirs").mkdir()
            (tmp_path / "theirs").rename(out)  # another folder: the old one was empty
            fill(out)
            raise UserError("no")

    with pytest.raises(UserError, match="no"):
        work()
    assert names(out) == {"a", "b"}


def test_an_unfinished_folder_in_its_place_is_not_whole(tmp_path, capsys):
    """The demo's: it lies at its place from the first moment."""

    def work() -> None:
        with folders.new_folder(tmp_path / "new" / "demo"):
            fill(tmp_path / "new" / "demo")
            with all_or_nothing(tmp_path / "new" / "demo" / "data") as data:
                fill(data)
            raise KeyboardInterrupt

    assert endings.run("x", work) == 130
    assert capsys.readouterr().err == "x: interrupted before it was done: nothing is left of it\n"
    assert names(tmp_path) == set()


class Finalized:
    """An object whose finalizer swallows a signal, as Python prints and drops what it raises."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(1000))


def test_a_swallowed_signal_makes_deaf_to_no_other(capsys):
    reached = []

    def work() -> None:
        finalized = Finalized()
        del finalized
        gc.collect()
        reached.append("after the first")
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("after the second")

    assert endings.run("x", work) == 128 + signal.SIGTERM
    assert reached == ["after the first"]
    assert "x: ended by SIGTERM before it was done" in capsys.readouterr().err


def test_a_swallowed_signal_comes_again(capsys):
    """JAX has a callback of the garbage collector: one SIGTERM in it, and training went on."""
    reached = []

    def work() -> None:
        finalized = Finalized()
        del finalized
        reached.append("after the first")
        for _ in range(500):
            time.sleep(0.01)
        reached.append("five seconds later")

    assert endings.run("x", work) == 128 + signal.SIGTERM
    assert reached == ["after the first"]
    assert (
        capsys.readouterr().err == "x: ended by SIGTERM before it was done: nothing is left of it\n"
    )


@pytest.mark.parametrize("when", ["as they are set", "as they are put back"])
def test_a_signal_as_handlers_change(when, tmp_path):
    """A process of its own: no traceback, whatever moment it is."""
    program = textwrap.dedent(
        """
        import os, signal, sys
        from merlin_cowclip.workflows.commands import endings
        real, calls = signal.signal, []
        def change(number, handler):
            before = real(number, handler)
            calls.append(number)
            if len(calls) == int(sys.argv[1]):
                os.kill(os.getpid(), signal.SIGHUP if len(calls) > 3 else calls[0])
            return before
        signal.signal = change
        sys.exit(endings.run("x", lambda: print("done")))
        """
    )
    at = {"as they are set": 1, "as they are put back": 4}[when]
    done = subprocess.run(
        [sys.executable, "-c", program, str(at)], capture_output=True, text=True, timeout=60
    )
    if when == "as they are set":
        says = "x: interrupted before it was done: nothing is left of it\n"
        assert (done.returncode, done.stdout, done.stderr) == (130, "", says)
    else:
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# Other commands


def test_a_demo_that_fails_removes_nothing_of_others(tmp_path, monkeypatch):
    """Neither a run made meanwhile in a folder that it made, nor another demo's folder."""

    def write(dataset: str, path: Path, **options: Any) -> None:
        (tmp_path / "runs" / "theirs").mkdir()
        fill(path.parent)
        raise UserError("no")

    monkeypatch.setattr(demonstration, "write_synthetic", write)
    with pytest.raises(UserError, match="no"):
        run_demo(tmp_path / "runs" / "demo")
    assert names(tmp_path / "runs") == {"theirs"}


def test_of_two_demos_the_slower_one_is_refused(tmp_path, monkeypatch):
    """Both saw that the folder was not there."""
    out = tmp_path / "runs" / "demo"

    def seen(path: Path) -> None:
        refuse_existing(path)
        monkeypatch.setattr(folders, "refuse_existing", refuse_existing)
        out.mkdir(parents=True)
        fill(out)

    monkeypatch.setattr(folders, "refuse_existing", seen)
    with pytest.raises(UserError, match="must not exist. Received: .*/runs/demo. Name another"):
        run_demo(out)
    assert names(out) == {"a", "b"}


def test_what_was_written_is_kept_where_its_name_was_taken(tmp_path):
    """Hours of training, say; the name may belong to another training by then."""
    out = tmp_path / "new" / ("n" * 255)

    def work() -> None:
        with all_or_nothing(out) as folder:
            fill(folder)
            out.mkdir(parents=True)
            (out / "theirs").touch()

    with pytest.raises(UserError, match="must not exist.*is whole, and lies in") as refusal:
        work()
    kept = Path(str(refusal.value).rpartition(" ")[2])
    assert names(kept) == {"a", "b"}
    assert names(out) == {"theirs"}
    assert names(tmp_path) == {"new", kept.name}


def test_what_is_no_work_is_not_kept_where_its_name_was_taken(tmp_path):
    """Of two trainings that are begun at once the slower one had written nothing of worth."""
    out = tmp_path / "out"

    def work() -> None:
        with all_or_nothing(out, is_work=False) as folder:
            fill(folder)
            out.mkdir()

    with pytest.raises(
        UserError, match="must not exist. Received: [^,]*out. Name another"
    ) as error:
        work()
    assert "lies in" not in str(error.value)
    assert names(tmp_path) == {"out"}
    assert not names(out)


def test_what_was_written_is_kept_where_its_place_is_gone(tmp_path):
    def work() -> None:
        with all_or_nothing(tmp_path / "new" / "out") as folder:
            fill(folder)
            (tmp_path / "new").touch()

    with pytest.raises(UserError, match="can be written.*Not a directory.*lies in") as refusal:
        work()
    kept = Path(str(refusal.value).rpartition(" ")[2])
    assert names(kept) == {"a", "b"}
    assert names(tmp_path) == {"new", kept.name}


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
    assert names(tmp_path) == {"record.json"}
