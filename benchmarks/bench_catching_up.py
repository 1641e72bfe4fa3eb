"""Rows that missed many steps: brought up to date at once, and by as many steps of the exact mode.

Both compiled by XLA, on 4,096 rows of width 10 at a time, in turn; CPU time of all threads, which
other processes on the machine disturb least; the least of five rounds. Beside it, the largest and
the 99th percentile of how far the two are apart, as a part of what a weight was, or of 1e-3.

Then all rows of a table of 26 Criteo-shaped fields, of width 10, and of its linear weights, after
40,000 steps at a batch of 1,024: each as late as its frequency has it, and without moments if no
batch held it. CPU time of user and system, and of a clock, what XLA compiles included.

    python benchmarks/bench_catching_up.py [--gaps 1 16 128 1000 10000] [--all 5000000]
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from merlin_cowclip.plugins.absent import absent_step
from merlin_cowclip.plugins.catching_up import catch_up
from merlin_cowclip.plugins.slow_mode import Adam, Rates

ROWS, WIDTH, FIRST = 4096, 10, 1000
RATE, L2 = 1e-4, 1e-5  # the paper's for the embeddings of Criteo at 1K
ADAM = Adam(0.9, 0.999, 1e-7, L2)


def some_rows() -> list[Any]:
    """Rows of a table in training, with moments between 1e-6 and 1e-2."""
    random = np.random.default_rng(0)
    root = 10.0 ** random.uniform(-6, -2, (ROWS, WIDTH))
    w, m = 0.01 * random.normal(size=root.shape), 0.3 * root * random.normal(size=root.shape)
    return [tf.constant(x, tf.float32) for x in (w, m, root**2)]


def both(gap: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Catching up with `gap` steps, and the steps themselves."""
    t = np.arange(1, FIRST + gap + 1, dtype=np.float64)
    rates = RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    total = Rates.of(tf.constant(np.concatenate([[0.0], np.cumsum(rates)])))
    rows, last = some_rows(), tf.fill([ROWS], FIRST)
    at_once = tf.function(catch_up.python_function, autograph=False, jit_compile=True)

    @tf.function(autograph=False, jit_compile=True)
    def step_by_step(w: tf.Tensor, m: tf.Tensor, v: tf.Tensor) -> Any:
        def body(step: tf.Tensor, *state: tf.Tensor) -> Any:
            moved = absent_step(*state, step, learning_rate=RATE, l2=L2)
            return step + 1, *moved

        end = FIRST + gap
        return tf.while_loop(lambda step, *_: step <= end, body, (FIRST + 1, w, m, v))[1:]

    return (
        lambda: at_once(*rows, last, tf.constant(FIRST + gap), total, ADAM),
        lambda: step_by_step(*rows),
    )


def nanoseconds(work: Callable[[], Any]) -> float:
    """CPU time of an element."""
    start = time.process_time()
    work()[0].numpy()
    return (time.process_time() - start) / (ROWS * WIDTH) * 1e9


def all_rows(rows: int) -> None:
    """Print what catching up all rows takes."""
    from step_variants import MLP, batches, let_rows_wait, schema

    from merlin_cowclip.models import deepfm
    from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters

    size, steps = 1024, 40_000
    model = deepfm(schema(rows), embedding_dim=WIDTH, mlp=MLP)
    values = Hyperparameters(size, warmup_epochs=0.0, l2=L2, embedding_lr=RATE)
    optimizer = CowClipOptimizer.for_model(model, values, update="deferred")
    model.compile(optimizer=optimizer, metrics=[], loss="binary_crossentropy")
    model.train_on_batch(*batches(rows, size, 1)[0])
    let_rows_wait(optimizer, rows, size, steps)
    for part in optimizer.optimizers[:2]:
        for spec in optimizer.table_specs:
            if waiting := part.waiting_of(spec.variable):
                untouched = waiting.last.numpy()[:, 0] == 0
                for moment in (part.get_slot(spec.variable, name) for name in ("m", "v")):
                    moment.assign(np.where(untouched[:, np.newaxis], 0, moment.numpy()))
    begin, clock = os.times(), time.perf_counter()
    optimizer.catch_up()
    clock, end = time.perf_counter() - clock, os.times()
    print(
        f"all {rows:,} rows after {steps:,} steps, {untouched.mean():.0%} of them in no batch: "
        f"{end.user - begin.user:.1f} s of CPU (user) and {end.system - begin.system:.1f} s "
        f"(system), {clock:.1f} s on a clock",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gaps", type=int, nargs="*", default=[1, 16, 128, 1000, 10_000])
    parser.add_argument("--all", type=int, nargs="*", default=[5_000_000], metavar="ROWS")
    arguments = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, TensorFlow "
        f"{tf.__version__}; {ROWS:,} rows of width {WIDTH}, λ {L2:g}, η {RATE:g}"
    )
    print(
        f"{'steps':>8} {'at once':>12} {'step by step':>14} {'ratio':>7} {'apart':>9} {'99 %':>9}"
    )
    before = np.maximum(np.abs(some_rows()[0]), 1e-3)
    for gap in arguments.gaps:
        at_once, step_by_step = both(gap)
        apart = np.abs(at_once()[0] - step_by_step()[0]) / before
        times = [(nanoseconds(at_once), nanoseconds(step_by_step)) for _ in range(5)]
        a, b = (min(column) for column in zip(*times, strict=True))
        print(
            f"{gap:>8,} {a:>9.1f} ns {b:>11.1f} ns {b / a:>7.1f} {apart.max():>9.1e} "
            f"{np.quantile(apart, 0.99):>9.1e}",
            flush=True,
        )
    for rows in arguments.all:
        all_rows(rows)


if __name__ == "__main__":
    main()
