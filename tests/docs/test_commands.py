"""The commands of the pages, run in turn: as printed, but for smaller sizes.

Of a block beneath `<!-- not run: why -->`, which no reader sees, it is only tried that each command
exists with these options; so are containers and ranks, which need what is not here.
"""

from __future__ import annotations

import gzip
import shlex
import shutil
from pathlib import Path

import pytest

from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.quiet import quiet_imports
from tests.test_containers import accepted, check

from .conftest import GUIDES, ROOT, Block, blocks

with quiet_imports():
    import nvtabular as nvt
    from merlin.io import Dataset
    from merlin.schema import Tags
    from nvtabular import ops

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_saves", "graphs_as_traced")]

ROWS, BATCH = 1200, "256"
# What a command is given beside what is printed: the later one counts.
BRIEF = ["--epochs", "1", "--seeds", "1"]
SMALLER = {
    "train": ["--batch-size", BATCH, "--epochs", "1"],
    "tune": ["--model", "lr", "--batch-size", BATCH, "--trials", "6", *BRIEF],
    "sweep": ["--model", "fm", "--batch-sizes", BATCH, "--jobs", "1", *BRIEF],
}
# Programs that no test of these starts; the tests of containers, ranks and environments hold them.
CHECKED = ("docker", "horovodrun", "sbatch", "make", "IMAGE=merlin-cowclip.sif")
OTHERS = ("pip", "python3", ".", "curl", "HOROVOD_WITH_TENSORFLOW=1")
PROGRAMS = ("merlin-cowclip", "python", *CHECKED, *OTHERS)


def commands(block: Block) -> list[str]:
    """The commands of a block, one a line; none where it is what a command prints."""
    if block.language:
        return []
    lines = block.text.replace("\\\n", " ").splitlines()
    told = [line for line in lines if line.split()[:1] and line.split()[0] in PROGRAMS]
    assert not told or len(told) == len([line for line in lines if line.strip()]), str(block)
    return told


def ours(page: Path) -> list[str]:
    return [line for block in blocks(page) for line in commands(block)]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory, quick_saves) -> Path:
    """A folder with all that the pages take for there: logs, prepared and adopted data, runs."""
    home = tmp_path_factory.mktemp("pages")
    write_synthetic("criteo", home / "train.txt", rows=ROWS, seed=1)
    text = (home / "train.txt").read_bytes()
    (home / "live").mkdir()
    for name in ("new.txt", "live/first.csv"):
        (home / name).write_bytes(text)
    for name in ("train.txt.gz", "day_24.csv.gz"):
        (home / name).write_bytes(gzip.compress(text))
    nvtabulars_own(home)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        small = ["--model", "lr", "--epochs", "1", "--batch-size", BATCH]
        assert main(["prepare", "criteo", "train.txt", "--out", "data"]) == 0
        assert main(["train", "data", "--out", "run", *small]) == 0
    for name, of in (("DATA", "data"), ("DIR", "data"), ("RUN", "run")):
        shutil.copytree(home / of, home / name)
    return home


def nvtabulars_own(home: Path) -> None:
    """The parquet and the workflow of a pipeline that is there already."""
    import numpy as np
    import pandas as pd

    random = np.random.default_rng(0)
    ids = {name: random.zipf(1.3, ROWS) % 60 for name in ("user", "item")}
    price, click = random.normal(5, 2, ROWS), random.integers(0, 2, ROWS)
    log = Dataset(pd.DataFrame({**ids, "price": price, "click": click}))
    fitted = list(ids) >> ops.Categorify(out_path=str(home / "fitted"))
    label = ["click"] >> ops.AddMetadata(tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
    workflow = nvt.Workflow(fitted + (["price"] >> ops.Normalize()) + label)
    workflow.fit(log)
    workflow.save(str(home / "workflow"))
    for folder in ("parquet/train", "parquet/test", "train", "valid"):
        workflow.transform(log).to_parquet(str(home / folder))


@pytest.mark.slow
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
                accepted(program, words)
                if not block.not_run:
                    run(words, f"{block}: {line}", stand_ins.parent / "made")


def run(words: list[str], place: str, made: Path) -> None:
    """Run one of our commands, where nothing of an earlier one is in its way.

    A tune, and a sweep of one study, is made once: where another page has it, its folder is copied.
    """
    out = Path(words[words.index("--out") + 1]) if "--out" in words else None
    if out is not None:
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
    kept = made / "-".join(words[: {"tune": 1, "sweep": 2}.get(words[0], 0)])
    if out is not None and kept != made and kept.exists():
        shutil.copytree(kept, out)
        return
    smaller = ["--epochs", "2"] if "--resume" in words else SMALLER.get(words[0], [])
    assert main([*words, *smaller]) == 0, place
    if out is not None and kept != made:
        shutil.copytree(out, kept)


def test_every_block_without_a_language_is_commands_or_what_they_print():
    told = [block for page in GUIDES for block in blocks(page) if commands(block)]
    assert len(told) > 25
    not_run = [block for block in told if block.not_run]
    assert all(len(block.not_run.split()) > 1 for block in not_run), "say why"
    assert len(not_run) < len(told) / 3
