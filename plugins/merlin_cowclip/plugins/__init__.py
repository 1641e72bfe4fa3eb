# SPDX-License-Identifier: Apache-2.0
"""CowClip for NVIDIA Merlin: the optimizer, its clip rules and its scaling rules.

Serves any Merlin model and pipeline on its own. Names load on first use, so that the pure-Python
parts (`Hyperparameters`, `scale`) do not wait for TensorFlow.
"""

from merlin_cowclip.plugins import _compat
from merlin_cowclip.plugins._lazy import on_first_use

_compat.install()

# Module: its names, those of __init__.pyi.
_HOME, __getattr__, __dir__ = on_first_use(
    __name__,
    {
        "clipping": "CLIP_RULES clip_by_adaptive_column_norm",
        "embeddings.counting": "Lookup LookupRecorder",
        "embeddings.tables": "HasTables TableSpec",
        "monitoring.statistics": "FieldStatistics NormBin NotFinite RowStatistics StepStatistics",
        "optimizers.adagrad": "CowClipAdagrad CowClipRowWiseAdagrad",
        "optimizers.adam": "CowClipAdam",
        "optimizers.cowclip": "CowClipOptimizer",
        "optimizers.rank_sync": "RankSync",
        "optimizers.sok": "CowClipSokOptimizer",
        "presets": "PRESETS preset",
        "saving.gather_tables": "whole_tables",
        "saving.model": "load_model save_model",
        "scaling": "SCALING_RULES Hyperparameters K recipe scale scaling_table",
        "schedules": "LinearWarmup",
    },
)

__all__ = sorted(_HOME)
