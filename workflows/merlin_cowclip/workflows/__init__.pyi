# SPDX-License-Identifier: Apache-2.0
"""The names of `merlin_cowclip.workflows` for type checkers; `__init__.py` loads them."""

from .data.adopt.pipeline import adopt as adopt
from .data.frequencies import frequencies as frequencies
from .data.prepare.pipeline import prepare as prepare
from .data.prepared_data import PreparedData as PreparedData
from .data.spec import AVAZU as AVAZU
from .data.spec import CRITEO as CRITEO
from .data.spec import DatasetSpec as DatasetSpec
from .data.spec import Split as Split
from .data.spec import find_spec as find_spec
from .data.synthetic import write_synthetic as write_synthetic
from .data.top_ids import keep_top_ids as keep_top_ids
from .errors import Stopped as Stopped
from .errors import UserError as UserError
from .serving.export import export as export
from .serving.rare_ids import rare_costs as rare_costs
from .serving.repository import Repository as Repository
from .study.configuration import TuneConfig as TuneConfig
from .study.tune import tune as tune
from .study.tuned import Tuned as Tuned
from .training.configuration import CheckpointConfig as CheckpointConfig
from .training.configuration import TrainConfig as TrainConfig
from .training.evaluation import evaluate as evaluate
from .training.evaluation import predict as predict
from .training.loader import Loader as Loader
from .training.prediction import evaluate_logs as evaluate_logs
from .training.prediction import predict_logs as predict_logs
from .training.runs import Run as Run
from .training.train import resume as resume
from .training.train import train as train

__version__: str
