"""The common body of the paper's networks: embeddings, linear part, deep stream, one logit.

A network of its own only in what a subclass adds to the logit (`interaction`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from merlin.models.utils.schema_utils import (
    schema_to_tensorflow_metadata_json,
    tensorflow_metadata_json_to_schema,
)
from merlin.schema import Schema, Tags

from merlin_cowclip.models.embeddings import FusedEmbeddings
from merlin_cowclip.plugins._stack import mm, tf

KERNEL_INITIALIZER = "he_normal"
"""Kaiming initialisation of all dense kernels (Appendix G)."""


class CTRBlock(tf.keras.layers.Layer):
    """Features → one logit: deep stream + linear part + what the subclass adds.

    The deep stream is an MLP over the F·d embedded values and the continuous features; the linear
    part is a 1-wide table, starting at zero, and one weight per continuous feature.

    Args:
      schema: columns tagged `Tags.CATEGORICAL` and `Tags.CONTINUOUS`; targets are left out.
      embedding_dim: width d of the embeddings.
      mlp: units of the deep stream's ReLU layers.
      stddev: standard deviation σ of the initial embeddings.
      combiner: how a list column's embeddings become one.

    Input: dict of features as `mm.Model` prepares them. Output: logit, b×1.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        embedding_dim: int = 10,
        mlp: Sequence[int] = (400, 400, 400),
        stddev: float = 1e-2,
        combiner: str = "mean",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.schema = input_schema(schema)
        self.embedding_dim = embedding_dim
        self.mlp_units = tuple(int(units) for units in mlp)
        self.stddev = float(stddev)
        self.combiner = combiner
        self.continuous_fields = tuple(self.schema.select_by_tag(Tags.CONTINUOUS).column_names)
        self.embeddings = FusedEmbeddings(
            self.schema, embedding_dim, stddev=stddev, combiner=combiner, name="embeddings"
        )
        self.linear = FusedEmbeddings(self.schema, 1, stddev=0.0, combiner=combiner, name="linear")
        self.deep = mm.MLPBlock(list(self.mlp_units), kernel_initializer=KERNEL_INITIALIZER)
        self.deep_logit = _logit("deep_logit")
        self.continuous_logit = _logit("continuous_logit") if self.continuous_fields else None

    def call(self, inputs: dict[str, Any]) -> tf.Tensor:
        """The logit, b×1."""
        embedded = self.embeddings(inputs)
        fields = len(self.embeddings.fields)
        streams = [tf.reshape(embedded, [-1, fields * self.embedding_dim])]
        logit = tf.reduce_sum(self.linear(inputs), axis=1)
        if self.continuous_logit is not None:
            columns = [tf.reshape(inputs[name], [-1, 1]) for name in self.continuous_fields]
            continuous = tf.cast(tf.concat(columns, axis=1), self.compute_dtype)
            streams.append(continuous)
            logit += self.continuous_logit(continuous)
        logit += self.deep_logit(self.deep(tf.concat(streams, axis=1)))
        return logit + self.interaction(embedded)

    def interaction(self, embedded: tf.Tensor) -> tf.Tensor | float:
        """What the network adds to the logit for the embedded fields b×F×d: b×1, or 0."""
        return 0.0

    def compute_output_shape(self, input_shape: dict[str, Any]) -> tf.TensorShape:
        """b×1."""
        return tf.TensorShape([next(iter(input_shape.values()))[0], 1])

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            **super().get_config(),
            "schema": schema_to_tensorflow_metadata_json(self.schema),
            "embedding_dim": self.embedding_dim,
            "mlp": list(self.mlp_units),
            "stddev": self.stddev,
            "combiner": self.combiner,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CTRBlock:
        """The block that `get_config` describes."""
        schema = tensorflow_metadata_json_to_schema(config["schema"])
        return cls(**{**config, "schema": schema})


def _logit(name: str) -> tf.keras.layers.Dense:
    # Without a bias: the network has one, in Probability (Table 7 counts it so).
    return tf.keras.layers.Dense(
        1, use_bias=False, kernel_initializer=KERNEL_INITIALIZER, name=name
    )


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class Probability(tf.keras.layers.Layer):
    """Logit → click probability, b×1 float32, with the network's one bias."""

    def build(self, input_shape: Any) -> None:
        """Create the bias."""
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
    features = schema.excluding_by_tag(Tags.TARGET)
    return features.select_by_tag(Tags.CATEGORICAL) + features.select_by_tag(Tags.CONTINUOUS)


def target_name(schema: Schema) -> str:
    """The one column tagged as binary target.

    Raises:
      ValueError: none or several.
    """
    names = schema.select_by_tag(Tags.TARGET).column_names
    if len(names) != 1:
        raise ValueError(
            "The schema must have exactly one column tagged Tags.TARGET (the 0/1 label). "
            f"Received: {names}"
        )
    return names[0]


def as_model(block: CTRBlock, schema: Schema) -> mm.Model:
    """A Merlin model: the block's logit → probability of the schema's target."""
    output = mm.BinaryOutput(target_name(schema), to_call=Probability())
    return mm.Model(block, output, schema=block.schema)
