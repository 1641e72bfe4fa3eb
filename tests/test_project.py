"""The project's own files: pinned versions, targets, links, the citation, licences, no data."""

from __future__ import annotations

import os
import re
import shutil
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
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
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
    found = [Requirement(text) for text in named]
    return [one for one in found if one.name != "merlin-cowclip"]


@pytest.mark.parametrize("name", SETS)
def test_every_requirement_is_pinned_within_its_range(name):
    pins, (python, extras) = pinned(name), SETS[name]
    for requirement in requirements(*extras):
        if requirement.marker and not requirement.marker.evaluate({"python_version": python}):
            continue
        if requirement.name != "setuptools":  # part of Python's own environment, as pip is
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])


def test_the_versions_of_nvidias_image():
    """Of NGC merlin-tensorflow:23.12."""
    assert pinned("constraints-ngc.txt").items() >= {
        ("tensorflow", "2.12.0"),
        ("pandas", "1.5.2"),
        ("numpy", "1.22.4"),
        ("pyarrow", "10.0.1"),
        ("dask", "2023.1.1"),
        ("distributed", "2023.1.1"),
    }


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("given", "place", "constraints"),
    [
        ([], ".venv", "constraints.txt"),
        (["ENV=ngc"], ".venv-ngc", "constraints-ngc.txt"),
        (["ENV=newest"], ".venv-newest", "constraints-newest.txt"),
    ],
)
def test_make_has_an_environment_for_each_set(tmp_path, given, place, constraints):
    for name in ("Makefile", "pyproject.toml", *SETS):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(
        ["make", "--dry-run", "test", *given, "PYTHON=/a/python3"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"/a/python3 -m venv {place}\n" in done.stdout
    assert f"{place}/bin/pip install --quiet --no-deps --requirement {constraints}\n" in done.stdout
    assert f"{place}/bin/python -m pytest" in done.stdout


def test_workflows_call_targets_that_exist():
    text = (ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8")
    matrix = yaml.safe_load(text)["jobs"]["make"]["strategy"]["matrix"]
    called = [*matrix["target"], *(one["target"] for one in matrix["include"])]
    assert {"test", "test-ranks", "docs", "release-check"} <= set(called)
    assert {f"test-extended QUARTER={quarter}" for quarter in range(4)} <= set(called)
    for target in called:
        assert re.search(rf"^{target.split()[0]}:", MAKEFILE, re.MULTILINE), target


def test_the_citation_is_of_the_version_that_the_changelog_describes():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    (latest, *_) = re.findall(
        r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    assert cited["version"] == latest
    assert cited["license"] == project()["license"] == "Apache-2.0"
    assert cited["repository-code"] == project()["urls"]["Repository"]
    assert len(cited["references"][0]["authors"]) == 15


def test_a_run_records_the_commit():
    git = ["git", "-C", ROOT, "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not in a checkout of git")
    found = package_versions()["merlin-cowclip"]
    assert re.fullmatch(rf"0\.1\.[^+]*\+g{done.stdout[:9]}(\.dirty)?", found)


def test_sources_name_the_licence():
    for floor in ("plugins", "models", "workflows"):
        for path in (ROOT / floor).rglob("*.py*"):
            if path.suffix in (".py", ".pyi"):
                first, *_ = path.read_text(encoding="utf-8").splitlines()
                assert first == "# SPDX-License-Identifier: Apache-2.0", path


def test_links_of_the_project_files_exist():
    """Those of the README are absolute: PyPI shows it."""
    here = project()["urls"]["Repository"] + "/blob/main/"
    for name in ("README.md", "SECURITY.md", ".github/pull_request_template.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)]+)\)", text):
            if link.startswith(here) or not link.startswith("https://"):
                assert name != "README.md" or link.startswith(here), link
                target, _, anchor = link.removeprefix(here).partition("#")
                page = (ROOT / target).read_text(encoding="utf-8")
                titles = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
                slugs = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in titles}
                assert not anchor or anchor in slugs, (name, link)


def test_no_data_is_committed():
    """Real rows may not be, and NVTabular writes what it fits to the working folder."""
    listed = ["git", "ls-files", "*.parquet", "*.csv", "*.gz", "*.pkl", "categories"]
    done = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not in a checkout of git")
    assert done.stdout.split() == []
