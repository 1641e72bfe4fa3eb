"""A finished run as a Triton model repository, made by Merlin Systems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow, element_type
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import (
    all_or_nothing,
    refuse_existing,
    refuse_pattern,
    write_json,
)
from merlin_cowclip.workflows.manifest import manifest_of
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.serving.packages import needed_by
from merlin_cowclip.workflows.serving.rare_rows import (
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
    transformed,
)
from merlin_cowclip.workflows.training.runs import Run

if TYPE_CHECKING:
    from merlin.schema import Schema

PACKAGES = (  # of a server's Python; the network needs none of them
    *("merlin-cowclip", "merlin-systems", "merlin-core", "nvtabular"),
    *("tensorflow", "pandas", "pyarrow"),
)
CHECKED_ROWS = 10_000  # of --check-raw
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
    check_raw: str | Path | Sequence[str | Path] | None = None,
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
      check_raw: raw rows, as `predict` reads them. The first 10,000 are scored by the repository,
        and must have the probabilities that `predict` writes.
      trust_workflow: whether to load the workflow, and so run its code, also where the run's
        manifest does not confirm it.
      progress: show a progress bar on stderr.

    Raises:
      UserError: `out` exists or cannot be made, the extra is not installed, the run has no such
        model, the workflow must not be loaded or cannot encode rows one by one, Triton has no type
        for a raw column, `check_raw` differs, or `drop_rare` is no share of occurrences.
    """
    out = Path(out)
    if check_raw is not None and drop_rare is not None:
        raise UserError(
            "check_raw cannot be used with drop_rare, which changes probabilities. Leave one out"
        )
    refuse_pattern(out, "repository")
    refuse_existing(out)
    rare = None
    if drop_rare is not None:
        data = run.data() if data is None else data
        run.check_vocabulary(data)
        tell_of_what_is_counted(run, data)
        rare = rare_ids(data, drop_rare)
    with progress_bar("export", 3, " steps", show=progress) as bar:
        from merlin_cowclip.workflows.serving.served_network import PROBABILITY, ServedNetwork
        from merlin_cowclip.workflows.serving.served_workflow import ServedWorkflow
        from merlin_cowclip.workflows.serving.systems import Ensemble, PredictTensorflow

        spec = run.spec()
        if run.is_adopted:
            inference = run.inference(trust=trust_workflow)
            workflow, raw = inference.workflow, _request_schema(inference)
        else:
            workflow = run.workflow(trust=trust_workflow).remove_inputs([spec.label])
            raw = workflow.input_schema
        bar.update()
        model = run.model(which)
        if rare is not None:
            drop(model, rare)
        network = ServedNetwork(model, spec)
        bar.update()
        encode = ServedWorkflow(
            workflow,
            spec,
            run.config["cardinalities"],
            raw,
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
            if check_raw is not None:
                _check_raw(run, model, Repository.open(folder), check_raw, trust=trust_workflow)
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
    return costs(run, run.model(which), data, percents, progress=progress)


def _request_schema(inference: InferenceWorkflow) -> Schema:
    """The raw columns that a request has, with types that Triton has.

    Raises:
      UserError: Triton has no type for a column.
    """
    from merlin.schema import Schema

    from merlin_cowclip.workflows.serving.systems import triton_type

    columns, none = [], []
    for column in inference.workflow.input_schema:
        if column.name not in inference.required:
            continue
        kind = element_type(inference.types[column.name])
        has_type = kind in (None, pa.string(), pa.binary())  # served as text
        try:
            if kind is not None and not has_type and pa.types.is_primitive(kind):
                column, has_type = column.with_dtype(kind.to_pandas_dtype()), True
            triton_type(column.dtype)
        except (ValueError, TypeError):
            has_type = False
        if not has_type:
            none.append(f"{column.name!r} ({kind or column.dtype.name})")
        columns.append(column)
    if none:
        raise UserError(
            f"Triton has no type for {', '.join(none)}. Fit the workflow on columns of text, "
            "numbers or booleans, or lists of them"
        )
    return Schema(columns)


def _check_raw(run: Run, model: Any, repository: Repository, inputs: Any, *, trust: bool) -> None:
    """Refuse a repository that answers other probabilities than `predict` writes.

    Raises:
      UserError: it does, for some raw rows.
    """
    from merlin_cowclip.workflows.serving.served_network import PROBABILITY
    from merlin_cowclip.workflows.training.incoming import open_incoming, raw_frame
    from merlin_cowclip.workflows.training.prediction import scorer

    given = [inputs] if isinstance(inputs, str | Path) else inputs
    incoming = open_incoming(run, given, raw=run.is_adopted, trust_workflow=trust)
    score, ensemble, checked = scorer(model, run.spec()), repository.ensemble(), 0
    for batch, rows in incoming.pieces(lambda size: None):
        found = np.ravel(transformed(ensemble, raw_frame(batch))[PROBABILITY])
        differs = np.abs(found - np.ravel(score(rows))) > 1e-5
        if differs.any():
            row = checked + int(differs.argmax()) + 1
            raise UserError(
                f"{int(differs.sum()):,} of {len(rows):,} raw rows get another probability from "
                f"the exported model than from predict, first row {row:,} of {incoming.files[0]}. "
                "An operator of the workflow depends on other rows, or on this process. Fit "
                "without it"
            )
        checked += len(rows)
        if checked >= CHECKED_ROWS:
            return


def _type_name(tensor: Any) -> str:
    """Of a model's input: TYPE_STRING, as its configuration has it."""
    from merlin_cowclip.workflows.serving.systems import model_config

    return str(model_config.DataType.Name(tensor.data_type))
