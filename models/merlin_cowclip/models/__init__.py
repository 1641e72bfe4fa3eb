# SPDX-License-Identifier: Apache-2.0
"""The paper's networks as Merlin models on one fused embedding table."""

from __future__ import annotations

from importlib.metadata import version

from merlin_cowclip.plugins import _tensorflow  # isort: skip  # noqa: F401  (imports Merlin quietly)

from merlin_cowclip.models.ctr_block import embeddings_of
from merlin_cowclip.models.embeddings import FusedEmbeddings
from merlin_cowclip.models.networks import (
    MODELS,
    dcn,
    dcn_v2,
    deepfm,
    dlrm,
    fm,
    lr,
    wide_and_deep,
)
from merlin_cowclip.models.vocabulary import read_vocabulary

__version__ = version("merlin-cowclip")

__all__ = [
    "MODELS",
    "FusedEmbeddings",
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
