"""Export a finished run as a Triton model repository, with Merlin Systems."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from merlin_cowclip.workflows.data.datasets import DatasetSpec
from merlin_cowclip.workflows.data.prepared import PreparedData
from merlin_cowclip.workflows.data.raw_columns import RawColumns, name_types, target_columns
from merlin_cowclip.workflows.data.raw_types import raw_types
from merlin_cowclip.workflows.errors import UserError, quoted
from merlin_cowclip.workflows.folders import (
    all_or_nothing,
    refuse_existing,
    refuse_pattern,
    write_json,
)
from merlin_cowclip.workflows.manifest import manifest_of
from merlin_cowclip.workflows.progress import catching_up_shown, progress_bar
from merlin_cowclip.workflows.serving.rare_ids import drop, rare_ids
from merlin_cowclip.workflows.serving.repository import (
    ENTRY,
    FORMAT_VERSION,
    RECORD,
    VERSION,
    Repository,
)
from merlin_cowclip.workflows.training.runs import Run

if TYPE_CHECKING:
    import nvtabular as nvt

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
      trust_workflow: load the workflow, which runs its code, even if the run's manifest does not
        confirm it.
      progress: show a progress bar on stderr.

    Raises:
      UserError: `out` exists or cannot be made, the extra is not installed, the run has no such
        model, the workflow cannot be loaded or needs the label, or Triton has no type for a column.
    """
    out = Path(out)
    if backend not in BACKENDS:
        raise UserError(f"backend must be one of {', '.join(BACKENDS)}. Received: {backend!r}")
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
        workflow = _workflow(run, spec, trust=trust_workflow)
        raw = workflow.input_schema
        if run.is_adopted:
            _check_types(workflow)
        bar.update()
        with catching_up_shown(show=progress):
            model = run.model(which)
        if rare is not None:
            drop(model, rare)
        network = Network(model, spec)
        bar.update()
        encode = WorkflowOperator(
            workflow,
            spec,
            run.config["cardinalities"],
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
        bar.update()
    return Repository.open(out)


def _workflow(run: Run, spec: DatasetSpec, *, trust: bool) -> nvt.Workflow:
    """The run's workflow, with the raw columns that the network needs.

    Raises:
      UserError: it cannot be loaded, or an input depends on the label.
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
            f"the workflow of {run.path} computes inputs from the label ({quoted(needed)}), which "
            "requests do not have. Fit a workflow without it, and train again"
        )
    return columns.remove(removed)


def _check_types(workflow: nvt.Workflow) -> None:
    """Refuse raw columns for which Triton has no type, such as dates and decimals.

    Raises:
      UserError: names them all.
    """
    from merlin_cowclip.workflows.serving.merlin_systems import triton_type

    types, none = raw_types(workflow), []
    for column in workflow.input_schema:
        kind = types[column.name].kind
        is_text = kind is None or pa.types.is_string(kind) or pa.types.is_binary(kind)
        try:
            triton_type(column.dtype)
            has_type = is_text or column.dtype.name not in ("object", "string")
        except (ValueError, TypeError):
            has_type = False
        if not has_type:
            none.append(f"{column.name!r} ({column.dtype.name if kind is None else kind})")
    if none:
        raise UserError(
            f"Triton has no type for {', '.join(none)}. Fit the workflow on columns of text, "
            "numbers or booleans, or lists of them"
        )
