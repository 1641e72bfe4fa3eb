# SPDX-License-Identifier: Apache-2.0
"""Export a finished run as a Triton model repository."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from merlin_cowclip.workflows import folders
from merlin_cowclip.workflows.data.adopt.inference import halves
from merlin_cowclip.workflows.data.adopt.validate import element_type
from merlin_cowclip.workflows.data.sources.base import RAW_TIME, is_text
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.manifest import manifest_of
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.serving import repository, served_model
from merlin_cowclip.workflows.serving.network import save_network
from merlin_cowclip.workflows.serving.repository import Repository
from merlin_cowclip.workflows.training.evaluation import Predictor
from merlin_cowclip.workflows.training.prediction import probabilities_of
from merlin_cowclip.workflows.training.raw_inputs import open_raw_inputs
from merlin_cowclip.workflows.training.runs import Run

CHECKED_ROWS = 10_000  # of --check-raw
MAX_REQUESTS = 64  # that are joined
_MODEL_PY = "from merlin_cowclip.workflows.serving.triton_model import TritonPythonModel\n"


def export(
    run: Run,
    out: str | Path,
    *,
    which: str | None = None,
    check_raw: str | Path | Sequence[str | Path] | None = None,
    progress: bool = True,
) -> Repository:
    """Write a Triton model repository: raw rows without the label in, probabilities out.

    Args:
      run: the finished run.
      out: the folder to make; must not exist.
      which: of the run's models, "last" or "best"; by default as of `Run.model`.
      check_raw: raw rows, as `predict` reads them. The first 10,000, sent as a server gets them,
        alone and joined, must get `predict`'s probabilities. Rows with missing integers are left
        out.
      progress: show a progress bar on stderr.

    Raises:
      UserError: `out` exists, the run has no such model, the workflow cannot be loaded or cannot
        encode rows one by one, Triton has no type for a raw column, or `check_raw` differs.
    """
    out = Path(out)
    folders.refuse_pattern(out, "repository")
    folders.refuse_existing(out)
    with progress_bar("export", 3, " steps", show=progress) as bar:
        spec = run.spec()
        if run.is_adopted:
            inference = run.inference()
            workflow = inference.workflow
            kinds = {name: inference.types[name] for name in inference.required}
        else:
            workflow = run.workflow().remove_inputs([spec.label])
            kinds = {
                name: pa.float64() if of is float else None for name, of in spec.raw_columns.items()
            }
        inputs = _inputs(workflow, kinds)
        bar.update()
        model = run.model(which)
        bar.update()
        with folders.all_or_nothing(out) as folder:
            version = folder / repository.VERSION
            version.mkdir(parents=True)
            (version.parent / "config.pbtxt").write_text(_config(inputs), encoding="utf-8")
            (version / "model.py").write_text(_MODEL_PY, encoding="utf-8")
            workflow.save(str(version / served_model.WORKFLOW), modules_byvalue=_own_modules())
            save_network(model, spec, version / served_model.NETWORK)
            record = {
                "format": repository.FORMAT,
                "run": str(run.path.resolve()),
                "model": which or run.result["checkpoint"],
                "columns": [name for name in workflow.input_schema.column_names if name in kinds],
                "inputs": inputs,
                "output": "probability",
                "is_adopted": run.is_adopted,
                **{name: run.config[name] for name in ("spec", "cardinalities", "ranges")},
                "packages": folders.package_versions("tensorflow"),
            }
            folders.write_json(
                folder / repository.RECORD, {**record, "manifest": manifest_of(folder)}
            )
            if check_raw is not None:
                _check_raw(run, model, Repository.open(folder), check_raw)
        bar.update()
    return Repository.open(out)


def _inputs(workflow: Any, kinds: Mapping[str, pa.DataType | None]) -> dict[str, str]:
    """The tensors of a request, and Triton's types of them; an unknown type of a column is text."""
    names = {kind: name for name, kind in served_model.TYPES.items()}
    inputs: dict[str, str] = {}
    without = []
    for column in workflow.input_schema:
        if column.name in kinds:
            kind = element_type(kinds[column.name])
            known = names.get(served_model.TEXT if kind is None or is_text(kind) else kind)
            if known is None:
                without.append(f"{column.name!r} ({kind})")
            elif column.is_list:
                inputs |= {f"{column.name}__values": known, f"{column.name}__offsets": "TYPE_INT32"}
            else:
                inputs[column.name] = known
    if without:
        remedy = "Fit the workflow on columns of text, numbers or booleans, or lists of them"
        raise UserError(f"Triton has no type for {', '.join(without)}. {remedy}")
    return inputs


def _config(inputs: Mapping[str, str]) -> str:
    """The `config.pbtxt` of a model that answers all waiting requests at once.

    Without `max_batch_size`, Triton hands over one request at a time; without `allow_ragged_batch`,
    only requests of one shape together. So the batch's dimension counts requests, not rows.
    """
    lines = ['backend: "python"', f"max_batch_size: {MAX_REQUESTS}", "dynamic_batching { }"]
    for name, kind in inputs.items():
        quoted = json.dumps(name, ensure_ascii=False)
        shape = "dims: [-1] allow_ragged_batch: true"
        lines.append(f"input {{ name: {quoted} data_type: {kind} {shape} }}")
    lines.append('output { name: "probability" data_type: TYPE_FP32 dims: [-1] }')
    return "\n".join([*lines, ""])


def _check_raw(run: Run, model: Any, exported: Repository, inputs: Any) -> None:
    """Refuse a repository that answers other probabilities than `predict` writes."""
    given = [inputs] if isinstance(inputs, str | Path) else inputs
    incoming = open_raw_inputs(run, given, raw=run.is_adopted)
    predictor, served, spec, checked = Predictor(model), exported.load(), run.spec(), 0
    for batch, encoded in incoming.pieces(int):
        batch, encoded = (rows.slice(0, CHECKED_ROWS - checked) for rows in (batch, encoded))
        expected = probabilities_of(predictor, encoded, spec)
        fields = {} if run.is_adopted else {spec.column_of(name): name for name in spec.fields}
        fields |= {name: f"{RAW_TIME}{name}" for name in (spec.hour, spec.weekday) if name}
        names = {name: fields.get(name, name) for name in exported.record["columns"]}
        rows = pa.table({name: batch.column(field) for name, field in names.items()})
        # A request cannot contain missing integers and booleans.
        filled = [c for c in rows.columns if pa.types.is_integer(c.type) or c.type == pa.bool_()]
        sent = np.flatnonzero(np.all([[True] * len(rows), *(c.is_valid() for c in filled)], axis=0))
        parts = [rows.take(pa.array(sent[part])) for part in halves(len(sent))]
        requests = [exported.request(part) for part in parts]
        alone = [answer for request in requests for answer in served.answers([request])]
        for answers in (alone, served.answers(requests)):
            differs = np.abs(served_model.probabilities(answers) - expected[sent]) > 1e-5
            if differs.any():
                row = checked + int(sent[differs.argmax()]) + 1
                raise UserError(
                    f"{int(differs.sum()):,} of {len(sent):,} raw rows get another probability "
                    f"from the exported model than from predict, first row {row:,} of "
                    f"{incoming.files[0]}. Fit without operators that depend on other rows, on "
                    "this process or on empty text"
                )
        checked += len(encoded)
        if checked >= CHECKED_ROWS:
            return


def _own_modules() -> list[ModuleType]:
    """Loaded modules that no package installs: the user's operators and functions may be there."""
    installed = re.compile(f"/(site|dist)-packages/|^{re.escape(sysconfig.get_path('stdlib'))}/")
    others = re.compile("__main__$|merlin|nvtabular")
    modules = [m for name, m in sys.modules.items() if getattr(m, "__name__", "") == name]
    files = [(m, getattr(m, "__file__", None)) for m in modules if not others.match(m.__name__)]
    return [module for module, file in files if file and not installed.search(file)]
