"""The paper's networks as Merlin models on one fused embedding table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from merlin_cowclip.plugins._stack import mm  # isort: skip  (first: it imports Merlin quietly)

from merlin_cowclip.models.deepfm import DeepFMBlock, deepfm
from merlin_cowclip.models.embeddings import FusedEmbeddings

MODELS: Mapping[str, Callable[..., mm.Model]] = MappingProxyType({"deepfm": deepfm})
"""Name → builder with the signature `(schema, *, embedding_dim, mlp, stddev, combiner)`."""

__all__ = ["MODELS", "DeepFMBlock", "FusedEmbeddings", "deepfm"]
