"""A finished run as a Triton model repository, made by Merlin Systems."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from merlin_cowclip.workflows.data.datasets import DatasetSpec
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.data.raw_columns import (
    RawColumns,
    a_row,
    name_types,
    target_columns,
)
from merlin_cowclip.workflows.data.raw_types import raw_types
from merlin_cowclip.workflows.errors import Notice, UserError, clipped, quoted
from merlin_cowclip.workflows.folders import (
    all_or_nothing,
    refuse_existing,
    refuse_pattern,
    write_json,
)
from merlin_cowclip.workflows.manifest import manifest_of
from merlin_cowclip.workflows.progress import catching_up_shown, progress_bar
from merlin_cowclip.workflows.quiet import quiet_operators
from merlin_cowclip.workflows.serving.packages import needed_by
from merlin_cowclip.workflows.serving.rare_ids import (
    Cost,
    check_percent,
    costs,
    drop,
    rare_ids,
    tell_of_what_is_counted,
)
from merlin_cowclip.workflows.serving.repository import (
    ENTRY,
    FORMAT_VERSION,
    RECORD,
    VERSION,
    Repository,
    load_ensemble,
    transformed,
)
from merlin_cowclip.workflows.training.runs import Run

if TYPE_CHECKING:
    import nvtabular as nvt
    import pandas as pd

    from merlin_cowclip.workflows.serving.network import ServedNetwork
    from merlin_cowclip.workflows.serving.workflow_operator import ServedWorkflow

PACKAGES = (  # of a server's Python; the network needs none of them
    *("merlin-cowclip", "merlin-systems", "merlin-core", "nvtabular"),
    *("tensorflow", "pandas", "pyarrow"),
)
_MODEL_PY = f'''"""Triton's entry to this model: {ENTRY}."""

from merlin_cowclip.workflows.serving.triton_model import TritonPythonModel  # noqa: F401
'''


def export(
    run: Run,
    out: str | Path,
    *,
    which: str = "last",
    drop_rare: float | None = None,
    data: PreparedData | None = None,
    trust_workflow: bool = False,
    progress: bool = True,
) -> Repository:
    """Write a Triton model repository: raw rows without the label in, probabilities out.

    Args:
      run: the finished run.
      out: the folder to make; must not exist.
      which: of the run's models, "last" or "best".
      drop_rare: leave out the rows of the ids that have the last so many % of all occurrences in
        the training part; `rare_costs` says what they are worth.
      data: for that, what the run was trained on, where it lies elsewhere now.
      trust_workflow: whether to load the workflow, and so run its code, also where the run's
        manifest does not confirm it.
      progress: show a progress bar on stderr.

    Raises:
      UserError: `out` exists or cannot be made, the extra is not installed, the run has no such
        model, the workflow must not be loaded or cannot, Triton has no type for a raw column, the
        workflow fails without what a request has not, or `drop_rare` is no share of occurrences.
    """
    out = Path(out)
    refuse_pattern(out, "repository")
    refuse_existing(out)
    rare = None
    if drop_rare is not None:
        data = run.data() if data is None else data
        run.check_vocabulary(data)
        tell_of_what_is_counted(run, data)
        rare = rare_ids(data, drop_rare)
    with progress_bar("export", 3, " steps", show=progress) as bar:
        from merlin_cowclip.workflows.serving.merlin_systems import Ensemble, PredictTensorflow
        from merlin_cowclip.workflows.serving.network import PROBABILITY, ServedNetwork
        from merlin_cowclip.workflows.serving.workflow_operator import ServedWorkflow

        spec = run.spec()
        workflow = _workflow(run, spec, trust=trust_workflow)
        raw = workflow.input_schema
        if run.is_adopted:
            _check_types(workflow)
        bar.update()
        with catching_up_shown(show=progress):
            model = run.model(which)
        if rare is not None:
            drop(model, rare)
        network = ServedNetwork(model, spec)
        bar.update()
        encode = ServedWorkflow(
            workflow,
            spec,
            run.config["cardinalities"],
            network.input_schema,
            is_adopted=run.is_adopted,
            renumbered=rare.renumbered if rare is not None else None,
        )
        predict = PredictTensorflow(None)  # of a model it would save a copy, to read its signature
        predict.path, predict.model = None, network
        predict.input_schema, predict.output_schema = network.input_schema, network.output_schema
        ensemble = Ensemble(raw.column_names >> encode >> predict, raw)
        with all_or_nothing(out) as folder:
            entry, models = ensemble.export(str(folder), name=ENTRY)
            (folder / ENTRY / VERSION / "model.py").write_text(_MODEL_PY, encoding="utf-8")
            if run.is_adopted:  # of operators that are not ours
                _check_answers(run, folder, encode, network, trust=trust_workflow)
            record = {
                "format": FORMAT_VERSION,
                "run": str(run.path.resolve()),
                "model": which,
                "dropped": rare and {"percent": rare.percent, "most": rare.most},
                "columns": list(raw.column_names),
                "inputs": {one.name: _type_name(one) for one in entry.input},
                "output": PROBABILITY,
                "models": [entry.name, *(model.name for model in models)],
                "packages": needed_by(folder / ENTRY, PACKAGES),
            }
            write_json(folder / RECORD, {**record, "manifest": manifest_of(folder)})
        bar.update()
    return Repository.open(out)


def rare_costs(
    run: Run,
    percents: Sequence[float],
    *,
    which: str = "last",
    data: PreparedData | None = None,
    progress: bool = True,
) -> list[Cost]:
    """What the rows of rare ids are worth: how many, their bytes, and AUC on the test part.

    Args:
      run: the finished run.
      percents: shares of all occurrences in the training part, in %.
      which: of the run's models, "last" or "best".
      data: what it was trained on, where it lies elsewhere now.
      progress: show a progress bar on stderr.

    Returns:
      For each share one; `print` it.

    Raises:
      UserError: a share that is none, no such model, or data without a test part or of another
        vocabulary.
    """
    for percent in percents:
        check_percent(percent)
    data = run.data() if data is None else data
    with catching_up_shown(show=progress):
        model = run.model(which)
    return costs(run, model, data, percents, progress=progress)


def _workflow(run: Run, spec: DatasetSpec, *, trust: bool) -> nvt.Workflow:
    """The run's workflow without every raw column that the network does without.

    Raises:
      UserError: it must not be loaded, or cannot; it makes an input of the label.
    """
    workflow = run.workflow_for_new_rows(trust=trust)
    if not run.is_adopted:
        return workflow.remove_inputs([spec.label])
    of_label = {spec.label} | target_columns(workflow, spec.label)
    columns = RawColumns(name_types(workflow), spec.fields)
    removed = columns.spare()
    needed = [name for name in columns.names if name in of_label and name not in removed]
    if needed:
        raise UserError(
            f"the inputs of what is served must not need the label. Received: {run.path}, whose "
            f"workflow needs {quoted(needed)} to make them. Fit a workflow that does without, and "
            "train again"
        )
    return columns.remove(removed)


def _check_answers(
    run: Run, folder: Path, encode: ServedWorkflow, network: ServedNetwork, *, trust: bool
) -> None:
    """See that what was exported takes a row that the run's workflow takes, and encodes it alike.

    A workflow's schema does not say all that its operators read. A row of our making may be none of
    the workflow's own: one that a `Filter` drops goes past it, and where the whole workflow takes
    none, nothing is known, which is told.

    Raises:
      UserError: it does not.
    """
    from merlin_cowclip.workflows.serving.empty_texts import is_same
    from merlin_cowclip.workflows.serving.workflow_operator import ServedWorkflow

    workflow = name_types(run.workflow_for_new_rows(trust=trust))
    row = a_row(workflow.input_schema)
    spec = DatasetSpec.from_dict(encode.spec)
    whole = ServedWorkflow(
        workflow,
        spec,
        encode.cardinalities,
        encode.output_schema,
        is_adopted=True,
        renumbered=encode.renumbered,
    )
    whole.input_schema = workflow.input_schema
    with quiet_operators():
        refused: Exception = ValueError()
        for encoded in (_as_served, _past_filters):
            try:
                expected = encoded(whole, row)
                break
            except Exception as error:  # whatever the user's own operators raise
                refused = error
        else:
            _tell_of_no_answer(encode, refused)
            return
        try:
            if encoded is _as_served:
                transformed(load_ensemble(folder, lambda name: network), row)
            found = encoded(encode, row)
            others = [name for name in expected if not is_same(found[name], expected[name])]
            if others:
                raise ValueError(f"{quoted(others, brief=True)} other than with all columns")
        except Exception as error:
            cause = error.__cause__ or error
            gone = [name for name in row if name not in encode.input_schema.column_names]
            how = f"without {quoted(gone, brief=True)}" if gone else "saved again"
            raise UserError(
                "what is exported must take the rows that the run's workflow takes. Received: "
                f"{run.path}, whose workflow {how} fails: "
                f"{type(cause).__name__}: {clipped(str(cause))}. Fit a workflow whose operators "
                "name all that they read (a LambdaOp: dependency=[…]), and train again"
            ) from error


def _as_served(workflow: ServedWorkflow, row: pd.DataFrame) -> dict[str, Any]:
    """The network's inputs, as a server makes them of a row."""
    return dict(workflow.transform(None, row).to_dict())


def _past_filters(workflow: ServedWorkflow, row: pd.DataFrame) -> dict[str, Any]:
    """A field's value each, as the workflow makes it also of a row that its filters drop."""
    from merlin_cowclip.workflows.data import row_for_row

    row = row[workflow.input_schema.column_names]
    made = row_for_row.transformed(workflow.workflow, row, past_filters=True)
    return {name: made[name][0] for name in DatasetSpec.from_dict(workflow.spec).fields}


def _tell_of_no_answer(encode: ServedWorkflow, error: Exception) -> None:
    """Notice that nothing is known of what was exported, as of what it makes of empty texts."""
    types = {name: one.kind for name, one in raw_types(encode.workflow).items()}
    text = {name for name, kind in types.items() if kind is None or pa.types.is_string(kind)}
    text -= encode.with_empty
    empty = f"; an empty text in {quoted(sorted(text))} is served as a missing one" if text else ""
    cause = error.__cause__ or error
    warnings.warn(
        "what is exported was not tried, for the run's workflow takes no row of our making, of "
        f"which all is 1: {type(cause).__name__}: {clipped(str(cause))}{empty}. Hold what "
        "Repository.predict gives of raw rows of yours against predict --raw before you serve it",
        Notice,
        stacklevel=4,
    )


def _check_types(workflow: nvt.Workflow) -> None:
    """Refuse a raw column for which Triton has no type.

    Of text that a client sends for dates and decimals, objects to pandas, none would be known.

    Raises:
      UserError: names them all.
    """
    from merlin_cowclip.workflows.serving.merlin_systems import triton_type

    types, none, unsure = raw_types(workflow), [], []
    for column in workflow.input_schema:
        kind = types[column.name].kind
        is_text = kind is None or pa.types.is_string(kind) or pa.types.is_binary(kind)
        try:
            triton_type(column.dtype)
            has_one = is_text or column.dtype.name not in ("object", "string")
        except (ValueError, TypeError):
            has_one = False
        if not has_one:
            none.append(f"{column.name!r} of {column.dtype.name if kind is None else kind}")
        elif kind is None:
            unsure.append(column.name)
    if none:
        raise UserError(
            "what is served must be text, numbers or booleans, or lists of them, as Triton has no "
            f"other types. Received: {', '.join(none)}. Fit the workflow on columns of those types;"
            " of lists that an operator changes before Categorify, the first must not be empty"
        )
    if unsure:
        warnings.warn(
            f"{quoted(unsure)} will be served as text, for the workflow does not tell what else "
            "they may have been: pandas has dates, decimals and booleans with a missing one as "
            "objects, too. If they were such at the fit, let Categorify read them, or fill in the "
            "booleans, and fit again",
            Notice,
            stacklevel=3,
        )


def _type_name(tensor: Any) -> str:
    """Of a model's input: TYPE_STRING, as its configuration has it."""
    from merlin_cowclip.workflows.serving.merlin_systems import model_config

    return str(model_config.DataType.Name(tensor.data_type))
