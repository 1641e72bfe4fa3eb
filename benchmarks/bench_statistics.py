"""What it costs to observe the steps, and to look for numbers that are not finite.

DeepFM, 26 Criteo-shaped fields of width 10, 13 numbers, MLP 3 x 400, as `bench_step.py` has it. For
each mode, steps without and with statistics are taken in turn in one process; the ratio is the
median over the rounds of one's time over the other's in the same round. A look (`not_finite`) is
timed by itself, and set against the steps of its interval.

    python benchmarks/bench_statistics.py [--batch 8192] [--rows 1000000] [--rounds 60]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from step_variants import MLP, WIDTH, batches, schema

from merlin_cowclip.models import deepfm
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._stack import tf

LOOK_EVERY = 25


def build(
    update: str, clip: str | None, observed: bool, rows: int, size: int
) -> tuple[Callable[[], Any], CowClipOptimizer]:
    """A function that runs a training step and waits for it, and the optimizer."""
    hp = Hyperparameters(size, warmup_epochs=0.0, clip=clip)
    model = deepfm(schema(rows), embedding_dim=WIDTH, mlp=MLP)
    optimizer = CowClipOptimizer.for_model(model, hp, update=update)
    if observed:
        optimizer.observe()
    model.compile(optimizer=optimizer, metrics=[], loss="binary_crossentropy")
    made = batches(rows, size)
    signature = tf.nest.map_structure(
        lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), made[0]
    )
    endless = tf.data.Dataset.from_generator(lambda: iter(made), output_signature=signature)
    data = iter(endless.cache().repeat().prefetch(2))
    function = model.make_train_function()
    return lambda: float(function(data)["loss"]), optimizer


def seconds(function: Callable[[], Any]) -> tuple[float, float]:
    """Elapsed, and of the CPU by all threads."""
    start, cpu = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - start, time.process_time() - cpu


def ratio(of: list[tuple[float, float]], to: list[tuple[float, float]], which: int) -> float:
    return statistics.median(a[which] / b[which] for a, b in zip(of, to, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} CPUs; V = {arguments.rows:,}, batch {arguments.batch:,}")
    for update, clip in (
        ("exact", "adaptive_column"),
        ("lazy", "adaptive_column"),
        ("lazy", None),
    ):
        sides = [build(update, clip, on, arguments.rows, arguments.batch) for on in (False, True)]
        (plain, _), (observed, optimizer) = sides
        for step in (plain, observed) * 3:
            step()
        times: tuple[list[tuple[float, float]], ...] = ([], [])
        looks = []
        for turn in range(arguments.rounds):
            pair = [(0, plain), (1, observed)]
            for side, step in pair if turn % 2 else pair[::-1]:
                times[side].append(seconds(step))
            looks.append(seconds(optimizer.not_finite)[0])
        without, with_ = (statistics.median(elapsed for elapsed, _ in found) for found in times)
        look = statistics.median(looks)
        print(
            f"{update}, clip {clip}: {without * 1e3:.1f} ms a step, observed {with_ * 1e3:.1f}; "
            f"ratio {ratio(times[1], times[0], 0):.3f} in time, {ratio(times[1], times[0], 1):.3f} "
            f"in CPU time; "
            f"a look takes {look * 1e3:.2f} ms, every {LOOK_EVERY} steps "
            f"{look / LOOK_EVERY / without:.2%} of them",
            flush=True,
        )


if __name__ == "__main__":
    main()
