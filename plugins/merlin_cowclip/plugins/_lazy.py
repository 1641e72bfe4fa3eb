# SPDX-License-Identifier: Apache-2.0
"""Names of a package that load on first use (PEP 562): TensorFlow takes seconds to import."""

from __future__ import annotations

import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:  # neither is imported as Python starts, where `_compat` is
    from collections.abc import Callable, Mapping
    from typing import Any


def on_first_use(
    package: str, names: Mapping[str, str]
) -> tuple[dict[str, str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return each name's module, and the `__getattr__` and `__dir__` of a package.

    `names` has each module of `package`, with its public names. Type checkers read `__init__.pyi`.
    """
    homes = {name: f"{package}.{module}" for module in names for name in names[module].split()}

    def load(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            return version("merlin-cowclip")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return homes, load, lambda: sorted(homes)
