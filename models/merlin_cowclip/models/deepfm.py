"""Networks without a cross stream: logistic regression, FM, Wide & Deep, and DeepFM."""

from __future__ import annotations

from typing import Any

from merlin.schema import Schema

from merlin_cowclip.models.ctr_block import CTRBlock
from merlin_cowclip.plugins._tensorflow import mm, tf


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class LogisticRegressionBlock(CTRBlock):
    """Logit = Σ_i w_i: only the linear part."""

    has_embeddings = False
    has_deep = False


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class WideAndDeepBlock(CTRBlock):
    """Logit = deep + Σ_i w_i (Cheng et al. 2016, equation 3, without crossed features)."""


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
class FMBlock(PairwiseTerm):
    """Logit = Σ_i w_i + Σ_{i<j} ⟨v_i, v_j⟩ (Rendle 2010, equation 1)."""

    has_deep = False


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class DeepFMBlock(PairwiseTerm):
    """Logit = deep + Σ_i w_i + Σ_{i<j} ⟨v_i, v_j⟩ (Guo et al. 2017, equations 1 to 3)."""
