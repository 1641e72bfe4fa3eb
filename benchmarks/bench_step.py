"""A training step: stock Merlin, ours without and with CowClip, and the published code's way.

DeepFM, 26 Criteo-shaped fields of width 10, 13 numbers, MLP 3 x 400. Times: all variants in one
process, in turn, so that a machine that changes its speed changes them alike; the median of the
rounds; also of each part of a step: forward pass, backward pass, and what the optimizer does. CPU
time, of all threads: what other processes on the machine disturb least. Memory: one process per
variant, the peak of resident memory during steps above what lies in memory between them (weights,
moments); oneDNN is off there, because its allocator keeps what it once had, which hides what a step
takes.

    python benchmarks/bench_step.py [--batches 1024 8192 65536] [--rows 300000 5000000]

`--only VARIANT …` measures whole steps of these alone: large tables fill the memory many times.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time
from typing import Any, NamedTuple

from record import save_record

VARIANTS = {
    "stock": "stock Merlin DeepFMModel + LazyAdam",
    "lazy none": "ours, lazy, no clip",
    "lazy cowclip": "ours, lazy, CowClip",
    "exact cowclip": "ours, exact, CowClip",
    "deferred cowclip": "ours, deferred, CowClip",
    "lazy cowclip adagrad": "ours, lazy, CowClip, Adagrad",
    "lazy cowclip rowwise_adagrad": "ours, lazy, CowClip, row-wise Adagrad",
    "lazy cowclip ema": "ours, lazy, CowClip, averaged weights",
    "lazy cowclip 4": "ours, lazy, CowClip, 4 micro-batches",
    "dense way": "whole tables, our network (dense way)",
    "published": "whole tables, 26 of them (published)",
}
# Whose forward and backward pass a variant has, where not its own.
PASSES = {
    "lazy none": "lazy cowclip",
    "deferred cowclip": "lazy cowclip",
    "lazy cowclip adagrad": "lazy cowclip",
    "lazy cowclip rowwise_adagrad": "lazy cowclip",
    "lazy cowclip ema": "lazy cowclip",
    "lazy cowclip 4": "lazy cowclip",
    "dense way": "exact cowclip",
}
PARTS = [
    f"{part} of {variant}"
    for variant in VARIANTS
    if variant not in PASSES
    for part in ("forward", "gradients")
]
RATIOS = [
    ("lazy cowclip", "lazy none"),
    ("stock", "lazy cowclip"),
    ("exact cowclip", "lazy cowclip"),
    ("deferred cowclip", "lazy cowclip"),
    ("lazy cowclip adagrad", "lazy cowclip"),
    ("lazy cowclip rowwise_adagrad", "lazy cowclip"),
    ("lazy cowclip ema", "lazy cowclip"),
    ("lazy cowclip 4", "lazy cowclip"),
    *(
        (ours, theirs)
        for ours in ("lazy cowclip", "exact cowclip")
        for theirs in ("dense way", "published")
    ),
]


class Times(NamedTuple):
    """Milliseconds per step, of every round."""

    elapsed: list[float]
    cpu: list[float]


def resident(what: str) -> float:
    """GiB of resident memory: VmRSS now, VmHWM at its peak."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(what))
    return int(line.split()[1]) / 2**20


def peak(variant: str, rows: int, size: int) -> float:
    """GiB that a variant's steps take above what lay in memory before them, in this process."""
    from step_variants import build

    step = build(variant, rows, size)
    step()  # tracing and slots: they stay
    before = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # VmHWM starts anew
    for _ in range(2):
        step()
    return resident("VmHWM") - before


def peak_elsewhere(variant: str, rows: int, size: int) -> float:
    command = [sys.executable, __file__, "--peak", variant, str(rows), str(size)]
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout.split()[-1])


def times(names: list[str], rows: int, size: int) -> dict[str, Times]:
    """Times of variants and parts, measured in turn."""
    from step_variants import build

    steps = {name: build(name, rows, size) for name in names}
    for step in steps.values():
        for _ in range(2):
            step()
    inner = max(1, 4096 // size)
    rounds = 6 if size >= 65536 else 12
    found = {variant: Times([], []) for variant in steps}
    order = list(steps)
    for turn in range(rounds):
        # Each variant follows each other one in its turn, so that none is always the one after.
        for variant in order[turn % len(order) :] + order[: turn % len(order)]:
            step = steps[variant]
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(inner):
                step()
            found[variant].cpu.append((time.process_time() - cpu) / inner * 1e3)
            found[variant].elapsed.append((time.perf_counter() - start) / inner * 1e3)
    return found


def parts(found: dict[str, Times], variant: str) -> tuple[float, float, float]:
    """Medians of what forward pass, backward pass and optimizer add to a variant's step."""
    passes = PASSES.get(variant, variant)
    names = (f"forward of {passes}", f"gradients of {passes}", variant)
    forward, gradients, step = (found[name].elapsed for name in names)
    backward = [b - a for a, b in zip(forward, gradients, strict=True)]
    update = [b - a for a, b in zip(gradients, step, strict=True)]
    return statistics.median(forward), statistics.median(backward), statistics.median(update)


def ratio(found: dict[str, Times], a: str, b: str) -> str:
    """The median over the rounds of a's time over b's, elapsed and of the CPU."""
    elapsed, cpu = (
        statistics.median(x / y for x, y in zip(of_a, of_b, strict=True))
        for of_a, of_b in zip(found[a], found[b], strict=True)
    )
    return f"{elapsed:.3f} in time, {cpu:.3f} in CPU time"


def check_steps(names: list[str], rows: int, size: int) -> list[dict[str, Any]]:
    """Print the times of some variants' whole steps, each other's ratio to the first's."""
    found = times(names, rows, size)
    print(f"\nV = {rows:,}, batch {size:,}")
    for name in names:
        ms, cpu = (statistics.median(measured) for measured in found[name])
        print(f"  {VARIANTS[name]:42}  {ms:>8.1f} ms/step  {cpu:>8.1f} ms of CPU")
    for name in names[1:]:
        print(f"  {name} / {names[0]}: {ratio(found, name, names[0])}", flush=True)
    return recorded(found, names, rows, size)


def recorded(
    found: dict[str, Times], names: list[str], rows: int, size: int
) -> list[dict[str, Any]]:
    """Medians of variants, fit for JSON."""
    return [
        {"variant": name, "rows": rows, "batch": size, "ms": round(ms, 2), "cpu_ms": round(cpu, 2)}
        for name in names
        for ms, cpu in [[statistics.median(measured) for measured in found[name]]]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--rows", type=int, nargs="+", default=[300_000, 5_000_000])
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--peak", nargs=3, metavar=("VARIANT", "ROWS", "BATCH"))
    parser.add_argument("--record", action="store_true", help="write benchmarks/records/")
    arguments = parser.parse_args()
    if arguments.peak:
        variant, rows, size = arguments.peak
        print(peak(variant, int(rows), int(size)))
        return
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python "
        f"{platform.python_version()}; DeepFM 3 x 400, 26 fields of width 10, 13 numbers"
    )
    record: list[dict[str, Any]] = []
    if arguments.only:
        for rows in arguments.rows:
            for size in arguments.batches:
                record += check_steps(arguments.only, rows, size)
        if arguments.record:
            save_record(record)
        return
    lazy: dict[tuple[int, int], float] = {}
    for rows in arguments.rows:
        for size in arguments.batches:
            found = times([*VARIANTS, *PARTS], rows, size)
            print(f"\nV = {rows:,}, batch {size:,}")
            print(
                f"  {'ms/step':42}  {'step':>8}  {'forward':>8}  {'backward':>8}  {'update':>8}  "
                f"{'CPU':>8}  {'samples/s':>10}  {'step GiB':>8}"
            )
            memory = {}
            for variant, label in VARIANTS.items():
                ms, cpu = (statistics.median(measured) for measured in found[variant])
                memory[variant] = peak_elsewhere(variant, rows, size)
                shares = "".join(f"{share:>8.1f}  " for share in parts(found, variant))
                print(
                    f"  {label:42}  {ms:>8.1f}  {shares}{cpu:>8.1f}  {size / ms * 1e3:>10,.0f}  "
                    f"{memory[variant]:>8.2f}",
                    flush=True,
                )
            record += [
                {**row, "gib": round(memory[row["variant"]], 2)}
                for row in recorded(found, list(VARIANTS), rows, size)
            ]
            lazy[rows, size] = statistics.median(found["lazy cowclip"].elapsed)
            for a, b in RATIOS:
                print(f"  {a} / {b}: {ratio(found, a, b)}")
            without = peak_elsewhere("gradients of exact cowclip", rows, size)
            extra = [memory[v] - without for v in ("exact cowclip", "dense way")]
            share = f"{extra[0] / extra[1]:.2f}" if extra[1] > 0.1 else "too little to compare"
            print(
                f"  update alone, exact against dense: extra peak {extra[0]:.2f} GiB / "
                f"{extra[1]:.2f} GiB = {share}",
                flush=True,
            )
    if arguments.record:
        save_record(record)
    if len(arguments.rows) > 1:
        few, many = min(arguments.rows), max(arguments.rows)
        for size in arguments.batches:
            print(
                f"\nlazy step, batch {size:,}: V = {many:,} / V = {few:,}: "
                f"{lazy[many, size] / lazy[few, size]:.2f} in time"
            )


if __name__ == "__main__":
    main()
