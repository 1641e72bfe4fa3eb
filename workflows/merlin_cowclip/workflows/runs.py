"""A run folder: what training leaves, and how to load it again."""

from __future__ import annotations

import filecmp
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.configuration import TrainConfig
from merlin_cowclip.workflows.errors import UserError, shown
from merlin_cowclip.workflows.manifest import check_manifest, is_manifest
from merlin_cowclip.workflows.prepared import PreparedData
from merlin_cowclip.workflows.quiet import quiet_imports

FORMAT_VERSION = 1
RESULT = "result.json"  # written last: without it the run did not finish
CONFIG = "config.json"

_KEYS = {
    "epochs": list,
    "samples_per_second": float,
    "train_seconds": float,
    "parameters": dict,
    "config": dict,
}
_CONFIG_KEYS = {"data": str, "cardinalities": dict, "continuous": list, "model": str}


@dataclass(frozen=True)
class Run:
    """A finished run; open one with `Run.open`.

    `config.json`, `model/` (SavedModel with Merlin's schema and the
    optimizer's state), `workflow/` (NVTabular: raw rows in,
    the model's features out), `logs/` (TensorBoard), `metrics.csv` and `result.json`, which holds
    the manifest of all but the logs.
    """

    path: Path
    result: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The folder that `train` wrote.

        Raises:
          UserError: not there, the run did not finish, or a file is gone or has changed since.
        """
        path = Path(path)
        if not os.path.isdir(path):  # which is false, too, of a name that is too long
            raise UserError(
                f"a run must be a folder. Received: {shown(path)}. Make one with 'merlin-cowclip "
                "train'."
            )
        try:
            result = json.loads((path / RESULT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"a run must hold {RESULT}, which is written last. Received: {path}, a run that "
                "did not finish. Train again into another folder."
            ) from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(
                f"{path / RESULT} must be readable JSON. Received: {error}. Train again into "
                "another folder."
            ) from None
        _check_result(path, result)
        check_manifest(path, result["manifest"], "a run", "Train again into another folder.")
        return cls(path, result)

    @property
    def config(self) -> Mapping[str, Any]:
        """Everything that is needed to run it again."""
        config: Mapping[str, Any] = self.result["config"]
        return config

    def train_config(self) -> TrainConfig:
        """What it was trained with.

        Raises:
          UserError: another version's options.
        """
        names = [field.name for field in fields(TrainConfig)]
        return TrainConfig.from_dict({n: self.config[n] for n in names if n in self.config})

    def data(self) -> PreparedData:
        """The prepared folder that it was trained on.

        Raises:
          UserError: it is no longer there, or not whole.
        """
        path = Path(self.config["data"])
        if not os.path.isdir(path):
            raise UserError(
                f"the data of a run must be where it was. Received: {path}, which is no folder. "
                f"Name the place where it is now: 'merlin-cowclip evaluate {self.path} DATA'"
            )
        return PreparedData.open(path)

    def check_vocabulary(self, data: PreparedData) -> None:
        """Refuse data whose columns or ids mean something else than those that this run learned.

        Raises:
          UserError: `data` has other columns, or was prepared with another vocabulary.
        """
        remedy = f"Evaluate on the run's own data, {self.config['data']}, or train on this one."
        cardinalities, mine = data.cardinalities, self.config["cardinalities"]
        for field in sorted(mine.keys() | cardinalities.keys()):
            if mine.get(field) != cardinalities.get(field):
                raise UserError(
                    f"the data must have the vocabulary of the run. Received: {data.path}, where "
                    f"{field!r} differs from {self.path}'s ({cardinalities.get(field, 0):,} ids "
                    f"instead of {mine.get(field, 0):,}). {remedy}"
                )
        numbers = set(data.spec.continuous) ^ set(self.config["continuous"])
        if numbers:
            raise UserError(
                f"the data must have the columns of numbers of the run. Received: {data.path}, "
                f"which differs from {self.path} in {min(numbers)!r}. {remedy}"
            )
        for file in sorted((self.path / "workflow").rglob("unique.*.parquet")):
            name = file.relative_to(self.path / "workflow")
            other = data.path / "workflow" / name
            if not _same(file, other):
                raise UserError(
                    f"the data must have the vocabulary of the run. Received: {data.path}, where "
                    f"{name} differs from {self.path}'s, so that ids mean something else. {remedy}"
                )

    def model(self) -> Any:
        """The trained `mm.Model`, to predict with.

        `merlin_cowclip.plugins.load_model(run.path / "model")` brings the optimizer back as well.
        """
        with quiet_imports():
            import merlin_cowclip.models  # noqa: F401  (registers our layers with Keras)
            from merlin_cowclip.plugins._stack import quiet_stack, tf
        with quiet_stack():
            return tf.keras.models.load_model(self.path / "model", compile=False)

    def workflow(self) -> Any:
        """The fitted `nvtabular.Workflow`. Loading runs code from the folder (cloudpickle)."""
        with quiet_imports():
            import nvtabular as nvt
        return nvt.Workflow.load(str(self.path / "workflow"))


def _check_result(path: Path, result: Any) -> None:
    """Refuse a result that is not `train`'s, or of another version."""
    version = result.get("format") if isinstance(result, dict) else None
    if version != FORMAT_VERSION:
        raise UserError(
            f"a run must be of format {FORMAT_VERSION}. Received: format {version!r} in "
            f"{path / RESULT}. Train again with this version, into another folder."
        )

    def check(holder: Mapping[str, Any], keys: Mapping[str, type], of: str = "") -> None:
        for key, kind in keys.items():
            if not isinstance(holder.get(key), kind):
                raise UserError(
                    f"{path / RESULT} must hold {of + key!r}. Received: a file in which it is "
                    "missing or of another kind. Train again into another folder."
                )

    check(result, _KEYS)
    check(result["config"], _CONFIG_KEYS, "config.")
    for key in ("auc", "log_loss"):
        if key not in result or not isinstance(result[key], float | None):
            check({}, {key: float})
    if not is_manifest(result.get("manifest")) or not result["manifest"]:
        check({}, {"manifest": dict})


def _same(mine: Path, other: Path) -> bool:
    """Whether two vocabularies are equal: files, or folders of parts."""
    if mine.is_dir() and other.is_dir():
        names = {path.name for path in (*mine.iterdir(), *other.iterdir())}
        return all(_same(mine / name, other / name) for name in names)
    if not (mine.is_file() and other.is_file()):
        return False
    return filecmp.cmp(mine, other, shallow=False)
