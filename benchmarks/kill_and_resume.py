"""Whether a run that is killed again and again is the run that never was: N kills from a seed.

A run is trained once from its beginning to its end. The same run is then started, killed with
SIGKILL at a random moment, started again with `--resume`, killed again; whenever one comes to its
end, as it may after a dozen kills, it is compared and another is begun. Half the kills are at a
moment while it trains, evaluates and saves, the others anywhere in the process's life. After each
kill, too, every checkpoint that is there is held against the one that the first run took after the
same update, byte by byte.

    python benchmarks/kill_and_resume.py [--kills 40] [--seed 1] [--rows 40000] [--batch 128]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pandas as pd
from tests.runs_alike import differences

from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split
from merlin_cowclip.workflows.training.checkpoint import Checkpoints

SPEC = DatasetSpec(
    name="log",
    label="y",
    categorical=("user", "item"),
    continuous=("price",),
    lists=("tags",),
    split=Split("random", 0.2),
)
EPOCHS, EVERY = 3, 25
MOST = 12  # kills of one run, or on a busy machine none would come to its end
COMMAND = (sys.executable, "-m", "merlin_cowclip.workflows.commands.main", "train")


def prepared(home: Path, rows: int) -> Path:
    """A prepared folder of a log whose clicks mean nothing, which is no matter here."""
    drawn = np.random.default_rng(0)
    tags = [[f"t{i}" for i in drawn.integers(0, 9, n)] for n in drawn.integers(0, 4, rows)]
    frame = {
        "y": drawn.integers(0, 2, rows),
        "user": [f"u{u}" for u in drawn.zipf(1.3, rows) % 5_000],
        "item": [f"i{i}" for i in drawn.integers(0, 300, rows)],
        "price": drawn.normal(5, 3, rows),
        "tags": ["|".join(t) for t in tags],
    }
    pd.DataFrame(frame).to_csv(home / "log.csv", index=False)
    return prepare(SPEC, [home / "log.csv"], home / "data", progress=False).path


def start(*arguments: object) -> subprocess.Popen[str]:
    """The command, as a user starts it."""
    command = [*COMMAND, *map(str, arguments), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def events(run: Path) -> set[str]:
    """The files for TensorBoard."""
    return set(os.listdir(run / "logs")) if (run / "logs").is_dir() else set()


def trains(run: Path, process: subprocess.Popen[str], before: set[str]) -> bool:
    """Wait until there is another file for TensorBoard; whether the process came so far."""
    while process.poll() is None:
        if events(run) - before:
            return True
        time.sleep(0.002)
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--update", default="exact")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        measure(arguments, Path(home))


def measure(arguments: argparse.Namespace, home: Path) -> None:
    """All of it; what differs is an error at the end."""
    data = prepared(home, arguments.rows)
    options = (
        *("--batch-size", arguments.batch, "--embedding-dim", 8, "--mlp", "32,32"),
        *("--epochs", EPOCHS, "--checkpoint-every", EVERY, "--update", arguments.update),
    )
    reference = home / "reference"
    begun = time.monotonic()
    process = start(data, "--out", reference, *options, "--keep", 10**6)
    trains(reference, process, set())
    starting = time.monotonic() - begun
    if process.wait():
        sys.exit(process.communicate()[1])
    training = time.monotonic() - begun - starting
    updates = Checkpoints(reference / "checkpoints").steps()
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    print(
        f"{updates[-1]:,} updates, {arguments.update}, {len(updates)} checkpoints; "
        f"{starting:.1f} s until it trains, {training:.1f} s from there to the end"
    )
    drawn = random.Random(arguments.seed)
    found, compared = [], 0
    finished = kills = of_this = in_training = 0
    name = itertools.count(1)
    run = home / f"run-{next(name)}"
    while kills < arguments.kills or run.exists():
        last = kills >= arguments.kills or of_this >= MOST
        before = events(run)
        going = ("--resume", run) if run.exists() else (data, "--out", run, *options)
        process = start(*going)
        if not last:
            if drawn.random() < 0.5:
                began = trains(run, process, before)
                pause(process, drawn.random() * training / 4)
            else:
                began = False
                pause(process, drawn.random() * (starting + training / 4))
            process.send_signal(signal.SIGKILL)
        said = process.communicate()[1]
        if process.returncode == -signal.SIGKILL:
            kills, of_this = kills + 1, of_this + 1
            in_training += began
        elif process.returncode:
            sys.exit(f"after {kills} kills: {said}")
        if run.exists():
            there = Checkpoints(run / "checkpoints").steps()
            compared += len(set(there) & set(updates))
            found += [f"after {kills} kills: {one}" for one in differences(run, reference)]
        if (run / "result.json").exists():  # it may have been killed after that
            finished, of_this = finished + 1, 0
            shutil.rmtree(run)
            run = home / f"run-{next(name)}"
        if kills % 10 == 0:
            print(f"{kills} kills, {finished} runs finished, {len(found)} differences", flush=True)
    print(
        f"{kills} kills, {in_training} of them timed from where it trains; {finished} runs came to "
        f"their end; {compared} checkpoints, and of finished runs metrics.csv, TensorBoard's "
        "scalars and result.json, were compared with those of the run that was never killed: "
        f"{len(found)} differences"
    )
    if found:
        sys.exit("\n".join(found[:20]))


def pause(process: subprocess.Popen[str], seconds: float) -> None:
    """For so long, or until it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


if __name__ == "__main__":
    main()
