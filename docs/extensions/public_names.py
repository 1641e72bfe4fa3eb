"""A page for each public name, made from its docstring, and one for the command line.

A name is public if it is in `__all__` of `plugins`, `models` or `workflows`: none can be left out.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from sphinx.application import Sphinx

PACKAGES = ("plugins", "models", "workflows")
FOLDER = "api/names"  # in the sources, ignored by git


def package(floor: str) -> ModuleType:
    """What users import."""
    return importlib.import_module(f"merlin_cowclip.{floor}")


def homes(floor: str) -> dict[str, list[str]]:
    """The modules of a package that have public names, each with its own, in their order."""
    found: dict[str, list[str]] = {}
    for name in package(floor).__all__:
        found.setdefault(home(floor, name), []).append(name)
    return found


def home(floor: str, name: str) -> str:
    """The module that a public name is from."""
    of = getattr(package(floor), name)
    lazy = getattr(package(floor), "_HOME", {})
    if name in lazy:
        return str(lazy[name])
    if inspect.isclass(of) or inspect.isfunction(of):
        return of.__module__
    (module,) = (
        key
        for key, value in vars(package(floor)).items()
        if isinstance(value, ModuleType) and name in vars(value) and vars(value)[name] is of
    )
    return f"merlin_cowclip.{floor}.{module}"


def directive(of: Any) -> str:
    """Autodoc's, for a class, a function or a constant."""
    if inspect.isclass(of):
        return "class"
    return "function" if callable(of) else "data"


def ours(of: type) -> bool:
    """Whether a class is of this project: what it has of others is in their documentation."""
    return of.__module__.startswith("merlin_cowclip.")


def page(floor: str, name: str) -> str:
    """The source of the page of one name."""
    of = getattr(package(floor), name)
    kind = directive(of)
    lines = [name, "=" * len(name), ""]
    if kind == "data":
        lines += [f".. py:currentmodule:: {home(floor, name)}", "", f".. autodata:: {name}"]
        lines += ["   :no-value:"] if len(repr(of)) > 80 else []
    else:
        lines += [f".. py:currentmodule:: merlin_cowclip.{floor}", "", f".. auto{kind}:: {name}"]
    if kind == "class":
        foreign = [base.__name__ for base in of.__mro__ if not ours(base)]
        lines += ["   :members:", f"   :inherited-members: {','.join(foreign)}"]
        lines += ["   :show-inheritance:"]
    importing = f"from merlin_cowclip.{floor} import {name}"
    lines += ["", ".. code-block:: python", "", f"   {importing}", ""]
    return "\n".join(lines)


def first_line(docstring: str | None) -> str:
    """The sentence that a docstring begins with, without its period."""
    return (docstring or "").strip().split("\n\n")[0].replace("\n", " ").rstrip(".")


def index(floor: str) -> str:
    """The source of a package's page: its names by module, each with its first sentence."""
    title = f"merlin_cowclip.{floor}"
    lines = [title, "=" * len(title), "", first_line(package(floor).__doc__) + ".", ""]
    names: list[str] = []
    for module, own in homes(floor).items():
        heading = first_line(importlib.import_module(module).__doc__)
        lines += [heading, "-" * 200, ""]
        for name in own:
            of = getattr(package(floor), name)
            said = "" if directive(of) == "data" else first_line(inspect.getdoc(of))
            lines.append(f"- :doc:`{name} <names/{floor}.{name}>`" + (f": {said}" if said else ""))
        lines.append("")
        names += own
    lines += [".. toctree::", "   :hidden:", ""]
    lines += [f"   names/{floor}.{name}" for name in sorted(names, key=str.lower)]
    return "\n".join(lines) + "\n"


def command_line() -> str:
    """The source of the page of the commands: what each says of itself."""
    from merlin_cowclip.workflows.commands.main import cli, help_of

    lines = ["Command line", "============", ""]
    for name in cli.commands:
        said = help_of(name)
        lines += [name, "-" * len(name), "", ".. code-block:: text", ""]
        lines += [f"   {line}" if line else "" for line in said.splitlines()]
        lines.append("")
    return "\n".join(lines)


def sources() -> dict[str, str]:
    """Every page that is made here, by its path in the sources."""
    made = {f"api/{floor}.rst": index(floor) for floor in PACKAGES}
    for floor in PACKAGES:
        made |= {
            f"{FOLDER}/{floor}.{name}.rst": page(floor, name) for name in package(floor).__all__
        }
    return made | {"api/command-line.rst": command_line()}


def write(app: Sphinx) -> None:
    """Write the pages before Sphinx looks for sources; one that is as it was stays untouched."""
    made = sources()
    folder = Path(app.srcdir)
    for path in (folder / "api").rglob("*.rst"):
        if str(path.relative_to(folder)) not in made:
            path.unlink()
    for name, text in made.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True}
