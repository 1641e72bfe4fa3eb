"""How long a user waits for the first step: building, tracing and running one batch of `fit`.

Our networks with CowClip against Merlin's stock DeepFM, on 26 Criteo-shaped fields and 13 numbers,
batch 1024. Each measurement is a process of its own, so that nothing is warm. Models take turns,
and ratios are within a round, so that a machine that changes its speed does not matter. Importing
TensorFlow and Merlin and making the model object are not counted.

    python benchmarks/bench_tracing.py [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import time

ROWS, BATCH = 300_000, 1024
STOCK = "stock DeepFM, adam"
OURS = ("lr", "fm", "wide_and_deep", "deepfm", "dcn", "dcn_v2", "dlrm")
VARIANTS = (STOCK, "stock DeepFM, LazyAdam", *OURS)


def first_fit(variant: str) -> tuple[float, float]:
    """Seconds by the clock and of the CPUs until the first `fit` of one batch is done, here."""
    from step_variants import MLP, WIDTH, batches, schema

    from merlin_cowclip.models import MODELS
    from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
    from merlin_cowclip.plugins._stack import mm, tf

    description = schema(ROWS)
    if variant in MODELS:
        model = MODELS[variant](description, embedding_dim=WIDTH, mlp=MLP)
        hyperparameters = Hyperparameters(BATCH, warmup_epochs=0.0)
        optimizer = CowClipOptimizer.for_model(model, hyperparameters)
    else:
        model = mm.DeepFMModel(description, embedding_dim=WIDTH, deep_block=mm.MLPBlock(list(MLP)))
        optimizer = "adam" if variant == STOCK else mm.LazyAdam(1e-4)
    model.compile(optimizer=optimizer, metrics=[])
    made = batches(ROWS, BATCH, number=1)
    signature = tf.nest.map_structure(  # the batch's size is unknown to the graph, as a loader's is
        lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), made[0]
    )
    data = tf.data.Dataset.from_generator(lambda: iter(made), output_signature=signature)
    wall, cpu = time.perf_counter(), time.process_time()
    model.fit(data, steps_per_epoch=1, verbose=0)
    return time.perf_counter() - wall, time.process_time() - cpu


def measured_elsewhere(variant: str) -> tuple[float, float]:
    command = [sys.executable, __file__, "--variant", variant]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    wall, cpu = done.stdout.split()[-2:]
    return float(wall), float(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variant", choices=VARIANTS, help="measure one, in this process")
    arguments = parser.parse_args()
    if arguments.variant:
        print(*first_fit(arguments.variant))
        return
    before = os.getloadavg()[0]
    found: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    for _ in range(arguments.rounds):
        for variant in VARIANTS:
            found[variant].append(measured_elsewhere(variant))
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python "
        f"{platform.python_version()}; load average {before:.1f} before, {os.getloadavg()[0]:.1f} "
        f"after (this benchmark's own is about 1)\nFirst fit of one batch of {BATCH:,}: 26 fields "
        f"of width 10, 13 numbers, MLP 3 x 400; medians of {arguments.rounds}"
    )
    print(f"{'':24}  {'seconds':>7}  {'CPU s':>6}  {'seconds / stock':>15}")
    for variant, times in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(a / b for (a, _), (b, _) in zip(times, found[STOCK], strict=True))
        label = variant if variant not in OURS else f"ours, {variant}"
        print(f"{label:24}  {wall:>7.1f}  {cpu:>6.1f}  {ratio:>15.2f}", flush=True)


if __name__ == "__main__":
    main()
