"""The paper's networks as Merlin models: a block and a name make a builder.

What a builder takes, and the defaults, are its block's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from merlin_cowclip.models.ctr_block import CTRBlock, as_model
from merlin_cowclip.models.dcn import DCNBlock, DCNv2Block
from merlin_cowclip.models.deepfm import DeepFMBlock
from merlin_cowclip.models.dlrm import DLRMBlock
from merlin_cowclip.models.linear import FMBlock, LogisticRegressionBlock
from merlin_cowclip.models.wide_and_deep import WideAndDeepBlock
from merlin_cowclip.plugins._stack import mm


def builder(name: str, block: type[CTRBlock], description: str) -> Callable[..., mm.Model]:
    """The function `name(schema, *, …)` that makes a model of a block.

    Args:
      name: the function's.
      block: whose arguments it takes, those of the block's own bases first.
      description: its docstring.
    """
    signature = _signature(block)

    def build(*arguments: Any, **options: Any) -> mm.Model:
        given = signature.bind(*arguments, **options).arguments
        return as_model(block(**given), given["schema"])

    build.__name__ = build.__qualname__ = name
    build.__doc__ = description
    build.__signature__ = signature  # type: ignore[attr-defined]
    return build


def _signature(block: type[CTRBlock]) -> inspect.Signature:
    """`(schema, *, …)`, the options in the order in which the block's classes add them."""
    classes = [cls for cls in reversed(block.__mro__) if issubclass(cls, CTRBlock)]
    taken = {
        parameter.name: parameter
        for cls in classes
        for parameter in inspect.signature(cls.__init__).parameters.values()
        if parameter.name != "self" and parameter.kind is not parameter.VAR_KEYWORD
    }
    return inspect.Signature(list(taken.values()), return_annotation="mm.Model")


lr = builder(
    "lr",
    LogisticRegressionBlock,
    """Logistic regression: one weight per id and continuous feature, and a bias.

    `embedding_dim`, `mlp` and `stddev` are there so that builders can take each other's place; this
    network has neither embeddings nor layers. For the other arguments and errors see `deepfm`.
    """,
)

fm = builder(
    "fm",
    FMBlock,
    """Factorization machine of second order over the ids; continuous features enter linearly.

    `mlp` is there so that builders can take each other's place; this network has no layers. For the
    other arguments and errors see `deepfm`.
    """,
)

wide_and_deep = builder(
    "wide_and_deep",
    WideAndDeepBlock,
    """Wide & Deep as in the paper (Section 4.1, Appendix A; 0.431M network weights on Criteo).

    For arguments and errors see `deepfm`.
    """,
)

deepfm = builder(
    "deepfm",
    DeepFMBlock,
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
    """,
)

dcn = builder(
    "dcn",
    DCNBlock,
    """Deep & Cross with vectors as in the paper (Section 4.1, Appendix A; 0.433M network weights).

    `cross_layers` is the depth of the cross stream. For the other arguments and errors: `deepfm`.
    """,
)

dcn_v2 = builder(
    "dcn_v2",
    DCNv2Block,
    """Deep & Cross with matrices as in the paper (Section 4.1, Appendix A; 0.655M network weights).

    `cross_layers` is the depth of the cross stream, `low_rank_dim` the rank of its matrices; `None`
    is full rank, as in the paper's formula. For the other arguments and errors see `deepfm`.
    """,
)

dlrm = builder(
    "dlrm",
    DLRMBlock,
    """DLRM, the baseline of the paper's Tables 5 and 11.

    `mlp` are the units of the top MLP's ReLU layers, `bottom_mlp` those of the bottom MLP's, which
    one more of width `embedding_dim` follows; it takes the numbers, and without any is not made.
    For the other arguments and errors see `deepfm`.
    """,
)

MODELS: Mapping[str, Callable[..., mm.Model]] = MappingProxyType(
    {made.__name__: made for made in (lr, fm, wide_and_deep, deepfm, dcn, dcn_v2, dlrm)}
)
"""Name → builder: `(schema, *, embedding_dim, mlp, stddev, combiner, sharded, …)`."""
