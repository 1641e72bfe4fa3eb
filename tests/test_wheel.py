"""The built wheel, installed on its own and used from a folder that is not the source tree."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("plugins", "models", "workflows")

pytestmark = pytest.mark.extended


def command(*arguments, cwd: Path) -> str:
    """Run without this test's Python environment; returns stdout."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    argv = [str(argument) for argument in arguments]
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # Without isolation: the backend is here already, and nothing is downloaded.
    build = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir")
    command(*build, out, ROOT, cwd=out)
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def place(wheel, tmp_path_factory) -> Path:
    """A folder with a fresh environment `venv`, which holds the wheel and sees its dependencies."""
    place = tmp_path_factory.mktemp("elsewhere")
    command(sys.executable, "-m", "venv", "--without-pip", place / "venv", cwd=place)
    python = place / "venv/bin/python"
    (site,) = (place / "venv").glob("lib/python*/site-packages")
    command(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"),
        *("--no-deps", "--disable-pip-version-check", wheel),
        cwd=place,
    )
    # A folder named in a .pth file is searched, but .pth files in it are not followed: so the
    # dependencies are seen, and the editable install of the source tree is not.
    installed = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("\n".join(installed) + "\n")
    return place


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    expected = {
        path.relative_to(ROOT / floor).as_posix()
        for floor in FLOORS
        for path in (ROOT / floor / "merlin_cowclip").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    package = {name for name in names if name.startswith("merlin_cowclip/")}
    assert package == expected
    marks = ("__init__.py", "py.typed")  # the latter: checkers of users' code read its types
    assert {f"merlin_cowclip/{floor}/{mark}" for floor in FLOORS for mark in marks} <= package
    beside = {name for name in names - package if ".dist-info/" not in name}
    assert beside == {"merlin_cowclip.pth"}  # read as Python starts
    assert "Requires-Dist: merlin-models" in text


def test_the_installed_package_works_elsewhere(place):
    program = """
import importlib, pathlib, sys
for name in ("plugins.optimizers.cowclip", "models.networks", "workflows.training.train"):
    module = importlib.import_module(f"merlin_cowclip.{name}")
    print(pathlib.Path(module.__file__).is_relative_to(sys.prefix))
"""
    assert command(place / "venv/bin/python", "-c", program, cwd=place).split() == ["True"] * 3
    out = command(place / "venv/bin/merlin-cowclip", "--help", cwd=place)
    assert out.startswith("Usage: merlin-cowclip")
