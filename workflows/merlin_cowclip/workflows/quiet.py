# SPDX-License-Identifier: Apache-2.0
"""Merlin without its noise: of imports, and of an operator whose errors we report ourselves.

Missing torch and triton mappings, TensorFlow's start-up lines; whatever else happens is heard.
"""

from __future__ import annotations

import contextlib
import logging
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


@contextlib.contextmanager
def quiet_operators() -> Iterator[None]:
    """Silence the traceback that Merlin logs of an operator that fails, and raises all the same."""
    logger = logging.getLogger("merlin")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
