"""In how many samples of the batch each row of a table occurs: cnt of Algorithm 1, line 7.

cnt of a row is the number of samples of the batch that hold its id, added up over the features that
a table serves. A sample is the first axis of the ids as the table gets them; padding is not
counted; a feature that is looked up several times in a step with the same tensor counts once.

Counts come from the ids themselves and not from the repeats in a gradient: Merlin's stock
`DeepFMModel` looks every table up twice per step, and its list columns make ids unique before the
lookup.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from merlin_cowclip.plugins._tensorflow import FuncGraph, is_recording, tf
from merlin_cowclip.plugins.row_ops import source_of, tally, unique, unique_rows

_LOOKUPS = "_merlin_cowclip_lookups"

# Eager lookups of forward passes whose gradients are never applied: they must not pile up.
MOST_LOOKUPS = 1024


class NotRecordedError(Exception):
    """A gradient did not come from the recorded lookups; the message says what was received."""


@dataclass(frozen=True, eq=False)
class Lookup:
    """The ids of one feature as a table receives them; axis 0 is the batch.

    Attributes:
      feature: its name; "" where the caller gives none.
      ids: integers, b or b×1 (one-hot), b×n… (a padded list) or ragged b×(n)… (a list).
      first_row: the row of id 0, in a table that holds several fields.
      padding: the id that stands for "none" in a list; not counted.
      combined: whether the gradient has each row once (`tf.nn.safe_embedding_lookup_sparse`).
      check: a tensor that is available once the ids are known to be valid; the update waits for it.
    """

    feature: str
    ids: tf.Tensor | tf.RaggedTensor
    first_row: int = 0
    padding: int | tf.Tensor | None = None
    combined: bool = False
    check: tf.Tensor | None = None

    @property
    def is_list(self) -> bool:
        """Whether one sample may hold a row twice, or padding."""
        if isinstance(self.ids, tf.RaggedTensor) or self.padding is not None:
            return True
        return self.ids.shape.rank is None or any(n != 1 for n in self.ids.shape[1:])

    @property
    def identity(self) -> Hashable:
        """The same for one feature's tensor that is looked up again, as wide and deep parts do."""
        parts = tf.nest.flatten(self.ids, expand_composites=True)
        return self.feature, self.first_row, *(source_of(part).ref() for part in parts)

    def flat_ids(self) -> tf.Tensor:
        """All ids, int64, in order."""
        ids = self.ids.flat_values if isinstance(self.ids, tf.RaggedTensor) else self.ids
        return tf.reshape(tf.cast(ids, tf.int64), [-1])

    def samples(self) -> tf.Tensor:
        """The sample of each of `flat_ids`, int64."""
        if isinstance(self.ids, tf.RaggedTensor):
            rank = self.ids.shape.rank  # of lists of lists, or of b×(n)×1 as Merlin prepares it
            return samples_of(self.ids if rank == 2 else self.ids.merge_dims(1, rank - 1))
        number, batch = tf.size(self.ids, tf.int64), tf.shape(self.ids, tf.int64)[0]
        return tf.range(number) // tf.maximum(number // tf.maximum(batch, 1), 1)

    def rows_per_sample(self, num_rows: int | tf.Tensor) -> tf.Tensor:
        """Row numbers of a table of `num_rows`, int64, each once per sample that holds it."""
        ids = self.flat_ids()
        if not self.is_list:
            return ids + self.first_row
        # A combiner leaves negative ids out, and a GPU reads no row for those beyond the table.
        held = tf.logical_and(ids >= 0, ids < num_rows - self.first_row)
        if self.padding is not None:
            held = tf.logical_and(held, tf.not_equal(ids, tf.cast(self.padding, tf.int64)))
        ids, samples = tf.boolean_mask(ids, held), tf.boolean_mask(self.samples(), held)
        pairs, _, _ = unique(samples * num_rows + ids + self.first_row)
        return pairs % num_rows

    def rows_in_gradient(self) -> tuple[tf.Tensor, tf.Tensor]:
        """At least and at most how many rows the lookup's gradient has, int32.

        Eagerly both are the exact number.
        """
        values = self.ids.flat_values if isinstance(self.ids, tf.RaggedTensor) else self.ids
        number = tf.size(values)
        if not self.combined:
            return number, number
        if not tf.executing_eagerly():
            return tf.constant(0), number + 1
        held = self.flat_ids() >= 0  # row 0 is read for a list without any id
        ids, filled = tf.boolean_mask(self.flat_ids(), held), tf.boolean_mask(self.samples(), held)
        if tf.size(unique(filled).rows, tf.int64) < self.ids.nrows(tf.int64):
            ids = tf.concat([ids, [0]], axis=0)
        exact = tf.size(unique(ids).rows)
        return exact, exact


def samples_of(rows: tf.RaggedTensor) -> tf.Tensor:
    """The sample of each value of b×(n), int64; on GPUs, `value_rowids()` goes through the host."""
    ends = tf.cast(rows.row_splits, tf.int64)[1:]  # an int32 slice would be the host's
    values = tf.range(tf.size(rows.flat_values, tf.int64))
    return tf.searchsorted(ends, values, side="right", out_type=tf.int64)


class LookupRecorder:
    """The lookups of one table since its last update.

    In a graph they are kept on the graph itself, so that a retraced function sees its own tensors
    and a discarded one takes its tensors along. Eagerly, those under a `tf.GradientTape` are kept.
    """

    def __init__(self) -> None:
        self._eager: deque[Lookup] = deque(maxlen=MOST_LOOKUPS)

    def record(self, lookup: Lookup) -> None:
        """Note a lookup of the current step."""
        if tf.executing_eagerly():
            if is_recording():
                self._eager.append(lookup)
            return
        if _is_unique(tf.nest.flatten(lookup.ids, expand_composites=True)[0]):
            raise ValueError(
                f"The ids of feature {lookup.feature!r} were made unique before the table, so the "
                "samples that hold them cannot be counted. Give the table the batch's ids."
            )
        graph = tf.compat.v1.get_default_graph()
        noted: dict[int, list[Lookup]] = graph.__dict__.setdefault(_LOOKUPS, {})
        noted.setdefault(id(self), []).append(lookup)

    def lookups(self) -> list[Lookup]:
        """All lookups since the last update, in order."""
        return list(self._lookups())

    def _lookups(self) -> Any:
        if tf.executing_eagerly():
            return self._eager
        graph = tf.compat.v1.get_default_graph()
        # A branch of a tf.cond (loss scaling) may use what its outer graphs recorded.
        while isinstance(graph, FuncGraph):
            noted = graph.__dict__.get(_LOOKUPS, {}).get(id(self))
            if noted:
                return noted
            graph = graph.outer_graph
        return []

    def of_gradient(self, indices: tf.Tensor) -> list[Lookup]:
        """The lookups that a sparse gradient with these rows came from.

        In a graph all since the last update; eagerly the latest with as many rows, so that a step
        that loss scaling left out is passed over.

        Raises:
          NotRecordedError: eagerly, there are none.
        """
        lookups = self.lookups()
        if not tf.executing_eagerly():
            return lookups
        missing, first = int(tf.size(indices)), len(lookups)
        while missing > 0 and first > 0:
            first -= 1
            missing -= int(lookups[first].rows_in_gradient()[0])
        if missing:
            raise NotRecordedError(
                f"a gradient of {int(tf.size(indices))} rows, which are not those of the latest "
                "lookups since the last update; apply each tape's gradients before the next "
                "forward pass, or put the step into one tf.function"
            )
        return lookups[first:]

    def forget(self) -> None:
        """An update was made: what follows belongs to the next."""
        self._lookups().clear()


def _is_unique(ids: tf.Tensor) -> bool:
    op = getattr(source_of(ids), "op", None)
    return op is not None and op.type.startswith("Unique")


def distinct(lookups: Iterable[Lookup]) -> list[Lookup]:
    """The lookups without those of a feature's same tensor."""
    return list({lookup.identity: lookup for lookup in lookups}.values())


class Counts(NamedTuple):
    """The rows of a gradient and in how many samples each occurs."""

    rows: tf.Tensor  # U unique row numbers, int64
    position: tf.Tensor  # n, where each of the gradient's indices stands in `rows`, int64
    counts: tf.Tensor  # U, float32; 0 of a row that no sample holds


@tf.autograph.experimental.do_not_convert
def count_samples(
    recorder: LookupRecorder,
    indices: tf.Tensor,
    num_rows: int,
    *,
    name: str = "",
    on_cpu: bool = False,
) -> Counts:
    """Counts of a sparse gradient's rows, from the lookups of the step.

    Args:
      recorder: of the table.
      indices: row numbers of the gradient, with repeats, n.
      num_rows: V.
      name: of the table, for the error.
      on_cpu: whether the ops are placed on a CPU; see `row_ops.py`.

    Raises:
      NotRecordedError: no lookup was recorded; or, eagerly, not those of the gradient.
      tf.errors.InvalidArgumentError: in a graph, at the step, the gradient has another number of
        rows than the recorded lookups.
    """
    lookups = recorder.of_gradient(indices)
    recorder.forget()
    if not lookups:
        raise NotRecordedError("no lookup of the table in this step")
    checks = [] if tf.executing_eagerly() else [_check_size(lookups, indices, name)]
    repeats = Counter(lookup.identity for lookup in lookups)
    once = distinct(lookups)
    times = set(repeats.values())
    if len(times) == 1 and not any(one.is_list for one in once):  # repeats are counts
        found = repeats_per_row(indices, num_rows, on_cpu=on_cpu)
        with tf.control_dependencies(checks):
            return found._replace(counts=found.counts / max(times))
    held = tf.concat([one.rows_per_sample(num_rows) for one in once], axis=0)
    both = tf.concat([held, tf.cast(indices, tf.int64)], axis=0)
    rows, position, _ = unique_rows(both, num_rows, on_cpu)
    split = tf.size(held)
    with tf.control_dependencies(checks):
        counts = tally(position[:split], tf.size(rows, tf.int64), on_cpu)
    return Counts(rows, position[split:], counts)


def _check_size(lookups: Sequence[Lookup], indices: tf.Tensor, name: str) -> tf.Tensor:
    """Refuse, at the step, a gradient with another number of rows than the lookups have ids."""
    sizes = [lookup.rows_in_gradient() for lookup in lookups]
    number = tf.size(indices)
    least, most = (tf.add_n(list(bounds)) for bounds in zip(*sizes, strict=True))
    refusal = (
        f"Cannot count the ids of table {name!r}: the gradient has other rows than the recorded "
        "lookups. Call the table within the training step (not its variable, not in a tf.function "
        "of its own, and not for a metric). Do not use hvd.DistributedGradientTape or "
        "hvd.DistributedOptimizer. Rows in the gradient, and ids that were looked up:"
    )

    def refuse() -> tf.Tensor:
        check = tf.raw_ops.Assert(condition=tf.constant(False), data=[refusal, number, most])
        with tf.control_dependencies([check]):
            return tf.constant(False)

    # Sizes are the host's: nothing waits for a device.
    fits = tf.equal(tf.minimum(tf.maximum(number, least), most), number)
    return tf.cond(fits, lambda: tf.constant(True), refuse)


@tf.autograph.experimental.do_not_convert
def count_all_rows(recorder: LookupRecorder, num_rows: int, *, on_cpu: bool = False) -> tf.Tensor:
    """Counts of all rows of a table whose gradient is dense, V float32; see `count_samples`."""
    once = distinct(recorder.lookups())
    recorder.forget()
    if not once:
        raise NotRecordedError("no lookup of the table in this step")
    held = tf.concat([one.rows_per_sample(num_rows) for one in once], axis=0)
    return tally(held, tf.constant(num_rows, tf.int64), on_cpu)


def repeats_per_row(indices: tf.Tensor, num_rows: int, *, on_cpu: bool = False) -> Counts:
    """As `count_samples`, where every repeat in `indices` is one sample."""
    return Counts(*unique_rows(indices, num_rows, on_cpu))


def count_repeats(indices: tf.Tensor, num_rows: int, *, on_cpu: bool = False) -> Counts:
    """As `repeats_per_row`, of a variable whose lookups nobody records.

    Raises:
      NotRecordedError: in a graph, repeats are not samples: the same ids were looked up twice, or
        made unique before they were.
    """
    op = getattr(source_of(indices), "op", None)
    parts = op.inputs[:-1] if op is not None and op.type == "ConcatV2" else [indices]
    if len({source_of(part).ref() for part in parts}) < len(parts):
        raise NotRecordedError("the same ids, looked up twice")
    if any(_is_unique(part) for part in parts):
        raise NotRecordedError("ids that were made unique, as the combiner of a list does")
    return repeats_per_row(indices, num_rows, on_cpu=on_cpu)
