"""Deep & Cross: deep stream + linear part + cross stream of vectors (DCN) or matrices (DCN-v2)."""

from __future__ import annotations

from typing import Any

from merlin.models.tf.blocks.cross import CrossBlock
from merlin.schema import Schema

from merlin_cowclip.models.ctr_block import KERNEL_INITIALIZER, CTRBlock, logit
from merlin_cowclip.plugins._checks import whole_number
from merlin_cowclip.plugins._tensorflow import tf


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
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

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        """b×n."""
        return tf.TensorShape(input_shape)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "depth": self.depth}


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class DCNBlock(CTRBlock):
    """Logit = deep + Σ_i w_i + uᵀ x_L, x_L from `VectorCross` over x."""

    def __init__(self, schema: Schema, *, cross_layers: int = 3, **kwargs: Any) -> None:
        super().__init__(schema, **kwargs)
        self.cross_layers = whole_number("cross_layers", cross_layers)
        self.cross = self._cross()
        self.cross_logit = logit("cross_logit")

    def _cross(self) -> tf.keras.layers.Layer:
        return VectorCross(self.cross_layers, name="cross")

    def interaction(
        self, embedded: tf.Tensor, x: tf.Tensor, continuous: tf.Tensor | None
    ) -> tf.Tensor:
        """The cross stream's logit, b×1."""
        return self.cross_logit(self.cross(x))

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "cross_layers": self.cross_layers}


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class DCNv2Block(DCNBlock):
    """As `DCNBlock`, with x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l from Merlin's `CrossBlock`.

    W_l is n×n (Wang et al. 2021, equation 1), or U_l V_lᵀ of rank `low_rank_dim` (equation 2).
    """

    def __init__(self, schema: Schema, *, low_rank_dim: int | None = None, **kwargs: Any) -> None:
        full = low_rank_dim is None
        self.low_rank_dim = None if full else whole_number("low_rank_dim", low_rank_dim)
        super().__init__(schema, **kwargs)

    def _cross(self) -> tf.keras.layers.Layer:
        return CrossBlock(
            self.cross_layers,
            low_rank_dim=self.low_rank_dim,
            kernel_initializer=KERNEL_INITIALIZER,
        )

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "low_rank_dim": self.low_rank_dim}
