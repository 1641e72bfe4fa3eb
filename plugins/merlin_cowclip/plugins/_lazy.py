"""Names of a package that load on first use: TensorFlow takes seconds to import."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any


def on_first_use(
    package: str, file: str
) -> tuple[dict[str, str], Callable[[str], Any], Callable[[], list[str]]]:
    """A package's names with their modules, and its ``__getattr__`` and ``__dir__`` (PEP 562).

    The names are those that `file`, its source, imports for type checkers: ``if TYPE_CHECKING``.
    """
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    (block,) = (statement for statement in tree.body if isinstance(statement, ast.If))
    imports = (statement for statement in block.body if isinstance(statement, ast.ImportFrom))
    homes = {one.name: str(found.module) for found in imports for one in found.names}

    def load(name: str) -> Any:
        if name == "__version__":
            return importlib.metadata.version("merlin-cowclip")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return homes, load, lambda: sorted(homes)
