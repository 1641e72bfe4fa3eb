"""The forward pass and its gradient can live on a GPU, and wait for no answer of the host."""

from __future__ import annotations

import pytest
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.plugins._tensorflow import Schema

from ..plugins.gpu_kernels import check_kernels, what_it_waits_for
from .embeddings import column

pytestmark = pytest.mark.extended

SCHEMA = Schema([column("user"), column("item"), column("genres", is_list=True)])
ONE_HOT = tf.TensorSpec([None, 1], tf.int64)
LISTS = {
    "ragged": tf.RaggedTensorSpec([None, None], tf.int64, ragged_rank=1),
    "ragged b×n×1, int32 splits": tf.RaggedTensorSpec(
        [None, None, 1], tf.int64, ragged_rank=1, row_splits_dtype=tf.int32
    ),
    "padded": tf.TensorSpec([None, None], tf.int64),
}


def traced(lists, whole, compute, **options):
    """A traced step that looks up and differentiates; its tensors; and the recorded rows."""
    layer = FusedEmbeddings(SCHEMA, 4, **options)
    layer.build({})
    (spec,) = layer.table_specs()
    spec.reads_value = whole
    tensors, recorded = [], []

    @tf.function(input_signature=[ONE_HOT, ONE_HOT, LISTS[lists]])
    def step(user, item, genres):
        with tf.GradientTape() as tape:
            found = compute(layer, {"user": user, "item": item, "genres": genres})
            loss = tf.reduce_sum(found**2)
        gradient = tape.gradient(loss, layer.table)
        checks = [lookup.check for lookup in spec.recorder.lookups()]
        # Not the function's own outputs, which wait for all that it does.
        tensors.extend([found, gradient.values, gradient.indices])
        recorded.extend(checks)
        return tensors, recorded

    return step.get_concrete_function(), tensors, recorded


def called(layer, inputs):
    return layer(inputs)


def looked_up(layer, inputs):
    return layer.lookup("user", inputs["user"]) + layer.lookup("genres", inputs["genres"])


@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize(("compute", "whole"), [(called, True), (called, False), (looked_up, True)])
def test_every_op_of_a_lookup_has_a_gpu_kernel(compute, whole, lists):
    check_kernels(traced(lists, whole, compute)[0])


@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("compute", [called, looked_up])
def test_rows_do_not_wait_for_the_check_and_the_update_does(compute, lists):
    _, tensors, recorded = traced(lists, True, compute)
    for tensor in tensors:
        assert not {"If", "StatelessIf", "Assert"} & what_it_waits_for(tensor)
    waiting = [tensor for tensor in recorded if "If" in what_it_waits_for(tensor)]
    assert len(waiting) >= 2
