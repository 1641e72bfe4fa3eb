"""The ETL on cudf and dask-cuda against pandas and threads."""

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.data.prepare.nvt_workflow import build_workflow
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.spec import CRITEO, DatasetSpec, Split
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.quiet import quiet_imports

from ..workflows.data.test_executor import same

ROWS = 40_000


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    path = tmp_path_factory.mktemp("log") / "train.txt"
    write_synthetic("criteo", path, rows=ROWS, seed=5, cardinality=2_000)
    return path


@pytest.fixture(scope="module")
def on_cpu(log):
    return prepare(CRITEO, [log], log.parent / "cpu", seed=3, progress=False)


def raw_rows(log) -> pd.DataFrame:
    return pd.read_csv(log, sep="\t", header=None, names=list(CRITEO.columns or ()), nrows=5_000)


def test_dask_cuda_gives_the_same_data(rapids, log, on_cpu, tmp_path):
    same(prepare(CRITEO, [log], tmp_path / "gpu", seed=3, device="gpu", progress=False), on_cpu)


def test_thresholds_and_hashing(rapids, log, tmp_path):
    spec = DatasetSpec.from_dict({**CRITEO.to_dict(), "freq_threshold": 5, "hash_buckets": 11})
    one = prepare(spec, [log], tmp_path / "cpu", seed=3, progress=False)
    same(prepare(spec, [log], tmp_path / "gpu", seed=3, device="gpu", progress=False), one)


def test_the_workflow_encodes_cudf_frames_as_pandas_frames(rapids, log, on_cpu):
    import cudf

    rows = raw_rows(log)
    workflow = on_cpu.workflow()
    ours, theirs = workflow.transform(rows), workflow.transform(cudf.from_pandas(rows)).to_pandas()
    for name in CRITEO.categorical:
        np.testing.assert_array_equal(ours[name], theirs[name])
    for name in CRITEO.continuous:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6)


def test_nvtabular_fits_the_workflow_on_cudf(rapids, log, tmp_path):
    with quiet_imports():
        import cudf
        import nvtabular as nvt
    spec = DatasetSpec.from_dict({**CRITEO.to_dict(), "split": {"kind": "sequential", "test": 0.5}})
    data = prepare(spec, [log], tmp_path / "cpu", progress=False)
    assert spec.split == Split("sequential", 0.5)
    names = list(CRITEO.columns or ())
    train = pd.read_csv(log, sep="\t", header=None, names=names, nrows=ROWS // 2)
    fitted = build_workflow(spec, tmp_path / "gpu").fit(nvt.Dataset(cudf.from_pandas(train)))
    for name in CRITEO.categorical:
        file = f"categories/unique.{name}.parquet"
        theirs = pd.read_parquet(tmp_path / "gpu" / file).set_index(name)[f"{name}_size"]
        ours = pd.read_parquet(data.path / "workflow" / file).set_index(name)[f"{name}_size"]
        assert theirs.to_dict() == ours.to_dict()
        assert fitted.output_schema[name].int_domain == data.schema[name].int_domain
