"""Import Merlin without its noise: missing torch and triton mappings, TensorFlow's start-up lines.

Only imports are silenced; whatever happens later is heard.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Silence Python warnings, and TensorFlow's start-up log where the user has not chosen it.

    ``merlin.schema`` and ``nvtabular`` import TensorFlow; it reads ``TF_CPP_MIN_LOG_LEVEL`` once,
    at that moment, so the variable is set only if it is not set yet.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
