# SPDX-License-Identifier: Apache-2.0
"""What turns logs into data: ids, counts, parquet, and what describes them.

A column's type may be a pickle, which pyarrow before 14.0.1 runs as it opens a file
(CVE-2023-47248). From this package's import on it is refused in this process.
"""

import contextlib

import pyarrow as pa


class _Refused(pa.ExtensionType):
    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> pa.DataType:
        raise pa.ArrowInvalid("a column's type is a pickle. Write it with a type of Arrow's own")


with contextlib.suppress(KeyError):  # pyarrow 21 and later have none
    pa.unregister_extension_type("arrow.py_extension_type")
pa.register_extension_type(_Refused(pa.null(), "arrow.py_extension_type"))
