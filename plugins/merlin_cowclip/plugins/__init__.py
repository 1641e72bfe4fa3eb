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
    from merlin_cowclip.plugins.counting import Lookup, LookupRecorder
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

_NAMES = {
    "adam": "CowClipAdam",
    "callbacks": "RankSync",
    "clipping": "CLIP_RULES clip_by_adaptive_column_norm clip_by_adaptive_field_norm "
    "clip_by_column_norm clip_by_field_norm clip_by_global_norm",
    "counting": "Lookup LookupRecorder",
    "finite": "NotFinite",
    "optimizer": "CowClipOptimizer",
    "presets": "PRESETS preset",
    "saving": "load_model save_model",
    "scaling": "Hyperparameters K SCALING_RULES recipe scale scaling_table",
    "schedules": "LinearWarmup",
    "sok": "CowClipSokOptimizer",
    "statistics": "FieldStatistics NormBin RowStatistics StepStatistics",
    "tables": "HasTables TableSpec",
    "whole": "whole_tables",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOME)

__getattr__, __dir__ = on_first_use(__name__, _HOME)
