"""What TensorFlow's ops do to the places of elements, and to their first axis.

`sample_numbers.py` follows the ids of samples through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from merlin_cowclip.plugins._stack import tf

# Each element of what they give is made of the elements at its place.
ELEMENTWISE = {
    *("Abs", "Add", "AddN", "AddV2", "AsString", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    *("Bitcast", "Bucketize", "Pow", "RegexReplace", "StaticRegexReplace", "StringJoin", "Substr"),
    *("Ceil", "CheckNumerics", "CheckNumericsV2", "Exp", "Expm1", "Log", "Log1p", "Rint", "Sqrt"),
    *("Invert", "IsFinite", "IsInf", "IsNan", "Reciprocal", "Relu", "Rsqrt", "Sigmoid", "Tanh"),
    *("RegexFullMatch", "SquaredDifference", "StaticRegexFullMatch", "StringLength", "Xdivy"),
    *("Cast", "ClipByValue", "DivNoNan", "FloorDiv", "FloorMod", "Floor", "LeftShift"),
    *("LookupTableFind", "LookupTableFindV2", "Maximum", "Minimum", "Mod", "Mul", "Neg"),
    *("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"),
    *("LogicalAnd", "LogicalNot", "LogicalOr", "OnesLike", "ZerosLike"),
    *("RealDiv", "RightShift", "Round", "Select", "SelectV2", "Sign", "Square", "StringLower"),
    *("StringStrip", "StringToHashBucket", "StringToHashBucketFast", "StringToHashBucketStrong"),
    *("StringToNumber", "StringUpper", "Sub", "TruncateDiv", "TruncateMod"),
}
CUTTING = {"Slice", "Split", "SplitV", "StridedSlice", "Unpack"}
_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
# They take elements, or rows of them, from a tensor, or put them in another order.
PICKING: dict[str, Callable[[tf.Operation, tf.Tensor], Any]] = {
    "GatherNd": lambda op, x: tf.gather_nd(x, op.inputs[1]),
    "GatherV2": lambda op, x: tf.gather(
        x, op.inputs[1], axis=op.inputs[2], batch_dims=op.get_attr("batch_dims")
    ),
    "ReverseV2": lambda op, x: tf.reverse(x, op.inputs[1]),
    "Roll": lambda op, x: tf.roll(x, op.inputs[1], op.inputs[2]),
    "Slice": lambda op, x: tf.slice(x, op.inputs[1], op.inputs[2]),
    "Split": lambda op, x: tf.split(x, op.get_attr("num_split"), op.inputs[0]),
    "SplitV": lambda op, x: tf.split(x, op.inputs[1], op.inputs[2], op.get_attr("num_split")),
    "StridedSlice": lambda op, x: tf.strided_slice(
        x, *op.inputs[1:], **{mask: op.get_attr(mask) for mask in _MASKS}
    ),
    "Unpack": lambda op, x: tf.unstack(x, op.get_attr("num"), op.get_attr("axis")),
}


def joined_by(op: tf.Operation) -> list[tf.Tensor]:
    """What `tf.concat` or `tf.stack` was given."""
    return list(op.inputs if op.type == "Pack" else op.inputs[:-1])


def axis_of_join(op: tf.Operation) -> int | None:
    """The axis of what it gives that it joins on; `None` where only a step tells."""
    rank = op.outputs[0].shape.rank
    axis = op.get_attr("axis") if op.type == "Pack" else tf.get_static_value(op.inputs[-1])
    if rank == 1:
        return 0
    if axis is None or (axis < 0 and rank is None):
        return None
    return int(axis) % rank if rank else int(axis)


def reshape_keeps_first_axis(op: tf.Operation, tensor: tf.Tensor) -> bool:
    """Whether an op that reshapes leaves the first axis as it is, as far as the graph tells."""
    before = op.inputs[0].shape
    if not before.rank or not tensor.shape.rank:
        return not before.rank and not tensor.shape.rank
    if op.type == "ExpandDims":
        axis = tf.get_static_value(op.inputs[1])
        return axis is not None and int(axis) % tensor.shape.rank != 0
    axes: Sequence[int] = op.get_attr("squeeze_dims") if op.type == "Squeeze" else ()
    if axes:
        return all(axis % before.rank for axis in axes)
    if before[0] is not None and before[0] == tensor.shape[0]:
        return True
    return width_of(op.inputs[0]) is not None and width_of(op.inputs[0]) == width_of(tensor)


def pick_keeps_first_axis(op: tf.Operation, tensor: tf.Tensor) -> bool:
    """Whether an op that picks gives a tensor whose first axis is its input's, or rows of it."""
    if op.type == "StridedSlice":
        if op.get_attr("ellipsis_mask") & 1:
            return True
        return not (op.get_attr("new_axis_mask") | op.get_attr("shrink_axis_mask")) & 1
    if op.type == "Unpack":
        return bool(op.get_attr("axis") % op.inputs[0].shape.rank)
    if op.type == "GatherV2":
        axis = tf.get_static_value(op.inputs[2])
        if axis is None or int(axis) % op.inputs[0].shape.rank:
            return True
        return bool(op.get_attr("batch_dims")) or op.inputs[1].shape.rank != 0
    if op.type == "GatherNd":
        return op.inputs[1].shape.rank is None or op.inputs[1].shape[-1] == 1
    return True


def width_of(ids: tf.Tensor) -> int | None:
    """Ids of a sample, if samples are the first axis."""
    return ids.shape[1:].num_elements() if ids.shape.rank else 1
