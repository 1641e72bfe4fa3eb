"""A run folder: what training leaves, and how to load it again."""

from __future__ import annotations

import filecmp
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.prepared import PreparedData
from merlin_cowclip.workflows.quiet import quiet_imports

RESULT = "result.json"  # written last: without it the run did not finish
CONFIG = "config.json"


@dataclass(frozen=True)
class Run:
    """A finished run; open one with `Run.open`.

    `config.json`, `model/` (SavedModel with Merlin's schema and the
    optimizer's state), `workflow/` (NVTabular: raw rows in,
    the model's features out), `logs/` (TensorBoard), `metrics.csv` and `result.json`.
    """

    path: Path
    result: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Run:
        """The folder that `train` wrote.

        Raises:
          UserError: not there, or the run did not finish.
        """
        path = Path(path)
        if not path.is_dir():
            raise UserError(
                f"a run must be a folder. Received: {path}. Make one with 'merlin-cowclip train'."
            )
        try:
            result = json.loads((path / RESULT).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"a run must hold {RESULT}, which is written last. Received: {path}, a run that "
                "did not finish. Train again into another folder."
            ) from None
        except ValueError as error:
            raise UserError(f"{path / RESULT} must be JSON. Received: {error}") from None
        return cls(path, result)

    @property
    def config(self) -> Mapping[str, Any]:
        """Everything that is needed to run it again."""
        config: Mapping[str, Any] = self.result["config"]
        return config

    def check_vocabulary(self, data: PreparedData) -> None:
        """Refuse data whose ids mean something else than the ids that this run learned.

        Raises:
          UserError: `data` was prepared with another vocabulary.
        """
        for mine in sorted((self.path / "workflow").rglob("unique.*.parquet")):
            name = mine.relative_to(self.path / "workflow")
            other = data.path / "workflow" / name
            if not _same(mine, other):
                raise UserError(
                    f"the data must have the vocabulary of the run. Received: {data.path}, where "
                    f"{name} differs from {self.path}'s, so that ids mean something else. Evaluate "
                    f"on the run's own data, {self.config['data']}, or train on this one."
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


def _same(mine: Path, other: Path) -> bool:
    """Whether two vocabularies are equal: files, or folders of parts."""
    if mine.is_dir() and other.is_dir():
        names = {path.name for path in (*mine.iterdir(), *other.iterdir())}
        return all(_same(mine / name, other / name) for name in names)
    if not (mine.is_file() and other.is_file()):
        return False
    return filecmp.cmp(mine, other, shallow=False)


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that a reader sees either nothing or all of it."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(partial, path)
