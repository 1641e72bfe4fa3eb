"""The commands of the guides, run in turn at smaller sizes.

Commands of a block after the comment `<!-- not run: why -->`, of containers and of several ranks
are only parsed.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from merlin_cowclip.workflows.commands.main import cli, main

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
CHECKED = ("docker", "horovodrun", "sbatch", "make", "IMAGE=merlin-cowclip.sif")
OTHERS = ("pip", "python3", ".", "curl", "git", "cd", "dask", "containers/horovod.sh")
PROGRAMS = ("merlin-cowclip", "python", *CHECKED, *OTHERS)


def commands(block: Block) -> list[str]:
    """The commands of a block, one a line."""
    if block.language != "sh":
        return []
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.split()[:1] and line.split()[0] in PROGRAMS]


def parsed(words: list[str]) -> None:
    if words[0] != "--help":
        cli.commands[words[0]].make_context(words[0], words[1:])  # an error where not


def check(words: list[str], line: str) -> None:
    """The files, targets and services of a command exist, and ours accepts its options."""
    services = yaml.safe_load((ROOT / "containers/compose.yaml").read_text("utf-8"))["services"]
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for target in (word for word in words[1:] if "=" not in word):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
    elif words[0] == "sbatch":
        assert (ROOT / words[-3]).is_file(), line
    elif "merlin-cowclip" in words:  # in a container, or after horovodrun
        parsed(words[words.index("merlin-cowclip") + 1 :])
    elif "-f" in words:
        assert (ROOT / words[words.index("-f") + 1]).is_file(), line
        assert words[1] == "build" or words[-1] in services, line


def ours(page: Path) -> list[str]:
    return [line for block in blocks(page) for line in commands(block)]


@pytest.mark.filterwarnings("ignore:Initializing an NVTabular Dataset in CPU mode")
@pytest.mark.parametrize("page", [p for p in GUIDES if ours(p)], ids=lambda page: page.stem)
def test_the_commands_of_a_page(page, assumed, tmp_path, monkeypatch):
    home = tmp_path / "home"
    shutil.copytree(assumed, home)
    monkeypatch.chdir(home)
    for block in blocks(page):
        for line in commands(block):
            program, *words = shlex.split(line, comments=True)
            if program in CHECKED:
                check([program, *words], line)
            elif program == "python":
                assert (ROOT / words[0]).is_file(), f"{block}: {line}"
            elif program == "merlin-cowclip":
                parsed(words)
                if not block.not_run:
                    run(words, f"{block}: {line}", assumed.parent / "results")


def run(words: list[str], place: str, results: Path) -> None:
    """Run a command without the outputs of an earlier one; a study or sweep runs once."""
    out = Path(words[words.index("--out") + 1]) if "--out" in words else None
    if out is not None:
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
    kept = results / "-".join(words[: {"tune": 2, "sweep": 3}.get(words[0], 0)])
    if out is not None and kept != results and kept.exists():
        shutil.copytree(kept, out)
        return
    smaller = ["--epochs", "2"] if "--resume" in words else SMALLER.get(words[0], [])
    assert main([*words, *smaller]) == 0, place
    if out is not None and kept != results:
        shutil.copytree(out, kept)
