"""Raw logs to ids, batches and trained networks: the names that users type.

Names load on first use, so that what is pure Python does not wait for TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from merlin_cowclip.plugins._lazy import on_first_use

if TYPE_CHECKING:
    from merlin_cowclip.workflows.data.adopt.pipeline import adopt
    from merlin_cowclip.workflows.data.frequencies import frequencies
    from merlin_cowclip.workflows.data.prepare.pipeline import prepare
    from merlin_cowclip.workflows.data.prepared_data import PreparedData
    from merlin_cowclip.workflows.data.spec import (
        AVAZU,
        CRITEO,
        DatasetSpec,
        Split,
        find_spec,
    )
    from merlin_cowclip.workflows.data.synthetic import write_synthetic
    from merlin_cowclip.workflows.data.top_ids import keep_top_ids
    from merlin_cowclip.workflows.errors import Stopped, UserError
    from merlin_cowclip.workflows.serving.export import export
    from merlin_cowclip.workflows.serving.rare_ids import rare_costs
    from merlin_cowclip.workflows.serving.repository import Repository
    from merlin_cowclip.workflows.study.configuration import TuneConfig
    from merlin_cowclip.workflows.study.tune import tune
    from merlin_cowclip.workflows.study.tuned import Tuned
    from merlin_cowclip.workflows.training.configuration import CheckpointConfig, TrainConfig
    from merlin_cowclip.workflows.training.evaluation import evaluate, predict
    from merlin_cowclip.workflows.training.loader import Loader
    from merlin_cowclip.workflows.training.prediction import evaluate_logs, predict_logs
    from merlin_cowclip.workflows.training.runs import Run
    from merlin_cowclip.workflows.training.train import resume, train

_HOME, __getattr__, __dir__ = on_first_use(__name__, __file__)

__all__ = sorted(_HOME)
