"""Record the golden data: `python -m tests.golden.record`.

Run it only when a change of results is intended, and commit the new files alone, with the reason in
the message. No test calls it, and a change that is to leave results as they are never does. It
trains each case in a graph and eagerly, and stops where the two differ, where the clip of a
case does not act, or acts on everything.
"""

from __future__ import annotations

from pathlib import Path

from . import optimizer_cases, workflow_cases

if __name__ == "__main__":
    for module in (optimizer_cases, workflow_cases):
        module.record(Path(__file__).parent)
