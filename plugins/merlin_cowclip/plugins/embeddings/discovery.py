# SPDX-License-Identifier: Apache-2.0
"""The embedding tables of a model: layers of the `HasTables` protocol, Merlin's tables and Keras's.

Merlin's and Keras's layers record the ids of each call, by a method that is replaced on the layer
object: what they compute and what is saved of them stays theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any

from merlin_cowclip.plugins._tensorflow import ColumnSchema, tf
from merlin_cowclip.plugins.embeddings.counting import Lookup
from merlin_cowclip.plugins.embeddings.tables import HasTables, TableSpec

_SPEC = "_merlin_cowclip_spec"
_CUSTOM = "A custom layer needs a Keras Embedding, a Merlin table, or a table_specs() method."


def find_tables(model: tf.keras.Model) -> list[TableSpec]:
    """Every embedding table of a model, built or not, each variable once.

    Found by type: layers with `table_specs()`, Merlin's `EmbeddingTable` and `EmbeddingFeatures`
    (of `InputBlock`), and Keras's `Embedding`, whose lookups are recorded from now on.

    Raises:
      ValueError: a table with a regularizer.
    """
    from merlin.models.tf.inputs.embedding import EmbeddingFeatures, EmbeddingTable
    from merlin.models.tf.outputs.classification import EmbeddingTablePrediction

    layers = list(model._flatten_layers())
    specs: list[TableSpec] = []
    for layer in layers:
        if isinstance(layer, HasTables):
            specs += layer.table_specs()
        elif isinstance(layer, EmbeddingTable):
            specs.append(_of_table(layer))
        elif isinstance(layer, EmbeddingFeatures):
            specs += _of_features(layer)
    embeddings = [one for one in layers if isinstance(one, tf.keras.layers.Embedding)]
    specs += [_of_embedding(one, one.name, [ColumnSchema(one.name)]) for one in embeddings]
    tied = [one.table.table for one in layers if isinstance(one, EmbeddingTablePrediction)]
    for spec in specs:
        spec.is_tied = spec.is_tied or any(spec.layer is table for table in tied)
    return list(dict.fromkeys(specs))


def tables_of(model: tf.keras.Model, clip_tables: Sequence[Any] | None) -> list[TableSpec]:
    """As `find_tables`; there must be some, and `clip_tables` must name some of them."""
    specs = find_tables(model)
    if not specs:
        raise ValueError(
            f"No embedding table was found in the model {model.name!r}. If its layers are made "
            f"when it is built, call it on a batch first. {_CUSTOM}"
        )
    for wanted in clip_tables or ():
        if not any(any(spec.selected([wanted])) for spec in specs):
            names = ", ".join(spec.name for spec in specs)
            raise ValueError(
                "clip_tables must name tables, fields, tags or layers of the model. Received: "
                f"{wanted!r}; the model's tables: {names}"
            )
    return specs


def check_known(
    pairs: Sequence[tuple[Any, tf.Variable]], tables: Iterable[Any], model: Any
) -> None:
    """Refuse a sparse gradient of what is no table of the model: its ids are not counted."""
    layers = [] if model is None else model._flatten_layers()
    # A Dense layer on sparse input has a sparse gradient: the wide part of a stock W&D.
    dense = (one for one in layers if isinstance(one, tf.keras.layers.Dense) and one.built)
    known = {*tables, *(layer.kernel.ref() for layer in dense)}
    for gradient, variable in pairs:
        if isinstance(gradient, tf.IndexedSlices) and variable.ref() not in known:
            raise ValueError(
                f"{variable.name!r} has a sparse gradient, but belongs to no embedding table that "
                "was found in the optimizer's model. Call optimizer.bind(model) once all its "
                f"layers are made. {_CUSTOM}"
            )


def check_regularizer(name: str, layer: Any) -> None:
    """Refuse a table with a Keras regularizer."""
    if getattr(layer, "embeddings_regularizer", None) is not None:
        raise ValueError(
            f"The table {name!r} must have no embeddings_regularizer: it makes the gradient dense "
            "and bypasses the clip. Remove it; l2 of the hyperparameters takes its place."
        )


def _replace(layer: Any, method: Callable[..., Any]) -> None:
    """Replace a method of one layer by one of the same name and signature."""
    # Bound as the class's own is: Keras inspects it when it saves the layer. object.__setattr__:
    # Keras would track what is set on it.
    object.__setattr__(layer, method.__name__, MethodType(method, layer))


def _of_embedding(embedding: Any, name: str, columns: Sequence[ColumnSchema]) -> TableSpec:
    """The one spec of a Keras `Embedding`, whichever layers call it."""

    def call(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = getattr(self, _SPEC).recorder
        if not recorder.is_paused:
            padding = 0 if self.mask_zero else None
            recorder.record(_lookup("", inputs, padding=padding, masked=self.mask_zero))
        return type(self).call(self, inputs, *args, **kwargs)

    check_regularizer(name, embedding)
    spec: TableSpec | None = getattr(embedding, _SPEC, None)
    if spec is None:
        spec = TableSpec(
            name=name,
            layer=embedding,
            get_variable=functools.partial(getattr, embedding, "embeddings"),
            row_offsets=(0, int(embedding.input_dim)),
            columns=tuple(columns),
            width=int(embedding.output_dim),
        )
        object.__setattr__(embedding, _SPEC, spec)
        _replace(embedding, call)
    return spec


def _of_table(table: Any) -> TableSpec:
    """The spec of a Merlin `EmbeddingTable`; tables over one Keras `Embedding` share it."""

    def call(self: Any, inputs: Any, **kwargs: Any) -> Any:
        recorder = getattr(self.table, _SPEC).recorder
        names = self.schema.column_names
        if isinstance(inputs, dict):
            given = {name: inputs[name] for name in names if name in inputs}
        else:
            given = {names[0] if len(names) == 1 else "": inputs}
        for name, ids in given.items():
            combined = isinstance(self.sequence_combiner, str)
            recorder.record(_lookup(name, ids, combined=combined))
        recorder.is_paused = True  # the feature is known here, and not in the Keras layer within
        try:
            return type(self).call(self, inputs, **kwargs)
        finally:
            recorder.is_paused = False

    _replace(table, call)
    return _of_embedding(table.table, table.table_name, tuple(table.schema))


def _of_features(layer: Any) -> list[TableSpec]:
    """The specs of a Merlin `EmbeddingFeatures`, which gathers from its tables' variables."""

    def lookup_feature(self: Any, name: str, val: Any, *args: Any, **kwargs: Any) -> Any:
        table = self.embedding_tables[self.feature_config[name].table.name]
        padding = getattr(self, "padding_idx", 0)
        getattr(table, _SPEC).recorder.record(_lookup(name, val, padding=padding, combined=True))
        return type(self).lookup_feature(self, name, val, *args, **kwargs)

    _replace(layer, lookup_feature)
    known = {column.name: column for column in layer.schema or ()}
    columns: dict[str, list[ColumnSchema]] = {name: [] for name in layer.embedding_tables}
    for feature, config in layer.feature_config.items():
        columns[config.table.name].append(known.get(feature, ColumnSchema(feature)))
    tables = layer.embedding_tables.items()
    return [_of_embedding(table, name, columns[name]) for name, table in tables]


def _lookup(
    feature: str,
    ids: Any,
    *,
    padding: int | None = 0,
    combined: bool = False,
    masked: bool = False,
) -> Lookup:
    """What a Merlin or Keras table reads: one-hot ids (with padding if `masked`), or a list.

    A ragged list's ids are made unique before the lookup if `combined`.
    """
    if isinstance(ids, tf.SparseTensor):
        lists = tf.sparse.reshape(ids, tf.shape(ids, tf.int64)[:2])  # which copies the values
        ids = tf.RaggedTensor.from_sparse(lists).with_flat_values(ids.values)
    if isinstance(ids, tf.RaggedTensor):
        return Lookup(feature, ids, combined=combined)
    ids = tf.convert_to_tensor(ids)
    if ids.shape.rank in (0, 1) or (ids.shape.rank == 2 and ids.shape[-1] == 1):
        return Lookup(feature, ids, padding=padding if masked else None)
    if padding is not None and not masked and ids.shape.rank == 2 and ids.shape[-1] is None:
        one_hot = tf.equal(tf.shape(ids, tf.int64)[1], 1)  # which only the batch tells
        padding = tf.where(one_hot, tf.constant(-1, tf.int64), padding)  # no id
    return Lookup(feature, ids, padding=padding)
