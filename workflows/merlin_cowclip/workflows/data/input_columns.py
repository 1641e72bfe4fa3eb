"""Which columns that a saved workflow makes are a model's inputs, by their tags."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from merlin_cowclip.workflows.data.existing_parquet import ParquetFile
from merlin_cowclip.workflows.data.workflow_graph import followed
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.dag import Node
    from merlin.schema import ColumnSchema


def input_columns(
    workflow: nvt.Workflow, file: ParquetFile, label: str, notes: list[str]
) -> dict[str, tuple[ColumnSchema, str]]:
    """The model's inputs: column → (its schema, "categorical" or "continuous").

    Args:
        workflow: fitted.
        file: of parquet that it wrote; a schema beside it is asked for columns without tags.
        label: the column that is none of them.
        notes: to which what is left out, and from where tags are, is added.

    Raises:
        UserError: none of them is of ids, or a schema beside the parquet is no schema.
    """
    schema, beside = workflow.output_schema, _schema_beside(file.path)
    features = joined_columns(workflow)
    columns: dict[str, tuple[ColumnSchema, str]] = {}
    left_out, targets, tagged_beside = [], [], []
    for column in schema:
        if column.name == label:
            continue
        if column.name in features:  # which are tagged as the target is, of which they are
            column = dataclasses.replace(column, tags=set(column.tags) - _target_tags())
        role = _role(column)
        if role is None and column.name in beside and _role(beside[column.name]):
            column, role = beside[column.name], _role(beside[column.name])
            tagged_beside.append(column.name)
        if role in ("categorical", "continuous"):
            columns[column.name] = (column, role)
        elif role is None:
            left_out.append(column.name)
        elif _role(dataclasses.replace(column, tags=set(column.tags) - _target_tags())):
            targets.append(column.name)
    known = {label, *schema.column_names}
    left_out += [name for name in file.schema.names if name not in known]
    if tagged_beside:
        notes.append(
            f"tags of {quoted(tagged_beside)} are from the schema beside the parquet, "
            f"{_beside(file.path)}: the workflow's has none"
        )
    if left_out:
        notes.append(
            f"left out of the inputs, tagged neither categorical nor continuous: {quoted(left_out)}"
        )
    if targets:
        notes.append(f"left out of the inputs, tagged as targets beside: {quoted(targets)}")
    if not any(role == "categorical" for _, role in columns.values()):
        raise UserError(
            "the workflow must give a column of ids, tagged Tags.CATEGORICAL. Received: none among "
            f"{quoted(schema.column_names)}. Encode ids with Categorify"
        )
    return columns


def _role(column: ColumnSchema) -> str | None:
    """What the tags say: "categorical", "continuous", "target" or None."""
    from merlin.schema import Tags

    if _target_tags() & set(column.tags):
        return "target"
    if Tags.CATEGORICAL in column.tags:
        return "categorical"
    return "continuous" if Tags.CONTINUOUS in column.tags else None


def _target_tags() -> set[Any]:
    from merlin.schema import Tags

    return {
        *(Tags.TARGET, Tags.BINARY_CLASSIFICATION, Tags.MULTI_CLASS_CLASSIFICATION),
        *(Tags.REGRESSION, Tags.CLASSIFICATION),
    }


def joined_columns(workflow: nvt.Workflow, *, tables: bool = False) -> set[str]:
    """Columns of statistics by group, a target's too, however they were scaled or filled since.

    Args:
        workflow: fitted.
        tables: those of tables that were joined as well.
    """
    with quiet_imports():
        from nvtabular.ops import JoinExternal, JoinGroupby, TargetEncoding

    joins = (JoinGroupby, TargetEncoding, *((JoinExternal,) if tables else ()))

    def made_by(node: Node, given: dict[str, bool]) -> dict[str, bool]:
        if isinstance(node.op, joins):
            return dict.fromkeys(node.output_schema.column_names, True)
        if _target_tags() & set(getattr(node.op, "tags", ())):
            return {}  # they are targets by the user's own word
        mapped = node.column_mapping.items()
        return {name: any(given.get(one, False) for one in of) for name, of in mapped}

    found = followed(workflow.output_node, lambda name: False, made_by, False)
    return {name for name, is_made in found.items() if is_made}


def _beside(path: Path) -> Path:
    return path.parent / ".merlin" / "schema.json"


def _schema_beside(path: Path) -> dict[str, ColumnSchema]:
    from merlin.schema.io.tensorflow_metadata import TensorflowMetadata

    try:
        text = _beside(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        schema = TensorflowMetadata.from_json(text).to_merlin_schema()
    except Exception as error:
        raise UserError(
            f"a schema beside the parquet must be Merlin's. Received: {_beside(path)}: {error}. "
            "Remove it, or write it again"
        ) from error
    return {column.name: column for column in schema}
