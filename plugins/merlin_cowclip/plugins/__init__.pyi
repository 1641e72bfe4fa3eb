# SPDX-License-Identifier: Apache-2.0
"""The names of `merlin_cowclip.plugins` for type checkers; `__init__.py` loads them."""

from .clipping import CLIP_RULES as CLIP_RULES
from .clipping import clip_by_adaptive_column_norm as clip_by_adaptive_column_norm
from .clipping import clip_by_adaptive_field_norm as clip_by_adaptive_field_norm
from .clipping import clip_by_column_norm as clip_by_column_norm
from .clipping import clip_by_field_norm as clip_by_field_norm
from .clipping import clip_by_global_norm as clip_by_global_norm
from .embeddings.counting import Lookup as Lookup
from .embeddings.counting import LookupRecorder as LookupRecorder
from .embeddings.tables import HasTables as HasTables
from .embeddings.tables import TableSpec as TableSpec
from .monitoring.statistics import FieldStatistics as FieldStatistics
from .monitoring.statistics import NormBin as NormBin
from .monitoring.statistics import NotFinite as NotFinite
from .monitoring.statistics import RowStatistics as RowStatistics
from .monitoring.statistics import StepStatistics as StepStatistics
from .optimizers.adam import CowClipAdam as CowClipAdam
from .optimizers.cowclip import CowClipOptimizer as CowClipOptimizer
from .optimizers.rank_sync import RankSync as RankSync
from .optimizers.sok import CowClipSokOptimizer as CowClipSokOptimizer
from .presets import PRESETS as PRESETS
from .presets import preset as preset
from .saving.gather_tables import whole_tables as whole_tables
from .saving.model import load_model as load_model
from .saving.model import save_model as save_model
from .scaling import SCALING_RULES as SCALING_RULES
from .scaling import Hyperparameters as Hyperparameters
from .scaling import K as K
from .scaling import recipe as recipe
from .scaling import scale as scale
from .scaling import scaling_table as scaling_table
from .schedules import LinearWarmup as LinearWarmup

__version__: str
