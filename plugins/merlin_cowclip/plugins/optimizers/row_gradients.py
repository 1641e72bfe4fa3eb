"""A table's gradient, summed per row and counted: Algorithm 1, line 7."""

from __future__ import annotations

from typing import Any

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.clipping import CLIP_RULES, widened
from merlin_cowclip.plugins.distributed.gradients import RowSums
from merlin_cowclip.plugins.embeddings.counting import (
    NotRecordedError,
    count_all_rows,
    count_repeats,
    count_samples,
)
from merlin_cowclip.plugins.embeddings.discovery import check_regularizer
from merlin_cowclip.plugins.embeddings.tables import TableSpec
from merlin_cowclip.plugins.row_ops import Rows, colocated_with, sum_per_row, unique_rows


def sum_rows(
    gradient: Any, variable: tf.Variable, spec: TableSpec | None, optimizer: Any
) -> RowSums:
    """A table's gradient summed per row, and in how many samples of the batch each row occurs.

    Args:
      gradient: slices; or a tensor, of a tied table, whose rows are all of the batch.
      variable: V×d.
      spec: the table; `None` for a variable whose lookups nobody records.
      optimizer: the `CowClipAdam`: counts are needed where it clips, and wanted for statistics.

    Raises:
      ValueError: the gradient is dense, or the ids are not recorded.
    """
    with colocated_with(variable) as on_cpu:
        if not isinstance(gradient, tf.IndexedSlices):
            spec = _checked(spec, variable, optimizer.update)
            rows = tf.range(spec.num_rows, dtype=tf.int64)
            counts = _counts(spec, None, optimizer, on_cpu)
            return RowSums(rows, widened(gradient), counts, is_whole=True)
        if spec is None:
            counted = _repeats(variable, gradient.indices, optimizer.clip, on_cpu)
        else:
            counted = _counts(spec, gradient.indices, optimizer, on_cpu)
        rows, position, counts = counted
        sums = sum_per_row(widened(gradient.values), position, tf.size(rows), on_cpu)
        return RowSums(rows, sums, counts)


def _counts(spec: TableSpec, indices: tf.Tensor | None, optimizer: Any, on_cpu: bool) -> Any:
    """`Rows` and counts of a sparse gradient's rows; of a dense one the counts of all rows, V."""
    if optimizer.clip is not None or optimizer.statistics is not None:
        try:
            if indices is None:
                return count_all_rows(spec.recorder, spec.num_rows, on_cpu=on_cpu)
            return count_samples(
                spec.recorder, indices, spec.num_rows, name=spec.name, on_cpu=on_cpu
            )
        except NotRecordedError as received:
            if optimizer.clip is not None:
                raise ValueError(
                    f"Cannot count the ids of table {spec.name!r}: {received}. Call the table "
                    "itself within the training step (not its variable, not in a tf.function of "
                    "its own), and apply the gradients in the same function; or do not clip it."
                ) from None
    spec.recorder.forget()
    if indices is None:
        return tf.zeros([spec.num_rows])
    return unique_rows(indices, spec.num_rows, on_cpu)


def _repeats(variable: tf.Variable, indices: tf.Tensor, clip: str | None, on_cpu: bool) -> Rows:
    """Counts of a variable whose lookups nobody records: the repeats of rows in its gradient."""
    if clip is None or not CLIP_RULES[clip].adaptive:  # the bounds do not depend on counts
        return unique_rows(indices, variable.shape[0], on_cpu)
    try:
        if hasattr(variable, "key_map"):
            raise NotRecordedError("a table of SOK, whose gradient has each row once")
        return count_repeats(indices, variable.shape[0], on_cpu=on_cpu)
    except NotRecordedError as received:
        raise ValueError(
            "A CowClipAdam without a model counts the repeats of a row in the gradient, so ids "
            f"must be looked up once per sample. Received: {received}, in {variable.name!r}. Use "
            "CowClipOptimizer.for_model, which records the ids (CowClipSokOptimizer for SOK)."
        ) from None


def _checked(spec: TableSpec | None, variable: tf.Variable, update: str) -> TableSpec:
    """The table, which may have a dense gradient: that of a tied output."""
    if spec is not None:
        check_regularizer(spec.name, spec.layer)
    if spec is None or not spec.is_tied:
        raise ValueError(
            f"The gradient of {variable.name!r} is dense, so its ids cannot be counted. Remove "
            "regularizers on the table (l2=… takes their place); accumulate gradients by "
            "concatenating their slices; a layer that reads the whole table sets is_tied in its "
            "TableSpec."
        )
    option = "sharded=True" if spec.shard is not None else "update='deferred'"
    if spec.shard is not None or update == "deferred":
        raise ValueError(
            f"A table with {option} must be read by row. Received: a dense gradient of "
            f"{spec.name!r}, of a layer that reads all of it. Leave {option} out."
        )
    return spec
