"""FusedEmbeddings: every categorical field of a schema in one table, with row offsets per field.

One variable instead of one per field, because 26 small tables cost 26 times every kernel launch in
lookup, gradient and update. The layer tells the optimizer its table and records its lookups
(`plugins.tables.HasTables`). Which raw id an id stands for is `vocabulary.py`'s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from merlin.models.config.schema import SchemaMixin
from merlin.schema import ColumnSchema, Schema, Tags

from merlin_cowclip.models.schemas import schema_from_text, schema_text
from merlin_cowclip.models.vocabulary import (
    PADDING_ID,
    UNKNOWN_ID,
    encode,
    read_vocabulary,
)
from merlin_cowclip.plugins import Lookup, TableSpec
from merlin_cowclip.plugins._stack import tf

COMBINERS = ("mean", "sum", "sqrtn")


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class TableInitializer(tf.keras.initializers.Initializer):
    """N(0, stddev) with some rows at zero.

    Args:
      stddev: standard deviation σ; 0 for a table of zeros.
      zero_rows: row numbers that start at zero.
    """

    def __init__(self, stddev: float, zero_rows: Sequence[int] = ()) -> None:
        if not stddev >= 0:
            raise ValueError(f"stddev must not be negative. Received: stddev={stddev!r}")
        self.stddev = float(stddev)
        self.zero_rows = [int(row) for row in zero_rows]

    def __call__(self, shape: Any, dtype: Any = None, **kwargs: Any) -> tf.Tensor:
        """A V×d tensor."""
        if self.stddev == 0:
            return tf.zeros(shape, dtype or tf.float32)
        values = tf.random.normal(shape, stddev=self.stddev, dtype=dtype or tf.float32)
        if not self.zero_rows:
            return values
        at = tf.constant(self.zero_rows, tf.int64)[:, tf.newaxis]
        zeros = tf.zeros([len(self.zero_rows), shape[1]], values.dtype)
        return tf.tensor_scatter_nd_update(values, at, zeros)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"stddev": self.stddev, "zero_rows": self.zero_rows}


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class FusedEmbeddings(SchemaMixin, tf.keras.layers.Layer):
    """Looks up all categorical fields of a schema in one V×d table.

    Field f owns the rows `row_offsets[f]` to `row_offsets[f + 1]`; id i of field f is row
    `row_offsets[f] + i`. The rows of padding (id 0) and unknown ids (id 2) start at zero: unless
    a threshold maps training rows to it, the unknown row is never trained, and at σ = 1e-2 it
    would be noise at serving time.

    Args:
      schema: its columns tagged `Tags.CATEGORICAL` are the fields, each with an int domain whose
        `max` is its cardinality - 1.
      dim: width d.
      stddev: standard deviation σ of the initial rows; 0 for zeros.
      combiner: how a list column's rows become one: "mean", "sum" or "sqrtn", padding left out; or
        a mapping of list columns to these.
      stacked: whether the output is one tensor, or a dict, as Merlin's blocks pass it on: this
        layer can take the place of `mm.Embeddings` in `mm.InputBlockV2(categorical=…)` and
        `mm.DLRMModel(embeddings=…)`.

    Input: dict of feature name → integer ids, b or b×1 (one-hot), ragged b×(n)(×1) or dense
    b×n(×1) padded with 0 (lists). Output: b×F×d, fields in the order of `fields`; or, not stacked,
    field → b×d.

    Raises:
      ValueError: no categorical column, a column without an int domain, or a bad argument.
      tf.errors.InvalidArgumentError: at a call, an id beyond its field's cardinality. (Otherwise it
        would read, and train, a row of the next field, or on a GPU zeros.)
    """

    def __init__(
        self,
        schema: Schema,
        dim: int,
        *,
        stddev: float = 1e-2,
        combiner: str | Mapping[str, str] = "mean",
        stacked: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if isinstance(dim, bool) or not isinstance(dim, int) or dim <= 0:
            raise ValueError(f"dim must be a positive whole number. Received: dim={dim!r}")
        columns = list(schema.select_by_tag(Tags.CATEGORICAL).excluding_by_tag(Tags.TARGET))
        if not columns:
            raise ValueError(
                "The schema must have a column tagged Tags.CATEGORICAL: these networks learn from "
                f"ids. Received the columns {schema.column_names}."
            )
        self.one_hot_fields = tuple(c.name for c in columns if not _is_list(c))
        self.list_fields = tuple(c.name for c in columns if _is_list(c))
        by_name = {c.name: c for c in columns}
        offsets = [0]
        for name in self.fields:
            offsets.append(offsets[-1] + _cardinality(by_name[name]))
        self.row_offsets = tuple(offsets)
        self.cardinalities = {name: _cardinality(by_name[name]) for name in self.fields}
        self.set_schema(Schema([by_name[name] for name in self.fields]))
        self.dim = dim
        self.stddev = float(stddev)
        self.combiner = plain_combiner(combiner)
        self._combiners = _combiner_per_list(self.list_fields, combiner)
        self.stacked = stacked
        self._first_row = dict(zip(self.fields, offsets[:-1], strict=True))
        zero_rows = [
            first + i
            for name, first in self._first_row.items()
            for i in _untrained_ids(by_name[name])
            if i < self.cardinalities[name]
        ]
        self._initializer = TableInitializer(self.stddev, zero_rows)
        self._spec = TableSpec(
            name=self.name,
            layer=self,
            get_variable=lambda: self.table,
            row_offsets=self.row_offsets,
            columns=tuple(self.schema),
            width=dim,
        )

    @property
    def fields(self) -> tuple[str, ...]:
        """The categorical fields: one-hot ones, then lists, each in the schema's order."""
        return self.one_hot_fields + self.list_fields

    def table_specs(self) -> tuple[TableSpec, ...]:
        """The table, for the optimizer."""
        return (self._spec,)

    def build(self, input_shape: Any) -> None:
        """Create the V×d table."""
        self.table = self.add_weight(
            name="table",
            shape=(self.row_offsets[-1], self.dim),
            initializer=self._initializer,
            trainable=self.trainable,
            experimental_autocast=False,  # rows are cast, not the table
        )
        super().build(input_shape)

    def call(self, inputs: dict[str, Any]) -> tf.Tensor | dict[str, tf.Tensor]:
        """b×F×d, or field → b×d; see the class."""
        parts = []
        if self.one_hot_fields:
            fields, given = self.one_hot_fields, [inputs[name] for name in self.one_hot_fields]
            columns = (tf.cast(column, tf.int64) for column in given)
            ids = tf.concat([tf.reshape(column, [-1, 1]) for column in columns], axis=1)
            rows = self._rows(ids, fields)
            self._spec.recorder.record(
                Lookup("one-hot fields", rows, features=fields, sources=tuple(given))
            )
            parts.append(self._gather(rows))
        parts += [
            self._list_lookup(name, inputs[name], name)[:, tf.newaxis] for name in self.list_fields
        ]
        stack = parts[0] if len(parts) == 1 else tf.concat(parts, axis=1)
        if self.stacked:
            return stack
        parts = tf.unstack(stack, len(self.fields), axis=1)
        return {name: parts[i] for i, name in enumerate(self.fields)}

    def lookup(self, field: str, ids: Any, *, feature: str | None = None) -> tf.Tensor:
        """One field alone, as a part of a network of your own.

        Args:
          field: one of `fields`.
          ids: as the layer takes them in a call.
          feature: what the ids are, if not the field's own column of the batch: looked up twice in
            a step under one name, ids are counted once.

        Returns:
          b×d.
        """
        self._check_field(field)
        self._built_table(build=True)
        feature = field if feature is None else feature
        if field in self.list_fields:
            return self._list_lookup(field, ids, feature)
        rows = self._rows(tf.reshape(tf.cast(ids, tf.int64), [-1, 1]), (field,))
        self._spec.recorder.record(Lookup(feature, rows, sources=(ids,)))
        return tf.reshape(self._gather(rows), [-1, self.dim])

    def _rows(self, ids: tf.Tensor, fields: Sequence[str]) -> tf.Tensor:
        """Ids n×F of F fields to row numbers; an id out of range raises."""
        sizes = tf.constant([self.cardinalities[name] for name in fields], tf.int64)
        # The least id by its bits, inverted: Min has no GPU kernel for int64, and -ids would
        # overflow where there is no id, or the one that NaN becomes.
        least = tf.bitwise.invert(tf.reduce_max(tf.bitwise.invert(ids), axis=0))
        most = tf.reduce_max(ids, axis=0)
        outside = tf.logical_or(least < 0, most >= sizes)
        at = tf.argmax(outside)
        message = [
            "ids must be from 0 to cardinality - 1. Field, cardinality, received:",
            tf.gather(tf.constant(fields), at),
            sizes[at],
            tf.where(least[at] < 0, least[at], most[at]),
        ]
        check = tf.debugging.Assert(tf.logical_not(tf.reduce_any(outside)), message)
        first = [self._first_row[name] for name in fields]
        with tf.control_dependencies([] if check is None else [check]):
            return ids + tf.constant([first], tf.int64)

    def _gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Rows of the table by number, in the layer's compute dtype."""
        return tf.cast(self._spec.access.gather(self.table, rows), self.compute_dtype)

    def _list_lookup(self, name: str, ids: Any, feature: str) -> tf.Tensor:
        """b×d: the rows of one list column, combined."""
        if not isinstance(ids, tf.RaggedTensor):
            shape = tf.shape(ids)
            ids = tf.RaggedTensor.from_tensor(tf.reshape(ids, [shape[0], -1]))
        if ids.ragged_rank != 1:
            raise ValueError(f"The list column {name!r} must be ragged in one dimension.")
        flat = tf.reshape(tf.cast(ids.flat_values, tf.int64), [-1])
        padding = self._first_row[name] + PADDING_ID
        rows = ids.with_flat_values(tf.reshape(self._rows(flat[:, tf.newaxis], (name,)), [-1]))
        self._spec.recorder.record(
            Lookup(feature, rows, is_list=True, padding=padding, sources=(ids,))
        )
        held = tf.cast(tf.not_equal(flat, PADDING_ID), self.compute_dtype)
        samples, number = rows.value_rowids(), rows.nrows()
        found = self._gather(rows.flat_values) * held[:, tf.newaxis]
        total = tf.math.unsorted_segment_sum(found, samples, number)
        combiner = self._combiners[name]
        if combiner == "sum":
            return total
        n = tf.math.unsorted_segment_sum(held, samples, number)[:, tf.newaxis]
        return tf.math.divide_no_nan(total, n if combiner == "mean" else tf.sqrt(n))

    def compute_output_shape(self, input_shape: dict[str, Any]) -> Any:
        """b×F×d, or field → b×d."""
        batch = next(iter(input_shape.values()))[0]
        if self.stacked:
            return tf.TensorShape([batch, len(self.fields), self.dim])
        return {name: tf.TensorShape([batch, self.dim]) for name in self.fields}

    # Rows by id

    def rows(
        self, field: str, raw_ids: Any, *, workflow: str | os.PathLike[str] | None = None
    ) -> np.ndarray:
        """The table's rows of some raw ids of a field.

        Args:
          field: one of `fields`.
          raw_ids: n, as they stand in the log. A missing one (None, NaN) has the row of missing
            ids, one that the vocabulary does not hold the row of unknown ids.
          workflow: the saved NVTabular workflow, if the schema does not say where it lies.

        Returns:
          n, int64.

        Raises:
          ValueError: no such field, its vocabulary is not there, or an unknown id of a field whose
            unknown ids are hashed.
        """
        ids = encode(self._vocabulary(field, workflow), raw_ids)
        hashed = int(self.schema[field].properties.get("num_buckets") or 1) > 1
        if hashed and (ids == UNKNOWN_ID).any():
            raise ValueError(
                f"raw ids of field {field!r} must be in its vocabulary, for the others share rows "
                "by a hash that the workflow knows. Received: one that is not. Take its id from "
                "workflow.transform."
            )
        return ids + self._first_row[field]

    def to_df(self, field: str, *, workflow: str | os.PathLike[str] | None = None) -> pd.DataFrame:
        """The rows of one field with their raw ids.

        Args:
          field: one of `fields`.
          workflow: as in `rows`.

        Returns:
          Index `id`: 0 to cardinality - 1. Columns: `raw` (None for padding, missing and unknown),
          then "0" to "d-1", as Merlin's tables name them.

        Raises:
          ValueError: no such field, its vocabulary is not there, or the layer is not built.
        """
        vocabulary = self._vocabulary(field, workflow)
        table = self._built_table()
        first = self._first_row[field]
        values = table[first : first + self.cardinalities[field]].numpy()
        frame = pd.DataFrame(values, columns=[str(i) for i in range(self.dim)])
        frame.index.name = "id"
        raw = np.full(len(frame), None, object)
        raw[vocabulary.index] = vocabulary.astype(object)
        frame.insert(0, "raw", raw)
        return frame

    def load_rows(
        self,
        field: str,
        values: pd.DataFrame | np.ndarray,
        *,
        workflow: str | os.PathLike[str] | None = None,
    ) -> int:
        """Set rows of one field to given, for instance pretrained, ones. Builds the table.

        Args:
          field: one of `fields`.
          values: a frame of d columns whose index holds raw ids, in any order (`to_df(field)`
            gives one by `.dropna(subset="raw").set_index("raw")`); or an array cardinality×d, row
            i for id i, as Merlin's `EmbeddingTable.from_pretrained` takes it.
          workflow: as in `rows`.

        Returns:
          How many rows were set: ids of the frame that the field does not know are left out.

        Raises:
          ValueError: no such field, another shape, values that are not finite, a raw id twice, or
            none that the field knows. Nothing is changed then.
        """
        self._check_field(field)
        given = np.asarray(values, np.float32)
        is_frame = isinstance(values, pd.DataFrame)
        wanted = (len(given) if is_frame else self.cardinalities[field], self.dim)
        if given.shape != wanted:
            raise ValueError(
                f"rows of field {field!r} must be {wanted[0]}×{wanted[1]}. Received: "
                f"{'×'.join(map(str, given.shape))}"
            )
        if not np.isfinite(given).all():
            bad = int(np.flatnonzero(~np.isfinite(given).all(axis=1))[0])
            raise ValueError(f"rows of field {field!r} must be finite. Received: row {bad}")
        ids = np.arange(len(given))
        if is_frame:
            assert isinstance(values, pd.DataFrame)
            if not values.index.is_unique:
                twice = values.index[values.index.duplicated()][0]
                raise ValueError(f"raw ids of field {field!r} must be unique. Received: {twice!r}")
            ids = encode(self._vocabulary(field, workflow), values.index)
            known = ids > UNKNOWN_ID
            if not known.any():
                raise ValueError(
                    f"raw ids of field {field!r} must be in its vocabulary. Received: "
                    f"{len(given)} ids, none of which is: {list(values.index[:3])}"
                )
            ids, given = ids[known], given[known]
        table = self._built_table(build=True)
        rows = (ids + self._first_row[field])[:, np.newaxis]
        table.scatter_nd_update(rows, tf.cast(given, table.dtype))
        return len(ids)

    def _vocabulary(self, field: str, workflow: str | os.PathLike[str] | None) -> pd.Series:
        self._check_field(field)
        vocabulary = read_vocabulary(self.schema[field], workflow)
        last, cardinality = vocabulary.index.max(), self.cardinalities[field]
        if len(vocabulary) and last >= cardinality:
            raise ValueError(
                f"the vocabulary of field {field!r} must have ids below its cardinality, "
                f"{cardinality}. Received: id {last}. It is another workflow's than the schema."
            )
        return vocabulary

    def _check_field(self, field: str) -> None:
        if field not in self.cardinalities:
            raise ValueError(
                f"field must be one of {', '.join(map(repr, self.fields))}. Received: {field!r}"
            )

    def _built_table(self, build: bool = False) -> tf.Variable:
        if not hasattr(self, "table"):
            if not build:
                raise ValueError(
                    f"The layer {self.name!r} must be built before its rows are read: fit the "
                    "model, or call it, first."
                )
            self.build({})
        return self.table

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "schema": schema_text(self.schema),
            "dim": self.dim,
            "stddev": self.stddev,
            "combiner": plain_combiner(self.combiner),
            "stacked": self.stacked,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FusedEmbeddings:
        """The layer that `get_config` describes."""
        schema = schema_from_text(config["schema"])
        return cls(**{**config, "schema": schema})


def _is_list(column: ColumnSchema) -> bool:
    return bool(column.is_list)


def _cardinality(column: ColumnSchema) -> int:
    domain = column.int_domain
    if domain is None or domain.max is None:
        raise ValueError(
            f"Column {column.name!r} must have an int domain with a max (its cardinality - 1). "
            "Take the schema of an NVTabular workflow with Categorify."
        )
    return int(domain.max) + 1


def _untrained_ids(column: ColumnSchema) -> list[int]:
    """Ids that no training row has: padding, and the unknown ones unless Categorify made some.

    It does below a threshold, beyond a size, and by hashing without a vocabulary. With a whole
    vocabulary, buckets only spread the ids that training has not seen.
    """
    given = column.properties
    truncated = 0 < (given.get("max_size") or 0) <= _cardinality(column)
    below = (given.get("freq_threshold") or 0) > 1
    buckets = int(given.get("num_buckets") or 1)
    if truncated or below or (buckets > 1 and not given.get("cat_path")):
        return [PADDING_ID]
    return [PADDING_ID, *range(UNKNOWN_ID, UNKNOWN_ID + buckets)]


def plain_combiner(combiner: str | Mapping[str, str]) -> str | dict[str, str]:
    """As JSON takes it: Keras wraps the dicts that layers hold."""
    return combiner if isinstance(combiner, str) else dict(combiner)


def _combiner_per_list(
    lists: Sequence[str], combiner: str | Mapping[str, str]
) -> Mapping[str, str]:
    per_list = {name: combiner for name in lists} if isinstance(combiner, str) else dict(combiner)
    named = [combiner] if isinstance(combiner, str) else list(per_list.values())
    for value in named:
        if value not in COMBINERS:
            raise ValueError(
                f"combiner must be one of {', '.join(COMBINERS)}. Received: combiner={value!r}"
            )
    if set(per_list) != set(lists):
        raise ValueError(
            f"combiner must name each list column: {', '.join(lists) or 'there is none'}. "
            f"Received: {', '.join(per_list)}"
        )
    return per_list
