"""CowClip for NVIDIA Merlin: the optimizer, its clip rules and its scaling rules.

Serves any Merlin model and pipeline on its own. Names load on first use, so that the pure-Python
parts (`Hyperparameters`, `scale`) do not wait for TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merlin_cowclip.plugins._lazy import on_first_use

if TYPE_CHECKING:
    from merlin_cowclip.plugins.clipping import (
        CLIP_RULES,
        clip_by_adaptive_column_norm,
        clip_by_adaptive_field_norm,
        clip_by_column_norm,
        clip_by_field_norm,
        clip_by_global_norm,
    )
    from merlin_cowclip.plugins.embeddings.counting import Lookup, LookupRecorder
    from merlin_cowclip.plugins.embeddings.tables import HasTables, TableSpec
    from merlin_cowclip.plugins.monitoring.statistics import (
        FieldStatistics,
        NormBin,
        NotFinite,
        RowStatistics,
        StepStatistics,
    )
    from merlin_cowclip.plugins.optimizers.adam import CowClipAdam
    from merlin_cowclip.plugins.optimizers.cowclip import CowClipOptimizer
    from merlin_cowclip.plugins.optimizers.rank_sync import RankSync
    from merlin_cowclip.plugins.optimizers.sok import CowClipSokOptimizer
    from merlin_cowclip.plugins.presets import PRESETS, preset
    from merlin_cowclip.plugins.saving.gather_tables import whole_tables
    from merlin_cowclip.plugins.saving.model import load_model, save_model
    from merlin_cowclip.plugins.scaling import (
        SCALING_RULES,
        Hyperparameters,
        K,
        recipe,
        scale,
        scaling_table,
    )
    from merlin_cowclip.plugins.schedules import LinearWarmup

_HOME, __getattr__, __dir__ = on_first_use(__name__, __file__)

__all__ = sorted(_HOME)
