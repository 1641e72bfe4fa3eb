# SPDX-License-Identifier: Apache-2.0
"""A run folder: what training leaves, and how to load it again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.data.prepared_data import (
    COLUMNS,
    PARTS,
    PreparedData,
    difference,
    inputs_of,
)
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError, clipped
from merlin_cowclip.workflows.folders import (
    package_versions,
    read_json,
    read_record,
    refuse_pattern,
)
from merlin_cowclip.workflows.manifest import check_manifest
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training.configuration import TrainConfig, base_fields
from merlin_cowclip.workflows.training.ranks import rank_info

if TYPE_CHECKING:
    from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow
    from merlin_cowclip.workflows.data.encoder import Encoder
    from merlin_cowclip.workflows.training.checkpoint import Checkpoint
    from merlin_cowclip.workflows.training.configuration import CheckpointConfig

FORMAT_VERSION = 3
RESULT = "result.json"  # written last: without it the run did not finish
FAILED = "failed.json"  # why the last training ended early: error, step, epoch, time
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
SCHEMA = "schema.pbtxt"


def columns_of(data: PreparedData) -> dict[str, Any]:
    """The columns of data by their role."""
    return {key: value for key, value in inputs_of(data).items() if key in COLUMNS}


def described(
    data: PreparedData, config: TrainConfig, checkpointing: CheckpointConfig, **more: Any
) -> dict[str, Any]:
    """A run's `config.json`: data, configuration, versions, machine, and `more`."""
    return {
        "data": data.folders,
        "dataset": data.spec.name,
        "rows": data.rows,
        "cardinalities": data.cardinalities,
        "table_rows": data.table_rows,
        "data_sha256": identity_of(data),
        **inputs_of(data),
        **config.to_dict(),
        "scaled": config.hyperparameters.to_dict(),
        "identity": config.identity,
        **environment(),
        "checkpointing": asdict(checkpointing),
        "ranks": rank_info().size,
        **more,
    }


def config_in(record: Mapping[str, Any]) -> TrainConfig:
    """The configuration in a `config.json`."""
    names = [field.name for field in fields(TrainConfig)]
    return TrainConfig.from_dict({name: record[name] for name in names if name in record})


def read_config(run: Path) -> dict[str, Any]:
    """A run's `config.json`, finished or not; refuses what is no run."""
    refuse_pattern(run, "run")
    try:
        return read_json(run / CONFIG)
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"a run to resume must have its configuration. Received: {run / CONFIG}: "
            f"{clipped(str(error))}. Train again into another folder"
        ) from None


def environment(*others: str) -> dict[str, Any]:
    """Which versions, of `others` as well, on what machine: `versions` and `machine`."""
    with quiet_imports():
        from merlin_cowclip.plugins._tensorflow import tf
    details = tf.config.experimental.get_device_details
    gpus = tf.config.list_physical_devices("GPU")  # whose name is a number among them alone
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    cpu = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    machine = {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "processor": cpu[1] if cpu else platform.processor(),
        "gpus": [details(gpu).get("device_name", gpu.name) for gpu in gpus],
    }
    return {
        "versions": package_versions("merlin-models", "tensorflow", *others),
        "machine": machine,
    }


def identity_of(data: PreparedData) -> str:
    """A SHA-256, in hex, of what is trained on: the same wherever the data lies."""
    record = data.record
    if "files" in record:  # adopted
        parts = {
            name: [{k: file[k] for k in ("bytes", "sha256", "rows")} for file in files]
            for name, files in record["files"].items()
        }
    else:
        manifest = record["manifest"]
        parts = {n: manifest[n] for n in manifest if n.split("/")[0] in (*PARTS, SCHEMA)}
    text = json.dumps([parts, record["rows"]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def open_data(given: str | Path | Sequence[str | Path], elsewhere: str) -> PreparedData:
    """The data of a run where they were; `elsewhere` is the command for another place."""
    paths = [given] if isinstance(given, (str, Path)) else given
    for path in paths:
        if not os.path.isdir(path):
            raise UserError(
                f"the data of a run must be where it was. Received: {path}, which is no folder. "
                f"Name the place where it is now: {elsewhere}"
            )
    return PreparedData.open_all(paths)


def how_to_resume(run: Path, *, moved: bool = False) -> str:
    """The command that resumes a run, whose data may have moved, for a shell."""
    return f"merlin-cowclip train {'DATA ' * moved}--resume {shlex.quote(str(run))}"


@dataclass(frozen=True)
class Run:
    """A finished run; open one with `Run.open`.

    `config.json`, `schema.pbtxt`, `checkpoints/`, `model/` (SavedModel with Merlin's schema and the
    optimizer's state), `workflow/` (NVTabular: raw rows in, the model's features out), `logs/`
    (TensorBoard), `metrics.csv` and `result.json`, which holds the manifest of all but logs and
    checkpoints; each checkpoint has its own.
    """

    path: Path
    result: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """Open the folder that `train` wrote.

        Raises:
          UserError: not there, the run did not finish, or a file is gone or has changed since.
        """
        path = Path(path)
        refuse_pattern(path, "run")
        if (path / CONFIG).exists() and not (path / RESULT).exists():
            why = read_json(path / FAILED)["error"] if (path / FAILED).exists() else "no result yet"
            raise UserError(
                f"{path} did not finish: {why.rstrip('.')}. Resume it: {how_to_resume(path)} "
                "(unless it is being trained now)"
            )
        result = read_record(path, RESULT, FORMAT_VERSION, "a folder that train wrote")
        check_manifest(path, result["manifest"], "a run", "Train again into another folder")
        return cls(path, result)

    @property
    def config(self) -> Mapping[str, Any]:
        """Everything that is needed to run it again."""
        config: Mapping[str, Any] = self.result["config"]
        return config

    def train_config(self) -> TrainConfig:
        """What it was trained with."""
        return config_in(self.config)

    def warm_start_config(self, *, keep_optimizer: bool = False) -> TrainConfig:
        """Make the configuration to train its weights on new data: `train(…, warm_start=run.path)`.

        One epoch at a fifth of the run's learning rates (all, if it was a warm start), constant.
        Updates are lazy, which keeps ids that the data lacks. With `keep_optimizer`, update mode
        and warm-up are the run's own, as steps go on counting.
        """
        was, rate = self.train_config(), 1.0 if self.config["warm_start"] else 0.2
        scaled, update = was.hyperparameters, was.update if keep_optimizer else "lazy"
        rates = {name: rate * getattr(scaled, name) for name in ("dense_lr", "embedding_lr")}
        rates["warmup_epochs"] = scaled.warmup_epochs if keep_optimizer else 0.0
        changes = base_fields(scaled.replace(**rates)) | {"rule": "none"}
        changes |= {"dense_schedule": None, "embedding_schedule": None}
        return replace(was, **changes, update=update, epochs=1)

    def spec(self) -> DatasetSpec:
        """What its raw rows look like."""
        return DatasetSpec.from_dict(self.config["spec"])

    @property
    def is_adopted(self) -> bool:
        """Whether it was trained on parquet that its workflow had written elsewhere."""
        return self.config["ranges"] is None

    def data(self) -> PreparedData:
        """The prepared folder that it was trained on.

        Raises:
          UserError: it is no longer there, not whole, or of other rows, such as of another split,
            whose test part it may have been trained on.
        """
        data = open_data(self.config["data"], f"merlin-cowclip evaluate {self.path} DATA")
        if self.config["data_sha256"] != identity_of(data):
            raise UserError(
                f"the data of a run must be what it was when it began. Received: {data.path}, with "
                "other rows: on those of its test part it may have been trained. To evaluate them "
                f"all the same, name it: merlin-cowclip evaluate {self.path} {data.path}"
            )
        return data

    def check_vocabulary(self, data: PreparedData, *, grown: bool = False) -> None:
        """Refuse data whose columns, numbers or ids mean something else than those of this run.

        With `grown`, data may have more ids, behind the run's.

        Raises:
          UserError: `data` has other columns or another label, its numbers were scaled by other
            ranges, it was prepared with another vocabulary, or adopted from another pipeline.
        """
        if change := difference(self.config, self.path, data, grown=grown):
            raise UserError(
                f"the data must have the columns, numbers and ids of the run. Received: "
                f"{data.path}, which differs from {self.path} in {change}. Evaluate on raw rows, "
                f"or prepare them with --vocabulary-from {shlex.quote(str(self.path))}"
            )

    def model(self, which: str | None = None) -> Any:
        """The trained `mm.Model`, to predict with.

        `merlin_cowclip.plugins.load_model(run.path / "model")` brings the optimizer back as well.

        Args:
          which: "last", or "best": after the epoch with the highest AUC on the validation part. By
            default "best" of a run with patience, else "last".

        Raises:
          UserError: another name, no epoch was measured, or its checkpoint is damaged.
        """
        with quiet_imports():
            from merlin_cowclip.workflows.training.builder import restored_model
        checkpoint, config = self.checkpoint(which), self.train_config()
        return restored_model(checkpoint, config, self.path / SCHEMA, self.config)

    def checkpoint(self, which: str | None = None) -> Checkpoint:
        """The "last" checkpoint or the "best" one, as of `model`."""
        from merlin_cowclip.workflows.training.checkpoint import Checkpoints

        which = which or self.result["checkpoint"]
        if which not in ("last", "best"):
            raise UserError(f"which must be one of last, best. Received: {which!r}")
        step = self.result["last_step" if which == "last" else "best_step"]
        if step is None:
            raise UserError(
                f"the best model needs a validation part. Received: {self.path}, a run without "
                "one. Use the last model"
            )
        if not (self.path / CHECKPOINTS).is_dir():
            raise UserError(
                f"{self.path} has no checkpoints, as the runs of a sweep. Train it again: "
                f"merlin-cowclip train DATA --config {shlex.quote(str(self.path))} --out RUN"
            )
        return Checkpoints(self.path / CHECKPOINTS).at(step)

    def workflow(self) -> Any:
        """The fitted `nvtabular.Workflow`. Loading runs code from the folder (cloudpickle).

        Raises:
          UserError: it does not load here.
        """
        from merlin_cowclip.workflows.data.adopt.graph import load_saved

        return load_saved(self.path / "workflow")

    def encoder(self) -> Encoder:
        """What encodes raw rows of prepared data."""
        from merlin_cowclip.workflows.data.encoder import Encoder

        return Encoder.open(self.path / "workflow", self.spec(), self.config["ranges"])

    def inference(self) -> InferenceWorkflow:
        """The workflow of an adopted pipeline, for raw rows; raises as `workflow`."""
        from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow

        return InferenceWorkflow(self.workflow(), self.spec())
