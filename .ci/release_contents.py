"""Whether dist/ holds one wheel and one source archive, with what is tracked and nothing else."""

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

FLOORS = "plugins", "models", "workflows"
BESIDE = "LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"


def main(dist: Path) -> None:
    """End with the first thing that is not so."""
    (wheel,), (archive,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    version = wheel.name.split("-")[1]
    assert archive.name == f"merlin_cowclip-{version}.tar.gz", (wheel.name, archive.name)
    cited = re.search(r"^version: (.+)$", Path("CITATION.cff").read_text(encoding="utf-8"), re.M)[1]
    assert f"## {cited}" in Path("CHANGELOG.md").read_text(encoding="utf-8"), cited
    if "dev" not in version:  # of a tag
        assert version == cited, f"CITATION.cff is of {cited}, the tag of {version}"
    git = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True)
    roots = tuple(f"{floor}/merlin_cowclip" for floor in FLOORS)
    ours = {name for name in git.stdout.splitlines() if name.startswith(roots)}
    with zipfile.ZipFile(wheel) as held:
        found = {name for name in held.namelist() if ".dist-info/" not in name}
    compare("the wheel", found, {name.partition("/")[2] for name in ours})
    with tarfile.open(archive) as held:
        names = {member.name.partition("/")[2] for member in held if member.isfile()}
    compare("the source archive", {name for name in names if name.startswith(roots)}, ours)
    assert names >= set(BESIDE), f"the source archive lacks {set(BESIDE) - names}"
    assert not [name for name in names if name.startswith((".ci/", ".github/"))]
    print(f"{wheel.name}, {archive.name}: {len(found)} files of the package, all of them tracked")


def compare(what: str, found: set[str], wanted: set[str]) -> None:
    """Refuse a difference."""
    lacks, more = sorted(wanted - found)[:5], sorted(found - wanted)[:5]
    assert found == wanted, f"{what} lacks {lacks}, and has {more}"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
