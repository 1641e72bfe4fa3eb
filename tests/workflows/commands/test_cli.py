"""The command: errors in one line that name the place and the remedy, and one whole run of it."""

import gzip
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.datasets import CRITEO
from merlin_cowclip.workflows.data.synthetic import write_synthetic

TOML = """
name = "toy"
label = "y"
categorical = ["user"]
continuous = ["price"]
split = { kind = "random", test = 0.5 }
"""
ROWS = [("1", "a", "1.5"), ("0", "b", "2"), ("1", "a", ""), ("0", "", "4")] * 10
CHATTER = ("oneDNN", "torch", "triton", "WARNING", "Warning", "absl", "TensorRT", "INFO", "DEBUG")


@pytest.fixture
def toml(tmp_path) -> str:
    (tmp_path / "toy.toml").write_text(TOML)
    return str(tmp_path / "toy.toml")


def log_of(folder: Path, rows=ROWS, header="y,user,price", separator=",") -> str:
    path = folder / "log.csv"
    lines = [header.replace(",", separator), *(separator.join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def refused(capsys, *arguments) -> str:
    """What a command says as it refuses: one line on stderr and nothing on stdout."""
    assert main([str(a) for a in arguments]) == 2
    out, err = capsys.readouterr()
    # A progress bar may stand before it; the message has a line of its own.
    lines = [line for line in re.split(r"[\r\n]", err) if line.strip() and "%|" not in line]
    assert len(lines) == 1, err
    assert lines[0].startswith(f"merlin-cowclip {arguments[0]}: error: ")
    assert "Traceback" not in err
    assert out == ""
    return lines[0].split("error: ", 1)[1]


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# prepare


def test_a_whole_log_is_taken(tmp_path, toml, capsys):
    """So that the refusals below are for the fault that each of them plants."""
    assert main(["prepare", toml, log_of(tmp_path), "--out", str(tmp_path / "data")]) == 0
    assert capsys.readouterr().out == (
        f"20 training and 20 test rows, 3 ids in 1 fields: {tmp_path / 'data'}\n"  # a missing one
    )


def at_line_23(value: tuple[str, str, str]) -> list[tuple[str, str, str]]:
    return [*ROWS[:21], value, *ROWS[22:]]


@pytest.mark.parametrize(
    ("log", "places", "remedy"),
    [
        pytest.param(
            {"rows": at_line_23(("2", "a", "1"))},
            ["label must be 0 or 1", "'2'", "log.csv, line 23", "'y'"],
            "Correct the row or remove it",
            id="label not 0 or 1",
        ),
        pytest.param(
            {"rows": at_line_23(("", "a", "1"))},
            ["label must be 0 or 1", "''", "log.csv, line 23", "'y'"],
            "Correct the row or remove it",
            id="label missing",
        ),
        pytest.param(
            {"rows": at_line_23(("1", "a", "12,5"))},
            ["every row must have 3 columns", "4 in", "log.csv, line 23"],
            "Correct the row or remove it",
            id="one cell too many",
        ),
        pytest.param(
            {"rows": at_line_23(("1", "a", "cheap"))},
            ["a number must be finite", "'cheap'", "log.csv, line 23", "'price'"],
            "make the column categorical",
            id="a number that is none",
        ),
        pytest.param(
            {"separator": "\t"},
            ["at least 3 columns, separated by ','", "one column in", "log.csv, line 1"],
            "Name the separator that the file uses",
            id="wrong separator",
        ),
        pytest.param(
            {"header": "y,visitor,price"},
            ["every column of data set 'toy'", "Missing: 'user'", "log.csv"],
            "which has: 'y', 'visitor', 'price'",
            id="missing column",
        ),
        pytest.param(
            {"rows": [(y, "", price) for y, _, price in ROWS]},
            ["a column of ids must hold some", "'user'"],
            "Take the column out",
            id="ids all missing",
        ),
        pytest.param(
            {"rows": [(y, user, "") for y, user, _ in ROWS]},
            ["a column of numbers must hold some", "'price'"],
            "Take the column out",
            id="numbers all missing",
        ),
        pytest.param(
            {"rows": [("0", user, price) for _, user, price in ROWS]},
            ["label must be 0 in some rows and 1 in others", "only 0", "'y'"],
            "Give more rows",
            id="one class",
        ),
        pytest.param(
            {"rows": []}, ["must not be empty", "log.csv"], "without a row", id="header only"
        ),
    ],
)
def test_prepare_refuses_a_log(tmp_path, toml, capsys, log, places, remedy):
    path = log_of(tmp_path, **log)
    before = everything(tmp_path)
    message = refused(capsys, "prepare", toml, path, "--out", tmp_path / "new" / "data")
    for text in (*places, remedy):
        assert text in message
    assert everything(tmp_path) == before  # hidden folders are found, too


def test_prepare_refuses_files(tmp_path, toml, capsys):
    log = log_of(tmp_path)
    (tmp_path / "empty.csv").touch()
    (tmp_path / "broken.csv.gz").write_bytes(gzip.compress(Path(log).read_bytes())[:-20])
    before = everything(tmp_path)
    for given, text in (
        ("nowhere.csv", "input file must exist. Received: "),
        ("empty.csv", "input file must not be empty. Received: "),
        ("no*.csv", "input pattern must match a file. Received: "),
        ("broken.csv.gz", "a .gz file must be whole. Received: "),
        (".", "input must be a file. Received the folder: "),
    ):
        path = tmp_path / given
        message = refused(capsys, "prepare", toml, path, "--out", tmp_path / "data")
        assert message.startswith(text)
        assert str(path) in message
    assert everything(tmp_path) == before


def test_prepare_refuses_a_data_set(tmp_path, toml, capsys):
    log = log_of(tmp_path)
    before = everything(tmp_path)
    out = ("--out", tmp_path / "data")
    message = refused(capsys, "prepare", "cliteo", log, *out)
    assert "one of 'avazu', 'criteo', or the path of a .toml file. Received: 'cliteo'" in message
    message = refused(capsys, "prepare", tmp_path / "other.toml", log, *out)
    assert message == f"data set file must exist. Received: {tmp_path / 'other.toml'}"
    assert everything(tmp_path) == before


def test_prepare_refuses_an_output_in_the_way(tmp_path, toml, capsys):
    (tmp_path / "data").mkdir()
    log = log_of(tmp_path)
    before = everything(tmp_path)
    message = refused(capsys, "prepare", toml, log, "--out", tmp_path / "data")
    assert message.startswith(f"output folder must not exist. Received: {tmp_path / 'data'}")
    message = refused(capsys, "prepare", toml, log, "--out", tmp_path / "x", "--seed", "-1")
    assert message == "seed must be an integer of at least 0. Received: -1"
    assert everything(tmp_path) == before


# train and evaluate


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("prepared")
    (home / "toy.toml").write_text(TOML)
    assert main(["prepare", str(home / "toy.toml"), log_of(home), "--out", str(home / "d")]) == 0
    return home / "d"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rule", "cube"], "rule must be one of none, sqrt, .*cowclip. Received: rule='cube'"),
        (["--model", "ffm"], "model must be one of lr, .*, dlrm. Received: model='ffm'"),
        (["--embedding-dim", "0"], "embedding_dim must be a positive whole .*embedding_dim=0"),
        (["--mlp", "16,0"], r"mlp must be at least one positive whole .*mlp=\(16, 0\)"),
        (
            ["--update", "eager"],
            "update must be one of exact, lazy, deferred. Received: update='eager'",
        ),
        (["--epochs", "0"], "epochs must be a positive whole number. Received: epochs=0"),
        (
            ["--batch-size", "0"],
            "batch_size must be a positive whole number of samples. Received: batch_size=0",
        ),
        (["--base-batch-size", "0"], "batch_size must be a positive number. Received: .*0"),
        (["--dense-lr", "-1"], "dense_lr must be a positive number. Received: dense_lr=-1.0"),
        (["--embedding-lr", "nan"], "embedding_lr must be a positive number. Received: .*nan"),
        (["--embedding-lr", "0"], "embedding_lr must be a positive number. Received: .*0.0"),
        (["--l2=-1e-5"], "l2 must be a number that is not negative. Received: l2=-1e-05"),
        (["--clip-ratio", "0"], "clip_ratio must be a positive number. Received: .*0.0"),
        (["--clip-floor", "inf"], "clip_floor must be a number that is not negative. .*inf"),
        (["--seed", "-1"], "seed must be a whole number from 0 to 4294967295. Received: .*-1"),
    ],
)
def test_train_refuses_an_option(prepared, tmp_path, capsys, options, message):
    found = refused(capsys, "train", prepared, "--out", tmp_path / "run", *options)
    assert re.search(message, found), found
    assert everything(tmp_path) == set()


def test_train_refuses_data_and_places(prepared, tmp_path, capsys):
    run = ("--out", tmp_path / "run")
    message = refused(capsys, "train", tmp_path / "nowhere", *run)
    assert message.startswith(f"prepared data must be a folder. Received: {tmp_path / 'nowhere'}")
    assert "merlin-cowclip prepare" in message
    half = tmp_path / "half"
    shutil.copytree(prepared, half)
    (half / "prepare.json").unlink()
    message = refused(capsys, "train", half, *run)
    assert message.startswith("prepared data must hold prepare.json, which is written last.")
    assert str(half) in message
    (tmp_path / "mine").mkdir()
    before = everything(tmp_path)
    for out, options, text in (
        ("mine", ["--batch-size", "8"], f"must not exist. Received: {tmp_path / 'mine'}."),
        ("run", ["--batch-size", "21"], f"Received: batch size 21, 20 rows in {prepared}. Choose"),
    ):
        arguments = ["train", str(prepared), "--out", str(tmp_path / out), *options]
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert text in line
    assert everything(tmp_path) == before


def test_evaluate_refuses(prepared, tmp_path, capsys):
    nowhere = tmp_path / "nowhere"
    message = refused(capsys, "evaluate", nowhere)
    assert message.startswith(f"a run must be a folder. Received: {nowhere}.")
    assert "merlin-cowclip train" in message
    message = refused(capsys, "evaluate", prepared)
    assert "a run must be a folder that train wrote. Received: " in message
    assert f"{prepared}, prepared data: the run is named first" in message


def test_an_unknown_option_is_argparses(capsys):
    with pytest.raises(SystemExit) as done:
        main(["train", "data", "--out", "run", "--optimizer", "sgd"])
    assert done.value.code == 2
    assert "unrecognized arguments: --optimizer sgd" in capsys.readouterr().err


def test_a_value_that_is_no_number_is_argparses(capsys):
    for text in ("400;400", "", "400,"):
        with pytest.raises(SystemExit) as done:
            main(["train", "data", "--out", "run", "--mlp", text])
        assert done.value.code == 2
        assert f"argument --mlp: invalid units value: '{text}'" in capsys.readouterr().err


def test_help_names_the_networks(capsys):
    from merlin_cowclip.models import MODELS

    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"{', '.join(MODELS)} (default deepfm)" in text


def test_help_does_not_wait_for_tensorflow():
    program = (
        "import sys\n"
        "from merlin_cowclip.workflows.commands.main import main\n"
        "for arguments in (['--help'], ['train', '--help'], ['prepare', 'x', 'y', '--out', 'z']):\n"
        "    try:\n"
        "        main(arguments)\n"
        "    except SystemExit as done:\n"
        "        assert done.code == 0\n"
        "slow = {'tensorflow', 'merlin', 'nvtabular', 'sklearn'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "merlin-cowclip prepare: error: data set must be one of" in done.stderr
    assert "usage: merlin-cowclip [-h] COMMAND" in done.stdout


# The real command

# Fewer fields than Criteo's: a model takes as long to save as it has inputs.
FEW = f"""
name = "few"
label = "label"
categorical = ["C1", "C2", "C3"]
continuous = ["I1", "I2"]
header = false
separator = "\\t"
columns = {json.dumps(CRITEO.columns)}
"""


def run_command(*arguments, cwd: Path) -> subprocess.CompletedProcess:
    program = Path(sys.executable).with_name("merlin-cowclip")
    return subprocess.run(
        [str(program), *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """The three commands on a synthetic log, as a user types them."""
    home = tmp_path_factory.mktemp("session")
    (home / "few.toml").write_text(FEW)
    write_synthetic("criteo", home / "train.txt.gz", rows=3_000, seed=1, cardinality=200)
    done = {
        "prepare": run_command("prepare", "few.toml", "train.txt.gz", "--out", "data", cwd=home)
    }
    options = ("--batch-size", 512, "--base-batch-size", 128, "--epochs", 2, "--mlp", "16")
    done["train"] = run_command("train", "data", "--out", "run", *options, cwd=home)
    done["evaluate"] = run_command("evaluate", "run", cwd=home)
    return home, done


def figures(line: str) -> tuple[str, str]:
    auc, loss = re.search(r"^test AUC (0\.\d{6}), log loss (\d\.\d{6})", line).groups()
    return auc, loss


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prepare", "train", "evaluate"])
def test_commands_succeed_without_chatter(session, name):
    done = session[1][name]
    assert done.returncode == 0, done.stderr
    for word in CHATTER:
        assert word not in done.stdout + done.stderr
    if name == "evaluate":
        assert done.stderr == ""


@pytest.mark.slow
def test_what_the_commands_print(session):
    home, done = session
    assert re.fullmatch(
        r"2,700 training and 300 test rows, [\d,]+ ids in 3 fields: data\n",
        done["prepare"].stdout,
    )
    out = done["train"].stdout
    table, progress = out.index("embedding_lr"), out.index("epoch 1/2")
    assert table < progress  # before the training, not after
    lines = {line.split()[0]: line.split()[1:] for line in out[:progress].splitlines()}
    network, *rest = out.splitlines()[0].split(", ")
    assert network == json.loads((home / "run" / "config.json").read_text())["model"]
    assert rest == ["rule cowclip", "exact updates"]
    assert lines["batch_size"] == ["128", "512", "x", "4"]
    assert lines["dense_lr"] == ["0.0008", "0.0016", "x", "2"]
    assert lines["embedding_lr"] == ["0.0001", "0.0001"]
    assert lines["l2"] == ["1e-05", "4e-05", "x", "4"]
    result = json.loads((home / "run" / "result.json").read_text())
    expected = f"{result['auc']:.6f}", f"{result['log_loss']:.6f}"
    assert figures(out.splitlines()[-1]) == expected
    assert out.splitlines()[-1].endswith(": run")
    (line,) = done["evaluate"].stdout.splitlines()
    assert figures(line) == expected
    assert "on 300 rows of " in line


@pytest.mark.slow
def test_the_session_leaves_nothing_beside_its_folders(session):
    home, _ = session
    assert {p.name for p in home.iterdir()} == {
        *("few.toml", "train.txt.gz", "train.txt.gz.truth.json", "data", "run")
    }


@pytest.mark.slow
def test_another_vocabulary_is_refused(session, tmp_path, capsys):
    home, _ = session
    write_synthetic("criteo", tmp_path / "other.txt", rows=1_000, seed=2, cardinality=200)
    few = str(home / "few.toml")
    assert main(["prepare", few, f"{tmp_path}/other.txt", "--out", f"{tmp_path}/data"]) == 0
    capsys.readouterr()
    message = refused(capsys, "evaluate", home / "run", tmp_path / "data")
    assert message.startswith(
        f"the data must have the vocabulary of the run. Received: {tmp_path / 'data'}, where "
    )
    assert re.search(r"where 'C\d+' differs from .* \(\d+ ids instead of \d+\)", message)
    assert f"Evaluate on the run's own data, {home / 'data'}" in message


# Real rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dataset", "file", "least"),
    [("criteo", "criteo_train.txt.gz", 0.60), ("avazu", "avazu_train.csv.gz", 0.50)],
)
def test_real_rows(real_data, tmp_path, capsys, dataset, file, least):
    data, run = tmp_path / "data", tmp_path / "run"
    assert main(["prepare", dataset, str(real_data / file), "--out", str(data)]) == 0
    options = ["--batch-size", "256", "--epochs", "3"]
    assert main(["train", str(data), "--out", str(run), *options]) == 0
    result = json.loads((run / "result.json").read_text())
    assert len(result["epochs"]) == 3
    assert result["auc"] > least
    if dataset == "criteo":
        assert len(CRITEO.categorical) == 26
        assert result["parameters"]["network"] == 430_814
    assert figures(capsys.readouterr().out.splitlines()[-1])[0] == f"{result['auc']:.6f}"
