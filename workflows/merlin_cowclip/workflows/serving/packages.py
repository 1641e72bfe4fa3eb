"""Which packages the pickles of a model repository need where it is served."""

from __future__ import annotations

import importlib.metadata
import pickle
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

if sys.version_info >= (3, 11):
    from importlib.metadata import packages_distributions
else:  # Python 3.10's own passes over packages without a top_level.txt, which most are
    from importlib_metadata import packages_distributions

from merlin_cowclip.workflows.errors import Notice, quoted


def needed_by(folder: Path, known: Iterable[str]) -> dict[str, str]:
    """Packages and their versions here.

    Warns of modules that are in no package: of a user's own operators and functions.

    Args:
      folder: whose pickles are loaded, and so run: they were written in this process.
      known: packages that are needed in any case.
    """
    modules: set[str] = set()
    for path in sorted(folder.rglob("*.pkl")):
        with path.open("rb") as file:
            _Unpickler(file, modules).load()
    distributions = packages_distributions()
    # A name that several packages share, as merlin, does not tell which: `known` has those.
    own = {module for module in modules if module not in distributions}
    found = {names[0] for m, names in distributions.items() if m in modules and len(names) == 1}
    loose = sorted(own - sys.stdlib_module_names - {"merlin", "merlin_cowclip", "__main__"})
    if loose:
        warnings.warn(
            f"the workflow uses modules that are in no package: {quoted(loose, brief=True)}. A "
            "server needs them where its Python finds modules",
            Notice,
            stacklevel=3,
        )
    return {
        name: importlib.metadata.version(name) for name in dict.fromkeys([*known, *sorted(found)])
    }


class _Unpickler(pickle.Unpickler):
    """Notes the outermost modules of all that it looks up."""

    def __init__(self, file: IO[bytes], modules: set[str]) -> None:
        super().__init__(file)
        self._modules = modules

    def find_class(self, module: str, name: str) -> Any:
        self._modules.add(module.partition(".")[0])
        return super().find_class(module, name)
