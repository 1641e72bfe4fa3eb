"""CPU seconds of short commands on 8,000 rows of 26 fields, and of their imports.

python benchmarks/bench_startup.py [--record]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from record import save_record

from merlin_cowclip.workflows import write_synthetic

IMPORTS = {
    "Python": "pass",
    "pandas, pyarrow": "import pandas, pyarrow.parquet",
    "TensorFlow": "import tensorflow",
    "Merlin models, TensorFlow": "from merlin_cowclip.plugins._tensorflow import mm",
    "NVTabular": "import nvtabular",
}
COMMANDS = {
    "--help": ["--help"],
    "prepare": ["prepare", "criteo", "train.txt", "--out", "data"],
    "an error": ["train", "data", "--out", "data"],
    "train": ["train", "data", "--out", "run", "--epochs", "1"],
    "train --saved-model": ["train", "data", "--out", "with", "--epochs", "1", "--saved-model"],
    "evaluate": ["evaluate", "run"],
    "predict": ["predict", "run", "train.txt", "--out", "scores.parquet"],
}
MAIN = "import sys; from merlin_cowclip.workflows.commands.main import main; sys.exit(main())"


def cpu_seconds(code: str, arguments: list[str], folder: Path) -> float:
    """User and system seconds of a fresh interpreter and its children."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    begin = used()
    subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, check=False
    )
    return used() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=8_000)
    parser.add_argument("--record", action="store_true", help="write benchmarks/records/")
    arguments = parser.parse_args()
    measured = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_synthetic("criteo", home / "train.txt", rows=arguments.rows, seed=1)
        programs = [(f"import {name}", code, []) for name, code in IMPORTS.items()]
        programs += [(name, MAIN, arguments) for name, arguments in COMMANDS.items()]
        for name, code, words in programs:
            seconds = cpu_seconds(code, words, home)
            measured.append({"program": name, "cpu_seconds": round(seconds, 2)})
            print(f"{name:35} {seconds:6.2f} s", flush=True)
    if arguments.record:
        save_record(measured)


if __name__ == "__main__":
    main()
