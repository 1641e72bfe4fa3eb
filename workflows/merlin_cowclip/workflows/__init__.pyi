# SPDX-License-Identifier: Apache-2.0
"""The names of `merlin_cowclip.workflows` for type checkers; `__init__.py` loads them."""

from .data.adopt.adopt import adopt
from .data.frequencies import frequencies
from .data.prepare.pipeline import prepare
from .data.prepared_data import PreparedData
from .data.spec import AVAZU, CRITEO, DatasetSpec, Split, find_spec
from .data.synthetic import write_synthetic
from .errors import Stopped, UserError
from .serving.export import export
from .serving.repository import Repository
from .study.batch_size import batch_size
from .study.configuration import TuneConfig
from .study.report import report
from .study.sweep import sweep
from .study.tune import tune
from .study.tuned import Tuned
from .training.configuration import CheckpointConfig, TrainConfig
from .training.evaluation import evaluate, predict
from .training.listeners import Listener, log_to
from .training.loader import Loader
from .training.prediction import evaluate_logs, predict_logs
from .training.runs import Run
from .training.train import resume, train

__version__: str
__all__ = [
    "AVAZU",
    "CRITEO",
    "CheckpointConfig",
    "DatasetSpec",
    "Listener",
    "Loader",
    "PreparedData",
    "Repository",
    "Run",
    "Split",
    "Stopped",
    "TrainConfig",
    "TuneConfig",
    "Tuned",
    "UserError",
    "adopt",
    "batch_size",
    "evaluate",
    "evaluate_logs",
    "export",
    "find_spec",
    "frequencies",
    "log_to",
    "predict",
    "predict_logs",
    "prepare",
    "report",
    "resume",
    "sweep",
    "train",
    "tune",
    "write_synthetic",
]
