"""What a release would break by: pinned versions, links, the citation, no data."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from merlin_cowclip.workflows.folders import package_versions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
# The Python of each, and the extras whose ranges it fits.
SETS = {
    "constraints.txt": ("3.11", ("tensorflow", "workflows", "serve", "dev", "docs")),
    "constraints-ngc.txt": ("3.10", ("workflows", "serve", "dev", "docs")),
    "constraints-newest.txt": ("3.13", ("tensorflow", "workflows", "serve")),
}


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in pins}


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(*extras: str) -> list[Requirement]:
    optional = project()["optional-dependencies"]
    named = [*project()["dependencies"], *(text for extra in extras for text in optional[extra])]
    return [one for one in map(Requirement, named) if one.name != "merlin-cowclip"]


@pytest.mark.parametrize("name", SETS)
def test_every_requirement_is_pinned_within_its_range(name):
    pins, (python, extras) = pinned(name), SETS[name]
    for requirement in requirements(*extras):
        if requirement.marker and not requirement.marker.evaluate({"python_version": python}):
            continue
        if requirement.name != "setuptools":  # part of Python's own environment, as pip is
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])


def test_the_citation_is_of_the_version_that_the_changelog_describes():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    (latest, *_) = re.findall(
        r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    assert cited["version"] == latest


def test_a_run_records_the_commit():
    git = ["git", "-C", ROOT, "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not in a checkout of git")
    version = package_versions()["merlin-cowclip"]
    assert re.fullmatch(rf"0\.1\.[^+]*\+g{done.stdout[:9]}(\.dirty)?", version)


def test_links_of_the_readme_are_absolute_and_lead_to_files():
    """As PyPI shows it."""
    here = project()["urls"]["Repository"] + "/blob/main/"
    for link in re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        assert link.startswith("https://")
        if link.startswith(here):
            assert (ROOT / link.removeprefix(here).partition("#")[0]).is_file(), link


def test_no_data_is_committed():
    """Real rows may not be, and NVTabular writes what it fits to the working folder."""
    listed = ["git", "ls-files", "*.parquet", "*.csv", "*.gz", "*.pkl", "categories"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not in a checkout of git")
    assert done.stdout.split() == []
