# SPDX-License-Identifier: Apache-2.0
"""The paper's networks as Merlin models: one builder each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from merlin.schema import Schema

from merlin_cowclip.models import blocks
from merlin_cowclip.models.ctr_block import as_model
from merlin_cowclip.plugins._tensorflow import mm

Combiner: TypeAlias = str | Mapping[str, str]


def lr(
    schema: Schema,
    *,
    embedding_dim: int = 10,
    mlp: Sequence[int] = (400, 400, 400),
    stddev: float = 1e-2,
    combiner: Combiner = "mean",
    sharded: bool = False,
) -> mm.Model:
    """Logistic regression: one weight per id and continuous feature, and a bias.

    Arguments and errors are those of `deepfm`. `embedding_dim`, `mlp` and `stddev` have no effect:
    this network has neither embeddings nor layers.
    """
    return as_model(blocks.LogisticRegressionBlock, **locals())


def fm(
    schema: Schema,
    *,
    embedding_dim: int = 10,
    mlp: Sequence[int] = (400, 400, 400),
    stddev: float = 1e-2,
    combiner: Combiner = "mean",
    sharded: bool = False,
) -> mm.Model:
    """Factorization machine of second order over the ids; continuous features enter linearly.

    Arguments and errors are those of `deepfm`. `mlp` has no effect: this network has no layers.
    """
    return as_model(blocks.FMBlock, **locals())


def wide_and_deep(
    schema: Schema,
    *,
    embedding_dim: int = 10,
    mlp: Sequence[int] = (400, 400, 400),
    stddev: float = 1e-2,
    combiner: Combiner = "mean",
    sharded: bool = False,
) -> mm.Model:
    """Wide & Deep as in the paper (Section 4.1, Appendix A; 0.431M network weights on Criteo).

    Arguments and errors are those of `deepfm`.
    """
    return as_model(blocks.WideAndDeepBlock, **locals())


def deepfm(
    schema: Schema,
    *,
    embedding_dim: int = 10,
    mlp: Sequence[int] = (400, 400, 400),
    stddev: float = 1e-2,
    combiner: Combiner = "mean",
    sharded: bool = False,
) -> mm.Model:
    """DeepFM as in the paper (Section 4.1, Appendix A; 0.431M network weights on Criteo).

    Args:
      schema: categorical and continuous columns and one target.
      embedding_dim: width of the embeddings.
      mlp: units of the deep stream's ReLU layers.
      stddev: standard deviation σ of the initial embeddings (1e-2 with CowClip, 1e-4 without).
      combiner: how a list column's embeddings become one: "mean", "sum" or "sqrtn", for all or by
        column.
      sharded: whether the ranks of Horovod share the tables' rows (see `FusedEmbeddings`).

    Raises:
      ValueError: the schema has no categorical column or not exactly one target, or an argument
        is out of range.
    """
    return as_model(blocks.DeepFMBlock, **locals())


def dcn(
    schema: Schema,
    *,
    embedding_dim: int = 10,
    mlp: Sequence[int] = (400, 400, 400),
    stddev: float = 1e-2,
    combiner: Combiner = "mean",
    sharded: bool = False,
    cross_layers: int = 3,
) -> mm.Model:
    """Deep & Cross with vectors as in the paper (Section 4.1, Appendix A; 0.433M network weights).

    Arguments and errors are those of `deepfm`, and `cross_layers`, the depth of the cross stream.
    """
    return as_model(blocks.DCNBlock, **locals())


def dcn_v2(
    schema: Schema,
    *,
    embedding_dim: int = 10,
    mlp: Sequence[int] = (400, 400, 400),
    stddev: float = 1e-2,
    combiner: Combiner = "mean",
    sharded: bool = False,
    cross_layers: int = 3,
    low_rank_dim: int | None = None,
) -> mm.Model:
    """Deep & Cross with matrices as in the paper (Section 4.1, Appendix A; 0.655M network weights).

    Arguments and errors are those of `dcn`, and `low_rank_dim`, the rank of the cross matrices;
    `None` is full rank, as in the paper's formula.
    """
    return as_model(blocks.DCNv2Block, **locals())


def dlrm(
    schema: Schema,
    *,
    embedding_dim: int = 10,
    mlp: Sequence[int] = (400, 400, 400),
    stddev: float = 1e-2,
    combiner: Combiner = "mean",
    sharded: bool = False,
    bottom_mlp: Sequence[int] = (512, 256, 64),
) -> mm.Model:
    """DLRM, the baseline of the paper's Tables 5 and 11.

    Arguments and errors are those of `deepfm`. `mlp` are the units of the top MLP's ReLU layers,
    `bottom_mlp` those of the bottom MLP's, which a layer of width `embedding_dim` follows. The
    bottom MLP takes the continuous features; without any there is none.
    """
    return as_model(blocks.DLRMBlock, **locals())


MODELS: Mapping[str, Callable[..., mm.Model]] = MappingProxyType(
    {made.__name__: made for made in (lr, fm, wide_and_deep, deepfm, dcn, dcn_v2, dlrm)}
)
"""Name → builder: `(schema, *, embedding_dim, mlp, stddev, combiner, sharded, …)`."""
