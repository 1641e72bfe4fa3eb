"""Wide & Deep: deep stream + linear part."""

from __future__ import annotations

from merlin_cowclip.models.ctr_block import CTRBlock
from merlin_cowclip.plugins._stack import tf


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class WideAndDeepBlock(CTRBlock):
    """Logit = deep + Σ_i w_i (Cheng et al. 2016, equation 3, without crossed features)."""
