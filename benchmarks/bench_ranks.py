"""Several ranks on this machine: bytes and time of a step, and memory, of both layouts of tables.

DeepFM, 26 Criteo-shaped fields of width 10, 13 numbers, MLP 3 x 400, lazy updates (exact ones send
as much), one global batch shared by the ranks. Bytes: all that goes over the loopback interface
while the ranks make their steps, by rank and step; beside it what the formulas of
docs/internals/distributed.md say for the ids of these batches, and what Horovod's coordination
sends in as much time without a step (every 5 ms, HOROVOD_CYCLE_TIME: by default every one, which on
a busy machine is not little).
Ranks of one machine share its cores: times are no speed-up. Beside them what the formula says, from
what a step with a rank's share takes in as many processes that join nothing, waits, and bytes.

    python benchmarks/bench_ranks.py [--ranks 1 2 3] [--batch 8192] [--rows 300000]

With `--memory ROWS`, in place of that: the peak of each process's memory with tables of so many
rows, exact updates, for one rank and for the most of `--ranks` in shards, above that with small
tables: how much of one rank's tables is left on each. It needs Horovod (`make test-ranks` builds
it into .venv-ranks: .venv-ranks/bin/python benchmarks/bench_ranks.py).

With `--on-paper`, which needs nothing: the formulas for up to 64 GPUs and 10⁹ rows, on machines of
8 GPUs, with the bandwidths below and this benchmark's ids.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

LAYOUTS = ("replicated", "sharded")
STEPS, WARM, IDLE = 20, 4, 2.0  # steps that are measured, steps before them, seconds without any
SMALL = 3000  # rows of tables that take nothing
CYCLE = 5  # milliseconds between the times that Horovod's ranks tell each other what is ready
WAITS = {"replicated": 1, "sharded": 3}  # for that, one after another in a step
BEGIN = 25.0  # seconds after which processes that know nothing of each other begin together
GATHERED, GATHERED_BYTES = 3, 2**24  # how often, and what, to see how fast bytes move
# A DGX H100, by its guide: each way, bytes a second and GPU. 900 GB/s of NVLink, both ways
# together; and a ConnectX-7 of 400 Gb/s.
NVLINK, INFINIBAND, GPUS = 450e9, 50e9, 8
PAPER_BATCH, PAPER_WIDTHS, PAPER_DENSE = 131_072, [10, 1], 430_814


def sent() -> int:
    """Bytes that the loopback interface has sent."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    raise RuntimeError("bytes are counted on Linux's loopback interface, lo. Received: none here")


def formula(layout: str, ranks: int, dense: int, unique: float, widths: list[int]) -> float:
    """Bytes that a rank sends per step, as docs/internals/distributed.md has it.

    Args:
      layout: of `LAYOUTS`.
      ranks: N.
      dense: P, weights that are no table's.
      unique: U, different rows in a rank's share of the batch: the tables have the same.
      widths: d of each table.
    """
    others = (ranks - 1) / ranks
    back = sum(8 + 4 * (width + 1) for width in widths)
    if layout == "replicated":
        return others * 2 * 4 * dense + (ranks - 1) * unique * back
    return others * (2 * 4 * dense + unique * (8 + sum(4 * d for d in widths) + back))


def time_formula(layout: str, share: float, moved: float, speed: float) -> float:
    """Milliseconds of a step, as docs/internals/distributed.md has it.

    Args:
      layout: of `LAYOUTS`.
      share: what a step with a rank's share takes where nothing is joined.
      moved: bytes that a rank sends.
      speed: of these, in a millisecond.
    """
    return share + WAITS[layout] * CYCLE + moved / speed


def steps(layout: str, batch: int, rows: int, update: str, begin: float) -> None:
    """On each rank: train, from a time on, and tell, on rank 0, what was measured."""
    import tensorflow as tf
    from step_variants import L2, batches, schema

    from merlin_cowclip.models import deepfm
    from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
    from merlin_cowclip.plugins.distributed.horovod import all_gather, all_gather_object, ranks

    here = ranks()
    share = slice(here.rank * batch // here.size, (here.rank + 1) * batch // here.size)
    mine = tf.nest.map_structure(lambda t: t[share], batches(rows, batch, 8))
    model = deepfm(schema(rows), sharded=layout == "sharded")
    model(mine[0][0])
    hp = Hyperparameters(batch_size=batch, l2=L2, warmup_epochs=0.0)
    optimizer = CowClipOptimizer.for_model(model, hp, update=update, steps_per_epoch=100)
    model.compile(optimizer=optimizer, metrics=[])
    step = tf.function(model.train_step)
    for number in range(WARM):
        step(mine[number % len(mine)])
    all_gather_object(None)
    before = sent()
    time.sleep(IDLE)
    idle = (sent() - before) / IDLE
    if 0.0 < begin < time.time():
        raise SystemExit(f"processes must be there within {BEGIN:g} seconds, to begin together")
    time.sleep(max(0.0, begin - time.time()))
    all_gather_object(None)
    before, start = sent(), time.perf_counter()
    for number in range(STEPS):
        step(mine[number % len(mine)])
    all_gather_object(None)
    seconds, moved = time.perf_counter() - start, sent() - before
    start = time.perf_counter()
    for _ in range(GATHERED):
        all_gather(np.zeros(GATHERED_BYTES, np.uint8))
    speed = (here.size - 1) * GATHERED * GATHERED_BYTES / 1e3 / (time.perf_counter() - start)
    specs = optimizer.table_specs
    tables = {spec.variable.ref() for spec in specs}
    used = [
        sum(len(np.unique(f[f"C{i}"])) for i in range(26))
        for f, _ in (mine[n % len(mine)] for n in range(STEPS))
    ]
    told = {
        "bytes": moved / STEPS / here.size,
        "coordination": idle * seconds / STEPS / here.size,
        "ms": 1e3 * seconds / STEPS,
        "bytes per ms": speed,
        "unique": float(all_gather(np.array([np.mean(used)])).mean()),
        "dense": sum(
            int(np.prod(v.shape)) for v in model.trainable_weights if v.ref() not in tables
        ),
        "widths": [spec.width for spec in specs],
        "peak": max(all_gather_object(_peak())),
    }
    if here.rank == 0:
        print("TOLD", json.dumps(told), flush=True)


def _peak() -> int:
    """Bytes of resident memory at its peak."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024


def measured(layout: str, ranks: int, batch: int, rows: int, update: str) -> dict[str, Any]:
    """What the ranks of a launch have told."""
    launcher = Path(sys.executable).with_name("horovodrun")
    launch = [str(launcher), "--gloo", "-np", str(ranks), "-H", f"localhost:{ranks}"]
    return _told(_started([*launch, *_own(layout, batch, rows, update)]))


def side_by_side(processes: int, batch: int, rows: int) -> float:
    """Milliseconds of a step of some processes that know nothing of each other."""
    command = _own(LAYOUTS[0], batch, rows, "lazy", time.time() + BEGIN)
    started = [_started(command) for _ in range(processes)]
    return float(np.mean([_told(process)["ms"] for process in started]))


def _own(layout: str, batch: int, rows: int, update: str, begin: float = 0.0) -> list[str]:
    given = (layout, batch, rows, update, begin)
    return [sys.executable, __file__, "--steps", *map(str, given)]


def _started(command: list[str]) -> subprocess.Popen[str]:
    settings = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_NUM_INTRAOP_THREADS": "1",
        "HOROVOD_CYCLE_TIME": str(CYCLE),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **settings}, **pipes)


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate()
    lines = [line for line in out.splitlines() if "TOLD" in line]
    if not lines:
        raise SystemExit(out[-2000:] + err[-2000:])
    told: dict[str, Any] = json.loads(lines[0].partition("TOLD")[2])
    return told


def report_bytes(numbers: list[int], batch: int, rows: int) -> None:
    """A line for each layout and number of ranks."""
    print(f"global batch {batch:,}, {rows:,} rows: by rank and step")
    heads = ("tables    ", "ranks", "rows of a share", "bytes sent", "formula", "ratio")
    print("  ".join((*heads, "coordination", "    ms", "formula")))
    for ranks in numbers:
        share = side_by_side(ranks, batch // ranks, rows) if ranks > 1 else 0.0
        for layout in LAYOUTS if ranks > 1 else LAYOUTS[:1]:
            told = measured(layout, ranks, batch, rows, "lazy")
            says = formula(layout, ranks, told["dense"], told["unique"], told["widths"])
            ratio, on_paper = "    -", "      -"
            if ranks > 1:
                ratio = f"{told['bytes'] / says:5.3f}"
                took = time_formula(layout, share, told["bytes"], told["bytes per ms"])
                on_paper = f"{took:7.0f}"
            print(
                f"{layout:10}  {ranks:5}  {told['unique']:15,.0f}  {told['bytes'] / 1e6:7.3f} MB"
                f"  {says / 1e6:4.2f} MB  {ratio}  {told['coordination'] / 1e6:9.3f} MB"
                f"  {told['ms']:6.0f}  {on_paper}",
                flush=True,
            )


def report_memory(ranks: int, batch: int, rows: int) -> None:
    """One rank's tables, and what is left of them on each of several."""
    peaks = {
        (n, v): measured(LAYOUTS[n > 1], n, batch, v, "exact")["peak"]
        for n in (1, ranks)
        for v in (SMALL, rows)
    }
    one, some = (peaks[n, rows] - peaks[n, SMALL] for n in (1, ranks))
    wanted = one / ranks + peaks[ranks, SMALL]
    gib = 2**30
    print(f"{rows:,} rows of width 10 and 1, exact updates, global batch {batch:,}")
    print(f"1 rank: peak {peaks[1, rows] / gib:.2f} GiB, {one / gib:.2f} of it for tables")
    print(
        f"{ranks} ranks: peak {peaks[ranks, rows] / gib:.2f} GiB each, {some / gib:.2f} for tables"
    )
    print(
        f"1/{ranks} of one rank's, and what does not shrink: {wanted / gib:.2f} GiB; "
        f"measured / that = {peaks[ranks, rows] / wanted:.3f}"
    )


def report_on_paper() -> None:
    """Memory, bytes and the time that they take on the wire, by number of GPUs."""
    from step_variants import batches

    print(f"global batch {PAPER_BATCH:,}; by GPU: memory of tables and moments with the exact")
    print("update's temporary; bytes sent a step; milliseconds that they take at least")
    print("rows           GPUs  tables      memory  rows of a share      bytes      ms")
    for rows in (33_800_000, 1_000_000_000):
        for ranks in (1, 8, 64):
            features, _ = batches(rows, PAPER_BATCH // ranks, 1)[0]
            unique = sum(len(np.unique(features[f"C{i}"])) for i in range(26))
            for layout in LAYOUTS if ranks > 1 else LAYOUTS[:1]:
                held = rows / ranks if layout == "sharded" else rows
                memory = 4 * held * (3 * sum(PAPER_WIDTHS) + max(PAPER_WIDTHS))
                moved = formula(layout, ranks, PAPER_DENSE, unique, PAPER_WIDTHS)
                away = max(0, ranks - GPUS) / max(1, ranks - 1)  # of the others, in other machines
                took = max(moved * (1 - away) / NVLINK, moved * away / INFINIBAND)
                print(
                    f"{rows:13,}  {ranks:4}  {layout:10}  {memory / 1e9:5.1f} GB  {unique:15,}"
                    f"  {moved / 1e6:6.1f} MB  {1e3 * took:6.2f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--memory", type=int, metavar="ROWS")
    parser.add_argument("--on-paper", action="store_true")
    parser.add_argument("--steps", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps:
        layout, batch, rows, update, begin = arguments.steps
        steps(layout, int(batch), int(rows), update, float(begin))
        return
    if arguments.on_paper:
        report_on_paper()
        return
    if not Path(sys.executable).with_name("horovodrun").exists():
        print(f"no Horovod beside {sys.executable}: left out (make test-ranks builds it)")
        return
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Gloo")
    if arguments.memory:
        report_memory(max(arguments.ranks), arguments.batch, arguments.memory)
        return
    report_bytes(arguments.ranks, arguments.batch, arguments.rows)


if __name__ == "__main__":
    main()
