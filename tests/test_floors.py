"""The packages import in one direction, share a namespace, and keep Python out of the update."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from merlin_cowclip import models, plugins, workflows

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("plugins", "models", "workflows")  # from the ground up
WINGS = ("data", "training", "serving", "study", "commands")  # each uses those before it


def sources(floor: str) -> list[Path]:
    found = sorted((ROOT / floor / "merlin_cowclip" / floor).rglob("*.py"))
    assert found
    return found


def imported(path: Path) -> set[str]:
    """Every module that a file may import, at its top or anywhere below."""
    package = ".".join(path.relative_to(ROOT).with_suffix("").parts[1:-1])
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and str(node.value).startswith("merlin_cowclip."):
            names.add(node.value)  # importlib.import_module("…")
    return names


def floors_of(names: set[str]) -> set[str]:
    parts = (name.split(".") for name in names)
    return {p[1] for p in parts if p[0] == "merlin_cowclip" and len(p) > 1}


@pytest.mark.parametrize("floor", FLOORS)
def test_no_floor_imports_from_above(floor):
    allowed = set(FLOORS[: FLOORS.index(floor) + 1])
    for path in sources(floor):
        assert floors_of(imported(path)) <= allowed, path


@pytest.mark.parametrize("wing", ["", *WINGS])
def test_no_wing_imports_from_a_later_one(wing):
    """Nor do modules next to the wings import one; public names are only for users."""
    home = ROOT / "workflows/merlin_cowclip/workflows"
    found = sorted((home / wing).rglob("*.py") if wing else home.glob("[!_]*.py"))
    assert found
    later = WINGS[WINGS.index(wing) + 1 :] if wing else WINGS
    for path in found:
        parts = (name.split(".") for name in imported(path))
        inside = {p[2] for p in parts if p[:2] == ["merlin_cowclip", "workflows"] and len(p) > 2}
        assert not inside & {*later, *workflows.__all__}, path


@pytest.mark.parametrize("package", [plugins, workflows])
def test_names_load_on_first_use(package):
    assert package.__all__ == [name for name in package.__all__ if hasattr(package, name)]
    assert dir(package) == sorted(package.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018
    program = f"import sys, {package.__name__}; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("package", [plugins, models, workflows])
def test_every_package_has_the_version(package):
    assert package.__version__ == importlib.metadata.version("merlin-cowclip")


def test_the_namespace_is_open():
    """A merlin_cowclip/__init__.py in one root would hide the other two."""
    for floor in FLOORS:
        assert [p.name for p in (ROOT / floor).iterdir() if p.suffix == ".py"] == []
        inside = [p.name for p in (ROOT / floor / "merlin_cowclip").iterdir()]
        assert [name for name in inside if name != "__pycache__"] == [floor]


@pytest.mark.parametrize("floor", ["plugins", "models"])
def test_nothing_leaves_the_device(floor):
    """No Python in the update or in the model: it would copy to the host in every step."""
    for path in sources(floor):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
            assert name not in {"numpy_function", "py_function", "py_func"}, path
