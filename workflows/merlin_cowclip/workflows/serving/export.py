"""Export a finished run as a Triton model repository, with Merlin Systems."""

from __future__ import annotations

import importlib.metadata
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
from merlin_cowclip.workflows.serving.rare_ids import drop, rare_ids
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

CHECKED_ROWS = 10_000  # of --check-raw
BACKENDS = ("python", "tensorflow")
PACKAGES = (  # that the server's Python needs
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
    backend: str = "python",
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
      backend: what runs the network: "python", beside the workflow; or "tensorflow", Triton's
        TensorFlow backend, which servers up to 25.02 have.
      drop_rare: leave out the embedding rows of the rarest ids, which together have this percentage
        of all occurrences in the training split; `rare_costs` measures the effect.
      data: for `drop_rare`, the run's data, if it has moved.
      check_raw: raw rows, as `predict` reads them. The repository scores the first 10,000, and must
        give the probabilities that `predict` writes.
      trust_workflow: load the workflow, which runs its code, even if the run's manifest does not
        confirm it.
      progress: show a progress bar on stderr.

    Raises:
      UserError: `out` exists or cannot be made, the extra is not installed, the run has no such
        model, the workflow cannot be loaded or cannot encode rows one by one, Triton has no type
        for a raw column, or `check_raw` differs.
    """
    out = Path(out)
    if backend not in BACKENDS:
        raise UserError(f"backend must be one of {', '.join(BACKENDS)}. Received: {backend!r}")
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
        rare = rare_ids(data, drop_rare)
    with progress_bar("export", 3, " steps", show=progress) as bar:
        from merlin_cowclip.workflows.serving import merlin_systems as systems
        from merlin_cowclip.workflows.serving.network import PROBABILITY, Network
        from merlin_cowclip.workflows.serving.workflow_operator import WorkflowOperator

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
        network = Network(model, spec)
        bar.update()
        encode = WorkflowOperator(
            workflow,
            spec,
            run.config["cardinalities"],
            raw,
            network.input_schema,
            is_adopted=run.is_adopted,
            renumbered=rare.renumbered if rare is not None else None,
        )
        ensemble = systems.Ensemble(raw.column_names >> encode >> network, raw)
        runtime = systems.TritonExecutorRuntime()
        if backend == "tensorflow":
            triton = systems.PredictTensorflowTriton
            runtime.op_table = {**runtime.op_table, Network: triton}
        with all_or_nothing(out) as folder:
            entry, models = ensemble.export(str(folder), runtime=runtime, name=ENTRY)
            (folder / ENTRY / VERSION / "model.py").write_text(_MODEL_PY, encoding="utf-8")
            type_name = systems.model_config.DataType.Name
            record = {
                "format": FORMAT_VERSION,
                "run": str(run.path.resolve()),
                "model": which,
                "backend": backend,
                "dropped": rare and {"percent": rare.percent, "most": rare.most},
                "columns": list(raw.column_names),
                "inputs": {one.name: str(type_name(one.data_type)) for one in entry.input},
                "output": PROBABILITY,
                "models": [entry.name, *(model.name for model in models)],
                "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
            }
            write_json(folder / RECORD, {**record, "manifest": manifest_of(folder)})
            if check_raw is not None:
                _check_raw(run, model, Repository.open(folder), check_raw, trust=trust_workflow)
        bar.update()
    return Repository.open(out)


def _request_schema(inference: InferenceWorkflow) -> Schema:
    """The raw columns that a request has, with types that Triton has.

    Raises:
      UserError: Triton has no type for a column.
    """
    from merlin.schema import Schema

    from merlin_cowclip.workflows.serving.merlin_systems import triton_type

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
    from merlin_cowclip.workflows.serving.network import PROBABILITY
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
