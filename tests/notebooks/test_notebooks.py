"""Each notebook runs end to end, and what it shows is compared with pandas and scikit-learn.

A check is code that runs in the notebook's kernel after its last cell.
"""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.extended
NOTEBOOKS = Path(__file__).parents[2] / "workflows" / "notebooks"

RARE_IDS = """
parts = {part: pd.read_parquet(data.path / part) for part in ("train", "valid", "test")}
in_train = parts["train"].C3.value_counts()
held_out = pd.concat([parts["valid"], parts["test"]]).C3.value_counts()
c3 = data.counts("C3").set_index("id")
assert c3["count"].loc[in_train.index].tolist() == in_train.tolist()
known = c3[c3.raw.notna()]
total = known["count"] + held_out.reindex(known.index, fill_value=0)
assert total.tolist() == raw.C3.value_counts()[known.raw].tolist()

rare = (in_train / len(parts["train"]) < 1 / 4096).mean()
(line,) = (line for line in lines if line.startswith("C3 "))
assert line.split()[-2] == f"{100 * rare:.1f}"

for k, table_rows, unknown in thresholds:
    ids, rows = 0, 0
    for field in CRITEO.categorical:
        counts_of_field = parts["train"][field].value_counts()
        own = counts_of_field.index[(counts_of_field >= k) & (counts_of_field.index > 2)]
        ids += 3 + len(own)  # padding, missing, unknown
        rows += (~parts["test"][field].isin([1, *own])).sum()
    assert table_rows == ids
    assert unknown == round(100 * rows / (26 * len(parts["test"])), 2)

bounds = counts * np.maximum(0.01 * np.linalg.norm(embeddings, axis=1), 3.162e-5)
norms = np.minimum(bounds, np.linalg.norm(gradients, axis=1))
np.testing.assert_allclose(np.linalg.norm(clipped, axis=1), norms, rtol=1e-4)
"""
RESUME = """
from sklearn.metrics import roc_auc_score
from merlin_cowclip.workflows import Loader, predict

assert resumed.path != large.path
assert all(map(np.array_equal, weights, uninterrupted))
assert resumed.result["auc"] == large.result["auc"]
labels, probabilities = predict(large.model(), Loader(data, "test", batch_size=8192))
assert abs(roc_auc_score(labels, probabilities) - large.result["auc"]) < 1e-12
assert small.result["auc"] > 0.5 + 0.75 * (truth.best_auc - 0.5)
assert large.result["auc"] > max(small.result["auc"] - 0.02, unscaled.result["auc"] + 0.01)

assert abs(scaled["sqrt_decay"].embedding_lr / TUNED["embedding_lr"] - 8**0.5) < 1e-12
assert abs(scaled["cowclip"].l2 / TUNED["l2"] - 8) < 1e-12
assert scaled["cowclip"].embedding_lr == TUNED["embedding_lr"]
"""
MERLIN = """
import json

assert auc(again) == auc(model)
assert int(again.optimizer.iterations) == EPOCHS * -(-ROWS // LARGE)
best = json.loads((folder / "log.csv.truth.json").read_text())["best_auc"]
aucs = results["test AUC"]
assert aucs.min() > 0.5 + 0.5 * (best - 0.5)
assert aucs.max() < best + 0.01
assert means["Adam", LARGE] < means["Adam", SMALL]
"""
TUNE = """
import json

by_trial = {one["number"]: one["repeats"].values() for one in tuned.result["table"]}
means = {number: sum(aucs) / len(aucs) for number, aucs in by_trial.items()}
winner = max(means, key=means.get)
assert tuned.result["winner"] == winner
(trial,) = (one for one in tuned.result["trials"] if one["number"] == winner)
assert tuned.train_config().hyperparameters.dense_lr == trial["params"]["dense_lr"]
assert 0.5 + 0.75 * (truth.best_auc - 0.5) < run.result["auc"] < truth.best_auc + 0.01

runs = [json.loads(path.read_text()) for path in folder.glob("sizes/runs/*/result.json")]
assert len(runs) == 2 * len(sizes)
for one in found["sizes"]:
    aucs = [run["auc"] for run in runs if run["config"]["batch_size"] == one["batch_size"]]
    assert abs(one["auc"][0] - sum(aucs) / 2) < 1e-12
assert len(plots) == page.count("<svg") == 2
"""
EXPORT = """
from sklearn.metrics import roc_auc_score

assert len(scores) == len(served) == 5000
np.testing.assert_allclose(served, scores.probability, rtol=0, atol=1e-6)
np.testing.assert_allclose(answer[0], scores.probability[:2], rtol=0, atol=1e-6)
assert scores.label.tolist() == [int(line.split(",")[1]) for line in lines[-5000:]]
assert roc_auc_score(scores.label, served) > 0.65
file = folder / "changed.csv"
changed.assign(click="0")[header.strip().split(",")].to_csv(file, index=False)
predict_logs(run, [file], folder / "changed.parquet", progress=False)
(expected,) = pd.read_parquet(folder / "changed.parquet").probability
assert abs(repository.predict(changed)[0] - expected) < 1e-6
assert abs(expected - served[0]) > 1e-4
"""
CHECKS = {
    "01-data-and-rare-ids": RARE_IDS,
    "02-train-scale-resume": RESUME,
    "03-your-merlin-model": MERLIN,
    "04-tune-and-batch-size": TUNE,
    "05-export-and-triton": EXPORT,
}


def test_every_notebook_has_a_check():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == [*CHECKS]


@pytest.mark.parametrize("name", CHECKS)
def test_a_notebook(name, tmp_path, monkeypatch):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "no outputs in git"
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[name]))
    monkeypatch.delenv("COWCLIP_REAL_DATA", raising=False)  # 03 runs on synthetic data
    client = NotebookClient(notebook, timeout=900, startup_timeout=900)
    client.execute(cwd=str(tmp_path), env={**os.environ, "TMPDIR": str(tmp_path)})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    warned = [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"]
    assert not warned
    assert any("image/svg+xml" in output.get("data", {}) for output in outputs)
