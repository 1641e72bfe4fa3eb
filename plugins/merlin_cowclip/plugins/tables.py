"""What the optimizer knows of embedding tables: their variable, their rows, and who looked up what.

Any layer that has a `table_specs()` method takes part (`HasTables`); Merlin's own `EmbeddingTable`
is adapted here. Nothing in this file imports our models.

Counts come from the ids themselves and not from the repeats in a gradient: Merlin's stock
`DeepFMModel` looks every table up twice per step, and its list columns make ids unique before
the lookup, so repeats are not counts there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from merlin_cowclip.plugins._stack import ColumnSchema, Schema, Tags, tf

_LOOKUPS = "_merlin_cowclip_lookups"


@dataclass(frozen=True, eq=False)
class Lookup:
    """Rows that a batch reads from a table, by one feature or by several at once.

    Attributes:
      key: the feature; recorded twice in a step under one key, it counts once. Empty where a table
        of several features was called without naming one: such a lookup cannot be counted.
      rows: integer row numbers of the table. Dense b×F: F one-hot features whose rows never meet.
        Ragged b×(n): a list column. Dense b×n with `is_list`: a padded list column.
      is_list: whether one sample may hold a row twice.
      padding: row that stands for "no id" in a list column, never counted.
      features: the F features, where `key` stands for several. One that is looked up alone as well
        counts once.
    """

    key: str
    rows: tf.Tensor | tf.RaggedTensor
    is_list: bool = False
    padding: int | None = None
    features: tuple[str, ...] = ()

    def counted_rows(self, num_rows: int) -> tf.Tensor:
        """Row numbers, int64, each as often as there are samples that hold it."""
        if not self.is_list:
            return tf.reshape(tf.cast(self.rows, tf.int64), [-1])
        if isinstance(self.rows, tf.RaggedTensor):
            flat = tf.cast(self.rows.flat_values, tf.int64)
            samples = _samples(self.rows, flat)
        else:
            ids = tf.cast(self.rows, tf.int64)
            shape = tf.shape(ids, tf.int64)
            flat = tf.reshape(ids, [-1])
            samples = tf.range(tf.size(flat, tf.int64)) // tf.maximum(shape[1], 1)
        if self.padding is not None:
            held = tf.not_equal(flat, self.padding)
            flat, samples = tf.boolean_mask(flat, held), tf.boolean_mask(samples, held)
        pairs, _ = _unique(samples * num_rows + flat)
        return pairs % num_rows


def _samples(rows: tf.RaggedTensor, values: tf.Tensor) -> tf.Tensor:
    """The sample of each value, int64; on GPUs, `value_rowids()` goes through the host."""
    ends = tf.cast(rows.row_splits[1:], tf.int64)
    return tf.searchsorted(
        ends, tf.range(tf.size(values, tf.int64)), side="right", out_type=tf.int64
    )


def _unique(values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """`tf.unique` with int64 positions: on GPUs, int32 tensors live in host memory for many ops."""
    return tf.unique(values, out_idx=tf.int64)


class IdRecorder:
    """Holds the lookups of one table in the step that is being traced, or run eagerly.

    In a graph they are kept on the graph itself, so that a retraced function sees its own tensors
    and a discarded one takes its tensors along. Eagerly the last lookup of each key is kept.
    """

    def __init__(self) -> None:
        self._eager: dict[str, Lookup] = {}

    def record(self, lookup: Lookup) -> None:
        """Note a lookup of the current step."""
        if tf.executing_eagerly():
            self._eager[lookup.key] = lookup
            return
        graph = tf.compat.v1.get_default_graph()
        noted: dict[int, list[Lookup]] = graph.__dict__.setdefault(_LOOKUPS, {})
        noted.setdefault(id(self), []).append(lookup)

    def lookups(self) -> list[Lookup]:
        """All lookups of the current step, in order; empty where none could be recorded."""
        if tf.executing_eagerly():
            return list(self._eager.values())
        graph = tf.compat.v1.get_default_graph()
        # A branch of a tf.cond (loss scaling) may use what its outer graphs recorded.
        while isinstance(graph, _FuncGraph):
            noted = graph.__dict__.get(_LOOKUPS, {}).get(id(self))
            if noted:
                return list(noted)
            graph = graph.outer_graph
        return []


_FuncGraph = type(tf.function(lambda: None).get_concrete_function().graph)


@dataclass(eq=False)
class TableAccess:
    """How a table's rows are to be looked up, so that its update costs least.

    TensorFlow marks a variable whose rows were gathered from the resource by
    `tf.gather(variable, …)` as sparsely used, for good. From then on every read of the whole
    variable, and every dense update, copies it: V×d bytes and their time, twice a step in the
    exact mode. Rows gathered from the read value (`tf.gather(tf.convert_to_tensor(variable), …)`)
    do not mark it, and the read shares the variable's buffer; their gradient is as sparse. The
    lazy mode scatters into the variable, and so needs it marked.

    Attributes:
      whole: gather from the value read as a whole; set by the optimizer for the exact mode.
    """

    whole: bool = False

    def gather(self, variable: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
        """The rows of a V×d variable, by row numbers of any shape: that shape × d."""
        return tf.gather(tf.convert_to_tensor(variable) if self.whole else variable, rows)


@dataclass(frozen=True, eq=False)
class TableSpec:
    """One embedding variable as the optimizer sees it.

    Attributes:
      name: how messages and summaries call it.
      layer: the layer that owns the variable.
      get_variable: returns the V×d variable; may only be called once the layer is built.
      row_offsets: first row of each field's own range of rows, then V; `(0, V)` for one field or
        for a table that several fields share.
      columns: the schema of the fields: one per range of rows, or all that share the table.
      width: d. Tables of width 1 are linear weights: they take L2 but are not clipped.
      recorder: the lookups of the current step.
      access: how the layer is to look rows up; Merlin's own tables do it their way.
    """

    name: str
    layer: tf.keras.layers.Layer
    get_variable: Callable[[], tf.Variable]
    row_offsets: tuple[int, ...]
    columns: tuple[ColumnSchema, ...]
    width: int
    recorder: IdRecorder = field(default_factory=IdRecorder)
    access: TableAccess = field(default_factory=TableAccess)

    @property
    def variable(self) -> tf.Variable:
        """The V×d variable of the built table."""
        return self.get_variable()

    @property
    def num_rows(self) -> int:
        """V."""
        return self.row_offsets[-1]

    def selected(self, wanted: Sequence[Any]) -> tuple[bool, ...]:
        """For each range of rows, whether `wanted` names it.

        Args:
          wanted: names of tables or fields, tags, and layers.
        """
        by_layer = any(item is self.layer or _owns(item, self) for item in wanted)
        names = {item for item in wanted if isinstance(item, str) and not isinstance(item, Tags)}
        tags = [item for item in wanted if isinstance(item, Tags)]
        hits = [
            by_layer
            or self.name in names
            or column.name in names
            or any(Schema([column]).select_by_tag(tag) for tag in tags)  # USER_ID: USER and ID
            for column in self.columns
        ]
        ranges = len(self.row_offsets) - 1
        return tuple(hits) if len(hits) == ranges else (any(hits),) * ranges


def _owns(item: Any, spec: TableSpec) -> bool:
    return getattr(getattr(item, "table", None), "_merlin_cowclip_spec", None) is spec


@runtime_checkable
class HasTables(Protocol):
    """A layer that tells its tables to the optimizer and records its lookups."""

    def table_specs(self) -> Sequence[TableSpec]:
        """The layer's embedding tables; the same objects at every call."""
        ...


def find_tables(model: tf.keras.Model) -> list[TableSpec]:
    """Every embedding table of a model, built or not, each variable once.

    Found by type: layers with `table_specs()` and Merlin's `EmbeddingTable`, whose lookups are
    recorded from now on.
    """
    from merlin.models.tf.inputs.embedding import EmbeddingTable

    specs: dict[int, TableSpec] = {}
    for layer in model._flatten_layers():
        if isinstance(layer, HasTables):
            for spec in layer.table_specs():
                specs.setdefault(id(spec), spec)
        elif isinstance(layer, EmbeddingTable):
            spec = _adapted(layer)
            specs.setdefault(id(spec), spec)
    return list(specs.values())


def _adapted(table: Any) -> TableSpec:
    """The spec of a Merlin `EmbeddingTable`; tables over one Keras `Embedding` share it."""
    embedding = table.table
    if getattr(embedding, "embeddings_regularizer", None) is not None:
        raise ValueError(
            f"The table {table.table_name!r} must have no embeddings_regularizer: it makes the "
            "gradient dense and bypasses the clip. Remove it; l2 of the hyperparameters takes its "
            "place."
        )
    spec: TableSpec | None = getattr(embedding, "_merlin_cowclip_spec", None)
    if spec is None:
        spec = TableSpec(
            name=table.table_name,
            layer=embedding,
            get_variable=lambda: embedding.embeddings,
            row_offsets=(0, int(table.input_dim)),
            columns=tuple(table.schema),
            width=int(table.dim),
        )
        # object.__setattr__: Keras would track the spec as part of the layer.
        object.__setattr__(embedding, "_merlin_cowclip_spec", spec)
    if getattr(table, "_merlin_cowclip_recorder", None) is not spec.recorder:
        _record_calls(table, spec)
    return spec


def _record_calls(table: Any, spec: TableSpec) -> None:
    """Make a Merlin table note the ids of each call."""
    original = table.call

    @functools.wraps(original)
    def call(inputs: Any, **kwargs: Any) -> Any:
        if isinstance(inputs, dict):
            for name in table.schema.column_names:
                if name in inputs:
                    spec.recorder.record(_lookup(name, inputs[name]))
        else:
            names = table.schema.column_names
            spec.recorder.record(_lookup(names[0] if len(names) == 1 else "", inputs))
        return original(inputs, **kwargs)

    object.__setattr__(table, "call", call)
    object.__setattr__(table, "_merlin_cowclip_recorder", spec.recorder)


def _lookup(key: str, ids: Any) -> Lookup:
    """What a Merlin table reads for `ids`: b×1 or b one-hot ids, or a list column."""
    if isinstance(ids, tf.SparseTensor):
        ids = tf.RaggedTensor.from_sparse(tf.sparse.reshape(ids, tf.shape(ids, tf.int64)[:2]))
    if isinstance(ids, tf.RaggedTensor):
        if ids.shape.rank == 3:  # b×(n)×1, as Merlin prepares ragged list columns
            ids = tf.squeeze(ids, axis=-1)
        return Lookup(key, ids, is_list=True)
    if ids.shape.rank == 1 or (ids.shape.rank == 2 and ids.shape[-1] == 1):
        return Lookup(key, ids)
    flat = tf.reshape(ids, [tf.shape(ids)[0], -1])
    return Lookup(key, flat, is_list=True, padding=0)


def samples_per_row(
    lookups: Iterable[Lookup], indices: tf.Tensor, num_rows: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Rows of a batch and in how many samples each occurs (`cnt` of Algorithm 1, line 7).

    Per feature, added up over features that share a table. A row of the gradient that no sample
    holds (padding) counts as 1, as absent rows do.

    Args:
      lookups: the step's lookups; of several under one key only the last counts.
      indices: row numbers of the gradient, with repeats, n.
      num_rows: V.

    Returns:
      rows: U unique row numbers, int64.
      position: n, where each of `indices` stands in `rows`, int64.
      counts: U, float32.
    """
    once = {lookup.key: lookup for lookup in lookups}
    for several in [lookup.features for lookup in once.values()]:
        for feature in several:
            once.pop(feature, None)
    counted = tf.concat([lookup.counted_rows(num_rows) for lookup in once.values()], axis=0)
    rows, position = _unique(tf.concat([counted, tf.cast(indices, tf.int64)], axis=0))
    split = tf.size(counted)
    counts = _tally(position[:split], tf.size(rows))
    return rows, position[split:], tf.maximum(counts, 1.0)


def repeats_per_row(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """As `samples_per_row`, where every repeat in `indices` is one sample."""
    rows, position = _unique(tf.cast(indices, tf.int64))
    return rows, position, _tally(position, tf.size(rows))


def lookups_in(indices: tf.Tensor) -> int:
    """How many lookups a gradient was put together from, as far as its graph tells; eagerly 0.

    TensorFlow joins the slices of several lookups by concatenation, in several layers if many.
    """
    if tf.executing_eagerly() or not hasattr(indices, "op"):
        return 0
    if indices.op.type != "ConcatV2":
        return 1
    return sum(lookups_in(part) for part in indices.op.inputs[:-1])  # the last is the axis


def _tally(position: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    ones = tf.ones(tf.shape(position), tf.float32)
    return tf.math.unsorted_segment_sum(ones, position, size)
