"""The JSON record of a benchmark, benchmarks/records/NAME.json, with commit, versions, machine."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.folders import package_versions, write_json


def save_record(rows: list[dict[str, Any]]) -> None:
    """Write what the running benchmark measured, as its docs quote it."""
    script = Path(sys.argv[0])
    arguments = [argument for argument in sys.argv[1:] if argument != "--record"]
    processor = next(
        (
            line.partition(": ")[2]
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    content = {
        "command": shlex.join(["python", f"benchmarks/{script.name}", *arguments]),
        "versions": package_versions("tensorflow", "merlin-models"),
        "machine": {"processor": processor, "cpus": len(os.sched_getaffinity(0))},
        "load": round(os.getloadavg()[0], 1),
        "rows": rows,
    }
    write_json(script.parent / "records" / f"{script.stem}.json", content)
