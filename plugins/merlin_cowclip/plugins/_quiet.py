# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's start-up lines, kept from a user's terminal."""

from __future__ import annotations

import importlib
import os
import tempfile

# What TensorFlow 2.21 writes as it loads, whatever `TF_CPP_MIN_LOG_LEVEL` is.
_NOTES = (b"I0000 ", b"WARNING: All log messages before absl::InitializeLog()")


def import_tensorflow() -> None:
    """Import TensorFlow, without the notes that it writes by then at any log level but 0.

    It logs errors from then on, if the user has not chosen the level; without an NVIDIA driver,
    none: it would log that it has none.

    Raises:
      ImportError: it is not installed, or cannot be loaded.
    """
    level = "2" if os.path.exists("/proc/driver/nvidia") else "3"
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", level) == "0":
        importlib.import_module("tensorflow")
        return
    with tempfile.TemporaryFile() as written:
        stderr = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            importlib.import_module("tensorflow")
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            for line in written:
                if not line.startswith(_NOTES):
                    os.write(2, line)
