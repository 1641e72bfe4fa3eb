"""`prepare --device gpu`: NVTabular under dask-cuda gives the default engine's data."""

import pytest

from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.quiet import quiet_imports

from ..workflows.data.test_nvtabular_engine import alike, make_log

with quiet_imports():
    from nvtabular import ColumnSelector


@pytest.mark.parametrize("name", ["criteo", "avazu", "own"])
def test_dask_cuda_gives_the_data_of_the_default_engine(rapids, name, tmp_path):
    spec, log = make_log(name, tmp_path)
    ours = prepare(spec, log, tmp_path / "cpu", seed=3, progress=False)
    theirs = prepare(spec, log, tmp_path / "gpu", seed=3, device="gpu", progress=False)
    alike(ours, theirs)


def test_cudf_frames_are_encoded_as_pandas_frames(rapids, tmp_path):
    import cudf

    from merlin_cowclip.workflows.data.prepare.operators import EncodeIds

    spec, log = make_log("avazu", tmp_path)
    data = prepare(spec, log, tmp_path / "cpu", progress=False)
    ops = [node.op for node in data.workflow().output_node.parents]
    (encode,) = (op for op in ops if isinstance(op, EncodeIds))
    frame = cudf.read_csv(log[0], dtype="str")[[*spec.categorical]]
    selector = ColumnSelector([*spec.categorical])
    expected = encode.transform(selector, frame.to_pandas())
    assert encode.transform(selector, frame).to_pandas().equals(expected)
