"""Notebooks run end to end, as a reader would run them, in a folder that is gone afterwards."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "workflows" / "notebooks"


@dataclass(frozen=True)
class Executed:
    """A notebook with its outputs, and the folder that it made for its files."""

    notebook: Any
    folder: Path

    @property
    def outputs(self) -> list[Any]:
        return [output for cell in self.notebook.cells for output in cell.get("outputs", [])]

    def streams(self, name: str) -> str:
        return "".join(o.text for o in self.outputs if o.output_type == "stream" and o.name == name)

    def shown(self, kind: str = "text/plain") -> list[str]:
        """What cells end with, or draw."""
        wanted = ("execute_result", "display_data")
        return [o.data[kind] for o in self.outputs if o.output_type in wanted and kind in o.data]

    def table(self, word: str) -> list[list[str]]:
        """The lines of the one data frame that has this word, cut at spaces, without its index."""
        (found,) = [text for text in self.shown() if word in text]
        return [line.split()[1:] for line in found.splitlines()[1:]]


@pytest.fixture(scope="module")
def executed(request, tmp_path_factory) -> Executed:
    """The notebook that the module names, run without a warning in any output.

    With the module's `SMALLER`, by what it stands for: numbers that what is asserted does not need.
    """
    path = NOTEBOOKS / f"{request.module.NOTEBOOK}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "no outputs in git"
    for large, small in getattr(request.module, "SMALLER", {}).items():
        (cell,) = (c for c in notebook.cells if c.cell_type == "code" and large in c.source)
        cell.source = cell.source.replace(large, small)
    home = tmp_path_factory.mktemp("notebook")
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(home)}}
    )
    client.execute(env={**os.environ, "TMPDIR": str(home)})
    (folder,) = home.glob("cowclip-*")
    done = Executed(notebook, folder)
    said = re.sub(r".*UserWarning: This fit has 15 steps .*\n.*\n", "", done.streams("stderr"))
    assert not said
    return done
