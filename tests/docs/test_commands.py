"""The commands of the guides, run in turn at smaller sizes.

Commands of a block after the comment `<!-- not run: why -->`, of containers and of several ranks
are only parsed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from merlin_cowclip.workflows.commands.main import cli, main
from tests.test_project import MAKEFILE

from .conftest import BATCH, GUIDES, ROOT, Block, blocks

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("quick_saves", "graphs_as_traced")]

# Appended to the printed options: the later one counts.
CONSTANT = ["--dense-schedule", "constant", "--embedding-schedule", "constant"]
BRIEF = ["--epochs", "1", "--seeds", "1"]
SMALLER = {
    # With constant rates a finished run can go on.
    "train": ["--batch-size", BATCH, "--epochs", "1", *CONSTANT],
    "tune": ["--mlp", "8", "--batch-size", BATCH, "--trials", "6", *BRIEF],
    "batch-size": ["--batch-sizes", "64,128", "--seeds", "1"],
}
# Programs that are not started here.
HOROVOD = "containers/horovod.sh"
CHECKED = ("docker", "horovodrun", "sbatch", "make", "IMAGE=merlin-cowclip.sif", HOROVOD)
OTHERS = ("pip", "python3", ".", "curl", "git", "cd", "dask")
PROGRAMS = ("merlin-cowclip", "python", *CHECKED, *OTHERS)


def commands(block: Block) -> list[str]:
    """The commands of a block, one a line; none where it is what a command prints."""
    if block.language:
        return []
    lines = block.text.replace("\\\n", " ").splitlines()
    told = [line for line in lines if line.split()[:1] and line.split()[0] in PROGRAMS]
    assert not told or len(told) == len([line for line in lines if line.strip()]), str(block)
    return told


def parsed(words: list[str]) -> None:
    if words[0] != "--help":
        cli.commands[words[0]].make_context(words[0], words[1:])  # an error where not


def check(line: str) -> None:
    """The files, targets, services and images of a command exist, and ours accepts its options."""
    words = shlex.split(line.removeprefix("IMAGE=merlin-cowclip.sif "), comments=True)
    services = yaml.safe_load((ROOT / "containers/compose.yaml").read_text("utf-8"))["services"]
    if words[0] == "make":
        for target in (word for word in words[1:] if "=" not in word):
            assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), line
    elif words[0] == "sbatch":
        assert (ROOT / words[-3]).is_file(), line
    elif words[0] == HOROVOD:
        assert os.access(ROOT / HOROVOD, os.X_OK)
    elif words[0] == "horovodrun":
        parsed(words[words.index("merlin-cowclip") + 1 :])
    elif words[1] == "run":
        (image,) = {service["image"] for service in services.values()} & set(words)
        given = words[words.index(image) + 1 :]
        if "merlin-cowclip" in given:  # after horovodrun
            given = given[given.index("merlin-cowclip") + 1 :]
        if given[0] not in ("bash", "tritonserver"):
            parsed(given)
    else:
        assert (ROOT / words[words.index("-f") + 1]).is_file(), line
        assert words[1] == "build" or words[-1] in services, line


def ours(page: Path) -> list[str]:
    return [line for block in blocks(page) for line in commands(block)]


@pytest.mark.filterwarnings("ignore:Initializing an NVTabular Dataset in CPU mode")
@pytest.mark.parametrize("page", [p for p in GUIDES if ours(p)], ids=lambda page: page.stem)
def test_the_commands_of_a_page(page, stand_ins, tmp_path, monkeypatch):
    home = tmp_path / "home"
    shutil.copytree(stand_ins, home)
    monkeypatch.chdir(home)
    for block in blocks(page):
        for line in commands(block):
            program, *words = shlex.split(line, comments=True)
            if program in CHECKED:
                check(line)
            elif program == "python":
                assert (ROOT / words[0]).is_file(), f"{block}: {line}"
            elif program == "merlin-cowclip":
                parsed(words)
                if not block.not_run:
                    run(words, f"{block}: {line}", stand_ins.parent / "made")


def run(words: list[str], place: str, made: Path) -> None:
    """Run a command without the outputs of an earlier one; a study or sweep runs once."""
    out = Path(words[words.index("--out") + 1]) if "--out" in words else None
    if out is not None:
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
    kept = made / "-".join(words[: {"tune": 2, "sweep": 3}.get(words[0], 0)])
    if out is not None and kept != made and kept.exists():
        shutil.copytree(kept, out)
        return
    smaller = ["--epochs", "2"] if "--resume" in words else SMALLER.get(words[0], [])
    assert main([*words, *smaller]) == 0, place
    if out is not None and kept != made:
        shutil.copytree(out, kept)


def test_blocks_that_are_not_run_have_a_reason():
    found = [block for page in GUIDES for block in blocks(page) if commands(block)]
    assert len(found) > 20
    not_run = [block for block in found if block.not_run]
    assert all(len(block.not_run.split()) > 1 for block in not_run)
    assert len(not_run) < len(found) / 3
