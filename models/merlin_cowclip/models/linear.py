"""The two classics without a deep stream: logistic regression and the factorization machine."""

from __future__ import annotations

from merlin_cowclip.models.ctr_block import CTRBlock
from merlin_cowclip.models.deepfm import PairwiseTerm
from merlin_cowclip.plugins._stack import tf


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class LogisticRegressionBlock(CTRBlock):
    """Logit = Σ_i w_i: the linear part alone."""

    has_embeddings = False
    has_deep = False


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class FMBlock(PairwiseTerm):
    """Logit = Σ_i w_i + Σ_{i<j} ⟨v_i, v_j⟩ (Rendle 2010, equation 1)."""

    has_deep = False
