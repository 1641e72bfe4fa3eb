"""The paper's networks as Merlin models on one fused embedding table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from merlin_cowclip.plugins._stack import mm  # isort: skip  (first: it imports Merlin quietly)

from merlin_cowclip.models.ctr_block import CTRBlock, embeddings_of
from merlin_cowclip.models.dcn import DCNBlock, DCNv2Block, VectorCross, dcn, dcn_v2
from merlin_cowclip.models.deepfm import DeepFMBlock, deepfm
from merlin_cowclip.models.dlrm import DLRMBlock, dlrm
from merlin_cowclip.models.embeddings import FusedEmbeddings
from merlin_cowclip.models.linear import FMBlock, LogisticRegressionBlock, fm, lr
from merlin_cowclip.models.vocabulary import read_vocabulary
from merlin_cowclip.models.wide_and_deep import WideAndDeepBlock, wide_and_deep

MODELS: Mapping[str, Callable[..., mm.Model]] = MappingProxyType(
    {
        "lr": lr,
        "fm": fm,
        "wide_and_deep": wide_and_deep,
        "deepfm": deepfm,
        "dcn": dcn,
        "dcn_v2": dcn_v2,
        "dlrm": dlrm,
    }
)
"""Name → builder with the signature `(schema, *, embedding_dim, mlp, stddev, combiner, …)`."""

__all__ = [
    "MODELS",
    "CTRBlock",
    "DCNBlock",
    "DCNv2Block",
    "DLRMBlock",
    "DeepFMBlock",
    "FMBlock",
    "FusedEmbeddings",
    "LogisticRegressionBlock",
    "VectorCross",
    "WideAndDeepBlock",
    "dcn",
    "dcn_v2",
    "deepfm",
    "dlrm",
    "embeddings_of",
    "fm",
    "lr",
    "read_vocabulary",
    "wide_and_deep",
]
