"""What a prepared folder holds beside its rows, written here whoever made it.

``workflow/`` with its vocabularies, ``counts/``, ``schema.pbtxt`` and, last of all, the record.
What is read of them again is `prepared.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.data.counts import write_counts
from merlin_cowclip.workflows.data.encoding import IdStatistics
from merlin_cowclip.workflows.data.prepared import FORMAT_VERSION, MEMBERS, RECORD
from merlin_cowclip.workflows.data.vocabularies import vocabulary_path, write_vocabulary
from merlin_cowclip.workflows.folders import package_versions, write_json
from merlin_cowclip.workflows.manifest import manifest_of
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.schema import Schema


def make_room_for_ids(folder: Path) -> None:
    """Make the folders of vocabularies and counts."""
    (folder / "workflow" / "categories").mkdir(parents=True)
    (folder / "counts").mkdir()


def write_ids(folder: Path, field: str, statistics: IdStatistics) -> None:
    """Write a field's vocabulary, as Categorify does, and its counts."""
    write_vocabulary(folder / "workflow" / "categories", field, statistics)
    write_counts(folder / "counts", field, statistics.by_id, statistics.vocabulary)


def vocabularies(folder: Path, fields: Iterable[str]) -> dict[str, str]:
    """Where the vocabularies lie, by field: what Categorify's ``fit_finalize`` takes."""
    home = folder / "workflow" / "categories"
    return {field: str(vocabulary_path(home, field)) for field in fields}


def save_workflow(workflow: nvt.Workflow, folder: Path, columns: Iterable[str]) -> None:
    """Save a fitted workflow, and as the folder's schema that of some columns of its output."""
    with quiet_imports():
        from merlin.schema import Schema
    workflow.save(str(folder / "workflow"))
    found = workflow.output_schema
    save_schema(Schema([found[name] for name in columns]), folder)


def save_schema(schema: Schema, folder: Path) -> None:
    """Write ``schema.pbtxt``, and ``.merlin/``, by which `merlin.io.Dataset` finds the schema."""
    with quiet_imports():
        from merlin.schema.io.tensorflow_metadata import TensorflowMetadata
    proto = TensorflowMetadata.from_merlin_schema(schema)
    proto.to_proto_text_file(str(folder))
    (folder / ".merlin").mkdir()
    proto.to_json_file(str(folder / ".merlin"))


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write ``prepare.json``: the last thing to do.

    It gets the packages' versions, and a manifest of the files that are there.
    """
    others = {path.name for path in folder.iterdir()} - MEMBERS  # workers still have theirs there
    record = {
        **record,
        "versions": package_versions(),
        "format": FORMAT_VERSION,
        "manifest": manifest_of(folder, others),
    }
    write_json(folder / RECORD, record)
