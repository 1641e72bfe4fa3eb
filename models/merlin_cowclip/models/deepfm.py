"""DeepFM: deep stream + linear part + pairwise products of the embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from merlin.schema import Schema

from merlin_cowclip.models.ctr_block import CTRBlock, as_model
from merlin_cowclip.plugins._stack import mm, tf


class PairwiseTerm(CTRBlock):
    """Adds Σ_{i<j} ⟨v_i, v_j⟩ over the embedded fields, by Merlin's `FMPairwiseInteraction`.

    Merlin's own `FMBlock`, and with it `mm.DeepFMModel`, hands that layer b×d×F instead of b×F×d,
    and so adds up products within a field instead of between fields.
    """

    def __init__(self, schema: Schema, **kwargs: Any) -> None:
        super().__init__(schema, **kwargs)
        self.pairwise = mm.FMPairwiseInteraction()

    def interaction(
        self, embedded: tf.Tensor, x: tf.Tensor, continuous: tf.Tensor | None
    ) -> tf.Tensor:
        """The factorization machine's second-order term, b×1."""
        return tf.reduce_sum(self.pairwise(embedded), axis=1, keepdims=True)


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class DeepFMBlock(PairwiseTerm):
    """Logit = deep + Σ_i w_i + Σ_{i<j} ⟨v_i, v_j⟩ (Guo et al. 2017, equations 1 to 3)."""


def deepfm(
    schema: Schema,
    *,
    embedding_dim: int = 10,
    mlp: Sequence[int] = (400, 400, 400),
    stddev: float = 1e-2,
    combiner: str | Mapping[str, str] = "mean",
) -> mm.Model:
    """DeepFM as in the paper (Section 4.1, Appendix A; 0.431M network weights on Criteo).

    Args:
      schema: categorical and continuous columns and one target.
      embedding_dim: width of the embeddings.
      mlp: units of the deep stream's ReLU layers.
      stddev: standard deviation σ of the initial embeddings (1e-2 with CowClip, 1e-4 without).
      combiner: how a list column's embeddings become one: "mean", "sum" or "sqrtn", for all or by
        column.

    Raises:
      ValueError: the schema has no categorical column or not exactly one target, or an argument
        is out of range.
    """
    block = DeepFMBlock(
        schema, embedding_dim=embedding_dim, mlp=mlp, stddev=stddev, combiner=combiner
    )
    return as_model(block, schema)
