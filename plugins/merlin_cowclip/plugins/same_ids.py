"""Which tensors of a graph hold the same ids, and which lookups a gradient came from.

Analysis of a graph while it is traced: it adds no op, and a step costs nothing for it. Eagerly
there is no graph to read; `counting.py` compares contents there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.moving_ops import joined_by

# They give what they are given; and they change the shape of ids, never the ids.
KEEPING = {"EnsureShape", "Identity", "IdentityN", "PreventGradient", "Snapshot", "StopGradient"}
_SHAPE_ONLY = KEEPING | {"ExpandDims", "Reshape", "Squeeze"}
# Their outputs come from outside the step's own graph, or from a function that hides its parts.
_OPAQUE = {
    "Case",
    "If",
    "PartitionedCall",
    "Placeholder",
    "StatefulPartitionedCall",
    "StatelessCase",
    "StatelessIf",
    "StatelessWhile",
    "While",
}

# They read what the step may have changed: a variable, a table of a vocabulary (`StringLookup`).
_READING = {
    *("LookupTableFind", "LookupTableFindV2", "LookupTableSize", "LookupTableSizeV2"),
    *("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"),
}

# What they give is no sample's: of a table's rows, which indices pick, that is asked of these.
_OF_NO_SAMPLE = {"Const", "Rank", "ReadVariableOp", "Shape", "ShapeN", "Size"}
_BY_CHANCE = ("Multinomial", "Random", "StatefulRandom", "StatefulUniform", "StatelessRandom")

# They move numbers about; only they give a gradient of another shape the table's.
_MOVING = {
    "ConcatV2",
    "EnsureShape",
    "Identity",
    "Pack",
    "Reshape",
    "Slice",
    "Split",
    "SplitV",
    "StridedSlice",
    "Transpose",
    "Unpack",
}
# Products of matrices: what they give may be the table's in shape where no factor is.
_PRODUCTS = {"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "MatMul"}
# What an op reads that another one put there, and ops that give what Python or a function holds.
_KEPT = {tf.resource, tf.variant}
_GIVING = {"EagerPyFunc", "MapDefun", "PyFunc", "PyFuncStateless", "RemoteCall"}
# Ops that join tensors of several ranks, of Horovod and of TensorFlow, start so.
_JOINING = ("Collective", "Horovod", "Nccl")
UNIQUE = {"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"}
# Of ops that call functions, which attributes name these, and which input is their first.
_CALLS: dict[str, tuple[tuple[str, ...], int]] = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), (("f",), 0)),
    **dict.fromkeys(("If", "StatelessIf"), (("then_branch", "else_branch"), 1)),
    **dict.fromkeys(("Case", "StatelessCase"), (("branches",), 1)),
}
_BRANCHES = {"Case", "If", "StatelessCase", "StatelessIf"}

# Elements of an eager tensor that is copied into a graph and not captured (TensorFlow's own bound).
_COPIED = 128

FuncGraph = type(tf.function(lambda: None).get_concrete_function().graph)


class Expressions:
    """Numbers tensors by what they compute: equal numbers, equal values.

    Two tensors get one number if the same ops make them from the same inputs; an op with a state
    of its own (a random number) and a call of what has one equal themselves alone, and so do
    branches of such. Of a variable that the step may set two reads are equal in one graph, where
    nothing there sets it between them. A tensor that a branch or a loop captures has the number it
    has outside.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._of_tensors: dict[Any, int] = {}
        self._captures: dict[int, dict[Any, Any]] = {}
        self._constant: dict[bool, dict[Any, bool]] = {True: {}, False: {}}
        self._settable: dict[Any, tuple[int, bool]] = {}

    def number(self, tensor: tf.Tensor) -> int:
        """The number of the tensor's value."""
        tensor = self.outside(tensor)
        waiting = [tensor]  # not by recursion: ids may come from a chain of any length
        while waiting:
            known = self._of_tensors
            last = waiting[-1]
            before = [self.outside(i) for i in self._made_from(last)]
            missing = [i for i in before if i.ref() not in known]
            if missing and last.ref() not in known:
                waiting += missing
                continue
            waiting.pop()
            if last.ref() not in known:
                key = self._key(last, tuple(known[i.ref()] for i in before))
                known[last.ref()] = self._numbers.setdefault(key, len(self._numbers))
        return self._of_tensors[tensor.ref()]

    def ids(self, tensor: tf.Tensor) -> int:
        """The number of the ids in the tensor, whatever its shape and type."""
        stripped = self.stripped(tensor)
        op = op_of(stripped)
        slices = _slices(op) if op is not None and op.type == "StridedSlice" else None
        if slices is None:
            return self.number(stripped)
        # `ids[:, :1]` and `ids[:, 0]` differ in shape alone.
        return self._numbers.setdefault((slices, self.number(op.inputs[0])), len(self._numbers))

    def stripped(self, tensor: tf.Tensor) -> tf.Tensor:
        """What the tensor was before ops that leave ids as they are."""
        while True:
            tensor = self.outside(tensor)
            op = op_of(tensor)
            if op is None or not op.inputs:
                return tensor
            before = op.inputs[tensor.value_index if op.type == "IdentityN" else 0]
            # Also of floats: whatever looks them up takes them as these integers.
            to_ids = op.type == "Cast" and tensor.dtype.is_integer
            if op.type not in _SHAPE_ONLY and not to_ids and not _slices_nothing_off(op):
                return tensor
            tensor = before

    def is_constant(self, tensor: tf.Tensor, *, or_by_chance: bool = True) -> bool:
        """Whether no sample has a part in it: it is of constants, variables, shapes or chance."""
        known = self._constant[or_by_chance]
        waiting, begun = [self.outside(tensor)], set[Any]()  # a loop may come back to one
        while waiting:
            last = waiting[-1]
            made_of = self._no_samples_if(last, or_by_chance=or_by_chance)
            missing = [i for i in made_of or () if i.ref() not in known]
            if missing and last.ref() not in begun:
                begun.add(last.ref())
                waiting += missing
                continue
            waiting.pop()
            is_one = made_of is not None and all(known.get(i.ref(), True) for i in made_of)
            known.setdefault(last.ref(), is_one)
        return known[self.outside(tensor).ref()]

    def _no_samples_if(self, tensor: tf.Tensor, *, or_by_chance: bool) -> list[tf.Tensor] | None:
        """What must be constant for a tensor to be so; `None` if it is not in any case."""
        op = op_of(tensor)
        if op is None or op.type in _OF_NO_SAMPLE:
            return []
        by_chance = op.type.startswith(_BY_CHANCE)
        if not op.inputs or (op.op_def.is_stateful and not by_chance):
            return None
        return None if by_chance and not or_by_chance else list(map(self.outside, op.inputs))

    def outside(self, tensor: tf.Tensor) -> tf.Tensor:
        """The tensor of an outer graph that this one stands for, if it does."""
        while True:
            op = op_of(tensor)
            if op is None or op.type != "Placeholder" or not isinstance(op.graph, FuncGraph):
                return tensor
            captured = self._captures.get(id(op.graph))
            if captured is None or len(captured) != len(op.graph.captures):
                captured = {inner.ref(): outer for outer, inner in op.graph.captures}
                self._captures[id(op.graph)] = captured
            outer = captured.get(tensor.ref())
            if outer is None:
                return tensor
            tensor = outer

    def _everywhere(self, tensor: tf.Tensor) -> Iterator[tf.Tensor]:
        """What stands for the same in the tensor's graph, and in those around it."""
        found, graph = self.outside(tensor), tensor.graph
        if op_of(found) is not None:
            yield found
        while isinstance(graph, FuncGraph):
            yield from (inner for _, inner in graph.captures if self.outside(inner) is found)
            graph = graph.outer_graph

    def _made_from(self, tensor: tf.Tensor) -> Sequence[tf.Tensor]:
        """The tensors that tell the value; none where the tensor equals only itself."""
        op = op_of(tensor)
        if op is not None and op.type in _BRANCHES and (made := functions_of(op)):
            return *op.inputs, *(one.outputs[tensor.value_index] for one in made)
        return () if self._equals_only_itself(op) else op.inputs

    def _key(self, tensor: tf.Tensor, inputs: tuple[int, ...]) -> Any:
        op = op_of(tensor)
        if (op is None or op.type == "Const") and tensor.dtype.is_integer:
            # TensorFlow copies small eager tensors into a graph, each time that they are used.
            value = tensor if op is None else tf.make_ndarray(op.get_attr("value"))
            if tensor.shape.num_elements() <= _COPIED:
                return tensor.dtype, tuple(tensor.shape), np.asarray(value).tobytes()
        if inputs and op.type in _BRANCHES:
            return op.type.removeprefix("Stateless"), inputs  # of whatever names its functions are
        if self._equals_only_itself(op):
            return tensor.ref()
        attributes = tuple(
            (name, value.SerializeToString(deterministic=True))
            for name, value in sorted(op.node_def.attr.items())
            if not name.startswith("_")
        )
        return op.type, attributes, tensor.value_index, inputs, self._as_of(op)

    def _as_of(self, op: tf.Operation) -> Any:
        """Of what may be set the graph that reads it, and after how many ops that may set it."""
        read = self._everywhere(op.inputs[0]) if op.type in _READING else ()
        if not any(map(self._may_be_set, read)):
            return None
        before = [user for user in _setting(op.inputs[0]) if user._id < op._id]
        return id(op.graph), len(before)

    def _equals_only_itself(self, op: Any) -> bool:
        """Whether the same inputs do not tell what an op makes; `None` makes eager tensors."""
        if op is None:
            return True
        if op.type in _READING:
            return False
        calls = op.type in _OPAQUE and op.type != "PartitionedCall"  # a function without a state
        return op.op_def.is_stateful or calls

    def _may_be_set(self, resource: tf.Tensor) -> bool:
        """Whether its graph, as it is by now, may set it; a graph of several steps grows."""
        size, known = self._settable.get(resource.ref(), (-1, False))
        if size != resource.graph.version and not known:
            known = next(_setting(resource), None) is not None
            self._settable[resource.ref()] = resource.graph.version, known
        return known


def _setting(resource: tf.Tensor) -> Iterator[tf.Operation]:
    """The ops of its graph that do more than read it, or whose functions do."""
    for user in resource.consumers():
        if user.type not in _READING:
            called = functions_of(user)
            places = [i for i, given in enumerate(user.inputs) if given is resource]
            first = _CALLS[user.type][1] if called else 0
            within = [graph.inputs[i - first] for graph in called for i in places if i >= first]
            if not within or any(next(_setting(one), None) is not None for one in within):
                yield user


def _slices(op: tf.Operation) -> tuple[Any, ...] | None:
    """What it takes of each axis of its input; None where that is not known."""
    begins, ends, steps = (tf.get_static_value(op.inputs[i]) for i in (1, 2, 3))
    shape = op.inputs[0].shape
    if begins is None or ends is None or steps is None or shape.rank is None:
        return None

    def told(name: str, item: int) -> bool:
        return bool(op.get_attr(f"{name}_mask") >> item & 1)

    items = [i for i in range(len(steps)) if not told("new_axis", i)]
    left = shape.rank - sum(not told("ellipsis", i) for i in items)
    taken: list[slice] = []
    for i in items:
        begin, end = int(begins[i]), int(ends[i])
        if told("ellipsis", i):
            taken += [slice(None)] * left
        elif told("shrink_axis", i):
            taken.append(slice(begin, begin + 1 or None))
        else:
            first, last = (None if told(n, i) else v for n, v in (("begin", begin), ("end", end)))
            taken.append(slice(first, last, int(steps[i])))
    taken += [slice(None)] * (shape.rank - len(taken))
    # Of a size that only a step tells, 0 and nothing begin alike.
    return tuple(
        (one.start or 0 if (one.step or 1) > 0 else one.start, one.stop, one.step or 1)
        if size is None
        else range(size)[one]
        for one, size in zip(taken, shape, strict=True)
    )


def _slices_nothing_off(op: tf.Operation) -> bool:
    """Whether it only adds axes, as `ids[:, tf.newaxis]`, or takes those of one id away."""
    if op.type != "StridedSlice":
        return False
    begins, strides = (tf.get_static_value(op.inputs[i]) for i in (1, 3))
    if begins is None or strides is None:
        return False

    def given(name: str, item: int) -> bool:
        return bool(op.get_attr(f"{name}_mask") >> item & 1)

    items = range(len(strides))
    axes = [i for i in items if not given("new_axis", i)]
    shape, ellipsis = op.inputs[0].shape, [i for i in axes if given("ellipsis", i)]
    for number, i in enumerate(axes):
        after = ellipsis and i > ellipsis[0]
        axis = number - len(axes) if after else number
        whole = given("begin", i) and given("end", i) and strides[i] == 1
        single = shape.rank is not None and shape[axis] == 1 and given("shrink_axis", i)
        if not (whole or single or given("ellipsis", i)):
            return False
    return True


def op_of(tensor: Any) -> Any:
    """The op that makes the tensor in its graph; `None` for an eager tensor."""
    return None if isinstance(tensor, _EagerTensor) else tensor.op


_EagerTensor = type(tf.constant(0))


def parts_of(indices: tf.Tensor, known: set[int], of: Expressions) -> Iterator[tf.Tensor]:
    """The indices of single lookups that a gradient's indices were put together from.

    TensorFlow joins the slices of several lookups by concatenation, in several layers if many.
    """
    tensor = of.stripped(indices)
    op = op_of(tensor)
    if op is None or op.type not in ("ConcatV2", "Pack") or of.ids(tensor) in known:
        yield tensor
        return
    for part in joined_by(op):
        yield from parts_of(part, known, of)


def origin(part: tf.Tensor, known: set[int], of: Expressions) -> tuple[int | None, bool]:
    """Which of the ids in `known` a part of a gradient's indices was made from.

    Returns:
      Their number, or `None`; and whether the part is these ids themselves, each as often. It is
      not where a combiner made ids unique, left invalid ones out or filled empty lists in.
    """
    itself = True
    while True:
        part = of.stripped(part)
        number = of.ids(part)
        if number in known:
            return number, itself
        before = _before_combiner(part, of)
        if before is None:
            return None, False
        part, itself = before, False


def is_unique(part: tf.Tensor, of: Expressions) -> bool:
    """Whether a part of a gradient's indices was made unique, so that it does not tell repeats."""
    before: tf.Tensor | None = part
    while before is not None:
        part = of.stripped(before)
        op = op_of(part)
        if op is not None and op.type in UNIQUE and part.value_index == 0:
            return True
        before = _before_combiner(part, of)
    return False


def _before_combiner(tensor: tf.Tensor, of: Expressions) -> tf.Tensor | None:
    """One step back through what `tf.nn.safe_embedding_lookup_sparse` does to ids."""
    op = op_of(tensor)
    if op is None:
        return None
    if op.type in UNIQUE and tensor.value_index == 0:
        return op.inputs[0]
    if op.type == "SparseFillEmptyRows" and tensor.value_index == 1:
        return op.inputs[1]
    if op.type == "RaggedTensorToSparse" and tensor.value_index == 1:
        return op.inputs[len(op.inputs) - 1]
    if op.type == "GatherV2":  # tf.sparse.retain
        chosen = op_of(of.stripped(op.inputs[1]))
        if chosen is not None and chosen.type == "Where":
            return op.inputs[0]
    return None


def before_unique(ids: tf.Tensor, of: Expressions) -> tf.Tensor:
    """Ids before `tf.unique` left each there once."""
    while True:
        fed = of.stripped(ids)
        op = op_of(fed)
        if op is None or op.type not in UNIQUE or fed.value_index:
            return ids
        ids = op.inputs[0]


def before_joining(indices: tf.Tensor, of: Expressions) -> tf.Tensor | None:
    """This rank's part of indices that one op joined with other ranks'; `None` if none did.

    Horovod's optimizers put that op into a function of its own, its tape into a branch.
    """
    tensor = of.stripped(indices)
    op = op_of(tensor)
    if op is None:
        return None
    if op.type.startswith(_JOINING):
        return op.inputs[tensor.value_index]  # grouped: as many outputs as inputs
    for graph in functions_of(op):
        part = before_joining(graph.outputs[tensor.value_index], of)
        if part is not None:
            part, first = of.stripped(part), _CALLS[op.type][1]
            given = [i for i, own in enumerate(graph.inputs) if own is part]
            return op.inputs[first + given[0]] if given else part
    return None


def functions_of(op: tf.Operation) -> list[Any]:
    """The graphs of the functions that an op calls: of branches, or of one; as far as known."""
    names, _ = _CALLS.get(op.type, ((), 0))
    given = [op.get_attr(name) for name in names]
    functions = [f for one in given for f in (one if isinstance(one, list) else [one])]
    called = [op.graph._get_function(function.name) for function in functions]
    return [one.graph for one in called if getattr(one, "graph", None) is not None]


def lookups_in_dense(
    gradient: tf.Tensor, variable: tf.Variable, known: set[int], of: Expressions
) -> tuple[list[tf.Tensor], list[str]]:
    """The indices of the slices that were added up to a V×d gradient.

    Two walks upstream. All that the gradient was computed from is searched for sums of the slices
    of `known` ids. What makes up the gradient itself (same shape, or moved about) is also held
    against what may bring in other slices.

    Args:
      gradient: V×d.
      variable: the table's.
      known: numbers of the ids that were looked up.
      of: numbers of the graph's tensors.

    Returns:
      The indices; and the ops that bring in, from outside this graph, what cannot be looked into.
    """
    indices, unknown = _added_to(gradient, variable, of)
    met = {some.ref() for some in indices}
    for tensor in _upstream(gradient, of):
        op = op_of(tensor)
        if op is None or not _sums_slices(op, variable) or op.inputs[1].ref() in met:
            continue
        parts = parts_of(op.inputs[1], known, of)
        if all(origin(part, known, of)[0] is not None for part in parts):
            indices.append(op.inputs[1])
    return indices, unknown


def _sums_slices(op: tf.Operation, variable: tf.Variable) -> bool:
    same = op.outputs and op.outputs[0].shape.is_compatible_with(variable.shape)
    return bool(op.type == "UnsortedSegmentSum" and same)


def _upstream(tensor: tf.Tensor, of: Expressions) -> Iterator[tf.Tensor]:
    """The tensor and all of floating point that it was computed from."""
    waiting, seen = [tensor], set()
    while waiting:
        last = of.outside(waiting.pop())
        if last.ref() not in seen:
            seen.add(last.ref())
            yield last
            op = op_of(last)
            waiting += [i for i in op.inputs if i.dtype.is_floating] if op is not None else []


def _added_to(
    gradient: tf.Tensor, variable: tf.Variable, of: Expressions
) -> tuple[list[tf.Tensor], list[str]]:
    """As `lookups_in_dense`, of any slices, through ops that keep, move, pick or add up numbers."""
    indices: list[tf.Tensor] = []
    unknown: list[str] = []
    waiting, seen = [(gradient, True)], set()
    while waiting:
        tensor, is_whole = waiting.pop()
        tensor = of.outside(tensor)
        op = op_of(tensor)
        if tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        if op is None:
            unknown.append("a constant")
        elif op.type in _OPAQUE or op.type.startswith(_JOINING):
            unknown.append(f"{op.type} {op.name!r}")
        elif op.type == "UnsortedSegmentSum":
            if _sums_slices(op, variable):
                indices.append(op.inputs[1])
            elif is_whole:  # of several gradients at once, as tf.vectorized_map sums them
                unknown.append(f"{op.type} {op.name!r}")
        elif not _reads_value(op, variable, of):
            before = _made_of(op, tensor, variable)
            whole = tensor.shape[-2:] == variable.shape
            waiting += [(i, whole) for i in before]
            kept = op.type in _GIVING or any(i.dtype in _KEPT for i in op.inputs)
            if kept and not before:
                unknown.append(f"{op.type} {op.name!r}")
    return indices, unknown


def _reads_value(op: tf.Operation, variable: tf.Variable, of: Expressions) -> bool:
    """Whether it reads the table: its value is a factor where rows are normalized, for instance."""
    reads = op.type in ("ReadVariableOp", "ResourceGather")
    return reads and of.outside(op.inputs[0]) is variable.handle


def _made_of(op: tf.Operation, tensor: tf.Tensor, variable: tf.Variable) -> list[tf.Tensor]:
    """The inputs that may hold gradients of the table, one or, stacked, several."""
    floats = [i for i in op.inputs if i.dtype.is_floating]
    if op.type in _MOVING:
        return floats
    same = tensor.shape if tensor.shape.is_fully_defined() else variable.shape
    like = [i for i in floats if i.shape == same or i.shape[-2:] == variable.shape]
    if like or op.type in _PRODUCTS:
        return like
    # Also where shapes are not known, unless another input accounts for the op's.
    return [i for i in floats if i.shape[-2:].is_compatible_with(variable.shape)]
