# SPDX-License-Identifier: Apache-2.0
"""FusedEmbeddings: every categorical field of a schema in one table, with row offsets per domain.

One variable instead of one per field: 26 small tables cost 26 times every kernel launch.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from merlin.models.config.schema import SchemaMixin
from merlin.models.utils.schema_utils import (
    schema_to_tensorflow_metadata_json,
    tensorflow_metadata_json_to_schema,
)
from merlin.schema import ColumnSchema, Schema, Tags
from numpy.typing import NDArray

from merlin_cowclip.models.id_check import IdCheck
from merlin_cowclip.models.table_rows import draw_rows, draw_shard, row_ranges, untrained_rows
from merlin_cowclip.models.vocabulary import (
    PADDING_ID,
    Folder,
    Ids,
    cardinality,
    ids_of_raw,
    is_encoded,
    known_rows,
    raw_of_ids,
)
from merlin_cowclip.plugins import Lookup, TableSpec
from merlin_cowclip.plugins._checks import integer
from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.horovod import ranks
from merlin_cowclip.plugins.distributed.sharding import Shard
from merlin_cowclip.plugins.embeddings.tables import check_whole
from merlin_cowclip.plugins.row_ops import once_per_graph
from merlin_cowclip.plugins.scaling import check_number

COMBINERS = ("mean", "sum", "sqrtn")


class _List(NamedTuple):
    """A list column of b samples: for each of n ids its row, whether it is one, and its sample."""

    rows: tf.Tensor
    held: tf.Tensor
    samples: tf.Tensor
    number: tf.Tensor  # b


class _Rows(NamedTuple):
    """Row numbers of a batch's ids."""

    one_hot: tf.Tensor | None  # b×F
    lists: dict[str, _List]
    check: tf.Tensor  # available once all ids are known to be in range


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class FusedEmbeddings(SchemaMixin, tf.keras.layers.Layer):
    """Looks up all categorical fields of a schema in one V×d table.

    Int domain k has the rows `row_offsets[k]` to `row_offsets[k + 1]`; id i of a field is row
    `first_row[field] + i`. Fields whose domains have one name share its rows, as in Merlin's
    `mm.Embeddings`, and the count of a row adds up over them. Rows of padding (id 0) and unknown
    ids (id 2), or those that prepared data counts no training row of, start at zero: untrained,
    they would be noise at serving time.

    Args:
      schema: its columns tagged `Tags.CATEGORICAL` are the fields, each with an int domain whose
        `max` is its cardinality - 1.
      dim: width d.
      stddev: standard deviation σ of the initial rows; 0 for zeros.
      combiner: how a list column's rows become one: "mean", "sum" or "sqrtn", or a mapping of list
        columns to these. Padding is left out: id 0 of dense lists and of those that Categorify
        encoded. In other ragged lists 0 is an id.
      sharded: whether the ranks of Horovod share the rows: row r and its moments are only on rank
        r mod N. Every call, also to predict or read rows, is then a collective of all ranks.
      stacked: whether the output is one tensor, or a dict, as Merlin's blocks pass it on: this
        layer can replace `mm.Embeddings` in `mm.InputBlockV2(categorical=…)` and
        `mm.DLRMModel(embeddings=…)`.

    Input: dict of feature name → integer ids, b or b×1 (one-hot), ragged b×(n)(×1) or dense
    b×n(×1) padded with 0 (lists). Output: b×F×d, fields in the order of `fields`; or, not stacked,
    field → b×d. Lists are combined in float32 (of a float64 table: float64), whatever the policy.

    Raises:
      ValueError: no categorical column, a column without an int domain, columns of one domain that
        differ in cardinality, or a bad argument; at a call, ids that are not integers.
      tf.errors.InvalidArgumentError: at a call, an id beyond its field's cardinality, which would
        train a row of the next field. `CowClipOptimizer` updates nothing in such a step.
    """

    def __init__(
        self,
        schema: Schema,
        dim: int,
        *,
        stddev: float = 1e-2,
        combiner: str | Mapping[str, str] = "mean",
        sharded: bool = False,
        stacked: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        columns = list(schema.select_by_tag(Tags.CATEGORICAL).excluding_by_tag(Tags.TARGET))
        columns.sort(key=lambda column: column.is_list)
        if not columns:
            raise ValueError(
                "The schema must have a column tagged Tags.CATEGORICAL: these networks learn from "
                f"ids. Received the columns {schema.column_names}. Encode one in the workflow: "
                "['user'] >> nvtabular.ops.Categorify()"
            )
        self.one_hot_fields = tuple(c.name for c in columns if not c.is_list)
        self.list_fields = tuple(c.name for c in columns if c.is_list)
        self.dim = integer("dim", dim)
        self.stddev = check_number("stddev", stddev)
        self.combiner = per_list = plain_combiner(combiner)
        if isinstance(per_list, str):
            per_list = dict.fromkeys(self.list_fields, per_list)
        if set(per_list) != set(self.list_fields):
            raise ValueError(
                f"combiner must name each list column: {', '.join(self.list_fields) or 'none'}. "
                f"Received: {', '.join(per_list)}"
            )
        self._combiners = per_list
        self.stacked = stacked
        self._sharded = bool(sharded)
        self._set_columns(columns)

    def _set_columns(self, columns: Sequence[ColumnSchema]) -> None:
        """Take the fields' columns: which rows each has, in a table that is to be built."""
        self.row_offsets, range_of = row_ranges(columns)
        self.cardinalities = {c.name: cardinality(c) for c in columns}
        self._schema = Schema(columns)  # set_schema takes the first alone
        self.first_row = {name: self.row_offsets[range_of[name]] for name in self.fields}
        self._zero_rows = untrained_rows(columns, self.first_row)
        self._spec = TableSpec(
            name=self.name,
            layer=self,
            get_variable=functools.partial(getattr, self, "table"),  # copied with the layer
            row_offsets=self.row_offsets,
            columns=tuple(columns),
            width=self.dim,
            range_of_column=tuple(range_of[name] for name in self.fields),
            set_variable=functools.partial(setattr, self, "table"),
            uses_gather=True,
        )

    @property
    def fields(self) -> tuple[str, ...]:
        """The categorical fields, one-hot ones, then lists, each in the schema's order."""
        return self.one_hot_fields + self.list_fields

    def table_specs(self) -> tuple[TableSpec, ...]:
        """The table, for the optimizer."""
        return (self._spec,)

    @property
    def sharded(self) -> bool:
        """Whether the ranks share the rows; of a built table, whether they do so."""
        return self._spec.shard is not None if self.built else self._sharded

    def build(self, input_shape: Any) -> None:
        """Create the V×d table, or this rank's rows of it."""
        if hasattr(self, "table"):  # Merlin's blocks build theirs anew in each that they join
            return
        here, rows, draw = ranks(), self.row_offsets[-1], draw_rows
        if self._sharded and here.size > 1:
            shard = Shard(here.rank, here.size, rows)
            self._spec.shard, rows = shard, shard.rows
            draw = functools.partial(draw_shard, shard)
        self.table = self.add_weight(
            name="table",
            shape=(rows, self.dim),
            initializer=functools.partial(draw, self.stddev, self._zero_rows),
            experimental_autocast=False,  # rows are cast, not the table
        )
        super().build(input_shape)

    def call(self, inputs: dict[str, Any]) -> tf.Tensor | dict[str, tf.Tensor]:
        """b×F×d, or field → b×d; see the class."""
        rows = self._look_up({name: inputs[name] for name in self.fields})
        if self.stacked:
            return rows
        parts = tf.unstack(rows, len(self.fields), axis=1)
        return {name: parts[i] for i, name in enumerate(self.fields)}

    def lookup(self, field: str, ids: Any, *, feature: str | None = None) -> tf.Tensor:
        """One field alone, as a part of a network of your own.

        Args:
          field: one of `fields`.
          ids: as the layer takes them in a call. Of several per sample (negatives, say) each is a
            call of its own, with another `feature`; flattened ids are counted by occurrence.
          feature: what the ids are, if not the field's own column of the batch: the same tensor,
            looked up twice in a step for one feature, is counted once.

        Returns:
          b×d.
        """
        self._check_field(field)
        self._ensure_built()
        if not isinstance(ids, tf.RaggedTensor):
            ids = tf.convert_to_tensor(ids)
        return tf.reshape(self._look_up({field: ids}, feature), [-1, self.dim])

    def _look_up(self, given: Mapping[str, Any], feature: str | None = None) -> tf.Tensor:
        """Rows of some fields, b×F×d; recorded for the optimizer, whose update awaits the check."""
        found, parts = self._find_rows(given), []
        if found.one_hot is not None:
            rows = self._gather(found.one_hot, found.check)
            parts.append(tf.cast(rows, self.compute_dtype))
        for name, of_list in found.lists.items():
            parts.append(self._combined(name, of_list, found.check)[:, tf.newaxis])
        for name, ids in given.items():
            lookup = Lookup(
                feature or name,
                ids,
                first_row=self.first_row[name],
                padding=self._padding(name, ids) if name in self.list_fields else None,
                check=found.check,
            )
            self._spec.recorder.record(lookup)
        return parts[0] if len(parts) == 1 else tf.concat(parts, axis=1)

    def _find_rows(self, given: Mapping[str, Any]) -> _Rows:
        """Row numbers of a batch's ids; in a graph, found once for tables of the same fields."""
        one_hot = [name for name in given if name in self.one_hot_fields]
        lists = [name for name in given if name in self.list_fields]

        def find() -> _Rows:
            check, rows = IdCheck(), None
            if one_hot:
                ids = tf.concat([self._integers(given[name], name) for name in one_hot], axis=1)
                rows = self._rows(ids, one_hot, check)
            of_lists = {name: self._list(name, given[name], check) for name in lists}
            return _Rows(rows, of_lists, check.answer())

        of_field = [(name, self.first_row[name], self.cardinalities[name]) for name in given]
        ids = tf.nest.flatten(list(given.values()), expand_composites=True)
        return once_per_graph(("rows", len(one_hot), *of_field), ids, find)

    def _padding(self, name: str, ids: Any) -> int:
        """The id that fills up a list's ids; -1, which is none, if 0 is an id."""
        is_padded = not isinstance(ids, tf.RaggedTensor) or is_encoded(self.schema[name])
        return PADDING_ID if is_padded else -1

    def _integers(self, ids: tf.Tensor, field: str) -> tf.Tensor:
        """Ids b×1 of a one-hot field, int64."""
        if isinstance(ids, tf.RaggedTensor):
            ids = ids.to_tensor(-1)  # in an empty row, which is out of range
        others = [ids.shape[i] for i in range(1, ids.shape.rank or 0)]
        if any(size not in (1, None) for size in others):
            raise ValueError(
                f"ids of field {field!r} must be b or b×1: one of each sample. Received: shape "
                f"{ids.shape}. Look several up one by one (lookup, each with its own feature), or "
                "make the field a list"
            )
        unknown = None in others or ids.shape.rank is None
        samples = tf.shape(ids)[0] if unknown else -1  # so that several of a sample do not fit
        _check_integers(ids, field)
        return tf.reshape(tf.cast(ids, tf.int64), [samples, 1])

    def _rows(self, ids: tf.Tensor, fields: Sequence[str], check: IdCheck) -> tf.Tensor:
        """Ids n×F of F fields to row numbers; an id out of range is left to the check."""
        ids = check.add(ids, fields, [self.cardinalities[name] for name in fields])
        return ids + tf.constant([[self.first_row[name] for name in fields]], tf.int64)

    def _list(self, name: str, ids: Any, check: IdCheck) -> _List:
        """Row numbers of a list column."""
        _check_integers(ids, name)
        if isinstance(ids, tf.RaggedTensor):
            if ids.ragged_rank != 1:
                raise ValueError(f"The list column {name!r} must be ragged in one dimension.")
            ids = ids.with_flat_values(tf.reshape(ids.flat_values, [-1]))  # b×(n)×1
            ids = ids.with_row_splits_dtype(tf.int64)  # int32 ones would be the host's
            number = ids.nrows()
        else:
            number = tf.shape(ids, tf.int64)[0]
        flat, samples = Lookup(name, ids).flat()
        rows = tf.reshape(self._rows(flat[:, tf.newaxis], (name,), check), [-1])
        return _List(rows, tf.not_equal(flat, self._padding(name, ids)), samples, number)

    def _gather(self, rows: tf.Tensor, check: tf.Tensor) -> tf.Tensor:
        """Rows of the table by number, in its own dtype.

        Where rows wait, they catch up before: not for ids that end the step.
        """
        if self._spec.has_pending_rows:
            with tf.control_dependencies([check]):
                rows = tf.identity(rows)
        return self._spec.gather(rows)

    def _combined(self, name: str, of_list: _List, check: tf.Tensor) -> tf.Tensor:
        """b×d, the rows of one list column as one."""
        # Not in half precision: there, 6,000 times 0.1 adds up to 256.
        exact = tf.float64 if self.table.dtype == tf.float64 else tf.float32
        held = tf.cast(of_list.held, exact)
        found = tf.cast(self._gather(of_list.rows, check), exact) * held[:, tf.newaxis]
        combined = tf.math.unsorted_segment_sum(found, of_list.samples, of_list.number)
        combiner = self._combiners[name]
        if combiner != "sum":
            n = tf.math.unsorted_segment_sum(held, of_list.samples, of_list.number)[:, tf.newaxis]
            combined = tf.math.divide_no_nan(combined, n if combiner == "mean" else tf.sqrt(n))
        return tf.cast(combined, self.compute_dtype)

    def compute_output_shape(self, input_shape: dict[str, Any]) -> Any:
        """b×F×d, or field → b×d."""
        batch = next(iter(input_shape.values()))[0]
        if self.stacked:
            return tf.TensorShape([batch, len(self.fields), self.dim])
        return {name: tf.TensorShape([batch, self.dim]) for name in self.fields}

    def rows(self, field: str, raw_ids: Any, *, workflow: Folder = None) -> Ids:
        """The table's rows of some raw ids of a field.

        Args:
          field: one of `fields`.
          raw_ids: n, text as in counts/ or whole numbers: 1382, 1382.0 and "1382" are one id. A
            missing one (None, NaN; in prepared data empty text as well) has the row of missing ids,
            one that the vocabulary does not contain the row of unknown ids. The ids of a field that
            no Categorify encoded are its raw ids, from 0.
          workflow: the folder of the saved NVTabular workflow, if the schema does not name it.

        Returns:
          n, int64.

        Raises:
          ValueError: no such field, no vocabulary (see `read_vocabulary`), a raw id that is neither
            text nor a whole number; or an unknown one where the workflow hashes them.
        """
        self._check_field(field)
        return ids_of_raw(self.schema[field], raw_ids, workflow) + self.first_row[field]

    def to_df(self, field: str, *, workflow: Folder = None) -> pd.DataFrame:
        """The rows of one field with their raw ids; of a sharded table, on all ranks at once.

        Args:
          field: one of `fields`.
          workflow: as in `rows`.

        Returns:
          Index `id`: 0 to cardinality - 1. Columns: `raw` (None for padding, missing and unknown
          ids, and for all ids of a field that a workflow hashed or changed), then "0" to "d-1", as
          Merlin's tables name them.

        Raises:
          ValueError: no such field, no vocabulary, or the layer is not built.
        """
        self._check_field(field)
        raw = raw_of_ids(self.schema[field], workflow)
        self._whole_table()  # refuses a layer that is not built
        found = self._spec.gather(tf.range(len(raw), dtype=tf.int64) + self.first_row[field])
        frame = pd.DataFrame(found.numpy(), columns=[str(i) for i in range(self.dim)])
        frame.insert(0, "raw", pd.Series(raw, dtype=object))
        return frame.rename_axis("id")

    def load_rows(
        self, field: str, values: pd.DataFrame | NDArray[Any], *, workflow: Folder = None
    ) -> int:
        """Set rows of one field to given, for instance pretrained, ones. Builds the table.

        Of a sharded table, on all ranks at once, with the same rows.

        Args:
          field: one of `fields`.
          values: a frame of d columns whose index holds raw ids, in any order (`to_df(field)`
            gives one by `.dropna(subset="raw").set_index("raw")`); columns named "0" to "d-1" go by
            name, others by position. Or an array cardinality×d, row i for id i.
          workflow: as in `rows`.

        Returns:
          How many rows were set: ids of the frame that the field does not know are left out.

        Raises:
          ValueError: no such field, another shape, values that are not finite, a raw id twice, or
            none that the field knows; a field without raw ids. Nothing is changed then.
        """
        self._check_field(field)
        ids = np.arange(self.cardinalities[field])
        if isinstance(values, pd.DataFrame):
            ids, values = known_rows(self.schema[field], values, workflow)
            by_name, names = values.rename(columns=str), [str(i) for i in range(self.dim)]
            values = by_name[names] if sorted(by_name.columns) == sorted(names) else values
        given = np.asarray(values, tf.as_dtype(self.variable_dtype).as_numpy_dtype)
        if given.shape != (len(ids), self.dim):
            raise ValueError(
                f"rows of field {field!r} must be {len(ids)}×{self.dim}. Received: "
                f"{'×'.join(map(str, given.shape))}"
            )
        finite = np.isfinite(given).all(axis=1)
        if not finite.all():
            bad = int(np.argmin(finite))
            raise ValueError(f"rows of field {field!r} must be finite. Received: row {bad}")
        self._ensure_built()
        table, rows, shard = self._whole_table(), ids + self.first_row[field], self._spec.shard
        if shard is not None:
            mine = rows % shard.size == shard.rank
            rows, given = shard.local_row(rows[mine]), given[mine]
        # Not scatter_nd_update: it would mark the table as sparsely used (`TableSpec.gather`).
        whole = tf.convert_to_tensor(table)
        table.assign(tf.tensor_scatter_nd_update(whole, rows[:, np.newaxis], given))
        return len(ids)

    def _check_field(self, field: str) -> None:
        if field not in self.cardinalities:
            raise ValueError(
                f"field must be one of {', '.join(map(repr, self.fields))}. Received: {field!r}"
            )

    def _ensure_built(self) -> None:
        with tf.init_scope():  # as Keras builds layers that it calls
            self.build({})

    def _whole_table(self) -> tf.Variable:
        """The table, to read or set all rows: without pending updates."""
        if not hasattr(self, "table"):
            raise ValueError(
                f"The layer {self.name!r} must be built before its rows are read: fit the model, "
                "or call it, first."
            )
        if self._spec.catch_up is not None:
            self._spec.catch_up(self.table, None)
        return self.table

    def _catch_up(self) -> None:
        """Apply pending updates (`update="deferred"`) before Keras reads or sets the table."""
        if hasattr(self, "table") and tf.executing_eagerly():
            self._whole_table()

    def get_weights(self) -> Any:
        """Keras's, without pending updates; of a sharded table, this rank's rows."""
        self._catch_up()
        return super().get_weights()

    def set_weights(self, weights: list[Any]) -> None:
        """Keras's; no update is pending afterwards."""
        self._catch_up()
        super().set_weights(weights)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:  # saved
        if save_type == "savedmodel":
            check_whole([self._spec], "a SavedModel")
        self._catch_up()
        return super()._trackable_children(save_type, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "schema": schema_text(self.schema),
            "dim": self.dim,
            "stddev": self.stddev,
            "combiner": plain_combiner(self.combiner),
            "sharded": self.sharded,
            "stacked": self.stacked,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> FusedEmbeddings:
        """The layer that `get_config` describes."""
        return cls(**{**config, "schema": tensorflow_metadata_json_to_schema(config["schema"])})


def _check_integers(ids: Any, field: str) -> None:
    """Keras makes floats half as wide in mixed precision, before the layer: other ids."""
    if not ids.dtype.is_integer:
        raise ValueError(
            f"ids of field {field!r} must be integers. Received: {ids.dtype.name}. Give them as "
            "int64"
        )


def plain_combiner(combiner: str | Mapping[str, str]) -> str | dict[str, str]:
    """A combiner as JSON has it, or a ValueError; Keras wraps the dicts that layers hold."""
    plain = dict(combiner) if isinstance(combiner, Mapping) else combiner
    for one in plain.values() if isinstance(plain, dict) else [plain]:
        if one not in COMBINERS:
            raise ValueError(
                f"combiner must be one of {', '.join(COMBINERS)}, or one by list column. Received: "
                f"combiner={one!r}"
            )
    return plain


def schema_text(schema: Schema) -> str:
    """JSON in Merlin's format with keys and tags in order: one text for one schema.

    Merlin keeps tags in a set, and writes properties in whatever order the schema got them.
    """
    described = json.loads(schema_to_tensorflow_metadata_json(schema))
    for feature in described.get("feature", ()):
        feature["annotation"].get("tag", []).sort()
    return json.dumps(described, sort_keys=True)
