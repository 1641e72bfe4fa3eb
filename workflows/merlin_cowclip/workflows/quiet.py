# SPDX-License-Identifier: Apache-2.0
"""Merlin without its noise: of imports, and of an operator whose errors we report ourselves.

Missing torch and triton mappings, TensorFlow's start-up lines; whatever else happens is heard.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

from merlin_cowclip.plugins._quiet import import_tensorflow


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Silence Python warnings, and TensorFlow's start-up log where the user has not chosen it.

    ``merlin.schema`` and ``nvtabular`` import TensorFlow, if it is installed: it comes before them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(ImportError):
            import_tensorflow()
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
