"""Parquet whose schema is a pickle runs nothing."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

if tuple(map(int, pa.__version__.split(".")[:3])) >= (14, 0, 1):
    pytest.skip("pyarrow itself runs no pickle from 14.0.1 on", allow_module_level=True)


class RunsCode(pa.PyExtensionType):
    """When it is unpickled it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(pa.int64())

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("module", ["sources.base", "adopt.validate", "prepared_data"])
def test_what_reads_parquet_refuses_it(tmp_path, module):
    column = pa.ExtensionArray.from_storage(RunsCode(tmp_path / "ran"), pa.array([0, 1]))
    pq.write_table(pa.table({"y": column}), tmp_path / "evil.parquet")
    code = f"import merlin_cowclip.workflows.data.{module}, pyarrow.parquet as pq\n"
    code += f"pq.read_table({str(tmp_path / 'evil.parquet')!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "a column's type is a pickle" in done.stderr
    assert not (tmp_path / "ran").exists()
