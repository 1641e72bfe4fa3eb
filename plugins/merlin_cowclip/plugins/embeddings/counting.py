# SPDX-License-Identifier: Apache-2.0
"""In how many samples of the batch each row of a table occurs: cnt of Algorithm 1, line 7.

A sample is the first axis of the ids as the table gets them, padding left out. Features add up; one
that is looked up several times in a step with the same tensor counts once (internals/counting.md).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, MutableSequence, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from merlin_cowclip.plugins._tensorflow import FuncGraph, is_recording, kept_on, tf
from merlin_cowclip.plugins.row_ops import Rows, source_of, tally, unique, unique_rows

_MOST_EAGER = 1024  # lookups of forward passes whose gradients are never applied
_CALL_IT_ITSELF = (
    "Call the table within the training step (not its variable, not in a tf.function of its own, "
    "and not for a metric), and apply each tape's gradients before the next forward pass. Do not "
    "use hvd.DistributedGradientTape or hvd.DistributedOptimizer."
)


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
        """Equal for lookups of one feature's tensor (of a list, its values), in a graph or not."""
        return self.feature, self.first_row, getattr(self.ids, "flat_values", self.ids).ref()

    def flat(self) -> tuple[tf.Tensor, tf.Tensor]:
        """All n ids and the sample of each, int64."""
        ids = self.ids
        if isinstance(ids, tf.RaggedTensor):
            rank = ids.shape.rank  # of lists of lists, or of b×(n)×1 as Merlin prepares it
            lists = ids if rank == 2 else ids.merge_dims(1, rank - 1)
            # Not value_rowids(): on GPUs it goes through the host. So would an int32 slice.
            ends = tf.cast(lists.row_splits, tf.int64)[1:]
            ids, values = ids.flat_values, tf.range(tf.size(lists.flat_values, tf.int64))
            samples = tf.searchsorted(ends, values, side="right", out_type=tf.int64)
        else:
            number, batch = tf.size(ids, tf.int64), tf.shape(ids, tf.int64)[0]
            samples = tf.range(number) // tf.maximum(number // tf.maximum(batch, 1), 1)
        return tf.reshape(tf.cast(ids, tf.int64), [-1]), samples

    def rows_per_sample(self, num_rows: int | tf.Tensor) -> tf.Tensor:
        """Row numbers of a table of `num_rows`, int64, each once per sample that holds it."""
        ids, samples = self.flat()
        if not self.is_list:
            return ids + self.first_row
        # A combiner leaves negative ids out, and a GPU reads no row for those beyond the table.
        held = tf.logical_and(ids >= 0, ids < num_rows - self.first_row)
        if self.padding is not None:
            held = tf.logical_and(held, tf.not_equal(ids, tf.cast(self.padding, tf.int64)))
        ids, samples = tf.boolean_mask(ids, held), tf.boolean_mask(samples, held)
        return unique(samples * num_rows + ids + self.first_row).rows % num_rows

    def rows_in_gradient(self) -> tuple[tf.Tensor, tf.Tensor]:
        """The least and the most rows that the lookup's gradient has, int32; eagerly exact."""
        number = tf.size(getattr(self.ids, "flat_values", self.ids))
        if not self.combined:
            return number, number
        if not tf.executing_eagerly():
            return tf.constant(0), number + 1
        ids, samples = (values.numpy() for values in self.flat())
        has_empty = len(np.unique(samples[ids >= 0])) < self.ids.nrows()  # for which row 0 is read
        number = tf.size(np.unique(np.append(ids[ids >= 0], [0] * int(has_empty))))
        return number, number


class LookupRecorder:
    """The lookups of one table since its last update; eagerly, those under a `tf.GradientTape`."""

    def __init__(self) -> None:
        self._eager: deque[Lookup] = deque(maxlen=_MOST_EAGER)
        self._key = f"_merlin_cowclip_lookups_{id(self)}"  # of graphs
        self.is_paused = False  # a layer around the table has recorded its call

    def record(self, lookup: Lookup) -> None:
        """Note a lookup of the current step."""
        if tf.executing_eagerly():
            self._eager += [lookup] if is_recording() else []
            return
        if _is_unique(getattr(lookup.ids, "flat_values", lookup.ids)):
            raise ValueError(
                f"The ids of feature {lookup.feature!r} were made unique before the table, so the "
                "samples that hold them cannot be counted. Give the table the batch's ids."
            )
        # On the graph: a retraced function sees its own tensors.
        kept_on(tf.compat.v1.get_default_graph(), self._key, []).append(lookup)

    def lookups(self) -> MutableSequence[Lookup]:
        """All lookups since the last update, in order."""
        if tf.executing_eagerly():
            return self._eager
        graph = tf.compat.v1.get_default_graph()
        # A branch of a tf.cond (loss scaling) may use what its outer graphs recorded.
        while isinstance(graph, FuncGraph):
            noted: MutableSequence[Lookup] | None = getattr(graph, self._key, None)
            if noted:
                return noted
            graph = graph.outer_graph
        return []

    def take(self, name: str, indices: tf.Tensor | None = None) -> list[Lookup]:
        """The lookups of an update of table `name`, by a gradient of these rows; forgets them."""
        lookups, received = list(self.lookups()), "no lookup of the table in this step"
        self.forget()
        if lookups and (indices is None or not tf.executing_eagerly()):
            return lookups
        if lookups:
            number = int(tf.size(indices))
            sizes = list(accumulate(int(one.rows_in_gradient()[0]) for one in lookups[::-1]))
            if number in sizes:
                return lookups[-1 - sizes.index(number) :]  # a step before may have been left out
            received = f"a gradient of {number} rows, which are not those of the latest lookups"
        raise ValueError(f"Cannot count the ids of table {name!r}: {received}. {_CALL_IT_ITSELF}")

    def forget(self) -> None:
        """Begin another update."""
        self.lookups().clear()


def _is_unique(ids: tf.Tensor) -> bool:
    op = getattr(source_of(ids), "op", None)
    return op is not None and op.type.startswith("Unique")


def count_samples(table: Any, indices: tf.Tensor, on_cpu: bool = False) -> Rows:
    """The rows of a `TableSpec`'s gradient (n indices), and how many samples of the step hold each.

    A gradient of other rows than the lookups is a ValueError; in a graph, the step's error.
    """
    lookups, num_rows = table.recorder.take(table.name, indices), table.num_rows
    checks = [] if tf.executing_eagerly() else [_check_size(lookups, indices, table.name)]
    once = {one.identity: one for one in lookups}.values()
    times = set(Counter(one.identity for one in lookups).values())
    if len(times) == 1 and not any(one.is_list for one in once):  # repeats are counts
        found = unique_rows(indices, num_rows, on_cpu)
        with tf.control_dependencies(checks):
            return found._replace(counts=found.counts / max(times))
    held = tf.concat([one.rows_per_sample(num_rows) for one in once], axis=0)
    both = tf.concat([held, tf.cast(indices, tf.int64)], axis=0)
    rows, position, _ = unique_rows(both, num_rows, on_cpu)
    split = tf.size(held)
    with tf.control_dependencies(checks):
        counts = tally(position[:split], tf.size(rows, tf.int64), on_cpu)
    return Rows(rows, position[split:], counts)


def _check_size(lookups: Sequence[Lookup], indices: tf.Tensor, name: str) -> tf.Operation:
    """Refuse, at the step, a gradient with another number of rows than the lookups have ids."""
    sizes = zip(*(lookup.rows_in_gradient() for lookup in lookups), strict=True)
    least, most = (tf.add_n(list(bounds)) for bounds in sizes)
    refusal = (
        f"Cannot count the ids of table {name!r}: the gradient has other rows than the recorded "
        f"lookups. {_CALL_IT_ITSELF} Rows in the gradient, and ids that were looked up:"
    )
    number = tf.size(indices)
    # int32 sizes are the host's: nothing waits for a device. An int64 has the error in a branch.
    fits = tf.equal(tf.minimum(tf.maximum(number, least), most), number)
    return tf.debugging.Assert(fits, [refusal, tf.size(indices, tf.int64), most])


def count_all_rows(table: Any, on_cpu: bool = False) -> tf.Tensor:
    """Counts of all rows of a table whose gradient is dense, V float32; see `count_samples`."""
    once = {one.identity: one for one in table.recorder.take(table.name)}.values()
    held = tf.concat([one.rows_per_sample(table.num_rows) for one in once], axis=0)
    return tally(held, table.num_rows, on_cpu)


def check_repeats(indices: tf.Tensor, variable: tf.Variable) -> None:
    """Refuse, in a graph, a gradient in which the repeats of a row are not its samples."""
    op = getattr(source_of(indices), "op", None)
    parts = op.inputs[:-1] if op is not None and op.type == "ConcatV2" else [indices]
    is_twice = len({source_of(part).ref() for part in parts}) < len(parts)
    if is_twice or hasattr(variable, "key_map") or any(_is_unique(part) for part in parts):
        raise ValueError(
            "A CowClipAdam without a model counts the repeats of a row in the gradient, so ids "
            f"must be looked up once per sample. Received: {variable.name!r}, whose ids were "
            "looked up twice, or made unique, as a list's combiner and SOK do. Use "
            "CowClipOptimizer.for_model (CowClipSokOptimizer for SOK)."
        )
