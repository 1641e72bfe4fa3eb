"""A prepared folder, opened: what lies in it and where. It reads; `etl.py` writes."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.datasets import DatasetSpec
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import pandas as pd

FORMAT_VERSION = 1
RECORD = "prepare.json"  # written last: without it the folder is not whole


def file_state(path: Path) -> dict[str, Any]:
    """By what a later command knows a file again: path, size, and time of the last change."""
    status = path.stat()
    return {"path": str(path), "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


@dataclass(frozen=True)
class PreparedData:
    """Prepared training and test data; open one with `PreparedData.open`.

    ``train/*.parquet`` (rows shuffled), ``test/*.parquet`` (rows in the log's order), ``workflow/``
    (NVTabular), ``schema.pbtxt``, ``counts/<field>.parquet`` and ``prepare.json``. An adopted
    pipeline's parquet lies elsewhere, as ``prepare.json`` says, and may have no test part.
    """

    path: Path
    spec: DatasetSpec
    record: dict[str, Any] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> PreparedData:
        """The folder that `prepare` wrote.

        Raises:
            UserError: not there, not whole, of another version, or referring to parquet that is
                gone or has changed.
        """
        path = Path(path)
        if not path.is_dir():
            raise UserError(
                f"prepared data must be a folder. Received: {path}. Write one with "
                "'merlin-cowclip prepare'"
            )
        try:
            record = json.loads((path / RECORD).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(
                f"prepared data must hold {RECORD}, which is written last. Received: {path}, "
                "not a whole prepared folder. Write one with 'merlin-cowclip prepare'"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path / RECORD} must be readable JSON. Received: {error}") from None
        version = record.get("format") if isinstance(record, dict) else None
        if version != FORMAT_VERSION:
            raise UserError(
                f"prepared data must be of format {FORMAT_VERSION}. Received: {version!r} in "
                f"{path}. Prepare it again with this version"
            )
        for files in record.get("files", {}).values():
            for file in files:
                _check_unchanged(file)
        return cls(path, DatasetSpec.from_dict(record["spec"]), record)

    @property
    def train_files(self) -> list[Path]:
        """The training part's files, by name; rows are shuffled across all of them.

        Those of an adopted pipeline lie where they were, in the order given.
        """
        return self._files("train")

    @property
    def test_files(self) -> list[Path]:
        """The test part's files, by name; rows keep the log's order. May be none, if adopted."""
        return self._files("test")

    def _files(self, part: str) -> list[Path]:
        if "files" in self.record:
            return [Path(file["path"]) for file in self.record["files"][part]]
        return sorted((self.path / part).glob("*.parquet"))

    @property
    def rows(self) -> dict[str, int]:
        """Rows of each part: ``{"train": …, "test": …}``."""
        return dict(self.record["rows"])

    @property
    def cardinalities(self) -> dict[str, int]:
        """Per id field, how many rows its table needs: padding, missing and unknown included."""
        return dict(self.record["cardinalities"])

    @property
    def report(self) -> dict[str, Any]:
        """What the data is like: rows and clicks by part, and by field what was found.

        Of ids: occurrences, distinct ones, missing ones, those below the threshold, and in the test
        part those that training has not seen. Of numbers: range, mean, missing and not finite ones
        (``not_finite``, among the missing of both parts), and how many of the test part lie beyond
        the range.
        """
        return dict(self.record["report"])

    @property
    def seed(self) -> int:
        """The seed of the split and the shuffle; 0 for an adopted pipeline, which had neither."""
        return int(self.record.get("seed", 0))

    @functools.cached_property
    def schema(self) -> Any:
        """The columns as a ``merlin.schema.Schema``, tagged; ids carry their domain."""
        with quiet_imports():
            from merlin.schema.io.tensorflow_metadata import TensorflowMetadata

            text = (self.path / "schema.pbtxt").read_text(encoding="utf-8")
            return TensorflowMetadata.from_proto_text(text).to_merlin_schema()

    def counts(self, field: str) -> pd.DataFrame:
        """How often each id of a field occurs in the training part: ``id``, ``raw``, ``count``.

        Row i is id i: 0 padding, 1 missing, 2 unknown (raw is None for these), 3 the most
        frequent id. The counts of a one-hot field sum up to the training rows. In an adopted
        pipeline ids have the order of its own workflow, and hashed ones have no raw id.
        """
        import pandas as pd

        if field not in self.spec.ids:
            raise UserError(
                f"field must be one of {', '.join(map(repr, self.spec.ids))}. Received: {field!r}"
            )
        return pd.read_parquet(self.path / "counts" / f"{field}.parquet")

    def workflow(self) -> Any:
        """The fitted ``nvtabular.Workflow``: raw rows in, the rows of ``train/`` and ``test/`` out.

        Loading runs code from the folder (NVTabular uses cloudpickle): open only your own.
        """
        with quiet_imports():
            import nvtabular as nvt
        return nvt.Workflow.load(str(self.path / "workflow"))


def _check_unchanged(file: dict[str, Any]) -> None:
    path = Path(file["path"])
    try:
        now = file_state(path)
    except OSError as error:
        raise UserError(
            f"adopted parquet must stay where it was. Received: {path}: {error.strerror}. Put it "
            "back, or adopt it again into another folder"
        ) from None
    if now != file:
        raise UserError(
            f"adopted parquet must stay as it was. Received: {path}, which has changed since. "
            "Put it back, or adopt it again into another folder"
        )
