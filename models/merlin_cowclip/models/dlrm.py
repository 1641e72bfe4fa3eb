"""DLRM: a bottom MLP makes the continuous features one more field; a top MLP reads all products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from merlin.models.tf.blocks.interaction import DotProductInteraction
from merlin.schema import Schema

from merlin_cowclip.models.ctr_block import CTRBlock, logit, mlp_block
from merlin_cowclip.plugins._checks import layer_units
from merlin_cowclip.plugins._tensorflow import tf


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class DLRMBlock(CTRBlock):
    """Logit = top MLP over [z_0, ⟨z_i, z_j⟩ for i > j], z_0 the bottom MLP's output.

    Naumov et al. 2019, Section 2; the other z_i are embeddings. No linear part, and, without
    continuous features, no z_0. The function is that of Merlin's `DLRMBlock`, on one table.
    """

    has_linear = False
    has_deep = False

    def __init__(
        self, schema: Schema, *, bottom_mlp: Sequence[int] = (512, 256, 64), **kwargs: Any
    ) -> None:
        super().__init__(schema, **kwargs)
        self.bottom_units = layer_units("bottom_mlp", tuple(bottom_mlp)) if bottom_mlp else ()
        if self.continuous_fields:
            self.bottom = mlp_block((*self.bottom_units, self.embedding_dim))
        elif len(self.embeddings.fields) < 2:
            raise ValueError(
                "The schema must have two fields at least, for DLRM reads their products alone. "
                f"Received the columns {self.schema.column_names}."
            )
        self.products = DotProductInteraction()
        self.top = mlp_block(self.mlp_units)
        self.top_logit = logit("top_logit")

    def interaction(
        self, embedded: tf.Tensor, x: tf.Tensor, continuous: tf.Tensor | None
    ) -> tf.Tensor:
        """The logit, b×1."""
        if continuous is None:
            return self.top_logit(self.top(self.products(embedded)))
        dense = self.bottom(continuous)
        products = self.products(tf.concat([dense[:, tf.newaxis], embedded], axis=1))
        return self.top_logit(self.top(tf.concat([dense, products], axis=1)))

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "bottom_mlp": list(self.bottom_units)}
