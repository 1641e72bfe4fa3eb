"""Whose ids a graph's lookup reads, where they were flattened, joined or repeated before it.

A sample counts once for an id, however often it holds it. As long as samples are the first axis of
ids, that is plain; where the ids were put in another shape, the numbers of their samples are put in
that shape by the same ops. What an op does to the first axis while it is the samples' makes other
samples: of rows repeated, joined or picked, each is one.

Nothing is added to a graph until somebody asks for the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.same_ids import KEEPING, UNIQUE, Expressions, before_unique, op_of

# Each element of what they give is made of the elements at its place.
_ELEMENTWISE = {
    *("Abs", "Add", "AddN", "AddV2", "AsString", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    *("Bucketize", "Pow", "RegexReplace", "StaticRegexReplace", "StringJoin", "Substr"),
    *("Ceil", "CheckNumerics", "CheckNumericsV2", "Log", "Log1p", "Rint", "Sqrt"),
    *("Cast", "ClipByValue", "DivNoNan", "FloorDiv", "FloorMod", "Floor", "LeftShift"),
    *("LookupTableFind", "LookupTableFindV2", "Maximum", "Minimum", "Mod", "Mul", "Neg"),
    *("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"),
    *("LogicalAnd", "LogicalNot", "LogicalOr", "OnesLike", "ZerosLike"),
    *("RealDiv", "RightShift", "Round", "Select", "SelectV2", "Sign", "Square", "StringLower"),
    *("StringStrip", "StringToHashBucket", "StringToHashBucketFast", "StringToHashBucketStrong"),
    *("StringToNumber", "StringUpper", "Sub", "TruncateDiv", "TruncateMod"),
}
_CUTTING = {"Slice", "Split", "SplitV", "StridedSlice", "Unpack"}
_MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
# They take elements, or rows of them, from a tensor, or put them in another order.
_PICKING: dict[str, Callable[[tf.Operation, tf.Tensor], Any]] = {
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
_FEWER = 100  # ops in a row that are looked into: by recursion, of some frames of Python each


@dataclass(frozen=True, eq=False)
class Fed:
    """Ids that a table looks up.

    Attributes:
      ids: as they were before they were made unique.
      samples: makes the number of each one's sample, int64, in the shape of the ids; `None` where
        samples are their first axis, or nobody knows better.
    """

    ids: Any
    samples: Callable[[], tf.Tensor] | None = None


@tf.autograph.experimental.do_not_convert
def as_fed(ids: tf.Tensor, of: Expressions) -> list[Fed]:
    """The ids that a graph's lookup reads, and whose they are.

    Those of several features that were stacked on axis 0, F×b, are the lookups of F features, and
    those that were joined on it are a lookup of each part; but not the same ids, which are there
    twice, and not what was made unique then.
    """
    return _fed(ids, _Walk(of))


@tf.autograph.experimental.do_not_convert
def samples_of_ids(ids: Any) -> Callable[[], tf.Tensor] | None:
    """Makes the number of each id's sample, as in `Fed`; `None` also eagerly, and of no tensor."""
    if tf.executing_eagerly() or not isinstance(ids, tf.Tensor):
        return None
    found = _Walk(Expressions()).samples_in(ids)
    return None if found.first else lambda: found.numbers()[0]


def _fed(ids: tf.Tensor, walk: _Walk) -> list[Fed]:
    given, ids = ids, before_unique(ids, walk.of)
    parts = _parts(ids, walk) if ids is given else []
    if len({walk.of.ids(part) for part in parts}) == len(parts) > 0:
        return [fed for part in parts for fed in _fed(part, walk)]
    found = walk.samples_in(ids)
    return [Fed(ids, None if found.first else lambda: found.numbers()[0])]


def _parts(ids: tf.Tensor, walk: _Walk) -> list[tf.Tensor]:
    """What was joined on axis 0 and is a lookup of its own each."""
    joined = walk.of.stripped(ids)
    op = op_of(joined)
    if op is None or op.type not in ("ConcatV2", "Pack") or _axis_of_join(op) != 0:
        return []
    parts = _joined_by(op)
    if op.type == "Pack" and (
        joined.shape.rank == 1 or all(_is_one_sample(p, walk) for p in parts)
    ):
        return []
    return parts


def _is_one_sample(part: tf.Tensor, walk: _Walk) -> bool:
    """Whether it is an element of a tensor's first axis, as `x[i]` and those of `tf.unstack(x)`."""
    op = op_of(walk.of.stripped(part))
    if op is None or op.type not in ("StridedSlice", "Unpack"):
        return False
    return not _keeps_first(op, part)


@dataclass(frozen=True, eq=False)
class _Samples:
    """Where the samples are in a tensor of ids.

    Attributes:
      first: whether they are its first axis; else the numbers tell.
      numbers: makes the number of each id's sample, and how many numbers there are: they count once
        ids are put in a shape that has no axis of samples.
      made: whether there are more samples than the ids' first ones: repeated, or of several joined.
      axis: which axis the numbers are of, where the first one is only taken for the samples' as
        long as it is there: of ids that were transposed. None where nobody knows: of any shape
        that they have, the first axis is then taken for the samples'.
    """

    first: bool
    numbers: Callable[[], tuple[tf.Tensor, tf.Tensor]]
    made: bool = False
    axis: int | None = 0


class _Walk:
    """Looks up what the ids of a graph were made from, each tensor once."""

    def __init__(self, of: Expressions) -> None:
        self.of = of
        self._known: dict[Any, _Samples] = {}
        self._depth = 0

    def samples_in(self, tensor: tf.Tensor) -> _Samples:
        """Where they are in it; on its first axis where nothing tells."""
        tensor = self.of.outside(tensor)
        if tensor.ref() not in self._known:
            self._depth += 1
            found = self._told_by_op(tensor) if self._depth < _FEWER else None
            self._depth -= 1
            self._known[tensor.ref()] = found or _on_first_axis(tensor)
        return self._known[tensor.ref()]

    def _told_by_op(self, tensor: tf.Tensor) -> _Samples | None:
        """What its op makes of the samples; `None` if it does not tell."""
        op = op_of(tensor)
        if op is None or tensor.shape.rank is None or not op.inputs:
            return None
        if op.type in _ELEMENTWISE:
            return self._of_elements(op, tensor)
        if op.type == "ResourceGather" and op.inputs[1].shape.rank == tensor.shape.rank:
            return self.samples_in(op.inputs[1])  # ids mapped by a variable
        if any(i.shape.rank is None for i in op.inputs):
            return None
        if op.type in KEEPING:
            return self.samples_in(op.inputs[tensor.value_index if op.type == "IdentityN" else 0])
        if op.type in UNIQUE and tensor.value_index == 1:  # where each id is among the unique ones
            return self.samples_in(op.inputs[0])
        if op.type in ("ExpandDims", "Reshape", "Squeeze"):
            return self._reshaped(op, tensor)
        if op.type in ("BroadcastTo", "Tile"):
            return self._repeated(op, tensor)
        if op.type in ("ConcatV2", "Pack"):
            return self._joined(op, tensor)
        if op.type in _PICKING:
            return self._picked(op, tensor)
        if op.type == "Transpose":
            return self._transposed(op)
        return None

    def _of_elements(self, op: tf.Operation, tensor: tf.Tensor) -> _Samples | None:
        """Elements are of those at their place in what has a part in the samples."""
        alike: list[tf.Tensor] = []
        constants: list[tf.Tensor] = []
        for i in op.inputs:
            if i.shape.rank == tensor.shape.rank and i.shape.rank:
                (constants if self.of.is_constant(i) else alike).append(i)
        alike = alike or constants
        found = [self.samples_in(i) for i in alike]
        # Not what is broadcast to all samples.
        whole = [i.shape[0] != 1 or tensor.shape[0] == 1 for i in alike]
        first = [one for one, is_whole in zip(found, whole, strict=True) if one.first and is_whole]
        told = [one for one in found if not one.first]
        if first and _width(tensor) != 1:  # else a column may be what was flattened
            plain = any(not one.made and one.axis == 0 for one in first)
            told = [] if plain else [one for one in first if one.made or one.axis != 0]
        if told:
            return _changed(told[0], lambda x: tf.broadcast_to(x, tf.shape(tensor)))
        return self._broadcast(alike, constants, tensor) if found else None

    @staticmethod
    def _broadcast(
        alike: Sequence[tf.Tensor], constants: Sequence[tf.Tensor], tensor: tf.Tensor
    ) -> _Samples | None:
        """Of ids that a constant puts in each row of as many, nobody knows whose the rows are."""
        grown = all(
            any(a == 1 != b for a, b in zip(i.shape, tensor.shape, strict=True)) for i in alike
        )
        by_rows = any(i.shape[0] != 1 for i in constants)
        return _unknown(tensor) if grown and by_rows else None

    def _reshaped(self, op: tf.Operation, tensor: tf.Tensor) -> _Samples | None:
        before = op.inputs[0]
        found = self.samples_in(before)
        kept = _keeps_first_axis(op, tensor)
        if op.type == "Squeeze" and found.first and not kept:
            return None  # what was fed had another axis before the samples'
        # A column may be what was flattened before it was fed.
        column = op.type == "Reshape" and found.first and _width(before) == 1
        if not kept and (column or found.axis is None):
            return _unknown(tensor)
        reshaped = _changed(found, lambda x: tf.reshape(x, tf.shape(tensor)))
        axis = 0 if found.axis == 0 else None
        return dataclasses.replace(reshaped, first=found.first and kept, axis=axis)

    def _transposed(self, op: tf.Operation) -> _Samples | None:
        found = self.samples_in(op.inputs[0])
        if not found.first:  # of features that were stacked on axis 0 it makes lists
            return None if found.made else _changed(found, lambda x: tf.transpose(x, op.inputs[1]))
        axes = tf.get_static_value(op.inputs[1])
        known = axes is not None and found.axis is not None
        axis = axes.tolist().index(found.axis) if known else None
        moved = _changed(found, lambda x: tf.transpose(x, op.inputs[1]))
        return dataclasses.replace(moved, axis=axis)

    def _repeated(self, op: tf.Operation, tensor: tf.Tensor) -> _Samples | None:
        """Copies of rows, b×1×… to b×k×…, are samples once their axis is gone: `tf.repeat`'s."""
        before = op.inputs[0]
        if before.shape.rank != tensor.shape.rank:
            return None
        found = self.samples_in(before)
        one_row = not found.first and before.shape.rank > 1 and before.shape[0] == 1
        if one_row and tensor.shape[0] in (None, before.shape[1]):
            return _unknown(tensor)  # all ids of a batch for each of its samples, perhaps
        of_rows = tensor.shape.rank > 1 and before.shape[1] == 1 != tensor.shape[1]

        def numbers() -> tuple[tf.Tensor, tf.Tensor]:
            shape, size = tf.shape(tensor, tf.int64), tf.shape(before, tf.int64)
            if found.first:
                samples, number = _on_first_axis(tensor).numbers()
            else:
                samples, number = found.numbers()
                samples = tf.tile(samples, shape // tf.maximum(size, 1))
                rows = tf.maximum(size[0], 1)
                copy = _along(tf.range(shape[0]) // rows, 0, shape)
                samples, number = copy * number + samples, number * (shape[0] // rows)
            if of_rows:
                samples = samples * shape[1] + _along(tf.range(shape[1]), 1, shape)
                number *= shape[1]
            return samples, number

        return _Samples(found.first, _once(numbers), made=True)

    def _joined(self, op: tf.Operation, tensor: tf.Tensor) -> _Samples | None:
        parts, axis = _joined_by(op), _axis_of_join(op)
        if axis is None:
            return None
        if op.type == "Pack" and not axis and all(_is_one_sample(p, self) for p in parts):
            return None
        found = [self.samples_in(part) for part in parts]
        apart = axis == 0 and not self.are_of_one(parts)  # each part has samples of its own
        if apart and op.type != "Pack" and all(one.first for one in found):
            return None
        if axis and any(one.first or one.made for one in found):
            plain = [one.first and not one.made and one.axis == 0 for one in found]
            wide = any(
                _width(part) != 1 for part, is_plain in zip(parts, plain, strict=True) if is_plain
            )
            return None if all(plain) or wide else _unknown(tensor)

        def numbers() -> tuple[tf.Tensor, tf.Tensor]:
            made = [one.numbers() for one in found]
            samples, number = [of for of, _ in made], made[0][1]
            if apart:
                numbers = tf.stack([some for _, some in made])
                before, number = tf.cumsum(numbers, exclusive=True), tf.reduce_sum(numbers)
                samples = [one + before[i] for i, one in enumerate(samples)]
            join = tf.stack if op.type == "Pack" else tf.concat
            return join(samples, axis=axis), number

        return _Samples(False, _once(numbers), made=apart or found[0].made)

    def are_of_one(self, parts: Sequence[tf.Tensor]) -> bool:
        """Whether they are parts of one tensor, each another, whose samples are not an axis."""
        if len({self.of.ids(part) for part in parts}) < len(parts):
            return False
        ops = [op_of(self.of.stripped(part)) for part in parts]
        if not all(op is not None and op.type in _CUTTING for op in ops):
            return False
        whole = [self.of.outside(op.inputs[1 if op.type == "Split" else 0]) for op in ops]
        return len({one.ref() for one in whole}) == 1 and not self.samples_in(whole[0]).first

    def _picked(self, op: tf.Operation, tensor: tf.Tensor) -> _Samples | None:
        if op.type == "GatherV2" and self._is_mapping(op):
            return self.samples_in(op.inputs[1])
        found = self.samples_in(op.inputs[1 if op.type == "Split" else 0])
        drawn = op.type == "GatherNd" or (op.type == "GatherV2" and not found.first)
        if drawn and not self._is_by_place(op):
            return None  # by whatever number: they are ids of those that have them now
        first = found.first and _keeps_first(op, tensor)
        if first and found.axis == 0:
            return None
        fewer = tensor.shape.rank < op.inputs[0].shape.rank and op.type != "GatherNd"
        if found.first and not first and fewer:
            return None  # of micro-batches, features or time steps, each a batch of its own

        def pick(x: tf.Tensor) -> tf.Tensor:
            picked = _PICKING[op.type](op, x)
            return picked[tensor.value_index] if isinstance(picked, list) else picked

        return _changed(found, pick, first=first)

    def _is_by_place(self, op: tf.Operation) -> bool:
        """Whether it picks known places, or what a mask says, in order: `tf.boolean_mask`."""
        if self.of.is_constant(op.inputs[1], or_by_chance=False):
            return True
        made_by = op_of(self.of.stripped(op.inputs[1]))
        return made_by is not None and made_by.type == "Where"

    def _is_mapping(self, op: tf.Operation) -> bool:
        """Whether its indices are ids, of which it gives others, or which were made unique."""
        mapping = op.inputs[0]
        if mapping.shape.rank != 1 or self.of.is_constant(op.inputs[1]):
            return False
        made_by = op_of(self.of.stripped(mapping))
        unique = made_by is not None and made_by.type in UNIQUE
        return unique or self.of.is_constant(mapping)


def _on_first_axis(tensor: tf.Tensor) -> _Samples:
    def numbers() -> tuple[tf.Tensor, tf.Tensor]:
        shape = tf.shape(tensor, tf.int64)
        if not tensor.shape.rank:
            return tf.zeros(shape, tf.int64), tf.constant(1, tf.int64)
        return _along(tf.range(shape[0]), 0, shape), shape[0]

    return _Samples(True, _once(numbers))


def _unknown(tensor: tf.Tensor) -> _Samples:
    return dataclasses.replace(_on_first_axis(tensor), axis=None)


def _along(values: tf.Tensor, axis: int, shape: tf.Tensor) -> tf.Tensor:
    """A tensor of the shape whose elements are the values at their places on an axis."""
    rank = int(shape.shape[0])
    single = [-1 if i == axis else 1 for i in range(rank)]
    return tf.broadcast_to(tf.reshape(values, single), shape)


def _changed(
    found: _Samples, change: Callable[[tf.Tensor], tf.Tensor], first: bool | None = None
) -> _Samples:
    """Samples whose numbers an op puts elsewhere."""

    def numbers() -> tuple[tf.Tensor, tf.Tensor]:
        samples, number = found.numbers()
        return change(samples), number

    first = found.first if first is None else first
    return _Samples(first, _once(numbers), found.made, found.axis)


def _once(numbers: Callable[[], tuple[tf.Tensor, tf.Tensor]]) -> Any:
    """Made once in each graph that asks."""
    made: dict[Any, tuple[tf.Tensor, tf.Tensor]] = {}

    def get() -> tuple[tf.Tensor, tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        if graph not in made:
            made[graph] = numbers()
        return made[graph]

    return get


def _joined_by(op: tf.Operation) -> list[tf.Tensor]:
    return list(op.inputs if op.type == "Pack" else op.inputs[:-1])


def _axis_of_join(op: tf.Operation) -> int | None:
    """The axis of what it gives that it joins on; `None` where only a step tells."""
    rank = op.outputs[0].shape.rank
    axis = op.get_attr("axis") if op.type == "Pack" else tf.get_static_value(op.inputs[-1])
    if rank == 1:
        return 0
    if axis is None or (axis < 0 and rank is None):
        return None
    return int(axis) % rank if rank else int(axis)


def _keeps_first_axis(op: tf.Operation, tensor: tf.Tensor) -> bool:
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
    return _width(op.inputs[0]) is not None and _width(op.inputs[0]) == _width(tensor)


def _keeps_first(op: tf.Operation, tensor: tf.Tensor) -> bool:
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


def _width(ids: tf.Tensor) -> int | None:
    """Ids of a sample, if samples are the first axis."""
    return ids.shape[1:].num_elements() if ids.shape.rank else 1
