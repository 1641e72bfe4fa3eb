"""The two classics without a deep stream: logistic regression and the factorization machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from merlin.schema import Schema

from merlin_cowclip.models.ctr_block import CTRBlock, as_model
from merlin_cowclip.models.deepfm import PairwiseTerm
from merlin_cowclip.plugins._stack import mm, tf


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class LogisticRegressionBlock(CTRBlock):
    """Logit = Σ_i w_i: the linear part alone."""

    has_embeddings = False
    has_deep = False


@tf.keras.utils.register_keras_serializable(package="merlin_cowclip")
class FMBlock(PairwiseTerm):
    """Logit = Σ_i w_i + Σ_{i<j} ⟨v_i, v_j⟩ (Rendle 2010, equation 1)."""

    has_deep = False


def lr(
    schema: Schema,
    *,
    embedding_dim: int = 10,
    mlp: Sequence[int] = (400, 400, 400),
    stddev: float = 1e-2,
    combiner: str | Mapping[str, str] = "mean",
) -> mm.Model:
    """Logistic regression: one weight per id and continuous feature, and a bias.

    `embedding_dim`, `mlp` and `stddev` are there so that builders can take each other's place; this
    network has neither embeddings nor layers. For the other arguments and errors see `deepfm`.
    """
    block = LogisticRegressionBlock(
        schema, embedding_dim=embedding_dim, mlp=mlp, stddev=stddev, combiner=combiner
    )
    return as_model(block, schema)


def fm(
    schema: Schema,
    *,
    embedding_dim: int = 10,
    mlp: Sequence[int] = (400, 400, 400),
    stddev: float = 1e-2,
    combiner: str | Mapping[str, str] = "mean",
) -> mm.Model:
    """Factorization machine of second order over the ids; continuous features enter linearly.

    `mlp` is there so that builders can take each other's place; this network has no layers. For the
    other arguments and errors see `deepfm`.
    """
    block = FMBlock(schema, embedding_dim=embedding_dim, mlp=mlp, stddev=stddev, combiner=combiner)
    return as_model(block, schema)
