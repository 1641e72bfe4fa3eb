"""Wide & Deep: deep stream + linear part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from merlin.schema import Schema

from merlin_cowclip.models.ctr_block import CTRBlock, as_model
from merlin_cowclip.plugins._stack import mm, tf


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class WideAndDeepBlock(CTRBlock):
    """Logit = deep + Σ_i w_i (Cheng et al. 2016, equation 3, without crossed features)."""


def wide_and_deep(
    schema: Schema,
    *,
    embedding_dim: int = 10,
    mlp: Sequence[int] = (400, 400, 400),
    stddev: float = 1e-2,
    combiner: str | Mapping[str, str] = "mean",
) -> mm.Model:
    """Wide & Deep as in the paper (Section 4.1, Appendix A; 0.431M network weights on Criteo).

    For arguments and errors see `deepfm`.
    """
    block = WideAndDeepBlock(
        schema, embedding_dim=embedding_dim, mlp=mlp, stddev=stddev, combiner=combiner
    )
    return as_model(block, schema)
