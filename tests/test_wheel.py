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
    done = subprocess.run(
        [str(a) for a in arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    # Without isolation: the backend is here already, and nothing is downloaded.
    command(
        sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, cwd=out
    )
    (found,) = out.glob("*.whl")
    return found


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
    assert "Requires-Python: <3.14,>=3.10" in text
    assert "Requires-Dist: merlin-models" in text


def test_the_installed_package_works_elsewhere(place):
    program = """
import importlib, pathlib, sys
names = ["plugins.optimizers.cowclip", "models.networks"]
names += ["workflows.training.train", "workflows.data.prepare.pipeline"]
for name in names:
    module = importlib.import_module(f"merlin_cowclip.{name}")
    print(pathlib.Path(module.__file__).is_relative_to(sys.prefix))
from merlin_cowclip.plugins import clip_by_adaptive_column_norm
gradients, rows = [[3.0, 4.0], [0.3, 0.4]], [[0.6, 0.8], [0.0, 0.0]]
import tensorflow as tf
clipped = clip_by_adaptive_column_norm(
    tf.constant(gradients), tf.constant(rows), tf.constant([2.0, 1.0]), ratio=1.0, floor=0.25
)
print([[round(x, 4) for x in row] for row in clipped.numpy().tolist()])
"""
    # Norms 5 and 0.5; bounds 2·max(1, 0.25) and 1·max(0, 0.25).
    assert command(place / "venv/bin/python", "-c", program, cwd=place).splitlines() == [
        *["True"] * 4,
        "[[1.2, 1.6], [0.15, 0.2]]",
    ]


def test_the_installed_command(place):
    out = command(place / "venv/bin/merlin-cowclip", "--help", cwd=place)
    assert out.startswith("Usage: merlin-cowclip")
    assert "prepare" in out
