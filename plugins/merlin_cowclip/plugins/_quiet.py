# SPDX-License-Identifier: Apache-2.0
"""TensorFlow's start-up lines, kept from a user's terminal."""

from __future__ import annotations

import importlib
import os

from merlin_cowclip.plugins._compat import set_environment

# What TensorFlow 2.21 writes as it loads, whatever `TF_CPP_MIN_LOG_LEVEL` is.
_NOTES = (b"I0000 ", b"WARNING: All log messages before absl::InitializeLog()")


def import_tensorflow() -> None:
    """Import TensorFlow with Keras 2, and pass on what it writes to stderr, but for its notes.

    If the user has not set `TF_CPP_MIN_LOG_LEVEL`, it logs errors alone, and without an NVIDIA
    driver none: it would log that it has none. At level 0, all is written.

    Raises:
      ImportError: it is not installed, or cannot be loaded.
    """
    set_environment()
    level = "2" if os.path.exists("/proc/driver/nvidia") else "3"
    if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", level) == "0":
        importlib.import_module("tensorflow")
        return
    # In memory: a container may have no folder to write to.
    with os.fdopen(os.memfd_create("tensorflow"), "r+b") as written:
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
