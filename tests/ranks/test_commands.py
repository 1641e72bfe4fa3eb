"""`horovodrun -np 2 merlin-cowclip train`: as in one process, and what is refused."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from merlin_cowclip.models.ctr_block import embeddings_of
from merlin_cowclip.plugins.distributed import horovod
from merlin_cowclip.plugins.distributed.horovod import Ranks
from merlin_cowclip.workflows import Loader, Run
from merlin_cowclip.workflows.commands.main import main
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import AgreedError, UserError
from merlin_cowclip.workflows.training import ranks as ranks_of_runs
from merlin_cowclip.workflows.training.checkpoint import Checkpoints
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.evaluation import evaluate

from .conftest import COMMAND, OPTIONS, assert_alike, prepared
from .launch import needs_horovod, on_ranks


@needs_horovod
def test_a_run_of_two_ranks_is_that_of_one_process(data, one, tmp_path):
    ended = on_ranks(2, [*COMMAND, "train", data, "--out", tmp_path / "two", *OPTIONS])
    assert ended.code == 0, ended
    last = [line for line in ended.out.splitlines() if "samples/s" in line and " AUC" in line]
    spoken = ["".join(re.findall(r"\[(\d)/3\] ", line)) for line in last]
    assert spoken == ["1", "2", "3", ""], "one rank speaks"
    two = Run.open(tmp_path / "two")
    assert two.result["config"]["ranks"] == 2
    assert_alike(two, one)
    for name in ("metrics.csv", "fields.csv"):
        lines = [_numbers(run.path / name) for run in (one, two)]
        assert len(lines[0]) == len(lines[1]) > 0
        for ours, theirs in zip(*lines, strict=True):
            assert theirs == pytest.approx(ours, rel=1e-4)
    assert len(list((two.path / "logs").iterdir())) == 1
    assert Checkpoints(two.path / "checkpoints").steps()[-2:] == [14, 21]


@needs_horovod
@pytest.mark.extended
def test_a_warm_start_on_two_ranks_is_that_of_one_process(data, tmp_path):
    """With the moments of the first run."""
    constant = ["--dense-schedule", "constant", "--embedding-schedule", "constant"]
    argv = ["train", data, "--out", tmp_path / "base", *OPTIONS, *constant]
    assert main([str(word) for word in argv]) == 0
    argv = ["train", data, "--warm-start", tmp_path / "base", "--keep-optimizer", "--out"]
    assert main([str(word) for word in (*argv, tmp_path / "one")]) == 0
    ended = on_ranks(2, [*COMMAND, *argv, tmp_path / "two"])
    assert ended.code == 0, ended
    assert_alike(Run.open(tmp_path / "two"), Run.open(tmp_path / "one"))


@needs_horovod
def test_a_run_with_tables_in_shards_is_like_any_other(data, one, in_shards):
    run, prepared_data = Run.open(in_shards), PreparedData.open(data)
    assert run.result["config"]["tables"] == "sharded"
    model = run.model()
    rows = sum(prepared_data.cardinalities.values())
    tables = [layer.table.shape.as_list() for layer in embeddings_of(model).values()]
    assert tables == [[rows, 3], [rows, 1]]
    quality = evaluate(model, Loader(prepared_data, "test", batch_size=20))
    for key in ("auc", "log_loss", "calibration"):
        assert getattr(quality, key) == pytest.approx(run.result[key], rel=1e-6)
    of_fields = [_numbers(run.path / "fields.csv") for run in (one, run)]
    ids = [[line["ids_per_batch"] for line in lines] for lines in of_fields]
    assert ids[0] == ids[1]


def _numbers(path: Path) -> list[dict[str, float]]:
    times = ("seconds", "samples_per_second", "table", "field")
    with path.open(newline="") as file:
        return [
            {key: float(value) for key, value in row.items() if key not in times and value}
            for row in csv.DictReader(file)
        ]


@needs_horovod
def test_ranks_with_other_data_are_refused_once(tmp_path):
    for rank in range(2):
        prepared(tmp_path, seed=rank)
    before = {path for path in tmp_path.rglob("*")}
    argv = ["train", f"{tmp_path}/data$HOROVOD_RANK", "--batch-size 18", f"--out {tmp_path}/run"]
    ended = on_ranks(2, ["sh", "-c", f"exec {' '.join([*COMMAND, *argv])}"])
    (sentence,) = ended.said()
    assert "error: all ranks must have the same data, configuration and versions" in sentence
    assert "exit with status code 2" in ended.out + ended.err
    assert {path for path in tmp_path.rglob("*")} == before


@pytest.mark.quick
def test_deferred_updates_are_refused(monkeypatch):
    monkeypatch.setattr(ranks_of_runs, "rank_info", lambda: Ranks(0, 2, 0, 2))
    with pytest.raises(UserError, match="on several ranks has no update='deferred' yet"):
        ranks_of_runs.check_offered(TrainConfig(rule="none", batch_size=18, update="deferred"))


@pytest.mark.quick
def test_ranks_of_other_versions_are_refused(monkeypatch):
    own = {key: key for key in ranks_of_runs._ALIKE} | {"versions": {"numpy": "1.23.5", "tf": "2"}}
    theirs = {**own, "versions": {"numpy": "1.24.0", "tf": "2"}}
    monkeypatch.setattr(ranks_of_runs, "rank_info", lambda: Ranks(0, 2, 0, 2))
    monkeypatch.setattr(horovod, "all_gather_object", lambda value: [value, theirs])
    words = "same data, .* Received: versions numpy 1.23.5 on rank 0, 1.24.0 on rank 1"
    with pytest.raises(AgreedError, match=words):
        ranks_of_runs.check_alike(own)
    monkeypatch.setattr(horovod, "all_gather_object", lambda value: [value, dict(value)])
    ranks_of_runs.check_alike(own)


@pytest.mark.quick
def test_ranks_without_horovod_are_refused(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    ranks_of_runs.joined.cache_clear()
    try:
        assert main(["train", str(data), "--out", str(tmp_path / "run")]) == 2
    finally:
        ranks_of_runs.joined.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 processes" in line
    assert "containers/horovod.sh" in line
