"""Lookups → counts: in how many samples of the batch each row of a table occurs (`cnt`).

Counts come from the ids themselves and not from the repeats in a gradient: Merlin's stock
`DeepFMModel` looks every table up twice per step, and its list columns make ids unique before
the lookup, so repeats are not counts there.

The same ids looked up again count once; other ids of the same feature (micro-batches before one
update, a tower used twice, negatives) add up. In a graph, what a tensor was computed from tells
which is which; eagerly, its content and the tape that recorded it do. What was looked up is then
held against the gradient's own indices: only lookups that the gradient came from are counted, and
a gradient that came from anything else is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from merlin_cowclip.plugins._stack import is_taped, taped_mark, tf
from merlin_cowclip.plugins.row_sums import tally, unique, unique_rows
from merlin_cowclip.plugins.same_ids import (
    Expressions,
    FuncGraph,
    before_joining,
    is_unique,
    lookups_in_dense,
    origin,
    parts_of,
)

_LOOKUPS = "_merlin_cowclip_lookups"

# Of forward passes under a tape whose gradients are never applied: they must not pile up.
MOST_PASSES = 1024


class NotRecordedError(Exception):
    """A gradient did not come from the recorded lookups; the message says what it came from."""


@dataclass(frozen=True, eq=False)
class Lookup:
    """Rows that a batch reads from a table, by one feature or by several at once.

    Attributes:
      key: the feature. The same ids under one key count once, other ids add up. Empty where the
        feature is not known: the same ids are then those of any feature.
      rows: integer row numbers of the table. Dense b×F: F one-hot features, each counted by itself:
        a row that two of them share counts twice in a sample that holds it in both. Ragged b×(n): a
        list column. Dense b×n with `is_list`: a padded list column.
      is_list: whether one sample may hold a row twice.
      padding: row that stands for "no id" in a list column, never counted.
      features: the F features, where `key` stands for several. One that is looked up alone as well
        counts once.
      sources: what `rows` were computed from, one tensor per feature, where that tells better than
        `rows` whether ids are the same: they may be rows of several features, or checked ones.
      samples: makes the sample of each of `rows`, in their order, where that is not the first axis.
        A padding row is then an id as any other where no sample has two, but with `mask_zero`.
      mask_zero: see `samples`.
      combined: whether `tf.nn.safe_embedding_lookup_sparse` looks the rows of a ragged list up: it
        makes them unique, leaves negative ones out, and reads row 0 for a list without any.
    """

    key: str
    rows: tf.Tensor | tf.RaggedTensor
    is_list: bool = False
    padding: int | tf.Tensor | None = None
    features: tuple[str, ...] = ()
    sources: tuple[tf.Tensor | tf.RaggedTensor, ...] = ()
    combined: bool = False
    samples: Callable[[], tf.Tensor] | None = None
    mask_zero: bool = False

    def flat_rows(self) -> tf.Tensor:
        """All row numbers, int64, as they come."""
        rows = self.rows.flat_values if isinstance(self.rows, tf.RaggedTensor) else self.rows
        return tf.reshape(tf.cast(rows, tf.int64), [-1])

    def counted_rows(self, num_rows: int) -> tf.Tensor:
        """Row numbers, int64, each as often as there are samples that hold it."""
        flat = self.flat_rows()
        if not self.is_list:
            return flat
        if self.samples is not None:
            samples = tf.reshape(self.samples(), [-1])
        elif isinstance(self.rows, tf.RaggedTensor):
            samples = samples_of(self.rows)
        else:
            width = tf.shape(self.rows, tf.int64)[1]
            samples = tf.range(tf.size(flat, tf.int64)) // tf.maximum(width, 1)
        # A combiner leaves negative ids out, and a GPU reads no row for those beyond the table.
        held = tf.logical_and(flat >= 0, flat < num_rows)
        if self.padding is not None:
            is_id = tf.not_equal(flat, self.padding)
            if self.samples is not None and not self.mask_zero:
                # Of fewer numbers than ids some sample has two: the common case, and soon told.
                one_hot = tf.cond(
                    tf.size(samples, tf.int64) > tf.reduce_max(samples) + 1,
                    lambda: False,
                    lambda: tf.size(unique(samples).rows) == tf.size(samples),
                )
                is_id = tf.logical_or(is_id, one_hot)
            held = tf.logical_and(held, is_id)
        flat, samples = tf.boolean_mask(flat, held), tf.boolean_mask(samples, held)
        pairs, _, _ = unique(samples * num_rows + flat)
        return pairs % num_rows

    def gathered_rows(self) -> tf.Tensor:
        """The rows that the lookup's gradient has, int64, as often as it has them."""
        flat = self.flat_rows()
        if not self.combined:
            return flat
        held = flat >= 0
        filled = unique(tf.boolean_mask(samples_of(self.rows), held)).rows
        flat = tf.boolean_mask(flat, held)
        if len(filled) < self.rows.nrows():
            flat = tf.concat([flat, tf.zeros([1], tf.int64)], axis=0)
        return unique(flat).rows


def samples_of(rows: tf.RaggedTensor) -> tf.Tensor:
    """The sample of each value of b×(n), int64; on GPUs, `value_rowids()` goes through the host."""
    ends = tf.cast(rows.row_splits, tf.int64)[1:]  # an int32 slice would be the host's
    values = tf.range(tf.size(rows.flat_values, tf.int64))
    return tf.searchsorted(ends, values, side="right", out_type=tf.int64)


class _Pass(NamedTuple):
    """The lookups of one eager forward pass, and a tensor that its tape recorded."""

    mark: tf.Tensor
    lookups: list[Lookup]


class IdRecorder:
    """Holds the lookups of one table since its last update.

    In a graph they are kept on the graph itself, so that a retraced function sees its own tensors
    and a discarded one takes its tensors along. Eagerly, those that a `tf.GradientTape` records are
    kept, by tape, until they are counted: others cannot reach a gradient. A recorder belongs to the
    `TableSpec` that it is given to.
    """

    def __init__(self) -> None:
        self._variable: Callable[[], tf.Variable | None] = lambda: None
        self._passes: deque[_Pass] = deque(maxlen=MOST_PASSES)

    def belong_to(self, get_variable: Callable[[], tf.Variable | None]) -> None:
        """Record lookups of this variable; eagerly none where it is `None`, of a frozen table."""
        self._variable = get_variable

    def record(self, lookup: Lookup) -> None:
        """Note a lookup of the current step."""
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            noted: dict[int, list[Lookup]] = graph.__dict__.setdefault(_LOOKUPS, {})
            noted.setdefault(id(self), []).append(lookup)
            return
        if not self._passes or not is_taped(self._passes[-1].mark):
            variable = self._variable()
            mark = None if variable is None else taped_mark(variable)
            if mark is None:
                return
            self._passes.append(_Pass(mark, []))
        self._passes[-1].lookups.append(lookup)

    def passes(self) -> list[list[Lookup]]:
        """The lookups since the last update, by forward pass as far as that is known."""
        if tf.executing_eagerly():
            return [list(one.lookups) for one in self._passes]
        graph = tf.compat.v1.get_default_graph()
        # A branch of a tf.cond (loss scaling) may use what its outer graphs recorded.
        while isinstance(graph, FuncGraph):
            noted = graph.__dict__.get(_LOOKUPS, {}).get(id(self))
            if noted:
                return [list(noted)]
            graph = graph.outer_graph
        return []

    def lookups(self) -> list[Lookup]:
        """All lookups since the last update, in order; empty where none could be recorded."""
        return [lookup for one in self.passes() for lookup in one]

    def forget(self) -> None:
        """An update was made: what follows belongs to the next. A graph has its own lookups."""
        if tf.executing_eagerly():
            self._passes.clear()


def distinct(lookups: Iterable[Lookup], of: Expressions | None = None) -> list[Lookup]:
    """The lookups of one forward pass without those of the same ids, or parts of them.

    Args:
      lookups: all of them.
      of: numbers of the graph's tensors; needed in a graph only.
    """
    lookups, of = list(lookups), of or Expressions()
    kept: list[tuple[int, Lookup]] = []
    seen: set[tuple[str, Any]] = set()
    # Those of several features first, since they take single ones in; those of an unknown feature
    # last, since they are taken in by any.
    order = sorted(
        range(len(lookups)), key=lambda i: (-len(lookups[i].features), not lookups[i].key, i)
    )
    for place in order:
        lookup = lookups[place]
        keys = lookup.features or (lookup.key,)
        marks = list(zip(keys, _identities(lookup, len(keys), of), strict=True))
        new = [i for i, (key, ids) in enumerate(marks) if (key, ids) not in seen]
        if not keys[0] and any(ids == marks[0][1] for _, ids in seen):
            new = []
        seen.update(marks)
        if 0 < len(new) < len(marks):
            columns = tf.constant(new, tf.int64)
            lookup = replace(lookup, rows=tf.gather(lookup.rows, columns, axis=1))
        if new:
            kept.append((place, lookup))
    return [lookup for _, lookup in sorted(kept, key=lambda item: item[0])]


def _identities(lookup: Lookup, features: int, of: Expressions) -> list[Any]:
    """For each feature of a lookup, what is equal for the same ids."""
    if lookup.sources:
        return [_identity(source, of) for source in lookup.sources]
    if features == 1:
        return [_identity(lookup.rows, of)]
    if tf.executing_eagerly():
        return [_identity(column, of) for column in tf.unstack(lookup.rows, features, axis=1)]
    return [(of.number(lookup.rows), i) for i in range(features)]


def _identity(ids: Any, of: Expressions) -> Any:
    ragged = isinstance(ids, tf.RaggedTensor)
    values = ids.flat_values if ragged else ids
    parts = [values, *(ids.nested_row_splits if ragged else ())]
    if not tf.executing_eagerly():
        return tuple(of.ids(part) for part in parts)
    return tuple(tf.cast(part, tf.int64).numpy().tobytes() for part in parts)


class Counts(NamedTuple):
    """The rows of a gradient and in how many samples each occurs."""

    rows: tf.Tensor  # U unique row numbers, int64
    position: tf.Tensor  # n, where each of the gradient's indices stands in `rows`, int64
    counts: tf.Tensor  # U, float32; 0 of a row that no sample holds


@tf.autograph.experimental.do_not_convert
def count_sparse(
    recorder: IdRecorder,
    indices: tf.Tensor,
    num_rows: int,
    *,
    on_cpu: bool = False,
) -> Counts:
    """Counts of a sparse gradient's rows, from the lookups that it came from.

    Args:
      recorder: of the table.
      indices: row numbers of the gradient, with repeats, n.
      num_rows: V.
      on_cpu: whether the ops are placed on a CPU; see `row_sums.py`.

    Raises:
      NotRecordedError: the gradient holds rows that were looked up past the recorder, or before
        the last update.
    """
    passes = recorder.passes()
    if not passes:
        raise NotRecordedError("no lookup of the table in this step")
    if tf.executing_eagerly():
        recorder.forget()
        counted = _passes_in(passes, indices)
        once = [one for p in counted for one in distinct(p)]
        return _samples_per_row(once, indices, num_rows, on_cpu)
    of = Expressions()
    (lookups,) = passes
    mine = before_joining(indices, of)
    found, themselves = _lookups_in([indices if mine is None else mine], lookups, of)
    once = distinct(found, of)
    plain = themselves and not any(lookup.is_list for lookup in found)
    # One-hot ids, each looked up once: repeats are counts, also those of other ranks' slices.
    if plain and once == found:
        return repeats_per_row(indices, num_rows, on_cpu=on_cpu)
    if mine is not None:
        raise NotRecordedError("rows of other ranks, of lists or of ids that were looked up twice")
    return _samples_per_row(once, indices, num_rows, on_cpu)


@tf.autograph.experimental.do_not_convert
def count_dense(
    recorder: IdRecorder,
    gradient: tf.Tensor,
    variable: tf.Variable,
    num_rows: int,
    *,
    on_cpu: bool = False,
) -> tf.Tensor:
    """Counts of all rows of a table whose gradient is dense, V float32.

    Args:
      recorder: of the table.
      gradient: V×d.
      variable: the table's.
      num_rows: V.
      on_cpu: whether the ops are placed on a CPU; see `row_sums.py`.

    Raises:
      NotRecordedError: the gradient comes, as a whole or in part, from elsewhere than this step's
        lookups and layers that read the whole table; or, eagerly, several forward passes were made
        since the last update.
    """
    passes = recorder.passes()
    if tf.executing_eagerly():
        recorder.forget()
        if not passes:
            raise NotRecordedError("no lookup of the table in this step")
        if len(passes) > 1:
            raise NotRecordedError(
                f"a dense gradient after {len(passes)} forward passes since the last update, of "
                "which it does not tell, eagerly, what it came from: apply the gradient of each "
                "tape, or use a tf.function"
            )
        once = distinct(passes[0])
    else:
        of = Expressions()
        lookups = [lookup for one in passes for lookup in one]
        slices, unknown = lookups_in_dense(gradient, variable, set(_by_ids(lookups, of)), of)
        if unknown:
            raise NotRecordedError(f"a dense gradient that comes from {unknown[0]}")
        found, _ = _lookups_in(slices, lookups, of)
        once = distinct(found, of)
    if not once:
        return tf.zeros([num_rows])
    counted = tf.concat([lookup.counted_rows(num_rows) for lookup in once], axis=0)
    return tally(counted, tf.constant(num_rows, tf.int64), on_cpu)


def _by_ids(lookups: Iterable[Lookup], of: Expressions) -> dict[int, list[Lookup]]:
    """A graph's lookups by the number of their ids."""
    recorded: dict[int, list[Lookup]] = {}
    for lookup in lookups:
        rows = lookup.rows
        values = rows.flat_values if isinstance(rows, tf.RaggedTensor) else rows
        recorded.setdefault(of.ids(values), []).append(lookup)
    return recorded


def _lookups_in(
    indices: Sequence[tf.Tensor], lookups: Sequence[Lookup], of: Expressions
) -> tuple[list[Lookup], bool]:
    """The recorded lookups that indices of a graph were put together from.

    Returns:
      The lookups; and whether the indices are their rows, each as often.
    """
    recorded = _by_ids(lookups, of)
    known = set(recorded)
    found, themselves = [], True
    for some in indices:
        for part in parts_of(some, known, of):
            number, itself = origin(part, known, of)
            left = [] if number is None else recorded[number]
            if not left:
                made_by = "a constant" if not hasattr(part, "op") else repr(part.op.name)
                raise NotRecordedError(f"rows in the gradient that come from {made_by}")
            # The last stays: one forward pass may have several gradients.
            found.append(left.pop(0) if len(left) > 1 else left[0])
            themselves &= itself
    return found, themselves


def _passes_in(passes: list[list[Lookup]], indices: tf.Tensor) -> list[list[Lookup]]:
    """The eager forward passes that a gradient came from: all since the last update, or the latest.

    Passes whose gradient was not applied (a step that loss scaling left out) are passed over.
    """
    wanted = tf.sort(tf.reshape(tf.cast(indices, tf.int64), [-1]))
    gathered = [tf.concat([one.gathered_rows() for one in p], axis=0) for p in passes]
    size = sum(len(rows) for rows in gathered)
    for first, rows in enumerate(gathered):
        if size == len(wanted):
            held = tf.sort(tf.concat(gathered[first:], axis=0))
            if tf.reduce_all(tf.equal(held, wanted)):
                return passes[first:]
        size -= len(rows)
    raise NotRecordedError(
        f"a gradient of {len(wanted)} rows, which are not the {len(gathered[-1])} that the last "
        f"forward pass looked up, nor those of the latest of all {len(passes)} since the last "
        "update; eagerly, each tape's gradient is to be applied before another one's, if its "
        "forward pass came in between"
    )


@tf.autograph.experimental.do_not_convert
def samples_per_row(
    lookups: Iterable[Lookup], indices: tf.Tensor, num_rows: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Rows of a batch and in how many samples each occurs (`cnt` of Algorithm 1, line 7).

    Per feature, added up over features that share a table. A row of the gradient that no sample
    holds (padding) counts as 0.

    Args:
      lookups: one forward pass's lookups; the same ids under one key count once.
      indices: row numbers of the gradient, with repeats, n.
      num_rows: V.

    Returns:
      rows: U unique row numbers, int64.
      position: n, where each of `indices` stands in `rows`, int64.
      counts: U, float32.
    """
    return _samples_per_row(distinct(lookups), indices, num_rows, on_cpu=False)


def _samples_per_row(
    lookups: Sequence[Lookup],
    indices: tf.Tensor,
    num_rows: int,
    on_cpu: bool,
) -> Counts:
    counted = tf.concat([lookup.counted_rows(num_rows) for lookup in lookups], axis=0)
    both = tf.concat([counted, tf.cast(indices, tf.int64)], axis=0)
    rows, position, _ = unique_rows(both, num_rows, on_cpu)
    split = tf.size(counted)
    counts = tally(position[:split], tf.size(rows, tf.int64), on_cpu)
    return Counts(rows, position[split:], counts)


def repeats_per_row(indices: tf.Tensor, num_rows: int, *, on_cpu: bool = False) -> Counts:
    """As `count_sparse`, where every repeat in `indices` is one sample."""
    rows, position, repeats = unique_rows(indices, num_rows, on_cpu)
    return Counts(rows, position, tf.cast(repeats, tf.float32))


def count_repeats(indices: tf.Tensor, num_rows: int, *, on_cpu: bool = False) -> Counts:
    """As `repeats_per_row`, of a variable whose lookups nobody records.

    Raises:
      NotRecordedError: in a graph, repeats are not samples: the same ids were looked up twice, or
        made unique before they were.
    """
    if not tf.executing_eagerly():
        of = Expressions()
        mine = before_joining(indices, of)
        parts = list(parts_of(indices if mine is None else mine, set(), of))
        if len({of.ids(part) for part in parts}) < len(parts):
            raise NotRecordedError("the same ids, looked up twice")
        if any(is_unique(part, of) for part in parts):
            raise NotRecordedError("ids that were made unique, as the combiner of a list does")
    return repeats_per_row(indices, num_rows, on_cpu=on_cpu)
