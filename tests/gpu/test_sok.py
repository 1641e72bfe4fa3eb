"""SOK itself: the stand-in has its interface, and its tables train as Keras's on a CPU."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CowClipSokOptimizer

from ..plugins import sok_stand_in
from ..plugins.sok_cases import CASES, HP, check_alike, rows_of, trained_by_keras, trained_by_sok
from .conftest import without

KINDS = ("DynamicVariable", "DistributedVariable", "LocalizedVariable")


@pytest.fixture(scope="module")
def sok(gpu):
    try:
        import sparse_operation_kit
    except Exception as error:
        without(f"sparse_operation_kit ({error})")
    return sparse_operation_kit


def names_of(function) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    "name",
    [
        "Variable",
        "lookup_sparse",
        "all2all_dense_embedding",
        "filter_variables",
        "export",
        "assign",
    ],
)
def test_the_stand_in_takes_what_sok_takes(sok, name):
    assert names_of(getattr(sok_stand_in, name)) == names_of(getattr(sok, name))


@pytest.mark.parametrize("kind", KINDS)
def test_the_stand_ins_variables_have_nothing_that_soks_have_not(sok, kind):
    theirs, ours = getattr(sok, kind), getattr(sok_stand_in, kind)
    taken = [name for name in names_of(theirs.__init__) if name in names_of(ours.__init__)]
    assert taken == names_of(ours.__init__)
    used = ("target_gpu", "num_gpus", "key_map", "sparse_read", "scatter_sub", "scatter_update")
    of_hash_tables = (
        "backend_type",
        "config_dict",
        "dimension",
        "handle_dtype",
        "key_type",
        "mode",
    )
    own = of_hash_tables if kind == "DynamicVariable" else ("global_shape", "global_gpu_id")
    assert not [name for name in (*used, *own) if not hasattr(theirs, name)]


@pytest.mark.parametrize("name", CASES)
def test_trains_as_keras_tables_on_a_cpu(sok, name):
    case = CASES[name]
    with tf.device("/CPU:0"):
        expected = trained_by_keras(case.hyperparameters)
    check_alike([trained_by_sok(case, sok)], expected, tolerance=1e-4)


@pytest.mark.parametrize("kind", ["hbm", "hybrid"])
def test_tables_and_moments_are_dumped_and_loaded(sok, kind, tmp_path):
    def begun():
        table = sok.DynamicVariable(
            dimension=4, initializer="0.5", name="t", var_type=kind, **CAPACITY[kind]
        )
        return table, CowClipSokOptimizer(HP.replace(warmup_epochs=0.0))

    def kept(table, optimizer):
        return [table, *optimizer.moments([table])]

    one, other = begun(), begun()
    ids = tf.constant([3, 5, 3], tf.int64)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(sok.all2all_dense_embedding(one[0], ids))
    one[1].apply_gradients([(tape.gradient(loss, one[0]), one[0])], [(one[0], ids)])
    sok.dump(str(tmp_path), kept(*one))
    sok.load(str(tmp_path), kept(*other))
    for before, after in zip(kept(*one), kept(*other), strict=True):
        np.testing.assert_array_equal(rows_of(sok, after), rows_of(sok, before))


CAPACITY = {"hbm": {}, "hybrid": {"init_capacity": 1024, "max_capacity": 1024}}
