"""What turns logs into data: ids, counts, parquet, and what describes them."""

import atexit
import contextlib

import pyarrow as pa

# A column's type may be a pickle, which pyarrow before 14.0.1 runs as it opens a file
# (CVE-2023-47248). Without this the column has its storage type, as in later versions.
with contextlib.suppress(pa.ArrowKeyError):
    pa.unregister_extension_type("arrow.py_extension_type")
    atexit.unregister(pa.lib._unregister_py_extension_types)  # which would fail
