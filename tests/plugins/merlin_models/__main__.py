"""`python -m tests.plugins.merlin_models`: try every family, print the documentation's table."""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path

import tensorflow as tf

from .contract import MODES, Built, check_saving, check_step
from .families import FAMILIES, Family
from .table import table


def failure(family: Family, folder: Path) -> str | None:
    """What a family failed in, "step" or "saving"; the reason goes to stderr."""
    tf.keras.backend.clear_session()
    doing = "step"
    try:
        built = Built(family)
        for mode, eager in MODES:
            check_step(built, mode, eager)
        doing = "saving"
        check_saving(built, folder)
    except Exception:
        traceback.print_exc()
        return doing
    return None


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        found = {f: failure(f, Path(folder) / str(i)) for i, f in enumerate(FAMILIES)}
    print(table(found))
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
