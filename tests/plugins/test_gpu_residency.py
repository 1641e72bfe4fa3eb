"""The update path can live on a GPU: every op of a traced update has a GPU kernel for its types.

The full TensorFlow wheel registers its GPU kernels without a GPU, so this runs anywhere. An op
whose inputs or outputs lie in host memory on a GPU (sizes and shapes, often int32) is allowed only
where the tensor is a scalar or a shape: never one value per row.
"""

from __future__ import annotations

import pytest
import tensorflow as tf
from tensorflow.python.framework.kernels import get_registered_kernels_for_op

from merlin_cowclip.plugins import CLIP_RULES, CowClipAdam, IdRecorder, Lookup, TableSpec
from merlin_cowclip.plugins._stack import ColumnSchema

# Structure, not computation: resolved by the runtime on any device.
STRUCTURE = {
    "NoOp",
    "Const",
    "Placeholder",
    "Identity",
    "IdentityN",
    "StatefulPartitionedCall",
    "PartitionedCall",
    "_Arg",
    "_Retval",
}
HOST = {"PyFunc", "EagerPyFunc", "PyFuncStateless", "NumpyFunction"}


def nodes_of(function):
    definition = function.graph.as_graph_def()
    yield from definition.node
    for inner in definition.library.function:
        yield from inner.node_def


def matches(kernel, node):
    """Whether a registered kernel takes the node's types."""
    for constraint in kernel.constraint:
        allowed = set(constraint.allowed_values.list.type)
        attribute = node.attr[constraint.name]
        types = set(attribute.list.type) or {attribute.type}
        if allowed and not types <= allowed:
            return False
    return True


def host_arguments(node):
    """What each GPU kernel for the node's types wants in host memory; `None` without a kernel."""
    kernels = [
        kernel
        for kernel in get_registered_kernels_for_op(node.op).kernel
        if kernel.device_type in ("GPU", "DEFAULT") and matches(kernel, node)
    ]
    return [set(kernel.host_memory_arg) for kernel in kernels] or None


def check(function):
    operations = {op.name: op for op in function.graph.get_operations()}
    missing, wide = [], []
    for node in nodes_of(function):
        assert node.op not in HOST, node
        if node.op in STRUCTURE:
            continue
        found = host_arguments(node)
        if found is None:
            missing.append((node.op, {k: v.type for k, v in node.attr.items() if v.type}))
            continue
        op = operations.get(node.name)
        if op is None or not all(found):
            continue  # a kernel that keeps everything on the device
        # Inputs in host memory may be sizes and shapes, never a vector with one value per row.
        definition = op.op_def
        for i, argument in enumerate(definition.input_arg):
            if argument.name in found[0] and len(definition.input_arg) == len(op.inputs):
                shape = op.inputs[i].shape
                if shape.rank is None or (shape.rank and shape[0] is None):
                    wide.append((node.op, argument.name, shape))
        for argument, output in zip(definition.output_arg, op.outputs, strict=False):
            shape = output.shape
            unknown = shape.rank is None or (shape.rank > 0 and shape[0] is None)
            if argument.name in found[0] and unknown:
                wide.append((node.op, argument.name, shape))
    assert not missing, f"no GPU kernel for {missing}"
    assert not wide, f"one value per row in host memory: {wide}"


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

    check(step.get_concrete_function())


def test_the_check_can_fail():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def strings(x):
        return tf.strings.length(x)

    with pytest.raises(AssertionError, match="no GPU kernel for"):
        check(strings.get_concrete_function())

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def python(x):
        return tf.numpy_function(lambda v: v, [x], tf.float32)

    with pytest.raises(AssertionError):
        check(python.get_concrete_function())

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def small_integers(x):
        return x + 1

    with pytest.raises(AssertionError, match="one value per row in host memory"):
        check(small_integers.get_concrete_function())
