# SPDX-License-Identifier: Apache-2.0
"""The common body of the paper's networks: embeddings, linear part, deep stream, one logit."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

from merlin.models.utils.schema_utils import tensorflow_metadata_json_to_schema
from merlin.schema import Schema, Tags

from merlin_cowclip.models.embeddings import FusedEmbeddings, plain_combiner, schema_text
from merlin_cowclip.plugins._checks import integer, layer_units, unsavable_names
from merlin_cowclip.plugins._tensorflow import mm, precision_policy, tf
from merlin_cowclip.plugins.scaling import check_number

KERNEL_INITIALIZER = "he_normal"
"""Kaiming initialisation of all dense kernels (Appendix G)."""


class CTRBlock(tf.keras.layers.Layer):
    """Features, a dict as `mm.Model` prepares it → one logit, b×1.

    Linear part (a 1-wide table, starting at zero, and one weight per continuous feature) + deep
    stream (an MLP over x, the F·d embedded values and the continuous features) + the subclass's
    `interaction`. Arguments and errors are those of the builders, `networks.py`.
    """

    has_linear = True
    has_embeddings = True
    has_deep = True

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int = 10,
        mlp: Sequence[int] = (400, 400, 400),
        stddev: float = 1e-2,
        combiner: str | Mapping[str, str] = "mean",
        sharded: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.schema = input_schema(schema)
        self.embedding_dim = integer("embedding_dim", embedding_dim)
        self.mlp = layer_units("mlp", tuple(mlp))
        self.stddev = check_number("stddev", stddev)
        self.combiner = plain_combiner(combiner)
        self.continuous_fields = tuple(self.schema.select_by_tag(Tags.CONTINUOUS).column_names)
        table: dict[str, Any] = {"combiner": combiner, "sharded": sharded}
        if self.has_embeddings:
            self.embeddings = FusedEmbeddings(
                self.schema, embedding_dim, stddev=stddev, name="embeddings", **table
            )
        if self.has_linear:
            self.linear = FusedEmbeddings(self.schema, 1, stddev=0.0, name="linear", **table)
            self.continuous_logit = logit("continuous_logit")
        if self.has_deep:
            self.deep = mlp_block(self.mlp)
            self.deep_logit = logit("deep_logit")

    def call(self, inputs: dict[str, Any]) -> tf.Tensor:
        """The logit, b×1."""
        continuous = None
        if self.continuous_fields:
            columns = [tf.reshape(inputs[name], [-1, 1]) for name in self.continuous_fields]
            continuous = tf.concat([tf.cast(c, self.compute_dtype) for c in columns], axis=1)
        terms = []
        if self.has_linear:
            terms.append(tf.reduce_sum(self.linear(inputs), axis=1))
            if continuous is not None:
                terms.append(self.continuous_logit(continuous))
        if self.has_embeddings:
            embedded = self.embeddings(inputs)
            x = tf.reshape(embedded, [-1, len(self.embeddings.fields) * self.embedding_dim])
            if continuous is not None:
                x = tf.concat([x, continuous], axis=1)
            if self.has_deep:
                terms.append(self.deep_logit(self.deep(x)))
            interaction = self.interaction(embedded, x, continuous)
            if interaction is not None:
                terms.append(interaction)
        return tf.add_n(terms)

    def interaction(
        self, embedded: tf.Tensor, x: tf.Tensor, continuous: tf.Tensor | None
    ) -> tf.Tensor | None:
        """The network's own term of the logit, b×1, or `None`.

        Args:
          embedded: the embedded fields, b×F×d.
          x: the same and the continuous features, b×(F·d + C).
          continuous: the continuous features, b×C, or `None` without any.
        """
        return None

    @property
    def sharded(self) -> bool:
        """Whether the ranks share the tables' rows."""
        return (self.embeddings if self.has_embeddings else self.linear).sharded

    def compute_output_shape(self, input_shape: dict[str, Any]) -> tf.TensorShape:
        """b×1."""
        return tf.TensorShape([next(iter(input_shape.values()))[0], 1])

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        values = {name: getattr(self, name) for name in arguments_of(type(self))}
        values = {
            k: list(value) if isinstance(value, tuple) else value for k, value in values.items()
        }
        plain = {"schema": schema_text(self.schema), "combiner": plain_combiner(self.combiner)}
        return {**super().get_config(), **values, **plain}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CTRBlock:
        """The block that `get_config` describes, with its layers in its precision."""
        schema = tensorflow_metadata_json_to_schema(config["schema"])
        with precision_policy(tf.keras.layers.Layer(dtype=config.get("dtype")).dtype_policy):
            return cls(**{**config, "schema": schema})


def arguments_of(block: type[CTRBlock]) -> dict[str, inspect.Parameter]:
    """The arguments of a block and of its bases, which are attributes of it, by name."""
    found: dict[str, inspect.Parameter] = {}
    for base in reversed(block.__mro__):
        if issubclass(base, CTRBlock):
            # Not of the class, whose `__new__` takes any arguments in Keras 2.12.
            found.update(inspect.signature(base.__init__).parameters)
    return {name: one for name, one in found.items() if name not in ("self", "kwargs")}


def logit(name: str) -> tf.keras.layers.Dense:
    """A dense layer to one logit; the network's one bias (Table 7) is in `Probability`."""
    return tf.keras.layers.Dense(
        1, use_bias=False, kernel_initializer=KERNEL_INITIALIZER, name=name
    )


def mlp_block(units: Sequence[int]) -> tf.keras.layers.Layer:
    """Merlin's MLP of ReLU layers, Kaiming initialised."""
    return mm.MLPBlock(list(units), kernel_initializer=KERNEL_INITIALIZER)


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class Probability(tf.keras.layers.Layer):
    """Logit → click probability, b×1 float32, with the network's one bias."""

    def build(self, input_shape: Any) -> None:
        """Create the bias."""
        if hasattr(self, "bias"):  # Merlin's blocks build theirs anew in each that they join
            return
        self.bias = self.add_weight(name="bias", shape=(1,), initializer="zeros")
        super().build(input_shape)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Sigmoid(logit + bias); in float32, since half precision rounds probabilities to 1."""
        logit = tf.cast(inputs + self.bias, tf.float32)
        return tf.keras.activations.sigmoid(logit)

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        """b×1."""
        return tf.TensorShape(input_shape)


def input_schema(schema: Schema) -> Schema:
    """The features of a schema: its categorical and continuous columns without targets."""
    if not isinstance(schema, Schema):
        raise ValueError(
            "schema must be a merlin.schema.Schema: the output_schema of a fitted workflow, or the "
            f"schema of a merlin.io.Dataset. Received: {type(schema).__name__}"
        )
    features = schema.excluding_by_tag(Tags.TARGET)
    continuous = features.select_by_tag(Tags.CONTINUOUS)
    lists = [column.name for column in continuous if column.is_list]
    if lists:
        raise ValueError(
            "A column tagged Tags.CONTINUOUS must hold one number per sample. Received the list "
            f"columns {lists}. Make a column of each number, or leave the lists out: "
            f"schema.excluding_by_name({lists})"
        )
    return features.select_by_tag(Tags.CATEGORICAL) + continuous


def target_name(schema: Schema) -> str:
    """The one column tagged as binary target; a ValueError without, or for one of another kind."""
    names: list[str] = schema.select_by_tag(Tags.TARGET).column_names
    if len(names) != 1:
        raise ValueError(
            "The schema must have exactly one column tagged Tags.TARGET, the 0/1 label. Received: "
            f"{names}. Tag it in the workflow, [label] >> nvtabular.ops.AddMetadata(tags="
            "[Tags.TARGET]), or leave others out, schema.excluding_by_name([…])"
        )
    tags = set(schema[names[0]].tags)
    others = {Tags.REGRESSION, Tags.MULTI_CLASS, Tags.MULTI_CLASS_CLASSIFICATION} & tags
    if others and Tags.BINARY_CLASSIFICATION not in tags:
        raise ValueError(
            f"The target must be a 0/1 label. Received: {names[0]!r}, tagged "
            f"{', '.join(sorted(map(str, others)))}. If it is 0/1, tag it "
            "Tags.BINARY_CLASSIFICATION."
        )
    return names[0]


def as_model(kind: type[CTRBlock], schema: Schema, **options: Any) -> mm.Model:
    """A Merlin model: the logit of a block of this kind → probability of the schema's target.

    Its serving signature has one input per feature (`serving_inputs`). Keras's own would have the
    names of the first call: from a `tf.data.Dataset`, "args_0", with the targets.
    """
    block = kind(schema, **options)
    output = mm.BinaryOutput(target_name(schema), to_call=Probability())
    model = mm.Model(block, output, schema=block.schema)
    # Nothing in it needs AutoGraph, which takes seconds at the first trace.
    call = tf.autograph.experimental.do_not_convert(mm.Model.call)
    model.call = MethodType(call, model)  # type: ignore[method-assign]
    model._set_save_spec(serving_inputs(block.schema))
    return model


def serving_inputs(schema: Schema) -> dict[str, tf.TensorSpec]:
    """The features of a batch as Merlin's loader gives them; a ValueError for unsavable names."""
    refused = unsavable_names(schema.column_names)
    if refused:
        raise ValueError(
            "Columns must have names that TensorFlow can save: of A-Z a-z 0-9 _ . -, a letter or "
            "digit first, not a word of Python's, and different but for _ . - or capitals. "
            f"Received: {refused}. Rename them in the workflow: nvtabular.ops.Rename"
        )
    specs = {}
    for column in schema:
        dtype = tf.int64 if Tags.CATEGORICAL in column.tags else tf.float32
        names: list[str] = [column.name]
        shape: list[int | None] = [None]
        if column.is_ragged:
            names = [f"{column.name}__values", f"{column.name}__offsets"]
        elif column.is_list:
            shape = [None, *(int(dim.max) for dim in column.shape.dims[1:])]
        for name, kind in zip(names, (dtype, tf.int64), strict=False):
            specs[name] = tf.TensorSpec(shape, kind, name=name)
    return specs


def embeddings_of(model: mm.Model) -> dict[str, FusedEmbeddings]:
    """The fused tables of a model by layer name: "embeddings" and, of width 1, "linear".

    Raises:
      ValueError: two of them have one name.
    """
    found: dict[str, FusedEmbeddings] = {}
    for layer in model._flatten_layers():
        if isinstance(layer, FusedEmbeddings) and found.setdefault(layer.name, layer) is not layer:
            raise ValueError(
                f"Two fused tables of the model are called {layer.name!r}. Take them from their "
                "blocks: block.embeddings, block.linear."
            )
    return found
