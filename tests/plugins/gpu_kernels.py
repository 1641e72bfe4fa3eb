"""Which ops of a traced function a GPU can run, from the kernels that TensorFlow has registered.

The full TensorFlow wheel registers its GPU kernels without a GPU, so this runs anywhere. An op with
inputs or outputs in host memory on a GPU (sizes and shapes, often int32) is allowed only where the
tensor is a scalar or a shape: never one value per row.
"""

from __future__ import annotations

import functools
from typing import Any

from tensorflow.python.framework.kernels import get_registered_kernels_for_op

# Structure, not computation: resolved by the runtime on any device.
STRUCTURE = {"NoOp", "Const", "Placeholder", "Identity", "IdentityN", "_Arg", "_Retval"}
STRUCTURE |= {"StatefulPartitionedCall", "PartitionedCall"}
# With deterministic ops, TensorFlow 2.12 copies the variable or result of these to the host, and
# back: DoScatterOnCpu (core/kernels/resource_variable_ops.cc) and DoScatterNdOnCpu
# (core/kernels/scatter_nd_op.cc).
HOST_IF_DETERMINISTIC = {
    *(f"ResourceScatter{op}" for op in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Update")),
    *(f"ResourceScatterNd{op}" for op in ("Update", "Add", "Sub", "Min", "Max")),
    *(f"TensorScatter{op}" for op in ("Update", "Add", "Sub", "Min", "Max")),
    "ScatterNd",
}
# Their GPU kernels refuse to run where ops are deterministic (core/kernels/bincount_op.cc,
# core/kernels/sparse_tensor_dense_matmul_op.cc).
REFUSED_IF_DETERMINISTIC = {"Bincount", "DenseBincount", "SparseTensorDenseMatMul"}
HOST = {"PyFunc", "EagerPyFunc", "PyFuncStateless", "NumpyFunction", "Assert"}

AXES = {"r0", "r1", "reduction_indices"}  # arguments that name axes, however many there are


def nodes_of(function):
    """All nodes, each with its operation if it is the graph's own and not of a function in it.

    But not those of branches that end the step with an error: they run at most once.
    """
    definition = function.graph.as_graph_def()
    operations = {op.name: op for op in function.graph.get_operations()}
    for node in definition.node:
        yield node, operations.get(node.name)
    for inner in definition.library.function:
        if not any(node.op == "Assert" for node in inner.node_def):
            yield from ((node, None) for node in inner.node_def)


def what_it_waits_for(tensor):
    """The types of all ops that run before a tensor is there."""
    waiting, seen = [tensor.op], set()
    while waiting:
        op = waiting.pop()
        if op not in seen:
            seen.add(op)
            waiting += [*(before.op for before in op.inputs), *op.control_inputs]
    return {op.type for op in seen}


def matches(kernel, node):
    """Whether a registered kernel takes the node's types."""
    for constraint in kernel.constraint:
        allowed = set(constraint.allowed_values.list.type)
        attribute = node.attr[constraint.name]
        types = set(attribute.list.type) or {attribute.type}
        if allowed and not types <= allowed:
            return False
    return True


@functools.cache
def gpu_kernels_of(op: str) -> list[Any]:
    """All that a GPU can run; a common op has hundreds, which take long to parse."""
    kernels = get_registered_kernels_for_op(op).kernel
    return [kernel for kernel in kernels if kernel.device_type in ("GPU", "DEFAULT")]


def check_kernels(function, deterministic=False):
    """Every op has a GPU kernel for its types, and none wants a vector of rows in host memory.

    With `deterministic`, none goes through the host where ops are deterministic either.
    """
    missing, wide = [], []
    for node, op in nodes_of(function):
        assert node.op not in HOST | REFUSED_IF_DETERMINISTIC, node
        assert not (deterministic and node.op in HOST_IF_DETERMINISTIC), node
        if node.op in STRUCTURE:
            continue
        kernels = [kernel for kernel in gpu_kernels_of(node.op) if matches(kernel, node)]
        if not kernels:
            missing.append((node.op, {k: v.type for k, v in node.attr.items() if v.type}))
        if op is None or not all(kernel.host_memory_arg for kernel in kernels) or not kernels:
            continue  # a kernel that keeps everything on the device
        on_host = set(kernels[0].host_memory_arg) - AXES
        tensors = list(zip(op.op_def.output_arg, op.outputs, strict=False))
        if len(op.op_def.input_arg) == len(op.inputs):
            tensors += zip(op.op_def.input_arg, op.inputs, strict=True)
        for argument, tensor in tensors:
            shape = tensor.shape
            unknown = shape.rank is None or (shape.rank > 0 and shape[0] is None)
            if argument.name in on_host and unknown:
                wide.append((node.op, argument.name, shape))
    assert not missing, f"no GPU kernel for {missing}"
    assert not wide, f"one value per row in host memory: {wide}"
