# SPDX-License-Identifier: Apache-2.0
"""Export a finished run as a Triton model repository, with Merlin Systems."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from merlin_cowclip.workflows import folders
from merlin_cowclip.workflows.data.adopt.inference import InferenceWorkflow, as_fitted, halves
from merlin_cowclip.workflows.data.adopt.validate import element_type, is_list
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.sources.base import is_text
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.manifest import manifest_of
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.serving.rare_ids import drop, rare_ids
from merlin_cowclip.workflows.serving.repository import ENTRY, FORMAT, RECORD, Repository, scored
from merlin_cowclip.workflows.training.runs import Run

CHECKED_ROWS = 10_000  # of --check-raw
BACKENDS = ("python", "tensorflow")
_FIT_ON = "Fit the workflow on columns of text, numbers or booleans, or lists of them"
_MODEL_PY = "from merlin_cowclip.workflows.serving.triton_model import TritonPythonModel\n"


def export(
    run: Run,
    out: str | Path,
    *,
    which: str | None = None,
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
      which: of the run's models, "last" or "best"; by default as of `Run.model`.
      backend: what runs the network: "python", beside the workflow; or "tensorflow", Triton's
        TensorFlow backend, which servers up to 25.02 have.
      drop_rare: leave out the embedding rows of the rarest ids, which together have this percentage
        of all occurrences in the training split; `rare_costs` measures the effect.
      data: for `drop_rare`, the run's data, if it has moved.
      check_raw: raw rows, as `predict` reads them. The repository scores the first 10,000 in small
        requests, without rows with missing integers, and must give `predict`'s probabilities.
      trust_workflow: load the workflow, which runs its code, even if the run's manifest does not
        confirm it.
      progress: show a progress bar on stderr.

    Raises:
      UserError: `out` exists or cannot be made, the extra is not installed, the run has no such
        model, the workflow cannot be loaded or cannot encode rows one by one, Triton has no type
        for a raw column, or `check_raw` differs.
    """
    out, rare = Path(out), None
    if backend not in BACKENDS:
        raise UserError(f"backend must be one of {', '.join(BACKENDS)}. Received: {backend!r}")
    if check_raw is not None and drop_rare is not None:
        raise UserError("check_raw cannot be used with drop_rare, which changes probabilities")
    folders.refuse_pattern(out, "repository")
    folders.refuse_existing(out)
    if drop_rare is not None:
        data = run.data() if data is None else data
        run.check_vocabulary(data)
        rare = rare_ids(data, drop_rare)
    with progress_bar("export", 3, " steps", show=progress) as bar:
        from merlin_cowclip.workflows.serving import merlin_systems as systems
        from merlin_cowclip.workflows.serving.network import PROBABILITY, Network
        from merlin_cowclip.workflows.serving.workflow_operator import WorkflowOperator

        if run.is_adopted:
            inference = run.inference(trust=trust_workflow)
            workflow, raw = inference.workflow, _request_schema(inference)
        else:
            workflow = run.workflow(trust=trust_workflow).remove_inputs([run.spec().label])
            raw = workflow.input_schema
        bar.update()
        model = run.model(which)
        if rare is not None:
            drop(model, rare)
        network = Network(model, run.spec())
        bar.update()
        encode = WorkflowOperator(run, workflow, raw, network.input_schema, rare)
        ensemble = systems.Ensemble(raw.column_names >> encode >> network, raw)
        runtime = systems.TritonExecutorRuntime()
        if backend == "tensorflow":
            runtime.op_table = {**runtime.op_table, Network: systems.PredictTensorflowTriton}
        with folders.all_or_nothing(out) as folder:
            entry, models = ensemble.export(str(folder), runtime=runtime, name=ENTRY)
            (folder / ENTRY / "1/model.py").write_text(_MODEL_PY, encoding="utf-8")
            kind_of = systems.model_config.DataType.Name
            record = {
                "format": FORMAT,
                "run": str(run.path.resolve()),
                "model": which or run.result["checkpoint"],
                "backend": backend,
                "dropped": rare and {"percent": rare.percent, "most": rare.most},
                "columns": list(raw.column_names),
                "inputs": {one.name: str(kind_of(one.data_type)) for one in entry.input},
                "output": PROBABILITY,
                "models": [entry.name, *(model.name for model in models)],
                "packages": folders.package_versions("merlin-systems", "tensorflow"),
            }
            folders.write_json(folder / RECORD, {**record, "manifest": manifest_of(folder)})
            if check_raw is not None:
                _check_raw(run, model, Repository.open(folder), check_raw, trust=trust_workflow)
        bar.update()
    return Repository.open(out)


def _request_schema(inference: InferenceWorkflow) -> Any:
    """The schema of the raw columns of a request, or a UserError if Triton has no type for one."""
    from merlin.schema import Schema

    columns, without = [], []
    for column in inference.workflow.input_schema:
        if column.name in inference.required:
            kind = element_type(inference.types[column.name])
            if kind is None or is_text(kind):
                columns.append(column.with_dtype("string"))
            elif _is_number(kind):
                columns.append(column.with_dtype(np.dtype(kind.to_pandas_dtype())))
            else:
                without.append(f"{column.name!r} ({kind})")
    if without:
        raise UserError(f"Triton has no type for {', '.join(without)}. {_FIT_ON}")
    return Schema(columns)


def _is_number(kind: pa.DataType) -> bool:
    """Whether Triton has a type for it that is not text."""
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)


def _check_raw(run: Run, model: Any, repository: Repository, inputs: Any, *, trust: bool) -> None:
    """Refuse a repository that answers other probabilities than `predict` writes."""
    from merlin.table import TensorTable

    from merlin_cowclip.workflows.training.evaluation import Predictor
    from merlin_cowclip.workflows.training.prediction import probabilities_of
    from merlin_cowclip.workflows.training.raw_inputs import open_raw_inputs

    given = [inputs] if isinstance(inputs, str | Path) else inputs
    incoming = open_raw_inputs(run, given, raw=run.is_adopted, trust_workflow=trust)
    predictor, ensemble, checked = Predictor(model), repository.ensemble(), 0
    kinds = run.inference(trust=trust).types if run.is_adopted else {}
    for batch, encoded in incoming.pieces(int):
        expected = probabilities_of(predictor, encoded, run.spec())
        columns = {name: batch.column(name) for name in repository.record["columns"]}
        for name in kinds.keys() & columns.keys():
            columns[name] = as_fitted(columns[name], kinds[name], f"column {name!r}")
        rows = pa.table(columns)
        # A request cannot contain missing integers and booleans.
        whole = [c for c in rows.columns if types.is_integer(c.type) or types.is_boolean(c.type)]
        sent = np.flatnonzero(np.all([[True] * len(rows), *(c.is_valid() for c in whole)], axis=0))
        answers = [
            scored(ensemble, TensorTable(_request(rows.take(pa.array(sent[part])))))
            for part in halves(len(sent))
        ]
        differs = np.abs(np.concatenate([[], *answers]) - expected[sent]) > 1e-5
        if differs.any():
            row = checked + int(sent[differs.argmax()]) + 1
            raise UserError(
                f"{int(differs.sum()):,} of {len(sent):,} raw rows get another probability from "
                f"the exported model than from predict, first row {row:,} of {incoming.files[0]}. "
                "Fit without operators that depend on other rows, on this process or on empty text"
            )
        checked += len(encoded)
        if checked >= CHECKED_ROWS:
            return


def _request(rows: pa.Table) -> dict[str, np.ndarray]:
    """The tensors that a client sends for raw rows, by name."""
    request = {}
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        values = pa.concat_arrays(column.chunks)
        if is_list(values.type):
            lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy()
            request[f"{name}__offsets"] = np.cumsum([0, *lengths], dtype=np.int32)
            name, values = f"{name}__values", values.flatten()
        if types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if is_text(values.type) or types.is_null(values.type):
            values = values.cast(pa.binary()).fill_null(b"")
        elif not _is_number(values.type):
            raise UserError(f"column {name!r} is {values.type}. {_FIT_ON}")
        request[name] = values.to_numpy(zero_copy_only=False)
    return request
