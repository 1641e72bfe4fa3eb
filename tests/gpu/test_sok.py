"""SOK itself: its tables train as those of the stand-in on a CPU, and are dumped and loaded."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipSokOptimizer

from ..plugins import sok_stand_in
from ..plugins.sok_cases import BOTH, HASHED, HP, check_alike, rows_of, table_of, trained
from .conftest import without


@pytest.fixture(scope="module")
def sok(gpu):
    try:
        import sparse_operation_kit
    except Exception as error:
        without(f"sparse_operation_kit ({error})")
    return sparse_operation_kit


@pytest.mark.parametrize("kinds", [HASHED, BOTH], ids=str)
def test_trains_as_the_stand_in_on_a_cpu(sok, kinds, monkeypatch):
    weights = trained(sok, kinds)
    monkeypatch.setitem(sys.modules, "sparse_operation_kit", sok_stand_in)
    with tf.device("/CPU:0"):
        expected = trained(sok_stand_in, kinds)
    check_alike([weights], expected, tolerance=1e-4)


@pytest.mark.parametrize("kind", ["hbm", "hybrid"])
def test_tables_and_moments_are_dumped_and_loaded(sok, kind, tmp_path):
    ids = tf.constant([3, 5, 3], tf.int64)
    saved = []
    for load in (False, True):
        table = table_of(sok, "a", kind)
        optimizer = CowClipSokOptimizer(HP.replace(warmup_epochs=0.0))
        variables = [table, *optimizer.moments([table])]
        if load:
            sok.load(str(tmp_path), variables)
        else:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(sok.all2all_dense_embedding(table, ids))
            optimizer.apply_gradients([(tape.gradient(loss, table), table)], [(table, ids)])
            sok.dump(str(tmp_path), variables)
        saved.append([rows_of(sok, variable) for variable in variables])
    for before, after in zip(*saved, strict=True):
        np.testing.assert_array_equal(after, before)
