"""The two sets of versions that the tests run in, and the ranges that users are given."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SETS = {"constraints.txt": "3.11", "constraints-ngc.txt": "3.10"}


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(package): version for package, version in pins}


def without_make() -> dict[str, str]:
    """The environment without what a make that runs these tests was told: its ENV is not theirs."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


def requirements() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = [*project["dependencies"], *extras["dev"], *extras["docs"]]
    return [Requirement(text) for text in named]


@pytest.mark.parametrize("name", SETS)
def test_every_requirement_is_pinned_within_its_range(name):
    pins = pinned(name)
    for requirement in requirements():
        if requirement.marker and not requirement.marker.evaluate({"python_version": SETS[name]}):
            continue
        if requirement.name != "setuptools":  # part of Python's own environment, as pip is
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])


def test_the_containers_versions():
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
    ("given", "place", "constraints", "python"),
    [
        ([], ".venv", "constraints.txt", "python3.11"),
        (["ENV=ngc"], ".venv-ngc", "constraints-ngc.txt", "python3.10"),
    ],
)
def test_make_has_an_environment_for_each(tmp_path, given, place, constraints, python):
    """What `make test` would do where nothing is installed yet, by its own account."""
    for name in ("Makefile", "pyproject.toml", *SETS):
        shutil.copy(ROOT / name, tmp_path)
    call = ["make", "--dry-run", "test", *given, f"PYTHON=/a/{python}"]
    done = subprocess.run(
        call, cwd=tmp_path, env=without_make(), capture_output=True, text=True, check=True
    )
    assert f"/a/{python} -m venv {place}\n" in done.stdout
    assert f"{place}/bin/pip install --quiet --constraint {constraints} " in done.stdout
    assert f"{place}/bin/python -m pytest" in done.stdout
    assert set(re.findall(r"\S+(?=/bin/)", done.stdout)) == {place}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_refuses_another_environment():
    done = subprocess.run(
        ["make", "--dry-run", "test", "ENV=conda"],
        cwd=ROOT,
        env=without_make(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "ENV must be ngc or left out. Received: ENV=conda" in done.stderr
