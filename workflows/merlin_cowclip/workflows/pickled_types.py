"""Parquet that runs code as it is opened: from this module's import on refused in this process.

A column's type may be a pickle in the file's schema (`pyarrow.PyExtensionType`), which pyarrow
before 14.0.1 loads, and so runs, whoever wrote it (CVE-2023-47248). The versions that Merlin needs
are older. Whatever reads parquet or Arrow of others imports this first.
"""

from __future__ import annotations

import contextlib

import pyarrow as pa

_NAME = "arrow.py_extension_type"


class _Refused(pa.ExtensionType):
    """Stands in the place of every type that is a pickle."""

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: pa.DataType, serialized: bytes) -> pa.DataType:
        raise pa.ArrowInvalid(
            "a column's type is a pickle, which would run code as it is read: write the column "
            "with a type of Arrow's own"
        )


with contextlib.suppress(pa.ArrowKeyError):  # a later pyarrow's has none
    pa.unregister_extension_type(_NAME)
with contextlib.suppress(pa.ArrowKeyError):  # which refuses by itself
    pa.register_extension_type(_Refused(pa.null(), _NAME))
