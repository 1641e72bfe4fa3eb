"""The notebooks run end to end, as a reader would run them, without a warning in any output."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.slow
NOTEBOOKS = sorted((Path(__file__).parents[2] / "workflows" / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == ["03-plug-into-an-existing-pipeline.ipynb"]


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def executed(request, tmp_path_factory):
    notebook = nbformat.read(request.param, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "no outputs in git"
    folder = tmp_path_factory.mktemp("notebook")
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return notebook


def streams(notebook, name):
    return "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == name
    )


def test_no_chatter(executed):
    noise = streams(executed, "stderr")
    for word in ("oneDNN", "torch", "triton", "cuda", "TensorRT", "untraced", "Traceback"):
        assert word not in noise, noise


def test_plugging_in_learns_and_keeps_accuracy_at_eight_times_the_batch(executed):
    """Notebook 03: both models come near the planted optimum at both batch sizes."""
    shown = [
        output.data["text/plain"]
        for cell in executed.cells
        for output in cell.get("outputs", [])
        if output.output_type == "execute_result"
    ]
    (table,) = [text for text in shown if "best possible" in text]
    rows = [line.split()[1:] for line in table.splitlines()[1:]]
    results = pd.DataFrame(rows, columns=["model", "batch size", "test AUC", "best possible"])
    results = results.astype({"batch size": int, "test AUC": float, "best possible": float})
    assert sorted(set(results["batch size"])) == [512, 4096]
    assert sorted(set(results["model"])) == ["DCN", "DLRM"]
    assert (results["test AUC"] > 0.5 + 0.75 * (results["best possible"] - 0.5)).all(), results
    auc = results.pivot(index="model", columns="batch size", values="test AUC")
    assert (auc[4096] > auc[512] - 0.005).all(), results
    summary = streams(executed, "stdout")
    assert "clip adaptive_column, exact Adam" in summary
    assert "steps: 240 before, 270 after" in summary
