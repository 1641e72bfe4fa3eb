"""FusedEmbeddings: every categorical field of a schema in one table, with row offsets per field.

One variable instead of one per field, because 26 small tables cost 26 times every kernel launch in
lookup, gradient and update. The layer tells the optimizer its table and records its lookups
(`plugins.tables.HasTables`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from merlin.models.utils.schema_utils import (
    schema_to_tensorflow_metadata_json,
    tensorflow_metadata_json_to_schema,
)
from merlin.schema import ColumnSchema, Schema, Tags

from merlin_cowclip.plugins import Lookup, TableSpec
from merlin_cowclip.plugins._stack import tf

PADDING_ID = 0
UNKNOWN_ID = 2
"""NVTabular's ids: 0 padding, 1 null, 2 unknown, real ids from 3."""

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
class FusedEmbeddings(tf.keras.layers.Layer):
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
      combiner: how a list column's rows become one: "mean", "sum" or "sqrtn", padding left out.

    Input: dict of feature name → integer ids, b or b×1 (one-hot), ragged b×(n)(×1) or dense
    b×n(×1) padded with 0 (lists). Output: b×F×d, fields in the order of `fields`.

    Raises:
      ValueError: no categorical column, a column without an int domain, or a bad argument.
    """

    def __init__(
        self,
        schema: Schema,
        dim: int,
        *,
        stddev: float = 1e-2,
        combiner: str = "mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if isinstance(dim, bool) or not isinstance(dim, int) or dim <= 0:
            raise ValueError(f"dim must be a positive whole number. Received: dim={dim!r}")
        if combiner not in COMBINERS:
            raise ValueError(
                f"combiner must be one of {', '.join(COMBINERS)}. Received: combiner={combiner!r}"
            )
        columns = list(schema.select_by_tag(Tags.CATEGORICAL).excluding_by_tag(Tags.TARGET))
        if not columns:
            raise ValueError(
                "FusedEmbeddings needs a column tagged Tags.CATEGORICAL. Received a schema with "
                f"the columns {schema.column_names}."
            )
        self.one_hot_fields = tuple(c.name for c in columns if not _is_list(c))
        self.list_fields = tuple(c.name for c in columns if _is_list(c))
        by_name = {c.name: c for c in columns}
        offsets = [0]
        for name in self.fields:
            offsets.append(offsets[-1] + _cardinality(by_name[name]))
        self.row_offsets = tuple(offsets)
        self.cardinalities = {name: _cardinality(by_name[name]) for name in self.fields}
        self.schema = Schema([by_name[name] for name in self.fields])
        self.dim = dim
        self.stddev = float(stddev)
        self.combiner = combiner
        self._first_row = dict(zip(self.fields, offsets[:-1], strict=True))
        zero_rows = [
            first + i
            for name, first in self._first_row.items()
            for i in (PADDING_ID, UNKNOWN_ID)
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

    def call(self, inputs: dict[str, Any]) -> tf.Tensor:
        """b×F×d; see the class."""
        parts = []
        if self.one_hot_fields:
            columns = (tf.cast(inputs[name], tf.int64) for name in self.one_hot_fields)
            ids = [tf.reshape(column, [-1, 1]) for column in columns]
            first = [self._first_row[name] for name in self.one_hot_fields]
            rows = tf.concat(ids, axis=1) + tf.constant([first], tf.int64)
            self._spec.recorder.record(Lookup("one-hot fields", rows))
            parts.append(self._gather(rows))
        parts += [self._list_lookup(name, inputs[name])[:, tf.newaxis] for name in self.list_fields]
        return parts[0] if len(parts) == 1 else tf.concat(parts, axis=1)

    def _gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Rows of the table by number, in the layer's compute dtype."""
        return tf.cast(self._spec.access.gather(self.table, rows), self.compute_dtype)

    def _list_lookup(self, name: str, ids: Any) -> tf.Tensor:
        """b×d: the rows of one list column, combined."""
        if not isinstance(ids, tf.RaggedTensor):
            shape = tf.shape(ids)
            ids = tf.RaggedTensor.from_tensor(tf.reshape(ids, [shape[0], -1]))
        flat = tf.reshape(tf.cast(ids.flat_values, tf.int64), [-1])
        first = self._first_row[name]
        rows = ids.with_flat_values(flat + first) if ids.ragged_rank == 1 else None
        if rows is None:
            raise ValueError(f"The list column {name!r} must be ragged in one dimension.")
        self._spec.recorder.record(Lookup(name, rows, is_list=True, padding=first + PADDING_ID))
        held = tf.cast(tf.not_equal(flat, PADDING_ID), self.compute_dtype)
        samples, number = rows.value_rowids(), rows.nrows()
        found = self._gather(rows.flat_values) * held[:, tf.newaxis]
        total = tf.math.unsorted_segment_sum(found, samples, number)
        if self.combiner == "sum":
            return total
        n = tf.math.unsorted_segment_sum(held, samples, number)[:, tf.newaxis]
        return tf.math.divide_no_nan(total, n if self.combiner == "mean" else tf.sqrt(n))

    def compute_output_shape(self, input_shape: dict[str, Any]) -> tf.TensorShape:
        """b×F×d."""
        first = next(iter(input_shape.values()))
        return tf.TensorShape([first[0], len(self.fields), self.dim])

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "schema": schema_to_tensorflow_metadata_json(self.schema),
            "dim": self.dim,
            "stddev": self.stddev,
            "combiner": self.combiner,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FusedEmbeddings:
        """The layer that `get_config` describes."""
        schema = tensorflow_metadata_json_to_schema(config["schema"])
        return cls(**{**config, "schema": schema})


def _is_list(column: ColumnSchema) -> bool:
    return bool(column.is_list)


def _cardinality(column: ColumnSchema) -> int:
    domain = column.int_domain
    if domain is None or not domain.max:
        raise ValueError(
            f"Column {column.name!r} must have an int domain with a max (its cardinality - 1). "
            "Take the schema of an NVTabular workflow with Categorify."
        )
    return int(domain.max) + 1
