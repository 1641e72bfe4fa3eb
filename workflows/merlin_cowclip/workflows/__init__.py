# SPDX-License-Identifier: Apache-2.0
"""Raw logs to ids, batches and trained networks: the names that users type.

Names load on first use, so that what is pure Python does not wait for TensorFlow.
"""

from merlin_cowclip.plugins._compat import set_environment
from merlin_cowclip.plugins._lazy import on_first_use

set_environment()

# Module: its names, those of __init__.pyi.
_HOME, __getattr__, __dir__ = on_first_use(
    __name__,
    {
        "data.adopt.adopt": "adopt",
        "data.frequencies": "frequencies",
        "data.prepare.pipeline": "prepare",
        "data.prepared_data": "PreparedData",
        "data.spec": "AVAZU CRITEO DatasetSpec Split find_spec",
        "data.synthetic": "write_synthetic",
        "errors": "Stopped UserError",
        "serving.export": "export",
        "serving.repository": "Repository",
        "study.batch_size": "batch_size",
        "study.configuration": "TuneConfig",
        "study.report": "report",
        "study.sweep": "sweep",
        "study.tune": "tune",
        "study.tuned": "Tuned",
        "training.configuration": "CheckpointConfig TrainConfig",
        "training.evaluation": "evaluate predict",
        "training.listeners": "Listener log_to",
        "training.loader": "Loader",
        "training.prediction": "evaluate_logs predict_logs",
        "training.runs": "Run",
        "training.train": "resume train",
    },
)

__all__ = sorted(_HOME)
