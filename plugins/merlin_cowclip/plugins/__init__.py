"""CowClip for NVIDIA Merlin: the optimizer, its clip rules and its scaling rules.

Serves any Merlin model and pipeline on its own. Names load on first use, so that the pure-Python
parts (`Hyperparameters`, `scale`) do not wait for TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merlin_cowclip.plugins._lazy import on_first_use

if TYPE_CHECKING:
    from merlin_cowclip.plugins.adam import CowClipAdam
    from merlin_cowclip.plugins.callbacks import RankSync
    from merlin_cowclip.plugins.clipping import (
        CLIP_RULES,
        clip_by_adaptive_column_norm,
        clip_by_adaptive_field_norm,
        clip_by_column_norm,
        clip_by_field_norm,
        clip_by_global_norm,
    )
    from merlin_cowclip.plugins.counting import IdRecorder, Lookup
    from merlin_cowclip.plugins.finite import NotFinite
    from merlin_cowclip.plugins.optimizer import CowClipOptimizer
    from merlin_cowclip.plugins.presets import PRESETS, preset
    from merlin_cowclip.plugins.saving import load_model, save_model
    from merlin_cowclip.plugins.scaling import (
        SCALING_RULES,
        Hyperparameters,
        K,
        recipe,
        scale,
        scaling_table,
    )
    from merlin_cowclip.plugins.schedules import LinearWarmup
    from merlin_cowclip.plugins.sok import CowClipSokOptimizer
    from merlin_cowclip.plugins.statistics import (
        FieldStatistics,
        NormBin,
        RowStatistics,
        StepStatistics,
    )
    from merlin_cowclip.plugins.tables import HasTables, TableSpec
    from merlin_cowclip.plugins.whole import whole_tables

_HOME = {
    "CLIP_RULES": "clipping",
    "CowClipAdam": "adam",
    "CowClipOptimizer": "optimizer",
    "CowClipSokOptimizer": "sok",
    "FieldStatistics": "statistics",
    "HasTables": "tables",
    "Hyperparameters": "scaling",
    "IdRecorder": "counting",
    "K": "scaling",
    "LinearWarmup": "schedules",
    "Lookup": "counting",
    "NotFinite": "finite",
    "PRESETS": "presets",
    "NormBin": "statistics",
    "RankSync": "callbacks",
    "RowStatistics": "statistics",
    "SCALING_RULES": "scaling",
    "StepStatistics": "statistics",
    "TableSpec": "tables",
    "clip_by_adaptive_column_norm": "clipping",
    "clip_by_adaptive_field_norm": "clipping",
    "clip_by_column_norm": "clipping",
    "clip_by_field_norm": "clipping",
    "clip_by_global_norm": "clipping",
    "load_model": "saving",
    "preset": "presets",
    "recipe": "scaling",
    "save_model": "saving",
    "scale": "scaling",
    "scaling_table": "scaling",
    "whole_tables": "whole",
}

__all__ = sorted(_HOME)

__getattr__, __dir__ = on_first_use(__name__, _HOME)
