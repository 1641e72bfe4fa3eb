# SPDX-License-Identifier: Apache-2.0
"""`prepare --engine nvtabular`: NVTabular fits and encodes, on CPUs or GPUs; `adopt` checks it.

The log is read, checked, split and shuffled as by the default engine: both give the same rows in
the same order, with the same raw ids. Ids of equal counts may be numbered differently.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from merlin_cowclip.workflows.data.prepare.column_store import PartJob, part_schema

from merlin_cowclip.workflows.data.adopt.adopt import adopt
from merlin_cowclip.workflows.data.prepare.column_store import PartJob, part_schema
from merlin_cowclip.workflows.data.prepare.executor import make_executor
from merlin_cowclip.workflows.data.prepare.nvt_workflow import build_workflow, raw_schema
from merlin_cowclip.workflows.data.prepared_data import PARTS
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt

PARTITION = "256MB"  # of raw rows, in memory while NVTabular fits on a CPU


def fit_and_encode(
    spec: DatasetSpec,
    raw: Path,
    folder: Path,
    jobs: Sequence[PartJob],
    workers: int,
    device: str,
    progress: bool,
) -> dict[str, int]:
    """Fit the spec's workflow to the raw parts in ``raw``, and encode them.

    The prepared folder gets parts, workflow, schema and counts. Returns the number of ids by field.
    """
    files = [[job.name for job in jobs if job.part == part] for part in PARTS]
    for part in PARTS:
        (folder / part).mkdir()
    with make_executor(workers, device, raw) as executor:
        workflow = build_workflow(spec, raw / "workflow")
        with progress_bar("fitting", len(spec.fields), " columns", show=progress) as bar:
            paths = [str(raw / name) for name in files[0]]
            options = {"cpu": True, "part_size": PARTITION} if device == "cpu" else {}
            with quiet_imports():  # under the Dask client that is open, if any
                workflow.fit(nvt.Dataset(paths, engine="parquet", **options))
            bar.update(bar.total)
        workflow.fit_schema(raw_schema(spec))
        task = functools.partial(
            _encode_part, workflow=workflow, spec=spec, raw=raw, folder=folder, device=device
        )
        rows = sum(job.stop - job.start for job in jobs)
        with progress_bar("encoding", rows, show=progress) as bar:
            for written in executor.map(task, jobs):
                bar.update(written)
    workflow.save(str(raw / "workflow"))
    train, valid, test = ([folder / name for name in names] for names in files)
    held_out = {"valid": valid or None, "test": test or None}
    data = adopt(
        train, raw / "workflow", spec.label, raw / "adopted", **held_out, progress=progress
    )
    for name in ("workflow", "counts", "schema.pbtxt", ".merlin"):
        os.rename(data.path / name, folder / name)
    return data.cardinalities


def _encode_part(
    job: PartJob, workflow: nvt.Workflow, spec: DatasetSpec, raw: Path, folder: Path, device: str
) -> int:
    """Encode one raw part; returns its rows."""
    schema = part_schema(spec)
    with (
        pq.ParquetFile(raw / job.name) as file,
        pq.ParquetWriter(folder / job.name, schema) as writer,
    ):
        # A GPU takes a part at a time; pandas, which needs more memory, a row group.
        groups = range(file.num_row_groups)
        for chosen in [groups] if device == "gpu" else [[group] for group in groups]:
            rows = file.read_row_groups(list(chosen))
            if device == "gpu":
                import cudf  # type: ignore[import-not-found]

                encoded = workflow.transform(cudf.DataFrame.from_arrow(rows)).to_arrow()
            else:
                encoded = pa.Table.from_pandas(workflow.transform(rows.to_pandas()))
            writer.write_table(encoded.select(schema.names).cast(schema), job.group)
    return job.stop - job.start
