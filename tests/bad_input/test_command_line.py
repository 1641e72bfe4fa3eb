"""The command line itself: arguments that do not parse, what nobody foresaw, signals."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from merlin_cowclip.workflows.commands import endings
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.training.checkpoints import Checkpoints
from tests.bad_input.conftest import toy_log
from tests.bad_input.contract import command, refused

ARGUMENTS = [
    ([], ["arguments are required: COMMAND", "merlin-cowclip --help"]),
    (["tarin"], ["invalid choice: 'tarin'", "'train'"]),
    ([""], ["invalid choice: ''"]),
    (["Train"], ["invalid choice: 'Train'"]),
    (["x" * 5000], ["invalid choice: 'xxx"]),
    (["--verbose"], ["required: COMMAND"]),
    (["train"], ["train needs the data", "--resume RUN"]),
    (["train", "data"], ["train needs --out"]),
    (["train", "--out", "run"], ["train needs the data"]),
    (["train", "data", "--out"], ["argument --out: expected one argument"]),
    (["train", "data", "more", "--out", "run"], ["unrecognized arguments: more"]),
    (["train", "data", "--out", "run", "--optimizer", "sgd"], ["unrecognized", "--optimizer sgd"]),
    (["train", "data", "--out", "run", "--clip-", "1"], ["ambiguous option", "--clip-ratio"]),
    (["train", "data", "--out", "run", "--epochs"], ["--epochs: expected one argument"]),
    (["train", "data", "--out", "run", "--no-clip=1"], ["--no-clip: ignored explicit argument"]),
    *(
        (["train", "data", "--out", "run", f"--{option}", value], [f"--{option}: invalid", value])
        for option, value in (
            ("epochs", "ten"),
            ("epochs", "2.5"),
            ("epochs", "1e3"),
            ("batch-size", "8K"),
            ("batch-size", "9" * 5000),
            ("seed", "0x10"),
            ("base-batch-size", ""),
            ("embedding-dim", "ten"),
            ("mlp", "400;400"),
            ("mlp", "400,"),
            ("mlp", ""),
            ("mlp", "[400]"),
            ("bottom-mlp", "a"),
            ("cross-layers", "2.0"),
            ("low-rank-dim", "full"),
            ("dense-lr", "fast"),
            ("embedding-lr", "1e-4f"),
            ("l2", "1,5"),
            ("clip-ratio", ""),
            ("clip-threshold", "25%"),
        )
    ),
    (["train", "d", "--out", "run", "--l2", "a\nb"], [r"--l2: invalid float value: 'a\nb'"]),
    (["train", "data", "--out", "run", "--l2", "-1e-5"], ["--l2: expected one argument"]),
    (["evaluate"], ["required: RUN"]),
    (["predict", "run", "--out", "x"], ["required: input"]),
    (["predict", "run", "log"], ["required: --out"]),
    (["evaluate", "run", "--out", "x"], ["unrecognized arguments: --out x"]),
    (["prepare"], ["required: dataset, input, --out"]),
    (["prepare", "criteo", "--out", "data"], ["required: input"]),
    (["prepare", "criteo", "x", "--out", "data", "--test", "half"], ["--test: invalid float"]),
    (["prepare", "criteo", "x", "--out", "data", "--workers", "two"], ["--workers: invalid int"]),
    (["adopt", "x", "--out", "data", "--label", "y"], ["required: --workflow"]),
    (["frequencies"], ["required: data"]),
    (["frequencies", "data", "--top-k", "many"], ["--top-k: invalid int value: 'many'"]),
    (["frequencies", "data", "--batch-sizes"], ["--batch-sizes: expected at least one"]),
    (["demo", "--rows", "many"], ["--rows: invalid int value: 'many'"]),
    (["demo", "here"], ["unrecognized arguments: here", "See 'merlin-cowclip demo --help'"]),
]


@pytest.mark.parametrize(
    ("argv", "words"), [pytest.param(*a, id=" ".join(a[0])[-40:]) for a in ARGUMENTS]
)
def test_arguments(tmp_path, monkeypatch, argv, words):
    monkeypatch.chdir(tmp_path)
    refused(argv, [word[:50] for word in words], folder=tmp_path)


# demo


@pytest.mark.parametrize("rows", ["0", "-1", "16383"])
def test_a_demo_of_too_few_rows(tmp_path, rows):
    argv = ["demo", "--out", tmp_path / "demo", "--rows", rows]
    refused(argv, ["rows must be at least 16,384", rows], folder=tmp_path)


def test_places_of_a_demo(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "file").touch()
    for place, word in (
        ("there", "must not exist."),
        ("link", "must not exist."),
        ("file", "must not exist."),
        ("file/demo", "must be in a folder that can be written"),
        ("x" * 300, "must be in a folder that can be written"),
        ("new/" + "x" * 300, "must be in a folder that can be written"),
    ):
        words = [word, str(tmp_path / place)[:60]]
        refused(["demo", "--out", tmp_path / place], words, folder=tmp_path)


def test_a_demo_that_fails_leaves_nothing(tmp_path, monkeypatch):
    from merlin_cowclip.workflows.commands import demonstration

    def write(*arguments, **options):
        arguments[1].write_text("half a log")
        raise KeyboardInterrupt

    monkeypatch.setattr(demonstration, "write_synthetic", write)
    done = command(["demo", "--out", tmp_path / "new" / "demo"])
    assert done.code == 130
    assert list(tmp_path.iterdir()) == []


# What nobody foresaw


def nested() -> Exception:
    try:
        raise KeyError("inner")
    except KeyError as error:
        outer = RuntimeError("outer")
        outer.__cause__ = error
        return outer


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("boom"), ["RuntimeError: boom"]),
        (RuntimeError("first line\nsecond line"), ["RuntimeError: first line."]),
        (RuntimeError(), ["it: RuntimeError."]),
        (RuntimeError("\n"), ["it: RuntimeError."]),
        (ValueError("x" * 10_000), ["ValueError: xxx"]),
        (ValueError(" ".join(["word"] * 10_000)), ["ValueError: word word"]),
        (ValueError("\x1b[31mred\x00 \udcff"), [r"\x1b[31mred\x00 \udcff"]),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), ["UnicodeDecodeError"]),
        (AssertionError("an invariant"), ["AssertionError: an invariant"]),
        (RecursionError("too deep"), ["RecursionError: too deep"]),
        (PermissionError(13, "Permission denied", "/x"), ["PermissionError", "'/x'"]),
        (StopIteration(), ["StopIteration"]),
        (nested(), ["RuntimeError: outer"]),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, Exception) else "",
)
def test_what_nobody_foresaw(tmp_path, monkeypatch, error, words):
    def fail(path):
        raise error

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(PreparedData, "open", fail)
    argv = ["train", "data", "--out", tmp_path / "here" / "run"]
    (tmp_path / "here").mkdir()
    message = refused(argv, [*words, "The traceback"], folder=tmp_path / "here", code=1)
    (file,) = (tmp_path / "temporary").iterdir()
    assert message.endswith(f"is in {file}")
    text = file.read_text()
    assert "Traceback (most recent call last)" in text
    assert type(error).__name__ in text
    assert ("inner" in text) == (error.__cause__ is not None)


def test_no_place_for_the_traceback(tmp_path, monkeypatch):
    def fail(path):
        raise RuntimeError("boom")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "no"))
    monkeypatch.setattr(PreparedData, "open", fail)
    words = ["RuntimeError: boom", "could not be written"]
    refused(["train", "data", "--out", tmp_path / "run"], words, folder=tmp_path, code=1)


def test_one_line():
    assert endings.one_line("a\nb") == "a b"
    assert endings.one_line("ζ “x”") == "ζ “x”"
    assert len(endings.one_line("x" * 10_000)) < 400
    assert len(endings.one_line("word " * 10_000)) < 1100


# Real processes


def start(*argv, **options) -> subprocess.Popen:
    program = [sys.executable, "-m", "merlin_cowclip.workflows.commands.main", *map(str, argv)]
    return subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_what_is_refused_waits_for_no_tensorflow(toy_data, tmp_path):
    program = (
        "import sys\n"
        "from merlin_cowclip.workflows.commands.main import main\n"
        "for options in (['--epochs', '0'], ['--model', 'ffm'], ['--out', sys.argv[1]]):\n"
        "    assert main(['train', sys.argv[1], '--out', 'run', *options]) == 2\n"
        "assert main(['evaluate', sys.argv[1]]) == 2\n"
        "slow = {'tensorflow', 'merlin', 'nvtabular', 'sklearn'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(toy_data)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 4


def test_a_path_that_the_terminal_cannot_write(monkeypatch):
    """The work was done, and the sentence that says so ended it as unforeseen."""
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii"))
    assert endings.run("x", lambda: print("rün")) == 0
    assert printed.getvalue() == b"r\\xfcn\n"


def test_output_that_nobody_reads():
    """No traceback, and none as Python ends."""
    read, write = os.pipe()
    os.close(read)
    program = "from merlin_cowclip.workflows.commands import endings; import sys\n"
    program += "sys.exit(endings.run('merlin-cowclip x', lambda: print('text')))"
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert done.returncode == 141
    (line,) = done.stderr.splitlines()
    assert line == "merlin-cowclip x: error: what reads the output must read all of it"


@pytest.mark.parametrize("buffered", [True, False])
def test_output_to_a_full_disk(tmp_path, monkeypatch, capsys, buffered):
    """Containers have PYTHONUNBUFFERED."""

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    stdout = io.StringIO()
    monkeypatch.setattr(stdout, "flush" if buffered else "write", full)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "stdout", stdout)
    assert endings.run("merlin-cowclip x", lambda: print("text")) == 2
    words = "merlin-cowclip x: error: what it prints and writes must find room. Received: No space"
    assert capsys.readouterr().err.startswith(words)
    assert not list(tmp_path.iterdir())


def test_output_that_is_closed(tmp_path):
    """As behind >&-: there is no stdout at all."""
    program = "import os, sys\nsys.stdout = None\n"
    program += "from merlin_cowclip.workflows.commands.main import main\n"
    program += "from merlin_cowclip.workflows.commands import endings\n"
    program += "assert endings.run('merlin-cowclip x', lambda: None) == 0\n"
    program += "sys.exit(main(['evaluate', 'nothing']))"
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("merlin-cowclip evaluate: error: a run must be a folder")


def wait_for(found, runs) -> None:
    until = time.monotonic() + 240
    while not found():
        assert runs()
        assert time.monotonic() < until
        time.sleep(0.01)


def check_ended(name, says, err, folder) -> None:
    assert list(folder.iterdir()) == []
    assert err.endswith("\n")
    assert err.splitlines()[-1].split("\r")[-1] == f"merlin-cowclip {name}: {says} of it"
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_signal_while_it_prepares(tmp_path):
    """In the midst of the work: a folder is begun."""
    out = tmp_path / "here" / "out"
    out.parent.mkdir()
    (tmp_path / "toy.toml").write_text(
        'name = "toy"\nlabel = "y"\ncategorical = ["user", "item"]\n'
        'lists = ["genres"]\nlist_separator = "|"\n'
    )
    log = toy_log(tmp_path / "log.csv", rows=100_000)
    process = start("prepare", tmp_path / "toy.toml", log, "--out", out)
    wait_for(lambda: list(out.parent.glob(".out.partial-*")), runs=lambda: process.poll() is None)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    says = "ended by SIGTERM before it was done: nothing is left"
    check_ended("prepare", says, err, out.parent)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGTERM, 143, "interrupted after update"),
        (signal.SIGINT, 130, "interrupted after update"),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_signals_while_it_trains(toy_data, tmp_path, interpreter, number, code, says):
    """In the midst of the work: the first epoch is done. What is saved stays."""
    out = tmp_path / "here" / "out"
    out.parent.mkdir()
    options = ("--model", "lr", "--batch-size", "64", "--epochs", "100000")
    program = interpreter.start(
        "from runpy import run_module\n"
        "run_module('merlin_cowclip.workflows.commands.main', run_name='__main__')\n",
        *("train", toy_data, "--out", out, *options),
        folder=tmp_path / "said",
    )
    wait_for(
        lambda: list(out.glob("checkpoints/step-*")),
        runs=lambda: psutil.pid_exists(program.pid),
    )
    os.kill(program.pid, number)
    done = program.end()
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    if says:
        assert f"Go on with: merlin-cowclip train --resume {out}" in done.stderr
    assert not (out / "result.json").exists()
    assert Checkpoints(out / "checkpoints").last()[0].step
