"""The packages share a namespace, load on first use, and keep Python out of the update."""

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from merlin_cowclip import models, plugins, workflows

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("package", [plugins, workflows])
def test_names_load_on_first_use(package):
    assert package.__all__ == [name for name in package.__all__ if hasattr(package, name)]
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        package.nothing  # noqa: B018
    program = f"import sys, {package.__name__}; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("package", [plugins, workflows])
def test_type_checkers_know_the_names(package):
    """The literal `__all__` of the stub: they do not evaluate that of `__init__.py`."""
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    (names,) = [ast.literal_eval(one.value) for one in stub.body if isinstance(one, ast.Assign)]
    assert sorted(names) == package.__all__


def test_every_package_has_the_version():
    version = importlib.metadata.version("merlin-cowclip")
    assert {package.__version__ for package in (plugins, models, workflows)} == {version}


@pytest.mark.parametrize("floor", ["plugins", "models"])
def test_nothing_leaves_the_device(floor):
    """No Python in the update or in the model: it would copy to the host in every step."""
    for path in (ROOT / floor).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
            assert name not in {"numpy_function", "py_function", "py_func"}, path
