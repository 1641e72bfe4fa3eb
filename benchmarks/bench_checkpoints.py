"""What checkpoints cost: training with one every 50 updates against training without, in turn.

DeepFM, 26 fields of width 10, V = 1M, batch 8,192, exact updates, made-up rows that lie in memory.
Times: all updates of a round, one checkpoint in it, each way in turn; medians. With `--large` one
checkpoint of V = 33.8M (Criteo's): its size, how long training stands still for it beside the time
in which NumPy copies as many bytes, how long it takes to write, and the peak of resident memory
above that of training.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from merlin_cowclip.models import MODELS
from merlin_cowclip.plugins import CowClipOptimizer, recipe, scale
from merlin_cowclip.plugins._stack import mm, tf
from merlin_cowclip.plugins.state import training_state
from merlin_cowclip.workflows.training.checkpoints import Checkpoints
from merlin_cowclip.workflows.training.saved_state import State

FIELDS, NUMBERS, WIDTH = 26, 13, 10
COPY = """
import sys, time
import numpy as np
values = np.ones(int(sys.argv[1]) // 4, np.float32)
for _ in range(2):  # a virtual machine's own first touch of its memory is slow
    begun = time.perf_counter()
    copied = values.copy()
    taken = time.perf_counter() - begun
    del copied
print(taken)
"""


def schema_of(rows: int) -> mm.Schema:
    from merlin.schema import ColumnSchema, Schema, Tags

    ids = [
        ColumnSchema(
            f"c{i}",
            dtype="int64",
            tags=[Tags.CATEGORICAL],
            properties={"domain": {"min": 0, "max": rows // FIELDS - 1, "name": f"c{i}"}},
        )
        for i in range(FIELDS)
    ]
    numbers = [
        ColumnSchema(f"n{i}", dtype="float32", tags=[Tags.CONTINUOUS]) for i in range(NUMBERS)
    ]
    label = ColumnSchema("click", dtype="float32", tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
    return Schema([*ids, *numbers, label])


def batches(rows: int, size: int, count: int) -> list:
    random = np.random.default_rng(0)
    found = []
    for _ in range(count):
        ids = random.zipf(1.3, (FIELDS, size, 1)) % (rows // FIELDS)
        features = {f"c{i}": tf.constant(column, tf.int64) for i, column in enumerate(ids)}
        features |= {
            f"n{i}": tf.constant(random.random((size, 1)), tf.float32) for i in range(NUMBERS)
        }
        found.append((features, tf.constant(random.integers(0, 2, (size, 1)), tf.float32)))
    return found


def built(rows: int, size: int, some: list, update: str = "exact") -> mm.Model:
    model = MODELS["deepfm"](schema_of(rows), embedding_dim=WIDTH, mlp=(400, 400, 400))
    hp = scale(recipe("cowclip"), to=size, rule="cowclip")
    optimizer = CowClipOptimizer.for_model(model, hp, update=update, steps_per_epoch=1000)
    model.compile(optimizer=optimizer, metrics=[])
    model(some[0][0])
    return model


def steps(model: mm.Model, some: list, count: int, save) -> float:
    begun = time.perf_counter()
    for i in range(count):
        model._step(some[i % len(some)])
        save(i)
    return time.perf_counter() - begun


def cost(rows: int, size: int, every: int, rounds: int) -> None:
    some = batches(rows, size, 8)
    model = built(rows, size, some)
    model._step = tf.function(lambda data: model.train_step(data)["loss_batch"])
    state = training_state(model)
    with tempfile.TemporaryDirectory() as home:
        checkpoints = Checkpoints(Path(home) / "checkpoints")
        number = [0]

        def save(i: int) -> None:
            if i == 0:  # one per round, in its beginning: it is written while the rest is trained
                number[0] += 1
                checkpoints.save(number[0], State(state), {})

        steps(model, some, 3, lambda i: None)
        ways = {"without": lambda i: None, "with": save}
        seconds = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                seconds[name].append(steps(model, some, every, way))
                checkpoints.wait()
        size_of = sum(f.stat().st_size for f in checkpoints.folder.rglob("state.*"))
        size_of /= len(checkpoints.steps())
    without, with_ = (statistics.median(seconds[name]) for name in ways)
    ratios = [b / a for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    print(f"V = {rows:,}, batch {size:,}, exact: a checkpoint of {size_of / 2**20:,.0f} MiB")
    print(f"  {every} updates without  {without:8.2f} s")
    print(f"  {every} updates with one {with_:8.2f} s")
    middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
    print(f"  with / without: {middle:.3f} ({least:.3f} to {most:.3f})")


def large(rows: int, size: int) -> None:
    some = batches(rows, size, 4)
    model = built(rows, size, some)
    model._step = tf.function(lambda data: model.train_step(data)["loss_batch"])
    state = training_state(model)
    steps(model, some, 4, lambda i: None)
    usual = statistics.median(steps(model, some, 1, lambda i: None) for _ in range(4))
    bytes_ = sum(v.shape.num_elements() * v.dtype.size for v in state.values())
    copy = [sys.executable, "-c", COPY, str(bytes_)]  # elsewhere, for this one's peak of memory
    copied = float(subprocess.run(copy, capture_output=True, check=True, text=True).stdout)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    with tempfile.TemporaryDirectory() as home:
        checkpoints = Checkpoints(Path(home) / "checkpoints")
        begun = time.perf_counter()
        checkpoints.save(1, State(state), {})
        still = time.perf_counter() - begun
        first = steps(model, some, 1, lambda i: None)
        during = []
        while checkpoints._writing.is_alive():
            during.append(steps(model, some, 1, lambda i: None))
        written = time.perf_counter() - begun
        checkpoints.wait()
        size_of = sum(f.stat().st_size for f in checkpoints.folder.rglob("state.*"))
        begun = time.perf_counter()
        checkpoints.at(1).restore(State(state))
        read = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"V = {rows:,}, batch {size:,}, exact: one checkpoint")
    print(f"  size                            {size_of / 2**30:8.2f} GiB")
    print(f"  an update, usually              {usual:8.2f} s")
    print(f"  an update while it is written   {statistics.median(during):8.2f} s")
    print(f"  training stands still           {still + max(0.0, first - usual):8.2f} s")
    print(f"  NumPy copies as many bytes in   {copied:8.2f} s")
    print(f"  on the disk, trained meanwhile  {written:8.2f} s")
    print(f"  checked and read again          {read:8.2f} s")
    print(f"  peak of memory, before          {before:8.2f} GiB")
    print(f"  peak of memory, with it         {peak:8.2f} GiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", action="store_true")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, load average {load:.1f}")
    if arguments.large:
        large(33_800_000, arguments.batch)
    else:
        cost(arguments.rows, arguments.batch, arguments.every, arguments.rounds)
