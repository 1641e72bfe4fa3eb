# SPDX-License-Identifier: Apache-2.0
"""The names of `merlin_cowclip.plugins` for type checkers; `__init__.py` loads them."""

from .clipping import CLIP_RULES, clip_by_adaptive_column_norm
from .embeddings.counting import Lookup, LookupRecorder
from .embeddings.tables import HasTables, TableSpec
from .monitoring.statistics import (
    FieldStatistics,
    NormBin,
    NotFinite,
    RowStatistics,
    StepStatistics,
)
from .optimizers.adagrad import CowClipAdagrad, CowClipRowWiseAdagrad
from .optimizers.adam import CowClipAdam
from .optimizers.cowclip import CowClipOptimizer
from .optimizers.rank_sync import RankSync
from .optimizers.sok import CowClipSokOptimizer
from .presets import PRESETS, preset
from .saving.gather_tables import whole_tables
from .saving.model import load_model, save_model
from .scaling import SCALING_RULES, Hyperparameters, K, recipe, scale, scaling_table
from .schedules import LinearWarmup

__version__: str
__all__ = [
    "CLIP_RULES",
    "PRESETS",
    "SCALING_RULES",
    "CowClipAdagrad",
    "CowClipAdam",
    "CowClipOptimizer",
    "CowClipRowWiseAdagrad",
    "CowClipSokOptimizer",
    "FieldStatistics",
    "HasTables",
    "Hyperparameters",
    "K",
    "LinearWarmup",
    "Lookup",
    "LookupRecorder",
    "NormBin",
    "NotFinite",
    "RankSync",
    "RowStatistics",
    "StepStatistics",
    "TableSpec",
    "clip_by_adaptive_column_norm",
    "load_model",
    "preset",
    "recipe",
    "save_model",
    "scale",
    "scaling_table",
    "whole_tables",
]
