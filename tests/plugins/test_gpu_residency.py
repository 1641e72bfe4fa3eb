"""The update path can live on a GPU: every op of a traced update has a GPU kernel for its types."""

from __future__ import annotations

import pytest
import tensorflow as tf

from merlin_cowclip.plugins import CLIP_RULES, CowClipAdam, IdRecorder, Lookup, TableSpec
from merlin_cowclip.plugins._stack import ColumnSchema

from .gpu_kernels import check_kernels


def spec_of(variable, recorder, offsets):
    columns = tuple(ColumnSchema(f"f{i}") for i in range(len(offsets) - 1))
    return TableSpec("t", tf.keras.layers.Layer(), lambda: variable, offsets, columns, 4, recorder)


@pytest.mark.parametrize("counting", ["repeats", "recorded"])
@pytest.mark.parametrize("update", ["exact", "lazy"])
@pytest.mark.parametrize("clip", [*CLIP_RULES, None])
def test_every_op_of_an_update_has_a_gpu_kernel(clip, update, counting):
    variable = tf.Variable(tf.random.normal((50, 4)))
    threshold = {"clip_threshold": 1.0} if clip in ("global", "field", "column") else {}
    optimizer = CowClipAdam(clip=clip, update=update, **threshold)
    optimizer._create_all_weights([variable])
    recorder = IdRecorder()
    if counting == "recorded":
        optimizer.bind_tables({spec_of(variable, recorder, (0, 20, 50)): (True, False)})

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 4], tf.float32),
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None], tf.int64),
        ]
    )
    def step(values, ids, splits):
        if counting == "recorded":
            ragged = tf.RaggedTensor.from_row_splits(ids, splits, validate=False)
            recorder.record(Lookup("list", ragged, is_list=True, padding=0))
            recorder.record(Lookup("one-hot", tf.reshape(ids, [-1, 1])))
        optimizer.apply_gradients([(tf.IndexedSlices(values, ids), variable)])

    check_kernels(step.get_concrete_function())


def test_the_check_can_fail():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def strings(x):
        return tf.strings.length(x)

    with pytest.raises(AssertionError, match="no GPU kernel for"):
        check_kernels(strings.get_concrete_function())

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def python(x):
        return tf.numpy_function(lambda v: v, [x], tf.float32)

    with pytest.raises(AssertionError):
        check_kernels(python.get_concrete_function())

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def small_integers(x):
        return x + 1

    with pytest.raises(AssertionError, match="one value per row in host memory"):
        check_kernels(small_integers.get_concrete_function())
