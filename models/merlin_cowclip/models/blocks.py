# SPDX-License-Identifier: Apache-2.0
"""The paper's networks as blocks: what each adds to the common body, `CTRBlock`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from merlin.models.tf.blocks.cross import CrossBlock
from merlin.models.tf.blocks.interaction import DotProductInteraction
from merlin.schema import Schema

from merlin_cowclip.models.ctr_block import KERNEL_INITIALIZER, CTRBlock, logit, mlp_block
from merlin_cowclip.plugins._checks import integer, layer_units
from merlin_cowclip.plugins._tensorflow import mm, tf

_registered = tf.keras.utils.register_keras_serializable(package="merlin_cowclip")


@_registered
class LogisticRegressionBlock(CTRBlock):
    """Logistic regression: logit = Σ_i w_i, one weight per id and continuous feature, and a bias.

    `embedding_dim`, `mlp` and `stddev` have no effect: it has neither embeddings nor layers.
    """

    has_embeddings = False
    has_deep = False


@_registered
class WideAndDeepBlock(CTRBlock):
    """Wide & Deep as in the paper (Section 4.1, Appendix A; 0.431M network weights on Criteo).

    Logit = deep + Σ_i w_i (Cheng et al. 2016, equation 3, without crossed features).
    """


@_registered
class DeepFMBlock(CTRBlock):
    """DeepFM as in the paper (Section 4.1, Appendix A; 0.431M network weights on Criteo).

    Logit = deep + Σ_i w_i + Σ_{i<j} ⟨v_i, v_j⟩ (Guo et al. 2017, equations 1 to 3).
    Merlin's own `FMBlock`, and with it `mm.DeepFMModel`, hands `FMPairwiseInteraction` b×d×F
    instead of b×F×d, and so adds up products within a field instead of between fields.
    """

    def __init__(self, schema: Schema, **kwargs: Any) -> None:
        super().__init__(schema, **kwargs)
        self.pairwise = mm.FMPairwiseInteraction()

    def interaction(
        self, embedded: tf.Tensor, x: tf.Tensor, continuous: tf.Tensor | None
    ) -> tf.Tensor:
        """The factorization machine's second-order term, b×1."""
        return tf.reduce_sum(self.pairwise(embedded), axis=1, keepdims=True)


@_registered
class FMBlock(DeepFMBlock):
    """Factorization machine of second order over the ids; continuous features enter linearly.

    Logit = Σ_i w_i + Σ_{i<j} ⟨v_i, v_j⟩ (Rendle 2010, equation 1). `mlp` has no effect.
    """

    has_deep = False


@_registered
class VectorCross(tf.keras.layers.Layer):
    """x_{l+1} = x_0 (x_lᵀ w_l) + b_l + x_l, `depth` times (Wang et al. 2017, equation 3).

    Merlin's `CrossBlock` is DCN-v2's. Input and output: b×n.
    """

    def __init__(self, depth: int = 3, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.depth = depth

    def build(self, input_shape: Any) -> None:
        """Create w_l (n×1) and b_l (n) of each layer."""
        if hasattr(self, "kernels"):  # Merlin's blocks build theirs anew in each that they join
            return
        n = int(input_shape[-1])
        self.kernels = [
            self.add_weight(name=f"kernel_{i}", shape=(n, 1), initializer=KERNEL_INITIALIZER)
            for i in range(self.depth)
        ]
        self.biases = [
            self.add_weight(name=f"bias_{i}", shape=(n,), initializer="zeros")
            for i in range(self.depth)
        ]
        super().build(input_shape)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """b×n."""
        x = inputs
        for i in range(self.depth):  # AutoGraph has no zip(…, strict=…)
            x = inputs * tf.matmul(x, self.kernels[i]) + self.biases[i] + x
        return x

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "depth": self.depth}


@_registered
class DCNBlock(CTRBlock):
    """Deep & Cross with vectors as in the paper (Section 4.1, Appendix A; 0.433M network weights).

    Logit = deep + Σ_i w_i + uᵀ x_L, x_L from `VectorCross` over x.
    """

    def __init__(self, schema: Schema, *, cross_layers: int = 3, **kwargs: Any) -> None:
        super().__init__(schema, **kwargs)
        self.cross_layers = integer("cross_layers", cross_layers)
        self.cross = self._cross()
        self.cross_logit = logit("cross_logit")

    def _cross(self) -> tf.keras.layers.Layer:
        return VectorCross(self.cross_layers, name="cross")

    def interaction(
        self, embedded: tf.Tensor, x: tf.Tensor, continuous: tf.Tensor | None
    ) -> tf.Tensor:
        """The cross stream's logit, b×1."""
        return self.cross_logit(self.cross(x))


@_registered
class DCNv2Block(DCNBlock):
    """Deep & Cross with matrices as in the paper (Section 4.1, Appendix A; 0.655M network weights).

    As `DCNBlock`, with x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l from Merlin's `CrossBlock`.
    W_l is n×n (Wang et al. 2021, equation 1), or U_l V_lᵀ of rank `low_rank_dim` (equation 2).
    """

    def __init__(self, schema: Schema, *, low_rank_dim: int | None = None, **kwargs: Any) -> None:
        if low_rank_dim is not None:
            integer("low_rank_dim", low_rank_dim)
        self.low_rank_dim = low_rank_dim
        super().__init__(schema, **kwargs)

    def _cross(self) -> tf.keras.layers.Layer:
        return CrossBlock(
            self.cross_layers,
            low_rank_dim=self.low_rank_dim,
            kernel_initializer=KERNEL_INITIALIZER,
        )


@_registered
class DLRMBlock(CTRBlock):
    """DLRM, the baseline of the paper's Tables 5 and 11 (Naumov et al. 2019, Section 2).

    Logit = top MLP over [z_0, ⟨z_i, z_j⟩ for i > j], z_0 the bottom MLP's output of the continuous
    features, the other z_i embeddings. No linear part, and, without continuous features, no z_0.
    The function is that of Merlin's `DLRMBlock`, on one table.
    """

    has_linear = False
    has_deep = False

    def __init__(
        self, schema: Schema, *, bottom_mlp: Sequence[int] = (512, 256, 64), **kwargs: Any
    ) -> None:
        super().__init__(schema, **kwargs)
        self.bottom_mlp = layer_units("bottom_mlp", tuple(bottom_mlp)) if bottom_mlp else ()
        if self.continuous_fields:
            self.bottom = mlp_block((*self.bottom_mlp, self.embedding_dim))
        elif len(self.embeddings.fields) < 2:
            raise ValueError(
                "The schema must have two fields at least, for DLRM reads their products alone. "
                f"Received the columns {self.schema.column_names}. Use another network"
            )
        self.products = DotProductInteraction()
        self.top = mlp_block(self.mlp)
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
