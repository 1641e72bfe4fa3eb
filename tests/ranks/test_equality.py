"""N ranks with a batch of b/N each train as one process with b: weights, moments, counts."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from merlin_cowclip.workflows.training.evaluation import exact_quality

from .cases import CASES, HP, trained
from .cases import OF_RANKS as NAMES
from .launch import needs_horovod

pytestmark = [pytest.mark.slow, needs_horovod]


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, np.ndarray]]:
    """What one process has trained, once for all numbers of ranks."""
    return {}


@pytest.mark.parametrize(("ranks", "name"), [(n, name) for n in NAMES for name in NAMES[n]])
def test_ranks_train_as_one_process(results, alone, ranks, name):
    number = NAMES[ranks].index(name)
    first, *others = [
        dict(np.load(results[ranks] / f"{number}-{rank}.npz")) for rank in range(ranks)
    ]
    if name not in alone:
        alone[name] = trained(CASES[name])
    one = alone[name]
    assert first.keys() == one.keys()
    for other in others:
        assert len(other) > 10
        for key in other:
            np.testing.assert_array_equal(other[key], first[key], err_msg=key)
    np.testing.assert_array_equal(first["counts"], one["counts"])
    assert one["clipped"].sum() > 0
    weights = {k: v for k, v in one.items() if k.startswith("weight/") and v.dtype.kind == "f"}
    largest = max(np.abs(value).max() for value in weights.values())
    for key, value in weights.items():
        np.testing.assert_allclose(first[key], value, rtol=0, atol=1e-5 * largest, err_msg=key)


@pytest.mark.parametrize("ranks", NAMES)
def test_joins(results, ranks):
    """Means of gradients, sums of counts."""
    for rank in range(ranks):
        found = dict(np.load(results[ranks] / f"joined-{rank}.npz"))
        order = np.argsort(found["rows_0"])
        assert found["rows_0"][order].tolist() == [4, 7]
        means = np.array([[1 + 2, 1 + 2], [2, 2]]) / ranks
        np.testing.assert_allclose(found["rows_1"][order], means)
        assert found["rows_2"][order].tolist() == [1.0, 1.0]
        assert found["whole_0"].tolist() == [0, 1, 2]
        np.testing.assert_allclose(found["whole_1"], np.full((3, 1), 3.0))
        assert found["whole_2"].tolist() == [ranks, 0.0, 0.0]
        np.testing.assert_allclose(found["dense_0"], [np.mean(np.arange(ranks) + 1.0)])
        assert found["slices_1"].tolist() == list(range(ranks))
        mine = np.repeat(np.arange(ranks)[:, None] + 1.0, 2, axis=1) / ranks
        np.testing.assert_allclose(found["slices_0"], mine)


@pytest.mark.parametrize("ranks", NAMES)
def test_what_one_rank_refuses_all_refuse(results, ranks):
    at = ", ".join(str(rank) for rank in range(1, ranks))
    for rank in range(ranks):
        told = ast.literal_eval((results[ranks] / f"told-{rank}.txt").read_text())
        *agreed, foreseen = told[rank]["said"]
        assert agreed == [f"AgreedError: on rank {at}: it is full", "AgreedError: so", ""]
        mine = "ZeroDivisionError: seven"
        assert foreseen == (mine if rank else f"AgreedError: on rank {at}: seven")


@pytest.mark.parametrize("ranks", NAMES)
def test_learning_rates_that_differ_are_refused(results, ranks):
    """As a callback sets them that follows what its own rank has measured: weights would part."""
    for told in ast.literal_eval((results[ranks] / "told-0.txt").read_text()):
        assert "same learning rates" in told["rates"]
        assert "[0.0025 0.0025 0.0005][0.005 0.005 0.001]" in told["rates"]


@pytest.mark.parametrize("ranks", NAMES)
def test_gradients_that_are_joined_and_fits_of_other_lengths_are_refused(results, ranks):
    """On all ranks: else counts would be those of the ranks, or one wait for ever."""
    steps = ", ".join(str(3 + rank) for rank in range(ranks))
    for told in ast.literal_eval((results[ranks] / "told-0.txt").read_text()):
        tape, fit = told["use"]
        assert "joined already" in tape
        assert "DistributedGradientTape" in tape
        assert f"Received: {steps} steps per epoch" in fit


@pytest.mark.parametrize("ranks", NAMES)
def test_metrics_are_of_all_ranks_rows(results, ranks):
    random = np.random.default_rng(0)
    labels, clicks = random.integers(0, 2, 50), random.random(50).round(1).astype(np.float32)
    for told in ast.literal_eval((results[ranks] / "told-0.txt").read_text()):
        np.testing.assert_allclose(told["quality"], exact_quality(labels, clicks), rtol=1e-12)
        assert told["quality"][0] == exact_quality(labels, clicks).auc


@pytest.mark.parametrize("ranks", NAMES)
def test_rows_in_shards(results, ranks):
    found = [dict(np.load(results[ranks] / f"rows-{rank}.npz")) for rank in range(ranks)]
    assert [int(one["rows"]) for one in found] == [150_000 // ranks] * ranks
    for one in found:
        np.testing.assert_array_equal(one["read"], one["given"][one["ids"]])


def test_a_table_in_shards_begins_alike_on_any_number_of_ranks(results):
    two, three = (np.load(results[ranks] / "rows-0.npz")["whole"] for ranks in NAMES)
    np.testing.assert_array_equal(two, three)
    assert not two[[0, 2]].any(), "padding and unknown ids"
    drawn = np.delete(two, [0, 2], axis=0)
    assert len(np.unique(drawn)) > 290_000
    assert abs(drawn.mean()) < 1e-3
    assert drawn.std() == pytest.approx(0.1, rel=1e-2)


def test_what_tables_in_shards_refuse(results):
    words = (
        "all its tables must be in shards, or none",
        "reads all of it",
        "by a CowClipOptimizer",
    )
    for told in ast.literal_eval((results[2] / "told-0.txt").read_text()):
        assert len(told["shards"]) == len(words)
        for said, word in zip(told["shards"], words, strict=True):
            assert word in said


def test_one_ranks_rows_are_not_taken_for_the_table(results):
    """Each was so, without a word, or waited for ever."""
    refused: list[str] = []
    for told in _of_scripts(results):
        said = dict(told["parts"])
        assert "by a CowClipOptimizer" in said.pop("another")
        for name in ("broadcast", "saved after it"):
            assert re.search("those of '.*' on rank 1 that rank 0 has", said.pop(name))
        assert re.search("the moments 'm' of '.*' on rank 1 that rank 0 has", said.pop("moments"))
        for name in ("validation", "predict", "evaluate"):
            assert "batches 1 on rank 0, 2 on rank 1" in said.pop(name)
        for name in ("validation", "predict", "evaluate"):
            sentence = said.pop(f"unknown {name}")
            assert "number of batches is not known" in sentence
            assert "Pass steps=… or validation_steps=…" in sentence
        assert said.pop("a batch") == ""
        refused.append(said.pop("saved in a file"))
        assert len(said) == 11
        for name, sentence in said.items():
            assert "save_model(model, path)" in sentence, name
            assert "whole_tables(model)" in sentence, name
    first, second = refused
    assert "must be a folder" in first
    assert second == f"All ranks end as rank 0, which could not save the model: {first}"


def test_models_that_differ_are_refused(results):
    for told in _of_scripts(results):
        said = told["others"]
        assert "hyperparameters l2 0.0001 on rank 0, 0.0002 on rank 1" in said["l2"]
        assert "update exact on rank 0, lazy on rank 1" in said["update"]
        assert "tables 0 clipped [True, False] on rank 0" in said["clipped"]
        assert "first rows [0, 60] on rank 0, [0, 61] on rank 1" in said["rows"]
        assert "All ranks must load the same rows" in said["loaded"]


def test_fits_that_cannot_begin_as_one_are_refused(results):
    """A rank with more batches than the others waited for ever."""
    for told in _of_scripts(results):
        unknown, eager = told["others"]["unknown"], told["others"]["eager"]
        assert "Received: unknown, unknown steps per epoch. Pass steps_per_epoch=…" in unknown
        assert "Call the model on a batch" in eager
        assert "before a fit with run_eagerly=True" in eager


def test_a_loss_that_is_a_sum_is_refused(results):
    """Each of two ranks trained by half its gradient, without a word."""
    for told in _of_scripts(results):
        assert "all losses must be means" in told["others"]["sum"]


def test_a_wrong_id_on_one_rank_ends_the_step_before_the_others_make_it(results):
    """They wait for the rank, or end with it."""
    first, second = (told["wrong"] for told in _of_scripts(results))
    assert "ids must be from 0 to cardinality - 1" in second["said"]["wrong"]
    assert first["weights"] == second["weights"]
    assert first["steps"] == second["steps"] == 1


def test_loss_scaling_makes_a_step_on_all_ranks_or_on_none(results):
    """By what is infinite on one; the other made the step, or waited for ever for the clip's sums.

    Whether tables in shards are of layers in half precision does not matter.
    """
    found = [told["scaled"] for told in _of_scripts(results)]
    assert found[0]["dense"] == found[1]["dense"]
    for told in found:
        begun, *scales = told["scales"]
        assert scales == [begun / 2] * 2
        for before, skipped, made in (told["dense"], told["tables"]):
            assert before == skipped
            assert skipped != made
            assert np.isfinite(made).all()


def test_ranks_stop_save_and_read_as_one(results):
    """A callback that stops by a metric sees the mean of all; Keras's functions see the tables."""
    first, *others = (told["together"] for told in _of_scripts(results))
    assert len(first["losses"]) == 2
    for told in (first, *others):
        assert told["losses"] == first["losses"]
        assert told["apart"] <= 1e-6
        assert told["loaded"]
        assert told["read"] == [2, 2]  # of a table that was built within a graph
        assert told["steps"] == [4, 4], "the old model was loaded, while rank 0 saved the new"


def test_statistics_of_shards_are_of_all_ranks_or_refused(results):
    """Where rank 0 had whole tables its rows were taken for all, without a word."""
    first, *others = (told["together"] for told in _of_scripts(results))
    # Two epochs of two batches of 24, of which each sample has one id of each of the two fields.
    assert sum(first["occurrences"]) == 2 * 2 * len(first["losses"]) * 2 * 24
    for told in (first, *others):
        assert told["occurrences"] == first["occurrences"]
        assert told["refused"].keys() == {"total", "read", "gradient_norms"}
        for sentence in told["refused"].values():
            assert "Received: a look at them within whole_tables(model)" in sentence


def test_half_precision_is_saved_and_loaded(results):
    """Merlin made another loss scaling of it, and ended with a TypeError."""
    first, *others = (told["half"] for told in _of_scripts(results))
    assert first["found"] == ["LossScaleOptimizer", 7, pytest.approx(first["rate"])]
    assert first["steps"] == 14
    assert np.isfinite(first["weights"]).all()
    for told in others:
        assert told == first


def test_a_callback_of_one_rank_stops_all(results):
    """By a batch's loss, or at an epoch's end; the others waited for it for ever."""
    for told in _of_scripts(results):
        assert told["stopped"] == {"batch": 2, "epoch": 4}


def test_callbacks_of_a_keras_model_see_and_stop_all(results):
    """Merlin adds what averages metrics to its own models alone: the ranks' losses differed."""
    first, *others = (told["keras"] for told in _of_scripts(results))
    assert len(first["losses"]) == 4
    assert first["steps"] == 10
    assert first["val_loss"], "of a validation on rank 0 alone, for which the others waited"
    for told in others:
        assert told == first


@pytest.mark.parametrize("name", ["epoch", "batch", "built"])
def test_what_rank_0_loads_as_a_fit_begins_all_have(results, name):
    """It stayed on rank 0, and the ranks trained apart, without a word."""
    first, *others = (told["loaded"][name] for told in _of_scripts(results))
    assert first["up"] == pytest.approx(0.5 if name == "built" else 1.0, abs=0.05)
    for told in others:
        assert told == first


def test_a_warm_up_is_as_rank_0_has_it(results):
    """The step was refused: callbacks had set the learning rates, it said."""
    first, *others = (told["warmed up"] for told in _of_scripts(results))
    assert first["set"]["rate"] == pytest.approx(HP.dense_lr / 4 * 1 / 9, rel=1e-3)
    assert first["restored"]["rate"] == pytest.approx(HP.dense_lr / 4 * 2 / 9, rel=1e-3)
    assert first["restored"]["steps"] == 9
    assert first["restored at once"] == first["restored"], "the ranks were told to train one model"
    for told in others:
        assert told == first


def test_fits_of_other_epochs_are_refused(results):
    """The rank with more of them waited for ever."""
    for told in _of_scripts(results):
        said = told["epochs"]
        assert "Received: epochs 1 on rank 0, 2 on rank 1." in said["epochs"]
        assert "Received: first epoch 0 on rank 0, 2 on rank 1." in said["first"]
        assert "Received: first epoch 1 on rank 0, 0 on rank 1." in said["restored"]
        assert said["on all"] == ""


def _of_scripts(results: dict[int, Path]) -> list[dict[str, Any]]:
    told = ast.literal_eval((results[2] / "told-0.txt").read_text())
    return [one["scripts"] for one in told]
