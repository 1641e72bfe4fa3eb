"""The packages share a namespace, load on first use, and keep Python out of the update."""

import ast
import importlib.metadata
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from merlin_cowclip import models, plugins, workflows

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("plugins", "models", "workflows")


def sources(floor: str) -> list[Path]:
    found = sorted((ROOT / floor / "merlin_cowclip" / floor).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("package", [plugins, workflows])
def test_names_load_on_first_use(package):
    assert package.__all__ == [name for name in package.__all__ if hasattr(package, name)]
    assert dir(package) == sorted(package.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018
    program = f"import sys, {package.__name__}; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("package", [plugins, workflows])
def test_type_checkers_know_the_names(package):
    """The literal `__all__` of the stub: they do not evaluate that of `__init__.py`."""
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [one for one in stub.body if isinstance(one, ast.ImportFrom)]
    found = {a.name: f"{package.__name__}.{one.module}" for one in imports for a in one.names}
    assert found == package._HOME
    (names,) = [ast.literal_eval(one.value) for one in stub.body if isinstance(one, ast.Assign)]
    assert sorted(names) == package.__all__


def test_names_load_from_an_archive(tmp_path):
    """Of .pyc files: there is no source to read."""
    name = Path("merlin_cowclip", "plugins")
    (tmp_path / "tree" / name).mkdir(parents=True)
    for module in ("__init__", "_compat", "_lazy", "_checks", "_text", "scaling"):
        compiled = tmp_path / "tree" / name / f"{module}.pyc"
        py_compile.compile(str(ROOT / "plugins" / name / f"{module}.py"), str(compiled))
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path / "tree")
    program = "from merlin_cowclip import plugins as p; print(p.__file__, p.Hyperparameters().l2)"
    for path in (archive, str(tmp_path / "tree")):
        done = subprocess.run(
            [sys.executable, "-Sc", program],
            env={"PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert done.stdout.startswith(path), done.stderr


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
