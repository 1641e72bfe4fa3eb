"""Whose the elements of a graph's tensors are: the numbers of their samples.

As long as samples are a tensor's first axis, that is plain; where they were put in another shape,
the numbers are put in that shape by the same ops. What an op does to the first axis while it is the
samples' makes other samples: of rows repeated, joined or picked, each is one.

Nothing is added to a graph until somebody asks for the numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.moving_ops import (
    CUTTING,
    ELEMENTWISE,
    PICKING,
    axis_of_join,
    joined_by,
    pick_keeps_first_axis,
    reshape_keeps_first_axis,
    width_of,
)
from merlin_cowclip.plugins.same_ids import KEEPING, UNIQUE, Expressions, functions_of, op_of

_BY_INDEX = {"LowerBound", "ResourceGather", "UpperBound"}  # ids mapped by what they are held to
_OF_ANY_SHAPE = ELEMENTWISE | _BY_INDEX
_TOLD = (
    _OF_ANY_SHAPE
    | KEEPING
    | UNIQUE
    | set(PICKING)
    | {"BroadcastTo", "ConcatV2", "ExpandDims", "OneHot", "Pack", "Reshape", "Squeeze", "Tile"}
    | {"Transpose"}
)
_MOST = 100  # ops in a row that are done again: by recursion, of some frames of Python each


@dataclass(frozen=True, eq=False)
class Samples:
    """Where the samples are in a tensor of ids.

    Attributes:
      first: whether they are its first axis; else the numbers tell.
      numbers: makes the number of each id's sample, and how many numbers there are: they count once
        ids are put in a shape that has no axis of samples.
      made: whether there are more samples than the ids' first ones: repeated, or of several joined.
      axis: which axis the numbers are of, where the first one is only taken for the samples' as
        long as it is there: of ids that were transposed. None where nobody knows: of any shape
        that they have, the first axis is then taken for the samples'; of copies that are put in one
        vector the numbers.
      copied: how many ids of a sample are there several times, one copy after another, on further
        axes than the first: put in rows of as many, each is a sample.
      ops: how many are done again to make the numbers.
      lost_by: as in `Fed`; empty where the op gives ids that have samples of their own.
    """

    first: bool
    numbers: Callable[[], tuple[tf.Tensor, tf.Tensor]]
    made: bool = False
    axis: int | None = 0
    copied: int | None = None
    ops: int = 0
    lost_by: str = ""


class SampleNumbers:
    """Looks up what the ids of a graph were made from, each tensor once."""

    def __init__(self, of: Expressions) -> None:
        self.of = of
        self._known: dict[Any, Samples] = {}

    def samples_in(self, tensor: tf.Tensor) -> Samples:
        """Where they are in it; on its first axis where nothing tells."""
        tensor = self.of.outside(tensor)
        waiting, begun = [tensor], set[Any]()  # not by recursion: of a chain of any length
        while waiting:
            last = waiting[-1]
            op = op_of(last)
            before = [] if op is None or last.ref() in begun else map(self.of.outside, op.inputs)
            missing = [i for i in before if i.ref() not in self._known]
            begun.add(last.ref())
            if not missing:
                waiting.pop()
                if last.ref() not in self._known:
                    self._known[last.ref()] = _on_first_axis(last)  # a loop may come back to it
                    self._known[last.ref()] = self._found_in(last)
            waiting += missing
        return self._known[tensor.ref()]

    def _found_in(self, tensor: tf.Tensor) -> Samples:
        """As `samples_in`, of what all of its op's inputs are known."""
        op = op_of(tensor)
        if op is None or not op.inputs:
            return self._by_default(tensor)
        shapes = [tensor, *(() if op.type in _OF_ANY_SHAPE else op.inputs)]
        known = op.type in _TOLD and all(one.shape.rank is not None for one in shapes)
        found = self._told_by_op(op, tensor) if known else None
        if found is not None and found.ops <= _MOST:
            return found
        is_told = known and found is None
        told = _on_first_axis(tensor) if is_told else self._by_default(tensor)
        return dataclasses.replace(told, lost_by=self._lost_by(op, tensor, is_told=is_told))

    def _by_default(self, tensor: tf.Tensor) -> Samples:
        """On the first axis; of 1×n that was made of no batch of one, nobody knows."""
        if not (tensor.shape.rank or 0) > 1 or tensor.shape[0] != 1:
            return _on_first_axis(tensor)
        op = op_of(tensor)
        made_of = [] if op is None else [i for i in op.inputs if i.shape.rank]
        given = not made_of and not self.of.is_constant(tensor)
        of_one = given or any(i.shape[0] == 1 and not self.of.is_constant(i) for i in made_of)
        return _on_first_axis(tensor) if of_one else _unknown(tensor, ())

    def _lost_by(self, op: tf.Operation, tensor: tf.Tensor, *, is_told: bool) -> str:
        """The op that lost whose ids a tensor has on its first axis; empty if none did.

        What has more axes than it was made of, as a list of its values, has the samples' again.
        """
        if self.of.is_constant(tensor):
            return ""
        for given in functions_of(op):
            made = self.samples_in(given.outputs[tensor.value_index])
            if made.lost_by or not made.first:
                return str(op.name)
        for i in op.inputs:
            ranks = tensor.shape.rank, i.shape.rank
            in_lists = None not in ranks and ranks[0] > ranks[1] and op.type != "Pack"
            if in_lists and i.dtype != tf.variant:
                continue
            found = self.samples_in(i)
            if found.lost_by:
                return found.lost_by
            made_by = op_of(self.of.stripped(i))
            mapped = op.type in ELEMENTWISE and made_by is not None and made_by.type in UNIQUE
            if (not found.first and not is_told) or mapped:
                return str(op.name)
        return ""

    def _told_by_op(self, op: tf.Operation, tensor: tf.Tensor) -> Samples | None:
        """What its op makes of the samples; `None` if they are its first axis."""
        if op.type in ELEMENTWISE:
            return self._of_elements(op, tensor)
        if op.type in _BY_INDEX:
            return self._mapped(op.inputs[1], tensor)
        if op.type == "OneHot":
            return self._mapped(op.inputs[0], tensor) if op.get_attr("axis") == -1 else None
        if op.type in KEEPING:
            return self.samples_in(op.inputs[tensor.value_index if op.type == "IdentityN" else 0])
        if op.type in UNIQUE:  # where each id is among the unique ones
            return self.samples_in(op.inputs[0]) if tensor.value_index == 1 else None
        if op.type in ("ExpandDims", "Reshape", "Squeeze"):
            return self._reshaped(op, tensor)
        if op.type in ("BroadcastTo", "Tile"):
            return self._repeated(op.inputs[0], tensor)
        if op.type in ("ConcatV2", "Pack"):
            return self._joined(op, tensor)
        return self._transposed(op) if op.type == "Transpose" else self._picked(op, tensor)

    def _of_elements(self, op: tf.Operation, tensor: tf.Tensor) -> Samples | None:
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
        if first and width_of(tensor) != 1:  # else a column may be what was flattened
            plain = any(not one.made and one.axis == 0 for one in first)
            told = [] if plain else [one for one in first if one.made or one.axis != 0]
        is_alone = len(alike) == 1 and not first
        if told and is_alone and tensor.shape[0] != 1 and _may_be_for_each(alike[0], tensor):
            return self._repeated(alike[0], tensor)
        if told:
            of = _changed(told[0], lambda x: tf.broadcast_to(x, tf.shape(tensor)))
            as_wide = len(alike) == 1 and width_of(alike[0]) == width_of(tensor)
            return dataclasses.replace(of, copied=told[0].copied if as_wide else None)
        return self._broadcast(alike, constants, tensor) if found else None

    def _broadcast(
        self, alike: Sequence[tf.Tensor], constants: Sequence[tf.Tensor], tensor: tf.Tensor
    ) -> Samples | None:
        """Of ids that a constant puts in each row of as many, nobody knows whose the rows are.

        But b×1×… that are put beside each other k times as they are, by ones, are copies.
        """
        if len(alike) == 1 and _is_neutral(constants, tensor):
            return self._repeated(alike[0], tensor)
        grown = all(
            any(a == 1 != b for a, b in zip(i.shape, tensor.shape, strict=True)) for i in alike
        )
        by_rows = any(i.shape[0] != 1 for i in constants)
        return _unknown(tensor, map(self.samples_in, alike)) if grown and by_rows else None

    def _reshaped(self, op: tf.Operation, tensor: tf.Tensor) -> Samples | None:
        before = op.inputs[0]
        found = self.samples_in(before)
        kept = reshape_keeps_first_axis(op, tensor)
        if op.type == "Squeeze" and found.first and not kept:
            return None  # what was fed had another axis before the samples'
        if not kept and found.copied == width_of(tensor) is not None:
            return dataclasses.replace(_on_first_axis(tensor), made=True)
        # A column may be what was flattened before it was fed.
        column = op.type == "Reshape" and found.first and width_of(before) == 1
        reshaped = _changed(found, lambda x: tf.reshape(x, tf.shape(tensor)))
        if not kept and (column or found.axis is None):
            if column or (found.first and not found.made):
                in_lists = tensor.shape.rank > before.shape.rank and width_of(tensor) != 1
                return _unknown(tensor, [] if in_lists else [found])
            if found.made:
                return dataclasses.replace(reshaped, first=width_of(tensor) != 1)
        return dataclasses.replace(
            reshaped,
            first=found.first and kept,
            axis=0 if found.axis == 0 else None,
            copied=found.copied if kept else None,
        )

    def _transposed(self, op: tf.Operation) -> Samples | None:
        found = self.samples_in(op.inputs[0])
        if not found.first:  # of features that were stacked on axis 0 it makes lists
            return None if found.made else _changed(found, lambda x: tf.transpose(x, op.inputs[1]))
        axes = tf.get_static_value(op.inputs[1])
        known = axes is not None and found.axis is not None
        axis = axes.tolist().index(found.axis) if known else None
        moved = _changed(found, lambda x: tf.transpose(x, op.inputs[1]))
        return dataclasses.replace(moved, axis=axis)

    def _repeated(self, before: tf.Tensor, tensor: tf.Tensor) -> Samples | None:
        """Copies of rows, b×1×… to b×k×…, are samples once their axis is gone: `tf.repeat`'s."""
        if before.shape.rank != tensor.shape.rank:
            return None
        found = self.samples_in(before)
        for_each = not found.first and _may_be_for_each(before, tensor)
        axis = _axis_of_copies(before, tensor)

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
            return (samples, number) if axis is None else _apart(samples, number, axis)

        return dataclasses.replace(
            found,
            first=found.first or for_each,
            numbers=_once(numbers),
            made=True,
            axis=None if for_each else 0,
            copied=width_of(before) if found.first and _follow(before, tensor) else None,
            ops=found.ops + 1,
        )

    def _joined(self, op: tf.Operation, tensor: tf.Tensor) -> Samples | None:
        parts, axis = joined_by(op), axis_of_join(op)
        if axis is None:
            return None
        if op.type == "Pack" and not axis and all(self.is_one_sample(p) for p in parts):
            return None
        found = [self.samples_in(part) for part in parts]
        if axis == 1 and self._are_copies(op, parts):
            return self._of_copies(op, tensor, found[0])
        apart = axis == 0 and not self.are_of_one(parts)  # each part has samples of its own
        if apart and op.type != "Pack" and all(one.first for one in found):
            return None
        of_samples = [i for i, part in enumerate(parts) if not self.of.is_constant(part)]
        of_samples = of_samples if axis and of_samples else list(range(len(parts)))
        if axis and any(found[i].first or found[i].made for i in of_samples):
            return self._beside(op, tensor, found)

        def numbers() -> tuple[tf.Tensor, tf.Tensor]:
            made = {i: found[i].numbers() for i in of_samples}
            row, number = made[of_samples[0]]  # and of constants beside them
            row = row if op.type == "Pack" or not axis else tf.gather(row, [0], axis=axis)
            samples = [
                made[i][0] if i in made else tf.broadcast_to(row, tf.shape(part))
                for i, part in enumerate(parts)
            ]
            if apart:
                numbers = tf.stack([some for _, some in made.values()])
                before, number = tf.cumsum(numbers, exclusive=True), tf.reduce_sum(numbers)
                samples = [one + before[i] for i, one in enumerate(samples)]
            join = tf.stack if op.type == "Pack" else tf.concat
            return join(samples, axis=axis), number

        made = apart or found[of_samples[0]].made
        ops = 1 + max(one.ops for one in found)
        return Samples(False, _once(numbers), made, ops=ops, lost_by=_lost_of(found))

    def _are_copies(self, op: tf.Operation, parts: Sequence[tf.Tensor]) -> bool:
        """Whether rows are put under themselves, b×n or b×1×n each; b×1 make lists."""
        is_row = op.type == "Pack" or parts[0].shape[1] == 1
        if len(parts) < 2 or not is_row or op.outputs[0].shape.rank < 3:
            return False
        return len({self.of.ids(part) for part in parts}) == 1

    def _of_copies(self, op: tf.Operation, tensor: tf.Tensor, found: Samples) -> Samples:
        def copies(x: tf.Tensor) -> tf.Tensor:
            row = tf.expand_dims(x, 1) if op.type == "Pack" else x
            return tf.broadcast_to(row, tf.shape(tensor))

        one = _changed(found, copies)
        numbers = _once(lambda: _apart(*one.numbers(), axis=1))
        return dataclasses.replace(one, numbers=numbers, made=True, axis=0)

    def _beside(
        self, op: tf.Operation, tensor: tf.Tensor, found: Sequence[Samples]
    ) -> Samples | None:
        """Of parts that are joined in each row: where rows are copies, each is a sample."""
        axis = axis_of_join(op)
        given = list(zip(joined_by(op), found, strict=True))
        given = [(p, one) for p, one in given if not self.of.is_constant(p)] or given
        parts, found = map(list, zip(*given, strict=True))
        plain = [one.first and not one.made and one.axis == 0 for one in found]
        wide = any(width_of(part) != 1 for part, is_so in zip(parts, plain, strict=True) if is_so)
        if all(plain) or wide:
            return None
        made = sorted((one for one in found if one.made), key=lambda one: one.first)
        if not made:
            return _unknown(tensor, found)

        def all_along(x: tf.Tensor) -> tf.Tensor:
            one = tf.expand_dims(x, axis) if op.type == "Pack" else tf.gather(x, [0], axis=axis)
            return tf.broadcast_to(one, tf.shape(tensor))

        beside = dataclasses.replace(_changed(made[0], all_along), lost_by=_lost_of(found))
        unknown = any(one.axis is None for one in found)
        return dataclasses.replace(beside, first=True, axis=None) if unknown else beside

    def is_one_sample(self, part: tf.Tensor) -> bool:
        """Whether it is an element of a tensor's first axis, as `x[i]` and of `tf.unstack(x)`."""
        op = op_of(self.of.stripped(part))
        if op is None or op.type not in ("StridedSlice", "Unpack"):
            return False
        return not pick_keeps_first_axis(op, part)

    def are_of_one(self, parts: Sequence[tf.Tensor]) -> bool:
        """Whether they are parts of one tensor, each another, whose samples are not an axis."""
        if len({self.of.ids(part) for part in parts}) < len(parts):
            return False
        ops = [op_of(self.of.stripped(part)) for part in parts]
        if not all(op is not None and op.type in CUTTING for op in ops):
            return False
        whole = [self.of.outside(op.inputs[1 if op.type == "Split" else 0]) for op in ops]
        return len({self.of.number(w) for w in whole}) == 1 and not self.samples_in(whole[0]).first

    def _picked(self, op: tf.Operation, tensor: tf.Tensor) -> Samples | None:
        if op.type == "GatherV2" and self._is_mapping(op):
            return self._mapped(op.inputs[1], tensor)
        found = self.samples_in(op.inputs[1 if op.type == "Split" else 0])
        drawn = op.type == "GatherNd" or (
            op.type == "GatherV2" and (not found.first or found.lost_by)
        )
        if drawn and not self._is_by_place(op):
            return _on_first_axis(tensor)  # by whatever number: of those that have them now
        first = found.first and pick_keeps_first_axis(op, tensor)
        by_row = op.type == "GatherV2" and tf.get_static_value(op.inputs[2]) == 0
        by_row = by_row and not op.get_attr("batch_dims")
        if first and found.axis == 0 and (by_row or not found.made):
            # Rows that are picked by number may be copies.
            return dataclasses.replace(_on_first_axis(tensor), made=by_row, lost_by=found.lost_by)
        fewer = tensor.shape.rank < op.inputs[0].shape.rank and op.type != "GatherNd"
        if found.first and not first and fewer:
            return None  # of micro-batches, features or time steps, each a batch of its own

        def pick(x: tf.Tensor) -> tf.Tensor:
            picked = PICKING[op.type](op, x)
            return picked[tensor.value_index] if isinstance(picked, list) else picked

        return _changed(found, pick, first=first)

    def _mapped(self, ids: tf.Tensor, tensor: tf.Tensor) -> Samples | None:
        """Of one or more for each id, on further axes."""
        found, further = self.samples_in(ids), tensor.shape.rank - ids.shape.rank
        if further < 0:
            return None

        def at_all(x: tf.Tensor) -> tf.Tensor:
            single = tf.concat([tf.shape(x), tf.ones([further], tf.int32)], axis=0)
            return tf.broadcast_to(tf.reshape(x, single), tf.shape(tensor))

        return _changed(found, at_all) if further else found

    def _is_by_place(self, op: tf.Operation) -> bool:
        """Whether it picks known places, or what a mask says, in order: `tf.boolean_mask`."""
        if self.of.is_constant(op.inputs[1], or_by_chance=False):
            return True
        made_by = op_of(self.of.stripped(op.inputs[1]))
        return made_by is not None and made_by.type == "Where"

    def _is_mapping(self, op: tf.Operation) -> bool:
        """Whether its indices are ids, of which it gives others, or which were made unique."""
        mapping = op.inputs[0]
        by_row = tf.get_static_value(op.inputs[2]) == 0 and not op.get_attr("batch_dims")
        if not mapping.shape.rank or not by_row or self.of.is_constant(op.inputs[1]):
            return False
        made_by = op_of(self.of.stripped(mapping))
        unique = made_by is not None and made_by.type in UNIQUE
        return unique or self.of.is_constant(mapping)


def _on_first_axis(tensor: tf.Tensor) -> Samples:
    def numbers() -> tuple[tf.Tensor, tf.Tensor]:
        shape = tf.shape(tensor, tf.int64)
        if not tensor.shape.rank:
            return tf.zeros(shape, tf.int64), tf.constant(1, tf.int64)
        return _along(tf.range(shape[0]), 0, shape), shape[0]

    return Samples(True, _once(numbers))


def _unknown(tensor: tf.Tensor, made_of: Iterable[Samples]) -> Samples:
    return dataclasses.replace(_on_first_axis(tensor), axis=None, lost_by=_lost_of(made_of))


def _lost_of(some: Iterable[Samples]) -> str:
    return next((one.lost_by for one in some if one.lost_by), "")


def _apart(samples: tf.Tensor, number: tf.Tensor, axis: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Other samples for each place on an axis."""
    shape = tf.shape(samples, tf.int64)
    many = shape[axis]
    return samples * many + _along(tf.range(many), axis, shape), number * many


def _axis_of_copies(row: tf.Tensor, copies: tf.Tensor) -> int | None:
    """On which axis what each row of b×1×… holds is put under itself, if on any."""
    axes = zip(row.shape[1:], copies.shape[1:], strict=True)
    before = next((i for i, (one, many) in enumerate(axes) if one != 1 or many != 1), None)
    return 1 + before if before is not None and row.shape[1 + before] == 1 else None


def _along(values: tf.Tensor, axis: int, shape: tf.Tensor) -> tf.Tensor:
    """A tensor of the shape whose elements are the values at their places on an axis."""
    rank = int(shape.shape[0])
    single = [-1 if i == axis else 1 for i in range(rank)]
    return tf.broadcast_to(tf.reshape(values, single), shape)


def _changed(
    found: Samples, change: Callable[[tf.Tensor], tf.Tensor], first: bool | None = None
) -> Samples:
    """Samples whose numbers an op puts elsewhere."""

    def numbers() -> tuple[tf.Tensor, tf.Tensor]:
        samples, number = found.numbers()
        return change(samples), number

    first = found.first if first is None else first
    return dataclasses.replace(
        found, first=first, numbers=_once(numbers), ops=found.ops + 1, copied=None
    )


def _once(numbers: Callable[[], tuple[tf.Tensor, tf.Tensor]]) -> Any:
    """Made once in each graph that asks."""
    made: dict[Any, tuple[tf.Tensor, tf.Tensor]] = {}

    def get() -> tuple[tf.Tensor, tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        if graph not in made:
            made[graph] = numbers()
        return made[graph]

    return get


def _is_neutral(constants: Sequence[tf.Tensor], tensor: tf.Tensor) -> bool:
    """Whether ids stay as they are: a product with ones, a sum with zeros."""
    op = op_of(tensor)
    neutral = {"Add": 0, "AddV2": 0, "Mul": 1}.get(op.type)
    values = [_value_of(one) for one in constants]
    return bool(values) and neutral is not None and all(one == neutral for one in values)


def _value_of(constant: tf.Tensor) -> Any:
    """The one value of all its elements, if the graph tells of such a one."""
    op = op_of(constant)
    filled = op is not None and op.type == "Fill"
    value = tf.get_static_value(op.inputs[1] if filled else constant)
    values = [] if value is None else np.unique(value)
    return values[0] if len(values) == 1 else None


def _may_be_for_each(row: tf.Tensor, copies: tf.Tensor) -> bool:
    """Whether all ids of a batch, 1×b×…, are put there for each sample: b×b×…, perhaps."""
    if row.shape.rank < 2 or row.shape[0] != 1:
        return False
    return copies.shape[0] in (None, row.shape[1])


def _follow(row: tf.Tensor, copies: tf.Tensor) -> bool:
    """Whether the copies of what each row of b×… holds come one after another."""
    axes = zip(row.shape[1:], copies.shape[1:], strict=True)
    grown = [i for i, (one, many) in enumerate(axes) if one != many or many is None]
    return all(size == 1 for size in row.shape[1 : 1 + grown[-1]]) if len(grown) == 1 else False
