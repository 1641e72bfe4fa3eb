"""What ranks see at an epoch's end, by what the other rank says."""

import numpy as np
import pytest

from merlin_cowclip.plugins import metrics_alike as module
from merlin_cowclip.plugins.joining import Ranks
from merlin_cowclip.plugins.metrics_alike import MetricsAlike, metrics_alike


def test_one_rank_has_no_other():
    given = [object()]
    assert metrics_alike(given) == given


def test_a_mean_is_of_the_ranks_that_have_it(monkeypatch):
    """All lengths and types that Keras's metrics may have; NaN stays one."""
    monkeypatch.setattr(module, "ranks", lambda: Ranks(0, 2, 0, 2))
    other = {"loss": 0.5, "by class": [1.0, 3.0], "auc": float("nan")}
    monkeypatch.setattr(module, "of_all_ranks", lambda mine: [mine, other])
    logs = {"loss": np.float32(0.25), "by class": np.array([2.0, 2.0]), "auc": 0.7, "val_loss": 3}
    MetricsAlike().on_epoch_end(0, logs)
    assert logs.pop("loss") == pytest.approx(0.375)
    assert np.isnan(logs.pop("auc"))
    np.testing.assert_array_equal(logs.pop("by class"), [1.5, 2.5])
    assert logs == {"val_loss": 3.0}


def test_horovods_broadcasts_are_left_out_wherever_they_are_from(monkeypatch):
    """`horovod.keras` and `horovod.tensorflow.keras` have a class each."""
    monkeypatch.setattr(module, "ranks", lambda: Ranks(0, 2, 0, 2))
    name = "BroadcastGlobalVariablesCallback"
    kinds = [type(name, (), {"__module__": of}) for of in ("horovod.keras.callbacks", "horovod.x")]
    derived, own = type("Mine", (kinds[0],), {}), type(name, (), {"__module__": "mine"})()
    first, *kept = metrics_alike([*(kind() for kind in kinds), own, derived()])
    assert isinstance(first, MetricsAlike)
    assert kept == [own]
