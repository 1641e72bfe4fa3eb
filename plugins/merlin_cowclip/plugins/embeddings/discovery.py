"""The embedding tables of a model: layers of the `HasTables` protocol, Merlin's tables and Keras's.

Merlin's and Keras's layers are made to record the ids of each call, on the layer itself: what they
compute and what is saved of them stays theirs.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

from merlin_cowclip.plugins._tensorflow import ColumnSchema, tf
from merlin_cowclip.plugins.embeddings.counting import Lookup
from merlin_cowclip.plugins.embeddings.tables import HasTables, TableSpec

_SPEC = "_merlin_cowclip_spec"

# Tables whose lookup a layer around them, which knows the feature, has recorded already.
_recorded = contextvars.ContextVar[tuple[TableSpec, ...]]("merlin_cowclip_recorded", default=())


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
    specs: dict[int, TableSpec] = {}
    plain: list[Any] = []
    for layer in layers:
        if isinstance(layer, HasTables):
            found = list(layer.table_specs())
        elif isinstance(layer, EmbeddingTable):
            found = [_of_table(layer)]
        elif isinstance(layer, EmbeddingFeatures):
            found = _of_features(layer)
        else:
            plain += [layer] if isinstance(layer, tf.keras.layers.Embedding) else []
            continue
        specs.update((id(spec), spec) for spec in found)
    mine = {id(spec.layer) for spec in specs.values()}
    for layer in plain:
        if id(layer) not in mine:
            spec = _spec_of(layer, layer.name, [ColumnSchema(layer.name)])
            specs[id(spec)] = spec
    tied = {id(one.table.table) for one in layers if isinstance(one, EmbeddingTablePrediction)}
    for spec in specs.values():
        if isinstance(spec.layer, tf.keras.layers.Embedding):
            _record_embedding(spec.layer)
            spec.is_tied = spec.is_tied or id(spec.layer) in tied
    return list(specs.values())


def check_regularizer(name: str, layer: Any) -> None:
    """Refuse a table with a Keras regularizer.

    Raises:
      ValueError: it has one.
    """
    if getattr(layer, "embeddings_regularizer", None) is not None:
        raise ValueError(
            f"The table {name!r} must have no embeddings_regularizer: it makes the gradient dense "
            "and bypasses the clip. Remove it; l2 of the hyperparameters takes its place."
        )


def _spec_of(embedding: Any, name: str, columns: Sequence[ColumnSchema]) -> TableSpec:
    """The one spec of a Keras `Embedding`, whichever layers call it."""
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
        # object.__setattr__: Keras would track the spec as part of the layer.
        object.__setattr__(embedding, _SPEC, spec)
    return spec


def _wrap(layer: Any, method: Callable[..., Any]) -> None:
    """Replace a method of one layer by one of the same name and signature."""
    # Bound as the class's own is: Keras inspects it when it saves the layer.
    object.__setattr__(layer, method.__name__, MethodType(method, layer))


@contextlib.contextmanager
def _is_recorded(*specs: TableSpec) -> Iterator[None]:
    token = _recorded.set((*_recorded.get(), *specs))
    try:
        yield
    finally:
        _recorded.reset(token)


def _record_embedding(embedding: Any) -> None:
    """Make a Keras `Embedding` note the ids of each call that no layer around it has noted.

    That is a plain one, or a Merlin table's that a tied output calls by itself.
    """

    def call(self: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        spec = getattr(self, _SPEC)
        if spec not in _recorded.get():
            padding = 0 if self.mask_zero else None
            spec.recorder.record(_lookup("", inputs, padding=padding, masked=self.mask_zero))
        return type(self).call(self, inputs, *args, **kwargs)

    _wrap(embedding, call)


def _of_table(table: Any) -> TableSpec:
    """The spec of a Merlin `EmbeddingTable`; tables over one Keras `Embedding` share it."""

    def call(self: Any, inputs: Any, **kwargs: Any) -> Any:
        spec = getattr(self.table, _SPEC)
        names = self.schema.column_names
        if isinstance(inputs, dict):
            given = {name: inputs[name] for name in names if name in inputs}
        else:
            given = {names[0] if len(names) == 1 else "": inputs}
        combined = isinstance(self.sequence_combiner, str)
        for name, ids in given.items():
            spec.recorder.record(_lookup(name, ids, combined=combined))
        with _is_recorded(spec):
            return type(self).call(self, inputs, **kwargs)

    _wrap(table, call)
    return _spec_of(table.table, table.table_name, tuple(table.schema))


def _of_features(layer: Any) -> list[TableSpec]:
    """The specs of a Merlin `EmbeddingFeatures`, which gathers from its tables' variables."""

    def lookup_feature(self: Any, name: str, val: Any, *args: Any, **kwargs: Any) -> Any:
        table = self.embedding_tables[self.feature_config[name].table.name]
        padding = getattr(self, "padding_idx", 0)
        spec = getattr(table, _SPEC)
        spec.recorder.record(_lookup(name, val, padding=padding, combined=True))
        return type(self).lookup_feature(self, name, val, *args, **kwargs)

    _wrap(layer, lookup_feature)
    features: dict[str, list[str]] = {name: [] for name in layer.embedding_tables}
    for feature, config in layer.feature_config.items():
        features[config.table.name].append(feature)
    known = {column.name: column for column in layer.schema or ()}
    return [
        _spec_of(table, name, [known.get(f, ColumnSchema(f)) for f in features[name]])
        for name, table in layer.embedding_tables.items()
    ]


def _lookup(
    feature: str,
    ids: Any,
    *,
    padding: int | None = 0,
    combined: bool = False,
    masked: bool = False,
) -> Lookup:
    """What a Merlin or Keras table reads for ids: b×1 or b one-hot ids, or a list column.

    Args:
      feature: its name.
      ids: as the table gets them.
      padding: the id that is none in a padded list.
      combined: whether a ragged list's ids are made unique before the lookup.
      masked: whether padding is none in one-hot ids, too.
    """
    if isinstance(ids, tf.SparseTensor):
        ids = tf.RaggedTensor.from_sparse(tf.sparse.reshape(ids, tf.shape(ids, tf.int64)[:2]))
    if isinstance(ids, tf.RaggedTensor):
        if ids.shape.rank is None:  # of a `tf.map_fn`, say; whatever else they are fails at a step
            ids = ids.with_flat_values(tf.ensure_shape(ids.flat_values, [None]))
        return Lookup(feature, ids, combined=combined)
    ids = tf.convert_to_tensor(ids)
    if ids.shape.rank in (0, 1) or (ids.shape.rank == 2 and ids.shape[-1] == 1):
        return Lookup(feature, ids, padding=padding if masked else None)
    if padding is not None and not masked and ids.shape.rank == 2 and ids.shape[-1] is None:
        one_hot = tf.equal(tf.shape(ids, tf.int64)[1], 1)  # which only the batch tells
        padding = tf.where(one_hot, tf.constant(-1, tf.int64), padding)  # no id
    return Lookup(feature, ids, padding=padding)
