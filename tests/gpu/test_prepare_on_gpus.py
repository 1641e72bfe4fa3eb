"""`prepare --device gpu`: NVTabular under dask-cuda gives the default engine's data."""

import pytest

from merlin_cowclip.workflows.data.prepare.pipeline import prepare

from ..workflows.data.test_nvtabular_engine import alike, make_log


@pytest.mark.parametrize("name", ["criteo", "avazu", "own"])
def test_dask_cuda_gives_the_data_of_the_default_engine(rapids, name, tmp_path):
    spec, log = make_log(name, tmp_path)
    ours = prepare(spec, log, tmp_path / "cpu", seed=3, progress=False)
    theirs = prepare(spec, log, tmp_path / "gpu", seed=3, device="gpu", progress=False)
    alike(ours, theirs)


def test_cudf_frames_are_encoded_as_pandas_frames(rapids, tmp_path):
    import cudf

    spec, log = make_log("avazu", tmp_path)
    data = prepare(spec, log, tmp_path / "cpu", progress=False)
    workflow = data.workflow().remove_inputs([spec.label])
    frame = cudf.read_csv(log[0], dtype="str")[[*spec.categorical]]
    expected = workflow.transform(frame.to_pandas())
    assert workflow.transform(frame).to_pandas().equals(expected)
