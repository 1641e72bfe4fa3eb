# SPDX-License-Identifier: Apache-2.0
"""The paper's networks as Merlin models: a builder for each block."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from merlin_cowclip.models import blocks
from merlin_cowclip.models.ctr_block import CTRBlock, arguments_of, as_model
from merlin_cowclip.plugins._tensorflow import mm

_ARGUMENTS = """

Args:
  schema: categorical and continuous columns and one target.
  embedding_dim: width of the embeddings.
  mlp: units of the deep stream's ReLU layers; of `dlrm` those of the top MLP.
  stddev: standard deviation σ of the initial embeddings (1e-2 with CowClip, 1e-4 without).
  combiner: how a list column's embeddings become one: "mean", "sum" or "sqrtn", for all or by
    column.
  sharded: whether the ranks of Horovod share the tables' rows (see `FusedEmbeddings`).
  cross_layers: of `dcn` and `dcn_v2`, depth of the cross stream.
  low_rank_dim: of `dcn_v2`, rank of the cross matrices; `None` is full rank, as in the paper.
  bottom_mlp: of `dlrm`, units of the bottom MLP's ReLU layers, which a layer of width
    `embedding_dim` follows.

Raises:
  ValueError: the schema has no categorical column or not exactly one target, or an argument
    is out of range.
"""


def _builder(name: str, block: type[CTRBlock]) -> Callable[..., mm.Model]:
    """`(schema, *, …)` → model, with the arguments of the block and of its bases."""
    arguments = arguments_of(block).values()
    signature = inspect.Signature([*arguments], return_annotation="mm.Model")

    def build(*args: Any, **options: Any) -> mm.Model:
        given = signature.bind(*args, **options)
        return as_model(block, *given.args, **given.kwargs)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"{inspect.getdoc(block)}{_ARGUMENTS}"
    build.__signature__ = signature  # type: ignore[attr-defined]
    return build


_BLOCKS: Mapping[str, type[CTRBlock]] = {
    "lr": blocks.LogisticRegressionBlock,
    "fm": blocks.FMBlock,
    "wide_and_deep": blocks.WideAndDeepBlock,
    "deepfm": blocks.DeepFMBlock,
    "dcn": blocks.DCNBlock,
    "dcn_v2": blocks.DCNv2Block,
    "dlrm": blocks.DLRMBlock,
}
MODELS: Mapping[str, Callable[..., mm.Model]] = MappingProxyType(
    {name: _builder(name, block) for name, block in _BLOCKS.items()}
)
"""Name → builder: `(schema, *, embedding_dim, mlp, stddev, combiner, sharded, …)`."""

lr, fm, wide_and_deep, deepfm, dcn, dcn_v2, dlrm = MODELS.values()
