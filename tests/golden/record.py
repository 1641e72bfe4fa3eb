"""Record the golden data: `python -m tests.golden.record`.

Run it only when a change of results is intended, and commit the new files alone, with the reason in
the message. No test calls it, and a change that is to leave results as they are never does. It
trains each case in a graph and eagerly, and stops where the two differ, where the clip of a
case does not act, or acts on everything.

Left out, because the simpler counting and optimizer may change it:

- Ids that a layer flattens, makes unique or stacks on the first axis before a table sees them.
  There the first axis of the ids becomes the sample, in graphs as eagerly.
- Ids of one feature that two towers each slice or look up in a vocabulary by themselves: they
  will count twice.
- Lookups of a table for a metric, or of a feature that reaches no loss: they will be refused or
  counted.
- Layers of one's own that read a whole table: they must say so.
- A table without a gradient in some steps with `update="deferred"`: it will be refused.
- Warm-up after a second fit of another length; learning rates set between a restore and a step.
- Eager trainings with several forward passes per update.

Left out, because other tests have it: the clip rules besides "adaptive_column" and the published
trajectory (tests/data), ranks and shards (tests/ranks), SOK, saving, mixed precision, GPUs.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def main() -> int:
    """Write all files beside this one, and print their sizes."""
    folder = Path(__file__).parent
    for module in ("optimizer_cases", "workflow_cases"):
        name = f"{__package__}.{module}"
        if importlib.util.find_spec(name) is not None:
            importlib.import_module(name).record(folder)
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.suffix != ".py":
            print(f"{file.stat().st_size:>9,}  {file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
